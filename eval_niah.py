"""
eval_niah.py: needle in a haystack: is a token found again, at any depth and past the trained length?

    needle   key value       two tokens in a text, at a depth of 0 (its start) to 1 (just before the query)
    query    key             the prompt's last token, a verbatim prefix of the needle: the value follows

Keys and values are ids that text hardly has: the 16 below end-of-text are values, the 16 below those keys (of
bytes: 240..255 and 224..239, which no ASCII text has). Each row and each prompt pairs them anew.

    plant      rows (n, L + 1) of training text, needles in a share of them: up to two fifths of the tokens
               are pairs, few or many, each met two to four times at random places: every repeat is a query
    needle     a prompt of exactly L tokens: a needle, distractors (others' keys and values), the query
    passkey    the same for models that have read text only: a sentence with five digits

The answer is scored by teacher forcing, without decoding: right if each token of it is the argmax. Chance is
a guess among the values in the prompt, 1 / (1 + distractors): what a model gets that sees needles and cannot
tell keys apart. The control has the text that was there in the needle's place: the answer is nowhere in it, a
guess among all values is right once in 16, and more would be a leak. Prompts are functions of (seed, length,
depth, trial) alone: every encoding and every scaling gets the same ones.

The map is G. Kamradt's, https://github.com/gkamradt/LLMTest_NeedleInAHaystack, the passkey that of Mohtashami
and Jaggi 2023, https://arxiv.org/abs/2305.16300, as a sentence to complete.
$ python eval_niah.py out/rope-s0 out/lerope-s0    tables of scaling and length; niah.png in each run's folder
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

K = 16                                                      # symbols: so many keys, so many values


def draw(n, pairs, rng, vocab):
    """n rows of keys and of values, (n, pairs) each, none twice in a row: at most K pairs."""
    symbols = np.tile(np.arange(K), (n, 1))
    keys, values = (rng.permuted(symbols, axis=1)[:, :pairs] for _ in range(2))
    return keys + vocab - 1 - 2 * K, values + vocab - 1 - K


def plant(rows, share, rng, vocab):
    """Rows (n, W) of training text -> (n, W), a copy, about that share of its rows with needles in them.
    ValueError if share is not in [0, 1] or W is less than 9."""
    n, W = (rows := np.asarray(rows)).shape
    if not 0 <= share <= 1 or W < 9:
        raise ValueError(f"needles in a share of {share} of rows of {W} tokens: the share must be in [0, 1], "
                         "and a row have 9 tokens or more")
    S = max(2, min(W // 5, 4 * K))                          # places in a row for needles and queries
    most = min(S // 2, K)
    keys, values = draw(n, most, rng, vocab)
    pairs = rng.integers(min(2, most), most, (n, 1), endpoint=True)
    met = rng.integers(2, np.clip(S // pairs, 2, 4), (n, 1), endpoint=True)        # times, each pair of a row
    which = rng.permuted(np.where(np.arange(S) < pairs * met, np.arange(S) % pairs, -1), axis=1)
    # S of W - S places, at random; each is moved up by the number before it, so that no two overlap.
    place = np.sort(rng.random((n, W - S)).argsort(axis=1)[:, :S], axis=1) + np.arange(S)
    row, at = np.nonzero(which >= 0)
    place, which, planted = place[row, at], which[row, at], rows.copy()
    planted[row, place], planted[row, place + 1] = keys[row, which], values[row, which]
    return np.where(rng.random((n, 1)) < share, planted, rows)


def needle(text, L, depth, distractors, rng, vocab):
    """A prompt out of text (N,) -> ids (L,), the control's ids (L,), answer (1,), depth as placed.
    ValueError if so many needles are not sure to find room."""
    if L < 3 * distractors + 6:
        raise ValueError(f"--distractors {distractors}: not sure to find room in {L} tokens; ask for fewer")
    start, at, free = rng.integers(len(text) - L + 1), round(depth * (L - 3)), np.arange(L - 2)
    control = text[start:start + L].astype(np.int64)
    control -= 2 * K * ((control >= vocab - 1 - 2 * K) & (control < vocab - 1))     # stray keys and values
    (key, *keys), (value, *values) = (ids[0] for ids in draw(1, 1 + distractors, rng, vocab))
    control[-1], last = key, at
    for pair in zip(keys, values):
        free = free[abs(free - last) > 1]
        last = rng.choice(free)
        control[last:last + 2] = pair
    ids = control.copy()
    ids[at:at + 2] = key, value
    return ids, control, np.array([value]), at / (L - 3)


def passkey(text, L, depth, rng, encode):
    """The same with sentences -> ids, control, answer (A,), depth. The L tokens end in all of the answer but
    its last: a space and five digits, drawn until they are as many tokens as is usual."""
    key = ()
    while len(key) != len(encode(b" 71432")):
        key = encode(b" %d" % rng.integers(10_000, 100_000))
    parts = encode(b" The pass key is"), key, encode(b". Remember it."), key, encode(b" is the pass key.")
    hidden = np.concatenate(parts)
    end = np.concatenate((encode(b" What is the pass key? The pass key is"), key[:-1]))
    room = L - len(hidden) - len(end)
    if room < 1:
        raise ValueError(f"--form passkey: its sentences do not fit in {L} tokens; ask for longer --lengths")
    start, at = rng.integers(len(text) - L + 1), round(depth * room)
    control = np.concatenate((text[start:start + L - len(end)], end)).astype(np.int64)
    ids = control.copy()
    ids[at:at + len(hidden)] = hidden
    return ids, control, np.asarray(key, np.int64), at / room


@torch.no_grad()
def score(model, ids, answers, tokens=16_384):
    """ids (B, L), ending in all of the answer but its last token, and answers (B, A) -> is each of its tokens
    the argmax (B,), their mean log-probability (B,), nats. About `tokens` ids go through at a time."""
    right, logprob, rows, A = [], [], max(1, tokens // ids.shape[1]), answers.shape[1]
    rho = model.pe(torch.arange(ids.shape[1]))
    for x, y in zip(ids.split(rows), answers.split(rows)):
        x = model.embed(x)                                                          # (rows, L, D)
        for block in model.blocks:
            x = block(x, rho, model.pe.temperature)
        logits = model.head(model.norm(x[:, -A:])).float()                          # (rows, A, V)
        right.append((logits.argmax(-1) == y).all(1))
        logprob.append(logits.log_softmax(-1).gather(-1, y[..., None]).mean((1, 2)))
    return torch.cat(right), torch.cat(logprob)


def cell(model, prompts):
    """Prompts of one length -> accuracy, the control's, mean log-probability, mean depth as placed."""
    ids, controls, answers, placed = map(np.stack, zip(*prompts))
    x, y = np.concatenate((ids, controls)), np.tile(answers, (2, 1))
    found = score(model, torch.from_numpy(x), torch.from_numpy(y))
    (accuracy, control), (logprob, _) = (v.view(2, -1).double().mean(1).tolist() for v in found)
    return accuracy, control, logprob, placed.mean().item()


