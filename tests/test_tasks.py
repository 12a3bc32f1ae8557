"""
The tasks: what the GPT would read, against checkers that know no nested trees.

Here a tree is a table {path: symbol} with paths as strings of 0 and 1: sorted, its symbols are in depth-first
order. The checkers move paths, rewrite strings and look products up; they see tensors only.
A grid is a table {row + column i: symbol}, and an offset the complex number that its token's word says.
"""
import collections
import functools
import math
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tasks
from train import GPT

TREES = [name for name in tasks.names if name[-2] == "-"]
OPERATORS = {"tree-copy": range(11, 21), "rotate": range(11, 21), "c3": range(4, 5), "op": range(65, 129)}
SMALLEST = {"copy": 22, "repeat": 19, "reverse": 19, "tree-copy": 20, "rotate": 20, "c3": 4, "op": 128}
kind = lambda name: name[:-2] if name in TREES else name


@functools.cache
def rows(name, seed=0, held_out=False, n=1000):
    return tasks.task(name, n, seed, held_out)


def decode(name, idx, targets):
    """A row -> the symbols of its source, and of its target; the latter is [] if it is one token only."""
    S = SMALLEST[kind(name)]
    idx, targets = ([t for t in row.tolist() if t > 0] for row in (idx, targets))
    source, seen = [t for t in idx if t <= S], [t - S for t in idx if t > S]
    assert [t - S for t in targets] == (seen + [targets[-1] - S] if seen else [])[1:]
    return source, seen + [targets[-1] - S] if seen else []


def table(symbols, inner, depth_first):
    """The tree of a linearisation; inner(i, symbol) says whether the i-th symbol has children."""
    tree, open_paths = {}, [""]
    for i, symbol in enumerate(symbols):
        path = open_paths.pop(0)
        tree[path] = symbol
        if inner(i, symbol):
            children = [path + "0", path + "1"]
            open_paths = children + open_paths if depth_first else open_paths + children
    assert not open_paths
    return tree


def below(tree, path):
    return {p[len(path):]: symbol for p, symbol in tree.items() if p.startswith(path)}


# ------------------------------------------------------------------------ what each tree becomes, from tables
def rotated(tree):
    out, work = {}, [("", "")]
    while work:
        p, q = work.pop()
        if p + "00" in tree:
            out[q], out[q + "1"] = tree[p + "0"], tree[p]
            work += [(p + "00", q + "0"), (p + "01", q + "10"), (p + "1", q + "11")]
        else:
            out.update({q + rest: symbol for rest, symbol in below(tree, p).items()})
    return out


def polish(tree):
    return "".join(str(tree[path]) for path in sorted(tree))


PRODUCT = {"11": "1", "12": "2", "13": "3", "21": "2", "22": "3", "23": "1", "31": "3", "32": "1", "33": "2"}


def value(digits):
    """What a polish string is worth, by turns of a third of a circle."""
    stack = []
    for symbol in reversed(digits):
        turn = np.exp(2j * np.pi * (int(symbol) - 1) / 3)
        stack.append(stack.pop() * stack.pop() if symbol == "4" else turn)
    return stack.pop()


def operated(tree):
    code, pointer, tree = tree[""], tree["0"], below(tree, "1")
    [at] = [p for p, symbol in tree.items() if symbol == pointer]
    assert at + "0" in tree and 125 <= code <= 128
    sub = below(tree, at)
    if code == 126:
        sub = {"10"[int(p[0])] + p[1:] if p else p: symbol for p, symbol in sub.items()}
    if code == 127:
        return {p: symbol for p, symbol in tree.items() if p == at or not p.startswith(at)}
    return tree if code == 128 else sub


# ------------------------------------------------------------------------------------------------ the samples
@pytest.mark.parametrize("name", tasks.SEQUENCES)
def test_sequences(name):
    idx, targets, pos = rows(name)
    lengths, seen = [], set()
    for row, target_row, place in zip(idx, targets, pos):
        source, target = ("".join(map(chr, x)) for x in decode(name, row, target_row))
        if name == "copy":
            assert target == source and source[0] == chr(21) and source[-1] == chr(22)
            source = source[1:-1]
        else:
            assert target == (source * 2 if name == "repeat" else source[::-1])
        lengths.append(len(source))
        seen.update(source)
        given = len(source) + 2 * (name == "copy")
        end = given + len(target) - 1
        assert place[:end].tolist() == [*range(given), *range(end - given)]
    assert seen == set(map(chr, range(1, 21 if name == "copy" else 20)))
    assert abs(np.mean(lengths) - 31.5) < 0.5 and 2.5 < np.std(lengths) < 3.5       # 32 +- 3, truncated


