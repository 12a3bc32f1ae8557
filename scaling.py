"""
Scaling: run a rotary encoding past its trained length by changing its frequencies, and nothing else.

    Ro'(x, m theta) = Ro(x, m theta')      a modified rotary function is the original one at other angles

    interpolation   L' positions squeezed into L             m theta' = (L/L') m theta
    doubling        of m, inside Ro or outside, the same     m theta' = 2 m theta
    offset          all positions moved by c                 m theta' = (m + c) theta

Attention cannot see the offset: rho(m + c)^T rho(n + c) = rho(n - m). What is left is a map theta -> theta'.
L is the trained length, s = L'/L, and i a band, 0 .. d/2-1, of r = L theta_i / 2 pi turns in L:

    linear         theta_i / s                                           position interpolation [1]
    ntk            theta_i s^(-i/(d/2-1)), that is b' = b s^(d/(d-2))    first band kept, last one / s [2]
    dynamic_ntk    ntk by 1 + s (l/L - 1)                                l > L is the present length
    ntk_by_parts   theta_i (g + (1 - g)/s)                               g = clamp((r - 1)/(32 - 1), 0, 1) [3]
    yarn           by parts, and the logits times (0.1 ln s + 1)^2       [3]
    llama3         by parts with the bounds 1 and 4                      [4]
    longrope       theta_i / factor_i, the logits times 1 + ln s/ln L    a table found by search [5]

Nothing is learned, theta = 0 stays 0, and RoPE's laws hold: a temperature multiplies the logits, where common
code scales cos and sin. YaRN's ramp is linear in r, as in the paper, so it is right for learned frequencies;
common code's is linear in i and needs a base (ramp="index", for parity). Keys that were rotated before theta
changed with the length are stale. theta (d/2,) or, a spectrum a head, (H, d/2), is in radians a token.

[1] Chen et al. 2023, arXiv:2306.15595    [2] bloc97, emozilla 2023, r/LocalLLaMA, "NTK-Aware", "Dynamically"
[3] Peng et al. 2023, arXiv:2309.00071    [4] Llama 3.1's code    [5] Ding et al. 2024, arXiv:2402.13753

$ python scaling.py                                    every theta' at s = 4; figures/scaling.png
$ python scaling.py CHECKPOINT... --lengths 1,2,4,8    the loss past L; figures/scaling_loss.png
"""
import argparse
import copy
import json
import math
from functools import partial
from numbers import Real
from pathlib import Path

import torch

from prope import PRoPE
from rope import RoPE, frequencies


def check(name, value, least):
    """The value, or a ValueError that names it unless it is a finite number of at least `least`."""
    if not isinstance(value, Real) or not least <= value < math.inf:
        raise ValueError(f"{name} = {value!r}: must be a finite number, at least {least:g}")
    return value


def linear(theta, s):
    """theta / s: position interpolation."""
    return theta / check("s", s, 1)


def ntk(theta, s):
    """theta_i s^(-i/(d/2-1)): a larger base, written by index so that learned frequencies can have it too."""
    n = check("d", 2 * theta.shape[-1], 4) // 2
    return theta * check("s", s, 1) ** (-torch.arange(n).to(theta) / (n - 1))


def dynamic_ntk(theta, s, length, trained):
    """ntk for the present length, none up to the trained one. At s = 1 it is ntk by length / trained."""
    past = max(check("length", length, 1) / check("trained", trained, 1) - 1, 0)
    return ntk(theta, 1 + check("s", s, 1) * past)


def ntk_by_parts(theta, s, L, low=1, high=32):
    """Bands of more than `high` turns in L are kept, of less than `low` divided by s, blended between."""
    check("s", s, 1), check("L", L, 2 * math.pi), check("high", high, check("low", low, 0))
    turns = L * theta.abs() / (2 * math.pi)                         # L / wavelength
    g = ((turns - low) / (high - low or 1e-9)).clamp(0, 1)
    return theta * (g + (1 - g) / s)