def draw_maps(maps, lengths, L, title, path):
    """maps: scaling -> accuracy (depths, lengths); a line where the lengths pass the trained one."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(1.5 + (1 + 0.4 * len(lengths)) * len(maps), 3.6), layout="constrained")
    axes = fig.subplots(1, len(maps), sharey=True, squeeze=False)[0]
    for ax, (name, accuracy) in zip(axes, maps.items()):
        image = ax.imshow(accuracy, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto",
                          extent=(-0.5, len(lengths) - 0.5, 1, 0))                  # depth 0 at the top
        ax.axvline(sum(n <= L for n in lengths) - 0.5, color="black", lw=3)
        ax.set(title=name, xlabel="length, tokens", xticks=range(len(lengths)), xticklabels=lengths)
    axes[0].set_ylabel("depth of the needle"), fig.suptitle(title)
    fig.colorbar(image, ax=axes, label="accuracy")
    fig.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------------------------
def listed(text):
    """An argparse type: 1,2,4,8 -> [1, 2, 4, 8]."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text} is no list of whole numbers above 0; try 1,2,4,8")
    return sorted({int(part) for part in text.split(",")})


def main():
    from data import dataset, tokenizer, tokenizers
    from scaling import METHODS, extend
    from train import load, number, read_checkpoint
    known, count = ["none", *METHODS][:-1], number(int, 1, 10**6, 20)               # longrope needs a table
    ap = argparse.ArgumentParser(usage="python eval_niah.py CHECKPOINT... [flags; --help explains them]",
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    ap.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="runs of train.py with --needles")
    ap.add_argument("--lengths", type=listed, default="1,2,4,8", help="multiples of the trained length")
    ap.add_argument("--depths", type=count, default=11, help="how many, evenly from 0 to 1")
    ap.add_argument("--trials", type=count, default=20, help="prompts for each length and depth")
    ap.add_argument("--scaling", default="none,linear,ntk,ntk_by_parts,yarn", help="of " + ", ".join(known))
    ap.add_argument("--form", choices=("needle", "passkey"), default="needle", help="passkey: for text only")
    ap.add_argument("--distractors", type=number(int, 0, K - 1, 3), default=3, help="needles beside the one")
    ap.add_argument("--data", default="python", help="where the haystack comes from, as in train.py")
    ap.add_argument("--seed", type=number(int, 0, 2**63, 0), default=0, help="of the prompts")
    ap.add_argument("--out", help="JSON lines, one a cell; niah.jsonl in the first run's folder if not given")
    args = ap.parse_args()

    # What is wrong is told here, before the first forward pass.
    methods, is_needle = args.scaling.split(","), args.form == "needle"
    if not set(methods) <= set(known):
        ap.error(f"--scaling {args.scaling}: must be one or more of {','.join(known)}")
    try:
        runs, models = ([f(path) for path in args.checkpoints] for f in (read_checkpoint, load))
    except ValueError as e:
        ap.error(f"{e}")
    kinds = [model.config.get("tokenizer") for model in models]
    for path, kind in zip(args.checkpoints, kinds):
        if kind not in tokenizers:
            ap.error(f"{path} was not trained on text: a haystack needs a run of train.py --data")
        if kind != kinds[0]:
            ap.error(f"{path} reads {kind}, {args.checkpoints[0]} {kinds[0]}: evaluate one at a time")

    def prompts(length, i, depth, trials):
        for trial in range(trials):
            rng = np.random.default_rng((args.seed, length, i, trial))
            yield (needle(text, length, depth, args.distractors, rng, tokenizers[kinds[0]][0]) if is_needle
                   else passkey(text, length, depth, rng, encode))

    trained, part = [model.config["L"] for model in models], "" if is_needle else "-passkey"
    folders = [Path(path) if Path(path).is_dir() else Path(path).parent for path in args.checkpoints]
    longest, out = max(trained) * args.lengths[-1], Path(args.out or folders[0] / f"niah{part}.jsonl")
    try:
        text, encode = max(dataset(args.data, kinds[0])[1], key=len), tokenizer(kinds[0])[0]
        if longest > len(text):
            raise ValueError(f"{len(text)} tokens to validate on, fewer than {longest}; give more text")
        next(prompts(min(trained) * args.lengths[0], 0, 0.0, 1))
        for model in (model for model in models if hasattr(model.pe, "theta")):
            [extend(model.pe, method, 1, model.config["L"]) for method in methods if method != "none"]
    except (ValueError, OSError) as e:
        ap.error(f"--data {args.data} --lengths {','.join(map(str, args.lengths))}: {e}")
    try:
        log = open(out, "w", buffering=1)
    except OSError as e:
        ap.error(f"--out {out}: cannot be written ({e.strerror}); name another file")

    chance, live = 1 / (1 + args.distractors) if is_needle else 1 / 90_000, sys.stderr.isatty()
    for path, folder, run, model, L in zip(args.checkpoints, folders, runs, models, trained):
        pe, name, lengths, maps = model.pe, model.config["pe"], [s * L for s in args.lengths], {}
        turns = hasattr(pe, "theta") and bool(pe.theta().any())
        if is_needle and not run["args"].get("needles"):
            print(f"{path} was trained without --needles: expect chance, or ask for --form passkey")
        if not turns:
            print(f"{path}: {name} has no frequencies to scale, its one row is none")
        print(f"{path}: {name}, trained at {L} tokens; accuracy over {args.depths} depths x {args.trials} "
              "trials / at the worst depth / control")
        print(f"{'tokens':13}" + "".join(f"{length:17}" for length in lengths))
        for method in methods if turns else ["none"]:
            table = np.zeros((2, args.depths, len(lengths)))                        # accuracy, control
            for j, (s, length) in enumerate(zip(args.lengths, lengths)):
                model.pe = pe if method == "none" else extend(pe, method, s, L)
                for i, depth in enumerate(np.linspace(0, 1, args.depths).tolist()):
                    status = f"\r{method}, {length} tokens, depth {depth:.2f}\x1b[K"
                    print(status * live, end="", file=sys.stderr, flush=True)
                    found = cell(model, prompts(length, i, depth, args.trials))
                    table[:, i, j] = found[:2]
                    log.write(json.dumps({
                        "checkpoint": path, "pe": name, "form": args.form, "scaling": method, "s": s,
                        "length": length, "depth": depth, "trials": args.trials, "chance": chance,
                        **dict(zip(("accuracy", "control", "logprob", "placed"), found))}) + "\n")
            print("\r\x1b[K" * live, end="", file=sys.stderr, flush=True)
            maps[method], control = table
            row = zip(maps[method].mean(0), maps[method].min(0), control.mean(0))
            print(f"{method:13}" + "".join(f"{'%.2f/%.2f/%.2f' % v:>17}" for v in row), flush=True)
        print(f"{'chance':13}" + f"{chance:17.2f}" * len(lengths))
        draw_maps(maps, lengths, L, f"{path}: {args.form}; line: trained length", folder / f"niah{part}.png")


if __name__ == "__main__":
    main()
