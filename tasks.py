"""
tasks.py: synthetic tasks on sequences and trees, those of the APE paper [1], and one on grids.

    copy, repeat, reverse             x -> x, x x, x backwards
    tree-copy                         x -> x
    rotate    (r (p a b) c)           -> (p go(a) (r go(b) go(c))), go being rotate itself; a tree whose left
                                      child is a leaf stays as it is
    c3        leaves 1, 2, 3          -> one step of reduction in the cyclic group of order 3, with unit 1:
                                      every (f leaf leaf) becomes the product
    op        (code pointer tree)     -> get: the subtree whose root the pointer names; swap: it, with its
                                      two children exchanged; cut: the tree, that subtree now a leaf with
                                      the pointer's symbol; keep: the tree
    grid      h rows of w symbols, then queries, an offset (down, right) at a cell each
                                      -> the symbol at that offset from the cell

A source is breadth-first, always; the target of a tree task is breadth-first (rotate-b) or depth-first
(rotate-d), and both have the same trees. A random tree of a depth has one child of depth - 1, the other of a
uniform smaller one, on random sides; a leaf's depth is 1. In op no symbol occurs twice in a tree.

The paper has an encoder and a decoder. Here both are one causal sequence, source then target, for the GPT of
train.py: symbols are 1 ... S in the source and S + 1 ... 2 S in the target, 0 is padding, and positions start
again at the target, or are each node's own path. Nothing separates the two: the target's first token is given
and is the boundary (only copy has an SOS, and an EOS to predict). Those after it are predicted, each from the
tokens before it; targets are -1 everywhere else, which the GPT's loss leaves out. So exp(loss) on a held-out
set is the teacher-forced perplexity of the target after its given token.

    idx, targets, pos = task("rotate-d", 6000, seed=0)          then GPT(idx, targets, pos), rows of them
    task("rotate-d", 2000, seed=0, held_out=True)               shares no source with any training set
    idx, targets (n, T)    pos (n, T), or with nd=True (n, T, depth): 0 left, 1 right, -1 past the end

Whether a source is held out, a quarter of all are, depends on its hash alone: not on the seed, not on n.
Chosen here: op's pointers name inner nodes, and its codes are symbols of their own, never a leaf's.

The grid is not the paper's. A sample is its symbols, row by row, then 64 queries, each the token of an offset
with the position of a cell: with nd=True (row, column), pos (n, T, 2), else the index row * w + column. A
query's target stands at the query itself and is one of the symbols 1 ... S. The 16 offsets are 1 or 2 steps
along an axis or a diagonal; pairs of cell and offset are uniform among those whose answer lies inside. One
head can find it at a constant difference of (row, column), in a grid of any size and from anywhere (pos + a
constant); the difference of the index is another for each width.
Held out are cells to ask from, those with (row + 3 column) mod 8 < 2 in a grid of any size: a quarter of each
row if 8 divides w, of each column if 8 divides h. The symbols of held-out grids are drawn apart as well.

[1] Kogkalidis et al. 2024, Algebraic Positional Encodings, https://arxiv.org/abs/2312.16045
$ python tasks.py            a sample of every task
$ python tasks.py rotate     a few of one (or grid: a few queries), and a row as the GPT reads it
"""
import argparse
import hashlib

import numpy as np
import torch

SEQUENCES, TREES = ("copy", "repeat", "reverse"), ("tree-copy", "rotate", "c3", "op")
KINDS = SEQUENCES + TREES + ("grid",)
names = SEQUENCES + tuple(f"{tree}-{order}" for tree in TREES for order in "bd") + ("grid",)
QUERIES, OFFSETS = 64, [(s * y, s * x) for s in (1, 2) for y in (-1, 0, 1) for x in (-1, 0, 1) if y or x]
SYMBOLS = {                     # leaves (or what a sequence is made of), operators, and others, in this order
    "copy": (20, 0, ["SOS", "EOS"]), "repeat": (19, 0, []), "reverse": (19, 0, []), "tree-copy": (10, 10, []),
    "rotate": (10, 10, []), "c3": (3, 1, []), "op": (64, 60, ["get", "swap", "cut", "keep"]),
    "grid": (16, 0, [f"({y:+},{x:+})" for y, x in OFFSETS])}


