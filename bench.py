"""
bench.py: what each encoding costs, side by side on this machine.

A step is train.py's: forward, backward, clip, fused AdamW; compiled, and in bf16 where there is hardware. In
each round every encoding takes a turn of three steps, in an order that rotates, to and fro. Its ratio to RoPE
is the median over the rounds of (its time / RoPE's in that round), with the quartiles: what else a machine
does, if it outlasts a round, falls on both and cancels. Milliseconds, medians too, need a quiet machine.

    FLOPs a token = 6 N + 6 layers L D     N = 12 layers D^2 + V D weights in matrix products; L / 2 tokens to
                                           see on average; 2 for a multiply-add; backward twice forward
    of peak       = FLOPs a token * tokens/s / FLOPs/s of the fastest square matrix product of the same run
    memory        = weights, optimiser state, and the most that one step holds on top, by torch's allocator

$ python bench.py                                       minutes, most of them compiling; 4 heads, L = 256
$ python bench.py --device cuda --heads 8 --L 1024      width 512, 6 layers
"""
import argparse
import itertools
import os
import statistics
import time

import torch

from rope import RoPE, rotate
from train import GPT, encodings, has_bf16, number


def concatenate(x, cos, sin):
    """Hugging Face's way to rotate x (..., L, d): cos and sin (L, d) of full width, their halves equal."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def adjacent(x, cos, sin):
    """The paper's pairs (x_2i, x_{2i+1}) of x (..., L, d): cos and sin (L, d/2)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)                      # (..., L, d/2) each
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def training_step(config, x, y, dtype, compiled):
    """x, y (B, L) -> a function that trains GPT(config) on them for one step; and its optimiser."""
    model = GPT(config).to(x.device)
    pe = list(model.pe.parameters())
    rest = [w for name, w in model.named_parameters() if not name.startswith("pe.")]
    groups = [w for w in rest if w.ndim == 2], [w for w in rest if w.ndim != 2], pe
    optimizer = torch.optim.AdamW([{"params": g} for g in groups if g], lr=1e-4, fused=True)

    def objective():
        with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            logits, loss = model(x, y)
        return loss + 1e-4 * logits.float().logsumexp(-1).square().mean()
    if compiled:
        # A code object for each: of one that all share, dynamo keeps 8 versions and then gives up.
        objective.__code__ = objective.__code__.replace()
        objective = torch.compile(objective, fullgraph=True)

    def step():
        objective().backward()
        for part in (rest, pe):
            torch.nn.utils.clip_grad_norm_(part, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step, optimizer


def memory(step, optimizer):
    """MB, by the header's account. On MPS, which keeps no peak, the weights and the state alone."""
    held = sum(t.nbytes for w, state in optimizer.state.items() for t in (w, *state.values()))
    if torch.cuda.is_available() and (now := torch.cuda.memory_allocated()):
        torch.cuda.reset_peak_memory_stats()
        step()
        return (held + torch.cuda.max_memory_allocated() - now) / 1e6
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")                                 # or the profiler talks
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]      # < 0: given back
    return (held + max(itertools.accumulate(changes, initial=0))) / 1e6


def in_rounds(turns, rounds, device):
    """turns: name -> function, called three times a round -> name -> ms of a call, by round."""
    wait, names, n = getattr(torch, device).synchronize, list(turns), len(turns)
    ms = {name: [] for name in names}
    for r in range(rounds + 1):                                     # one more, to warm up
        for name in (names[r % n:] + names[:r % n])[::(-1) ** (r // n)]:
            wait()
            start = time.perf_counter()
            for _ in range(3):
                turns[name]()
            wait()
            ms[name].append((time.perf_counter() - start) / 3 * 1e3)
    return {name: times[1:] for name, times in ms.items()}


def ratio(these, those):
    """The median over rounds of the ratio of two times, and its quartiles, to be printed."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(these, those)], method="inclusive")
    return f"{middle:6.3f} [{low:.3f}, {high:.3f}]"


# ------------------------------------------------------------------------------------------------------------
if __name__ == "__main__":
    there = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    count = number(int, 1, 10**6, 16)
    ap = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    ap.add_argument("--heads", type=count, default=4, help="the dial: width 64 heads, 3 heads // 4 layers")
    ap.add_argument("--layers", type=count, help="overrides the dial's")
    ap.add_argument("--L", type=count, default=256, help="length of a window, tokens")
    ap.add_argument("--batch", type=count, default=16, help="windows a step")
    ap.add_argument("--rounds", type=number(int, 2, 10**6, 20), default=20, help="of three steps each")
    ap.add_argument("--device", choices=there, default=there[0], help="those of this machine")
    ap.add_argument("--dtype", choices=("bf16", "fp32"), help="if not given, bf16 where there is hardware")
    ap.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile")
    args = ap.parse_args()
    H, B, L, device = args.heads, args.batch, args.L, args.device
    dtype = args.dtype or ("bf16" if has_bf16(device) else "fp32")
    torch.set_float32_matmul_precision("high")

    layers, D, n = args.layers or max(1, 3 * H // 4), 64 * H, 2048 if device == "cpu" else 8192
    print(f"{H} heads, {layers} layers, {B} x {L} tokens, {dtype} on {device}{', compiled' * args.compile}")
    x, y = torch.randint(257, (2, B, L), device=device)
    config = {"vocab": 257, "heads": H, "layers": layers}
    made = {pe: training_step({**config, "pe": pe}, x, y, dtype, args.compile) for pe in encodings}
    a = torch.randn(n, n, device=device).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    ms = in_rounds({pe: step for pe, (step, _) in made.items()}, args.rounds, device)
    flops = 6 * (12 * layers * D**2 + 257 * D) + 6 * layers * L * D                 # a token
    peak = 2 * n**3 / min(in_rounds({"": lambda: a @ a}, args.rounds, device)[""]) * 1e3    # a second
    print(f"{flops / 1e6:.1f} MFLOPs a token, peak {peak / 1e12:.3g} TFLOPs/s\n")
    print("a step         ms    tokens/s   of peak   memory, MB   ratio to rope [quartiles]")
    for pe in encodings:
        rate = B * L / statistics.median(ms[pe]) * 1e3
        print(f"{pe:8} {B * L / rate * 1e3:8.2f} {rate:11,.0f} {flops * rate / peak:9.1%} "
              f"{memory(*made[pe]):12,.1f}   {ratio(ms[pe], ms['rope'])}")

    x = torch.randn(16, 4, 256, 64, device=device, requires_grad=True)
    g, turns = torch.randn_like(x), {}
    angle = (torch.arange(256)[:, None] * RoPE(64).theta()).float().to(device)      # (L, d/2)
    half, full = [(t.cos(), t.sin()) for t in (angle, torch.cat((angle, angle), dim=-1))]
    same, order = torch.arange(64), torch.arange(64).view(2, 32).T.flatten()        # 0, 32, 1, 33, ...
    for form, tables, channels in (rotate, half, same), (concatenate, full, same), (adjacent, half, order):
        torch.testing.assert_close(form(x[..., channels], *tables), rotate(x, *half)[..., channels])
        rho = torch.compile(form, fullgraph=True) if args.compile else form
        turns[form.__name__] = lambda rho=rho, tables=tables: torch.autograd.grad(rho(x, *tables), x, g)
    ms = in_rounds(turns, args.rounds, device)
    print("\nx (16, 4, 256, 64), float32    ms   ratio to rotate")
    for form in ms:
        print(f"{form:27} {statistics.median(ms[form]):7.3f} {ratio(ms[form], ms['rotate'])}")