@pytest.mark.parametrize("name", TREES)
def test_trees_and_their_paths(name):
    idx, targets, pos = rows(name)
    same, also, paths = tasks.task(name, 1000, 0, nd=True)
    assert torch.equal(same, idx) and torch.equal(also, targets) and paths.shape[:2] == idx.shape
    single = 0
    for row, target_row, place, path_row in zip(idx, targets, pos, paths):
        symbols, target_symbols = decode(name, row, target_row)
        is_operator = OPERATORS[kind(name)].__contains__
        source = table(symbols, lambda i, s: is_operator(s) and not (name[:2] == "op" and i == 1), False)
        if kind(name) == "rotate":
            expected = rotated(source)
        elif kind(name) == "op":
            expected = operated(source)
            leaves = [s for p, s in source.items() if p + "0" not in source and p != "0"]
            inner = [s for p, s in source.items() if p + "0" in source and p]
            assert len(set(leaves)) == len(leaves) and len(set(inner)) == len(inner)
            assert set(leaves) <= set(range(1, 65)) and set(inner) <= set(range(65, 125))
        elif kind(name) == "c3":
            string = re.sub("4([123][123])", lambda m: PRODUCT[m[1]], polish(source))
            assert abs(value(string) - value(polish(source))) < 1e-9
            expected = table([*map(int, string)], lambda i, s: s == 4, True)
        else:
            expected = source
        in_order = sorted(expected, key=lambda p: p if name[-1] == "d" else (len(p), p))
        if len(expected) == 1:
            single += 1
            assert target_symbols == []
            in_order = []
        assert target_symbols == [expected[p] for p in in_order]

        order = sorted(source, key=lambda p: (len(p), p))
        read = order + in_order[:-1]
        assert place[:len(read)].tolist() == [*range(len(order)), *range(len(read) - len(order))]
        for path, numbers in zip(read, path_row[:len(read)].tolist()):
            assert numbers == [*map(int, path)] + [-1] * (paths.shape[2] - len(path))
        assert (path_row[len(read):] == -1).all()
    assert single < (300 if name[:2] == "op" else 60)


