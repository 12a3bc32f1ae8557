"""
ND-RoPE: the module against planes turned one by one, the instruments against loops, and the two laws.

Generators are written here from what the encoding stores, by outer products, python's powers and a tournament
played by moving a list round. None of that is the code's way.
"""
import copy
import itertools
import math

import numpy as np
import pytest
import torch

from ndrope import (NDRoPE, centraliser_dimension, commutator_norm, commuting, fold, independence,
                    injectivity_margin, recover, relativity_error, turn)
from rope import RoPE
from scaling import METHODS, extend
from train import GPT

BASE, d, H, L, B = 100.0, 10, 3, 5, 2               # d/2 = 5 is not divisible by 2 or 3 axes: uneven bands
ARMS = list(itertools.product((1, 2, 3), ("axial", "mixed"), ("identity", "exp", "cayley", "givens")))
every_arm = pytest.mark.parametrize("arm", ARMS, ids=lambda arm: "-".join(map(str, arm)))
every_basis = pytest.mark.parametrize("basis", ("exp", "cayley", "givens"))


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a, b, atol):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def encoding(arm, moved=0.5, d=d, base=BASE):
    """With what it learns moved off the start."""
    ndim, directions, basis = arm
    torch.manual_seed(0)
    pe = NDRoPE(d, ndim, directions=directions, basis=basis, base=base)
    for i, w in enumerate(pe.parameters()):
        w.data += moved * random(*w.shape, seed=i)
    return pe


