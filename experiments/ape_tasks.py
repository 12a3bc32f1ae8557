"""
The table of the APE authors' reply: 11 tasks, 5 variants with sequence positions, and tree-APE on the trees.

$ python experiments/ape_tasks.py ape-init-train rotate-d 0      one run; experiments/ape_tasks.sh has all
$ python experiments/ape_tasks.py                                the table from the logs

A run leaves its log in experiments/logs/ape_tasks/, also if its loss diverged; with a log it is not repeated.
The metric is the teacher-forced perplexity of the target on 1,024 held-out samples. No arm has a factor that
weakens the logits with the distance, which the authors' code gives to APE alone.
"""
import json
import math
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import tasks
import train
from rope import RoPE

LOGS = Path(__file__).parent / "logs" / "ape_tasks"
COMMON = ("--heads 2 --layers 2 --batch 16 --steps 600 --lr 2e-3 --eval_every 600 --eval_windows 1024 "
          "--dtype fp32 --no-compile")                      # compiling takes what it saves in 600 steps
ARMS = {                                                    # in the order that the reply found
    "ape-init-train": "--pe ape --pe_lr 3e-2",
    "rope-train": "--pe rope-train --pe_lr 1e-3",
    "ape-frozen": "--pe ape --ape_init near_identity --freeze_pe",
    "ape-train": "--pe ape --ape_init near_identity --pe_lr 3e-2",
    "rope": "--pe rope",
    "ape-tree": "--pe ape-tree --pe_lr 1e-2",
}


class NaiveRoPE(RoPE):
    """theta itself is the parameter: a step of one size for frequencies powers of ten apart."""
    def __init__(self, d, base):
        super().__init__(d, base)
        self.frequencies = torch.nn.Parameter(super().theta().float())

    def theta(self, device=None):
        return self.frequencies.to(device, torch.float64)


def run(arm, task, seed, *flags):
    """One run, and its log; a last line says so if it diverged."""
    name = "-".join([task, arm, *map(str, flags[1::2]), f"s{seed}"])
    log, out = LOGS / f"{name}.jsonl", Path("out", "ape_tasks", name)
    if log.exists():
        return
    sys.argv = ["train.py", *COMMON.split(), *ARMS[arm].split(), "--data", task, "--seed", str(seed),
                "--out", str(out), *flags, *["--resume"] * (out / "ckpt.pt").exists()]
    train.encodings["rope-train"] = lambda c: NaiveRoPE(c["d"], c["base"])
    diverged = False
    try:
        train.main()
    except SystemExit as e:
        if "not finite" not in str(e):
            raise
        diverged = True
    lines = (out / "log.jsonl").read_text()
    if not diverged and json.loads(lines.splitlines()[-1])["step"] < 600:
        sys.exit(1)                                         # stopped by a signal: --resume goes on
    LOGS.mkdir(parents=True, exist_ok=True)
    log.write_text(lines + (json.dumps({"diverged": True}) + "\n") * diverged)


def perplexity(arm, task, seed):
    """Of the run's last evaluation; inf if it diverged, None if it is not there."""
    log = LOGS / f"{task}-{arm}-s{seed}.jsonl"
    last = json.loads(log.read_text().splitlines()[-1]) if log.exists() else None
    return last and (math.inf if last.get("diverged") else math.exp(last["val"]))


def table():
    """Perplexities, the mean over seeds; and their ratio to RoPE's in pairs, with its 95 % interval."""
    print("task         seeds" + "".join(f"{arm:>16}" for arm in ARMS))
    for task in tasks.names[:11]:
        seeds = [s for s in range(9) if perplexity("rope", task, s)]
        cells = []
        for arm in ARMS:
            found = [perplexity(arm, task, s) for s in seeds]
            cells.append("" if None in found or not found else f"{statistics.fmean(found):.3f}")
        print(f"{task:12} {len(seeds):5}" + "".join(f"{c:>16}" for c in cells))
        if len(seeds) > 2:
            cells = []
            for arm in ARMS:
                found = [perplexity(arm, task, s) for s in seeds]
                if None in found or arm == "rope":
                    cells.append("")
                    continue
                d = [math.log(a / perplexity("rope", task, s)) for a, s in zip(found, seeds)]
                half = 4.303 * statistics.stdev(d) / len(d) ** 0.5 if len(d) == 3 else math.nan
                cells.append(f"{statistics.fmean(d):+.3f}+-{half:.3f}")
            print(f"  ln of the ratio " + "".join(f"{c:>16}" for c in cells))


if __name__ == "__main__":
    run(*sys.argv[1:]) if len(sys.argv) > 1 else table()
