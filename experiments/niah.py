"""
One run with needles in every window, then asked for them at every depth, to 8 x its length, by each scaling.

$ python experiments/niah.py lerope 0           experiments/niah.sh has all

A run's log ends in {"niah": {scaling: {s: [accuracy at each depth]}}, "control": the controls' largest}.
"""
import json
import sys

from once import once                                       # first: it makes the scripts above importable
import eval_niah

COMMON = ("--heads 2 --layers 2 --L 128 --batch 16 --steps 8000 --lr 4e-3 --dtype fp32 --needles 1 "
          "--eval_every 2000 --eval_windows 256")


def asked(out):
    sys.argv = ["eval_niah.py", str(out), "--depths", "11", "--trials", "20"]
    eval_niah.main()
    table, control = {}, 0
    for cell in map(json.loads, (out / "niah.jsonl").read_text().splitlines()):
        table.setdefault(cell["scaling"], {}).setdefault(cell["s"], []).append(cell["accuracy"])
        control = max(control, cell["control"])
    return {"niah": table, "control": control}


if __name__ == "__main__":
    pe, seed, *flags = sys.argv[1:]
    once("-".join([f"niah/{pe}", *(f.strip("-") for f in flags), f"s{seed}"]),
         [*COMMON.split(), "--pe", pe, "--seed", seed, *flags], asked)
