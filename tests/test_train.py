"""
The trainer: what a run leaves, that it goes on to the bit, and that wrong use gets a sentence.
"""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import data
import tasks
import train
from rope import frequencies

ROOT = Path(__file__).parent.parent
TINY = "--heads 1 --layers 1 --L 16 --batch 4 --eval_windows 8 --no-compile --dtype fp32 --data a.txt".split()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A folder of its own with a text in it, and the signals as they were."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(400)))
    handlers = [(s, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in handlers:
        signal.signal(number, handler)


@pytest.fixture
def run(monkeypatch):
    """Run train.py in this process -> the lines of its log. A flag given twice counts as it stands last."""
    def run(*flags, out="out"):
        monkeypatch.setattr(sys, "argv", ["train.py", *TINY, "--out", out, *map(str, flags)])
        train.main()
        return log(out)
    return run


@pytest.fixture
def refused(run, capsys):
    """What train.py says to wrong use; it leaves with exit code 2 and no traceback."""
    def refused(*flags, **out):
        with pytest.raises(SystemExit) as leave:
            run(*flags, **out)
        assert leave.value.code == 2
        return capsys.readouterr().err
    return refused


def log(out="out"):
    return [json.loads(line) for line in open(Path(out, "log.jsonl"))]


def weights(out="out"):
    return train.read_checkpoint(out)["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def command(*flags, **env):
    """Run train.py in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen([sys.executable, ROOT / "train.py", *TINY, *map(str, flags)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


# ---------------------------------------------------------------------------------------- what a run leaves
def test_a_run_learns_and_leaves_its_log_checkpoint_and_figure(run, capsys):
    lines = run("--pe", "lerope", "--steps", 60, "--eval_every", 30, "--lr", 1e-2)
    first, evaluations = lines[0], lines[1:]
    assert first["config"]["pe"] == "lerope" and first["torch"] == torch.__version__
    assert first["data"]["bytes"] == Path("a.txt").stat().st_size and len(first["data"]["sha256"]) == 64
    assert [v["step"] for v in evaluations] == [0, 30, 60] and evaluations[-1]["tokens"] == 60 * 4 * 16
    assert evaluations[-1]["val"] < evaluations[0]["val"] - 1
    assert evaluations[0]["theta"] == frequencies(64).tolist() != evaluations[-1]["theta"]
    assert len(evaluations[-1]["by_position"]) == 16
    assert Path("out/loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "a sample:" in capsys.readouterr().out
    model = train.load("out")
    assert model.pe.theta().tolist() == evaluations[-1]["theta"]
    assert sum(w.numel() for w in model.parameters()) == first["parameters"]


@pytest.mark.parametrize("flags", ("--pe prope", "--pe nope", "--pe ape", "--pe ape --ape_init near_identity",
                                   "--pe ndrope", "--pe ndrope --basis exp",
                                   "--pe ndrope --directions mixed"))
def test_every_encoding_of_one_axis_trains_on_text(run, flags):
    lines = run(*flags.split(), "--steps", 30, "--lr", 1e-2, "--eval_every", 30)
    assert lines[-1]["val"] < lines[1]["val"] - 1
    torch.manual_seed(0)
    start = train.GPT(lines[0]["config"]).state_dict()
    learned = [name for name in start if name.startswith("pe.")]
    assert bool(learned) == ("ape" in flags or "ndrope" in flags)
    assert not any(torch.equal(start[name], weights()[name]) for name in learned)


def test_the_reported_loss_is_the_cross_entropy_alone(run):
    import data
    line = run("--steps", 1)[-1]
    rows = data.windows(data.dataset("a.txt")[1], 16, 8)
    logits = train.load("out")(rows[:, :-1])[0].double().log_softmax(-1)
    loss = -logits.gather(-1, rows[:, 1:, None])[..., 0].mean(0)
    assert line["val"] == pytest.approx(loss.mean().item(), abs=1e-6)
    assert line["by_position"] == pytest.approx(loss.tolist(), abs=1e-4)
    assert line["bits_per_byte"] == pytest.approx(line["val"] / 0.693147 * 14401 / 14400, rel=1e-2)


def test_the_dial():
    for heads, millions in {8: 51.6, 16: 216.5, 24: 607.9, 32: 1339, 40: 2523}.items():     # 12 n^2 l + 2 n V
        with torch.device("meta"):
            model = train.GPT({"vocab": 32000, "heads": heads, "layers": 3 * heads // 4, "pe": "rope"})
        assert sum(w.numel() for w in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_initial_weights_have_the_stated_spread():
    torch.manual_seed(0)
    model = train.GPT({"vocab": 300, "heads": 4, "layers": 2, "pe": "rope"})
    block, D = model.blocks[1], 256
    for layer, variance in ((model.embed, 1 / D), (model.head, 1 / D), (block.qkv, 1 / D), (block.up, 1 / D),
                            (block.out, 1 / (4 * D)), (block.down, 1 / (16 * D))):      # 2 layers, fan in 4 D
        w, std = layer.weight, variance ** 0.5
        assert w.std().item() == pytest.approx(std, rel=0.02) and abs(w.mean().item()) < std / 50


def test_every_parameter_is_trained_and_only_matrices_decay(run, monkeypatch):
    seen = []

    class Spy(torch.optim.AdamW):
        def __init__(self, groups, **kw):
            seen.extend(groups)
            super().__init__(groups, **kw)
    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    run("--pe", "lerope", "--steps", 1, "--lr", 1e-3, "--pe_lr", 5e-3)
    matrices, gains, pe = seen
    count = sum(w.numel() for group in seen for w in group["params"])
    assert count == log()[0]["parameters"]
    assert matrices["weight_decay"] == 100 and {w.ndim for w in matrices["params"]} == {2}      # 0.1 / lr
    assert gains["weight_decay"] == pe["weight_decay"] == 0 and 2 not in {w.ndim for w in gains["params"]}
    assert pe["peak"] == 5e-3 and [tuple(w.shape) for w in pe["params"]] == [(32,)]


def test_accumulation_changes_nothing_but_memory(run):
    whole = run("--steps", 5, "--batch", 8, "--eval_windows", 8, out="whole")[-1]["val"]
    parts = run("--steps", 5, "--batch", 2, "--accum", 4, out="parts")[-1]["val"]
    assert parts == pytest.approx(whole, abs=1e-5)


# ---------------------------------------------------------------------------------------------------- tasks
@pytest.mark.parametrize("pe, task, shape", [
    ("rope", "rotate-d", ()), ("ape", "reverse", ()), ("ndrope", "copy", ()), ("ape-tree", "rotate-d", None),
    ("ndrope", "grid", (2,)), ("ape-grid", "grid", (2,)), ("lerope", "grid", ())])
def test_a_task_is_scored_on_its_targets_alone_at_its_own_positions(run, capsys, pe, task, shape):
    """The reported loss is the mean over the held-out rows' targets, one by one."""
    line = run("--data", task, "--pe", pe, "--steps", 3)[-1]
    idx, targets, pos = tasks.task(task, 8, 0, held_out=True, nd=shape != ())
    assert shape is None or pos.shape == idx.shape + shape
    model, nats = train.load("out"), []
    for i, row in enumerate(targets.tolist()):
        logits = model(idx[i:i + 1], pos=pos[i:i + 1])[0][0].double().log_softmax(-1)
        nats += [-logits[t, symbol].item() for t, symbol in enumerate(row) if symbol >= 0]
    assert line["val"] == pytest.approx(sum(nats) / len(nats), abs=1e-5)
    assert "a sample" not in capsys.readouterr().out and line["bits_per_byte"] is None


def test_a_step_on_a_task_takes_its_training_rows(run, monkeypatch):
    flags = ("--data", "reverse", "--pe", "ape", "--steps", 4, "--eval_every", 2)
    forward, seen = train.GPT.forward, []

    def spy(self, x, y=None, pos=None):
        seen.append((x, y, pos))
        return forward(self, x, y, pos)
    monkeypatch.setattr(train.GPT, "forward", spy)
    run(*flags, out="whole")
    train_rows = {tuple(row) for row in tasks.task("reverse", 6000, 0)[0].tolist()}
    trained = [tuple(row) for x, y, _ in seen if y is not None for row in x.tolist()]
    assert len(trained) == 16 and len(set(trained)) > 12 and set(trained) <= train_rows
    assert all(pos is not None and pos.shape == x.shape for x, _, pos in seen)
    run(*flags, out="again")
    assert same(weights("whole"), weights("again"))


@pytest.mark.parametrize("flags", ("--pe ape-tree --data copy", "--pe ape-tree --data grid", "--pe ape-tree",
                                   "--pe ape-grid --data rotate-d", "--pe ape-grid",
                                   "--data copy --tokenizer gpt2", "--data copy --needles 0.5"))
def test_a_task_of_other_positions_or_other_tokens_is_refused(refused, flags):
    message = refused(*flags.split())
    assert "--data " in message and ("for ape-tree" in message or "leave --tokenizer" in message)


def test_needles_are_in_the_training_windows_alone(run, monkeypatch):
    """Their ids, 224 and up, are in no text here. The share is of windows; the rest is the text as it was."""
    forward, seen, validated = train.GPT.forward, [], []

    def spy(self, x, y=None, pos=None):
        rows = x if y is None else torch.cat((x, y[:, -1:]), dim=1)
        (validated if y is None else seen).extend(rows.tolist() if len(x) > 1 else [])      # 1: the sample
        return forward(self, x, y, pos)
    monkeypatch.setattr(train.GPT, "forward", spy)
    run("--steps", 20, "--needles", 0.5)
    planted = [row for row in seen if 128 <= max(row) < 256]
    assert len(seen) == 80 and 25 < len(planted) < 55 and max(map(max, validated)) < 128
    for row in planted:                                     # each key is followed by one value throughout
        after = {(key, value) for key, value in zip(row, row[1:]) if 224 <= key < 240}
        assert len(dict(after)) == len(after) and all(value >= 240 for _, value in after)
    text = Path("a.txt").read_bytes()
    assert all(bytes(row) in text for row in seen if max(row) < 128)


def test_needles_begin_in_short_windows(run, monkeypatch):
    """An eighth of the steps each in L/8, L/4 and L/2, of as many tokens."""
    forward, seen = train.GPT.forward, []

    def spy(self, x, y=None, pos=None):
        seen.append(tuple(x.shape) if y is not None else None)
        return forward(self, x, y, pos)
    monkeypatch.setattr(train.GPT, "forward", spy)
    run("--steps", 16, "--L", 128, "--needles", 1)
    assert [n for n in seen if n] == 2 * [(32, 16)] + 2 * [(16, 32)] + 2 * [(8, 64)] + 10 * [(4, 128)]
    seen.clear()
    run("--steps", 16, "--L", 128, out="text")
    assert [n for n in seen if n] == 16 * [(4, 128)]


def test_accumulation_on_a_task_weighs_each_micro_step_by_its_targets(run):
    flags = "--data", "op-d", "--steps", 4, "--eval_windows", 8
    whole = run(*flags, "--batch", 8, out="whole")[-1]
    parts = run(*flags, "--batch", 1, "--accum", 8, out="parts")[-1]
    assert parts["val"] == pytest.approx(whole["val"], abs=1e-4)


# -------------------------------------------------------------------------------- starting from another run
def test_a_frozen_encoding_keeps_the_learned_frequencies(run):
    learned = run("--pe", "lerope", "--steps", 20, "--pe_lr", 0.1, out="learned")[-1]["theta"]
    for source in ("learned", "learned/log.jsonl"):
        run("--pe", "lerope", "--steps", 2, "--init_pe", source, "--freeze_pe", out=f"frozen {len(source)}")
        run("--pe", "rope", "--steps", 2, "--init_pe", source, out=f"fixed {len(source)}")
    for out in ("frozen 7", "frozen 17", "fixed 7", "fixed 17"):
        assert train.load(out).pe.theta().tolist() == pytest.approx(learned, rel=1e-5)
    assert "pe.alpha" not in weights("fixed 7")


def test_a_rope_model_goes_on_as_p_rope(run):
    run("--pe", "rope", "--steps", 5, out="rope")
    val = run("--pe", "prope", "--p", 1, "--init", "rope", "--steps", 1, "--lr", 1e-9, out="p-rope")[1]["val"]
    assert val == pytest.approx(log("rope")[-1]["val"], abs=1e-6)


def test_init_takes_the_encoding_too_where_it_is_the_same(run, refused):
    run("--pe", "lerope", "--steps", 5, "--pe_lr", 0.1, out="lerope")
    run("--pe", "lerope", "--init", "lerope", "--steps", 1, "--pe_lr", 1e-9, out="on")
    assert torch.allclose(weights("on")["pe.alpha"], weights("lerope")["pe.alpha"], rtol=0, atol=1e-6)
    assert "heads" in refused("--pe", "lerope", "--init", "lerope", "--heads", 2, out="wider")


# ------------------------------------------------------------------------------------------------- going on
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_stopped_run_goes_on_to_the_bit(run, number, monkeypatch):
    flags = ("--pe", "lerope", "--steps", 12, "--eval_every", 4)
    run(*flags, out="whole")
    draw, steps = data.batch, []

    def stop_in_the_middle(*args):
        steps.append(args[-1])
        if len(steps) == 7:
            os.kill(os.getpid(), number)
        return draw(*args)
    monkeypatch.setattr(data, "batch", stop_in_the_middle)
    run(*flags)
    assert steps == list(range(7)) and train.read_checkpoint("out")["step"] == 6
    run(*flags, "--resume")
    assert same(weights("whole"), weights())
    assert [v["step"] for v in log()[1:]] == [0, 4, 8, 12]
    assert [v["val"] for v in log()[1:]] == [v["val"] for v in log("whole")[1:]]


def test_three_kills_leave_a_checkpoint_that_goes_on_to_the_bit(run):
    flags = ("--pe", "lerope", "--steps", 150, "--eval_every", 1)
    run(*flags, out="whole")
    for patience in (0.0, 0.15, 0.4):
        process = command(*flags, "--out", "out", *["--resume"] * Path("out/ckpt.pt").exists())
        before = train.read_checkpoint("out")["step"] if Path("out/ckpt.pt").exists() else -1
        while not Path("out/ckpt.pt").exists() or train.read_checkpoint("out")["step"] <= before:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        time.sleep(patience)
        process.kill()
        process.wait()
        assert 0 <= train.read_checkpoint("out")["step"] < 150
    run(*flags, "--resume")
    assert same(weights("whole"), weights())
    assert [v["step"] for v in log()[1:]] == list(range(151))


def test_a_finished_run_resumed_keeps_its_log(run):
    before = run("--steps", 6, "--eval_every", 4)
    assert run("--steps", 6, "--eval_every", 4, "--resume") == before and before[-1]["train"] > 0


def test_a_checkpoint_of_another_encoding_is_refused(run):
    run("--steps", 1)
    ckpt = train.read_checkpoint("out")
    ckpt["config"]["pe"] = "mine"
    torch.save(ckpt, "out/ckpt.pt")
    with pytest.raises(ValueError, match="mine.*not in the encodings"):
        train.load("out")


def test_resume_refuses_another_run(run, refused):
    run("--steps", 3)
    Path("other.txt").write_text("something else " * 100)
    others = {"--pe": "prope", "--heads": 2, "--lr": 0.5, "--steps": 9, "--data": "other.txt"}
    for flag, value in others.items():
        message = refused("--steps", 3, "--resume", flag, value)
        assert flag in message and str(value) in message and "--out" in message
    before = weights()
    Path("a.txt").write_text("changed " * 1000)
    assert "has changed" in refused("--steps", 3, "--resume") and same(before, weights())


def test_an_existing_run_is_not_overwritten(run, refused):
    run("--steps", 1)
    assert "--resume" in refused("--steps", 1)


# ------------------------------------------------------------------------------------------ things go wrong
def test_two_runs_do_not_share_a_folder(refused):
    fcntl = pytest.importorskip("fcntl")
    Path("out").mkdir()
    with open("out/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run" in refused()


def test_a_full_disk_keeps_the_last_checkpoint(run, monkeypatch):
    save, saved = torch.save, []

    def full(ckpt, path):
        saved.append(ckpt["step"])
        if len(saved) == 3:
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save(ckpt, path)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit, match="No space left.*--resume"):
        run("--steps", 6, "--eval_every", 2)
    assert train.read_checkpoint("out")["step"] == 2 and not list(Path("out").glob("*.part"))
    monkeypatch.setattr(torch, "save", save)
    assert run("--steps", 6, "--eval_every", 2, "--resume")[-1]["step"] == 6


def test_a_folder_removed_under_a_run_is_made_again(run, monkeypatch):
    draw = data.batch

    def remove(*args):
        if args[-1] == 3:
            for path in Path("out").iterdir():
                path.unlink()
            Path("out").rmdir()
        return draw(*args)
    monkeypatch.setattr(data, "batch", remove)
    assert [v["step"] for v in run("--steps", 4, "--eval_every", 2)[1:]] == [0, 2, 4]
    assert train.read_checkpoint("out")["step"] == 4


def test_a_loss_that_is_not_finite_stops_the_run(run, monkeypatch):
    clip, calls = train.nn.utils.clip_grad_norm_, []

    def poison(params, norm):
        clip(params, norm)
        calls.append(norm)
        if len(calls) == 6:
            params[0].grad.fill_(float("nan"))
    monkeypatch.setattr(train.nn.utils, "clip_grad_norm_", poison)
    with pytest.raises(SystemExit, match="not finite.*--lr"):
        run("--steps", 40, "--eval_every", 2)
    assert train.read_checkpoint("out")["step"] == 4
    assert all(w.isfinite().all() for w in weights().values())


@pytest.mark.parametrize("flags, words", {
    "--pe rotary": "rope", "--p 1.5": "[0, 1]", "--p nan": "[0, 1]", "--base 1": "1.1", "--base nan": "1.1",
    "--base inf": "1.1", "--heads 0": "[1,", "--heads 2.5": "[1,", "--layers 0": "[1,", "--L 0": "[1,",
    "--steps -3": "[1,", "--steps 0": "[1,", "--lr 0": "try", "--lr nan": "try", "--lr -1": "try",
    "--lr x": "try", "--pe_lr inf": "try", "--clip 0": "try", "--pe_clip nan": "try", "--seed -1": "[0,",
    "--batch 0": "[1,", "--accum 0": "[1,", "--eval_every 0": "[1,", "--eval_windows 0": "[1,",
    "--device tpu": "not on this machine", "--dtype fp8": "bf16", "--tokenizer words": "bytes",
    "--data nowhere": "no such file", "--data empty.txt": "empty", "--data short.txt": "smaller --L",
    "--data x.bin": "shards", "--data fineweb:x": "fineweb:9", "--L 99999": "smaller --L",
    "--resume": "does not exist", "--resume --out a.txt": "no checkpoint",
    "--out a.txt/run": "cannot be written",
    "--init a.txt": "no checkpoint", "--init nowhere": "does not exist", "--init_pe a.txt": "no log",
    "--needles 2": "[0, 1]", "--data a.txt --needles 0.5 --L 7": "8 or more do",
    "--init_pe broken.jsonl": "no log", "--reverse": "prope", "--p 0.5": "prope",
    "--ape_init near_identity": "ape", "--basis exp": "ndrope", "--directions mixed": "ndrope",
    "--data foo-d --pe ape-tree": "for ape-tree", "--init_pe out --pe prope": "lerope",
}.items())
def test_wrong_use_gets_a_sentence(refused, flags, words):
    Path("empty.txt").touch()
    Path("short.txt").write_text("too short")
    Path("broken.jsonl").write_text('{"step": 0}\n')
    message = refused(*flags.split())
    assert words in message and flags.split()[0] in message and "Traceback" not in message


@pytest.mark.parametrize("script", ("prope.py", "lerope.py", "scaling.py"))
def test_a_file_that_is_no_checkpoint_is_refused_by_every_script(script):
    done = subprocess.run([sys.executable, ROOT / script, "a.txt"], capture_output=True, text=True)
    assert done.returncode == 2 and "no checkpoint" in done.stderr and "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------- processes, the compiler
def test_two_processes_equal_one(run):
    flags = ("--pe", "lerope", "--steps", 20, "--eval_every", 10, "--accum", 2, "--L", 32, "--needles", 0.5)
    one = run(*flags, out="one")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [command(*flags, "--out", "two", RANK=str(r), LOCAL_RANK=str(r), **world) for r in range(2)]
    said = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    for a, b in zip(one[1:], log("two")[1:], strict=True):
        assert b["val"] == pytest.approx(a["val"], abs=1e-5)
        assert b["theta"] == pytest.approx(a["theta"], abs=1e-5)


@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")
def test_a_run_compiles_once_and_without_a_break():
    flags = ("--pe", "lerope", "--steps", 4, "--eval_every", 2, "--compile")
    process = command(*flags, TORCH_LOGS="graph_breaks,recompiles")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "compiled" in said and "a sample:" in said
    assert not re.search("graph break|recompil", said, re.IGNORECASE), said