def test_all_of_op_is_drawn():
    codes, symbols, roots, expected = np.zeros(4), set(), 0, 0
    for row, target_row in zip(*rows("op-b")[:2]):
        source, _ = decode("op-b", row, target_row)
        codes[source[0] - 125] += 1
        symbols.update(source[2:])
        roots += source[1] == source[2]                     # the pointer is uniform among the inner nodes
        expected += 1 / ((len(source) - 3) // 2)
    assert codes.min() > 200 and symbols == set(range(1, 125))
    assert abs(roots - expected) < 60


def test_a_tree_by_hand():
    tree = (11, (12, 1, (13, 2, 3)), 4)
    assert tasks.depth_first(tree) == [(11, ()), (12, (0,)), (1, (0, 0)), (13, (0, 1)), (2, (0, 1, 0)),
                                       (3, (0, 1, 1)), (4, (1,))]
    assert [symbol for symbol, _ in tasks.breadth_first(tree)] == [11, 12, 4, 1, 13, 2, 3]
    assert tasks.rotate(tree) == (12, 1, (11, (13, 2, 3), 4))
    assert tasks.rotate((11, 1, (12, (13, 2, 3), 4))) == (11, 1, (12, (13, 2, 3), 4))
    assert tasks.reduce((4, (4, 2, 2), (4, 1, (4, 2, 3)))) == (4, 3, (4, 1, 1))


def test_linearisations_invert_and_parents_are_prefixes():
    rng = np.random.default_rng(3)
    for _ in range(100):
        symbols = iter(range(1, 10**6))
        tree = tasks.label(tasks.shape(rng, int(rng.integers(1, 8))), symbols, iter(range(-1, -10**6, -1)))
        for line, depth_first in ((tasks.depth_first(tree), True), (tasks.breadth_first(tree), False)):
            found = table([symbol for symbol, _ in line], lambda i, symbol: symbol < 0, depth_first)
            assert [(symbol, "".join(map(str, path))) for symbol, path in line] == [
                (symbol, path) for path, symbol in found.items()]
            for symbol, path in line:
                assert (path + (0,) in dict(map(reversed, line))) == (symbol < 0)
                assert not path or found["".join(map(str, path[:-1]))] < 0
            build = lambda p: (found[p], build(p + "0"), build(p + "1")) if p + "0" in found else found[p]
            assert build("") == tree


def test_shapes_are_the_papers():
    rng = np.random.default_rng(0)
    other, deep_left = np.zeros(5), 0
    for _ in range(1500):
        paths = ["".join(map(str, path)) for _, path in tasks.depth_first(tasks.shape(rng, 6))]
        left, right = (max(len(p) for p in paths if p[:1] == side) for side in "01")
        assert max(left, right) == 5
        other[min(left, right) - 1] += 1
        deep_left += left > right
    assert (abs(other - 300) < 70).all()
    assert abs(deep_left - 600) < 80                        # half of the four fifths that are not equal
    pairs = tasks.samples("rotate", 1000, 0, size=(7, 1, math.inf))
    assert 30 < np.mean([len(tasks.depth_first(source)) for source, _ in pairs]) < 35       # about 33 there


# --------------------------------------------------------------------------------------------------- the mask
def test_a_row_by_hand(monkeypatch):
    pairs = [((11, (12, 1, 2), 3), (12, 1, (11, 2, 3))), ((11, 4, 5), (11, 4, 5)), ((11, 4, 5), 6)]
    monkeypatch.setattr(tasks, "samples", lambda *args: pairs)
    idx, targets, pos = tasks.task("rotate-b", 3, 0)
    first, second, third = [11, 12, 3, 1, 2, 32, 21, 31, 22], [11, 4, 5, 31, 24], [11, 4, 5]
    assert idx.tolist() == [first, second + 4 * [0], third + 6 * [0]]
    assert targets.tolist() == [5 * [-1] + [21, 31, 22, 23], [-1, -1, -1, 24, 25] + 4 * [-1], 9 * [-1]]
    assert pos.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 0, 1] + 4 * [0], [0, 1, 2] + 6 * [0]]
    idx, _, pos = tasks.task("rotate-d", 3, 0, nd=True)
    assert idx[0].tolist() == [11, 12, 3, 1, 2, 32, 21, 31, 22]
    root, left, right = [-1, -1], [0, -1], [1, -1]
    assert pos[0].tolist() == [root, left, right, [0, 0], [0, 1], root, left, right, [1, 0]]
    assert pos[1].tolist() == [root, left, right, root, left] + 4 * [root]
    assert idx.dtype == targets.dtype == pos.dtype == torch.int64
    monkeypatch.setattr(tasks, "samples", lambda *args: [([21, 5, 7, 22], [21, 5, 7, 22])])
    idx, targets, pos = tasks.task("copy", 1, 0)
    assert idx.tolist() == [[21, 5, 7, 22, 43, 27, 29]] and targets.tolist() == [4 * [-1] + [27, 29, 44]]


@pytest.mark.parametrize("name", ["reverse", "copy", "tree-copy-b"])
def test_the_loss_is_of_the_target_after_its_given_token(name):
    idx, targets, pos = (t[:50] for t in rows(name))
    S, V = SMALLEST[kind(name)], tasks.vocabulary(name)
    right, given_only, stay = torch.zeros(3, *idx.shape, dtype=torch.int64)
    tokens = 0
    for i, row in enumerate(idx.tolist()):                  # from the source alone
        source = [t for t in row if 0 < t <= S]
        target = [S + t for t in (reversed(source) if name == "reverse" else source)]
        n, m = len(source), len(target)
        right[i, n:n + m - 1] = torch.tensor(target[1:])
        given_only[i, n - 1] = target[0]
        stay[i, n:n + m - 1] = torch.tensor(target[:-1])
        tokens += m - 1
    assert (targets >= 0).sum() == tokens
    torch.manual_seed(0)
    model = GPT({"vocab": V, "heads": 1, "layers": 1, "d": 8, "pe": "rope"})
    assert 0.5 * math.log(V) < model(idx, targets, pos)[1] < 2 * math.log(V)
    del model.head
    def loss(answer):
        model.head = lambda x: 100.0 * torch.nn.functional.one_hot(answer, V)
        return model(idx, targets, pos)[1].item()
    assert loss(right) < 1e-9
    assert loss(given_only) == pytest.approx(100)           # wrong everywhere that it counts
    assert loss(stay) > 50
    one_wrong = right.clone()
    one_wrong[0, targets[0] >= 0] = 0                       # a row's tokens count as tokens, not as a row
    assert loss(one_wrong) == pytest.approx(100 * (targets[0] >= 0).sum().item() / tokens, rel=1e-3)


