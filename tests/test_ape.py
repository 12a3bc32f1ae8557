"""
APE: rho is a homomorphism of sequences, grids and trees, against products of matrix_exp written as loops; the
way from angles to generators and back; the gradient of every A, against autograd through matrix_exp.

Tests compare relative maps rho(a)^T rho(b), as one fixed orthogonal map on the left of rho is free.
"""
import itertools
import math
import os
import runpy

import pytest
import torch

import ape
from ape import APE, GridAPE, TreeAPE, fold, from_theta, to_theta
from rope import RoPE, frequencies
from scaling import extend
from train import GPT, encodings

H, L, d, k = 3, 5, 8, 3


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a, b, atol):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def skew(A):
    """A - A^T of the strictly upper part of A (..., d, d), number by number."""
    B = torch.zeros_like(A)
    for i in range(A.shape[-1]):
        for j in range(i + 1, A.shape[-1]):
            B[..., i, j] = B[..., i, j] + A[..., i, j]
            B[..., j, i] = B[..., j, i] - A[..., i, j]
    return B


def filled(pe, scale=0.4):
    """pe in float64 with all that it learns drawn at random, below the diagonal too: that must not matter."""
    pe.double()
    for i, w in enumerate(pe.parameters()):
        w.data = scale * random(*w.shape, seed=i)
    return pe


def maps(pe, pos):
    """rho, (n, H, d, d), at n integers, points of a grid, or paths: the columns of I are d tokens at each."""
    pos, columns = torch.tensor(pos), torch.eye(d, dtype=torch.float64).repeat(len(pos), 1).expand(H, -1, d)
    return pe(pos.repeat_interleave(d, 0))(columns).unflatten(1, (len(pos), d)).transpose(0, 1).mT


def relative(pe, a, b):
    """rho(a)^T rho(b), (H, d, d), of two of them."""
    rho_a, rho_b = maps(pe, [a, b])
    return rho_a.mT @ rho_b


def logits(pe, pos, q, k):
    rho = pe(pos)
    return rho(q) @ rho(k).mT


def power(W, m):
    """W^m by repeated multiplication; of the inverse where m < 0."""
    product = torch.eye(W.shape[-1], dtype=W.dtype)
    for _ in range(abs(m)):
        product = product @ (W if m > 0 else torch.linalg.inv(W))
    return product


def product(W, path):
    """The generators W (k, H, d, d) along a path, from the root on."""
    M = torch.eye(d, dtype=torch.float64).expand(H, d, d)
    for branch in path:
        if branch >= 0:
            M = M @ W[branch]
    return M


def padded(paths, depth=4):
    return [[*p, *[-1] * (depth - len(p))] for p in paths]


# ---------------------------------------------------------------------------------- sequences: a homomorphism
def test_the_file_run_and_imported_is_two_operators():
    """`python ape.py` imports train and so ape again. A second operator of one name frees the first: running
    it then read freed memory, and about one cold start in four ended in std::bad_alloc or worse."""
    again = runpy.run_path(ape.__file__, run_name="again")
    assert again["diagonalise"]._qualname != ape.diagonalise._qualname
    theta = [f(filled(APE(d, H)).A)[0] for f in (to_theta, again["to_theta"])]
    close(*theta, 0)


def test_sequence_maps_are_powers_of_one_generator_a_head():
    pe = filled(APE(d, H))
    W = torch.matrix_exp(skew(pe.A.detach()))
    for m, n in itertools.product((-6, -1, 0, 1, 2, 7), repeat=2):
        expected = torch.stack([power(W[h], n - m) for h in range(H)])
        close(relative(pe, m, n), expected, 1e-12)
    assert (W[0] - W[1]).abs().max() > 0.1


def test_sequence_law():
    """[a][b] = [a + b], [-a] = [a]^T, and the shift of both positions cancels."""
    pe = filled(APE(d, H))
    for a, b in [(2, 3), (-4, 1), (0, 5), (1000, -999)]:
        close(relative(pe, 0, a) @ relative(pe, 0, b), relative(pe, 0, a + b), 1e-11)
        close(relative(pe, 0, -a), relative(pe, 0, a).mT, 1e-11)
        close(relative(pe, a + 7, b + 7), relative(pe, a, b), 1e-11)
    close(relative(pe, 0, 3).mT @ relative(pe, 0, 3), torch.eye(d).double().expand(H, d, d), 1e-13)