def parts(name):
    """rotate-d -> rotate, d; copy -> copy, ''. ValueError for what is no task."""
    if name not in names:
        raise ValueError(f"{name} is no task; name one of {', '.join(names)}")
    return (name, "") if name in KINDS else tuple(name.rsplit("-", 1))


def words(kind):
    """How the symbols 0 ... S of copy, rotate, ... are printed: leaves 1 2 3, operators f1 f2 f3."""
    leaves, operators, others = SYMBOLS[kind]
    return ["_"] + [f"{i + 1}" for i in range(leaves)] + [f"f{i + 1}" for i in range(operators)] + others


def vocabulary(name):
    """The number of token ids of a task: padding, the source's S symbols, the target's S (grid has none)."""
    return len(words(name)) if name == "grid" else 2 * len(words(parts(name)[0])) - 1


# -----------------------------------------------------------------------------------------------------------
# trees: a leaf is its symbol, an inner node is (symbol, left, right)

def depth_first(tree, path=()):
    """[(symbol, path)], each node before its children; the root's path is (), then 0 is left and 1 right."""
    if isinstance(tree, int):
        return [(tree, path)]
    symbol, left, right = tree
    return [(symbol, path)] + depth_first(left, path + (0,)) + depth_first(right, path + (1,))


def breadth_first(tree):
    """[(symbol, path)], level by level: the sort is stable, so each stays in its order from left to right."""
    return sorted(depth_first(tree), key=lambda node: len(node[1]))


def shape(rng, depth):
    """A random tree of that depth, with 0 for every symbol."""
    if depth == 1:
        return 0
    children = shape(rng, depth - 1), shape(rng, int(rng.integers(1, depth)))
    return 0, *(children if rng.random() < 0.5 else children[::-1])


def label(tree, leaves, operators):
    """A shape with its symbols from two iterators."""
    if isinstance(tree, int):
        return next(leaves)
    return next(operators), label(tree[1], leaves, operators), label(tree[2], leaves, operators)


def rotate(tree):
    match tree:
        case r, (p, a, b), c:
            return p, rotate(a), (r, rotate(b), rotate(c))
    return tree


def reduce(tree):
    match tree:
        case _, int(a), int(b):
            return (a - 1 + b - 1) % 3 + 1
        case symbol, left, right:
            return symbol, reduce(left), reduce(right)
    return tree


def find(tree, pointer):
    """The subtree with that operator at its root, or None."""
    match tree:
        case symbol, left, right:
            return tree if symbol == pointer else find(left, pointer) or find(right, pointer)


def cut(tree, pointer):
    match tree:
        case symbol, left, right:
            return symbol if symbol == pointer else (symbol, cut(left, pointer), cut(right, pointer))
    return tree


# -----------------------------------------------------------------------------------------------------------
# samples, and the rows that a GPT reads

def draw(kind, rng, size):
    """A source and its target, two lists or two trees; None for a tree with more nodes than symbols."""
    leaves, operators, _ = SYMBOLS[kind]
    first_other = leaves + operators + 1
    if kind in SEQUENCES:
        x = rng.integers(1, leaves + 1, size).tolist()
        x = [first_other, *x, first_other + 1] if kind == "copy" else x
        return x, {"copy": x, "repeat": x + x, "reverse": x[::-1]}[kind]
    tree, again = shape(rng, size), kind != "op"                # again: whether a symbol may occur again
    n = len(depth_first(tree)) // 2                             # operators; leaves are one more
    if not again and (n + 1 > leaves or n > operators):
        return None
    inner = leaves + 1 + rng.choice(operators, n, replace=again)
    tree = label(tree, iter((1 + rng.choice(leaves, n + 1, replace=again)).tolist()), iter(inner.tolist()))
    if kind == "op":
        code, pointer = int(rng.integers(4)), int(rng.choice(inner))
        symbol, left, right = find(tree, pointer)
        targets = (symbol, left, right), (symbol, right, left), cut(tree, pointer), tree
        return (first_other + code, pointer, tree), targets[code]
    return tree, {"tree-copy": lambda x: x, "rotate": rotate, "c3": reduce}[kind](tree)


