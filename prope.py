"""
p-RoPE: RoPE whose slowest frequencies are zero.

    theta_i = base^(-2i/d)  for i < int(p d // 2),      theta_i = 0  for the other pairs                   [1]

Fast pairs point at positions. Slow ones carry meaning, and a turn however slow hides a far enough token: so
none at all. p = 1 is RoPE, p = 0 no encoding (NoPE). The laws are those of rope.py; nothing is learned.

    x (..., H, L, d)     pos (L,) or (B, L), any real     theta (d/2,), radians a token

Not partial rotary (GPT-NeoX, Phi): that turns the first p d channels by base^(-2i/(p d)), a spectrum of their
own with all of RoPE's slow end. Here the denominator stays d, and the slow end is what goes. Hugging Face
calls it rope_type "proportional", with p as partial_rotary_factor.

The paper plots each pair's mean norm; here it is a pair's share of the squared norm, as QK-norm fixes the
total: heads of any scale compare, and even use is 2/d. A rotation changes neither.

[1] Barbero et al. 2025, Round and Round We Go!, https://arxiv.org/abs/2410.06205
$ python prope.py              Prop. 3.1, 3.2, 5.2 and Thm 5.3, 6.1 of [1] in numbers; figures/prope.png
$ python prope.py CHECKPOINT   the pairs that a trained model uses; usage.png in the run's folder
"""
import argparse
import math
from pathlib import Path

import torch

from rope import RoPE