# ----------------------------------------------------------------------------------------- grids: direct sums
@pytest.mark.parametrize("ndim", (1, 2, 4))
def test_grid_maps_are_direct_sums_over_the_axes(ndim):
    pe, n = filled(GridAPE(d, H, ndim)), d // ndim
    W = [torch.matrix_exp(skew(axis.A.detach())) for axis in pe.axes]
    for seed in range(4):
        x, y = torch.randint(-5, 6, (2, ndim), generator=torch.Generator().manual_seed(seed)).tolist()
        M = relative(pe, x, y)
        for h in range(H):
            expected = torch.block_diag(*[power(W[i][h], y[i] - x[i]) for i in range(ndim)])
            close(M[h], expected, 1e-11)
        shifted = [i + 3 * j for j, i in enumerate(x)], [i + 3 * j for j, i in enumerate(y)]
        close(relative(pe, *shifted), M, 1e-11)
        close(relative(pe, y, x), M.mT, 1e-11)


def test_grid_starts_as_rope_on_each_axis_and_logits_add_up():
    pe, (q, k) = GridAPE(d, H).double(), random(2, H, 12, d)
    pos = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).flatten(0, 1)
    rope, n = RoPE(d // 2), d // 2
    expected = sum(logits(rope, pos[:, i], q[..., i * n:][..., :n], k[..., i * n:][..., :n]) for i in (0, 1))
    close(logits(pe, pos, q, k), expected, 1e-5)
    with pytest.raises(ValueError, match="d = 8, ndim = 3"):
        GridAPE(8, H, 3)


# ------------------------------------------------------------------------------------ trees: words of a group
PATHS = [(), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 2, 0), (1, 2, 1), (1, 2, 1, 0), (2, 2, 2, 2)]


def test_tree_maps_are_products_of_generators_along_the_path():
    pe = filled(TreeAPE(d, H, k))
    W = torch.matrix_exp(skew(pe.A.detach()))
    rho = maps(pe, padded(PATHS))
    for (a, M), (b, N) in itertools.product(zip(PATHS, rho), repeat=2):
        close(M.mT @ N, product(W, a).mT @ product(W, b), 1e-12)
    assert (product(W, (0, 1)) - product(W, (1, 0))).abs().max() > 0.1          # they do not commute


def test_tree_law():
    """A prefix cancels; there and back is the transpose; a child's step is one operator, at every node."""
    words = [a + b for a, b in itertools.product([*PATHS, (0,), (1,), (2,)], PATHS)]
    words += [node + (branch,) for node in PATHS for branch in range(k)]
    rho = dict(zip(words, maps(filled(TreeAPE(d, H, k)), padded(words, 8))))
    see = lambda a, b: rho[a].mT @ rho[b]
    for a, b in itertools.product(PATHS, repeat=2):
        close(see((2,) + a, (2,) + b), see(a, b), 1e-12)
        close(see((0, 1) + a, (0, 1) + b), see(a, b), 1e-12)
        close(see(a, b), see(b, a).mT, 1e-12)
        close(see((), a) @ see((), b), see((), a + b), 1e-12)
    for node, branch in itertools.product(PATHS, range(k)):
        close(see(node, node + (branch,)), see((), (branch,)), 1e-12)


def test_siblings_and_heads_differ_at_the_start():
    torch.manual_seed(0)
    pe = TreeAPE(d, H, k)
    root, *steps = maps(pe, padded([(), (0,), (1,), (2,)]))
    steps = [M for step in steps for M in root.mT @ step]               # of k branches and H heads
    for one, two in itertools.combinations(steps, 2):
        assert (one - two).abs().max() > 0.02
    assert pe.A.shape == (k, H, d, d)


def test_a_tree_of_one_branch_is_a_sequence():
    sequence, tree = filled(APE(d, H)), TreeAPE(d, H, 1).double()
    tree.A.data = sequence.A.data[None].clone()
    q, k = random(2, H, L, d)
    path = torch.tensor([[0] * m + [-1] * (L - m) for m in range(L)])
    close(logits(tree, path, q, k), logits(sequence, torch.arange(L), q, k), 1e-12)


