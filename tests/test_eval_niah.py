"""
Needle in a haystack: what training plants can be known, the prompts are as they say, the scores are right for
models whose score is known, and a run leaves its table, its lines and its map.
"""
import contextlib
import io
import itertools
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import eval_niah
import scaling
import train
from eval_niah import cell, draw, draw_maps, needle, passkey, plant, score

ROOT = Path(__file__).parent.parent
V = 257
ASCII = np.arange(50_000, dtype=np.uint16) % 127            # each token tells its place, mod 127
BYTES = lambda b: np.frombuffer(b, np.uint8)


def seeded(*seed):
    return np.random.default_rng(seed)


def pairs_of(row, vocab=V):
    """A row, read from left to right -> [(place, key, value)]. A value must follow every key, and be nowhere
    else."""
    top, found, j = vocab - 1, [], 0
    while j < len(row):
        if top - 32 <= row[j] < top - 16:
            assert top - 16 <= row[j + 1] < top
            found.append((j, int(row[j]), int(row[j + 1])))
            j += 2
        else:
            assert not top - 16 <= row[j] < top
            j += 1
    return found


# -------------------------------------------------------------------------------------------------- planting
@pytest.mark.parametrize("vocab", (257, 50257))
@pytest.mark.parametrize("W", (9, 17, 33, 65, 257, 1025))
def test_every_repeat_of_a_key_has_its_value(W, vocab):
    numbers, shares = set(), []
    for row in plant(np.full((20, W), 32), 1, seeded(W), vocab):
        values, times = {}, {}
        for _, key, value in pairs_of(row, vocab):
            assert values.setdefault(key, value) == value
            times[key] = times.get(key, 0) + 1
        assert len(set(values.values())) == len(values)                 # no value has two keys
        assert len(set(times.values())) == 1 and 2 <= min(times.values()) <= 4      # each has a query
        shares.append(2 * sum(times.values()) / W)
        assert shares[-1] <= max(4 / W, 0.4)
        numbers.add(len(values))
    assert not 64 <= W < 300 or 0.17 < sum(shares) / len(shares) < 0.4
    assert W < 200 or min(numbers) < 5 and max(numbers) > 13            # rows of few pairs and of many


def test_planting_keeps_what_it_does_not_overwrite_and_its_input():
    rows = seeded(1).integers(0, 128, (40, 130))
    before = rows.copy()
    planted = plant(rows, 1, seeded(2), V)
    assert np.array_equal(rows, before) and planted.shape == rows.shape and planted.dtype == rows.dtype
    for old, new in zip(rows, planted):
        kept = np.ones(130, dtype=bool)
        for place, _, _ in pairs_of(new):
            kept[place:place + 2] = False
        assert 78 <= kept.sum() <= 122 and np.array_equal(new[kept], old[kept])


def test_planting_is_a_function_of_the_generator():
    rows = torch.randint(128, (6, 257))                     # a tensor will do, too
    first, again, other = (plant(rows, 0.5, seeded(s), V) for s in (3, 3, 4))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_the_share_is_of_rows_each_by_its_own_coin():
    rows = np.zeros((2000, 20), dtype=np.int64)
    for share in (0, 0.3, 1):
        with_needles = (plant(rows, share, seeded(5), V) > 0).any(1)
        assert abs(with_needles.mean() - share) < 4 * (share * (1 - share) / 2000) ** 0.5 + 1e-9
    runs = [len(list(g)) for _, g in itertools.groupby((plant(rows, 0.5, seeded(6), V) > 0).any(1))]
    assert 900 < len(runs) < 1100                           # a coin changes sides every other time


def test_needles_are_at_every_place_with_every_key_and_value():
    rows = [pairs_of(row) for row in plant(np.zeros((600, 65), dtype=np.int64), 1, seeded(7), V)]
    places, keys, values = (np.array(part) for part in zip(*itertools.chain(*rows)))
    counts = np.bincount(places, minlength=64)
    assert len(counts) == 64 and counts.min() > 0.6 * counts.mean() and counts.max() < 1.5 * counts.mean()
    assert set(keys) == set(range(224, 240)) and set(values) == set(range(240, 256))
    assert len(set(zip(keys.tolist(), values.tolist()))) == 256         # there is no table
    gaps = []
    for row in plant(np.zeros((200, 257), dtype=np.int64), 1, seeded(8), V):
        seen = [place for place, key, _ in pairs_of(row) if key == pairs_of(row)[0][1]]
        gaps.append(seen[1] - seen[0])
    assert min(gaps) < 10 and max(gaps) > 200               # near queries and far ones


