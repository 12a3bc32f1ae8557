"""
data.py: every source of text becomes token ids on disk, memory-mapped; a batch is a function of (seed, step).

    python        every .py file of the running Python's standard library: real text without a download
    PATH          a text file, or a folder of them
    'PATTERN.bin' uint16 ids: llm.c's shards if the magic says so, else nanoGPT's headerless files
    fineweb:N     N shards of 100M GPT-2 tokens of FineWeb, fetched once into data/fineweb10B
    TASK          a task of tasks.py by its name: 6,000 rows to train on

Text is tokenised once into data/, each document after an end-of-text token, and split BY FILE: validation
takes whole files, up to a tenth of the bytes, in the order of their names' hash (where no file is that small,
the last tenth of the text). Shards say which they are: val in place of train in the name.
"""
import contextlib
import glob
import hashlib
import json
import os
import platform
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch

import tasks
from eval_niah import plant

FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
MAGIC = 20240520                                        # llm.c: 256 int32, this one first, then uint16 ids
tokenizers = {"bytes": (257, 256), "gpt2": (50257, 50256)}  # size of the vocabulary, end-of-text


def tokenizer(name):
    """bytes or gpt2 -> encode (bytes -> ids), decode (list of ids -> str). ValueError if there is no gpt2."""
    if name == "bytes":
        decode = lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace")
        return lambda b: np.frombuffer(b, np.uint8), decode
    import tiktoken
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as e:
        site = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
        files = " and ".join(f"{site}{f} as {hashlib.sha1((site + f).encode()).hexdigest()}"
                             for f in ("vocab.bpe", "encoder.json"))
        raise ValueError(f"tiktoken could not fetch GPT-2's vocabulary ({type(e).__name__}): put {files} in "
                         "a folder named in TIKTOKEN_CACHE_DIR, or use --tokenizer bytes") from None
    # Special tokens in a user's text are text: encode_ordinary knows none.
    return lambda b: gpt2.encode_ordinary(b.decode()), gpt2.decode


def text_files(name):
    """python, a file or a folder -> the root and its files, in the order of their names."""
    if name != "python" and Path(name).is_file():
        return Path(name).parent, [Path(name)]
    root = Path(sysconfig.get_paths()["stdlib"] if name == "python" else name)
    if not root.is_dir():
        raise ValueError("no such file, folder or task; name a text file, a folder of them, .bin shards, "
                         "python, or a task of tasks.py")
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = [f for f in inner if f[0] != "." and f not in ("site-packages", "dist-packages")]
        files += [Path(folder, f) for f in names if (f.endswith(".py") if name == "python" else f[0] != ".")]
    return root, sorted((f for f in files if f.is_file()), key=lambda f: f.relative_to(root).as_posix())


def text(name, tok, cache="data"):
    """Text -> training and validation ids, memory-mapped, and what they are. Tokenised on the first call."""
    root, files = text_files(name)
    names = [f.relative_to(root).as_posix() for f in files]
    sizes, sha = [], hashlib.sha256()
    for f, rel in zip(files, names):
        content = f.read_bytes()
        sizes.append(len(content))
        sha.update(b"%s %d " % (os.fsencode(rel), len(content)) + content)
    if not sum(sizes):
        raise ValueError("no text there, the file or folder is empty; name another")
    val, room = set(), sum(sizes) // 10
    for i in sorted(range(len(files)), key=lambda i: hashlib.sha256(os.fsencode(names[i])).digest()):
        if sizes[i] <= room:
            val.add(i)
            room -= sizes[i]

    folder = Path(cache, f"{Path(name).name}-{tok}-{sha.hexdigest()[:12]}")
    if not folder.exists():
        (encode, _), (_, eot), count = tokenizer(tok), tokenizers[tok], [0, 0]
        Path(cache).mkdir(parents=True, exist_ok=True)
        # Aside and renamed when it is whole; what is not goes with the temporary folder.
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            (aside := Path(temporary, "whole")).mkdir()
            with open(aside / "tokens.bin", "wb") as out:
                for i in sorted(range(len(files)), key=lambda i: i in val):
                    try:
                        ids = encode(files[i].read_bytes())
                    except UnicodeDecodeError:
                        raise ValueError(f"{files[i]} is not UTF-8: gpt2 needs it, bytes does not") from None
                    out.write(np.uint16([eot]).tobytes() + np.asarray(ids).astype(np.uint16).tobytes())
                    count[i in val] += 1 + len(ids)
            (aside / "count.json").write_text(json.dumps(count))
            with contextlib.suppress(OSError):              # another run may have been first
                aside.rename(folder)
    count = json.loads((folder / "count.json").read_text())
    tokens = np.memmap(folder / "tokens.bin", np.uint16, mode="r")
    cut = count[0] if count[1] else len(tokens) * 9 // 10
    info = {"data": name, "files": len(files), "bytes": sum(sizes), "sha256": sha.hexdigest(),
            "python": platform.python_version() if name == "python" else None,
            "bytes_per_token": sum(sizes) / len(tokens)}
    return [tokens[:cut]], [tokens[cut:]], info


