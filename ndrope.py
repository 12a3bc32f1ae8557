"""
ND-RoPE: rotary encodings of positions x in R^N from generators that commute, in a basis that can be learned.

    R_x = exp(x_1 B_1 + ... + x_N B_N),     B_i skew, B_i B_j = B_j B_i                          [1]
        = Q diag_j rot(<w_j, x>) Q^T,       j = 1 .. d/2: commuting skew matrices share a basis Q of planes,
                                            and w_j in R^N says how fast each axis turns plane j

    relativity      R_x^T R_y = R_(y-x)      if and only if the B_i commute
    reversibility   R_x = R_y only if x = y: near every x if and only if the w_j span R^N, so N <= d/2;
                                             on all R^N if and only if no x but 0 has all <w_j, x> in 2 pi Z

R_x is orthogonal, and only R_x^T R_y reaches a logit, so rho needs R_x up to an orthogonal map on its left:

    rho(x) v = diag_j rot(<w_j, x>) Q^T v    one d x d product before the rotation, none if Q = I

Directions. axial: plane j turns with axis j mod N, all axes by one spectrum theta_b = base^(-b/n), bands b of
n = ceil(d/2 / N); where N does not divide d/2 the last axes lack the slowest. One axis is RoPE, to the bit.
mixed [2]: w_j = theta_b v_j, v_j learned: a step turns slow ones as readily as fast. They start isotropic,
uniform on the half sphere v_1 > 0 (-w_j is w_j with the plane's two channels swapped), one axis as RoPE.

Basis. Q is learned, one for all layers and heads, from d(d-1)/2 numbers a that start at 0, where Q = I:

    exp      Q = e^A                             A skew, an entry of a for each pair of channels
    cayley   Q = (I - A/2)^-1 (I + A/2)
    givens   Q = G_1 ... G_(d-1)                 G_r turns d/2 disjoint pairs: the rounds of a tournament

All are I + A to first order: all three start with the same gradient. As (Q^T W_q u)^T D (Q^T W_k v) shows, Q
adds no function to a model, only another way to learn it: fold puts it into W_q and W_k, and it costs nothing
from then on. A Q multiplied after the rotation, as in the authors' first code, cancels: it does nothing.

    x (..., H, L, d)    pos (L,) or (B, L) for one axis, else (L, N) or (B, L, N)    w (N, d/2)    B (N, d, d)

[1] Liu, Zhou et al. 2025, https://arxiv.org/abs/2504.06308    [2] Heo et al. 2024, arXiv:2403.13298
[3] Ostmeier et al. 2024, LieRE, arXiv:2406.10322    [4] Schenck et al. 2025, STRING, arXiv:2502.02562

$ python ndrope.py      the two laws as numbers, encoding by encoding; figures/ndrope.png
"""
import copy

import torch
from torch import nn

from rope import RoPE, frequencies, rotate


def commuting(w, Q=None):
    """w (N, d/2), and a basis Q (d, d) if not I -> generators B_i = Q diag_j(w_ij J) Q^T, (N, d, d)."""
    B = torch.diag_embed(w, -w.shape[-1]) - torch.diag_embed(w, w.shape[-1])    # pairs (j, j + d/2)
    return B if Q is None else Q @ B @ Q.T


# ------------------------------------------------------------------------------------------------------------
# the basis: a (d - 1, d/2) -> Q (d, d) in SO(d)

def planes(c, s):
    """(d - 1, d/2) each -> (d - 1, d, d): in round r of a tournament of d channels, [[c, -s], [s, c]] on each
    of its d/2 pairs. One channel keeps its seat, the others move round the table: all pairs meet once."""
    n, half = c.shape
    r, k = torch.arange(n, device=c.device)[:, None], torch.arange(half, device=c.device)
    i, j = (r + k) % n, torch.where(k == 0, n, (r - k) % n)
    M = c.new_zeros(n, n + 1, n + 1)
    M[r, i, i], M[r, j, j], M[r, i, j], M[r, j, i] = c, c, -s, s
    return M


def skew(a):
    return planes(torch.zeros_like(a), a).sum(0)


def cayley(a):
    A, I = skew(a), torch.eye(len(a) + 1, dtype=a.dtype, device=a.device)
    return torch.linalg.solve(I - A / 2, I + A / 2)