def samples(kind, n, seed, held_out=False, size=None):
    """n sources with their targets. size: see task. A target of one token would leave nothing to predict."""
    mean, std, longest = size or ((32, 3, 48) if kind in SEQUENCES else (5, 1, 40))
    rng, found = np.random.default_rng(seed), []
    for _ in range(1000 + 100 * n):
        pair = draw(kind, rng, max(2, int(rng.normal(mean, std))))
        if not pair or isinstance(pair[1], int):
            continue
        if len(pair[0] if kind in SEQUENCES else depth_first(pair[0])) <= longest:
            if held_out == (hashlib.sha256(repr(pair[0]).encode()).digest()[0] < 64):
                found.append(pair)
        if len(found) == n:
            return found
    raise ValueError(f"{kind}: size {mean} +- {std} gave {len(found)} of {n} samples with at most {longest} "
                     "tokens, and symbols enough for them; try another size")


def grid(n, seed, held_out=False, nd=False, size=None):
    """task("grid", ...)."""
    h, w = size = size or (8, 8)
    rng, S = np.random.default_rng([seed, held_out]), SYMBOLS["grid"][0]
    cells = np.argwhere(np.ones(size))                                  # (h w, 2), row by row
    answers = cells[:, None] + OFFSETS                                  # (h w, 16, 2): cells, or outside
    inside = ((0 <= answers) & (answers < size)).all(-1)
    askers = (cells @ (1, 3) % 8 < 2) == held_out                       # (h w,)
    pairs = np.argwhere(inside & askers[:, None])                       # of a cell's index and an offset's
    cell, offset = pairs[rng.integers(len(pairs), size=(n, QUERIES))].transpose(2, 0, 1)
    symbols = rng.integers(1, S + 1, (n, h * w))
    answer = np.take_along_axis(symbols, answers[cell, offset] @ (w, 1), axis=1)
    index = np.hstack((np.tile(np.arange(h * w), (n, 1)), cell))        # (n, T)
    targets = np.hstack((np.full_like(symbols, -1), answer))
    idx = np.hstack((symbols, S + 1 + offset))
    return torch.from_numpy(idx), torch.from_numpy(targets), torch.from_numpy(cells[index] if nd else index)


def task(name, n, seed, held_out=False, nd=False, size=None):
    """n rows of a task in `names` -> idx, targets (n, T) and pos (n, T), int64.
    nd: pos in more dimensions, a tree's paths (n, T, depth) or a grid's cells (n, T, 2).
    Rows are padded to the longest of the n: idx 0, targets -1, pos 0, or the path of the root.
    size (mean, std, longest): the length of a sequence, SOS and EOS not counted, or the depth of a tree is
    normal, truncated to an integer, at least 2; a source of more than `longest` tokens is drawn again. If not
    given, (32, 3, 48) and (5, 1, 40); the paper's are (100, 10, inf) and (7, 1, inf). Of a grid it is (h, w),
    (8, 8) if not given.
    ValueError for a name that is no task, nd of a sequence, or a size that has no n samples."""
    kind, order = parts(name)
    if kind == "grid":
        if size and not (len(size) == 2 and min(size) >= 2):
            raise ValueError(f"grid: its size is (rows, columns), 2 or more each, and not {size}")
        return grid(n, seed, held_out, nd, size)
    if nd and not order:
        raise ValueError(f"{name} has no positions of more dimensions: they are those of a sequence")
    orders = {"b": breadth_first, "d": depth_first, "": lambda x: [(symbol, ()) for symbol in x]}
    read, write, S = orders["b" if order else ""], orders[order], len(words(kind)) - 1
    pairs = [(read(source), write(target)) for source, target in samples(kind, n, seed, held_out, size)]
    T = max(len(source) + len(target) for source, target in pairs) - 1      # the last token predicts nothing
    depth = max(len(path) for pair in pairs for line in pair for _, path in line)

    def positions(line):
        return [path + (-1,) * (depth - len(path)) for _, path in line] if nd else [*range(len(line))]

    idx, targets = np.zeros((n, T), np.int64), np.full((n, T), -1)
    pos = np.full((n, T, depth), -1) if nd else np.zeros((n, T), np.int64)
    for i, (source, target) in enumerate(pairs):
        tokens = [symbol for symbol, _ in source] + [S + symbol for symbol, _ in target]
        given, end = len(source), len(tokens) - 1
        idx[i, :end] = tokens[:-1]
        targets[i, given:end] = tokens[given + 1:]              # the given token predicts the target's second
        pos[i, :end] = (positions(source) + positions(target))[:-1]
    return torch.from_numpy(idx), torch.from_numpy(targets), torch.from_numpy(pos)


