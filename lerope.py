"""
LeRoPE: RoPE whose frequencies are learned, in log space.

    theta_i = e^alpha_i base^(-2i/d),     alpha_i = 0 at the start, which is RoPE to the bit               [1]

In log space a step multiplies: theta stays above 0, and slow bands, powers of ten below the fast, move as
readily. One alpha (d/2,) serves all layers and heads: better than one for each, says the paper. It is an
optimiser group of its own, with no weight decay (train.py). At every alpha the laws are those of rope.py.

    x (..., H, L, d)     pos (L,) or (B, L), any real     theta (d/2,), radians a token

What moves a frequency, with pairs of q, k as complex numbers, g_mn = dloss/dlogit_mn and D = m - n:

    c_i[D] = sum over layers, rows, heads and m - n = D of  g_mn q_m,i conj(k_n,i) / sqrt(d)
    P_i(t) = Re sum_D c_i[D] e^(1j D t)            the Fourier transform of the gradient, gathered by offset
    dloss/dtheta_i = P_i'(theta_i),     dloss/dalpha_i = theta_i P_i'(theta_i)           [1, sec. 3.2, App. B]

P holds c fixed, though g and deeper q, k move with theta: P_i' is the gradient at the present theta only.
The paper published no code. cos and sin are made anew at each forward pass: kept, they would be stale after a
step, and the graph behind them gone ("backward a second time").

[1] Karypis et al. 2026, LeRoPE, https://arxiv.org/abs/2607.10134
$ python lerope.py              P of a small attention, its slope against autograd's; figures/lerope.png
$ python lerope.py CHECKPOINT   spectrum, loss without each band, the dominant band's logit over the offset;
                                bands.png in the run's folder. A RoPE checkpoint is the control.
"""
import argparse
from pathlib import Path

import torch
from torch import nn

from rope import RoPE, frequencies


