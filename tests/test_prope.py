"""
p-RoPE: which frequencies it keeps; the statements of "Round and Round We Go!" (arXiv:2410.06205) in numbers.

The query stands at m, a key at n <= m; their distance is r = m - n, so the logit is q^T rho(-r) k.
"""
import math

import pytest
import torch

from prope import PRoPE
from rope import RoPE

BASE = 10_000.0


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def causal_weights(pe, q, k):
    """Attention (L, L) of one head, q and k (L, d), without 1/sqrt(d): their norms set the sharpness."""
    L = len(q)
    rho = pe(torch.arange(L))
    logit = (rho(q[None]) @ rho(k[None]).mT)[0]
    return logit.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -math.inf).softmax(-1)


# ------------------------------------------------------------------------------------------ what p-RoPE keeps
@pytest.mark.parametrize("d", (2, 8, 64))
@pytest.mark.parametrize("reverse", (False, True))
def test_p_of_one_is_rope_and_p_of_zero_does_nothing(d, reverse):
    x, pos = random(2, 3, 5, d), torch.tensor([0, 1, 7, 1000, 10**6])
    assert torch.equal(PRoPE(d, p=1, reverse=reverse)(pos)(x), RoPE(d)(pos)(x))
    assert torch.equal(PRoPE(d, p=0, reverse=reverse)(pos)(x), x)


@pytest.mark.parametrize("d, p, kept", [(64, 0.75, 24), (64, 0.25, 8), (512, 0.25, 64), (8, 0.75, 3),
                                        (10, 0.75, 3), (6, 0.5, 1), (64, 0.01, 0), (64, 0.999, 31),
                                        (2, 0.99, 0), (2, 1.0, 1)])
