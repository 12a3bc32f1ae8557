"""
APE: positions are words of a group; rho is a homomorphism into the orthogonal maps, its generators learned.

    W = exp(A - A^T),  A strictly upper triangular                                  the map of a generator [1]
    sequences    rho(m) = W^m                                the integers have one generator
    trees        rho(b_1 b_2 .. b_n) = W_b1 W_b2 .. W_bn     the path from the root, a generator for a branch
    grids        rho(x) = W_1^x_1 (+) W_2^x_2 (+) ..         each axis has channels of its own; logits add up

rho(ab) = rho(a) rho(b), rho(a^-1) = rho(a)^T: a logit <rho(a) q, rho(b) k> sees only a^-1 b, the way from a
to b. In a tree the common prefix cancels; a step to a child is the same operator everywhere. Learned is an A
for each head (and branch, or axis), shared by the layers; no weight decay, which would shrink the angles.

    x (..., H, L, d)    pos (L,) or (B, L)    grids (L, N) or (B, L, N)    A (H, d, d)    theta (H, d/2)
    trees: paths (L, depth) or (B, L, depth) of branch numbers 0, 1, .., and -1 past the end

A - A^T = P Lambda P^T, Lambda the generator of RoPE's R(theta), by eigh of the Hermitian i (A - A^T). So
W^m = P R(m theta) P^T: APE of sequences is RoPE with each head's own learned angles and basis. The left P
cancels in the logit: rho(m) x = R(m theta) P^T x, for any real m, without a table of powers. After training
P^T goes into W_q and W_k (fold): train APE, run RoPE. Trees do not commute and have no such P.

The published way from RoPE to APE is a matrix logarithm and 10,000 steps of gradient descent on A, the way
back a polar decomposition. But log R(theta) is Lambda, whose upper triangle is A, and an orthogonal W has the
polar factors W and I. A logarithm of W sees angles up to pi; theta is read off A, which holds any. At whole
positions theta, theta - 2 pi and 2 pi - theta (its plane turned over) are one map: only a scaling parts them.

As in [1], not in its code: a left child is one operator everywhere, each head has its generators, siblings
differ at the start, RoPE's start has d/2 different frequencies, no factor 0.98^distance weakens the logits.

[1] Kogkalidis, Bernardy, Garg 2024, Algebraic Positional Encodings, https://arxiv.org/abs/2312.16045
$ python ape.py               theta -> A -> theta, and what it costs; the maps of a tree, figures/ape.png
$ python ape.py CHECKPOINT    how the angles moved off RoPE's; angles.png in the run's folder
"""
import argparse
import itertools
import math
from pathlib import Path
from timeit import timeit

import torch

from rope import RoPE, frequencies, rotate


def from_theta(theta):
    """theta (..., d/2) -> A (..., d, d) strictly upper: exp(A - A^T) = R(theta), RoPE's step of one token."""
    return torch.diag_embed(-theta, offset=theta.shape[-1])     # R'(0) = [[0, -theta], [theta, 0]]


def to_theta(A):
    """A (..., d, d) -> theta (..., d/2) fastest first, none below 0, P (..., d, d) orthogonal, in float64:
    exp(A - A^T) = P R(theta) P^T. Where angles repeat or are 0 their planes are one choice of many."""
    return planes(A)[:2]