def shard(path, vocab):
    """One .bin of ids, memory-mapped uint16: llm.c's if its magic says so, else nanoGPT's, with no header."""
    size, head, top = os.path.getsize(path), np.fromfile(path, np.int32, 256).tolist(), 0
    offset = 1024 if head[:1] == [MAGIC] else 0
    if offset and (len(head) < 256 or head[1] != 1 or size != 1024 + 2 * head[2]):
        raise ValueError(f"{path} is broken: version, count {head[1:3]} in {size} bytes; fetch it again")
    if size % 2 or size == offset:
        raise ValueError(f"{path} is no list of 16-bit token ids: it has {size} bytes")
    with open(path, "rb") as f:
        f.seek(offset)
        while len(part := np.fromfile(f, np.uint16, 1 << 22)):      # never the whole file at once
            top = max(top, int(part.max()))
    if top >= vocab:
        raise ValueError(f"{path} has the id {top} in a vocabulary of {vocab}: not this tokenizer's ids")
    return np.memmap(path, np.uint16, mode="r", offset=offset)


def fineweb(n, cache="data/fineweb10B"):
    """The paths of the first n training shards and of the validation shard; whole files only are kept."""
    Path(cache).mkdir(parents=True, exist_ok=True)
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, n + 1)]
    paths = [Path(cache, name) for name in names]
    for path in paths:
        if not path.exists():
            aside = Path(f"{path}.{os.getpid()}")           # another process may fetch it too
            try:
                torch.hub.download_url_to_file(FINEWEB + path.name, str(aside))
                shard(aside, tokenizers["gpt2"][0])
            except (OSError, ValueError) as e:
                aside.unlink(missing_ok=True)
                raise ValueError(f"{FINEWEB}{path.name} did not arrive whole ({e}); try again") from None
            os.replace(aside, path)
    return paths[1:], paths[:1]


def dataset(name, tok=None):
    """--data, --tokenizer -> lists of training and validation arrays, and what they are. Or a ValueError."""
    if not name.startswith("fineweb:") and not name.endswith(".bin"):
        train, val, info = text(name, tok or "bytes")
        return train, val, {**info, "tokenizer": tok or "bytes"}
    if name.startswith("fineweb:"):
        if not name[8:].isdigit() or not 1 <= int(name[8:]) <= 103:
            raise ValueError("fineweb:N takes 1 to 103 shards, as in fineweb:9")
        train, val = fineweb(int(name[8:]))
    else:
        to_val = Path(name).with_name(Path(name).name.replace("train", "val"))
        train, val = sorted(glob.glob(name)), sorted(glob.glob(str(to_val)))
        if not train or not val or train == val:
            raise ValueError(f"{len(train)} training and {len(val)} validation shards; name the latter as "
                             "the former, with val in place of train")
    tok = tok or "gpt2"
    train, val = ([shard(f, tokenizers[tok][0]) for f in part] for part in (train, val))
    # Of each file its length and start: a fingerprint that costs nothing at a hundred shards.
    sha = hashlib.sha256(b"".join(b"%d " % len(a) + a[:65536].tobytes() for a in train + val)).hexdigest()
    return train, val, {"data": name, "tokenizer": tok, "files": len(train + val), "sha256": sha,
                        "bytes": 2 * sum(map(len, train + val)), "bytes_per_token": None}