def yarn(theta, s, L, ramp="wavelength", base=None, low=1, high=32, truncate=True):
    """By parts. ramp="index" is common code's, with its d - 1 and 0.001: for the spectrum of a base only."""
    if ramp == "wavelength":
        return ntk_by_parts(theta, s, L, low, high)
    if ramp != "index":
        raise ValueError(f"ramp = {ramp!r}: must be wavelength or index")
    n, r, b = theta.shape[-1], check("L", L, 2 * math.pi) / (2 * math.pi), check("base", base, 1)
    first, last = (n * math.log(r / turns) / math.log(b) for turns in (check("high", high, low), low))
    down, up = (math.floor, math.ceil) if truncate else (float, float)
    first, last = max(down(first), 0), min(up(last), 2 * n - 1)
    g = 1 - ((torch.arange(n).to(theta) - first) / (last - first or 0.001)).clamp(0, 1)
    return theta * (g + (1 - g) / check("s", s, 1))


def llama3(theta, s, L, low=1, high=4):
    """Llama 3.1's blend of theta and theta / s is by parts with bounds of its own."""
    return ntk_by_parts(theta, s, L, low, high)


def longrope(theta, factors=None, name="factors"):
    """theta_i / factors_i."""
    if factors is None or len(factors) != theta.shape[-1] or not all(0 < f < math.inf for f in factors):
        raise ValueError(f"{name} = {str(factors)[:60]}: must be {theta.shape[-1]} finite numbers above 0")
    return theta / torch.as_tensor(factors, dtype=theta.dtype, device=theta.device)


def yarn_temperature(s):
    """(0.1 ln s + 1)^2, a factor on the logits."""
    return (0.1 * math.log(check("s", s, 1)) + 1) ** 2


METHODS = {f.__name__: f for f in (linear, ntk, dynamic_ntk, ntk_by_parts, yarn, llama3, longrope)}


def stretched(pe, method, device=None):
    return method(pe.theta(device))


def extend(pe, method, s, L, **kw):
    """An encoding on pe's own Parameters with theta() = method(pe.theta()), also while they go on learning.
    s = L'/L; 1 changes nothing. kw: bounds, ramp, longrope's factors, dynamic_ntk's length (default s L)."""
    if method not in METHODS or not hasattr(pe, "theta") or getattr(pe, "ndim", 1) > 1:
        raise ValueError(f"method = {method!r}: must be {', '.join(METHODS)}, of an encoding of sequences")
    check("s", s, 1), check("L", L, 2 * math.pi)
    given = {"linear": {"s": s}, "ntk": {"s": s}, "dynamic_ntk": {"s": s, "length": s * L, "trained": L},
             "longrope": {}}.get(method, {"s": s, "L": L})
    f = partial(METHODS[method], **given | kw)
    f(pe.theta())                                                   # what is wrong is told here
    longer = copy.copy(pe)
    if s > 1:
        longer.theta = partial(stretched, pe, f)                    # no closure: this copies and pickles
        sharper = {"yarn": yarn_temperature(s), "longrope": 1 + math.log(s) / math.log(L)}
        longer.temperature = pe.temperature * sharper.get(method, 1)
    return longer


def from_hf(config, length=None):
    """A config of transformers 4 or 5, dict or path -> (theta, temperature), or a dict of them by layer type.
    length: the present one, for dynamic and longrope. theta has int(head_dim * partial_rotary_factor) // 2
    bands, for proportional head_dim // 2, some 0. temperature is their factor on cos and sin squared, without
    what a model adds of its own (DeepSeek's softmax: mscale_all_dim's, squared). ValueError names the key."""
    c = config if isinstance(config, dict) else json.loads(Path(config).read_text())
    c = c.get("text_config") or c
    params = c.get("rope_parameters") or c.get("rope_scaling") or {}
    layers = {layer: p for layer, p in params.items() if isinstance(p, dict)}
    if "rope_local_base_freq" in c and not layers:                  # Gemma 3 in 4: only global layers scale
        layers = {"full_attention": params, "sliding_attention": {"rope_theta": c["rope_local_base_freq"]}}
    if not layers:
        return spectrum(c | params, length)
    # Gemma 4's global heads are wider: as published, and as transformers 5 saves it.
    own = {"full_attention": {"head_dim": c.get("global_head_dim") or c.get("head_dim")}}
    own |= {c["layer_types"][int(i)]: o for i, o in (c.get("per_layer_config") or {}).items()}
    return {layer: spectrum(c | own.get(layer, {}) | p, length) for layer, p in layers.items()}


