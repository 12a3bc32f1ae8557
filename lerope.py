"""
LeRoPE: RoPE whose frequencies are learned, in log space.

    theta_i = e^alpha_i base^(-2i/d),     alpha_i = 0 at the start                              [1, sec. 3]
"""
import torch
from torch import nn

from rope import RoPE


class LeRoPE(RoPE):
    def __init__(self, d, base=10_000.0):
        """d: width of a head. One alpha (d/2,) serves all layers and heads."""
        super().__init__(d, base)
        self.alpha = nn.Parameter(torch.zeros(d // 2))

    def theta(self, device=None):
        theta = super().theta(device)
        return theta * self.alpha.to(theta).exp()


def surrogate(q, k, grad_logits):
    """The offset-aggregated signal c_i[D] = sum over rows, heads and m - n = D of g_mn q_m conj(k_n) / sqrt(d).
    q, k (..., L, d) after the norm and before the rotation, g = dloss/dlogit (..., L, L) -> c (d/2, 2L - 1) complex128,
    offsets D = -(L-1) .. L-1. Add the c of several layers for the whole model's."""
    d, L = q.shape[-1], q.shape[-2]
    q, k = (torch.complex(*x.double().chunk(2, dim=-1)) for x in (q, k))         # (..., L, d/2)
    g = grad_logits.double() / d ** 0.5
    c = []
    for D in range(-(L - 1), L):
        m = slice(max(D, 0), L + min(D, 0))
        n = slice(max(-D, 0), L - max(D, 0))
        cD = g.diagonal(-D, -2, -1)[..., None] * q[..., m, :] * k[..., n, :].conj()   # (..., L - |D|, d/2)
        c.append(cD.flatten(0, -2).sum(0))
    return torch.stack(c, dim=-1)


def P(c, theta):
    """P_i = Re sum_D c_i[D] e^(i D theta_i) and its slope P_i': c (d/2, 2L - 1), theta (..., d/2) -> twice (..., d/2)."""
    L = (c.shape[-1] + 1) // 2
    D = torch.arange(-(L - 1), L, device=c.device)
    wave = c * torch.exp(1j * D * theta[..., None].to(torch.float64))                # (..., d/2, 2L - 1)
    return wave.sum(-1).real, (1j * D * wave).sum(-1).real