def test_how_many_are_kept_by_hand(d, p, kept):
    assert (PRoPE(d, p).theta() > 0).tolist() == [True] * kept + [False] * (d // 2 - kept)


@pytest.mark.parametrize("d", (2, 6, 10, 64, 128))
def test_the_fastest_are_kept_unchanged_or_reversed_the_slowest(d):
    for p in (j / 20 for j in range(21)):
        kept = int(p * d // 2)
        spectrum = [BASE ** (-2 * i / d) for i in range(d // 2)]        # the denominator stays the full d
        fastest = spectrum[:kept] + [0] * (d // 2 - kept)
        assert PRoPE(d, p).theta().tolist() == pytest.approx(fastest, rel=1e-14)
        slowest = [0] * (d // 2 - kept) + spectrum[d // 2 - kept:]
        assert PRoPE(d, p, reverse=True).theta().tolist() == pytest.approx(slowest, rel=1e-14)


@pytest.mark.parametrize("p, total", [(0.25, 3.59847726), (0.75, 3.99430975)])
def test_sums_of_the_proportional_rope_of_transformers(p, total):
    """Head width 64: the sum of the frequencies that transformers 5.24 makes for rope_type "proportional"."""
    assert PRoPE(64, p).theta().sum().item() == pytest.approx(total, rel=1e-7)


def test_it_is_not_partial_rotary():
    """GPT-NeoX's rotary_pct turns the first p d channels, with a spectrum of their own down to slow ones."""
    d, p = 16, 0.5
    turned = int(p * d)
    partial = [BASE ** (-2 * i / turned) for i in range(turned // 2)]   # 1, 0.1, 0.01, 0.001
    ours = PRoPE(d, p).theta().tolist()
    assert ours == pytest.approx([1, 10**-0.5, 0.1, 10**-1.5, 0, 0, 0, 0], rel=1e-14)
    assert len(partial) == 4 and min(partial) == pytest.approx(0.001)   # as many, but slower ones
    x = random(1, 1, d)
    moved = (PRoPE(d, p)(torch.tensor([9]))(x) != x)[0, 0].tolist()
    assert moved == ([True] * 4 + [False] * 4) * 2                      # not the first p d channels


@pytest.mark.parametrize("p", (-0.1, 1.1, 75, math.nan))
def test_a_fraction_outside_0_1_is_refused(p):
    with pytest.raises(ValueError, match="p = "):
        PRoPE(8, p)


# ------------------------------------------------------------------------------- Propositions 3.1, 3.2: decay
@pytest.mark.parametrize("p", (1, 0.75, 0.25))
def test_prop_3_1_some_key_is_attended_most_at_any_chosen_distance(p):
    """k = rho(r) q gives the logit sum_i |q_i|^2 cos((distance - r) theta_i), largest at r and only there."""
    d, L = 16, 41
    pe, q = PRoPE(d, p), random(1, 1, d)
    theta = [BASE ** (-2 * i / d) if i < p * d // 2 else 0 for i in range(d // 2)]
    norm2 = [(q[0, 0, i] ** 2 + q[0, 0, i + d // 2] ** 2).item() for i in range(d // 2)]
    rho = pe(torch.arange(L))
    for r in range(L):
        k = pe(torch.tensor([r]))(q)
        logit = (rho(q.expand(1, L, d))[:, -1] @ rho(k.expand(1, L, d))[0].mT)[0].flip(0)       # by distance
        for distance in range(L):
            closed_form = sum(a * math.cos((distance - r) * t) for a, t in zip(norm2, theta))
            assert logit[distance].item() == pytest.approx(closed_form, abs=1e-12)
        best, second = logit.topk(2).values.tolist()
        assert logit.argmax() == r and best - second > 1e-3


def test_prop_3_2_gaussian_logits_have_mean_zero_and_one_variance_at_every_distance():
    """For q, k ~ N(0, I): E logit = 0 and E logit^2 = d at each distance, so nothing decays.
    Standard errors over N draws: sqrt(d / N) and sqrt((2 d^2 + 6 d) / N); the allowance is 4.5 of them."""
    d, N, r = 16, 20_000, torch.cat((torch.arange(32), torch.tensor([100, 1000, 5000])))
    q, k = random(N, 1, d, dtype=torch.float32), random(N, 1, d, seed=1, dtype=torch.float32)
    turned = RoPE(d)(-r)(k.expand(N, len(r), d))
    logit = (turned @ q.mT).squeeze(-1)                                 # (N, distances)
    assert logit.mean(0).abs().max() < 4.5 * (d / N) ** 0.5
    assert (logit.square().mean(0) - d).abs().max() < 4.5 * ((2 * d**2 + 6 * d) / N) ** 0.5
    equal = (RoPE(d)(-r)(q.expand(N, len(r), d)) @ q.mT).squeeze(-1).mean(0)        # k = q is seen to decay
    assert equal[0] > 100 * (d / N) ** 0.5 and equal[0] - equal[-1] > 50 * (d / N) ** 0.5


def test_all_ones_do_decay():
    """Figure 2a: (1/d) q^T rho(-r) k for q = k = (1, ..., 1), d = 256: where decay was seen."""
    ones = torch.ones(1, 4, 256, dtype=torch.float64)
    logit = RoPE(256)(-torch.tensor([0, 10, 100, 1000]))(ones) @ ones[0, 0] / 256
    assert logit[0].tolist() == pytest.approx([1, 0.675, 0.456, 0.193], abs=5e-4)


# ------------------------------------------------------------- Proposition 5.2, Theorem 5.3: positional heads
def test_prop_5_2_one_nope_head_cannot_tell_equal_tokens_apart():
    """On [BOS, x, x] the last two keys are one vector: no diagonal or previous-token head passes 1/2."""
    for seed in range(20):
        (bos, x), W_q, W_k = random(2, 8, seed=seed), *random(2, 8, 8, seed=100 + seed) / 8**0.5
        tokens = torch.stack((bos, x, x))
        q, k = tokens @ W_q, tokens @ W_k
        nope, rope = (causal_weights(PRoPE(8, p), q, k)[2] for p in (0, 1))
        assert nope[1] == nope[2] < 0.5
        assert abs(rope[1] - rope[2]) > 1e-6                            # the rotation tells them apart


def test_theorem_5_3_one_frequency_makes_a_diagonal_and_a_previous_token_head():
    """One token everywhere: q = k = psi attends to itself, k = rho(1) psi to the token before, to any eps."""
    L, pe = 24, PRoPE(4, p=0.5)                                         # theta = 1 and 0
    assert pe.theta().tolist() == [1, 0]
    weights = []
    for norm2 in (10, 100, 1000, 4000):
        psi = torch.tensor([norm2**0.5, 0, 0, 0], dtype=torch.float64)
        psi, turned = psi.expand(L, 4), pe(torch.tensor([1]))(psi.expand(1, 1, 4))[0].expand(L, 4)
        diagonal = causal_weights(pe, psi, psi).diagonal().min().item()
        previous = causal_weights(pe, psi, turned).diagonal(-1).min().item()
        weights.append((diagonal, previous))
    diagonal, previous = map(list, zip(*weights))
    for sharp in (diagonal, previous):                                  # sharper with the norm, to any eps
        assert sharp == sorted(sharp) and sharp[0] < 0.9 and sharp[-1] > 1 - 1e-9


def test_theorem_5_3_at_equal_norm_the_fastest_frequency_is_the_sharpest():
    """While r theta stays below pi; the slowest hardly beat the uniform 1/L."""
    L, psi = 4, torch.tensor([3.0, 0.0], dtype=torch.float64)
    sharp = [causal_weights(RoPE(2, theta=[t]), psi.expand(L, 2), psi.expand(L, 2))[-1, -1].item()
             for t in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)]
    assert sharp == sorted(set(sharp)) and sharp[0] == pytest.approx(1 / L, abs=1e-6) and sharp[-1] > 0.95


# --------------------------------------------------------------------- Theorem 6.1: a semantic target is lost
def test_theorem_6_1_a_rotated_pair_loses_a_semantic_target_and_an_unrotated_one_keeps_it():
    """The target is the first key, equal to the query and all in the slow pair; the other keys are 0. RoPE
    turns that pair by 0.01 a token: at distance 314 = pi / 0.01 the target has less than the uniform share,
    however large its norm. p-RoPE does not: a norm that is enough for the longest sequence is enough for all.
    """
    eps, distances = 1e-3, (0, 1, 10, 100, 314, 999)
    for norm2 in (math.log(1000 / eps), 50, 500):
        target = torch.tensor([0, norm2**0.5, 0, 0], dtype=torch.float64)
        kept, lost = [], []
        for r in distances:
            q, k = target.expand(r + 1, 4), torch.zeros(r + 1, 4, dtype=torch.float64)
            k[0] = target
            kept.append(causal_weights(PRoPE(4, p=0.5), q, k)[-1, 0].item())
            lost.append(causal_weights(RoPE(4), q, k)[-1, 0].item())
        assert min(kept) > 1 - eps
        assert lost[1] > 1 - eps and lost[4] < 1 / (314 + 1)