class LeRoPE(RoPE):
    def __init__(self, d, base=10_000.0, theta=None):
        """d: width of a head. One alpha (d/2,) for all layers and heads. theta: a start other than RoPE's."""
        super().__init__(d, base, theta)
        self.alpha = nn.Parameter(torch.zeros(d // 2))

    def theta(self, device=None):
        theta = super().theta(device)
        return theta * self.alpha.to(theta).exp()


def surrogate(q, k, grad_logits):
    """The offset-aggregated signal c_i[D], of one layer; add the layers' for the whole model's.
    q, k (..., L, d) after the norm and before the rotation, grad_logits = dloss/dlogit (..., L, L)
    -> c (d/2, 2L - 1) complex128, offsets D = -(L-1) .. L-1."""
    d, L = q.shape[-1], q.shape[-2]
    q, k = (torch.complex(*x.double().chunk(2, dim=-1)) for x in (q, k))            # (..., L, d/2)
    g = grad_logits.double() / d ** 0.5
    c = []
    for D in range(-(L - 1), L):
        m = slice(max(D, 0), L + min(D, 0))
        n = slice(max(-D, 0), L - max(D, 0))
        cD = g.diagonal(-D, -2, -1)[..., None] * q[..., m, :] * k[..., n, :].conj() # (..., L - |D|, d/2)
        c.append(cD.flatten(0, -2).sum(0))
    return torch.stack(c, dim=-1)


def P(c, theta):
    """P_i(theta_i) and its slope: c (d/2, 2L - 1), theta (..., d/2) -> P, P' (..., d/2) each."""
    L = (c.shape[-1] + 1) // 2
    D = torch.arange(-(L - 1), L, device=c.device)
    wave = c * torch.exp(1j * D * theta[..., None].to(torch.float64))               # (..., d/2, 2L - 1)
    return wave.sum(-1).real, (1j * D * wave).sum(-1).real


# ------------------------------------------------------------------------------------------------------------
class Without(nn.Module):
    """pe, but rho also sets pair i to 0: in q and in k, of every layer and head."""
    def __init__(self, pe, i):
        super().__init__()
        self.pe, self.temperature, self.pair = pe, pe.temperature, torch.tensor([i, i + pe.d // 2])

    def forward(self, pos):
        rho = self.pe(pos)
        return lambda x: rho(x).index_fill(-1, self.pair, 0)


@torch.no_grad()
def losses(model, pe, rows):
    """The model's loss on each row under the encoding pe: rows (n, L + 1) -> (n,) nats a token."""
    model.pe = pe
    return torch.stack([model(x[:, :-1], x[:, 1:])[1] for x in rows.split(1)])


@torch.no_grad()
def band_logits(model, idx, offset):
    """What pair i adds to a logit at the offsets m - n (n,), for the mean q and the mean k of idx (B, L):
    -> (layers, H, n, d/2). Where q and k are independent of each other it is the mean over all tokens."""
    rho, x, logits = model.pe(torch.arange(idx.shape[1])), model.embed(idx), []
    for block in model.blocks:
        q, k, _ = (t.mean((0, 2))[:, None] for t in block.heads(x))                 # (H, 1, d)
        q, k = model.pe(torch.zeros(1))(q), model.pe(-offset)(k.expand(-1, len(offset), -1))
        logits.append((q * k).unflatten(-1, (2, -1)).sum(-2) * model.pe.temperature / q.shape[-1] ** 0.5)
        x = block(x, rho, model.pe.temperature)
    return torch.stack(logits)


if __name__ == "__main__":
    import matplotlib.pyplot as plt
    from data import validation, windows
    from train import load, number
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    ap.add_argument("checkpoint", nargs="?", help="a run's folder or ckpt.pt; none: the surrogate")
    ap.add_argument("--data", help="text to validate on, as in train.py; the run's own if not given")
    ap.add_argument("--windows", type=number(int, 2, 10**6, 64), default=64, help="of that text (default 64)")
    args = ap.parse_args()
    fig, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")

    if args.checkpoint:
        try:
            if "pe.A" in (model := load(args.checkpoint)).state_dict():
                raise ValueError(f"{args.checkpoint} has no spectrum that all heads share: see ape.py")
            rows = windows(validation(model.config, args.data), L := model.config["L"], args.windows)
        except (ValueError, OSError) as e:
            ap.error(f"--data {args.data}: {e}" if args.data else f"{e}")
        pe, offset = model.pe, torch.arange(4 * L)
        theta, plain = pe.theta().detach(), frequencies(pe.d, pe.base)
        logits, loss = band_logits(model, rows[:, :-1], offset), losses(model, pe, rows)
        more = torch.stack([losses(model, Without(pe, i), rows) for i in range(len(theta))]) - loss
        cost, error = more.mean(1), more.std(1) / len(rows) ** 0.5
        (top, second), wavelength = cost.topk(2).indices.tolist(), 2 * torch.pi / theta / L
        total = logits[..., top].mean((0, 1))                                       # (4 L,)

        print(f"{args.checkpoint}: loss {loss.mean():.4f} on {len(rows)} windows of L = {L}")
        print("band   RoPE's theta          theta   wavelength / L   loss without it, more by")
        for i, t in enumerate(theta):
            print(f"{i:4}{plain[i]:15.3e}{t:15.3e}{wavelength[i]:17.3f}{cost[i]:15.4f} +- {error[i]:.4f}")
        print(f"band {top} costs most, {cost[top] / cost[second]:.1f} x the next: {wavelength[top]:.3f} L")
        print("its logit at offset", *(f" {r / L:g} L: {total[r]:.3f}" for r in offset[:: L // 2].tolist()))
        axes[0].semilogy(2 * torch.pi / plain / L, "--", label="RoPE")
        axes[0].semilogy(wavelength, ".-", label=model.config["pe"])
        axes[0].plot(top, wavelength[top], "ko", mfc="none", ms=10, label="dominant band")
        axes[0].axhline(2.205, color="black", lw=0.8, label="2.205, the paper's dominant band")
        axes[0].set(xlabel="band i", ylabel="wavelength / L", title="The spectrum")
        axes[1].bar(range(len(theta)), cost, yerr=error)
        axes[1].set(xlabel="band i", ylabel="nats a token", title="What the loss rises by without band i")
        axes[2].plot(offset, logits[..., top].flatten(0, 1).T, color="gray", lw=0.5)
        axes[2].plot(offset, total, lw=3, label="mean of the heads")
        axes[2].axvspan(0, L, alpha=0.15, label="trained window")
        axes[2].axhline(0, color="black", lw=0.8)
        axes[2].set(xlabel="offset m - n, tokens", ylabel="logit", title=f"What band {top} adds, by head")
        axes[0].legend(), axes[2].legend()
        path = Path(args.checkpoint)
        fig.savefig((path if path.is_dir() else path.parent) / "bands.png", dpi=110)
        raise SystemExit

    torch.manual_seed(0)
    B, H, L, d = 4, 2, 64, 6
    q, k = torch.randn(2, 1, H, 1, d) + 0.3 * torch.randn(2, B, H, L, d, dtype=torch.float64)

    def attention(pe):
        """Of heads that should look four tokens back: the loss, and the logits (B, H, L, L)."""
        rho, future = pe(torch.arange(L)), torch.ones(L, L, dtype=torch.bool).triu(1)
        logits = rho(q) @ rho(k).mT / d ** 0.5
        return -logits.masked_fill(future, -torch.inf).log_softmax(-1).diagonal(-4, -2, -1).mean(), logits

    pe = LeRoPE(d, base=1000.0).double()
    loss, logits = attention(pe)
    grad_alpha, grad_logits = torch.autograd.grad(loss, (pe.alpha, logits))
    c, theta = surrogate(q, k, grad_logits), pe.theta().detach()
    here, slope = P(c, theta)
    print("band      theta   P', slope of P   autograd's dloss/dtheta   difference")
    for i, ax in enumerate(axes):
        autograd = grad_alpha[i] / theta[i]
        print(f"{i:4}{theta[i]:11.4f}{slope[i]:17.12f}{autograd:26.12f}{abs(slope[i] - autograd):13.1e}")
        spectra = theta.repeat(300, 1)
        spectra[:, i] = t = torch.linspace(0, 3, 300, dtype=torch.float64) * theta[i]
        true = torch.stack([attention(RoPE(d, theta=s))[0] for s in spectra])
        ax.plot(t, P(c, spectra)[0][:, i] - here[i], label="P")
        ax.plot(t, true - loss.detach(), "--", label="the loss itself")
        ax.plot(t[75:125], slope[i] * (t[75:125] - theta[i]), "k", lw=2, label="slope P'")
        ax.plot(theta[i], 0, "ko", label="present theta")
        ax.set(xlabel=f"theta_{i}, rad/token", ylabel="change, nats", title=f"band {i}: P' = {slope[i]:.3f}")
    axes[2].legend()
    fig.savefig("figures/lerope.png", dpi=110)
