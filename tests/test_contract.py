"""
The contract: what every encoding owes, whichever rho it chose, and what the GPT then owes its users.

    rho(m) is orthogonal,    rho(m)^T rho(n) = rho(0)^T rho(n - m)    and    = exp((n - m) B),  B skew

The first two cannot tell a right encoding from one that turns the other way, other channels, or at other
speeds. So the third compares with torch.matrix_exp of a generator B that plain loops write from what the
encoding stores.

A new encoding adds one line to ENCODINGS, and one to MODELS.
"""
import copy
import itertools
import math

import numpy as np
import pytest
import torch

from ape import APE
from lerope import LeRoPE
from ndrope import NDRoPE
from prope import PRoPE
from rope import RoPE
from test_ndrope import by_loops
from train import GPT

BASE, d, H, L = 10_000.0, 8, 3, 5                   # H, L and d differ: no axis can pass for another
SPECTRA = [[2.0, 0.5, 0.1, 0.001], [1.0, 0.0, 0.3, 0.02], [-0.7, 0.9, 0.05, 0.4]]


def power(i):
    return BASE ** (-2 * i / d)


def turns(theta):
    """B (H, d, d): exp(m B) turns channels i and i + d/2 of head h by m theta(h, i), counter-clockwise."""
    B = torch.zeros(H, d, d, dtype=torch.float64)
    for h in range(H):
        for i in range(d // 2):
            B[h, i, i + d // 2] = -theta(h, i)
            B[h, i + d // 2, i] = theta(h, i)
    return B


def upper(A):
    """B (H, d, d): A above the diagonal, minus that below it."""
    B = torch.zeros(A.shape, dtype=torch.float64)
    for h, i, j in itertools.product(range(H), range(d), range(d)):
        if i < j:
            B[h, i, j], B[h, j, i] = A[h, i, j].item(), -A[h, i, j].item()
    return B


ENCODINGS = {                                       # name: constructor, its generators (H, d, d) as stored
    "rope": (lambda: RoPE(d), lambda pe: turns(lambda h, i: power(i))),
    "per head": (lambda: RoPE(d, theta=SPECTRA), lambda pe: turns(lambda h, i: SPECTRA[h][i])),
    "prope": (lambda: PRoPE(d, 0.75), lambda pe: turns(lambda h, i: power(i) if i < 3 else 0)),
    "reversed": (lambda: PRoPE(d, 0.75, reverse=True), lambda pe: turns(lambda h, i: power(i) if i else 0)),
    "lerope": (lambda: LeRoPE(d), lambda pe: turns(lambda h, i: math.exp(pe.alpha[i].item()) * power(i))),
    "nope": (lambda: PRoPE(d, p=0), lambda pe: turns(lambda h, i: 0)),
    "ape": (lambda: APE(d, H), lambda pe: upper(pe.A)),
    "ape, near identity": (lambda: APE(d, H, "near_identity"), lambda pe: upper(pe.A)),
    "ndrope": (lambda: NDRoPE(d, 1, basis="cayley"), lambda pe: by_loops(pe).expand(H, d, d)),
}
LEARNED = [name for name, (make, _) in ENCODINGS.items() if list(make().parameters())]
every_encoding = pytest.mark.parametrize("name", ENCODINGS)


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a, b, atol):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def encoding(name):
    """The encoding with what it learns moved off the start, and the function that gives its generators."""
    make, generators = ENCODINGS[name]
    torch.manual_seed(0)
    pe = make()
    for i, w in enumerate(pe.parameters()):
        w.data += 0.5 * random(*w.shape, seed=i)
    return pe, generators


def matrix(pe, m):
    """rho(m), (H, d, d): the columns of the identity are d tokens, all at position m."""
    columns = torch.eye(d, dtype=torch.float64).expand(H, d, d)
    return pe(torch.full((d,), m, dtype=torch.float64))(columns).mT


def logits(pe, pos, q, k):
    rho = pe(pos)
    return rho(q) @ rho(k).mT


def oracle(B, m, n, q, k):
    """q_m^T exp((n - m) B) k_n for queries q (H, M, d) at m (M,) and keys k (H, N, d) at n (N,): (H, M, N)"""
    offset = (n - m[:, None])[..., None, None, None]                    # (M, N, 1, 1, 1)
    return torch.einsum("hmi,mnhij,hnj->hmn", q, torch.matrix_exp(offset * B), k)


# ---------------------------------------------------------------------------------------- the law, the oracle
PLACES = [(0, 0), (3, 10), (10, 3), (-7, 4), (0.5, 2.25), (10**6, 10**6 + 3), (-3.5, 10**6)]


@every_encoding
def test_law_and_orthogonality(name):
    pe, _ = encoding(name)
    for m, n in PLACES:
        rho_m, rho_n = matrix(pe, m), matrix(pe, n)
        close(rho_m.mT @ rho_m, torch.eye(d, dtype=torch.float64).expand(H, d, d), 1e-12)
        close(rho_m.mT @ rho_n, matrix(pe, 0).mT @ matrix(pe, n - m), 1e-8)


@every_encoding
def test_oracle_matrix_exponential_of_the_generator(name):
    pe, generators = encoding(name)
    for m, n in PLACES:
        close(matrix(pe, m).mT @ matrix(pe, n), torch.matrix_exp((n - m) * generators(pe)), 1e-8)


@every_encoding
@pytest.mark.parametrize("B", (2, H))               # B == H: a batch axis taken for the heads axis is silent
def test_oracle_with_positions_of_each_row(name, B):
    pe, generators = encoding(name)
    pos = torch.randint(-50, 50, (B, L), generator=torch.Generator().manual_seed(1))
    q, k = random(2, B, H, L, d)
    actual, G = logits(pe, pos, q, k), generators(pe)
    for b, h, i, j in itertools.product(range(B), range(H), range(L), range(L)):
        expected = q[b, h, i] @ torch.matrix_exp((pos[b, j] - pos[b, i]) * G[h]) @ k[b, h, j]
        close(actual[b, h, i, j], expected, 1e-11)
    for b in range(B):
        close(actual[b], logits(pe, pos[b], q[b], k[b]), 1e-12)


# ---------------------------------------------------------------------------------- shapes, dtypes, precision
@every_encoding
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
def test_shape_and_dtype_are_kept(name, dtype):
    pe, _ = encoding(name)
    for B in (2, H):
        row, rows = torch.arange(L), torch.arange(B * L).view(B, L)
        for pos, shape in [(row, (H, L, d)), (row, (B, H, L, d)), (row, (7, B, H, L, d)),
                           (rows, (B, H, L, d)), (rows, (7, B, H, L, d))]:
            y = pe(pos)(torch.ones(shape, dtype=dtype))
            assert y.shape == shape and y.dtype == dtype
    assert pe.temperature == 1.0


@every_encoding
def test_any_real_dtype_of_positions_means_the_same_positions(name):
    pe, _ = encoding(name)
    pos, x = torch.tensor([0, 3, 96, 2000, 3968]), random(H, L, d)      # exact in 8 significant bits
    expected = pe(pos)(x)
    for dtype in (torch.int16, torch.int32, torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert torch.equal(pe(pos.to(dtype))(x), expected)


@every_encoding
@pytest.mark.parametrize("how", ("float32", "bfloat16", "autocast"))
def test_precision_far_from_the_start(name, how):
    """At positions 3000 to 4000: the float64 logits are the oracle's, also of a model cast to bfloat16 or
    made under autocast, and bfloat16 inputs give what float64 gives, rounded once (unit roundoff 2^-8)."""
    pe, generators = encoding(name)
    pe = pe.bfloat16() if how == "bfloat16" else pe
    pos = torch.arange(3000, 4001)
    q, k = random(2, H, len(pos), d).bfloat16().double()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        rho = pe(pos)
    first = oracle(generators(pe), pos[:1], pos, q[:, :1], k)
    close(rho(q)[:, :1] @ rho(k).mT, first, 1e-9)
    assert ((rho(q.bfloat16()).double() - rho(q)).abs() <= 2**-8 * rho(q).abs() + 1e-5).all()


# ----------------------------------------------------------------------------------------- state and gradient
@every_encoding
def test_the_state_is_what_is_learned(name):
    pe, _ = encoding(name)
    logits(pe, torch.arange(L), *random(2, H, L, d))
    assert set(pe.state_dict()) == {n for n, _ in pe.named_parameters()} and not list(pe.buffers())
    assert all(w.requires_grad for w in pe.parameters())


@every_encoding
def test_rho_is_made_afresh_at_each_call(name):
    """No table may survive a call: not of other positions, nor of a spectrum that has changed since."""
    pe, generators = encoding(name)
    x = random(2, H, L, d).requires_grad_()
    for pos in (torch.arange(L), torch.arange(L) + 4, torch.arange(L) * 3 - 7):     # of one length
        actual = logits(pe, pos, *x)
        close(actual, oracle(generators(pe), pos, pos, *x), 1e-11)
        actual.sum().backward()                                         # a used rho has no graph left
        for w in pe.parameters():
            w.data += 0.1


@every_encoding
def test_made_on_the_meta_device(name):
    """As large models are: built without memory, then given it, then loaded. No frequency may be garbage."""
    pe, _ = encoding(name)
    with torch.device("meta"):
        empty = ENCODINGS[name][0]()
    empty.to_empty(device="cpu")
    empty.load_state_dict(pe.state_dict())
    x, pos = random(H, L, d), torch.arange(L)
    assert torch.equal(empty(pos)(x), pe(pos)(x))


@pytest.mark.parametrize("name", LEARNED)
def test_every_learned_parameter_has_a_gradient(name):
    """There and not zero, from the start on; and what finite differences of the oracle say of a direction."""
    start = ENCODINGS[name][0]()
    moved, generators = encoding(name)
    moved.double()
    (q, k), pos, weight = random(2, H, L, d), torch.arange(L), random(H, L, L, seed=1)
    for pe in (start, moved):
        (logits(pe, pos, q, k) * weight).sum().backward()
        assert all(w.grad is not None and w.grad.any() for w in pe.parameters())
    for i, w in enumerate(moved.parameters()):
        direction, ahead = random(*w.shape, seed=2 + i), []
        for step in (1e-5, -2e-5):                                      # to +1e-5, then to -1e-5
            w.data += step * direction
            ahead.append((oracle(generators(moved), pos, pos, q, k) * weight).sum().item())
        w.data += 1e-5 * direction
        slope = (ahead[0] - ahead[1]) / 2e-5
        assert (w.grad * direction).sum().item() == pytest.approx(slope, rel=1e-6)


# ---------------------------------------------------------------------------------------------------- the GPT
MODELS = {"rope": {}, "prope": {}, "lerope": {}, "nope": {}, "ape": {}, "ndrope": {"basis": "cayley"}}
every_model = pytest.mark.parametrize("pe", MODELS)
V, B = 17, 2
IDX = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(0))


def gpt(pe, moved=True, **config):
    """A float64 GPT of 3 heads and 2 layers; moved: no weight at its initial value, not even a gain's."""
    torch.manual_seed(0)
    model = GPT({"vocab": V, "heads": H, "layers": 2, "d": d, "pe": pe, **MODELS[pe], **config}).double()
    for i, w in enumerate(model.parameters()):
        w.data += 0.3 * random(*w.shape, seed=i) * moved
    return model


@torch.no_grad()
def run(model, idx=IDX, pos=None):
    return model(idx, pos=pos)[0]


def by_hand(w, idx, G, temperature):
    """The logits (L, V) of one row of tokens: the network once more, in numpy, a token and a head at a time.
    w: the weights by name. G: the generators of rho, (H, d, d)."""
    def layernorm(x, gain):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * gain

    def rms(x):
        return x / np.sqrt((x**2).mean())

    def turned(x, m, h):
        return torch.matrix_exp(m * G[h]).numpy() @ x

    stream = [w["embed.weight"][token] for token in idx]
    for layer in ("blocks.0.", "blocks.1."):
        queries, keys, values = [], [], []
        for x in stream:
            qkv = w[layer + "qkv.weight"] @ layernorm(x, w[layer + "norm1.weight"])
            for tokens, part in zip((queries, keys, values), np.split(qkv, 3)):
                tokens.append(np.split(part, H))
        for m, x in enumerate(stream):
            heads = []
            for h in range(H):
                q = w[layer + "scale"].flatten()[h] * turned(rms(queries[m][h]), m, h)
                ks = [turned(rms(keys[n][h]), n, h) for n in range(m + 1)]
                share = [math.exp(temperature * q @ k / math.sqrt(d)) for k in ks]
                heads.append(sum(share[n] * values[n][h] for n in range(m + 1)) / sum(share))
            x = x + w[layer + "out.weight"] @ np.concatenate(heads)
            hidden = w[layer + "up.weight"] @ layernorm(x, w[layer + "norm2.weight"])
            gelu = [u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in hidden]
            stream[m] = x + w[layer + "down.weight"] @ gelu
    return np.stack([w["head.weight"] @ layernorm(x, w["norm.weight"]) for x in stream])


@every_model
@pytest.mark.parametrize("temperature", (1.0, 1.7))
def test_logits_of_the_gpt_against_a_second_one_written_by_hand(pe, temperature):
    model = gpt(pe, p=0.5, base=100.0)
    model.pe.temperature = temperature
    theta = [100 ** (-2 * i / d) for i in range(d // 2)]
    if pe == "lerope":
        theta = [t * math.exp(a) for t, a in zip(theta, model.pe.alpha.tolist())]
    kept = {"prope": 2, "nope": 0}.get(pe, d // 2)
    speed = lambda h, i: theta[i] * (i < kept)
    G = {"ape": lambda: upper(model.pe.A), "ndrope": lambda: by_loops(model.pe).expand(H, d, d)}
    G = G.get(pe, lambda: turns(speed))()
    weights = {name: w.numpy() for name, w in model.state_dict().items()}
    for b in range(B):
        close(run(model)[b], torch.from_numpy(by_hand(weights, IDX[b].tolist(), G, temperature)), 1e-11)


@every_model
def test_a_shift_of_all_positions_is_invisible_and_a_stretch_is_not(pe):
    model, pos = gpt(pe), torch.arange(L)
    expected = run(model)
    assert torch.equal(run(model, pos=pos), expected)
    close(run(model, pos=pos + 1000), expected, 1e-10)
    change = (run(model, pos=2 * pos) - expected)[:, 1:].abs().amax(-1)             # position 0 stays
    assert change.max() == 0 if pe == "nope" else change.min() > 1e-4


@every_model
def test_positions_of_each_row(pe):
    """Left padding gives each row its own offset, packed documents start at 0 again: pos is (B, L)."""
    model = gpt(pe)
    expected, padded = run(model), torch.arange(L) - torch.tensor([[0], [3]])
    close(run(model, pos=padded), expected, 1e-11)
    packed = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    actual = run(model, pos=packed)
    for b in range(B):
        close(actual[b:b + 1], run(model, IDX[b:b + 1], packed[b]), 1e-12)
        change = (actual[b, -1] - expected[b, -1]).abs().max()
        assert change == 0 if pe == "nope" else change > 1e-4


@every_model
def test_no_token_sees_a_later_one(pe):
    model = gpt(pe)
    expected, t = run(model), 3
    other = IDX.clone()
    other[:, t] = (other[:, t] + 1) % V
    change = (run(model, other) - expected).abs().amax(-1)              # (B, L)
    assert change[:, :t].max() < 1e-12 and change[:, t:].min() > 1e-6
    for n in range(1, L):                                               # a prefix alone has the same logits
        close(run(model, IDX[:, :n]), expected[:, :n], 1e-12)


@every_model
def test_long_and_short_passes_agree(pe):
    """Lengths may take different kernels: 1,030 tokens, and prefixes on their own, of even and odd length."""
    model = gpt(pe)
    idx = torch.randint(V, (1, 1030), generator=torch.Generator().manual_seed(1))
    expected = run(model, idx)
    for n in (1, 2, 3, 64, 1024, 1025):
        close(run(model, idx[:, :n]), expected[:, :n], 1e-10)


def test_lerope_starts_as_rope_to_the_bit():
    rope, lerope = gpt("rope", moved=False), gpt("lerope", moved=False)
    assert torch.equal(run(rope), run(lerope))
    lerope.pe.alpha.data += 0.1
    assert not torch.equal(run(rope), run(lerope))


@every_model
def test_a_seed_gives_the_same_other_weights_for_every_encoding(pe):
    ours, ropes = gpt(pe, moved=False).state_dict(), gpt("rope", moved=False).state_dict()
    shared = {name for name in ours if not name.startswith("pe.")}
    assert shared == set(ropes) and all(torch.equal(ours[name], ropes[name]) for name in shared)


@every_model
def test_loss_is_the_mean_cross_entropy_of_the_targets_that_are_there(pe):
    model = gpt(pe)
    targets = IDX.roll(-1, 1)
    targets[:, -1] = targets[0, 1] = -1
    logits, loss = model(IDX, targets)
    nats = []
    for b, t in itertools.product(range(B), range(L)):
        if targets[b, t] != -1:
            row = logits[b, t].tolist()
            nats.append(math.log(sum(map(math.exp, row))) - row[targets[b, t]])
    assert len(nats) == 7 and loss.item() == pytest.approx(sum(nats) / 7, rel=1e-6)
    assert model(IDX)[1] is None


@every_model
def test_every_parameter_of_the_gpt_gets_a_gradient(pe):
    """Twice: a second step must find no graph of the first."""
    model = gpt(pe, moved=False)
    for _ in range(2):
        model.zero_grad()
        model(IDX, IDX.roll(-1, 1))[1].backward()
        assert all(w.grad is not None and w.grad.abs().max() > 0 for w in model.parameters())
    assert (model.embed.weight.grad != 0).any(-1).sum() == len(IDX.unique())


@every_model
@pytest.mark.parametrize("how", ("bfloat16", "autocast"))
def test_precision_of_the_gpt_far_from_the_start(pe, how):
    """In bfloat16, near position 3000, the logits err by less than a tenth of what losing positions costs."""
    model = gpt(pe, moved=False)
    low = copy.deepcopy(model).to(torch.bfloat16 if how == "bfloat16" else torch.float32)
    model.load_state_dict(low.state_dict())                             # rounded weights are not at issue
    idx = torch.randint(V, (8, 24), generator=torch.Generator().manual_seed(1))
    pos = torch.arange(3000, 3024)
    expected, lost = run(model, idx, pos), run(model, idx, 0 * pos)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        error = (run(low, idx, pos).double() - expected).square().mean().sqrt()
    assert error < 0.03 * expected.square().mean().sqrt()
    assert pe == "nope" or error < 0.1 * (lost - expected).square().mean().sqrt()


@every_model
def test_a_gpt_made_on_the_meta_device(pe):
    model = gpt(pe)
    with torch.device("meta"):
        empty = GPT(model.config).double()
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(run(empty), run(model))
