"""
train.py: a tiny GPT that trains with any of the encodings, on one GPU or on a laptop's CPU.

    rho = pe(pos)                       once a forward pass
    q, k = rho(q), rho(k)               in every layer; the GPT knows nothing else of positions

Three rooms: the model, the data, the run. `--heads h` is the one dial for size: width D = 64 h, 3h // 4 layers, so that
h = 8, 16, 24, 32, 40 are the 52M ... 2.5B of the LeRoPE paper [1] at its vocabulary of 32k. Blocks and initialisation
are those of Enoki [2]: pre-LayerNorm and linears without bias, GELU MLP of 4 D, untied head, z-loss. Two differences:

- QK-norm is RMS with one learned scale a head, where Enoki has a LayerNorm with a gain a channel. An orthogonal rho keeps
  an RMS, so the norm before or after rho is the same, and a learned basis folds exactly into W_q and W_k. A gain a channel
  or a centring would break both.
- The encoding's own parameters are a group of their own: own learning rate, own gradient clip, no weight decay.

The batch of a step is a function of (seed, step) alone and the encoding is made last, so runs of one seed share their
batches and all other initial weights: compare encodings in pairs.

[1] Karypis et al. 2026, LeRoPE, https://arxiv.org/abs/2607.10134
[2] Charles et al. 2025, https://arxiv.org/abs/2503.09799

$ python train.py --pe lerope          the standard library's own source, byte by byte; out/lerope-s0/
$ torchrun --nproc_per_node=2 train.py --pe lerope --data fineweb:9 --heads 8 --L 1024 --batch 32
"""
import argparse
import contextlib
import glob
import hashlib
import json
import math
import os
import platform
import signal
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from data import batch, dataset, tokenizer, tokenizers
from lerope import LeRoPE
from prope import PRoPE
from rope import RoPE, frequencies

encodings = {                                                       # name -> constructor, from the model's config
    "rope": lambda c: RoPE(c["d"], c["base"], c["theta"]),
    "prope": lambda c: PRoPE(c["d"], c["p"], c["base"], c["reverse"]),
    "lerope": lambda c: LeRoPE(c["d"], c["base"]),
    "nope": lambda c: PRoPE(c["d"], p=0.0),
}


# ----------------------------------------------------------------------------------------------------------------------
# the model

