"""
RoPE: turn each pair of channels by an angle proportional to the token's position. Nothing is learned.

    rho(m) = R(m theta_0) (+) ... (+) R(m theta_{d/2-1}),     theta_i = base^(-2i/d)         [1, sec. 3.2.2]
    R(a)   = [[cos a, -sin a], [sin a, cos a]]                on the pair (x_i, x_{i + d/2})

rho(m) is orthogonal and rho(m)^T rho(n) = rho(n - m): a logit <rho(m) q, rho(n) k> sees only n - m.

    x (..., H, L, d)    pos (L,) or (B, L), any real    theta (d/2,) or, one a head, (H, d/2), radians a token

The paper pairs (2i, 2i + 1); (i, i + d/2), as in GPT-NeoX and LLaMA, is a fixed permutation away (written out
in tests/test_rope.py) and faster. Angles are float64, new at each forward pass: no table to round or age.

[1] Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864
$ python rope.py      the same logit from three far-apart places; figures/rope.png
"""
import torch


def frequencies(d, base=10_000.0, device=None):
    """theta_i = base^(-2i/d), radians a token [1, sec. 3.2.2]: (d/2,) float64, float32 on MPS.
    ValueError if d is not even and positive, or base not finite and above 1."""
    if d < 2 or d % 2 or not 1 < base < torch.inf:
        raise ValueError(f"d = {d}, base = {base}: d must be even and positive, base finite and above 1")
    dtype = torch.float32 if device is not None and torch.device(device).type == "mps" else torch.float64
    return base ** -(torch.arange(0, d, 2, dtype=dtype, device=device) / d)


def rotate(x, cos, sin):
    """Turn the pairs of x (..., L, d); cos, sin (..., L, d/2). In float32 or wider, back in x's dtype."""
    cos, sin = (t.to(torch.promote_types(x.dtype, torch.float32)) for t in (cos, sin))
    a, b = x.chunk(2, dim=-1)                                   # (..., L, d/2) each
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class RoPE(torch.nn.Module):
    temperature = 1.0                                           # a factor on the logits
    def __init__(self, d, base=10_000.0, theta=None):
        """d: a head's width. theta: a fixed spectrum (d/2,) or (H, d/2) in place of the base's."""
        super().__init__()
        self.d, self.base = d, base
        given = frequencies(d, base, "cpu") if theta is None else theta
        given = torch.as_tensor(given, dtype=torch.float64, device="cpu")
        if given.ndim not in (1, 2) or 2 * given.shape[-1] != d or not given.isfinite().all():
            raise ValueError(f"theta {[*given.shape]}, not ({d // 2},) or (H, {d // 2}) finite frequencies")
        self.given = None if theta is None else given.tolist()  # a list: nothing casts, saves or loses it

    def theta(self, device=None):
        """The frequencies, (d/2,) or (H, d/2) float64."""
        theta = frequencies(self.d, self.base, device)
        return theta if self.given is None else torch.tensor(self.given, dtype=theta.dtype, device=device)

    def forward(self, pos):
        """pos (L,) or (B, L), any real dtype -> rho: x (..., H, L, d) -> the same shape and dtype."""
        theta = self.theta(pos.device)
        theta = theta if theta.ndim == 1 else theta[:, None]    # (d/2,) or (H, 1, d/2)
        pos = pos if pos.ndim == 1 else pos[:, None]            # (L,) or (B, 1, L): a place for the heads
        angle = pos[..., None].to(theta.dtype) * theta          # (L, d/2), (H, L, d/2), (B, 1|H, L, d/2)
        # One cat, or the compiler makes them again, in float64, wherever they are used (LOG.md).
        cos, sin = torch.cat((angle.cos(), angle.sin())).chunk(2)
        return lambda x: rotate(x, cos, sin)


# -----------------------------------------------------------------------------------------------------------
if __name__ == "__main__":
    import matplotlib.pyplot as plt
    q, k = torch.randn(2, 64, generator=torch.manual_seed(0)).double()
    pe, starts, offset = RoPE(64), (0, 4096, 10**6), torch.arange(201)
    logit = [pe(m + offset)(k.expand(201, 64)) @ pe(torch.tensor([m]))(q[None])[0] for m in starts]
    print("offset  " + "".join(f"  seen from {m:>9,}" for m in starts))
    for r in (0, 1, 10, 100, 200):
        print(f"{r:6}  " + "".join(f"{v[r]:21.12f}" for v in logit))
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for m, v, width in zip(starts, logit, (6, 3.5, 1)):
        left.plot(offset, v, lw=width, label=f"seen from m = {m:,}")
    left.set(xlabel="offset n - m, tokens", ylabel="logit of one fixed q, k", title="It sees only the offset")
    fig.legend(loc="outside lower left", ncols=3)
    right.semilogy(2 * torch.pi / pe.theta(), ".-")
    right.set(xlabel="pair i", ylabel="wavelength 2 pi / theta_i, tokens", title="The spectrum, d = 64")
    fig.savefig("figures/rope.png", dpi=120)