# -------------------------------------------------------------------------------------------- seeds and split
@pytest.mark.parametrize("name", [*tasks.SEQUENCES, *TREES])
def test_seeded_and_the_held_out_set_disjoint(name):
    again, other = tasks.task(name, 100, 0), tasks.task(name, 100, 1)
    assert all(torch.equal(a, b) for a, b in zip(again, tasks.task(name, 100, 0)))
    assert not torch.equal(again[0][:, :10], other[0][:, :10])
    S = SMALLEST[kind(name)]
    sources = lambda idx: {tuple(t for t in row if 0 < t <= S) for row in idx.tolist()}
    train = sources(rows(name)[0]) | sources(other[0])
    held_out = sources(rows(name, 0, True, 300)[0]) | sources(rows(name, 2, True, 100)[0])
    assert not train & held_out and len(held_out) > 200
    idx, targets, _ = rows(name)
    assert idx.max() < tasks.vocabulary(name) == 2 * S + 1 and targets.max() < tasks.vocabulary(name)
    assert idx.shape[1] <= (143 if name == "repeat" else 99 if name in tasks.SEQUENCES else 79)
    if name in TREES:                                       # the two orders have the same trees
        swapped = name[:-1] + "bd"[name[-1] == "b"]
        assert sources(tasks.task(swapped, 100, 0)[0]) == sources(again[0])


def test_the_split_is_the_sources_alone_a_quarter():
    size = (3, 0, math.inf)                                 # of c3 there are 135
    train, held_out = (tasks.samples("c3", 1500, 5, held, size) for held in (False, True))
    assert len({*train}) + len({*held_out}) == len({*train, *held_out}) == 135 and 20 < len({*held_out}) < 48


def test_sizes():
    for source, target in tasks.samples("copy", 50, 0, size=(100, 10, math.inf)):
        assert 60 < len(source) < 150 and len(target) == len(source)
    assert all(len(tasks.depth_first(s)) <= 9 for s, _ in tasks.samples("rotate", 200, 0, size=(5, 1, 9)))
    assert all(len(s) == 2 for s, _ in tasks.samples("reverse", 10, 0, size=(-3, 0, 9)))


def test_op_draws_again_where_symbols_run_out():
    rng, none = np.random.default_rng(0), 0
    for _ in range(200):
        pair = tasks.draw("op", rng, 10)
        if pair:
            symbols = [symbol for symbol, _ in tasks.depth_first(pair[0][2])]
            assert len(set(symbols)) == len(symbols) <= 121
        none += pair is None
    assert 20 < none < 180
    assert len(tasks.samples("op", 20, 0, size=(10, 0, math.inf))) == 20


# ------------------------------------------------------------------------------------------------------ grids
OFFSET = {token: complex(*map(int, word.strip("()").split(",")))
          for token, word in enumerate(tasks.words("grid")) if token > 16}


def asked(h, w, held_out, seed=0, n=1000):
    """Each query of n rows as (cell, offset), after its row was checked."""
    idx, targets, index = tasks.task("grid", n, seed, held_out, size=(h, w))
    same, also, cells = tasks.task("grid", n, seed, held_out, nd=True, size=(h, w))
    assert torch.equal(same, idx) and torch.equal(also, targets) and idx.shape == (n, h * w + 64)
    assert index.shape == idx.shape and cells.shape == (*idx.shape, 2)
    assert {t.dtype for t in (idx, targets, index, cells)} == {torch.int64}
    found = []
    for symbols, answers, index, cells in zip(*(t.tolist() for t in (idx, targets, index, cells))):
        assert [[*divmod(i, w)] for i in index] == cells
        places = [complex(*cell) for cell in cells]
        assert places[:h * w] == [complex(row, column) for row in range(h) for column in range(w)]
        grid = dict(zip(places[:h * w], symbols))
        assert set(grid.values()) <= set(range(1, 17)) and set(answers[:h * w]) == {-1}
        queries = [(place, OFFSET[token]) for place, token in zip(places[h * w:], symbols[h * w:])]
        assert answers[h * w:] == [grid[place + offset] for place, offset in queries]
        found += queries
    return found


@pytest.mark.parametrize("h, w", [(8, 8), (3, 7), (12, 5)])
def test_grids(h, w):
    train, held_out = asked(h, w, False), asked(h, w, True)
    where = [{place for place, _ in queries} for queries in (train, held_out)]
    assert not where[0] & where[1]
    every = {complex(row, column) for row in range(h) for column in range(w)}
    assert where[1] == {place for place in every if (place.real + 3 * place.imag) % 8 in (0, 1)}
    # All offsets that stay inside, and no others, equally often.
    possible = {(place, offset) for place in every for offset in OFFSET.values() if place + offset in every}
    assert {*train, *held_out} == possible
    for queries in (train, held_out):
        times = [*collections.Counter(queries).values()]
        assert np.std(times) < 1.3 * np.mean(times) ** 0.5          # of a Poisson count the ratio is 1