@pytest.mark.parametrize("share, W", ((-0.1, 65), (1.1, 65), (math.nan, 65), (0.5, 8)))
def test_a_share_or_a_row_that_cannot_be_is_a_sentence(share, W):
    with pytest.raises(ValueError, match=rf"{share} of rows of {W} tokens: the share must"):
        plant(np.zeros((2, W), dtype=np.int64), share, seeded(0), V)


def test_a_row_has_no_key_and_no_value_twice():
    for keys, values in zip(*draw(50, 16, seeded(9), V)):
        assert sorted(keys) == [*range(224, 240)] and sorted(values) == [*range(240, 256)]


# --------------------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize("L, distractors", ((6, 0), (15, 3), (64, 3), (257, 7), (51, 15)))
def test_a_prompt_is_as_it_says(L, distractors):
    for i, depth in enumerate((0, 0.1, 0.35, 0.5, 0.77, 1)):
        for trial in range(5):
            ids, control, answer, placed = needle(ASCII, L, depth, distractors, seeded(L, i, trial), V)
            assert ids.shape == control.shape == (L,) and answer.shape == (1,) and ids.dtype == np.int64
            *found, (last, key) = pairs_of(ids[:-1]) + [(L - 1, ids[-1])]
            assert len(found) == 1 + distractors
            assert len({k for _, k, _ in found}) == len({v for _, _, v in found}) == len(found)
            (at, value), = [(j, v) for j, k, v in found if k == key]
            assert value == answer[0] and ids.tolist().count(value) == 1
            assert abs(at - depth * (L - 3)) <= 0.5 and placed == pytest.approx(at / (L - 3))
            assert {0: at == 0, 1: at == L - 3}.get(depth, True)
            # The control differs in the needle alone and has the text's own tokens there.
            assert np.flatnonzero(ids != control).tolist() == [at, at + 1] and value not in control
            start = {int((t - j) % 127) for j, t in enumerate(control) if t < 127}
            assert len(start) == 1 and (control < 127).sum() == L - 1 - 2 * distractors


def test_stray_keys_and_values_are_taken_out_of_the_haystack():
    text = np.concatenate((np.arange(128, 257), np.arange(60))).astype(np.uint16).repeat(3)
    ids, control, _, _ = needle(text, 400, 0.5, 3, seeded(1), V)
    assert len(pairs_of(ids[:-1])) == 4 and len(pairs_of(control[:-1])) == 3
    assert (ids == 256).any()                               # the end of a document is text


def test_prompts_depend_on_their_seed_alone():
    make = lambda *seed: needle(ASCII, 100, 0.5, 3, seeded(*seed), V)[0].tolist()
    assert make(0, 1) == make(0, 1) != make(0, 2)


@pytest.mark.parametrize("L, distractors", ((14, 3), (5, 0), (50, 15)))
def test_needles_without_room_are_a_sentence(L, distractors):
    with pytest.raises(ValueError, match=f"--distractors {distractors}: .* {L} tokens"):
        needle(ASCII, L, 0.5, distractors, seeded(0), V)


def test_the_passkey_is_sentences_of_the_tokenizer():
    text = np.full(1000, ord("."), dtype=np.uint16)
    for depth, before in ((0, 0), (0.5, 49), (1, 98)):      # 200 tokens, 59 + 43 of them are not text
        ids, control, answer, placed = passkey(text, 200, depth, seeded(3), BYTES)
        said, key = bytes(ids.tolist()).decode(), bytes(answer.tolist()).decode()
        assert re.fullmatch(r" [1-9]\d{4}", key) and placed == depth
        question = f" What is the pass key? The pass key is{key[:-1]}"
        assert said == "." * before + f" The pass key is{key}. Remember it.{key} is the pass key." + \
            "." * (98 - before) + question
        assert bytes(control.tolist()).decode() == "." * (200 - len(question)) + question
    with pytest.raises(ValueError, match="--form passkey: .* 102 tokens"):
        passkey(text, 102, 0.5, seeded(3), BYTES)