# -----------------------------------------------------------------------------------------------------------
def text(x, word):
    """A sequence as its words, a tree as brackets."""
    if isinstance(x, int):
        return word[x]
    inside = " ".join(text(part, word) for part in x)
    return f"({inside})" if isinstance(x, tuple) else inside


if __name__ == "__main__":
    ap = argparse.ArgumentParser(usage="python tasks.py [rotate]")
    ap.add_argument("task", nargs="?", type=lambda name: parts(name)[0] if name in names else name,
                    help=f"one of {', '.join(KINDS)}; if not given, all of them")
    args = ap.parse_args()
    if args.task not in (None, *KINDS):
        ap.error(f"{args.task} is no task; name one of {', '.join(KINDS)}")
    for kind in (args.task,) if args.task else KINDS:
        word, many = words(kind), 5 if args.task else 1
        # Small ones, to be read.
        size = (8, 2, 12) if kind in SEQUENCES else (4, 1, 12) if kind in TREES else (4, 6)
        print(f"{kind}, {len(word) - 1} symbols")
        if kind == "grid":
            h, w = size
            idx, targets, cells = (t[0].tolist() for t in task(kind, 1, 3, nd=True, size=size))
            for row in range(h):
                print("     " + "".join(f"{word[i]:4}" for i in idx[row * w:][:w]))
            for i, cell, answer in list(zip(idx, cells, targets))[h * w:][:many]:
                print(f"     {word[i]} from row {cell[0]}, column {cell[1]}\n  -> {word[answer]}")
        else:
            for source, target in samples(kind, many, 3, size=size):
                print(f"     {text(source, word)}\n  -> {text(target, word)}")
    for name in (name for name in names if args.task and parts(name)[0] == kind):
        shown = slice(h * w - 3, h * w + 6) if kind == "grid" else slice(None)
        idx, targets, pos = (t[0, shown].tolist() for t in task(name, 1, 3, size=size))
        word = words(kind) + [w + "'" for w in words(kind)[1:]]
        lines = {"token": [word[i] for i in idx], "position": pos,
                 "predicts": [word[i] if i > 0 else "." for i in targets]}
        if kind not in SEQUENCES:
            pos = task(name, 1, 3, nd=True, size=size)[2][0, shown].tolist()
            lines["or cell" if kind == "grid" else "or path"] = [
                f"({cell[0]}, {cell[1]})" if kind == "grid" else
                "".join("LR"[step] for step in cell if step >= 0) or "()" for cell in pos]
        what = "the end of the grid and queries" if kind == "grid" else "what is read (' marks the target)"
        print(f"\nthe first as {name}: {what}, where, and what it shall predict")
        width = max(len(str(cell)) for cells in lines.values() for cell in cells) + 2
        for head, cells in lines.items():
            print(f"  {head:8}" + "".join(f"{cell:>{width}}" for cell in cells))