def spectrum(c, length):
    """from_hf for one layer type, with all keys in one flat dict c."""
    number = lambda key, least=1, default=None: check(key, default if c.get(key) is None else c[key], least)
    kind, longest = c.get("rope_type") or c.get("type") or "default", c.get("max_position_embeddings")
    d = c.get("qk_rope_head_dim") or c.get("head_dim")
    d = d or number("hidden_size") // number("num_attention_heads")
    base, p = number("rope_theta"), number("partial_rotary_factor", 0, 1)
    width, kept = (d, p) if kind == "proportional" else (int(d * p), 1)
    if p > 1 or width < 2 or width % 2:
        raise ValueError(f"partial_rotary_factor = {p}: must be at most 1 and turn an even part of {d}")
    theta, A = PRoPE(width, kept, base).theta(), 1
    trained = partial(number, "original_max_position_embeddings", 2 * math.pi, longest)
    if kind in ("linear", "proportional"):
        theta = linear(theta, number("factor", default={"proportional": 1}.get(kind)))
    elif kind == "dynamic":
        theta = dynamic_ntk(theta, number("factor"), length, number("max_position_embeddings"))
    elif kind == "llama3":
        low = number("low_freq_factor", 0)
        theta = llama3(theta, number("factor"), trained(), low, number("high_freq_factor", low))
    elif kind == "yarn":
        s, low, truncate = number("factor"), number("beta_slow", 0.001, 1), c.get("truncate", True)
        theta = yarn(theta, s, trained(), "index", base, low, number("beta_fast", low, 32), truncate)
        m = c.get("mscale"), c.get("mscale_all_dim")
        a, b = (0.1 * k * math.log(s) + 1 for k in (m if all(m) else (1, 0)))
        A = number("attention_factor", 0, a / b)                    # given, it replaces theirs
    elif kind == "longrope":
        L = trained()
        table = "long_factor" if check("length", length, 1) > L else "short_factor"
        theta, s = longrope(theta, c.get(table), table), number("factor", 1, longest and longest / L)
        A = number("attention_factor", 0, (1 + math.log(s) / math.log(L)) ** 0.5)
    elif kind != "default":
        raise ValueError(f"rope_type = {kind!r}: must be default, linear, proportional, dynamic, llama3, "
                         "yarn or longrope")
    return theta, A ** 2


def to_hf(pe, L):
    """pe, trained at length L -> rope_parameters for any engine that reads them. Neither RoPE nor p-RoPE: a
    LongRoPE table base^(-2i/d) / theta_i, LeRoPE's e^-alpha. Fold a learned basis into W_q and W_k before."""
    theta, L = pe.theta().detach().cpu(), check("L", L, 1)
    if theta.ndim > 1 or getattr(pe, "a", None) is not None:
        raise ValueError(f"theta {[*theta.shape]}, or its basis: a config has one spectrum, and no basis")
    n, kept, plain = len(theta), int((theta != 0).sum()), frequencies(2 * len(theta), pe.base)
    if pe.temperature == 1 and torch.equal(theta, plain * (torch.arange(n) < kept)):
        p = math.ceil(kept / n * 1e6) / 1e6                         # read as int(p d // 2): never round down
        return {"rope_theta": pe.base} | ({"rope_type": "default"} if kept == n else
                                          {"rope_type": "proportional", "partial_rotary_factor": p})
    if not (theta > 0).all():
        raise ValueError(f"theta has {(theta <= 0).sum()} bands not above 0; only plain p-RoPE can have such")
    factors = (plain / theta).tolist()
    return {"rope_type": "longrope", "rope_theta": pe.base, "short_factor": factors, "long_factor": factors,
            "factor": 1.0, "original_max_position_embeddings": L, "attention_factor": pe.temperature ** 0.5}


