"""
The README: the files it names are there, and each command it shows runs, shortened to a few small steps.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip().removeprefix("pip install -r requirements.txt && ").replace("'", "")
            for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
COMMANDS.remove("python -m pytest")
RUNS = [command for command in COMMANDS if "train.py" in command or "out/" in command]      # in their order
DEMOS = [command for command in COMMANDS if command not in RUNS]
SMALL = "--steps 2 --heads 1 --L 64 --batch 2 --eval_windows 2 --no-compile".split()


def test_files_named_are_there():
    named = re.findall(r"\]\(((?!http)[^)]+)\)", TEXT) + re.findall(r"[\w./]+\.py", TEXT)
    assert len(named) > 20 and not [name for name in named if not (ROOT / name).exists()]


def test_the_tests_that_the_claims_name_are_there():
    claims = re.findall(r"(tests/test_\w+\.py): ((?:`\w+`(?:, )?)+)", TEXT)
    assert len(claims) > 10
    for file, parts in claims:
        tests = " ".join(re.findall(r"def (test_\w+)", (ROOT / file).read_text()))
        assert all(part in tests for part in re.findall(r"\w+", parts)), (file, parts)


def test_what_it_shows_of_the_interface_is_the_code_of_the_gpt():
    code = (ROOT / "train.py").read_text()
    assert "rho = self.pe(" in code and "rho(q)" in code and "rho(k)" in code


def run(command, folder):
    """One command there, shortened, on one thread (see conftest.py)."""
    python, script, *flags = command.split()
    assert python == "python"
    if script == "train.py":
        flags += SMALL + (["--out", "out/shards"] if "--data" in flags else [])
    if "--lengths" in flags:
        flags[-1] = "1,2"
    if script == "eval_niah.py":
        flags += "--depths 2 --trials 1".split()
    done = subprocess.run([sys.executable, ROOT / script, *flags], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])


def test_every_script_has_a_command():
    names = "train", "rope", "prope", "lerope", "scaling", "ape", "ndrope", "tasks", "eval_niah"
    assert {command.split()[1] for command in DEMOS + RUNS} == {f"{name}.py" for name in names}


@pytest.mark.parametrize("command", DEMOS)
def test_a_demo_runs_and_draws(command, tmp_path):
    (tmp_path / "figures").mkdir()
    run(command, tmp_path)
    assert any((tmp_path / "figures").iterdir()) or "tasks.py" in command


def test_the_runs_and_what_is_made_of_them(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "path").mkdir()
    for part in ("train", "val"):
        (tmp_path / "path" / f"x_{part}_1.bin").write_bytes(b"\1\0" * 1000)
    for command in RUNS:
        run(command, tmp_path)
