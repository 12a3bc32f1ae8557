"""
Two dimensions or one: a symbol so many rows down and columns right, in grids wider than trained.

$ python experiments/grid.py axial 0        one run; experiments/grid.sh has all

The task is grid of tasks.py: trained on 8 x 8, tested on cells that no training query asked from. The last
line of a log is on the trained model in grids of other sizes and at another place. Arms of one seed share
batches, test rows and all initial weights but the encoding's.

Rates were chosen on seed 100, by the loss on held-out cells of 8 x 8. --lr 1e-3, 2e-3, 4e-3 give axial
0.0248, 0.0090, 0.0115: all arms have 2e-3. --pe_lr 1e-3, 3e-3, 1e-2 give mixed 0.0088, 0.0087, 0.0085, which
has 1e-2; exp 0.0093, 0.0092, 0.0093, so that the three bases have 3e-3; lie 0.0088, 0.0082, 0.0067, which has
1e-2. But what the rate decides for lie is how far its generators drift from commuting: at (100, 37) these
leave it right on 0.997, 0.822, 0.432 of the queries. So lie-slow, with 1e-3, is an arm as well. 300 steps are
enough: after 100 and 200 axial's loss is 0.060 and 0.013.
"""
import sys

import torch
from torch import nn

from once import once, train

import tasks
from ndrope import NDRoPE, relativity_error

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


def tests(out, arm, seed):
    """What the last line of the log says."""
    model, nd = train.load(out), arm != "rope"
    last = {"tests": {where: test(model, nd, seed, *how) for where, how in TESTS.items()}}
    if nd:
        last["relativity_error"] = relativity_error(model.pe.generators().detach().double())
    return last


if __name__ == "__main__":
    arm, seed, *flags = sys.argv[1:]
    if arm in ("lie", "lie-slow"):
        train.encodings["ndrope"] = lambda c: Lie(c["d"], c["base"])
    once("-".join([f"grid/{arm}", seed, *(flag.strip("-") for flag in flags)]),
         [*f"{COMMON} {ARMS[arm][0]} --seed {seed}".split(), *flags], lambda out: tests(out, arm, int(seed)))
