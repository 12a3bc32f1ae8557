"""
LeRoPE: at alpha = 0 it is RoPE, and the gradient of a frequency is the slope of the surrogate P, exactly.

The network is two layers of causal softmax attention on a residual stream with an arbitrary loss, in float64.
"""
import cmath
import math

import pytest
import torch

from lerope import LeRoPE, P, surrogate
from prope import PRoPE
from rope import RoPE

B, H, L, d, LAYERS = 2, 3, 6, 8, 2
POS = torch.arange(L)


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lerope():
    """alpha away from 0, and float64 so that its gradient is exact to 1e-15."""
    pe = LeRoPE(d).double()
    pe.alpha.data = 0.7 * random(d // 2, seed=5)
    return pe


def network(rho):
    """-> the loss, and each layer's q, k before the rotation and its logits."""
    x, W = random(B, H, L, d), random(LAYERS, 3, H, d, d, seed=1) / d**0.5
    future, layers = torch.ones(L, L, dtype=torch.bool).triu(1), []
    for W_q, W_k, W_v in W:
        q, k, v = x @ W_q, x @ W_k, x @ W_v
        logits = rho(q) @ rho(k).mT / d**0.5
        if logits.requires_grad:
            logits.retain_grad()
        layers.append((q, k, logits))
        x = x + logits.masked_fill(future, -math.inf).softmax(-1) @ v
    return (x * random(B, H, L, d, seed=2)).sum().sin() + x.square().mean(), layers


def complex_rho(theta):
    """The rotation again, by multiplication of complex numbers: nothing of the code under test."""
    turn = torch.exp(1j * POS[:, None] * theta)
    def rho(x):
        z = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat((z.real, z.imag), dim=-1)
    return rho


def slopes(layers, theta):
    """P' at theta, of the surrogate of all layers."""
    c = sum(surrogate(q.detach(), k.detach(), logits.grad) for q, k, logits in layers)
    return P(c, theta.detach())[1]


# ----------------------------------------------------------------------------------------------- the spectrum
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_alpha_of_zero_is_rope_to_the_bit(dtype):
    x, pos = random(B, H, 4, d).to(dtype), torch.tensor([0, 1, 255, 10**6])
    pe = LeRoPE(d, base=500.0)
    assert pe.alpha.shape == (d // 2,) and not pe.alpha.any()
    assert torch.equal(pe.theta(), RoPE(d, base=500.0).theta())
    assert torch.equal(pe(pos)(x), RoPE(d, base=500.0)(pos)(x))


def test_theta_is_rope_scaled_by_the_exponential_of_alpha():
    pe = lerope()
    for i in range(d // 2):
        expected = math.exp(pe.alpha[i].item()) * 10_000 ** (-2 * i / d)
        assert pe.theta()[i].item() == pytest.approx(expected, rel=1e-14)
    pe.alpha.data = torch.tensor([math.log(2), 0, 0, -math.log(10)])
    assert pe.theta().tolist() == pytest.approx([2, 0.1, 0.01, 0.0001], rel=1e-6)       # 2 x and 0.1 x


def test_p_rope_is_the_limit_in_which_slow_alphas_fall_to_minus_infinity():
    pe, x = LeRoPE(d), random(H, L, d)
    pe.alpha.data[-1] = -math.inf
    assert torch.equal(pe(POS)(x), PRoPE(d, p=0.75)(POS)(x))


@pytest.mark.parametrize("cast", (torch.bfloat16, torch.float16))
def test_rounding_alpha_costs_a_small_factor_and_nothing_at_zero(cast):
    """With unit roundoff u alpha moves by at most u |alpha|, theta_i by a factor within exp(u |alpha|): the
    same relative error for the slowest frequency as for the fastest, and none at the start."""
    pe = lerope()
    alpha, theta, u = pe.alpha.data.clone(), pe.theta().detach(), torch.finfo(cast).eps / 2
    pe.to(cast)
    assert pe.theta().dtype == torch.float64
    shift = (pe.theta().detach() / theta).log().abs()
    assert (shift <= u * alpha.abs() * (1 + 1e-9)).all() and shift.max() > 0
    assert torch.equal(LeRoPE(d).to(cast).theta(), RoPE(d).theta())


# -------------------------------------------------------------------------------- the gradient, as slope of P
def test_gradient_of_theta_is_the_slope_of_the_surrogate():
    theta = lerope().theta().detach().requires_grad_()
    pe = RoPE(d)
    pe.theta = lambda device=None: theta                                # a spectrum that wants its gradient
    loss, layers = network(pe(POS))
    loss.backward()
    torch.testing.assert_close(slopes(layers, theta), theta.grad, rtol=1e-6, atol=1e-9)
    assert theta.grad.abs().min() > 1e-3                                # each band is really tested

    for i in range(d // 2):                                             # without autograd, finite differences
        step = torch.zeros(d // 2, dtype=torch.float64)
        step[i] = 1e-5
        up, down = (network(complex_rho(theta.detach() + sign * step))[0].item() for sign in (1, -1))
        assert theta.grad[i].item() == pytest.approx((up - down) / 2e-5, rel=1e-6, abs=1e-8)


def test_gradient_of_alpha_is_theta_times_that_of_theta():
    """Log space: a step of alpha multiplies theta, and its gradient carries the factor theta."""
    pe = lerope()
    loss, layers = network(pe(POS))
    loss.backward()
    theta = pe.theta().detach()
    torch.testing.assert_close(pe.alpha.grad, theta * slopes(layers, theta), rtol=1e-6, atol=1e-12)


def test_alpha_of_the_usual_float32_gets_the_same_gradient():
    pe, exact = LeRoPE(d), lerope()
    pe.alpha.data = exact.alpha.data.float()
    for encoding in (pe, exact):
        network(encoding(POS))[0].backward()
    torch.testing.assert_close(pe.alpha.grad.double(), exact.alpha.grad, rtol=1e-5, atol=1e-9)


def test_surrogate_against_a_loop_over_rows_heads_queries_and_keys():
    q, k, g = random(B, H, L, d), random(B, H, L, d, seed=1), random(B, H, L, L, seed=2)
    expected = [[0j] * (2 * L - 1) for _ in range(d // 2)]
    for b in range(B):
        for h in range(H):
            for m in range(L):
                for n in range(L):
                    for i in range(d // 2):
                        q_m = complex(q[b, h, m, i], q[b, h, m, i + d // 2])
                        k_n = complex(k[b, h, n, i], k[b, h, n, i + d // 2])
                        g_mn = g[b, h, m, n].item() / math.sqrt(d)
                        expected[i][m - n + L - 1] += g_mn * q_m * k_n.conjugate()
    c = surrogate(q, k, g)
    assert c.shape == (d // 2, 2 * L - 1) and c.dtype == torch.complex128
    torch.testing.assert_close(c, torch.tensor(expected, dtype=torch.complex128), rtol=0, atol=1e-12)


def test_P_against_a_loop_over_offsets():
    c, theta = torch.complex(*random(2, d // 2, 2 * L - 1)), random(d // 2, seed=2)
    value, slope = P(c, theta)
    for i in range(d // 2):
        wave = {D: complex(c[i, D + L - 1]) * cmath.exp(1j * D * theta[i].item()) for D in range(1 - L, L)}
        assert value[i].item() == pytest.approx(sum(w.real for w in wave.values()), abs=1e-12)
        assert slope[i].item() == pytest.approx(sum((1j * D * w).real for D, w in wave.items()), abs=1e-12)


def test_P_summed_over_bands_is_the_inner_product_of_gradient_and_logits_at_any_theta():
    """What P stands for: the loss to first order in the logits, as the spectrum moves and g is held."""
    q, k, g = random(B, H, L, d), random(B, H, L, d, seed=1), random(B, H, L, L, seed=2)
    theta = 3 * random(5, d // 2, seed=3)                               # five spectra at once
    value, _ = P(surrogate(q, k, g), theta)
    for i in range(5):
        rho = complex_rho(theta[i])
        logits = rho(q) @ rho(k).mT / math.sqrt(d)
        assert value[i].sum().item() == pytest.approx((g * logits).sum().item(), rel=1e-10)