def test_passkeys_have_as_many_tokens_each():
    """With a tokenizer that has tokens of their own for two of the same digit."""
    encode = lambda b: np.array([sum(m.group()) for m in re.finditer(rb"(\d)\1|.", b)])
    assert {len(encode(b" %d" % k)) for k in range(10_000, 12_000)} == {4, 5, 6}
    assert {len(passkey(ASCII, 200, 0.5, seeded(i), encode)[2]) for i in range(50)} == {6}


# --------------------------------------------------------------------------------------------------- scoring
class Fake:
    """A model that answers guess(the tokens up to here), asked through score's own forward pass."""
    class pe:
        temperature = 1.0
        __new__ = lambda cls, pos: None

    def __init__(self, guess):
        def block(x, rho, temperature):
            logits = torch.zeros(*x.shape[:2], V)
            for row, out in zip(x[..., 0].long().tolist(), logits):
                for j in range(max(0, len(row) - 6), len(row)):
                    out[j, guess(row[:j + 1])] = 100.0
            return logits
        self.embed, self.blocks = lambda ids: ids[..., None].double(), [block]
        self.norm = self.head = lambda x: x


def after_the_first(n):
    """What followed when the last n tokens were first seen; 0 if they were not."""
    def guess(row):
        for j in range(n, len(row)):
            if row[j - n:j] == row[-n:]:
                return row[j]
        return 0
    return guess


def many(n, L=40, distractors=3, depth=0.5):
    return [needle(ASCII, L, depth, distractors, seeded(11, t), V) for t in range(n)]


@pytest.mark.parametrize("depth", (0, 0.5, 1))
def test_a_model_that_looks_the_key_up_is_always_right_and_never_without_the_needle(depth):
    accuracy, control, logprob, placed = cell(Fake(after_the_first(1)), many(20, depth=depth))
    assert (accuracy, control) == (1, 0) and logprob == pytest.approx(0, abs=1e-6)
    assert placed == pytest.approx(depth, abs=0.02)
    prompts = [passkey(ASCII, 220, depth, seeded(t), BYTES) for t in range(10)]
    accuracy, control, logprob, _ = cell(Fake(after_the_first(16)), prompts)
    assert (accuracy, control) == (1, 0) and logprob == pytest.approx(0, abs=1e-6)


def test_an_answer_is_right_if_all_of_it_is():
    first = Fake(after_the_first(16))
    wrong_at_the_end = Fake(lambda row: 0 if row[-1] in range(48, 58) and row[-6] != 115 and row[-5] == 32
                            else after_the_first(16)(row))
    prompts = [passkey(ASCII, 220, 0.5, seeded(t), BYTES) for t in range(10)]
    assert cell(first, prompts)[0] == 1 and cell(wrong_at_the_end, prompts)[0] == 0
    assert cell(wrong_at_the_end, prompts)[2] == pytest.approx(-100 / 6, rel=1e-3)     # one of six tokens


@pytest.mark.parametrize("distractors", (0, 1, 3, 7))
def test_a_guess_among_the_values_in_sight_is_right_as_often_as_stated(distractors):
    rng, n = np.random.default_rng(0), 500
    model = Fake(lambda row: rng.choice([t for t in row if 240 <= t < 256] or [0]))
    accuracy, control, _, _ = cell(model, many(n, L=32, distractors=distractors))
    p = 1 / (1 + distractors)
    assert abs(accuracy - p) <= 4 * (p * (1 - p) / n) ** 0.5 and control == 0


def test_without_the_needle_a_guess_is_right_once_in_16():
    rng, n = np.random.default_rng(1), 1500
    accuracy, control, _, _ = cell(Fake(lambda row: rng.integers(240, 256)), many(n, L=15))
    for share in (accuracy, control):
        assert abs(share - 1 / 16) < 4 * (1 / 16 / n) ** 0.5


