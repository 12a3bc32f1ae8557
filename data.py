"""
data.py: every source of text becomes token ids on disk, memory-mapped, and a batch a function of (seed, step).
"""
import contextlib
import glob
import hashlib
import json
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np
import torch

FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
MAGIC = 20240520                                                    # of llm.c's shards: 256 int32, then uint16 ids
tokenizers = {"bytes": (257, 256), "gpt2": (50257, 50256)}          # vocabulary, end-of-text


def tokenizer(name):
    """bytes or gpt2 -> encode: bytes -> array of ids, decode: list of ids -> str."""
    if name == "bytes":
        return (lambda b: np.frombuffer(b, np.uint8)), lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace")
    import tiktoken
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as e:
        urls = ["https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/" + f for f in ("vocab.bpe", "encoder.json")]
        names = " and ".join(f"{u} as {hashlib.sha1(u.encode()).hexdigest()}" for u in urls)
        raise ValueError(f"--tokenizer gpt2 needs a vocabulary that tiktoken could not fetch ({type(e).__name__}): put {names} "
                         "into a folder and name it in TIKTOKEN_CACHE_DIR, or use --tokenizer bytes") from None
    # Special tokens in a user's text are text: encode_ordinary knows none.
    return (lambda b: gpt2.encode_ordinary(b.decode())), gpt2.decode


def text_files(name):
    """python, a file or a folder -> its root and the files, in the order of their names."""
    if name != "python" and Path(name).is_file():
        return Path(name).parent, [Path(name)]
    root = Path(sysconfig.get_paths()["stdlib"] if name == "python" else name)
    if not root.is_dir():
        raise ValueError("no such file or folder: name a text file, a folder of them, .bin shards, or python")
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = [f for f in inner if not f.startswith(".") and f not in ("site-packages", "dist-packages")]
        files += [Path(folder, f) for f in names if (f.endswith(".py") if name == "python" else not f.startswith("."))]
    return root, sorted((f for f in files if f.is_file()), key=lambda f: f.relative_to(root).as_posix())


def text(name, tok, cache="data"):
    """Text, tokenised once into cache/: the validation part is whole files, up to a tenth of the bytes, taken in the order
    of their names' hash; where no file is that small, the last tenth."""
    root, files = text_files(name)
    names = [f.relative_to(root).as_posix() for f in files]
    sizes, sha = [], hashlib.sha256(tok.encode())
    for f, rel in zip(files, names):
        b = f.read_bytes()
        sizes.append(len(b))
        sha.update(b"%s %d " % (rel.encode(), len(b)) + b)
    if not sum(sizes):
        raise ValueError("no text there: the file or folder is empty")
    val, room = set(), sum(sizes) // 10
    for i in sorted(range(len(files)), key=lambda i: hashlib.sha256(names[i].encode()).digest()):
        if sizes[i] <= room:
            val.add(i)
            room -= sizes[i]
    folder = Path(cache, f"{Path(name).name}-{tok}-{sha.hexdigest()[:12]}")
    if not folder.exists():
        encode, _ = tokenizer(tok)
        aside = Path(f"{folder}.{os.getpid()}")
        aside.mkdir(parents=True)
        count = [0, 0]
        with open(aside / "tokens.bin", "wb") as out:
            for part in (0, 1):
                for i in (i for i in range(len(files)) if (i in val) == part):
                    try:
                        ids = np.array([tokenizers[tok][1], *encode(files[i].read_bytes())], dtype=np.uint16)
                    except UnicodeDecodeError:
                        raise ValueError(f"{files[i]} is not UTF-8, which gpt2 needs: use --tokenizer bytes") from None
                    out.write(ids.tobytes())
                    count[part] += len(ids)
        (aside / "count.json").write_text(json.dumps(count))
        with contextlib.suppress(OSError):                          # another run was first
            aside.rename(folder)
    count = json.loads((folder / "count.json").read_text())
    tokens = np.memmap(folder / "tokens.bin", np.uint16, mode="r")
    cut = count[0] if count[1] else len(tokens) * 9 // 10
    return [tokens[:cut]], [tokens[cut:]], {"data": name, "files": len(files), "bytes": sum(sizes), "sha256": sha.hexdigest(),
                                            "python": platform.python_version() if name == "python" else None,
                                            "bytes_per_token": sum(sizes) / len(tokens)}


