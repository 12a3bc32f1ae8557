"""
Every table and figure of the README's results that has logs, from experiments/logs alone.

$ python experiments/report.py          README.md between its marks <!-- name --> .. <!-- / -->, and figures/

Intervals are of paired differences: mean +- Student's t (95 %) times the standard error over seeds.
"""
import json
import math
import re
import statistics
from pathlib import Path

from ape_tasks import ARMS as APE_ARMS
from grid import ARMS as GRID_ARMS
from grid import TESTS
from tasks import names
from text import ARMS as TEXT_ARMS

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "experiments" / "logs"
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}               # number of seeds -> Student's t


def lines(name):
    return [json.loads(line) for line in (LOGS / f"{name}.jsonl").read_text().splitlines()]


def there(name):
    return (LOGS / f"{name}.jsonl").exists()


def loss(name):
    """A run's validation loss at its last evaluation: lines of something else may follow."""
    return [v["val"] for v in lines(name) if "val" in v][-1]


def mean(values):
    return statistics.fmean(values)


def half(values):
    """Of the 95 % interval of the mean of paired differences."""
    return T[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def markdown(head, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


# ------------------------------------------------------------------------------------------------------------
# tables: name of the mark -> markdown

def default():
    rows = []
    for pe in ("rope", "prope", "lerope", "nope"):
        last = lines(f"default/{pe}")[-1]
        rows.append((pe, f"{last['val']:.4f}", f"{last['bits_per_byte']:.4f}", f"{last['seconds']:.0f}"))
    return markdown(("`--pe`", "validation loss, nats a byte", "bits a byte", "seconds"), rows)


def rates():
    rows = []
    for label, flag, rates, log in (
            ("rope", "lr", ("5e-4", "1e-3", "2e-3"), "sweep/rope-lr{}"),
            ("lerope", "pe_lr", ("3e-3", "1e-2", "3e-2"), "sweep/lerope-pe_lr{}"),
            ("rope, by text.sh", "lr", ("2e-3", "4e-3", "8e-3"), "text/rope-lr-{}-s100")):
        found = ", ".join(f"{loss(log.format(rate)):.3f}" for rate in rates)
        rows.append((label, f"`--{flag}` {', '.join(rates)}", found))
    return markdown(("`--pe`", "rate", "validation loss"), rows)


def accuracies():
    """arm of grid.py -> for each test the accuracies of its seeds."""
    runs = {arm: [lines(f"grid/{arm}-{seed}")[-1]["tests"] for seed in range(3)] for arm in GRID_ARMS}
    return {arm: [[run[where]["accuracy"] for run in all3] for where in TESTS] for arm, all3 in runs.items()}


def grid():
    """Accuracy, the mean of the seeds; and for the arms beside axial their difference to it."""
    found, rows, signed = accuracies(), [], []
    for arm, (_, label) in GRID_ARMS.items():
        rows.append((label, *(f"{mean(v):.4f}" for v in found[arm])))
        pairs = [[a - b for a, b in zip(v, w)] for v, w in zip(found[arm], found["axial"])]
        if arm != "axial":
            signed.append((label, *(f"{mean(d):+.3f} +- {half(d):.3f}" for d in pairs)))
    between = ("*less axial, 95 % interval*", *[""] * len(TESTS))
    return markdown(("rows x columns", *TESTS), [*rows, between, *signed])


def perplexity(task, arm, seed):
    """Of the run's last evaluation; inf if it diverged."""
    last = lines(f"ape_tasks/{task}-{arm}-s{seed}")[-1]
    return math.inf if last.get("diverged") else math.exp(last["val"])


def ape():
    """Perplexities, the mean of the seeds; where there are three, the logarithm of the ratio to RoPE's."""
    rows, signed = [], []
    for task in names[:11]:
        arms = [arm for arm in APE_ARMS if arm != "ape-tree" or task[-2:] in ("-b", "-d")]
        seeds = [s for s in range(3) if all(there(f"ape_tasks/{task}-{arm}-s{s}") for arm in arms)]
        found = {arm: [perplexity(task, arm, s) for s in seeds] for arm in arms}
        logs = {arm: [math.log(a / b) for a, b in zip(v, found["rope"])] for arm, v in found.items()}
        if seeds:
            rows.append((task, len(seeds), *(f"{mean(found[a]):.3f}" if a in arms else "" for a in APE_ARMS)))
        if len(seeds) > 1:
            signed.append((task, len(seeds), *(f"{mean(logs[a]):+.3f} +- {half(logs[a]):.3f}"
                                               if a in arms and a != "rope" else "" for a in APE_ARMS)))
    between = ("*ln of the ratio to rope, 95 % interval*", *[""] * (1 + len(APE_ARMS)))
    return markdown(("task", "seeds", *APE_ARMS), [*rows, between, *signed])


def text_seeds(arm):
    return [s for s in range(5) if there(f"text/{arm}-s{s}")]


def text():
    """Validation loss, the mean of the seeds; and its difference to rope, or to one that goes on as rope."""
    rows = []
    for arm, flags in TEXT_ARMS.items():
        other = "on-as-rope" if arm.startswith("on-") else "rope"
        seeds = [s for s in text_seeds(arm) if s in text_seeds(other)]
        values, others = ([loss(f"text/{name}-s{s}") for s in seeds] for name in (arm, other))
        pairs = [a - b for a, b in zip(values, others)]
        if len(seeds) > 1:
            rows.append((f"`{flags}`", len(seeds), f"{mean(values):.4f}",
                         f"{mean(pairs):+.4f} +- {half(pairs):.4f}" * (arm != other)))
    return markdown(("flags", "seeds", "validation loss", "less rope, 95 % interval"), rows)


def lengths():
    """The loss past the trained length under each scaling; and its difference to no scaling."""
    pes, rows, signed = ("rope", "prope", "lerope"), [], []
    seeds = [s for s in range(5) if all(s in text_seeds(pe) for pe in pes)]
    found = {pe: [lines(f"text/{pe}-s{s}")[-1]["lengths"] for s in seeds] for pe in pes}
    columns = [(pe, i) for pe in pes for i in (1, 2, 3)]                            # i: L' / L = 2^i
    for method in found["rope"][0]:
        values, plain = ([[run[m][i] for run in found[pe]] for pe, i in columns] for m in (method, "none"))
        rows.append((method, *(f"{mean(v):.3f}" for v in values)))
        if method != "none":
            pairs = [[a - b for a, b in zip(v, w)] for v, w in zip(values, plain)]
            signed.append((method, *(f"{mean(d):+.3f} +- {half(d):.3f}" for d in pairs)))
    between = (f"*less none, 95 % interval, {len(seeds)} seeds*", *[""] * len(columns))
    return markdown(("L' / L", *(f"{pe} {2 ** i}" for pe, i in columns)), [*rows, between, *signed])


TABLES = {f.__name__: f for f in (default, rates, grid, ape, text, lengths)}


def filled(text):
    """The README with each table between its marks."""
    for name in re.findall(r"<!-- (\w+) -->", text):
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- / -->)", lambda m: f"{m[1]}\n{TABLES[name]()}\n\n{m[2]}",
                      text, flags=re.DOTALL)
    return text


# ------------------------------------------------------------------------------------------------------------
# figures

def draw_grid():
    from matplotlib.figure import Figure
    ax = Figure(figsize=(11, 5), layout="constrained").subplots()
    for i, (arm, values) in enumerate(accuracies().items()):
        x = [k + (i - (len(GRID_ARMS) - 1) / 2) * 0.1 for k in range(len(TESTS))]
        ax.bar(x, [mean(v) for v in values], 0.09, label=GRID_ARMS[arm][1], color=f"C{i}", alpha=0.6)
        for where, v in zip(x, values):
            ax.plot([where] * len(v), v, ".", color="black", markersize=4)
    ax.axhline(1 / 16, color="gray", linestyle=":", label="chance")
    ax.set_xticks(range(len(TESTS)), TESTS)
    ax.set(ylim=(0, 1.02), ylabel="accuracy on held-out cells",
           xlabel="grid, rows x columns (trained on 8 x 8)",
           title="The symbol 1 or 2 steps away, by how positions are encoded; bars: the mean, dots: each of "
                 "n = 3 seeds,\n16,384 queries each (bash experiments/grid.sh)")
    ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    ax.figure.savefig(ROOT / "figures" / "grid.png", dpi=90)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
    draw_grid()
