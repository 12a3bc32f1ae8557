"""
The README: the files it names are there, and each command it shows runs, shortened to a few small steps.
"""
import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
            for line in block.splitlines()]
SMALL = "--steps 2 --heads 1 --L 64 --batch 2 --eval_windows 2 --no-compile".split()


def test_files_named_are_there():
    named = re.findall(r"\]\(((?!http)[^)]+)\)", TEXT) + re.findall(r"[\w./]+\.py", TEXT)
    assert len(named) > 20 and not [name for name in named if not (ROOT / name).exists()]


def test_what_it_shows_of_the_interface_is_the_code_of_the_gpt():
    code = (ROOT / "train.py").read_text()
    assert "rho = self.pe(" in code and "rho(q)" in code and "rho(k)" in code


def run(command, folder):
    """One command there, shortened, on one thread (see conftest.py) -> its script."""
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
    return script


def test_commands_run(tmp_path):
    """In their order, but the demos, which need no run, beside the rest."""
    (tmp_path / "figures").mkdir()
    (tmp_path / "path").mkdir()
    for part in ("train", "val"):
        (tmp_path / "path" / f"x_{part}_1.bin").write_bytes(b"\1\0" * 1000)
    commands = [c.removeprefix("pip install -r requirements.txt && ").replace("'", "") for c in COMMANDS]
    commands.remove("python -m pytest")
    needs_a_run = [any(word in command for word in ("train.py", "out/")) for command in commands]
    lanes = [[c for c, needs in zip(commands, needs_a_run) if needs == lane] for lane in (True, False)]
    with ThreadPoolExecutor(2) as pool:
        ran = set(itertools.chain(*pool.map(lambda lane: [run(c, tmp_path) for c in lane], lanes)))
    names = "train", "rope", "prope", "lerope", "scaling", "ape", "ndrope", "tasks", "eval_niah"
    assert ran == {f"{name}.py" for name in names}
    assert len(list((tmp_path / "figures").iterdir())) >= 4