# ------------------------------------------------------------------------------------------------------------
if __name__ == "__main__":
    import matplotlib.pyplot as plt
    from data import validation
    from train import load
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    ap.add_argument("runs", metavar="checkpoint", nargs="*", help="runs of train.py; none: the frequencies")
    ap.add_argument("--lengths", default="1,2,4,8", help="tested lengths, multiples of the trained one")
    ap.add_argument("--data", help="where the validation text comes from, as in train.py; if not theirs")
    args = ap.parse_args()
    torch.set_grad_enabled(False)
    fig, axes = plt.subplots(1, (n := len(args.runs)) or 2, figsize=(12, 4.5), sharey=n > 0,
                             squeeze=False, layout="tight")

    if not args.runs:
        pe, L, shown = RoPE(64), 1024, [0, 4, 8, 12, 16, 20, 24, 28, 31]
        table = {"factors": [4 if 2 * math.pi / t > L else 1 for t in pe.theta()]}
        rows = {"none": pe} | {m: extend(pe, m, 4, L, **table if m == "longrope" else {}) for m in METHODS}
        rows["yarn by index"] = extend(pe, "yarn", 4, L, ramp="index", base=pe.base)
        print("theta' of band", *(f"{i:9}" for i in shown), "  sum of 32  temperature")
        for name, row in rows.items():
            t = row.theta()
            print(f"{name:14}", *(f"{v:9.4g}" for v in t[shown]), f"{t.sum():11.8f}  {row.temperature:11.9f}")
            for ax, y in zip(axes[0], (2 * math.pi / t, pe.theta() / t)):
                ax.semilogy(y, label=name, lw=5 if name == "ntk_by_parts" else 1.6)
        axes[0, 0].axhline(L, color="black", lw=0.8)
        axes[0, 0].set(xlabel="band", ylabel="wavelength, tokens", title="s = 4; line: trained length")
        axes[0, 1].set(xlabel="band", ylabel="theta / theta'", title="longrope: with a table of 1 and 4")

    try:
        lengths = [check("length", int(n), 1) for n in args.lengths.split(",")]
        runs = [(m := load(path), max(validation(m.config, args.data), key=len)) for path in args.runs]
        longest = max(lengths) * max([m.config["L"] for m, _ in runs], default=0)
        check("number of validation tokens", min([len(val) for _, val in runs], default=1), longest + 1)
    except (ValueError, OSError) as e:
        ap.error(f"{' '.join(args.runs)} --lengths {args.lengths} --data {args.data}: {e}")
    for (model, val), ax in zip(runs, axes[0]):
        pe, L = model.pe, model.config["L"]
        ends = torch.linspace(longest, len(val) - 1, 32).long().tolist()
        print(f"{model.config['pe']}: nats a token, in all / the last {L} tokens of {args.lengths} x {L}")
        for method in ["none", *METHODS][:-1]:                      # longrope, the last, has no table here
            loss = []
            for s in lengths:
                model.pe = pe if method == "none" else extend(pe, method, s, L)
                rows = torch.stack([torch.from_numpy(val[e - s * L : e + 1].astype("int64")) for e in ends])
                nll = torch.cat([torch.nn.functional.cross_entropy(             # (32, s L)
                    model(x[:, :-1])[0].mT, x[:, 1:], reduction="none") for x in rows.split(4)])
                loss.append((nll.mean().item(), nll[:, -L:].mean().item()))
            print(f"{method:13}" + "".join(f"{a:8.4f} /{b:7.4f}" for a, b in loss), flush=True)
            ax.plot(lengths, [b for _, b in loss], ".-", label=method)
        ax.set(xlabel="L' / L", xticks=lengths, ylabel=f"nats, last {L} tokens", title=model.config["pe"])

    axes[0, 0].legend()
    fig.savefig("figures/scaling_loss.png" if n else "figures/scaling.png", dpi=120)