def validation(config, name=None):
    """A model's config -> the validation arrays of its own data, or of name, a --data. Or a ValueError."""
    if config["tokenizer"] not in tokenizers:
        raise ValueError(f"the run was on the task {config['tokenizer']}: name one that was on text")
    return dataset(name or config["data"], config["tokenizer"])[1]


def batch(tokens, L, rows, seed, step):
    """The rows (rows, L + 1) of a step: uniform windows, none across two arrays; of (seed, step) alone."""
    ends = np.cumsum([max(len(a) - L, 0) for a in tokens])
    starts = np.random.default_rng((seed, step)).integers(ends[-1], size=rows)
    pieces = []
    for i, start in zip(np.searchsorted(ends, starts, side="right"), starts):
        start += len(tokens[i]) - L - ends[i]
        pieces.append(tokens[i][start:start + L + 1])
    return torch.from_numpy(np.stack(pieces).astype(np.int64))


def windows(tokens, L, n):
    """n rows (n, L + 1), always the same, evenly over the arrays and in them."""
    tokens, pieces = [a for a in tokens if len(a) > L], []
    if not tokens:
        raise ValueError(f"no text of the {L + 1} tokens that a window needs: give more text")
    for i in range(n):
        a = tokens[i % len(tokens)]
        start = (len(a) - L) * i // n
        pieces.append(a[start:start + L + 1])
    return torch.from_numpy(np.stack(pieces).astype(np.int64))


def source(args, rows, held_out):
    """train.py's flags -> the function step -> the rows of that step, the validation rows, and what they are.
    Rows are x, y (n, L), -1 in y where nothing is to be predicted, and of a task pos, (n, L) or (n, L, N)."""
    name, pe, L = args.data, args.pe, args.L
    on_trees = name in tasks.names and name[-2:] in ("-b", "-d")
    if pe == "ape-grid" and name != "grid" or pe == "ape-tree" and not on_trees:
        raise ValueError(f"it has no positions for {pe}: name grid for ape-grid, and a task on trees, as "
                         "rotate-d, for ape-tree")
    if name in tasks.names:
        if args.tokenizer or args.needles:
            raise ValueError("a task has its own tokens: leave --tokenizer and --needles out")
        nd = pe in ("ape-grid", "ape-tree") or pe == "ndrope" and name == "grid"
        train = tasks.task(name, 6000, args.seed, False, nd)
        val = tasks.task(name, held_out, args.seed, True, nd)
        info = {"data": name, "tokenizer": name, "vocab": tasks.vocabulary(name), "L": train[0].shape[1],
                "ndim": 1 + (nd and name == "grid"), "bytes_per_token": None,
                "says": f"6,000 + {held_out:,} rows of {train[0].shape[1]} tokens"}

        def draw(step):
            which = np.random.default_rng((args.seed, step)).integers(6000, size=rows)
            return [part[which] for part in train]
        return draw, val, info

    if args.needles and L < 8:
        raise ValueError(f"--needles {args.needles:g}: a window of --L {L} is too short; 8 or more do")
    train, val, info = dataset(name, args.tokenizer)
    for part, arrays in (("training", train), ("validation", val)):
        if max(map(len, arrays)) <= L:
            raise ValueError(f"its {part} part has {max(map(len, arrays))} tokens in one piece, and a window "
                             f"of --L {L} needs one more than that: more text, or a smaller --L")
    vocab, eot = tokenizers[info["tokenizer"]]
    info |= {"vocab": vocab, "eot": eot, "L": L, "ndim": 1, "says":
             f"{info['files']} files, {info['bytes']:,} bytes, sha256 {info['sha256'][:12]}, "
             f"{sum(map(len, train)):,} + {sum(map(len, val)):,} tokens"}

    def draw(step):
        # Needles begin in short windows: an eighth of the run each in L/8, L/4 and L/2, of 16 or more.
        half = max(0, min(3 - 8 * step // args.steps, (L // 16).bit_length() - 1)) if args.needles else 0
        text = batch(train, L >> half, rows << half, args.seed, step)
        if args.needles:
            rng = np.random.default_rng((args.seed, step, 1))
            text = torch.from_numpy(plant(text, args.needles, rng, vocab))
        return text[:, :-1], text[:, 1:]
    text = windows(val, L, held_out)
    return draw, (text[:, :-1], text[:, 1:]), info
