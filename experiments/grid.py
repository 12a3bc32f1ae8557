"""
Two dimensions or one: a symbol so many rows down and columns right, in grids wider than trained.

$ python experiments/grid.py axial 0        one run; experiments/grid.sh has all
$ python experiments/grid.py                the tables from the logs, and figures/grid.png

The task is grid of tasks.py: trained on 8 x 8, tested on cells that no training query asked from. A run
leaves its log in experiments/logs/grid/, with a last line on the trained model in grids of other sizes and at
another place; one that is there is not repeated. Arms of one seed share batches, test rows and all initial
weights but the encoding's.

Rates were chosen on seed 100, by the loss on held-out cells of 8 x 8. --lr 1e-3, 2e-3, 4e-3 give axial
0.0248, 0.0090, 0.0115: all arms have 2e-3. --pe_lr 1e-3, 3e-3, 1e-2 give mixed 0.0088, 0.0087, 0.0085, which
has 1e-2; exp 0.0093, 0.0092, 0.0093, so that the three bases have 3e-3; lie 0.0088, 0.0082, 0.0067, which has
1e-2. But what the rate decides for lie is how far its generators drift from commuting: at (100, 37) these
leave it right on 0.997, 0.822, 0.432 of the queries. So lie-slow, with 1e-3, is an arm as well. 300 steps are
enough: after 100 and 200 axial's loss is 0.060 and 0.013.
"""
import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import tasks
import train
from ndrope import NDRoPE, relativity_error

LOGS = Path(__file__).parent / "logs" / "grid"
COMMON = ("--data grid --heads 2 --layers 2 --batch 32 --steps 300 --lr 2e-3 --eval_every 100 --dtype fp32 "
          "--no-compile")                                   # compiling takes what it saves in 300 steps
AXES, Q = "--pe ndrope --directions axial --basis", "axial, learned Q: "
ARMS = {                                                    # flags, and what the figure calls it
    "rope": ("--pe rope", "RoPE on the index row * width + column"),
    "axial": (f"{AXES} identity", "axial"),
    "mixed": ("--pe ndrope --directions mixed --basis identity --pe_lr 1e-2", "mixed"),
    "exp": (f"{AXES} exp --pe_lr 3e-3", f"{Q}exp"),
    "cayley": (f"{AXES} cayley --pe_lr 3e-3", f"{Q}Cayley"),
    "givens": (f"{AXES} givens --pe_lr 3e-3", f"{Q}Givens"),
    "lie": (f"{AXES} identity --pe_lr 1e-2", "learned, not commuting"),         # its start is axial
    "lie-slow": (f"{AXES} identity --pe_lr 1e-3", "the same, a tenth of the rate"),
}
TESTS = {                                                   # size, and the place of its first cell
    "8 x 8": ((8, 8), (0, 0)), "8 x 8 at (100, 37)": ((8, 8), (100, 37)), "8 x 12": ((8, 12), (0, 0)),
    "12 x 8": ((12, 8), (0, 0)), "8 x 16": ((8, 16), (0, 0)), "16 x 16": ((16, 16), (0, 0))}
SEEDS, T = (0, 1, 2), 4.303                                 # T: of Student's t, 95 %, 2 degrees of freedom


class Lie(nn.Module):
    """rho(x) = exp(x_1 B_1 + x_2 B_2), B_i skew, learned, not commuting: at first axial ones plus noise."""
    temperature = 1.0

    def __init__(self, d, base, std=0.01):
        super().__init__()
        self.A = nn.Parameter(NDRoPE(d, 2, base=base).generators().float() + std * torch.randn(2, d, d))

    def generators(self):
        A = self.A.triu(1)
        return A - A.mT                                                         # (2, d, d)

    def forward(self, pos):
        """pos (B, L, 2) -> rho: x (B, H, L, d) -> the same shape. One matrix a cell, for all tokens there."""
        cells, cell = pos.flatten(0, 1).unique(dim=0, return_inverse=True)      # (n, 2), (B L,)
        B = self.generators()
        R = torch.matrix_exp(torch.einsum("ni,ijk->njk", cells.to(B), B))       # (n, d, d)
        order, many = cell.argsort(stable=True), cell.bincount().tolist()
        back = order.argsort()

        def rho(x):
            by_cell = x.transpose(1, 2).flatten(0, 1)[order].split(many)        # (tokens there, H, d) each
            y = torch.cat([part @ M.T for part, M in zip(by_cell, R)])[back]    # (B L, H, d)
            return y.unflatten(0, pos.shape[:2]).transpose(1, 2)
        return rho


@torch.no_grad()
def test(model, nd, seed, size, origin):
    """Accuracy and loss (nats) on the queries of 256 grids of that size, all from held-out cells."""
    idx, targets, pos = tasks.task("grid", 256, seed, held_out=True, nd=nd, size=size)
    pos = pos + torch.tensor(origin if nd else origin[0] * size[1] + origin[1])
    logits = torch.cat([model(*rows)[0] for rows in zip(*(t.split(32) for t in (idx, targets, pos)))])
    logits, targets = logits[targets >= 0], targets[targets >= 0]
    return {"accuracy": (logits.argmax(-1) == targets).double().mean().item(),
            "loss": nn.functional.cross_entropy(logits, targets).item()}


