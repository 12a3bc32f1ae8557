"""
bench.py: what each encoding costs, side by side on this machine.

A step is train.py's, compiled, and in bf16 where there is hardware. Each round runs every encoding for three
steps, in an order that rotates, to and fro. A ratio to RoPE is taken within a round, so a slow spell of the
machine falls on both and cancels: its median over the rounds, and its quartiles. Milliseconds, medians too,
need a quiet machine.

    FLOPs a token = 6 (12 layers D^2 + V D) + 6 layers L D      L / 2 tokens to see; backward twice forward
    of peak       = FLOPs a token * tokens/s / FLOPs/s of the fastest square matrix product of the same run
    memory        = weights, optimiser state, and the most that one step holds on top, by torch's allocator

$ python bench.py      minutes, most of them compiling; on a GPU with --heads 8 --L 1024
"""
import argparse
import itertools
import os
import statistics
import time

import torch

from ape import APE
from rope import RoPE, frequencies, rotate
from train import GPT, encodings, has_bf16, number


class Powers(APE):
    """A table of all powers W^m (L, H, d, d), doubled until it is long enough: what ape.py does without."""
    def forward(self, pos):
        W = torch.matrix_exp(self.A.triu(1) - self.A.triu(1).mT)
        table = torch.stack((torch.eye(self.d, device=W.device).expand_as(W), W))
        while len(table) < len(pos):
            table = torch.cat((table, table @ table[-1] @ W))
        return lambda x: torch.einsum("lhij,bhlj->bhli", table[:len(pos)].to(x.dtype), x)


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
    rest, pe = [w for name, w in model.named_parameters() if name[:3] != "pe."], list(model.pe.parameters())
    groups = [w for w in rest if w.ndim == 2], [w for w in rest if w.ndim != 2], pe
    optimizer = torch.optim.AdamW([{"params": g} for g in groups if g], lr=1e-4, fused=True)

    def objective():
        with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            logits, loss = model(x, y)
        return loss + 1e-4 * logits.float().logsumexp(-1).square().mean()
    objective.__code__ = objective.__code__.replace()       # its own: of one for all, dynamo keeps 8 versions
    objective = torch.compile(objective, fullgraph=True, disable=not compiled)

    def step():
        objective().backward()
        torch.nn.utils.clip_grad_norm_(rest, 0.5), torch.nn.utils.clip_grad_norm_(pe, 0.5)
        optimizer.step(), optimizer.zero_grad(set_to_none=True)
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
            turns[name](), turns[name](), turns[name](), wait()
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
    layers, D, n = max(1, 3 * H // 4), 64 * H, 2048 if device == "cpu" else 8192
    print(f"{H} heads, {layers} layers, {B} x {L} tokens, {dtype} on {device}{', compiled' * args.compile}")
    x, y = torch.randint(257, (2, B, L), device=device)
    encodings["powers"] = lambda c: Powers(c["d"], c["heads"])
    rows = {pe: {"pe": pe} for pe in ("rope", "prope", "lerope", "nope", "ape", "powers", "ndrope")}
    rows["folded"] = {"pe": "rope", "theta": [frequencies(64).tolist()] * H}        # an APE after fold
    rows["basis"] = {"pe": "ndrope", "basis": "cayley"}                             # its Q learned
    made = {name: training_step({"vocab": 257, "heads": H, "layers": layers} | row, x, y, dtype, args.compile)
            for name, row in rows.items()}
    a = torch.randn(n, n, device=device).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    ms = in_rounds({pe: step for pe, (step, _) in made.items()}, args.rounds, device)
    flops = 6 * (12 * layers * D**2 + 257 * D) + 6 * layers * L * D                 # a token
    peak = 2 * n**3 / min(in_rounds({"": lambda: a @ a}, args.rounds, device)[""]) * 1e3    # a second
    print(f"{flops / 1e6:.1f} MFLOPs a token, peak {peak / 1e12:.3g} TFLOPs/s\n")
    print("a step         ms    tokens/s   of peak   memory, MB   ratio to rope [quartiles]")
    for pe in rows:
        rate = B * L / statistics.median(ms[pe]) * 1e3
        print(f"{pe:8} {B * L / rate * 1e3:8.2f} {rate:11,.0f} {flops * rate / peak:9.1%} "
              f"{memory(*made[pe]):12,.1f}   {ratio(ms[pe], ms['rope'])}")
    x = torch.randn(16, 4, 256, 64, device=device, requires_grad=True)
    g, turns = torch.randn_like(x), {}
    angle = (torch.arange(256)[:, None] * RoPE(64).theta()).float().to(device)      # (L, d/2)
    half, full = [(t.cos(), t.sin()) for t in (angle, torch.cat((angle, angle), dim=-1))]
    for form, tables in (rotate, half), (concatenate, full), (adjacent, half):
        rho = torch.compile(form, fullgraph=True, disable=not args.compile)
        turns[form.__name__] = lambda rho=rho, tables=tables: torch.autograd.grad(rho(x, *tables), x, g)
    ms = in_rounds(turns, args.rounds, device)
    print("\nx (16, 4, 256, 64), float32    ms   ratio to rotate")
    for form in ms:
        print(f"{form:27} {statistics.median(ms[form]):7.3f} {ratio(ms[form], ms['rotate'])}")
