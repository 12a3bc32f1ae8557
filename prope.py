"""
p-RoPE: RoPE whose slowest frequencies are zero.

    theta_i = base^(-2i/d)   for i < int(p d // 2),       theta_i = 0   for the rest          [1, Definition of p-RoPE]
"""
import torch

from rope import RoPE


class PRoPE(RoPE):
    def __init__(self, d, p=0.75, base=10_000.0, reverse=False):
        """d: width of a head. p in [0, 1]: the fraction of frequencies kept, the fastest; reverse keeps the slowest."""
        super().__init__(d, base)
        if not 0 <= p <= 1:
            raise ValueError(f"p = {p}: the kept fraction must lie in [0, 1]")
        self.p, self.reverse = p, reverse

    def theta(self, device=None):
        theta = super().theta(device)
        kept, i = int(self.p * self.d // 2), torch.arange(self.d // 2, device=device)
        return torch.where(i >= self.d // 2 - kept if self.reverse else i < kept, theta, 0.0)