def J(M):
    """M (..., d, n) -> J M: a quarter turn of all pairs of rows (i, i + d/2)."""
    return torch.cat((-M[..., M.shape[-2] // 2 :, :], M[..., : M.shape[-2] // 2, :]), dim=-2)


# An operator, as torch.compile knows no complex numbers. One for __main__ too: train's import would free it.
@torch.library.custom_op(f"{__name__.strip('_')}::diagonalise", mutates_args=())
def diagonalise(B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A skew B (..., d, d) -> theta, P as to_theta, without a gradient."""
    h = B.shape[-1] // 2
    a, V = torch.linalg.eigh(1j * B)                            # ascending: -theta, then theta
    theta, V = -a[..., :h], V[..., :h]                          # B (u - i w) = i theta (u - i w), V = u - i w
    # u, w are orthogonal but for theta = 0, where eigh mixes theta and -theta: there, QR finds others.
    Q, R = torch.linalg.qr(torch.stack((V.real, -V.imag), -1).flatten(-2))          # u_0, w_0, u_1, w_1, ..
    Q = Q * torch.ones_like(Q[..., 0]).copysign(R.diagonal(0, -2, -1))[..., None, :]
    return theta.contiguous(), Q.unflatten(-1, (h, 2)).mT.flatten(-2)               # u_0, u_1, .., w_0, ..


@diagonalise.register_fake
def _(B):
    return B.new_empty(*B.shape[:-2], B.shape[-1] // 2), torch.empty_like(B)


def planes(A, m=1):
    """A (..., d, d) -> theta, P as to_theta, and N (..., d, d): 0, with that part of A's gradient which theta
    and P have not. m: the largest position in use.
    eigh's own gradient divides by differences of angles, NaN where two are equal. So P is a constant, and its
    derivative is written out. In the basis P a small change dB of the generator is E = P^T dB P = C + D:
        C = (E - JEJ)/2 commutes with J: entry (j, k) couples planes j and k, gap = theta_j - theta_k;
        D = (E + JEJ)/2 anticommutes: the same, gap = theta_j + theta_k.
    A wide gap: only the basis turns, dP = P J (C/gap + D/gap). A narrow one: the basis stays, R(m theta) has
    R(m theta/2) m N R(m theta/2) added, N = C + D: exact at gap 0, else off by (m gap)^2 / 24."""
    narrow, like = torch.finfo(A.dtype).eps ** (1 / 3) / m, frequencies(2, device=A.device)
    A = A.to("cpu", torch.float64)                              # small, and eigh is fastest there
    B, h = A - A.mT, A.shape[-1] // 2
    theta, P = diagonalise(B.detach())
    E = P.mT @ (B - B.detach()) @ P                             # 0, with B's gradient
    CD = torch.stack((E - J(J(E).mT), E + J(J(E).mT))) / 2      # (2, ..., d, d); E is skew, so (JE)^T = EJ
    gap = torch.stack([theta[..., None] + sign * theta[..., None, :] for sign in (-1, 1)])
    gap[0].diagonal(0, -2, -1).fill_(math.inf)                  # as the diagonal of C is dtheta
    gap = gap.repeat(*[1] * (B.ndim - 1), 2, 2)                 # (2, ..., d/2, d/2) -> (2, ..., d, d)
    far = gap.abs() > narrow
    tilt, N = (CD / torch.where(far, gap, math.inf)).sum(0), torch.where(far, 0, CD).sum(0)
    theta = theta + E[..., h:, :h].diagonal(0, -2, -1)
    return theta.to(like), (P + P @ J(tilt)).to(like), N.to(like)


class Turn(torch.autograd.Function):
    """Returns y, with the gradient of y + m N y: N is 0, only its gradient is wanted."""
    @staticmethod
    def forward(ctx, y, m, N):
        ctx.save_for_backward(y.to(N.dtype), m)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, g):
        y, m = ctx.saved_tensors
        return g, None, torch.einsum("...hli,...hlj->hij", (g * m).to(y), y)


class APE(torch.nn.Module):
    temperature = 1.0                                           # a factor on the logits
    def __init__(self, d, heads, init="rope", base=10_000.0):
        """d: a head's width. init: "rope", the frequencies of that base, or "near_identity", random."""
        super().__init__()
        self.d, self.base, A = d, base, from_theta(frequencies(d, base))
        if init not in ("rope", "near_identity"):
            raise ValueError(f"init = {init!r}: must be rope or near_identity")
        A = A.expand(heads, d, d) if init == "rope" else 0.02 * torch.randn(heads, d, d).triu(1)
        self.A = torch.nn.Parameter(A.to(torch.get_default_dtype(), copy=True))

    def theta(self, device=None):
        """The frequencies, (H, d/2) float64, each head's from the fastest to the slowest."""
        return to_theta(self.A.triu(1))[0].to(device)

    def forward(self, pos):
        """pos (L,) or (B, L), integers or any real -> rho: x (..., H, L, d) -> the same shape and dtype."""
        theta = self.theta(pos.device)                          # (H, d/2); scaling.py may have changed it
        _, P, N = (t.to(pos.device) for t in planes(self.A.triu(1), 1 + pos.abs().max().cpu()))
        A = from_theta(theta - theta.detach())                  # 0, passes theta's gradient through N
        N = N + A - A.mT
        m = (pos if pos.ndim == 1 else pos[:, None])[..., None].to(theta.dtype)     # (L, 1) or (B, 1, L, 1)
        angle = m * theta.detach()[:, None] / 2                 # half the turn: (H, L, d/2) or (B, H, L, d/2)
        cos, sin = angle.cos(), angle.sin_()                    # the cat: see RoPE; eager, it costs memory
        cos, sin = torch.cat((cos, sin)).chunk(2) if torch.compiler.is_compiling() else (cos, sin)
        def rho(x):
            wide = torch.promote_types(x.dtype, torch.float32)
            z = x.to(wide) @ P.to(wide)                         # P^T x; in bfloat16 under autocast
            y = Turn.apply(rotate(z.to(wide), cos, sin), m.to(wide), N.to(z.dtype))
            return rotate(y, cos, sin).to(x.dtype)
        return rho


class GridAPE(torch.nn.Module):
    temperature = 1.0
    def __init__(self, d, heads, ndim=2, init="rope", base=10_000.0):
        """d: a head's width, of which each axis has d / ndim channels. init, base: as APE, of each axis."""
        super().__init__()
        if ndim < 1 or d % (2 * ndim):
            raise ValueError(f"d = {d}, ndim = {ndim}: each axis needs an even number d / ndim of channels")
        self.axes = torch.nn.ModuleList(APE(d // ndim, heads, init, base) for _ in range(ndim))

    def forward(self, pos):
        """pos (L, N) or (B, L, N) -> rho: x (..., H, L, d) -> the same shape and dtype."""
        rhos = [pe(m) for pe, m in zip(self.axes, pos.unbind(-1), strict=True)]
        return lambda x: torch.cat([rho(c) for rho, c in zip(rhos, x.chunk(len(rhos), -1))], dim=-1)


def walk(W, path):
    """W (k, H, d, d), path (T, depth) -> maps (n, H, d, d), slot (T,), c. A map for each distinct path, made
    once and repeated, so that a copy serves at most c tokens; token t is row slot[t] of n groups of c."""
    if (path >= len(W)).any():
        raise ValueError(f"a path has branch {path.max()}: branching = {len(W)} allows up to {len(W) - 1}")
    maps, node = torch.eye(W.shape[-1]).to(W).expand(1, *W.shape[1:]), path.new_zeros(len(path))
    for branch in path.unbind(-1):
        on = branch >= 0
        step, which = (node[on] * len(W) + branch[on]).unique(return_inverse=True)
        node[on] = len(maps) + which
        maps = torch.cat((maps, maps[step // len(W)] @ W[step % len(W)]))
    ordered, order = node.sort()
    rank = torch.arange(len(node), device=node.device) - torch.searchsorted(ordered, ordered)
    first = rank % (c := -(-len(node) // len(maps))) == 0       # the mean number: n c is at most 2 T or so
    return maps[ordered[first]], ((first.cumsum(0) - 1) * c + rank % c)[order.argsort()], c


class TreeAPE(torch.nn.Module):
    temperature = 1.0
    def __init__(self, d, heads, branching=2):
        """d: a head's width. Each of the branching generators, of each head, starts random and small."""
        super().__init__()
        self.A = torch.nn.Parameter(0.02 * torch.randn(branching, heads, d, d).triu(1))
        TreeAPE.walk = staticmethod(torch.compiler.disable(walk))   # data decides its sizes; a slow import

    def forward(self, path):
        """path (L, depth) or (B, L, depth) -> rho: x (..., H, L, d) -> the same shape and dtype."""
        A = self.A.triu(1).to("cpu", torch.float64)             # matrix_exp is not everywhere
        W = torch.matrix_exp(A - A.mT).to(frequencies(2, device=path.device))
        maps, slot, c = self.walk(W, path.flatten(0, -2).long())
        def rho(x):
            wide = torch.promote_types(x.dtype, torch.float32)
            rows = x.movedim(-3, -2).to(wide)                   # (..., L, H, d) or (..., B, L, H, d)
            t = rows.flatten(-1 - path.ndim, -3)                # (..., T, H, d)
            t = t.new_zeros(*t.shape[:-3], len(maps) * c, *t.shape[-2:]).index_copy(-3, slot, t)
            t = torch.einsum("...nchj,nhij->...nchi", t.unflatten(-3, (-1, c)), maps.to(wide))
            return t.flatten(-4, -3).index_select(-3, slot).reshape(rows.shape).movedim(-2, -3).to(x.dtype)
        return rho


@torch.no_grad()
def fold(model):
    """A GPT with an APE of sequences -> one of the same logits with RoPE(d, theta=(H, d/2)), P^T in W_q, W_k.
    That is exact: the QK-norm between is the RMS of a head, which P keeps, and one scale."""
    pe, config = model.pe, model.config
    if not (hasattr(pe, "A") and hasattr(pe, "theta")):
        raise ValueError(f"pe = {config['pe']}: only ape, of sequences, folds into a RoPE")
    theta, P = pe.theta(), to_theta(pe.A.triu(1))[1]
    folded = type(model)({**config, "pe": "rope", "theta": theta.tolist()}).to(model.head.weight)
    weights = {name: w.clone() for name, w in model.state_dict().items() if not name.startswith("pe.")}
    for name, w in weights.items():
        if name.endswith("qkv.weight"):
            qk = w.unflatten(0, (3, *P.shape[:2]))[:2]          # (2, H, d, D), a view of w
            qk.copy_(P.mT @ qk.to(P))
    folded.load_state_dict(weights)
    folded.pe.temperature = pe.temperature
    return folded.train(model.training)


# ------------------------------------------------------------------------------------------------------------
if __name__ == "__main__":
    import matplotlib.pyplot as plt
    from train import load
    ap = argparse.ArgumentParser(description="What APE is, in numbers; or what a trained one has learned.")
    ap.add_argument("checkpoint", nargs="?", help="a run of --pe ape, its folder or ckpt.pt")
    args = ap.parse_args()

    if args.checkpoint:
        try:
            pe, theta = (model := load(args.checkpoint)).pe, fold(model).pe.theta()             # (H, d/2)
        except ValueError as e:
            ap.error(f"{e}")
        plain, P = frequencies(pe.d, pe.base), to_theta(pe.A.detach().triu(1))[1]
        # The part of plane j in RoPE's pair i, (H, i, j): its rows and columns sum to 1.
        part = P.square().unflatten(-1, (2, -1)).sum(-2).unflatten(-2, (2, -1)).sum(-3) / 2
        print("head   theta of the planes 0, 4, 8, ..; a plane's largest part in one of RoPE's pairs, mean")
        for name, row, share in zip(("RoPE", *range(len(P))), (plain, *theta), (1, *part.amax(-2).mean(-1))):
            print(f"{name:4}" + "".join(f"{t:9.2g}" for t in row[::4]) + f"{share:9.3f}")
        fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        left.semilogy(theta.T, lw=1, label=[f"head {h}" for h in range(len(theta))])
        left.semilogy(plain, "k--", label="RoPE")
        left.set(xlabel="plane, fastest first", title="theta, radians a token")
        image = right.imshow(part.mean(0), cmap="Blues", norm="log", vmin=1e-3, vmax=1)
        right.set(xlabel="plane, fastest first", ylabel="RoPE's pair", title="Part of a plane in a pair")
        left.legend(), fig.colorbar(image, ax=right)
        fig.savefig((p if (p := Path(args.checkpoint)).is_dir() else p.parent) / "angles.png", dpi=110)
        raise SystemExit

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    Q, half, skew = torch.linalg.qr(torch.randn(64, 64))[0], torch.arange(32) < 16, lambda A: A - A.mT
    print(f"{'errors in a random basis':24}  A -> theta  P R(theta) P^T  theta by log W")
    for name, theta in {"RoPE's": frequencies(64), "16 of 0.3, 16 of 0": 0.3 * half,
                        "pi and near": math.pi - 1e-9 * ~half, "0 to 6": torch.linspace(6, 0, 32)}.items():
        A = (Q @ skew(from_theta(theta)) @ Q.T).triu(1)
        (t, P), W = to_theta(A), skew(A).matrix_exp()
        log = torch.linalg.eigvals(W).angle().sort(descending=True).values[:32]
        errors = t - theta, P @ skew(from_theta(t)).matrix_exp() @ P.T - W, log - theta
        print(f"{name:24}" + "".join(f"{e.abs().max():{n}.0e}" for e, n in zip(errors, (12, 16, 16))))

    for name, f in {"theta -> A": lambda: from_theta(theta), "A -> theta, P": lambda: to_theta(A)}.items():
        print(f"{name:24}{timeit(f, number=10) * 100:9.2f} ms")

    nodes = [n for depth in range(4) for n in itertools.product((0, 1), repeat=depth)]
    (pe := TreeAPE(d := 6, 1)).A.data *= 12
    path = torch.tensor([[*n, -1, -1, -1][:3] for n in nodes]).repeat_interleave(d, 0)
    rho = pe(path)(torch.eye(d).repeat(len(nodes), 1)[None]).view(-1, d, d).mT.detach()     # (nodes, d, d)
    place = {n: (sum((b - 0.5) / 2 ** (i + 1) for i, b in enumerate(n)), -len(n)) for n in nodes}
    fig, axes = plt.subplots(1, 2, figsize=(14, 4.6), layout="constrained", subplot_kw={"frame_on": False})
    for ax, u, seen in zip(axes, (0, 1), ("the root: rho(v)", "u: rho(u)^T rho(v), below it the tree again")):
        for n, M in zip(nodes, rho[u].mT @ rho):
            (x, y), strong = place[n], n[:u] == nodes[u]
            ax.plot(*zip(place[n], place[n[:-1]]), "k" if strong and n != nodes[u] else "0.8", zorder=0)
            box = ax.inset_axes([x - 0.05, y - 0.32, 0.1, 0.64], transform=ax.transData)
            box.imshow(M, cmap="RdBu", vmin=-1, vmax=1, alpha=1 if strong else 0.3)
            box.set(xticks=[], yticks=[])
        ax.set(xticks=[], yticks=[], xlim=(-0.53, 0.53), ylim=(-3.5, 0.5), title=f"Nodes v seen from {seen}")
    fig.savefig("figures/ape.png", dpi=110)
