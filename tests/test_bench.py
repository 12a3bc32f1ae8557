"""
The bench: a row for each encoding, and three ways to rotate that agree.
"""
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import bench

BENCH = str(Path(__file__).parent.parent / "bench.py")
TINY = "--heads 1 --L 16 --batch 2 --rounds 2 --device cpu --dtype fp32 --no-compile".split()


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [BENCH, *TINY, *flags])
    runpy.run_path(BENCH, run_name="__main__")


def test_every_encoding_has_a_row_and_rope_is_once_itself(monkeypatch, capsys):
    run(monkeypatch)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    for name in ("rope", "prope", "lerope", "nope", "ape", "powers", "folded", "ndrope", "basis", "rotate",
                 "concatenate", "adjacent"):
        ms, *_, middle, low, high = map(float, re.findall(r"\d+\.\d+", rows[name]))
        assert ms > 0 and 0 < low <= middle <= high
    for name in ("rope", "rotate"):
        assert rows[name].endswith(" 1.000 [1.000, 1.000]")


@pytest.mark.parametrize("flags", [("--rounds", "1"), ("--heads", "0"), ("--device", "abacus"), ("--L", "x")])
def test_wrong_use_gets_a_sentence(monkeypatch, capsys, flags):
    with pytest.raises(SystemExit) as leave:
        run(monkeypatch, *flags)
    assert leave.value.code == 2 and f"argument {flags[0]}: " in capsys.readouterr().err


def test_the_three_forms_are_one_rotation():
    """Against complex numbers, which know no layout."""
    x, angle = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angle)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    cos, sin = angle.cos(), angle.sin()
    torch.testing.assert_close(bench.rotate(x, cos, sin), expected)
    torch.testing.assert_close(bench.concatenate(x, cos.repeat(1, 2), sin.repeat(1, 2)), expected)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    torch.testing.assert_close(bench.adjacent(x[..., order], cos, sin), expected[..., order])


def test_a_step_trains_and_its_memory_is_at_least_what_adamw_must_hold():
    x = torch.randint(257, (2, 16))
    config = {"vocab": 257, "heads": 1, "layers": 1, "pe": "lerope"}
    step, optimizer = bench.training_step(config, x, x, "fp32", False)
    weights = [w for group in optimizer.param_groups for w in group["params"]]
    before = [w.clone() for w in weights]
    step()
    assert not any(torch.equal(a, b) for a, b in zip(before, weights))
    # Weights, two moments and, at the end of a step, the gradients: four times the weights, and activations.
    assert bench.memory(step, optimizer) > 4 * sum(w.nbytes for w in weights) / 1e6


def test_rounds_take_everybody_in_every_place():
    calls = []
    ms = bench.in_rounds({name: lambda name=name: calls.append(name) for name in "abc"}, 5, "cpu")
    assert {name: len(v) for name, v in ms.items()} == {"a": 5, "b": 5, "c": 5}
    assert "".join(calls[::3]) == "abc" "bca" "cab" "cba" "acb" "bac"           # the first round is not kept