def test_offsets_and_held_out_cells_of_the_default_grid():
    turns = [1j ** k for k in range(4)]
    assert {*OFFSET.values()} == {s * d * turn for s in (1, 2) for d in (1, 1 + 1j) for turn in turns}
    cells = {place for place, _ in asked(8, 8, True, n=100)}
    for axis in ("real", "imag"):                                   # a quarter of each row, of each column
        assert set(collections.Counter(getattr(place, axis) for place in cells).values()) == {2}
    assert cells == {place for place, _ in asked(8, 8, True, seed=5, n=200)}
    assert torch.equal(tasks.task("grid", 2, 0)[0], tasks.task("grid", 2, 0, size=(8, 8))[0])


def test_grids_are_seeded_and_training_ones_are_never_held_out():
    grids = lambda *args: {tuple(row[:64]) for row in tasks.task("grid", 500, *args)[0].tolist()}
    sets = [grids(seed, held_out) for seed in (0, 1, 2) for held_out in (False, True)]
    assert grids(0, False) == sets[0] and len(set.union(*sets)) == 3000
    counts = np.bincount([symbol for grid in sets[0] for symbol in grid], minlength=17)
    assert counts[0] == 0 and (abs(counts[1:] - 2000) < 250).all() and len(counts) == 17
    assert tasks.vocabulary("grid") == 33 == 1 + max(OFFSET)


# ------------------------------------------------------------------------------------------ errors and prints
def test_what_cannot_be_drawn_is_a_sentence():
    with pytest.raises(ValueError, match="rotate is no task; name one of copy, .*rotate-b, rotate-d"):
        tasks.task("rotate", 1, 0)
    with pytest.raises(ValueError, match="copy has no positions of more dimensions"):
        tasks.task("copy", 1, 0, nd=True)
    for size in ((8,), (1, 8), (8, 1), (8, 2, 12)):
        with pytest.raises(ValueError, match=re.escape(f"grid: its size is (rows, columns), 2 or more each, "
                                                       f"and not {size}")):
            tasks.task("grid", 1, 0, size=size)
    with pytest.raises(ValueError, match="size 9 .* 0 of 3 samples with at most 8 tokens.*another size"):
        tasks.task("reverse", 3, 0, size=(9, 0, 8))


def run(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["tasks.py", *args])
    runpy.run_path(str(Path(tasks.__file__)), run_name="__main__")
    return capsys.readouterr().out


def test_samples_are_printed_as_brackets(monkeypatch, capsys):
    out = run(monkeypatch, capsys)
    assert re.findall(r"^([\w-]+), \d+ symbols", out, re.M) == [*tasks.SEQUENCES, *tasks.TREES, "grid"]
    assert max(map(len, out.splitlines())) <= 110
    out = run(monkeypatch, capsys, "rotate")
    pairs = re.findall(r"^     (\(.*\))\n  -> (\(.*\))$", out, re.M)
    assert len(pairs) == 5 and out.count("predicts") == 2 and out.count("or path") == 2
    for source, target in pairs:                            # a rotation keeps the leaves' order
        assert re.findall(r" (\d+)", source) == re.findall(r" (\d+)", target)
    assert run(monkeypatch, capsys, "rotate-d") == out
    assert max(map(len, run(monkeypatch, capsys, "op").splitlines())) <= 110

    out = run(monkeypatch, capsys, "grid")
    symbols = [line.split() for line in re.findall(r"^ {5}((?:\d+ *)+)$", out, re.M)]
    queries = re.findall(r"^ {5}\((.+),(.+)\) from row (\d+), column (\d+)\n  -> (\d+)$", out, re.M)
    assert [len(line) for line in symbols] == 4 * [6] and len(queries) == 5 and out.count("or cell") == 1
    for down, right, row, column, answer in queries:
        assert symbols[int(row) + int(down)][int(column) + int(right)] == answer
    assert max(map(len, out.splitlines())) <= 110


def test_an_unknown_task_is_a_sentence_and_exit_code_2(monkeypatch, capsys):
    with pytest.raises(SystemExit) as e:
        run(monkeypatch, capsys, "rotat")
    assert e.value.code == 2 and "rotat is no task; name one of copy, repeat" in capsys.readouterr().err