def shard(path, vocab):
    """One .bin of ids: llm.c's if its magic says so, else nanoGPT's, which has no header. Memory-mapped uint16."""
    size, head, top = os.path.getsize(path), np.fromfile(path, np.int32, 256).tolist(), 0
    offset = 1024 if head[:1] == [MAGIC] else 0
    if offset and (len(head) < 256 or head[1] != 1 or size != 1024 + 2 * head[2]):
        raise ValueError(f"{path} is a broken shard (version, count {head[1:3]} in {size} bytes): fetch it again")
    if size % 2 or size == offset:
        raise ValueError(f"{path} is no list of 16-bit token ids ({size} bytes)")
    with open(path, "rb") as f:
        f.seek(offset)
        while len(part := np.fromfile(f, np.uint16, 1 << 22)):      # never the whole file
            top = max(top, int(part.max()))
    if top >= vocab:
        raise ValueError(f"{path} has the id {top} and the vocabulary ends at {vocab - 1}: wrong tokenizer or format")
    return np.memmap(path, np.uint16, mode="r", offset=offset)


def fineweb(n, cache="data/fineweb10B"):
    """The first n training shards of 100M GPT-2 tokens each, and the validation shard; whole files only."""
    Path(cache).mkdir(parents=True, exist_ok=True)
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, n + 1))]
    for path in (Path(cache, name) for name in names):
        if not path.exists():
            try:
                torch.hub.download_url_to_file(FINEWEB + path.name, f"{path}.part")
                shard(f"{path}.part", tokenizers["gpt2"][0])
            except (OSError, ValueError) as e:
                Path(f"{path}.part").unlink(missing_ok=True)
                raise ValueError(f"{FINEWEB}{path.name} did not arrive whole ({e}): try again, what is here is kept")
            os.replace(f"{path}.part", path)
    return [Path(cache, name) for name in names[1:]], [Path(cache, names[0])]


def dataset(name, tok=None):
    """--data, --tokenizer -> training and validation arrays, and what they are. ValueError with a sentence."""
    bins = sorted(glob.glob(name)) if name.endswith(".bin") else []
    if not (bins or name.endswith(".bin") or name.startswith("fineweb:")):
        train, val, info = text(name, tok or "bytes")
        return train, val, {**info, "tokenizer": tok or "bytes"}
    tok = tok or "gpt2"
    if name.startswith("fineweb:"):
        if not name[8:].isdigit() or not 1 <= int(name[8:]) <= 103:
            raise ValueError("fineweb:N takes 1 to 103 shards, as in fineweb:9")
        train, val = fineweb(int(name[8:]))
    else:
        train, val = bins, sorted(glob.glob(str(Path(name).with_name(Path(name).name.replace("train", "val")))))
        if not train:
            raise ValueError("no such file: name .bin shards, or quote a pattern of them")
        if not val or val == train:
            raise ValueError("no validation shards: they are named like the training ones, with val in place of train")
    train, val = ([shard(f, tokenizers[tok][0]) for f in part] for part in (train, val))
    sha = hashlib.sha256(b"".join(a[: 1 << 16].tobytes() + b"%d" % len(a) for a in train + val)).hexdigest()
    return train, val, {"data": name, "tokenizer": tok, "files": len(train + val), "bytes_per_token": None,
                        "bytes": 2 * sum(map(len, train + val)), "sha256 of each file's start and length": sha}


def batch(tokens, L, rows, seed, step):
    """The rows (rows, L + 1) of a step: uniform windows, a function of seed and step alone; none crosses a shard."""
    room = np.cumsum([max(len(a) - L, 0) for a in tokens])
    starts = np.random.default_rng((seed, step)).integers(room[-1], size=rows)
    shards = np.searchsorted(room, starts, side="right")
    return torch.from_numpy(np.stack([tokens[s][i - room[s] + len(tokens[s]) - L:][: L + 1]
                                      for s, i in zip(shards, starts)]).astype(np.int64))