def attention(q, k, v, scale):
    """Causal attention of q, k, v (B, H, L, d); logits times scale."""
    L = q.shape[2]
    if q.device.type != "cpu" or L > 1024:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    # On a CPU the fused kernel's backward pass is slow. Plain products train twice as fast once compiled, here with
    # the queries in two halves, so that the first does not meet the second's keys.
    y, pos, wide = [], torch.arange(L), torch.promote_types(q.dtype, torch.float32)
    for start, end in ((0, L // 2), (L // 2, L)):
        logits = (q[:, :, start:end] @ k[:, :, :end].mT).to(wide) * scale            # (B, H, L / 2, end)
        logits = torch.where(pos[:end] > pos[start:end, None], -math.inf, logits)
        y.append(logits.softmax(-1).to(v.dtype) @ v[:, :, :end])
    return torch.cat(y, dim=2)


class Block(nn.Module):
    def __init__(self, D, H):
        super().__init__()
        self.H = H
        self.norm1, self.norm2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)
        self.scale = nn.Parameter(torch.ones(H, 1, 1))

    def heads(self, x):
        """x (B, L, D) -> q, k after the norm and before rho, and v, (B, H, L, d) each."""
        B, L, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, L, 3, self.H, D // self.H).permute(2, 0, 3, 1, 4)
        q, k = (F.rms_norm(t.float() if t.dtype == torch.bfloat16 else t, t.shape[-1:]) for t in (q, k))
        return q * self.scale, k, v

    def forward(self, x, rho, temperature):
        B, L, D = x.shape
        q, k, v = self.heads(x)
        q, k = rho(q).to(v.dtype), rho(k).to(v.dtype)
        y = attention(q, k, v, temperature * (D // self.H) ** -0.5)
        x = x + self.out(y.transpose(1, 2).reshape(B, L, D))                        # (B, H, L, d) -> (B, L, D)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        """config: vocab, heads, layers, pe; d (width of a head), base, p, reverse, theta where not the default."""
        super().__init__()
        self.config = config = {"d": 64, "base": 10_000.0, "p": 0.75, "reverse": False, "theta": None, **config}
        D = config["heads"] * config["d"]
        self.embed = nn.Embedding(config["vocab"], D)
        self.blocks = nn.ModuleList(Block(D, config["heads"]) for _ in range(config["layers"]))
        self.norm = nn.LayerNorm(D, bias=False)
        self.head = nn.Linear(D, config["vocab"], bias=False)
        for name, w in self.named_parameters():
            if w.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(w, std=(w.shape[1] * (2 * config["layers"] if residual else 1)) ** -0.5)
        # Last, so that what an encoding draws changes no other weight.
        self.pe = encodings[config["pe"]](config)

    def forward(self, idx, targets=None, pos=None):
        """idx (B, L), targets (B, L) with -1 where none, pos as the encoding takes it, arange(L) if None
        -> logits (B, L, V), the mean cross entropy over the targets in nats, or None."""
        rho = self.pe(torch.arange(idx.shape[1], device=idx.device) if pos is None else pos)
        x = self.embed(idx)                                                         # (B, L, D)
        for block in self.blocks:
            x = block(x, rho, self.pe.temperature)
        logits = self.head(self.norm(x))                                            # (B, L, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)


def read_checkpoint(path):
    """A file that train.py wrote, or the folder it lies in -> its dict. ValueError with a sentence if it is none."""
    path = Path(path, "ckpt.pt") if Path(path).is_dir() else Path(path)
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        ckpt["config"]["pe"], ckpt["model"]["embed.weight"]
        return ckpt
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: name a ckpt.pt, or the folder of a run of train.py") from None
    except Exception:
        raise ValueError(f"{path} is no checkpoint of train.py: name a ckpt.pt, or the folder of a run") from None


def load(path):
    """The model of a checkpoint (a ckpt.pt or its folder), on the CPU, in eval mode. ValueError if it is none."""
    ckpt = read_checkpoint(path)
    model = GPT(ckpt["config"])
    model.load_state_dict(ckpt["model"])
    return model.eval()


def checkpoint(path):
    """load(path) as an argparse type: what is wrong becomes a sentence and exit code 2."""
    try:
        return load(path)
    except ValueError as e:
        raise argparse.ArgumentTypeError(e) from None


@torch.no_grad()
def generate(model, idx, n, temperature=0.8, seed=0):
    """idx (1, L) and n more tokens, drawn one by one from the last config["L"] ones."""
    g = torch.Generator(idx.device).manual_seed(seed)
    for _ in range(n):
        logits, _ = model(idx[:, -model.config["L"]:])
        p = (logits[:, -1].float() / temperature).softmax(-1)
        idx = torch.cat((idx, torch.multinomial(p, 1, generator=g)), dim=1)
    return idx


# ----------------------------------------------------------------------------------------------------------------------
# the run

def flags():
    ap = argparse.ArgumentParser(usage="python train.py [--pe lerope] [flags, see --help]", description=__doc__.split("\n")[1],
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    g = ap.add_argument_group("encoding")
    g.add_argument("--pe", default="rope", choices=encodings, help="the encoding")
    g.add_argument("--p", type=float, default=0.75, help="prope: fraction of the frequencies kept, the fastest")
    g.add_argument("--reverse", action="store_true", help="prope: keep the slowest instead")
    g.add_argument("--base", type=float, default=10_000.0, help="base of the frequencies")
    g.add_argument("--freeze_pe", action="store_true", help="the encoding's parameters stay at their present values")
    g.add_argument("--init_pe", metavar="LOG_OR_CKPT", help="rope, lerope: start from the frequencies of another run")
    g = ap.add_argument_group("model")
    g.add_argument("--heads", type=int, default=4, help="the dial: width 64 heads, 3 heads // 4 layers")
    g.add_argument("--layers", type=int, help="overrides the dial's")
    g.add_argument("--init", metavar="CKPT", help="start from the weights of another run, of any encoding")
    g = ap.add_argument_group("data")
    g.add_argument("--data", default="python", help="python (the standard library's source), a text file or folder, "
                   "'path/*_train_*.bin', or fineweb:N for N shards of 100M tokens")
    g.add_argument("--tokenizer", choices=tokenizers, help="bytes for text, gpt2 for .bin if not given")
    g.add_argument("--L", type=int, default=256, help="length of a window, tokens")
    g = ap.add_argument_group("optimisation")
    g.add_argument("--steps", type=int, default=1600, help="optimiser steps")
    g.add_argument("--batch", type=int, default=16, help="windows a micro-step, over all processes")
    g.add_argument("--accum", type=int, default=1, help="micro-steps a step")
    g.add_argument("--lr", type=float, default=1e-3, help="peak learning rate: 2 %% warm-up, then a cosine to a tenth")
    g.add_argument("--pe_lr", type=float, default=2e-2, help="the same for the encoding's parameters")
    g.add_argument("--clip", type=float, default=0.5, help="largest norm of the gradient")
    g.add_argument("--pe_clip", type=float, default=0.5, help="the same for the encoding's parameters")
    g.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches")
    g = ap.add_argument_group("run")
    g.add_argument("--out", help="folder of the run; out/<pe>-s<seed> if not given")
    g.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    g.add_argument("--eval_every", type=int, default=200, help="steps between evaluations, each with a checkpoint")
    g.add_argument("--eval_windows", type=int, default=512, help="windows of an evaluation")
    g.add_argument("--device", help="cuda, mps or cpu; the best there is if not given")
    g.add_argument("--dtype", choices=("bf16", "fp32"), help="bf16 if the device multiplies it in hardware")
    g.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile")
    return ap


def check(ap, args):
    """Every number in its range, or a sentence and exit code 2. A nan is in no range."""
    count = [(name, getattr(args, name) >= 1, "must be at least 1")
             for name in ("heads", "L", "steps", "batch", "accum", "eval_every", "eval_windows")]
    for name, ok, remedy in count + [
            ("layers", args.layers is None or args.layers >= 1, "must be at least 1"),
            ("p", 0 <= args.p <= 1, "must lie in [0, 1], like 0.75"),
            ("base", 1 < args.base < math.inf, "must be finite and above 1, like 10000"),
            ("lr", 0 < args.lr < 1, "must lie between 0 and 1, like 1e-3"),
            ("pe_lr", 0 < args.pe_lr < 1, "must lie between 0 and 1, like 2e-2"),
            ("clip", args.clip > 0, "must be above 0, like 0.5; inf turns it off"),
            ("pe_clip", args.pe_clip > 0, "must be above 0, like 0.5; inf turns it off"),
            ("seed", args.seed >= 0, "must not be negative"),
            ("reverse", not args.reverse or args.pe == "prope", "goes with --pe prope"),
            ("init_pe", not args.init_pe or args.pe in ("rope", "lerope"), "goes with --pe rope or lerope")]:
        if not ok:
            ap.error(f"--{name} {getattr(args, name)}: {remedy}")


def spectrum(path):
    """The frequencies of another run, from its log or its checkpoint: a list of d/2 floats."""
    if not str(path).endswith(".jsonl"):
        return load(path).pe.theta().tolist()
    try:
        return [line["theta"] for line in map(json.loads, open(path)) if "theta" in line][-1]
    except (OSError, ValueError, IndexError, TypeError):
        raise ValueError(f"{path} is no log of a run whose encoding is learned: name its log.jsonl or ckpt.pt") from None


def draw(lines, path):
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for key in ("train", "val"):
        ax.plot([v["step"] for v in lines if v.get(key)], [v[key] for v in lines if v.get(key)], ".-", label=key)
    ax.set(xlabel="step", ylabel="loss, nats a token", title=path.parent.name)
    ax.legend()
    fig.savefig(path, dpi=100)
    plt.close(fig)


def main():
    ap = flags()
    args = ap.parse_args()
    layered = args.pe + f"-p{args.p:g}" * (args.pe == "prope" and args.p != 0.75) + "-reverse" * args.reverse
    out = Path(args.out or f"out/{layered}" + f"-b{args.base:g}" * (args.base != 10_000) + f"-s{args.seed}")

    # The folder: new, or one to go on in, with the flags that it was started with.
    ckpt = None
    if args.resume:
        try:
            ckpt = read_checkpoint(out)
        except ValueError as e:
            ap.error(f"--resume: {e}; without --resume a new run starts")
        ap.set_defaults(**ckpt["args"])
        args = ap.parse_args()
        for name, was in ckpt["args"].items():
            if getattr(args, name) != was:
                ap.error(f"--{name} {getattr(args, name)}: the run in {out} has {was}; leave the flag out, or start "
                         "another run with --out")
    elif (out / "ckpt.pt").exists():
        ap.error(f"--out {out}: a run is there; go on with --resume, or name another folder with --out")
    check(ap, args)

    # The device. One process, or one of several that torchrun started.
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(args.device or best)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        ap.error(f"--device {args.device}: not on this machine; {best} is")
    if args.batch % world:
        ap.error(f"--batch {args.batch}: must be a multiple of the {world} processes")
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    has_bf16 = {"cpu": any(getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("amx_tile", "avx512_bf16")),
                "cuda": device.type == "cuda" and torch.cuda.is_bf16_supported()}
    bf16 = args.dtype == "bf16" if args.dtype else has_bf16.get(device.type, False)
    compiled = args.compile
    if compiled and device.type == "cpu":
        try:
            torch.compile(lambda x: x + 1)(torch.zeros(8))
        except Exception:
            print("no C++ compiler that torch.compile could use: running eagerly, slower")
            compiled = False

    # The data.
    try:
        train, val, info = dataset(args.data, args.tokenizer)
    except (ValueError, OSError) as e:
        ap.error(f"--data {args.data}: {e}")
    for part, tokens in (("training", train), ("validation", val)):
        if sum(map(len, tokens)) <= args.L:
            ap.error(f"--data {args.data}: the {part} part has {sum(map(len, tokens))} tokens, a window of --L {args.L} "
                     "needs one more than that: give more text or a smaller --L")
    if ckpt and ckpt["data"] != info:
        ap.error(f"--data {args.data}: not what the run in {out} was started with; bring that back, or use another --out")

    # The model, made on the CPU, so that a seed means the same weights on every device.
    vocab, eot = tokenizers[info["tokenizer"]]
    config = {"vocab": vocab, "heads": args.heads, "layers": args.layers or max(1, 3 * args.heads // 4), "d": 64,
              "pe": args.pe, "base": args.base, "p": args.p, "reverse": args.reverse, "theta": None,
              "L": args.L, "tokenizer": info["tokenizer"]}
    try:
        theta = torch.tensor(spectrum(args.init_pe), dtype=torch.float64) if args.init_pe else None
        other = read_checkpoint(args.init) if args.init else None
    except ValueError as e:
        ap.error(f"--{'init' if args.init else 'init_pe'}: {e}")
    if theta is not None and args.pe == "rope":
        config["theta"] = theta.tolist()
    torch.manual_seed(args.seed)
    model = GPT(config)
    if other:
        for key in ("vocab", "heads", "layers", "d"):
            if other["config"][key] != config[key]:
                ap.error(f"--init {args.init}: its {key} is {other['config'][key]}, this model's {config[key]}")
        same = other["config"]["pe"] == args.pe
        model.load_state_dict({k: v for k, v in other["model"].items() if same or not k.startswith("pe.")}, strict=same)
    if theta is not None and args.pe == "lerope":
        if theta.shape != model.pe.alpha.shape or not (theta > 0).all():
            ap.error(f"--init_pe {args.init_pe}: lerope starts from {len(model.pe.alpha)} frequencies above 0")
        model.pe.alpha.data.copy_((theta / frequencies(config["d"], args.base)).log())
    model.pe.requires_grad_(not args.freeze_pe)
    model.to(device)
    n_params = sum(w.numel() for w in model.parameters())

    # The optimiser: matrices decay, gains do not, the encoding is a group of its own.
    pe = [w for w in model.pe.parameters() if w.requires_grad]
    rest = [w for name, w in model.named_parameters() if not name.startswith("pe.")]
    decay = min(4 / (args.lr * args.steps), 0.1 / args.lr)
    optimizer = torch.optim.AdamW(
        [{"params": [w for w in rest if w.ndim == 2], "peak": args.lr, "weight_decay": decay},
         {"params": [w for w in rest if w.ndim != 2], "peak": args.lr, "weight_decay": 0.0},
         *([{"params": pe, "peak": args.pe_lr, "weight_decay": 0.0}] if pe else [])], betas=(0.9, 0.999), fused=True)
    first, seconds, lines = 0, 0.0, [{
        "config": config, "args": vars(args), "parameters": n_params, "device": str(device), "bf16": bf16, "data": info,
        "compiled": compiled, "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}]
    if ckpt:
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        first, seconds = ckpt["step"], ckpt["seconds"]
        with contextlib.suppress(OSError):                          # lines past the checkpoint will come again
            lines = [v for v in map(json.loads, open(out / "log.jsonl")) if v.get("step", -1) < first]

    # What is computed: both functions are compiled once, and nothing else is.
    net = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    def objective(x, y):
        with autocast:
            logits, loss = net(x, y)
        return loss, (loss + 1e-4 * logits.float().logsumexp(-1).square().mean()) / args.accum      # the z-loss

    @torch.no_grad()
    def loss_of_tokens(x, y):
        with autocast:
            logits, _ = model(x)
        return F.cross_entropy(logits.float().transpose(1, 2), y, reduction="none")                 # (B, L)

    if compiled:
        objective, loss_of_tokens = torch.compile(objective), torch.compile(loss_of_tokens)

    def micro_steps(rows):
        """rows (n, L + 1) of the whole step -> this process's x, y of each micro-step, on the device."""
        for part in rows.split(args.batch):
            part = part[rank::world]
            part = part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous()

    # The same windows for all runs of a length, evenly over the validation text.
    windows = args.batch * max(1, args.eval_windows // args.batch)
    val = [a for a in val if len(a) > args.L]
    held_out = [(s % len(val), int(u * (len(val[s % len(val)]) - args.L))) for s, u in
                enumerate(np.linspace(0, 1, windows, endpoint=False))]

    def evaluate():
        """Validation loss by position in the window, (L,) nats."""
        rows = torch.from_numpy(np.stack([val[s][i : i + args.L + 1] for s, i in held_out]).astype(np.int64))
        loss = sum(loss_of_tokens(x, y).double().sum(0).cpu() for x, y in micro_steps(rows))
        if world > 1:
            dist.all_reduce(loss := loss.to(device))
        return loss.cpu() / windows

    def write(path, save):
        """Aside and renamed: whatever happens, the file of before or the new one is there, whole."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save(aside := path.with_name(path.name + ".part"))
            os.replace(aside, path)
        except (OSError, RuntimeError) as e:
            sys.exit(f"\ncould not write {path} ({e}): what was there before is kept; make room, then --resume")

    def keep(step):
        if rank == 0:
            saved = {k: v for k, v in vars(args).items() if k not in ("out", "resume", "device", "compile")}
            write(out / "log.jsonl", lambda f: f.write_text("".join(json.dumps(v) + "\n" for v in lines)))
            write(out / "ckpt.pt", lambda f: torch.save({
                "config": config, "args": saved, "data": info, "step": step, "seconds": seconds,
                "model": model.state_dict(), "optimizer": optimizer.state_dict()}, f))

    stop = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, frame: stop.append(number) if not stop else sys.exit(1))

    def say(text, passing=False):
        """A line on the terminal; a passing one gives way to the next, and is sparse where it cannot."""
        if rank == 0 and (sys.stdout.isatty() or not passing):
            print("\r" + text + "\x1b[K" if sys.stdout.isatty() else text, end="" if passing else "\n", flush=True)

    if rank == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = open(out / ".lock", "w")
        except OSError as e:
            ap.error(f"--out {out}: cannot be written ({e.strerror}); name another folder")
        with contextlib.suppress(ImportError):                      # Windows has no flock
            import fcntl
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                ap.error(f"--out {out}: another run is writing there; name another folder")
    say(f"{args.pe}, {n_params / 1e6:.2f}M parameters, {args.heads} heads, {config['layers']} layers, on {device} in "
        f"{'bf16' if bf16 else 'fp32'}{', compiled' * compiled}; {out}/")
    say(f"data {info['data']}: {info['files']} files, {info['bytes']:,} bytes, sha256 "
        f"{next(v for k, v in info.items() if k.startswith('sha256'))[:12]}, Python {platform.python_version()}; "
        f"{sum(map(len, train)):,} training tokens, {sum(map(len, val)):,} validation")

    tokens_a_step, since, train_loss, started, last = args.batch * args.accum * args.L, 0, 0.0, time.time(), seconds
    draw_batch = lambda step: list(micro_steps(batch(train, args.L, args.batch * args.accum, args.seed, step)))
    next_batch = draw_batch(first)
    for step in range(first, args.steps + 1):
        if world > 1:
            dist.all_reduce(flag := torch.tensor(float(bool(stop)), device=device))
            stop = stop or [0] * int(flag)
        if stop:
            keep(step)
            say(f"stopped at step {step}, saved; --resume goes on")
            break
        # evaluate, log, save
        if step % args.eval_every == 0 or step == args.steps:
            loss = evaluate()
            if not (math.isfinite(loss.mean()) and math.isfinite(train_loss)):
                sys.exit(f"the loss is not finite at step {step}: a lower --lr may help; the last checkpoint is kept")
            nats = loss.mean().item()
            bits = nats / math.log(2) / info["bytes_per_token"] if info["bytes_per_token"] else None
            lines.append({"step": step, "tokens": step * tokens_a_step, "train": float(train_loss) / since if since else None,
                          "val": nats, "bits_per_byte": bits, "lr": optimizer.param_groups[0]["lr"],
                          "seconds": seconds, "tokens_per_s": since * tokens_a_step / max(seconds - last, 1e-9)})
            if pe and hasattr(model.pe, "theta"):
                lines[-1]["theta"] = model.pe.theta().tolist()
            if step == args.steps:
                lines[-1]["by_position"] = [round(v, 4) for v in loss.tolist()]
            say(f"step {step:6}  train {lines[-1]['train'] or math.nan:7.4f}  val {nats:7.4f} nats a token"
                + f", {bits or math.nan:6.4f} bits a byte  {lines[-1]['tokens_per_s']:9,.0f} tokens/s  {seconds:6.0f} s")
            keep(step)
            since, train_loss, last = 0, 0.0, seconds
        if step == args.steps:
            break
        started = time.time()
        # one step
        warmup = max(1, args.steps // 50)
        turn = math.pi * max(0, step - warmup) / max(1, args.steps - warmup)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min((step + 1) / warmup, 0.55 + 0.45 * math.cos(turn))
        for i, (x, y) in enumerate(next_batch):
            with contextlib.nullcontext() if world == 1 or i == args.accum - 1 else net.no_sync():
                loss, minimised = objective(x, y)
                minimised.backward()
            train_loss += loss.detach() / args.accum
        next_batch = draw_batch(step + 1)                           # while the GPU works
        nn.utils.clip_grad_norm_(rest, args.clip)
        if pe:
            nn.utils.clip_grad_norm_(pe, args.pe_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        since += 1
        seconds += time.time() - started
        if since % 10 == 0:
            if not math.isfinite(train_loss):
                sys.exit(f"the loss is not finite at step {step}: a lower --lr may help; the last checkpoint is kept")
            rate = since / (seconds - last)
            left = (args.steps - step) / rate
            say(f"step {step + 1}/{args.steps}  loss {loss:.4f}  {rate * tokens_a_step:,.0f} tokens/s  "
                f"{left // 60:.0f}:{left % 60:02.0f} left", passing=True)

    if rank == 0:
        draw(lines, out / "loss.png")
        if step == args.steps:
            _, decode = tokenizer(info["tokenizer"])
            with autocast:
                sample = generate(model, torch.tensor([[eot]], device=device), 300)
            say(f"validation loss {nats:.4f} nats a token after {seconds:.0f} s of training. A sample:\n")
            say(decode(sample[0].tolist()))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