def run(arm, seed, *flags):
    """One run with the arm's flags and these, and its log."""
    name = "-".join([arm, seed, *(flag.strip("-") for flag in flags)])
    log, out = LOGS / f"{name}.jsonl", Path("out", "grid", name)
    if log.exists():
        return
    if arm in ("lie", "lie-slow"):
        train.encodings["ndrope"] = lambda c: Lie(c["d"], c["base"])
    sys.argv = ["train.py", *f"{COMMON} {ARMS[arm][0]} --seed {seed} --out {out}".split(), *flags]
    sys.argv += ["--resume"] * (out / "ckpt.pt").exists()
    train.main()
    lines = (out / "log.jsonl").read_text()
    if json.loads(lines.splitlines()[-1])["step"] < train.read_checkpoint(out)["args"]["steps"]:
        sys.exit(1)                                         # stopped by a signal
    model, nd = train.load(out), arm != "rope"
    last = {"tests": {where: test(model, nd, int(seed), *how) for where, how in TESTS.items()}}
    if nd:
        last["relativity_error"] = relativity_error(model.pe.generators().detach().double())
    LOGS.mkdir(parents=True, exist_ok=True)
    log.write_text(lines + json.dumps(last) + "\n")


def last_line(name):
    log = LOGS / f"{name}.jsonl"
    return json.loads(log.read_text().splitlines()[-1]) if log.exists() else None


def tables():
    """Prints what the logs say; -> {arm: {test: accuracies}} of the arms whose seeds are all there."""
    runs = {arm: [last_line(f"{arm}-{seed}") for seed in SEEDS] for arm in ARMS}
    runs = {arm: lines for arm, lines in runs.items() if all(lines)}
    for metric in ("loss", "accuracy"):
        found = {arm: {where: [line["tests"][where][metric] for line in lines] for where in TESTS}
                 for arm, lines in runs.items()}
        print(f"\n{metric}, mean of {len(SEEDS)} seeds; below, the paired difference to axial, 95 % interval")
        print("        " + "".join(f"{where:>19}" for where in TESTS))
        for arm, by_test in found.items():
            print(f"{arm:8}" + "".join(f"{statistics.fmean(values):19.4f}" for values in by_test.values()))
            if arm != "axial" and "axial" in found:
                pairs = [[a - b for a, b in zip(by_test[where], found["axial"][where])] for where in TESTS]
                cells = [(statistics.fmean(d), T * statistics.stdev(d) / len(d) ** 0.5) for d in pairs]
                print("        " + "".join(f"{mean:+9.4f} +- {half:.4f}" for mean, half in cells))
    print("\nlargest ||R_x^T R_y - R_(y-x)|| of x, y in the unit box, by seed")
    for arm, lines in runs.items():
        if arm != "rope":
            print(f"{arm:8}" + "".join(f"{line['relativity_error']:10.0e}" for line in lines))
    print("\nrates, on seed 100: the loss in 8 x 8, by which they are chosen, and the accuracy in each")
    for log in sorted(LOGS.glob("*-100-*.jsonl")):
        tests = last_line(log.stem)["tests"]
        print(f"{log.stem:22} {tests['8 x 8']['loss']:.4f}"
              + "".join(f"{values['accuracy']:9.4f}" for values in tests.values()))
    return found


def draw(accuracy):
    from matplotlib.figure import Figure
    ax = Figure(figsize=(11, 5), layout="constrained").subplots()
    for i, (arm, by_test) in enumerate(accuracy.items()):
        x = [k + (i - (len(accuracy) - 1) / 2) * 0.1 for k in range(len(TESTS))]
        mean = [statistics.fmean(values) for values in by_test.values()]
        ax.bar(x, mean, 0.09, label=ARMS[arm][1], color=f"C{i}", alpha=0.6)
        for where, values in zip(x, by_test.values()):
            ax.plot([where] * len(values), values, ".", color="black", markersize=4)
    ax.axhline(1 / 16, color="gray", linestyle=":", label="chance")
    ax.set_xticks(range(len(TESTS)), TESTS)
    ax.set(ylim=(0, 1.02), ylabel="accuracy on held-out cells",
           xlabel="grid, rows x columns (trained on 8 x 8)",
           title="The symbol 1 or 2 steps away, by how positions are encoded; bars: the mean, dots: each of "
                 f"n = {len(SEEDS)} seeds,\n16,384 queries each (bash experiments/grid.sh)")
    ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    ax.figure.savefig("figures/grid.png", dpi=90)


if __name__ == "__main__":
    ap = argparse.ArgumentParser(usage="python experiments/grid.py [axial 0 [flags for train.py]]")
    ap.add_argument("arm", nargs="?", choices=ARMS, help="if not given, the tables and the figure")
    ap.add_argument("seed", nargs="?", default="0")
    args, flags = ap.parse_known_args()
    if args.arm:
        run(args.arm, args.seed, *flags)
    else:
        draw(tables())