def givens(a):
    G = planes(a.cos(), a.sin())
    while len(G) > 1:                                           # neighbours first: log2(d) batched products
        last = G[len(G) // 2 * 2:]
        G = torch.cat((G[:-1:2] @ G[1::2], last))
    return G[0]


def exp(a):
    return torch.matrix_exp(skew(a).cpu()).to(a.device)         # matrix_exp is not everywhere


BASES = {"identity": None, "exp": exp, "cayley": cayley, "givens": givens}


class NDRoPE(RoPE):
    def __init__(self, d, ndim, *, directions="axial", basis="identity", base=10_000.0):
        """d: width of a head. ndim: N, the number of axes. Learned: v (N, d/2) of mixed directions, and
        a (d - 1, d/2) of a basis that is not the identity."""
        super().__init__(d, base)
        if not 1 <= ndim <= d // 2:
            raise ValueError(f"ndim = {ndim}: the {d // 2} planes of d = {d} serve 1 to {d // 2} axes")
        if directions not in ("axial", "mixed") or basis not in BASES:
            raise ValueError(f"directions = {directions!r}, basis = {basis!r}: the first must be axial or "
                             f"mixed, the second {', '.join(BASES)}")
        self.ndim, self.directions, self.basis, self.v, self.a = ndim, directions, basis, None, None
        if directions == "mixed":
            v = torch.randn(ndim, d // 2)
            self.v = nn.Parameter(v * v[0].sign() / v.norm(dim=0))
        if basis != "identity":
            self.a = nn.Parameter(torch.zeros(d - 1, d // 2))

    def theta(self, device=None):
        """w (N, d/2), or (d/2,) for one axis: radians a step along each axis, float64."""
        N, j = self.ndim, torch.arange(self.d // 2, device=device)
        theta = frequencies(2 * -(-len(j) // N), self.base, device)[j // N]             # (d/2,)
        w = theta * (torch.eye(N, device=device)[:, j % N] if self.v is None else self.v.to(theta))
        return w[0] if N == 1 else w

    def Q(self, like=torch.float64):
        """The basis (d, d), in the dtype, or the dtype and on the device of the tensor, like; None if I."""
        return None if self.a is None else BASES[self.basis](self.a.to(like))

    @torch.no_grad()
    def generators(self):
        """B (N, d, d) float64, on the CPU: rho(x)^T rho(y) = exp(sum_i (y - x)_i B_i)."""
        w = self.theta("cpu").view(self.ndim, -1)
        return commuting(w, self.Q(w))

    def forward(self, pos):
        """pos as in the header, any real dtype -> rho: x (..., H, L, d) -> the same shape and dtype."""
        pos = pos[..., None] if self.ndim == 1 else pos
        if pos.ndim not in (2, 3) or pos.shape[-1] != self.ndim:
            raise ValueError(f"pos {[*pos.shape]}: must be (L, N) or (B, L, N) of N = {self.ndim} axes; for "
                             "one axis it is given as (L,) or (B, L)")
        w = self.theta(pos.device).view(self.ndim, -1)
        pos = pos if pos.ndim == 2 else pos[:, None]            # (L, N), (B, 1, L, N): a place for the heads
        angle = (pos[..., None].to(w.dtype) * w).sum(-2)        # (L, d/2) or (B, 1, L, d/2)
        cos, sin = torch.cat((angle.cos(), angle.sin())).chunk(2)
        Q = self.Q(w)
        if Q is None:
            return lambda x: rotate(x, cos, sin)

        def rho(x):
            wide = torch.promote_types(x.dtype, torch.float32)
            return rotate(x.to(wide) @ Q.to(wide), cos, sin).to(x.dtype)
        return rho


@torch.no_grad()
def fold(model):
    """A GPT with a basis -> one with the same logits and none: Q^T W_q, Q^T W_k. The RMS of q and k is theirs
    in any basis, and the norm has one gain a head, so this is exact."""
    model = copy.deepcopy(model)
    Q = model.pe.Q(model.pe.theta("cpu"))
    if Q is not None:
        for block in model.blocks:
            for W in block.qkv.weight.chunk(3)[:2]:             # W_q, W_k: (D, D)
                W.copy_((Q.T @ W.to(Q).unflatten(0, (block.H, -1))).flatten(0, 1))      # by heads, (H, d, D)
        model.pe.a, model.pe.basis = None, "identity"
        model.config = {**model.config, "basis": "identity"}
    return model


# ------------------------------------------------------------------------------------------------------------
# instruments: of any generators G (N, d, d), float64

def turn(x, G):
    """R_x = exp(sum_i x_i B_i): x (..., N) -> (..., d, d)."""
    return torch.matrix_exp(torch.einsum("...n,nij->...ij", x.to(G), G))


def relativity_error(G, samples=256):
    """The worst ||R_x^T R_y - R_(y-x)|| (Frobenius) of pairs drawn from the unit box. Where generators do not
    commute it is (x_1 y_2 - x_2 y_1) [B_1, B_2] / 2, and more such terms, to second order."""
    x, y = torch.rand(2, samples, len(G), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (turn(x, G).mT @ turn(y, G) - turn(y - x, G)).norm(dim=(-2, -1)).max().item()


def commutator_norm(G):
    """The largest ||B_i B_j - B_j B_i|| (Frobenius): 0 if and only if relativity holds."""
    return (G[:, None] @ G - G @ G[:, None]).norm(dim=(-2, -1)).max().item()


def independence(G):
    """The least ||sum_i x_i B_i|| / sqrt 2 over unit x, the slowest that R_x can move: 0 if some x does not
    move it at all. For commuting ones the least singular value of w."""
    return torch.linalg.svdvals(G.flatten(1)).min().item() / 2**0.5


def centraliser_dimension(G):
    """The dimension of {X in so(d): X B_i = B_i X for all i}. If G commutes, it is d // 2 where G lies in one
    maximal torus only, more where planes turn alike or two stand still. By an SVD of d^2/2 rows: d <= 32."""
    i, j = torch.triu_indices(d := G.shape[-1], d, 1)
    X = G.new_zeros(len(i), d, d)
    X[torch.arange(len(i)), i, j] = 1
    X = X - X.mT
    C = torch.cat([(X @ B - B @ X).flatten(1) for B in G], dim=1)               # (d(d-1)/2, N d^2)
    return len(i) - torch.linalg.matrix_rank(C, rtol=1e-10).item()


def injectivity_margin(G, shape):
    """The least ||R_x - R_y|| / sqrt 2 (Frobenius) of two cells of a grid of this shape; one plane turned by
    an angle t counts 2 |sin t/2|. What is injective may still have a margin that no network can use."""
    if len(shape) != len(G):
        raise ValueError(f"shape = {tuple(shape)}: {len(G)} generators need as many sizes")
    x = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), dim=-1).view(-1, len(G))
    return (torch.pdist(turn(x, G).flatten(1)).min() / 2**0.5).item()


def recover(R, G):
    """x (N,) from R_x (d, d): the angles of R in the planes that G shares, then least squares for <w_j, x>.
    Right inside the box where every |<w_j, x>| < pi; further out an angle is known up to 2 pi only.
    ValueError if G does not commute or is dependent, or if R is not orthogonal or not an R_x of that box."""
    G, R = G.to(torch.float64), R.to(G.device, torch.float64)
    if commutator_norm(G) > 1e-6 * G.norm()**2 or independence(G) <= 1e-6 * G.norm():
        raise ValueError("the generators must commute and be independent: else R_x does not determine x")
    if R.shape != G[0].shape or not (R.T @ R - torch.eye(len(R)).to(R)).norm() < 1e-5:
        raise ValueError(f"R {[*R.shape]} is not an orthogonal {[*G[0].shape]} matrix, as every R_x is")
    generic = torch.randn(len(G), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(G)
    _, V = torch.linalg.eigh(1j * (generic @ G.flatten(1)).view_as(R))          # V* B_i V is diagonal
    w, angle = [(V.mH @ M.to(V) @ V).diagonal(dim1=-2, dim2=-1) for M in (G, R)]
    x = torch.linalg.lstsq(w.imag.T, angle.angle()[:, None]).solution[:, 0]
    if not (error := (turn(x, G) - R).norm()) < 1e-5:
        raise ValueError(f"R is no R_x with all angles below pi: the nearest found is {error:.1e} away")
    return x


# ------------------------------------------------------------------------------------------------------------
if __name__ == "__main__":
    import matplotlib.pyplot as plt
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    d, base, side, golden = 32, 100.0, 16, torch.pi * (5**0.5 - 1) / 2

    def learned(directions, basis):
        pe = NDRoPE(d, 2, directions=directions, basis=basis, base=base)
        if pe.a is not None:
            pe.a.normal_(std=0.3)                               # as if trained: at the start all are axial
        return pe.generators()

    axial, j = learned("axial", "identity"), torch.arange(d // 2)
    c = torch.randn(2, d).double() / d
    C = torch.stack([c.roll(k, 1) for k in range(d)], dim=1)    # circulants are polynomials of one shift
    other = NDRoPE(d, 1, basis="exp")
    other.a.normal_(std=0.3)
    examples = {
        "so(4): B = diag(J,0), diag(0,J)": commuting(torch.eye(2).double()),
        "so(6): diag(J,0,J), diag(0,J,J)": commuting(torch.tensor([[1, 0, 1], [0, 1, 1]]).double()),
        "one plane, w = (1, sqrt 2)": commuting(torch.tensor([[1], [2]]).double().sqrt())}
    encodings = {
        "axial": axial,
        "mixed": learned("mixed", "identity"),
        "golden angle": commuting(axial[:, d // 2:, :d // 2].sum((0, 1))
                                  * torch.stack(((j * golden).cos(), (j * golden).sin()))),
        "axial, Q by exp": learned("axial", "exp"),
        "axial, Q by Cayley": learned("axial", "cayley"),
        "axial, Q by Givens": learned("axial", "givens"),
        "circulant [4]": C - C.mT,
        "a Q for each axis [3]": torch.stack((axial[0], other.Q() @ axial[1] @ other.Q().T))}
    print("                                 relativity    commutator  indepen-  centraliser,  margin,   "
          "largest error\ngenerators                       error         norm        dence     of d/2        "
          f"{side} x {side}   of recover(R_x)")
    for name, G in (examples | encodings).items():
        try:
            found = f"{max((recover(turn(x, G), G) - x).abs().max() for x in torch.rand(9, 2).double()):.0e}"
        except ValueError:
            found = "refused"
        print(f"{name:32} {relativity_error(G):10.0e} {commutator_norm(G):13.0e} {independence(G):9.2f} "
              f"{centraliser_dimension(G):9} of {G.shape[-1] // 2:<4} "
              f"{injectivity_margin(G, (side, side)):8.4f} {found:>17}")

    print("\nThe second axis in a basis e^(tA) of its own:")
    for t in (0.001, 0.01, 0.1, 1):
        Q = torch.matrix_exp(t * skew(other.a.double()))
        G = torch.stack((axial[0], Q @ axial[1] @ Q.T))
        error, norm = relativity_error(G), commutator_norm(G)
        print(f"t = {t:<6} commutator {norm:.6f}, relativity error {error:.6f}: {error / norm:.3f} of it")
    q, k, x, y = torch.randn(4, d).double()
    q, k, Q = turn(x[:2], axial) @ q, turn(y[:2], axial) @ k, other.Q()
    print(f"Q after the rotation changes a logit of {q @ k:.3f} by {abs((Q @ q) @ (Q @ k) - q @ k):.0e}")

    # One query and key, equally strong in all axial planes: their logit from two places, by the offset.
    q = torch.randint(2, (d,)).double() * 2 - 1
    offset = torch.stack(torch.meshgrid(*[torch.arange(-16, 17)] * 2, indexing="ij"), -1).double()
    fig, axes = plt.subplots(2, 8, figsize=(17, 4.5), sharex=True, sharey=True, layout="constrained")
    for (name, G), column in zip(encodings.items(), axes.T):
        for x, ax in zip(torch.tensor([[0, 0], [9, 14]]).double(), column):
            logit = turn(x + offset, G) @ q @ (turn(x, G) @ q) / d                      # (33, 33)
            image = ax.imshow(logit.T, "RdBu_r", origin="lower", extent=(-16, 16, -16, 16), vmin=-1, vmax=1)
        column[0].set_title(name)
    for ax, place in zip(axes[:, 0], ("the origin", "(9, 14)")):
        ax.set_ylabel(f"seen from {place}\noffset y")
    for ax in axes[1]:
        ax.set_xlabel("offset x")
    fig.colorbar(image, ax=axes, label="logit <R_x q, R_y q> / |q|^2", pad=0.01)
    fig.savefig("figures/ndrope.png", dpi=80)