def small(pe="rope", **config):
    torch.manual_seed(0)
    return train.GPT({"vocab": V, "heads": 2, "layers": 2, "d": 8, "pe": pe, "L": 16, **config}).eval()


@pytest.mark.parametrize("A", (1, 3))
def test_scores_are_those_of_the_whole_forward_pass(A):
    model = small()
    ids, answers = torch.randint(V, (7, 20)), torch.randint(V, (7, A))
    with torch.no_grad():
        logits = model(ids)[0].double()                                             # (7, 20, V)
    answers[2] = logits[2, -A:].argmax(-1)                                          # one that is right
    answers[3, :-1] = logits[3, -A:-1].argmax(-1)                                   # one that is nearly right
    p = (logits.exp() / logits.exp().sum(-1, keepdim=True)).tolist()
    expected = [sum(math.log(p[b][20 - A + a][answers[b, a]]) for a in range(A)) / A for b in range(7)]
    for tokens in (16_384, 45, 1):                          # 7, 2 and 1 rows at a time
        right, logprob = score(model, ids, answers, tokens)
        assert right.tolist() == [b == 2 for b in range(7)]
        assert logprob.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_head_sees_the_answer_only_and_the_rows_come_in_groups(monkeypatch):
    model, seen = small(), []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape)))
    score(model, torch.randint(V, (9, 30)), torch.randint(V, (9, 2)), tokens=130)
    assert seen == [(4, 2, 16), (4, 2, 16), (1, 2, 16)]


def test_the_map_has_the_start_at_the_top_and_fixed_colours(monkeypatch):
    from matplotlib.figure import Figure
    figures, accuracy = [], np.array([[1, 0.9, 0.2], [1, 0.5, 0.4]])
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kw: figures.append(self))
    draw_maps({"none": accuracy, "yarn": accuracy / 2}, [16, 32, 64], 16, "title", "x.png")
    one, two, _ = figures[0].axes
    for ax, name, shown in ((one, "none", accuracy), (two, "yarn", accuracy / 2)):
        image, = ax.images
        assert ax.get_title() == name and np.array_equal(image.get_array(), shown)
        assert image.get_clim() == (0, 1) and image.get_cmap().name == "RdYlGn"
        assert image.origin == "upper" and ax.get_ylim() == (1, 0)      # row 0 at y = 0, which is above 1
        assert [t.get_text() for t in ax.get_xticklabels()] == ["16", "32", "64"]
        assert [*ax.lines[0].get_xdata()] == [0.5, 0.5]                 # between 16 and 32


