"""
One run on text in the regime that two slow cores allow: half the default's width and length, 1,000 steps.

$ python experiments/text.py lerope 0           experiments/text.sh has all

A run's log ends in what is measured of the trained model: "lengths", the loss past the trained length under
every scaling; "bands", what the loss rises by without each band; "quarters", how q, k and v spread their norm
over the bands; "aim", the most weight of a head on n = m and on n = m - 1, and that head's norm by quarter.
"""
import sys

import torch
import torch.nn.functional as F
from torch import nn

from once import LOGS, once, train
from data import validation, windows
from lerope import Without, losses
from prope import usage
from rope import RoPE
from scaling import METHODS, extend

COMMON = ("--heads 2 --layers 2 --L 128 --batch 16 --steps 1000 --lr 4e-3 --dtype fp32 --eval_every 500 "
          "--eval_windows 2048")
ARMS = {
    "rope": "--pe rope",
    "prope": "--pe prope",
    "lerope": "--pe lerope",
    "nope": "--pe nope",
    "prope-0.25": "--pe prope --p 0.25",
    "prope-reverse": "--pe prope --reverse",
    "rope-500k": "--pe rope --base 5e5",
    "rope-625": "--pe rope --base 625",
    "prope-625": "--pe prope --base 625",
    "lerope-625": "--pe lerope --base 625",
    "lerope-linear": "--pe lerope-linear",
    "rope-learned": "--pe rope --init_pe {learned}",        # RoPE at the frequencies of another seed's LeRoPE
    "rope-longer": "--pe rope --steps 2000",
    "on-as-rope": "--pe rope --init {rope} --steps 100",
    "on-as-prope": "--pe prope --init {rope} --steps 100",
    "on-as-reverse": "--pe prope --reverse --init {rope} --steps 100",
}


class LinearLeRoPE(RoPE):
    """theta_i -> a_i theta_i, a = 1 at the start, where LeRoPE has e^alpha_i."""
    def __init__(self, d, base):
        super().__init__(d, base)
        self.a_i = nn.Parameter(torch.ones(d // 2))

    def theta(self, device=None):
        theta = super().theta(device)
        return theta * self.a_i.to(theta)


@torch.no_grad()
def lengths(model, val, n=64):
    """scaling -> nats a token over the last L tokens of n windows of L, 2 L, 4 L and 8 L that end alike."""
    pe, L, found = model.pe, model.config["L"], {}
    ends = torch.linspace(8 * L, len(val) - 1, n).long().tolist()
    for method in ["none", *METHODS][:-1] if pe.theta().any() else ["none"]:
        found[method] = []
        for s in (1, 2, 4, 8):
            model.pe = pe if method == "none" else extend(pe, method, s, L)
            rows = torch.stack([torch.from_numpy(val[e - s * L:e + 1].astype("int64")) for e in ends])
            nll = [F.cross_entropy(model(x[:, :-1])[0][:, -L:].mT, x[:, -L:]) for x in rows.split(16)]
            found[method].append(torch.stack(nll).mean().item())
    model.pe = pe
    return found


@torch.no_grad()
def measured(out):
    model = train.load(out)
    val, pe = validation(model.config), model.pe
    rows = windows(val, model.config["L"], 64)
    share, aim = usage(model, rows[:16, :-1])               # (layers, H, 3, d/2), (layers, H, 2)
    quarters = share.unflatten(-1, (4, -1)).sum(-1)         # (layers, H, 3, 4)
    best = [divmod(aim[..., j].argmax().item(), aim.shape[1]) for j in (0, 1)]
    found = {"lengths": lengths(model, max(val, key=len)), "quarters": quarters.mean(1).tolist(),
             "aim": [(aim[i][h][j].item(), quarters[i, h].tolist()) for j, (i, h) in enumerate(best)]}
    if pe.theta().any():
        loss = losses(model, pe, rows).mean()
        without = [losses(model, Without(pe, i), rows).mean() for i in range(pe.d // 2)]
        found["bands"] = (torch.stack(without) - loss).tolist()
    return found


if __name__ == "__main__":
    arm, seed, *flags = sys.argv[1:]
    train.encodings["lerope-linear"] = lambda c: LinearLeRoPE(c["d"], c["base"])
    others = {"learned": LOGS / f"text/lerope-s{(int(seed) + 1) % 3}.jsonl", "rope": f"out/text/rope-s{seed}"}
    once("-".join([f"text/{arm}", *(f.strip("-") for f in flags), f"s{seed}"]),
         [*COMMON.split(), *ARMS[arm].format(**others).split(), "--seed", seed, *flags], measured)