class PRoPE(RoPE):
    def __init__(self, d, p=0.75, base=10_000.0, reverse=False):
        """d: width of a head. p in [0, 1]: the part kept, the fastest; reverse keeps the slowest instead."""
        super().__init__(d, base)
        if not 0 <= p <= 1:
            raise ValueError(f"p = {p}: the kept fraction must lie in [0, 1]")
        self.p, self.reverse = p, reverse

    def theta(self, device=None):
        theta = super().theta(device)
        kept, i = int(self.p * self.d // 2), torch.arange(self.d // 2, device=device)
        return torch.where(i >= self.d // 2 - kept if self.reverse else i < kept, theta, 0.0)


# ------------------------------------------------------------------------------------------------------------
def logit(pe, q, k, r):
    """<rho(m) q, rho(m - r) k> at the distances r (n,), for q, k (d,) or, one for each distance, (n, d)."""
    return (q * pe(-r)(k.expand(len(r), -1))).sum(-1)


def weights(pe, q, k):
    """Causal attention (..., L, L) of q, k (..., L, d), not over sqrt(d): their norms set how sharp it is."""
    rho = pe(pos := torch.arange(q.shape[-2]))
    return (rho(q) @ rho(k).mT).masked_fill(pos > pos[:, None], -math.inf).softmax(-1)


@torch.no_grad()
def usage(model, idx):
    """idx (B, L) -> share (layers, H, 3, d/2): each pair's part of |q|^2, |k|^2 and |v|^2, mean over tokens;
    aim (layers, H, 2): mean attention weight on n = m and on n = m - 1, the first token left out."""
    rho, x, share, aim = model.pe(torch.arange(idx.shape[1])), model.embed(idx), [], []
    for block in model.blocks:
        q, k, v = block.heads(x)
        norm2 = torch.stack((rho(q), rho(k), v)).square().unflatten(-1, (2, -1)).sum(-2)   # (3, B, H, L, d/2)
        share.append((norm2 / norm2.sum(-1, keepdim=True)).mean((1, 3)).transpose(0, 1))
        w = weights(model.pe, q * model.pe.temperature / q.shape[-1] ** 0.5, k)     # (B, H, L, L)
        aim.append(torch.stack([w.diagonal(-j, -2, -1)[..., 1 - j :].mean((0, -1)) for j in (0, 1)], -1))
        x = block(x, rho, model.pe.temperature)
    return torch.stack(share), torch.stack(aim)


if __name__ == "__main__":
    import matplotlib.pyplot as plt
    from data import validation, windows
    from train import load
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    ap.add_argument("checkpoint", nargs="?", help="a run's folder or ckpt.pt; none: the paper's statements")
    ap.add_argument("--data", help="text to validate on, as in train.py; the run's own if not given")
    args = ap.parse_args()

    if args.checkpoint:
        try:
            model = load(args.checkpoint)
            rows = windows(validation(model.config, args.data), model.config["L"], 16)      # (16, L + 1)
        except (ValueError, OSError) as e:
            ap.error(f"--data {args.data}: {e}" if args.data else f"{e}")
        share, aim = usage(model, rows[:, :-1])
        table = {f"layer {i}": s for i, s in enumerate(share.mean(1))}              # name -> (3, d/2)
        for j, target in enumerate(("n = m", "n = m - 1")):
            layer, head = divmod(aim[..., j].argmax().item(), aim.shape[1])
            table[f"layer {layer} head {head}: {aim[layer, head, j]:.2f} on {target}"] = share[layer, head]
        print(f"{'% of squared norm, fastest .. slowest quarter':46}" + "".join(f"{c:22}" for c in "qkv"))
        for name, s in table.items():
            quarters = ["".join(f"{100 * part.sum():5.1f}" for part in c.chunk(4)) for c in s]
            print(f"{name:44}" + "  ".join(quarters))
        grid = 100 * torch.stack(list(table.values()), 1)                           # (3, rows, d/2)
        fig, axes = plt.subplots(1, 3, figsize=(14, 2 + 0.3 * len(table)), sharey=True, layout="constrained")
        for ax, name, g in zip(axes, "qkv", grid):
            image = ax.imshow(g, aspect="auto", vmin=0, vmax=grid.max())
            ax.axhline(len(share) - 0.5, color="white", lw=3)
            ax.set(xlabel="pair i, fastest first", title=name, yticks=range(len(table)), yticklabels=table)
        fig.colorbar(image, ax=axes, label="% of the squared norm")
        path = Path(args.checkpoint)
        fig.savefig((path if path.is_dir() else path.parent) / "usage.png", dpi=110)
        raise SystemExit

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    fig, ax = plt.subplot_mosaic("aabbcd;eeffgg", figsize=(14, 7.6), layout="constrained")
    row = lambda name, values: print(f"{name:62}" + "".join(f"{round(float(v), 5):>10g}" for v in values))

    pe, r, at, (q, k) = RoPE(256), torch.arange(5001), [0, 10, 100, 1000, 5000], torch.randn(2, 5001, 256)
    pairs = {"fresh Gaussian q, k": (q, k), "one Gaussian q, k": (q[0], k[0]), "all ones": torch.ones(2, 256)}
    row("Prop. 3.2: logit / d at distance", at)
    for name, pair in pairs.items():
        ax["a"].plot(r, y := logit(pe, *pair, r) / 256, lw=0.4 if "fresh" in name else 1.2, label=name)
        row("    " + name, y[at])
    ax["a"].set(xlabel="distance, tokens", ylabel="logit / d", title="Only all-ones decay (Prop. 3.2)")

    q, r = q[0], torch.arange(201)
    for c in (0, 30, 120):
        k = pe(torch.tensor([c]))(q[None])
        ax["b"].plot(r, y := logit(pe, q, k, r) / (q @ q), label=c)
        row(f"Prop. 3.1: k = rho({c}) q, largest logit at distance", [y.argmax()])
    ax["b"].set(xlabel="distance, tokens", ylabel="logit / q.q", title="k = rho(r) q peaks at r (Prop. 3.1)")

    one, L = torch.tensor([1.0, 0.0]), 12
    psi = 10 * one.expand(L, 2)
    for name, j, key in (("c", 0, "psi"), ("d", 1, "rho(1) psi")):
        w = weights(RoPE(2), psi, RoPE(2)(torch.full((L,), j))(psi))
        row(f"Thm 5.3: q = psi, k = {key}, least weight on n = m - {j}", [w.diagonal(-j).min()])
        ax[name].imshow(w, vmin=0, vmax=1, cmap="Blues")
        ax[name].set(xlabel="key n", ylabel="query m", title=f"Thm 5.3: q = psi,\nk = {key}", yticks=[0, 9])

    tokens = torch.randn(2, 200, 8)[[0, 1, 1]].transpose(0, 1)                     # (heads, 3, d): BOS, x, x
    q, k = (tokens @ torch.randn(200, 8, 8) / 4 for _ in range(2))
    for name, p in (("RoPE", 1), ("NoPE", 0)):
        w = weights(PRoPE(8, p), q, k)[:, 2]
        ax["f"].plot(w[:, 1], w[:, 2], ".", ms=4, label=f"{name} heads on [BOS, x, x]")
        row(f"Prop. 5.2: [BOS, x, x], most weight on n = m, 200 {name} heads", [w[:, 2].max()])
    ax["f"].set(xlabel="weight on n = m - 1", ylabel="weight on n = m", title="NoPE: below 1/2 (Prop. 5.2)")

    # The target's key equals q, the others are 0; |q|^2 = a is enough for 10,000 tokens if nothing turns.
    norm2, r, at, a = torch.logspace(-1, 7.5, 400), torch.arange(10_000), [9, 99, 999, 9999], math.log(1e7)
    row("Thm 5.3: |psi|^2 for 0.99 on n = m; 6.1: kept of a target, tokens", [n + 1 for n in at])
    for t in (1.0, 0.1, 0.01, 0.001, 0.0):
        cos = logit(RoPE(2, theta=[t]), one, one, r)
        sharp = (norm2[:, None] * cos[:L]).softmax(-1)[:, 0]
        kept = 1 / (1 + r * (-a * cos.cummin(0).values).exp())
        ax["e"].semilogx(norm2, sharp, label=f"{t:g}")
        ax["g"].semilogx(r + 1, kept, label=f"{t:g}")
        row(f"    theta = {t:<6g}{torch.where(sharp > 0.99, norm2, math.inf).min():23,.0f}", kept[at])
    ax["e"].set(xlabel="|psi|^2, 12 tokens", ylabel="weight on n = m", title="Faster is sharper (Thm 5.3)")
    ax["g"].set(xlabel="tokens", ylabel="least weight on a target", title="Only theta = 0 keeps it (Thm 6.1)")
    for name, title in zip("abefg", ("", "r", "theta", "", "theta")):
        ax[name].legend(title=title)
    fig.savefig("figures/prope.png", dpi=110)