# ------------------------------------------------------------------------------------------------ the command
@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a text and runs of train.py on it: rope, lerope, nope; and changed copies of rope's."""
    folder = tmp_path_factory.mktemp("runs")
    handlers = [(s, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        Path("a.txt").write_text("".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(1000)))
        for pe in ("rope", "lerope", "nope"):
            flags = ("--heads 1 --layers 1 --L 16 --batch 4 --steps 1 --eval_windows 4 --no-compile "
                     f"--dtype fp32 --data a.txt --pe {pe} --pe_lr 0.5 --out {pe}")
            patch.setattr(sys, "argv", ["train.py", *flags.split()])
            train.main()
        ckpt = torch.load("rope/ckpt.pt", weights_only=True)
        for name, part, change in (("gpt2", "config", {"tokenizer": "gpt2"}), ("short", "config", {"L": 4}),
                                   ("task", "config", {"tokenizer": "copy"}),
                                   ("needles", "args", {"needles": 0.5})):
            Path(name).mkdir()
            torch.save(ckpt | {part: ckpt[part] | change}, f"{name}/ckpt.pt")
    for number, handler in handlers:
        signal.signal(number, handler)
    return folder


@pytest.fixture
def evaluate(runs, monkeypatch, capsys):
    """Run eval_niah.py in this process -> what it printed, and the lines it wrote."""
    def evaluate(*flags, out="niah.jsonl"):
        monkeypatch.chdir(runs)
        small = ["--data", "a.txt", "--trials", 2, "--depths", 3, "--out", out, *flags]
        monkeypatch.setattr(sys, "argv", ["eval_niah.py", *map(str, small)])
        eval_niah.main()
        return capsys.readouterr().out, [json.loads(line) for line in open(out)]
    return evaluate


@pytest.fixture
def spy(monkeypatch):
    """What score was given: [(model, its encoding then, ids)]."""
    seen = []

    def watched(model, ids, answers):
        seen.append((model, model.pe, ids.clone()))
        return score(model, ids, answers)
    monkeypatch.setattr(eval_niah, "score", watched)
    return seen


def test_a_run_leaves_its_table_its_lines_and_its_maps(evaluate, runs):
    said, lines = evaluate("rope", "lerope/ckpt.pt", "--lengths", "1,4", "--scaling", "none,yarn")
    assert len(lines) == 2 * 2 * 2 * 3
    order = [(v["checkpoint"], v["pe"], v["scaling"], v["s"], v["length"], v["depth"]) for v in lines]
    assert order == [(path, pe, method, s, 16 * s, depth) for path, pe in
                     (("rope", "rope"), ("lerope/ckpt.pt", "lerope")) for method in ("none", "yarn")
                     for s in (1, 4) for depth in (0, 0.5, 1)]
    for v in lines:
        assert v["form"] == "needle" and v["trials"] == 2 and v["chance"] == 0.25
        assert v["accuracy"] in (0, 0.5, 1) and v["control"] in (0, 0.5, 1) and v["logprob"] < 0
        assert abs(v["placed"] - v["depth"]) < 0.5 / (v["length"] - 3) + 1e-9
    for folder in ("rope", "lerope"):
        assert (runs / folder / "niah.png").read_bytes()[:4] == b"\x89PNG"
    rows = [line.split() for line in said.splitlines()]
    rows = [row for row in rows if row[0] in ("tokens", "none", "yarn", "chance")]
    assert [row[0] for row in rows] == 2 * ["tokens", "none", "yarn", "chance"]
    assert rows[0] == ["tokens", "16", "64"] and rows[3] == ["chance", "0.25", "0.25"]
    assert said.count("without --needles") == 2


def test_the_table_is_of_the_lines(evaluate, monkeypatch):
    """Each depth with an accuracy of its own."""
    found = itertools.cycle([(0.9, 0.1, -1.0, 0.0), (0.3, 0.3, -2.0, 0.5), (0.6, 0.2, -3.0, 1.0)])
    monkeypatch.setattr(eval_niah, "cell", lambda model, prompts: next(found))
    drawn = []
    monkeypatch.setattr(eval_niah, "draw_maps", lambda maps, *rest: drawn.append((maps, rest)))
    said, lines = evaluate("needles", "--lengths", "2,1,2", "--scaling", "none")
    assert "without --needles" not in said
    assert [line.split() for line in said.splitlines() if line.startswith("none")] == [
        ["none", "0.60/0.30/0.20", "0.60/0.30/0.20"]]
    assert [(v["accuracy"], v["control"], v["logprob"], v["placed"]) for v in lines[:2]] == [
        (0.9, 0.1, -1.0, 0.0), (0.3, 0.3, -2.0, 0.5)]
    (maps, (lengths, L, _, path)), = drawn
    assert maps["none"].tolist() == [[0.9, 0.9], [0.3, 0.3], [0.6, 0.6]] and (lengths, L) == ([16, 32], 16)
    assert path == Path("needles/niah.png")


def test_every_encoding_and_scaling_sees_the_same_prompts(evaluate, spy):
    evaluate("rope", "lerope", "--lengths", "1,2", "--scaling", "none,ntk")
    evaluate("lerope", "--lengths", "2", "--scaling", "linear")         # alone, and one length only
    cells = [ids for _, _, ids in spy]
    assert len(cells) == 2 * 2 * 6 + 3
    for i, ids in enumerate(cells[6:24]):
        assert torch.equal(ids, cells[i % 6])
    assert all(torch.equal(a, b) for a, b in zip(cells[24:], cells[3:6], strict=True))
    assert len({tuple(ids[:, -1].tolist()) for ids in cells[:6]}) == 6      # each depth has keys of its own
    evaluate("rope", "--lengths", "2", "--scaling", "none", "--seed", 1)
    for (_, _, other), ids in zip(spy[27:], cells[3:6], strict=True):
        assert not torch.equal(other, ids)


def test_scaling_is_of_the_encoding_that_the_prompts_are_read_with(evaluate, spy):
    evaluate("rope", "--lengths", "1,4", "--scaling", "none,linear,yarn", "--depths", 1)
    plain = [10_000 ** (-2 * i / 64) for i in range(32)]
    theta = [pe.theta().tolist() for _, pe, _ in spy]
    for i in (0, 1, 2, 4):                                  # none at 1 and 4, and all at 1
        assert theta[i] == pytest.approx(plain) and spy[i][1].temperature == 1
    assert theta[3] == pytest.approx([t / 4 for t in plain]) and spy[3][1].temperature == 1
    turns = [16 * t / (2 * math.pi) for t in plain]
    keep = [min(max((r - 1) / 31, 0), 1) for r in turns]
    assert theta[5] == pytest.approx([t * (g + (1 - g) / 4) for t, g in zip(plain, keep)])
    assert spy[5][1].temperature == pytest.approx((0.1 * math.log(4) + 1) ** 2)


def test_scaling_changes_the_scores(evaluate):
    _, lines = evaluate("lerope", "--lengths", "4", "--scaling", ",".join(["none", *scaling.METHODS][:-1]))
    logprob = {v["scaling"]: v["logprob"] for v in lines if v["depth"] == 0.5}
    assert len(set(logprob.values())) == len(logprob) == 7


def test_nope_has_nothing_to_scale(evaluate):
    said, lines = evaluate("nope", "rope", "--lengths", "1,2", "--scaling", "none,yarn")
    assert "nope has no frequencies" in said and "rope has no" not in said.replace("nope has no", "")
    assert [(v["pe"], v["scaling"]) for v in lines[::3]] == [("nope", "none")] * 2 + [
        ("rope", "none")] * 2 + [("rope", "yarn")] * 2


def test_the_passkey_has_files_of_its_own(evaluate, spy, runs):
    said, lines = evaluate("rope", "--form", "passkey", "--lengths", "8", "--scaling", "none", "--out",
                           "passkey.jsonl", out="passkey.jsonl")
    assert lines[0]["form"] == "passkey" and lines[0]["chance"] == pytest.approx(1 / 90_000)
    assert b"The pass key is" in bytes(spy[0][2][0].tolist()) and (runs / "rope/niah-passkey.png").exists()
    assert "--needles" not in said


@pytest.mark.parametrize("flags, words", {
    "": "CHECKPOINT", "nowhere": "does not exist", "a.txt": "no checkpoint", "task": "not trained on text",
    "rope gpt2": "reads gpt2", "rope --lengths 0": "try 1,2,4,8", "rope --lengths 1,x": "try 1,2,4,8",
    "rope --lengths 1.5": "try 1,2,4,8", "rope --lengths=-1,2": "try 1,2,4,8", "rope --lengths ,": "try 1,2,",
    "rope --lengths 1000": "16000", "rope --scaling pi": "ntk_by_parts", "rope --scaling none,": "yarn",
    "rope --scaling longrope": "llama3", "rope --depths 0": "[1,", "rope --trials 0": "[1,",
    "rope --distractors -1": "[0, 15]", "rope --distractors 16": "[0, 15]", "rope --distractors 4": "fewer",
    "short --distractors 0 --lengths 4": "L = 4", "rope --seed x": "[0,", "rope --form poem": "passkey",
    "rope --form passkey": "longer --lengths",
    "rope --data nothing": "no such file", "rope --out a.txt/x.jsonl": "another file",
}.items())
def test_wrong_use_gets_a_sentence(evaluate, capsys, flags, words):
    with pytest.raises(SystemExit) as leave:
        evaluate(*flags.split())
    message = capsys.readouterr().err
    assert leave.value.code == 2 and words in message and "Traceback" not in message
    assert not flags.startswith("rope --") or flags.split()[1].split("=")[0] in message.split("error:")[1]


def test_training_can_import_it():
    """It is imported by what plants needles: at import it may not come back to train or data, nor draw."""
    others = {"train", "data", "scaling", "tasks", "matplotlib"}
    code = f"import sys, eval_niah; print(*{others} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout.strip(), done