def rounds(d):
    """A tournament of d players, the last one seated: pairs (i, j) of each round, i turned towards j."""
    table = list(range(d - 1))
    for _ in range(d - 1):
        yield [(table[0], d - 1)] + [(table[k], table[-k]) for k in range(1, d // 2)]
        table = table[1:] + table[:1]


def basis_by_loops(pe):
    Q, A = np.eye(pe.d), np.zeros((pe.d, pe.d))
    if pe.basis == "identity":
        return torch.from_numpy(Q)
    for r, pairs in enumerate(rounds(pe.d)):
        for k, (i, j) in enumerate(pairs):
            angle = pe.a[r, k].item()
            A[j, i], A[i, j] = angle, -angle
            if pe.basis == "givens":
                G = np.eye(pe.d)
                G[i, i] = G[j, j] = math.cos(angle)
                G[j, i] = math.sin(angle)
                G[i, j] = -G[j, i]
                Q = Q @ G
    if pe.basis == "cayley":
        Q = np.linalg.inv(np.eye(pe.d) - A / 2) @ (np.eye(pe.d) + A / 2)
    return torch.matrix_exp(torch.from_numpy(A)) if pe.basis == "exp" else torch.from_numpy(Q)


def vectors_by_loops(pe):
    """w[i][j]: bands are dealt to the axes like cards."""
    N, n = pe.ndim, math.ceil(pe.d / 2 / pe.ndim)
    deal = itertools.product(range(n), range(N))                # (band, axis)
    w = [[0.0] * (pe.d // 2) for _ in range(N)]
    for j, (band, axis) in zip(range(pe.d // 2), deal):
        for i in range(N):
            w[i][j] = pe.base ** (-band / n) * (float(i == axis) if pe.v is None else pe.v[i, j].item())
    return w


def by_loops(pe):
    """The generators (N, d, d): in the plane of columns j and j + d/2 of Q, each axis i its speed w[i][j]."""
    Q, w = basis_by_loops(pe), vectors_by_loops(pe)
    G = torch.zeros(pe.ndim, pe.d, pe.d, dtype=torch.float64)
    for i, j in itertools.product(range(pe.ndim), range(pe.d // 2)):
        one, two = Q[:, j], Q[:, j + pe.d // 2]
        G[i] += w[i][j] * (torch.outer(two, one) - torch.outer(one, two))
    return G


def oracle(G, pos, q, k):
    """q_m^T exp(sum_i (n - m)_i B_i) k_n for tokens q, k (H, L, d) at pos (L,) or (L, N): (H, L, L)."""
    pos = pos.view(len(pos), -1).double()
    R = torch.matrix_exp(torch.einsum("mni,iab->mnab", pos - pos[:, None], G))
    return torch.einsum("hma,mnab,hnb->hmn", q, R, k)


def place(N, *x):
    return torch.tensor(x[:N], dtype=torch.float64)


def matrix(pe, x):
    """rho(x), (d, d): the columns of the identity are d tokens, all at x (N,)."""
    pos = x.expand(pe.d, -1)
    return pe(pos[:, 0] if pe.ndim == 1 else pos)(torch.eye(pe.d, dtype=torch.float64)[None])[0].mT


def positions(pe, *shape, seed=1):
    shape = shape if pe.ndim == 1 else (*shape, pe.ndim)
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------- the module, the two laws
PLACES = [((0, 0, 0), (1, 0, 0)), ((3, -10, 2), (10, 3, -7)), ((0.5, 2.25, -3.5), (1000, -400, 31))]


@every_arm
def test_relativity_and_the_oracle(arm):
    pe = encoding(arm)
    G = by_loops(pe)
    close(pe.generators(), G, 1e-13)
    for x, y in PLACES:
        x, y = place(arm[0], *x), place(arm[0], *y)
        seen = matrix(pe, x).mT @ matrix(pe, y)
        close(seen, torch.matrix_exp(((y - x)[:, None, None] * G).sum(0)), 1e-10)
        close(seen, matrix(pe, 0 * x).mT @ matrix(pe, y - x), 1e-10)
        close(matrix(pe, x) @ matrix(pe, x).mT, torch.eye(d).double(), 1e-12)
    assert relativity_error(pe.generators()) < 1e-10 and commutator_norm(pe.generators()) < 1e-12


@every_arm
def test_reversibility_inside_the_box(arm):
    pe = encoding(arm)
    G, w = pe.generators(), np.array(vectors_by_loops(pe))
    assert independence(G) > 0.1
    for seed in range(3):
        x = random(arm[0], seed=seed).numpy()
        x *= 0.99 * math.pi / np.abs(x @ w).max()               # to just inside a wall of the box
        R = matrix(pe, place(arm[0], 0, 0, 0)).mT @ matrix(pe, torch.from_numpy(x))
        close(recover(R, G), torch.from_numpy(x), 1e-6)


@pytest.mark.parametrize("shape", ((2, 5), (3, 5)))             # B == H: an axis taken for another is silent
@every_arm
def test_positions_of_each_row(arm, shape):
    pe = encoding(arm)
    G, pos, (q, k) = by_loops(pe), positions(pe, *shape), random(2, shape[0], H, L, d)
    rho = pe(pos)
    for b in range(shape[0]):
        close((rho(q) @ rho(k).mT)[b], oracle(G, pos[b], q[b], k[b]), 1e-10)
        assert torch.equal(pe(pos[b])(q[b]), rho(q)[b])


def test_one_axis_is_rope_to_the_bit():
    for d, base, directions, dtype in [(2, 1e4, "axial", torch.float64), (64, 5e5, "axial", torch.bfloat16),
                                       (10, 50.0, "mixed", torch.float32)]:
        pe, rope, x = NDRoPE(d, 1, directions=directions, base=base), RoPE(d, base), random(H, L, d).to(dtype)
        assert torch.equal(pe.theta(), rope.theta()) and pe.temperature == rope.temperature == 1
        for pos in (torch.arange(L), torch.arange(2 * L).view(2, L) + 10**6):
            assert torch.equal(pe(pos)(x), rope(pos)(x))


def test_uneven_bands_share_one_spectrum():
    """d/2 = 5 planes: three bands for the first of two axes and two for the last, which lacks the slowest."""
    w, s = NDRoPE(10, 2, base=1000.0).theta(), [1, 0.1, 0.01]
    close(w, torch.tensor([[s[0], 0, s[1], 0, s[2]], [0, s[0], 0, s[1], 0]], dtype=w.dtype), 1e-15)
    assert [int((row != 0).sum()) for row in NDRoPE(64, 3).theta()] == [11, 11, 10]


def test_mixed_starts_isotropic_on_the_half_sphere():
    torch.manual_seed(0)
    v = NDRoPE(6000, 3, directions="mixed").v.data
    close(v.norm(dim=0), torch.ones(3000), 1e-6)
    assert (v[0] > 0).all()
    # The mean of v v^T is I/3; of v, (1/2, 0, 0): the centre of a half sphere. Deviation of a mean: 0.006.
    close(v @ v.T / 3000, torch.eye(3) / 3, 0.03)
    close(v.mean(1), torch.tensor([0.5, 0, 0]), 0.03)


def test_rows_and_columns_of_a_grid_that_is_not_square():
    """3 x 5 cells, flattened row by row: axis 0 is the row, and a transposed pos is another encoding."""
    pe, (q, k) = encoding((2, "axial", "cayley")), random(2, d)
    cells, G = list(itertools.product(range(3), range(5))), by_loops(pe)

    def logits(pos):
        rho = pe(pos)
        return (rho(q.expand(1, 15, d)) @ rho(k.expand(1, 15, d)).mT)[0]
    actual = logits(torch.tensor(cells))
    for (m, (r, c)), (n, (s, t)) in itertools.product(enumerate(cells), repeat=2):
        close(actual[m, n], q @ torch.matrix_exp((s - r) * G[0] + (t - c) * G[1]) @ k, 1e-11)
    assert (logits(torch.tensor(cells).flip(-1)) - actual).abs().max() > 0.1
    close(actual[0, 3], actual[5, 8], 1e-12)                    # three to the right, from two rows
    assert (actual[0, 3] - actual[3, 6]).abs() > 1e-2           # three on in the flattened index


# ---------------------------------------------------------------------------------- shapes, dtypes, precision
@every_arm
def test_shape_and_dtype_are_kept(arm):
    pe = encoding(arm)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for pos, shape in [((L,), (H, L, d)), ((L,), (B, H, L, d)), ((L,), (7, B, H, L, d)),
                           ((B, L), (B, H, L, d)), ((B, L), (7, B, H, L, d))]:
            y = pe(positions(pe, *pos))(torch.ones(shape, dtype=dtype))
            assert y.shape == shape and y.dtype == dtype


@pytest.mark.parametrize("how", ("float32", "bfloat16", "autocast"))
@every_arm
def test_precision_far_from_the_start(arm, how):
    """At 3000 to 4000: the float64 logits are the oracle's, also of a model cast to bfloat16 or of a rho made
    under autocast, and bfloat16 inputs give what float64 gives, rounded once (unit roundoff 2^-8)."""
    pe = encoding(arm).bfloat16() if how == "bfloat16" else encoding(arm)
    pos, G = 3500 + 10 * positions(pe, 9), by_loops(pe)
    q, k = random(2, H, 9, d).bfloat16().double()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        rho = pe(pos)
    close(rho(q) @ rho(k).mT, oracle(G, pos, q, k), 1e-9)
    assert ((rho(q.bfloat16()).double() - rho(q)).abs() <= 2**-8 * rho(q).abs() + 1e-5).all()


@every_basis
def test_compiles_into_one_graph(basis):
    pe = encoding((2, "mixed", basis), d=4)
    x, pos = random(H, L, 4), positions(pe, L)

    def objective(x, pos):
        return pe(pos)(x).tanh().square().sum()
    results = []
    for f in (objective, torch.compile(objective, backend="aot_eager", fullgraph=True)):
        pe.zero_grad()
        loss = f(x, pos)
        loss.backward()
        results.append((loss.detach(), pe.v.grad, pe.a.grad))
    torch.testing.assert_close(*results)


# ------------------------------------------------------------------------------------------ what is learned
@every_arm
def test_state_gradients_at_the_start_and_against_differences(arm):
    start, moved = encoding(arm, moved=0), encoding(arm).double()
    learned = ["v"] * (arm[1] == "mixed") + ["a"] * (arm[2] != "identity")
    assert list(start.state_dict()) == learned and not list(start.buffers())
    (q, k), weight = random(2, H, L, d), random(H, L, L, seed=1)
    pos = positions(start, L) % 7
    for pe in (start, moved) if learned else ():
        rho = pe(pos)
        (rho(q) @ rho(k).mT * weight).sum().backward()
        assert all(w.grad.isfinite().all() and w.grad.any() for w in pe.parameters())

    for i, w in enumerate(moved.parameters()):
        direction, values = random(*w.shape, seed=2 + i), []
        for step in (1e-5, -2e-5, 1e-5):
            w.data += step * direction
            values.append((oracle(by_loops(moved), pos, q, k) * weight).sum().item())
        assert (w.grad * direction).sum().item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


@pytest.mark.parametrize("d", (2, 4, 6, 64))
def test_the_three_bases_start_at_the_identity_and_level(d):
    a, Q = 1e-4 * random(d - 1, d // 2), {}
    for basis in ("exp", "cayley", "givens"):
        pe = NDRoPE(d, 1, basis=basis).double()
        assert pe.a.shape == a.shape
        close(pe.Q(), torch.eye(d).double(), 0)
        pe.a.data += a
        Q[basis] = pe.Q().detach()
        close(Q[basis].T @ Q[basis], torch.eye(d).double(), 1e-14)
        close(Q[basis], Q["exp"], 1e-8 * d**2)                  # the same to first order
    pairs = [sorted(pair) for pairs in rounds(d) for pair in pairs]
    assert sorted(pairs) == [list(pair) for pair in itertools.combinations(range(d), 2)]


@every_basis
def test_a_basis_stays_orthogonal_in_training(basis):
    """200 steps of Adam, in float32, towards the logits of another basis: Q moves far, and stays a basis."""
    pe, goal = encoding((2, "axial", basis), moved=0), encoding((2, "axial", "exp"), moved=0.3)
    (q, k), pos = random(2, H, 12, d).float(), positions(pe, 12) % 9
    rho = goal(pos)
    logits = (rho(q) @ rho(k).mT).detach()
    optimizer, losses = torch.optim.Adam(pe.parameters(), lr=0.02), []
    for _ in range(200):
        rho = pe(pos)
        losses.append((rho(q) @ rho(k).mT - logits).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    Q = matrix(pe, place(2, 0, 0)).detach()
    close(Q.T @ Q, torch.eye(d).double(), 1e-6)
    assert (Q - torch.eye(d)).norm() > 0.5 and losses[-1] < 0.5 * losses[0]
    assert relativity_error(pe.generators()) < 1e-10


# ---------------------------------------------------------------------------------------------------- the GPT
IDX = torch.randint(17, (B, 6), generator=torch.Generator().manual_seed(0))
GRID = torch.tensor([[r, c] for r in range(2) for c in range(3)])
POS = {1: torch.arange(6), 2: GRID, 3: torch.cat((GRID, GRID[:, :1] * GRID[:, 1:]), dim=-1)}


def gpt(pe):
    torch.manual_seed(0)
    model = GPT({"vocab": 17, "heads": H, "layers": 2, "d": d, "pe": "ndrope", "ndim": pe.ndim,
                 "directions": pe.directions, "basis": pe.basis}).double()
    for i, w in enumerate(model.parameters()):
        w.data += 0.3 * random(*w.shape, seed=i)
    model.pe = copy.deepcopy(pe)
    return model


@torch.no_grad()
def run(model, pos):
    return model(IDX, pos=pos)[0]


@every_arm
def test_a_gpt_sees_offsets_only(arm):
    model, pos = gpt(encoding(arm)), POS[arm[0]]
    expected, shift = run(model, pos), torch.tensor([1000, -70, 31])
    close(run(model, pos + shift[:arm[0]]), expected, 1e-10)
    assert (run(model, 2 * pos) - expected).abs().amax((0, 2))[1:].min() > 1e-4
    if arm[0] > 1:
        assert (run(model, pos.flip(-1)) - expected).abs().max() > 1e-3


@every_arm
def test_fold(arm):
    pos = POS[arm[0]]
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model = gpt(encoding(arm)).to(dtype)
        weights, expected = copy.deepcopy(model.state_dict()), run(model, pos)
        folded = fold(model)
        close(run(folded, pos), expected, atol)
        assert folded.pe.a is None and folded.pe.basis == "identity" and "pe.a" not in folded.state_dict()
        for name, w in model.state_dict().items():              # the given one is left as it was
            assert torch.equal(w, weights[name])
        if arm[2] != "identity":
            assert folded.config["basis"] == "identity" and model.config["basis"] == arm[2]
            model.pe.a = None                                   # a Q that is only dropped is missed
            assert (run(model, pos) - expected).abs().max() > 1e-3


@every_basis
def test_scalings_of_one_axis_are_those_of_rope(basis):
    x = random(2, H, 40, d)
    pos = torch.arange(40)
    for method in METHODS:
        kw = {"factors": [1.5] * (d // 2)} if method == "longrope" else \
             {"ramp": "index", "base": BASE} if method == "yarn" else {}
        pe = encoding((1, "axial", basis))
        ours, ropes = extend(pe, method, 4, 16, **kw), extend(RoPE(d, BASE), method, 4, 16, **kw)
        assert torch.equal(ours.theta(), ropes.theta()) and ours.temperature == ropes.temperature
        Q = basis_by_loops(pe)
        logits, expected, short = [q @ k.mT for q, k in (ours(pos)(x), ropes(pos)(x @ Q), pe(pos)(x))]
        close(logits, expected, 1e-11)
        assert (logits - short).abs().max() > 1e-2              # applied, not only parsed
        pe.a.data += 0.1                                        # on the same Parameters
        q, k = ours(pos)(x)
        assert (q @ k.mT - logits).abs().max() > 1e-2


# ----------------------------------------------------------------------------------------- the instruments
def dense(N, d, seed=0):
    A = random(N, d, d, seed=seed) / d**0.5
    return A - A.mT


def test_generators_that_do_not_commute_break_relativity():
    """LieRE's. The worst of the same kind of draw, by loops; and the defect grows as the commutator."""
    G = dense(2, 6)
    assert relativity_error(G) > 1e-2 and commutator_norm(G) > 1e-2
    draw, worst = np.random.default_rng(1), 0.0
    R = lambda x: torch.matrix_exp(x[0] * G[0] + x[1] * G[1])
    for _ in range(300):
        x, y = draw.random((2, 2))
        worst = max(worst, (R(-x) @ R(y) - R(y - x)).square().sum().sqrt().item())
    assert relativity_error(G) == pytest.approx(worst, rel=0.15)
    # In the unit box x_1 y_2 - x_2 y_1 is at most 1, and near it for some of the pairs.
    by_hand = (G[0] @ G[1] - G[1] @ G[0]).square().sum().sqrt().item()
    assert commutator_norm(G) == pytest.approx(by_hand, rel=1e-12)
    for t in (1e-2, 1e-3):
        assert 0.8 < relativity_error(t * G) / (t**2 * by_hand / 2) < 1.001
    axial, other = encoding((2, "axial", "identity")), basis_by_loops(encoding((1, "axial", "exp"), 0.01))
    broken = torch.stack((axial.generators()[0], other @ axial.generators()[1] @ other.T))
    assert 0.35 < relativity_error(broken) / commutator_norm(broken) < 0.501
    with pytest.raises(ValueError, match="commute"):
        recover(R([0.1, 0.2]), G)


def test_generators_that_commute_by_construction_keep_it():
    """STRING's circulants: C[i, j] = c[(i - j) mod d], a sum of shifts; and odd powers of one matrix."""
    shift, c = torch.eye(8).roll(1, 0).double(), random(2, 8)
    C = torch.stack([sum(c[i, k] * torch.linalg.matrix_power(shift, k) for k in range(8)) for i in range(2)])
    S = dense(1, 8)[0]
    for G in (C - C.mT, torch.stack((S, S @ S @ S))):
        assert commutator_norm(G) < 1e-13 and relativity_error(G) < 1e-13 and independence(G) > 0.1
        x = torch.tensor([0.2, -0.1]).double()
        close(recover(turn(x, G), G), x, 1e-9)


def test_so4_and_so6_written_out():
    """Blocks J side by side, as a paper writes them. In so(6) the third plane sees x + y, without any Q."""
    J, O = np.array([[0.0, -1], [1, 0]]), np.zeros((2, 2))

    def blocks(*given):
        return torch.from_numpy(np.block([[b if i == j else O for j in range(len(given))]
                                          for i, b in enumerate(given)]))
    so4, so6 = torch.stack((blocks(J, O), blocks(O, J))), torch.stack((blocks(J, O, J), blocks(O, J, J)))
    for G in (so4, so6):
        assert commutator_norm(G) == 0 and relativity_error(G) < 1e-13
        assert independence(G) == pytest.approx(1) and centraliser_dimension(G) == G.shape[-1] // 2
        x = torch.tensor([1.0, -2.5]).double()
        close(recover(turn(x, G), G), x, 1e-12)
    R = turn(torch.tensor([0.25, 0.5]).double(), so6)
    for plane, angle in enumerate((0.25, 0.5, 0.75)):
        c, s, block = math.cos(angle), math.sin(angle), slice(2 * plane, 2 * plane + 2)
        close(R[block, block], torch.tensor([[c, -s], [s, c]], dtype=R.dtype), 1e-14)
    halves = [0, 2, 4, 1, 3, 5]                                 # the same planes, channels i and i + d/2
    w = torch.tensor([[1, 0, 1], [0, 1, 1]]).double()
    assert torch.equal(so6[:, halves][:, :, halves], commuting(w))
    # Outside the box so(4), all of whose angles wrap, has an x with the same R inside; so(6) need not.
    x = torch.tensor([4.0, 0.5]).double()
    close(recover(turn(x, so4), so4), x - place(2, 2 * math.pi, 0), 1e-12)
    with pytest.raises(ValueError, match="below pi"):
        recover(turn(torch.tensor([2.0, 2.0]).double(), so6), so6)


def test_recover_refuses_what_is_not_of_the_family():
    pe = encoding((2, "axial", "cayley"))
    G = pe.generators()
    R = turn(torch.tensor([0.3, 0.4]).double(), G)
    for wrong, why in [(1.01 * R, "orthogonal"), (R * math.nan, "orthogonal"), (R[:4, :4], "orthogonal"),
                       (-R, "below pi"), (turn(torch.ones(1), dense(1, d)) @ R, "below pi"),
                       (R[torch.randperm(d, generator=torch.Generator().manual_seed(0))], "below pi")]:
        with pytest.raises(ValueError, match=why):
            recover(wrong, G)
    for dependent in (G[[0, 0]], torch.stack((G[0], 0 * G[0])), commuting(torch.tensor([[1.0], [2**0.5]]))):
        assert independence(dependent) < 1e-7
        with pytest.raises(ValueError, match="independent"):
            recover(turn(torch.ones(2), dependent), dependent)
    close(recover(R.float(), G.float()), torch.tensor([0.3, 0.4]).double(), 1e-5)


@pytest.mark.parametrize("arm, shape", [((1, "mixed", "identity"), (7,)), ((2, "axial", "exp"), (3, 5)),
                                        ((2, "mixed", "givens"), (5, 2)),
                                         ((3, "mixed", "identity"), (2, 3, 4))])
def test_margin_against_loops_over_all_pairs_of_cells(arm, shape):
    pe = encoding(arm)
    w, least = vectors_by_loops(pe), math.inf
    for x, y in itertools.combinations(itertools.product(*map(range, shape)), 2):
        turns = [sum(w[i][j] * (y[i] - x[i]) for i in range(arm[0])) for j in range(d // 2)]
        least = min(least, math.sqrt(sum((2 * math.sin(t / 2))**2 for t in turns)))
    assert injectivity_margin(pe.generators(), shape) == pytest.approx(least, rel=1e-9)


def test_margin_of_generators_that_do_not_commute():
    G, cells = dense(2, 4), list(itertools.product(range(3), range(2)))
    R = [torch.matrix_exp(x * G[0] + y * G[1]) for x, y in cells]
    least = min((R[m] - R[n]).square().sum().sqrt() for m, n in itertools.combinations(range(6), 2))
    assert injectivity_margin(G, (3, 2)) == pytest.approx(least.item() / 2**0.5, rel=1e-9)


def test_margins_that_are_known():
    """One plane with w = (1, sqrt 2) tells all cells of Z^2 apart, and is of no use: x + y sqrt 2 comes close
    to 2 pi k. Two planes hold the nearest approach of an integer to 2 pi k, 44 to 14 pi if the grid has it"""
    grid = (32, 32)
    one = commuting(torch.tensor([[1], [2]]).double().sqrt())
    offsets = itertools.product(range(-31, 32), repeat=2)
    least = min(abs(2 * math.sin((x + y * 2**0.5) / 2)) for x, y in offsets if x or y)
    assert injectivity_margin(one, grid) == pytest.approx(least, rel=1e-6) and 5.5e-4 < least < 6.5e-4
    two = commuting(torch.eye(2).double())
    assert injectivity_margin(two, grid) == pytest.approx(abs(2 * math.sin(25 / 2)), rel=1e-9)
    assert injectivity_margin(two, (45, 2)) == pytest.approx(abs(2 * math.sin(44 / 2)), rel=1e-9)
    assert injectivity_margin(NDRoPE(32, 2, base=100.0).generators(), grid) == pytest.approx(1.17, abs=0.005)


def test_centraliser():
    """Of a generic element it is a maximal torus. Planes that turn alike, or not, commute with more."""
    assert [centraliser_dimension(dense(1, d)) for d in range(3, 9)] == [1, 2, 2, 3, 3, 4]
    for w, dimension in [([[1, 2, 3]], 3), ([[1, 1, 3]], 2**2 + 1), ([[1, -1, 3]], 2**2 + 1),
                         ([[1, 1, 1]], 3**2), ([[0, 0, 3]], 6 + 1), ([[0, 0, 0]], 15), ([[0, 1, 2]], 3),
                         ([[1, 1, 3], [1, 2, 0]], 3), ([[1, 1, 0], [2, 2, 0]], 2**2 + 1)]:
        G = commuting(torch.tensor(w).double(), basis_by_loops(encoding((1, "axial", "exp"), d=6)))
        assert centraliser_dimension(G) == dimension
    assert centraliser_dimension(dense(2, 6)) == 0              # two generic ones have nothing in common
    assert all(centraliser_dimension(encoding(arm).generators()) == d // 2 for arm in ARMS)


@every_arm
def test_independence_by_looking_all_round(arm):
    pe = encoding(arm)
    w, x = np.array(vectors_by_loops(pe)), random(100_000, arm[0]).numpy()
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    assert independence(pe.generators()) == pytest.approx(np.linalg.norm(x @ w, axis=1).min(), rel=1e-3)


def test_a_basis_after_the_rotation_cancels():
    pe, (q, k), pos = NDRoPE(d, 2, base=BASE), random(2, H, 6, d), GRID
    Q, rho = basis_by_loops(encoding((2, "axial", "cayley"))), pe(pos)
    after, before = (rho(q) @ Q.T) @ (rho(k) @ Q.T).mT, rho(q @ Q) @ rho(k @ Q).mT
    close(after, rho(q) @ rho(k).mT, 1e-13)
    assert (before - after).abs().max() > 0.1


@pytest.mark.parametrize("wrong, why", [
    (lambda: NDRoPE(8, 0), "ndim = 0"), (lambda: NDRoPE(8, 5), "ndim = 5"), (lambda: NDRoPE(7, 2), "d = 7"),
    (lambda: NDRoPE(8, 2, directions="axal"), "axal"), (lambda: NDRoPE(8, 2, basis="qr"), "qr"),
    (lambda: NDRoPE(8, 2, base=1.0), "base = 1"), (lambda: NDRoPE(8, 2)(torch.arange(5)), "pos"),
    (lambda: NDRoPE(8, 2)(torch.zeros(5, 3)), "pos"), (lambda: NDRoPE(8, 1)(torch.zeros(5, 3, 2)), "pos"),
    (lambda: injectivity_margin(dense(2, 4), (3,)), "shape")])
def test_wrong_use_gets_a_sentence(wrong, why):
    with pytest.raises(ValueError, match=why):
        wrong()