@pytest.mark.parametrize("B", (2, H))
def test_trees_of_each_row(B):
    """Paths (B, L, depth), also B == H; the tokens of a node lie anywhere; x may have more axes in front."""
    pe, q, key = filled(TreeAPE(d, H, k)), *random(2, B, H, L, d)
    choice = torch.randint(len(PATHS), (B, L), generator=torch.Generator().manual_seed(B)).tolist()
    paths = torch.tensor([padded(PATHS[i] for i in row) for row in choice])
    actual, W = logits(pe, paths, q, key), torch.matrix_exp(skew(pe.A.detach()))
    for b, h, i, j in itertools.product(range(B), range(H), range(L), range(L)):
        M, N = (product(W, paths[b, t].tolist())[h] for t in (i, j))
        close(actual[b, h, i, j], (M @ q[b, h, i]) @ (N @ key[b, h, j]), 1e-12)
    more = random(2, B, H, L, d)
    close(pe(paths)(more)[1], pe(paths)(more[1]), 1e-14)
    for b in range(B):
        close(pe(paths[b])(more)[:, b], pe(paths)(more)[:, b], 1e-14)           # (L, depth): for all rows
        close(pe(paths[b])(more[0, b]), pe(paths)(more)[0, b], 1e-14)


def test_a_branch_that_the_tree_has_not_is_refused():
    with pytest.raises(ValueError, match="branch 2"):
        TreeAPE(d, H, 2)(torch.tensor([[0, 2]]))


def test_maps_are_made_once_for_each_distinct_path():
    """64 rows of the same 7 nodes: memory and work as for 7 maps, not for 448. Also if most are of one."""
    pe, nodes = TreeAPE(32, H, 2), padded([n for r in range(3) for n in itertools.product((0, 1), repeat=r)])
    few, many = torch.tensor(nodes), torch.tensor(nodes).expand(64, 7, 4)
    x = torch.randn(64, H, 7, 32)
    assert peak(lambda: pe(many)) < 1.2 * peak(lambda: pe(few))
    padding = many.clone()
    padding[2:] = -1
    for path in (many, padding):
        assert peak(lambda: pe(path)(x)) < 8 * 7 * H * 32 * 32 * 4 + 8 * x.nbytes < 448 * H * 32 * 32 * 4


# ------------------------------------------------------------------------------ theta -> A -> theta, and RoPE
ORTHOGONAL = torch.linalg.qr(random(d, d, seed=3))[0]
SPECTRA = {"RoPE's": [1, 0.1, 0.01, 0.001], "repeated": [1, 1, 0.3, 0.3], "all equal": [0.7] * 4,
           "zero": [1, 0.2, 0, 0], "all zero": [0] * 4, "tiny": [1, 1e-5, 1e-8, 1e-13],
           "near pi": [math.pi, math.pi - 1e-9, 3.1, 0.1], "beyond pi": [6, 5, 4, 3]}


