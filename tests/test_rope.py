"""
RoPE: its frequencies, the direction of its turn and its pairs of channels, against numbers found another way.

No relative law can see any of the three: turning the other way, other pairs or at other speeds obeys it too.
"""
import cmath
import math

import pytest
import torch

from rope import RoPE, frequencies, rotate

H, L, d = 3, 5, 8


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_loops(x, pos, theta, pairs):
    """x (L, d) turned in the given pairs of channels: a 2 x 2 matrix a token and pair, in python floats."""
    y = torch.zeros_like(x)
    for t, m in enumerate(pos):
        for (one, two), speed in zip(pairs, theta):
            a, u, v = float(m) * speed, x[t, one].item(), x[t, two].item()
            y[t, one] = math.cos(a) * u - math.sin(a) * v
            y[t, two] = math.sin(a) * u + math.cos(a) * v
    return y


# -------------------------------------------------------------------------------------------- the frequencies
@pytest.mark.parametrize("d, base", [(2, 1e4), (6, 1e4), (64, 1e4), (64, 5e5), (128, 1.5)])
def test_frequencies_are_powers_of_the_base(d, base):
    theta = frequencies(d, base)
    assert theta.shape == (d // 2,) and theta.dtype == torch.float64
    for i in range(d // 2):
        assert theta[i].item() == pytest.approx(base ** (-2 * i / d), rel=1e-14)
    assert torch.equal(RoPE(d, base).theta(), theta)


def test_frequencies_that_other_libraries_use():
    """Head width 64, base 10,000, in the float32 of transformers 5.24: single ones and the sum of all 32."""
    theta = RoPE(64).theta()
    golden = [1, .316227764, .100000001, .0316227786, .00999999978,
              .00316227786, .00100000005, 3.16227786e-4, 1.3335215e-4]
    assert theta[[0, 4, 8, 12, 16, 20, 24, 28, 31]].tolist() == pytest.approx(golden, rel=1e-7)
    assert theta.sum().item() == pytest.approx(3.99790823, rel=1e-8)


# ------------------------------------------------------------------------------------- the turn and its pairs
def test_a_quarter_turn_by_hand():
    """One pair, a quarter turn a token, counter-clockwise: (1, 0) goes to (0, 1), (-1, 0), (0, -1)."""
    x = torch.tensor([1, 0], dtype=torch.float64).expand(1, 4, 2)
    y = RoPE(2, theta=[math.pi / 2])(torch.arange(4))(x)
    expected = torch.tensor([[[1, 0], [0, 1], [-1, 0], [0, -1]]], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("pos", ([0, 1, 2, 3, 4], [-7, 0.25, 1000, 10**6, -3.5]))
def test_rotation_against_loops_and_complex_numbers(pos):
    x, theta = random(H, L, d), [10_000 ** (-2 * i / d) for i in range(d // 2)]
    y = RoPE(d)(torch.tensor(pos))(x)
    for h in range(H):
        expected = by_loops(x[h], pos, theta, [(i, i + d // 2) for i in range(d // 2)])
        torch.testing.assert_close(y[h], expected, rtol=0, atol=1e-9)
        for t, m in enumerate(pos):
            for i in range(d // 2):
                z = complex(x[h, t, i], x[h, t, i + d // 2]) * cmath.exp(1j * m * theta[i])
                assert complex(y[h, t, i], y[h, t, i + d // 2]) == pytest.approx(z, abs=1e-9)


def test_the_paper_pairs_neighbours_one_permutation_away():
    """RoFormer turns the channels (2i, 2i + 1). Even ones first, then the odd: the pairs used here."""
    x, pos, theta = random(L, d), range(L), RoPE(d).theta().tolist()
    rho = RoPE(d)(torch.arange(L))
    paper = by_loops(x, pos, theta, [(0, 1), (2, 3), (4, 5), (6, 7)])
    even_odd = [0, 2, 4, 6, 1, 3, 5, 7]
    torch.testing.assert_close(rho(x[None, :, even_odd])[0], paper[:, even_odd], rtol=0, atol=1e-14)
    without = rho(x[None])[0]
    assert (without - paper)[1:].abs().amax(-1).min() > 0.1             # at every token that is turned at all


def test_logits_of_the_two_layouts_agree_only_after_permuting_queries_and_keys():
    """What a checkpoint of the other layout needs: the rows of W_q and W_k sorted so, head by head."""
    q, k = random(2, L, d)
    pos, theta, even_odd = range(L), RoPE(d).theta().tolist(), [0, 2, 4, 6, 1, 3, 5, 7]
    rho = RoPE(d)(torch.arange(L))
    paper = [by_loops(x, pos, theta, [(0, 1), (2, 3), (4, 5), (6, 7)]) for x in (q, k)]
    paper = paper[0] @ paper[1].T
    ours = (rho(q[None, :, even_odd]) @ rho(k[None, :, even_odd]).mT)[0]
    wrong = (rho(q[None]) @ rho(k[None]).mT)[0]
    torch.testing.assert_close(ours, paper, rtol=0, atol=1e-13)
    assert (wrong - paper).abs().max() > 0.1


def test_position_zero_is_the_identity():
    x = random(H, 1, d)
    assert torch.equal(RoPE(d)(torch.tensor([0]))(x), x)


@pytest.mark.parametrize("s", (0.5, 3))
def test_stretched_positions_are_stretched_frequencies(s):
    """Ro'(x, m theta) = Ro(x, m theta'): every context extension is a map of one or of the other."""
    x, pos = random(H, L, d), torch.arange(L)
    stretched = RoPE(d, theta=[s * 10_000 ** (-2 * i / d) for i in range(d // 2)])
    torch.testing.assert_close(RoPE(d)(s * pos)(x), stretched(pos)(x), rtol=0, atol=1e-14)


def test_rotate_computes_in_float32_at_least():
    """bfloat16 in, bfloat16 out, and each number the float64 result rounded once (unit roundoff 2^-8)."""
    x, angle = random(L, d).bfloat16(), 100 * random(L, d // 2, seed=1)
    y, exact = rotate(x, angle.cos(), angle.sin()), rotate(x.double(), angle.cos(), angle.sin())
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


# ---------------------------------------------------------------------------------------------- a given theta
def test_a_given_theta_is_used_and_kept_out_of_the_weights():
    theta = torch.tensor([0.9, 0.5, 0.0, -0.2], dtype=torch.float64)
    pe, x = RoPE(d, theta=theta), random(H, L, d)
    expected = by_loops(x[0], range(L), [0.9, 0.5, 0.0, -0.2], [(0, 4), (1, 5), (2, 6), (3, 7)])
    theta.zero_()                                                       # what becomes of it is the caller's
    torch.testing.assert_close(pe(torch.arange(L))(x)[0], expected, rtol=0, atol=1e-14)
    assert pe.theta().tolist() == [0.9, 0.5, 0.0, -0.2] and pe.theta().dtype == torch.float64
    assert not pe.state_dict() and not list(pe.parameters())


def test_a_spectrum_for_each_head():
    theta = [[0.9, 0.5, 0.3, 0.1], [0.8, 0.0, 0.2, 2.0], [0.7, 0.4, -0.1, 0.0]]
    pe, x = RoPE(d, theta=theta), random(H, L, d)
    y = pe(torch.arange(L))(x)
    assert pe.theta().shape == (H, d // 2)
    for h in range(H):
        expected = by_loops(x[h], range(L), theta[h], [(0, 4), (1, 5), (2, 6), (3, 7)])
        torch.testing.assert_close(y[h], expected, rtol=0, atol=1e-14)


# ----------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("d", (0, -2, 1, 7))
def test_a_width_that_does_not_pair_up_is_refused(d):
    with pytest.raises(ValueError, match=f"d = {d}"):
        RoPE(d)


@pytest.mark.parametrize("base", (0, -1, 1, 0.5, math.inf, math.nan))
def test_a_base_that_gives_no_spectrum_is_refused(base):
    with pytest.raises(ValueError, match=f"base = {base}"):
        RoPE(d, base)


@pytest.mark.parametrize("theta", ([1.0] * 3, [1.0] * 8, [[1.0] * 5] * 2))
def test_a_theta_of_the_wrong_length_is_refused(theta):
    with pytest.raises(ValueError, match="frequencies"):
        RoPE(d, theta=theta)