def turned(theta, Q=ORTHOGONAL):
    """A whose planes of theta are the columns i, i + d/2 of Q: B = sum_i theta_i (w_i u_i^T - u_i w_i^T)."""
    B = torch.zeros(d, d, dtype=torch.float64)
    for i, speed in enumerate(theta):
        u, w = Q[:, i], Q[:, i + d // 2]
        B += speed * (torch.outer(w, u) - torch.outer(u, w))
    return B.triu(1)


CASES = {name: turned(theta) for name, theta in SPECTRA.items()}
CASES |= {f"{name} of RoPE's planes": turned(SPECTRA[name], torch.eye(d).double())
          for name in ("RoPE's", "zero", "repeated")}
CASES |= {"random": random(d, d).triu(1), "random, small": 0.02 * random(d, d, seed=1).triu(1)}
every_case = pytest.mark.parametrize("A", CASES.values(), ids=CASES)


@pytest.mark.parametrize("theta", SPECTRA.values(), ids=SPECTRA)
def test_round_trip_from_theta(theta):
    theta = torch.tensor(theta, dtype=torch.float64)
    A = from_theta(theta)
    assert A.dtype == torch.float64 and torch.equal(A, A.triu(1))
    close(A, turned(theta, torch.eye(d).double()), 0)
    close(to_theta(A)[0], theta.sort(descending=True).values, 1e-14)
    close(to_theta(turned(theta))[0], theta.sort(descending=True).values, 1e-14)


@every_case
def test_round_trip_from_A(A):
    """exp(A - A^T) = P R(theta) P^T, P orthogonal, R counter-clockwise as RoPE's; and back to A itself."""
    theta, P = to_theta(A)
    assert theta.shape == (d // 2,) and (theta > -1e-14).all() and (theta.diff() < 1e-14).all()
    close(P.T @ P, torch.eye(d).double(), 1e-14)
    R = torch.zeros(d, d, dtype=torch.float64)
    for i, t in enumerate(theta.tolist()):
        R[i, i] = R[i + d // 2, i + d // 2] = math.cos(t)
        R[i, i + d // 2], R[i + d // 2, i] = -math.sin(t), math.sin(t)
    close(P @ R @ P.T, torch.matrix_exp(skew(A)), 1e-13)
    close(turned(theta, P), A, 1e-14)
    many = torch.stack((A, random(d, d, seed=5).triu(1))).expand(3, 2, d, d)            # any axes in front
    close(to_theta(many)[0][2, 0], theta, 1e-14)


@pytest.mark.parametrize("theta", SPECTRA.values(), ids=SPECTRA)
def test_from_theta_gives_the_logits_of_rope(theta):
    pe, (q, k) = APE(d, H).double(), random(2, H, L, d)
    pe.A.data[:] = from_theta(torch.tensor(theta, dtype=torch.float64))
    for pos in (torch.arange(L), torch.tensor([-7, 0, 3, 100, 1000])):
        close(logits(pe, pos, q, k), logits(RoPE(d, theta=theta), pos, q, k), 1e-10)


def test_the_start_is_rope():
    """In float64 to 1e-10. The usual float32 rounds a frequency to 6e-8 of it: 6e-8 radians a token."""
    pos, (q, k) = torch.tensor([0, 1, 5, 100, 2000]), random(2, H, L, 64)
    torch.set_default_dtype(torch.float64)
    try:
        exact = APE(64, H, base=500.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert exact.theta().shape == (H, 32) and exact.theta().dtype == torch.float64
    for h in range(H):
        close(exact.theta()[h], frequencies(64, 500.0), 1e-15)
    expected = logits(RoPE(64, 500.0), pos, q, k)
    close(logits(exact, pos, q, k), expected, 1e-10)
    usual = APE(64, H, "rope", 500.0)
    assert usual.A.dtype == torch.float32
    close(usual.theta(), exact.theta(), 6e-8)
    assert (logits(usual, pos, q, k) - expected).abs().max() < 2000 * 6e-8 * 64


def test_near_identity_starts_small_and_a_head_unlike_another():
    torch.manual_seed(0)
    pe = APE(64, H, init="near_identity")
    upper = pe.A[:, *torch.triu_indices(64, 64, 1)]
    assert upper.std().item() == pytest.approx(0.02, rel=0.05) and torch.equal(pe.A, pe.A.triu(1))
    assert (pe.A[0] - pe.A[1]).abs().max() > 0.02
    with pytest.raises(ValueError, match="init = 'zero'"):
        APE(d, H, init="zero")


@pytest.mark.parametrize("A", [CASES[name] for name in ("random, small", "RoPE's", "repeated")])
def test_the_published_route_agrees_with_the_closed_form(A):
    """From W: its logarithm, by eigenvectors, is A - A^T, and its angles are theta. From B: gradient descent
    moves towards triu(B), and stays there; from W, the polar decomposition W = U P has P = I and U = W."""
    B, (theta, _) = skew(A), to_theta(A)
    W = torch.matrix_exp(B)
    a, V = torch.linalg.eig(W)
    log = V @ torch.diag(a.log()) @ torch.linalg.inv(V)
    close(log.real, B, 1e-6)
    close(log.imag, torch.zeros(d, d).double(), 1e-6)
    close(a.angle().sort(descending=True).values[: d // 2], theta, 1e-8)

    X = torch.zeros(d, d, dtype=torch.float64, requires_grad=True)
    far = []
    for _ in range(60):                                                 # each step takes off 0.4 of the error
        (((X.triu(1) - X.triu(1).T) - B) ** 2).sum().backward()
        X.data -= 0.1 * X.grad
        far.append((X.data.triu(1) - A).abs().max().item())
        X.grad = None
    assert far[0] > far[10] > far[20] and far[-1] < 1e-8
    closed = A.clone().requires_grad_()
    (((closed - closed.T) - B) ** 2).sum().backward()
    assert not closed.grad.any()

    U, S, Vh = torch.linalg.svd(W)
    close(Vh.T @ torch.diag(S) @ Vh, torch.eye(d).double(), 1e-13)
    close(U @ Vh, W, 1e-13)


def test_whole_positions_see_angles_modulo_two_pi_and_theta_does_not():
    over, under, (q, k), pos = APE(2, 1).double(), APE(2, 1).double(), random(2, 1, L, 2), torch.arange(L)
    over.A.data[0, 0, 1], under.A.data[0, 0, 1] = -5, 2 * math.pi - 5
    close(logits(over, pos, q, k), logits(under, pos, q, k), 1e-13)
    assert over.theta().item() == pytest.approx(5) and under.theta().item() == pytest.approx(2 * math.pi - 5)
    assert (logits(over, pos / 2, q, k) - logits(under, pos / 2, q, k)).abs().max() > 0.1


# -------------------------------------------------------------------------------------------------- gradients
def gradient(A, maps, q, k, weight):
    """dloss/dA of the loss sum weight q^T maps(skew(A)) k, through matrix_exp: maps (L, L, ..., d, d)."""
    A = A.clone().requires_grad_()
    M = maps(skew(A))
    (torch.einsum("hmi,mnhij,hnj->hmn", q, M, k) * weight).sum().backward()
    return A.grad


@every_case
def test_gradient_of_sequences_is_that_of_matrix_exp(A):
    pe, (q, k), weight = APE(d, H).double(), random(2, H, L, d), random(H, L, L, seed=1)
    A = torch.stack([A, A + 0.1 * random(d, d, seed=2).triu(1), 0.5 * A])
    pe.A.data = A.clone()
    pos = torch.tensor([-2, 0, 1, 3, 7])
    offset = (pos - pos[:, None]).double()[..., None, None, None]
    (logits(pe, pos, q, k) * weight).sum().backward()
    expected = gradient(A, lambda B: torch.matrix_exp(offset * B), q, k, weight)
    assert pe.A.grad.isfinite().all() and all(g.abs().max() > 1 for g in pe.A.grad)
    close(pe.A.grad, expected, 1e-10 * expected.abs().max().item())


@pytest.mark.parametrize("gap", (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-12, 1e-15))
@pytest.mark.parametrize("dtype, error", ((torch.float64, 1e-9), (torch.float32, 1e-4)))
def test_gradient_where_angles_nearly_repeat(gap, dtype, error):
    """Between resonance and none a gap is half lost in rounding, or half too wide: eps^(2/3) there, times a
    factor of the size."""
    pe, (q, k), weight = APE(d, H).to(dtype), random(2, H, L, d), random(H, L, L, seed=1)
    pe.A.data[:] = turned([1 + gap, 1, gap, 0.3])
    A, pos = pe.A.detach().double(), torch.tensor([-2, 0, 1, 3, 7])
    offset = (pos - pos[:, None]).double()[..., None, None, None]
    (logits(pe, pos, q.to(dtype), k.to(dtype)) * weight).sum().backward()
    expected = gradient(A, lambda B: torch.matrix_exp(offset * B), q, k, weight)
    close(pe.A.grad.double(), expected, error * expected.abs().max().item())


@pytest.mark.parametrize("base", (1e4, 5e5))
@pytest.mark.parametrize("pos", ([5, 5000], [100_000 + 7 * i for i in range(5)], [-3000, 4]))
def test_gradient_far_from_the_start(pos, base):
    """Few tokens, far away: what counts for a gap is the position, not the number of tokens."""
    pe, L, pos = APE(16, H, base=base), len(pos), torch.tensor(pos)
    (q, k), weight = random(2, H, L, 16), random(H, L, L, seed=1)
    offset = (pos - pos[:, None]).double()[..., None, None, None]
    (logits(pe, pos, q.float(), k.float()) * weight).sum().backward()
    expected = gradient(pe.A.detach().double(), lambda B: torch.matrix_exp(offset * B), q, k, weight)
    close(pe.A.grad.double(), expected, 1e-3 * expected.abs().max().item())


@every_case
def test_gradient_of_grids_and_trees_is_that_of_matrix_exp(A):
    (q, key), weight = random(2, H, L, d), random(H, L, L, seed=1)
    pe = TreeAPE(d, H, 2).double()
    pe.A.data[0], pe.A.data[1] = A, 0.5 * A.flip(0, 1).mT
    paths = [(), (0,), (1, 0), (0, 0, 1), (0, 1)]
    (logits(pe, torch.tensor(padded(paths)), q, key) * weight).sum().backward()

    def maps(B):
        M = [product(torch.matrix_exp(B), path) for path in paths]
        return torch.stack([torch.stack([a.mT @ b for b in M]) for a in M])
    expected = gradient(pe.A.detach(), maps, q, key, weight)
    assert pe.A.grad.isfinite().all() and all(g.abs().max() > 1e-3 for g in pe.A.grad.flatten(0, 1))
    close(pe.A.grad, expected, 1e-10 * expected.abs().max().item())

    grid, pos = GridAPE(2 * d, H).double(), torch.tensor([[0, 1], [2, -1], [5, 5], [3, 0], [1, 4]])
    x, y = random(2, H, L, 2 * d)
    for axis in grid.axes:
        axis.A.data[:] = A
    (logits(grid, pos, x, y) * weight).sum().backward()
    for i, axis in enumerate(grid.axes):
        offset = (pos[:, i] - pos[:, i, None]).double()[..., None, None, None]
        own = [t[..., i * d:][..., :d] for t in (x, y)]
        expected = gradient(axis.A.detach(), lambda B: torch.matrix_exp(offset * B), *own, weight)
        close(axis.A.grad, expected, 1e-10 * expected.abs().max().item())


@pytest.mark.parametrize("method", ("linear", "ntk"))
def test_gradient_of_an_extended_encoding(method):
    """scaling.py changes theta: a finite difference of the loss along a direction is the slope."""
    pe, (q, k), weight = filled(APE(d, H)), random(2, H, L, d), random(H, L, L, seed=1)
    pos = 3 * torch.arange(L)
    loss = lambda: (logits(extend(pe, method, 4, 16), pos, q, k) * weight).sum()
    loss().backward()
    step, ahead = random(H, d, d, seed=2), []
    for sign in (1, -2):
        pe.A.data += sign * 1e-5 * step
        ahead.append(loss().item())
    assert (pe.A.grad * step).sum().item() == pytest.approx((ahead[0] - ahead[1]) / 2e-5, rel=1e-6)


def test_a_frozen_encoding_has_no_gradient_and_the_queries_have():
    pe, x = APE(d, H).requires_grad_(False), random(H, L, d).requires_grad_()
    pe(torch.arange(L))(x).square().sum().backward()
    close(x.grad, 2 * x.detach(), 1e-12)


# ------------------------------------------------------------------------------------------- memory and rows
def peak(f):
    """The most bytes that f() holds at once, by torch's allocator."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(profile_memory=True) as profile:
        f()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes, initial=0))


def test_no_table_of_powers():
    table = 2048 * 8 * 64 * 64 * 4
    pe = APE(64, 8)
    assert table / 100 < peak(lambda: pe(torch.arange(2048))) < table / 20
    q = torch.randn(8, 2048, 64)                                        # and the tokens, in and out
    assert peak(lambda: pe(torch.arange(2048))(q).sum().backward()) < table / 20 + 6 * q.nbytes


@pytest.mark.parametrize("B", (2, H))
def test_positions_of_each_row(B):
    pe, (q, k) = filled(APE(d, H)), random(2, B, H, L, d)
    pos = torch.randint(-20, 20, (B, L), generator=torch.Generator().manual_seed(1))
    actual, W = logits(pe, pos, q, k), torch.matrix_exp(skew(pe.A.detach()))
    for b, h, i, j in itertools.product(range(B), range(H), range(L), range(L)):
        expected = q[b, h, i] @ power(W[h], (pos[b, j] - pos[b, i]).item()) @ k[b, h, j]
        close(actual[b, h, i, j], expected, 1e-11)


POSITIONS = {"sequence": torch.arange(L), "grid": torch.arange(2 * L).view(L, 2) % 4,
             "tree": torch.tensor([[0, 1], [1, -1], [-1, -1], [0, 0], [0, 1]])}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
def test_shape_and_dtype_are_kept(dtype):
    for pe, pos in zip((APE(d, H), GridAPE(d, H), TreeAPE(d, H)), POSITIONS.values()):
        for B in (2, H):
            for p, shape in [(pos, (H, L, d)), (pos, (B, H, L, d)), (pos.expand(B, *pos.shape), (B, H, L, d)),
                             (pos.expand(B, *pos.shape), (7, B, H, L, d))]:
                y = pe(p)(torch.ones(shape, dtype=dtype))
                assert y.shape == shape and y.dtype == dtype
        assert pe.temperature == 1.0 and not list(pe.buffers())


# ---------------------------------------------------------------------------------------------------- the GPT
@pytest.fixture
def gpt(monkeypatch):
    """A GPT of 3 heads and 2 layers with an encoding, no weight at its initial value."""
    def make(pe, dtype=torch.float32):
        monkeypatch.setitem(encodings, "under test", lambda c: pe)
        torch.manual_seed(0)
        model = GPT({"vocab": 17, "heads": H, "layers": 2, "d": d, "pe": "under test"}).to(dtype)
        for name, w in model.named_parameters():
            w.data += 0.3 * random(*w.shape).to(dtype) * (not name.startswith("pe."))
        return model
    return make


IDX = torch.randint(17, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("A", [None, *(CASES[name] for name in ("zero", "repeated", "beyond pi"))])
def test_fold(gpt, A):
    """Train APE, run RoPE: the same logits, the planes in W_q and W_k; the model itself stays as it is."""
    pe = filled(APE(d, H))
    if A is not None:
        pe.A.data[1:] = A
    model = gpt(pe, torch.float64)
    before, folded = {n: w.clone() for n, w in model.state_dict().items()}, fold(model)
    close(folded(IDX)[0], model(IDX)[0], 1e-10)
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())
    assert type(folded.pe) is RoPE and folded.config["pe"] == "rope"
    assert folded.pe.theta().shape == (H, d // 2)
    again = GPT(folded.config).double()                                 # all of it is in config and weights
    again.load_state_dict(folded.state_dict())
    assert torch.equal(again(IDX)[0], folded(IDX)[0])
    changed = {n for n, w in folded.state_dict().items() if not torch.equal(w, before[n])}
    assert changed == {"blocks.0.qkv.weight", "blocks.1.qkv.weight"}

    single = model.float().eval()
    folded = fold(single)
    assert folded.head.weight.dtype == torch.float32 and not folded.training
    close(folded(IDX)[0], single(IDX)[0], 1e-4)


def test_only_sequences_fold(gpt):
    with pytest.raises(ValueError, match="only ape"):
        fold(gpt(TreeAPE(d, H)))


@torch.no_grad()
@pytest.mark.parametrize("method", ("linear", "ntk", "yarn"))
def test_scaling_extends_it_and_the_extended_one_folds(gpt, method):
    model = gpt(filled(APE(d, H), 0.1), torch.float64)
    plain, pe = model(IDX)[0], model.pe
    model.pe = extend(pe, method, 4, 10)
    longer = model(IDX)[0]
    assert (longer - plain)[:, 11:].abs().amax(-1).min() > 1e-4
    close(fold(model)(IDX)[0], longer, 1e-10)
    if method == "linear":
        close(model(IDX, pos=4 * torch.arange(40))[0], plain, 1e-10)
    model.pe = extend(pe, method, 1, 10)
    assert torch.equal(model(IDX)[0], plain)


@pytest.mark.parametrize("name", ("sequence", "grid", "tree"))
def test_every_parameter_of_a_gpt_gets_a_gradient(gpt, name):
    model = gpt({"sequence": APE, "grid": GridAPE, "tree": TreeAPE}[name](d, H))
    model(IDX[:, :5], IDX[:, 1:6], POSITIONS[name])[1].backward()
    assert all(w.grad.isfinite().all() and w.grad.any() for w in model.parameters())


@pytest.mark.parametrize("name", ("sequence", "grid", "tree"))
def test_compiles(name):
    """Sequences and grids without a graph break. A tree has one: how many maps it has depends on the data."""
    pe, pos = {"sequence": APE, "grid": GridAPE, "tree": TreeAPE}[name](d, H), POSITIONS[name]
    q, k = random(2, H, L, d).float()
    loss, grads = lambda q, k: logits(pe, pos, q, k).sin().sum(), []
    backend = "aot_eager" if name == "sequence" else "eager"
    for f in (loss, torch.compile(loss, backend=backend, fullgraph=name != "tree")):
        f(q, k).backward()
        grads.append([w.grad for w in pe.parameters()])
        pe.zero_grad()
    for one, other in zip(*grads):
        close(one, other, 1e-5)
