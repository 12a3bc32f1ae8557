"""
train.py: a tiny GPT that trains with any of the encodings, on one GPU or on a laptop's CPU.

    rho = pe(pos)                       once a forward pass
    q, k = rho(q), rho(k)               in every layer; the GPT knows nothing else of positions

`--heads h` is the one dial for size: width D = 64 h and 3h // 4 layers, so that h = 8, 16, 24, 32, 40 are the
52M ... 2.5B of the LeRoPE paper [1] at its vocabulary of 32k. Blocks and initialisation are Enoki's [2]:
pre-LayerNorm and linears without bias, GELU MLP of 4 D, untied head, z-loss. Two differences:

- QK-norm is RMS with one learned scale a head, where Enoki has a LayerNorm with a gain a channel. As rho is
  orthogonal it keeps an RMS, so the norm before or after rho is the same, and a learned basis of rho folds
  exactly into W_q and W_k. A gain a channel, or a centring, would break both.
- The encoding's parameters are a group of their own: own learning rate, own clip, no weight decay.

The batch of a step is a function of (seed, step) alone, and the encoding is made last, so runs of one seed
share their batches and all other initial weights: compare encodings in pairs.

[1] Karypis et al. 2026, LeRoPE, https://arxiv.org/abs/2607.10134
[2] Charles et al. 2025, https://arxiv.org/abs/2503.09799

$ python train.py --pe lerope          on the standard library's source, byte by byte; out/lerope-s0/
$ python train.py --pe ape --data rotate-d          on a task of tasks.py
$ torchrun --nproc_per_node=8 train.py --pe lerope --data fineweb:9 --heads 8 --L 1024 --batch 64
"""
import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ape import APE, GridAPE, TreeAPE
from data import source, tokenizer, tokenizers
from lerope import LeRoPE
from ndrope import BASES, NDRoPE
from prope import PRoPE
from rope import RoPE

encodings = {                                               # name -> constructor, from the model's config
    "rope": lambda c: RoPE(c["d"], c["base"], c["theta"]),
    "prope": lambda c: PRoPE(c["d"], c["p"], c["base"], c["reverse"]),
    "lerope": lambda c: LeRoPE(c["d"], c["base"], c["theta"]),
    "nope": lambda c: PRoPE(c["d"], p=0.0),
    "ape": lambda c: APE(c["d"], c["heads"], c["ape_init"], c["base"]),
    "ape-grid": lambda c: GridAPE(c["d"], c["heads"], c["ndim"], c["ape_init"], c["base"]),
    "ape-tree": lambda c: TreeAPE(c["d"], c["heads"]),
    "ndrope": lambda c: NDRoPE(c["d"], c["ndim"], base=c["base"],
                               directions=c["directions"], basis=c["basis"]),
}


# ------------------------------------------------------------------------------------------------------------
# the model

def attention(q, k, v, scale):
    """Causal attention, the logits times scale: q, k, v (B, H, L, d) -> (B, H, L, d)."""
    L = q.shape[2]
    if q.device.type != "cpu" or L > 1024:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    # On a CPU, compiled, the definition trains faster than the fused kernel, whose backward pass is slow.
    n = torch.arange(L)
    logits = torch.where(n <= n[:, None], q @ k.mT * scale, -math.inf)                  # (B, H, L, L)
    return logits.softmax(-1) @ v


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
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = (F.rms_norm(t.to(wide), t.shape[-1:]) for t in (q, k))
        return q * self.scale, k, v

    def forward(self, x, rho, temperature):
        B, L, D = x.shape
        q, k, v = self.heads(x)
        q, k = rho(q).to(v.dtype), rho(k).to(v.dtype)
        y = attention(q, k, v, temperature * (D // self.H) ** -0.5)
        x = x + self.out(y.transpose(1, 2).reshape(B, L, D))                    # (B, H, L, d) -> (B, L, D)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        """config: vocab, heads, layers, pe; d, a head's width, and what encodings take if not these"""
        super().__init__()
        self.config = config = {
            "d": 64, "base": 1e4, "p": 0.75, "reverse": False, "theta": None, "ape_init": "rope", "ndim": 1,
            "directions": "axial", "basis": "identity", **config}
        D, layers = config["heads"] * config["d"], config["layers"]
        self.embed = nn.Embedding(config["vocab"], D)
        self.blocks = nn.ModuleList(Block(D, config["heads"]) for _ in range(layers))
        self.norm = nn.LayerNorm(D, bias=False)
        self.head = nn.Linear(D, config["vocab"], bias=False)
        for name, w in self.named_parameters():
            if w.ndim == 2:                             # std 1/sqrt(fan in), into x 1/sqrt(2 layers) of it
                into_x = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(w, std=(w.shape[1] * (2 * layers if into_x else 1)) ** -0.5)
        # Last, so that what an encoding draws changes no other weight.
        self.pe = encodings[config["pe"]](config)

    def forward(self, idx, targets=None, pos=None):
        """idx (B, L), targets (B, L) with -1 where there is none, pos as the encoding takes it or arange(L)
        -> logits (B, L, V), and the mean cross entropy over the targets in nats, or None."""
        rho = self.pe(torch.arange(idx.shape[1], device=idx.device) if pos is None else pos)
        x = self.embed(idx)                                                         # (B, L, D)
        for block in self.blocks:
            x = block(x, rho, self.pe.temperature)
        logits = self.head(self.norm(x))                                            # (B, L, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)


def read_checkpoint(path):
    """A ckpt.pt of train.py, or its folder -> its dict. ValueError with a sentence if it is none."""
    path = Path(path, "ckpt.pt") if Path(path).is_dir() else Path(path)
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        ckpt["config"]["pe"], ckpt["model"]["embed.weight"]
        return ckpt
    except Exception:
        what = "is no checkpoint of train.py" if path.exists() else "does not exist"
        raise ValueError(f"{path} {what}: name the ckpt.pt of a run, or its folder") from None


def load(path):
    """The model of a ckpt.pt, or of its folder, on the CPU, in eval mode. ValueError if it is none."""
    ckpt = read_checkpoint(path)
    if ckpt["config"]["pe"] not in encodings:
        raise ValueError(f"{path} has pe = {ckpt['config']['pe']}: it is not in the encodings of train.py")
    model = GPT(ckpt["config"])
    model.load_state_dict(ckpt["model"])
    return model.eval()


@torch.no_grad()
def generate(model, idx, n, temperature=0.8, seed=0):
    """idx (1, L) and n more tokens, drawn one by one, each seeing the last config["L"] ones."""
    g = torch.Generator(idx.device).manual_seed(seed)
    for _ in range(n):
        logits, _ = model(idx[:, -model.config["L"]:])
        p = (logits[:, -1].float() / temperature).softmax(-1)
        idx = torch.cat((idx, torch.multinomial(p, 1, generator=g)), dim=1)
    return idx


# ------------------------------------------------------------------------------------------------------------
# the flags

def number(kind, low, high, like):
    """An argparse type: an int or float in [low, high], where no nan is, or a sentence and exit code 2."""
    def parse(text):
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text} is not in [{low}, {high}]; try {like}")
    return parse


def flags():
    count, seed, fraction = number(int, 1, 10**9, 16), number(int, 0, 2**63, 0), number(float, 0, 1, 0.75)
    rate, norm = number(float, 1e-9, 1, 1e-3), number(float, 1e-9, math.inf, 0.5)
    ap = argparse.ArgumentParser(usage="python train.py [--pe lerope] [flags; --help explains them]",
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    g = ap.add_argument_group("encoding")
    g.add_argument("--pe", default="rope", choices=encodings, help="the encoding")
    g.add_argument("--p", type=fraction, default=0.75, help="prope: fraction of bands kept, the fastest")
    g.add_argument("--reverse", action="store_true", help="prope: keep the slowest instead")
    g.add_argument("--base", type=number(float, 1.1, 1e30, 1e4), default=1e4, help="base of the frequencies")
    g.add_argument("--ape_init", default="rope", choices=("rope", "near_identity"), help="ape: A's start")
    g.add_argument("--directions", default="axial", choices=("axial", "mixed"), help="ndrope: its axes")
    g.add_argument("--basis", default="cayley", choices=BASES, help="ndrope: how its Q is learned")
    g.add_argument("--freeze_pe", action="store_true", help="the encoding's parameters keep their values")
    g.add_argument("--init_pe", metavar="LOG", help="rope, lerope: the frequencies that another run learned")
    g = ap.add_argument_group("model")
    g.add_argument("--heads", type=count, default=4, help="the dial: width 64 heads, 3 heads // 4 layers")
    g.add_argument("--layers", type=count, help="overrides the dial's")
    g.add_argument("--init", metavar="CKPT", help="start from the weights of another run, of any encoding")
    g = ap.add_argument_group("data")
    g.add_argument("--data", default="python", help="python (the standard library's source), a text file or "
                   "folder, 'path/*_train_*.bin', fineweb:N (shards of 100M tokens), or a task of tasks.py")
    g.add_argument("--tokenizer", choices=tokenizers, help="if not given, bytes for text and gpt2 for .bin")
    g.add_argument("--L", type=count, default=256, help="length of a window; a task has its own")
    g.add_argument("--needles", type=fraction, default=0.0, help="share of windows with needles in them")
    g = ap.add_argument_group("optimisation")
    g.add_argument("--steps", type=count, default=1600, help="optimiser steps")
    g.add_argument("--batch", type=count, default=16, help="windows a micro-step, over all processes")
    g.add_argument("--accum", type=count, default=1, help="micro-steps a step")
    g.add_argument("--lr", type=rate, default=1e-3, help="peak rate: 2 %% warm-up, then a cosine to a tenth")
    g.add_argument("--pe_lr", type=rate, default=2e-2, help="the same for the encoding's parameters")
    g.add_argument("--clip", type=norm, default=0.5, help="largest norm of the gradient; inf turns it off")
    g.add_argument("--pe_clip", type=norm, default=0.5, help="the same for the encoding's parameters")
    g.add_argument("--seed", type=seed, default=0, help="of the initial weights and the batches")
    g = ap.add_argument_group("run")
    g.add_argument("--out", help="folder of the run; out/<pe>-s<seed> if not given")
    g.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    g.add_argument("--eval_every", type=count, default=200, help="steps between evaluations and checkpoints")
    g.add_argument("--eval_windows", type=count, default=512, help="validation rows of an evaluation")
    g.add_argument("--device", help="cuda, mps or cpu; if not given, the first of them that is there")
    g.add_argument("--dtype", choices=("bf16", "fp32"), help="if not given, bf16 where there is hardware")
    g.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile")
    return ap


def spectrum(path):
    """The learned frequencies of another run, from its log.jsonl, or its folder: (d/2,) radians a token."""
    path = Path(path, "log.jsonl") if Path(path).is_dir() else path
    try:
        thetas = [v["theta"] for v in map(json.loads, open(path)) if "theta" in v]
        return torch.tensor(thetas[-1], dtype=torch.float64).flatten()
    except (OSError, ValueError, IndexError, TypeError):
        raise ValueError(f"{path} is no log of a run with a learned encoding: name its log.jsonl") from None


def has_bf16(device):
    """Whether cuda, mps or cpu multiplies bf16 in hardware here."""
    units = [getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("amx_tile", "avx512_bf16")]
    return any(units) if device == "cpu" else device == "cuda" and torch.cuda.is_bf16_supported(False)


def plot(lines, path):
    from matplotlib.figure import Figure
    ax = Figure(figsize=(6, 3.4), layout="constrained").subplots()
    for key in ("train", "val"):
        ax.plot(*zip(*[(v["step"], v[key]) for v in lines if v.get(key)] or [(0, 0)]), ".-", label=key)
    ax.set(xlabel="step", ylabel="loss, nats a token", title=path.parent.name)
    ax.legend()
    ax.figure.savefig(path, dpi=100)


# ------------------------------------------------------------------------------------------------------------
# the run

def main():
    ap = flags()
    args = ap.parse_args()
    name = args.pe + f"-p{args.p:g}" * (args.pe == "prope" and args.p != 0.75) + "-reverse" * args.reverse
    out = Path(args.out or f"out/{name}" + f"-b{args.base:g}" * (args.base != 10_000) + f"-s{args.seed}")

    # The folder: new, or one to go on in with the flags that it was started with.
    ckpt = None
    if args.resume:
        try:
            ckpt = read_checkpoint(out)
        except ValueError as e:
            ap.error(f"--resume: {e}; to start a run there, leave --resume out")
        ap.set_defaults(**ckpt["args"])
        args = ap.parse_args()
        for name, was in ckpt["args"].items():
            if getattr(args, name) != was:
                ap.error(f"--{name} is {getattr(args, name)}: the run in {out} has {was}; leave it out, or "
                         "start another run with --out")
    elif (out / "ckpt.pt").exists():
        ap.error(f"--out {out}: a run is there; go on with it by --resume, or name another folder with --out")
    for flag, pes in {"p": "prope", "reverse": "prope", "init_pe": "rope lerope", "ape_init": "ape ape-grid",
                      "directions": "ndrope", "basis": "ndrope"}.items():
        if args.pe not in pes.split() and getattr(args, flag) != ap.get_default(flag):
            ap.error(f"--{flag} {getattr(args, flag)}: with --pe {args.pe} it does nothing; it is for {pes}")

    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))     # torchrun's
    if rank == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = open(out / ".lock", "w")
            with contextlib.suppress(ImportError):          # Windows has no such lock
                import fcntl
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ap.error(f"--out {out}: another run is writing there; name another folder")
        except OSError as e:
            ap.error(f"--out {out}: cannot be written ({e.strerror}); name another folder")

    # The device.
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    local = ":" + os.environ["LOCAL_RANK"] if world > 1 and (args.device or best) == "cuda" else ""
    try:
        device = torch.zeros(1, device=(args.device or best) + local).device
    except (RuntimeError, AssertionError, NotImplementedError):
        ap.error(f"--device {args.device}: not on this machine; {best} is")
    if args.batch % world:
        ap.error(f"--batch {args.batch}: it must be a multiple of the {world} processes")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_float32_matmul_precision("high")
    bf16 = args.dtype == "bf16" if args.dtype else has_bf16(device.type)
    if compiled := args.compile:
        try:
            torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
        except Exception:
            print("torch.compile finds no compiler here: running without it, slower")
            compiled = False

    # The data: a function step -> its rows, and the validation rows.
    rows, n = args.batch * args.accum, args.batch * max(1, args.eval_windows // args.batch)
    try:
        draw, held_out, info = source(args, rows, n)
    except (ValueError, OSError) as e:
        ap.error(f"--data {args.data}: {e}")
    if ckpt and ckpt["data"] != info:
        ap.error(f"--data {args.data}: it has changed since the run in {out} began; use another --out")

    # The model, made on the CPU, so that a seed means the same weights on every device.
    try:
        theta = RoPE(64, theta=spectrum(args.init_pe)).given if args.init_pe and not ckpt else None
        other = read_checkpoint(args.init) if args.init and not ckpt else None
    except ValueError as e:
        ap.error(f"--init or --init_pe: {e}")
    config = ckpt["config"] if ckpt else {
        "layers": args.layers or max(1, 3 * args.heads // 4), "d": 64, "theta": theta, **{
            k: (vars(args) | info)[k] for k in ("pe", "heads", "base", "p", "reverse", "ape_init", "ndim",
                                                "directions", "basis", "vocab", "L", "data", "tokenizer")}}
    torch.manual_seed(args.seed)
    model = GPT(config)
    if other:
        for key in (k for k in ("vocab", "heads", "layers", "d") if other["config"][k] != config[k]):
            ap.error(f"--init {args.init}: its {key} is {other['config'][key]}, here it is {config[key]}")
        same = other["config"]["pe"] == args.pe
        weights = {name: w for name, w in other["model"].items() if same or not name.startswith("pe.")}
        model.load_state_dict(weights, strict=same)
    model.pe.requires_grad_(not args.freeze_pe)
    model.to(device)
    parameters = sum(w.numel() for w in model.parameters())

    # The optimiser: matrices decay, gains do not, and the encoding is a group of its own.
    pe = [w for w in model.pe.parameters() if w.requires_grad]
    rest = [w for name, w in model.named_parameters() if not name.startswith("pe.")]
    decay = min(4 / (args.lr * args.steps), 0.1 / args.lr)
    groups = [{"params": [w for w in rest if w.ndim == 2], "peak": args.lr, "weight_decay": decay},
              {"params": [w for w in rest if w.ndim != 2], "peak": args.lr, "weight_decay": 0.0},
              {"params": pe, "peak": args.pe_lr, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.999), fused=True)
    first, seconds = (ckpt["step"], ckpt["seconds"]) if ckpt else (0, 0.0)
    lines = [{"config": config, "args": vars(args), "parameters": parameters, "data": info,
              "device": str(device), "bf16": bf16, "compiled": compiled, "torch": torch.__version__}]
    if ckpt:
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        with contextlib.suppress(OSError, ValueError):      # lines past the checkpoint will come again
            last = first - (first % args.eval_every > 0 and first < args.steps)
            lines = [v for v in map(json.loads, open(out / "log.jsonl")) if v.get("step", -1) <= last]

    # What is computed: two functions, each compiled once.
    net = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    def objective(share, x, y, pos=None):
        with autocast:
            logits, loss = net(x, y, pos)
        z_loss = 1e-4 * logits.float().logsumexp(-1).square().mean()
        return loss * share, (loss + z_loss) * share

    @torch.no_grad()
    def token_losses(x, y, pos=None):
        with autocast:
            logits, _ = model(x, pos=pos)
        return F.cross_entropy(logits.float().mT, y, reduction="none", ignore_index=-1)             # (B, L)

    if compiled:
        objective, token_losses = torch.compile(objective), torch.compile(token_losses)

    def micro_steps(rows):
        """x, y and maybe pos (n, L, ..) of a step -> this process's of each micro-step, after their share."""
        targets = (rows[1] >= 0).sum()
        for part in zip(*(t.split(args.batch * info["L"] // t.shape[1]) for t in rows)):
            part = [t[rank::world].contiguous() for t in part]
            part.insert(0, (part[1] >= 0).sum() * world / targets)
            part = [t.pin_memory() for t in part] if device.type == "cuda" else part
            yield [t.to(device, non_blocking=True) for t in part]

    def evaluate():
        """Validation loss, nats: the mean over all targets, and by position in the row, (L,)."""
        loss = sum(token_losses(*part).sum(0) for _, *part in micro_steps(held_out))
        if world > 1:
            dist.all_reduce(loss)
        loss, there = loss.cpu().double(), (held_out[1] >= 0).sum(0)
        return (loss.sum() / there.sum()).item(), (loss / there).tolist()

    def write(path, save):
        """Aside and renamed: whatever happens, the file of before or the new one is there, whole."""
        aside = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save(aside)
            os.replace(aside, path)
        except (OSError, RuntimeError) as e:
            with contextlib.suppress(OSError):
                aside.unlink()
            sys.exit(f"\n{path} cannot be written ({e}): what was there is kept; make room, then --resume")

    def keep(step):
        if rank == 0:
            flags = {k: v for k, v in vars(args).items() if k not in ("out", "resume", "device", "compile")}
            write(out / "log.jsonl", lambda f: f.write_text("".join(json.dumps(v) + "\n" for v in lines)))
            write(out / "ckpt.pt", lambda f: torch.save({
                "config": config, "args": flags, "data": info, "step": step, "seconds": seconds,
                "model": model.state_dict(), "optimizer": optimizer.state_dict()}, f))

    def say(text, end="\n"):
        if rank == 0:
            print(f"\r{text}\x1b[K" if terminal else text, end=end if terminal else "\n", flush=True)

    def finite(loss):
        if not math.isfinite(loss):
            sys.exit(f"\nthe loss is not finite at step {step}: lower --lr; the last checkpoint is kept")

    # The loop: evaluate, log, save; one step.
    asked, terminal = [], sys.stdout.isatty()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda name, frame: sys.exit(1) if asked else asked.append(name))
    say(f"{args.pe}: {parameters / 1e6:.2f}M parameters, {args.heads} heads, {config['layers']} layers, "
        f"on {device} in {'bf16' if bf16 else 'fp32'}{', compiled' * compiled}, to {out}/")
    say(f"{args.data}: {info['says']}; Python {sys.version.split()[0]}")
    warmup, tokens, is_text = max(1, args.steps // 50), rows * info["L"], info["tokenizer"] in tokenizers
    batches = lambda step: list(micro_steps(draw(step)))
    ready, total, since, last = batches(first), 0.0, 0, seconds
    for step in range(first, args.steps + 1):
        stop, done = bool(asked), step == args.steps
        if world > 1:                                       # all processes stop at the same step
            dist.all_reduce(flag := torch.tensor(float(stop), device=device))
            stop = bool(flag)
        if (stop or done or step % args.eval_every == 0) and lines[-1].get("step") != step:
            if world > 1 and since:
                dist.all_reduce(total)
            total, (nats, by_position) = total / world, evaluate()
            finite(total + nats)
            train_loss, rate = float(total) / since if since else None, since * tokens / (seconds - last or 1)
            bits = nats / math.log(2) / info["bytes_per_token"] if info["bytes_per_token"] else None
            lines.append({"step": step, "tokens": step * tokens, "train": train_loss, "val": nats,
                          "bits_per_byte": bits, "lr": optimizer.param_groups[0]["lr"] if step else 0.0,
                          "tokens_per_s": rate, "seconds": seconds,
                          "by_position": [round(v, 4) for v in by_position] if is_text else None})
            if pe and hasattr(model.pe, "theta"):
                lines[-1]["theta"] = model.pe.theta().tolist()
            say(f"step {step:5}  " + (f"train {train_loss:.4f}  " if since else "") + f"val {nats:.4f} nats "
                + ("a token" if bits is None else f"a token, {bits:.4f} bits a byte")
                + (f", {rate:,.0f} tokens/s, {seconds:.0f} s" if since else ""))
            keep(step)
            total, since, last = 0.0, 0, seconds
        if stop or done:
            break

        started, turn = time.time(), math.pi * max(0, step - warmup) / max(1, args.steps - warmup)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min((step + 1) / warmup, 0.55 + 0.45 * math.cos(turn))
        for i, part in enumerate(ready):
            with contextlib.nullcontext() if world == 1 or i == len(ready) - 1 else net.no_sync():
                loss, minimised = objective(*part)
                minimised.backward()
            total += loss.detach()
        ready = batches(step + 1)                           # while a GPU still works on this one
        nn.utils.clip_grad_norm_(rest, args.clip)
        if pe:
            nn.utils.clip_grad_norm_(pe, args.pe_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        since, seconds = since + 1, seconds + time.time() - started
        finite(total if since % 10 == 0 else 0)             # each look makes a GPU wait
        if since % (10 if terminal else 100) == 0:          # in place on a terminal, sparse in a file
            rate = since / (seconds - last)
            say(f"step {step + 1}/{args.steps}  loss {total / since:.4f}  {rate * tokens:,.0f} tokens/s  "
                f"{(args.steps - step - 1) / rate:.0f} s left", end="")

    if rank == 0:
        plot(lines, out / "loss.png")
        if not done:
            print(f"stopped at step {step} and saved; --resume goes on")
        elif is_text:                                       # what the model writes
            with autocast:
                text = generate(model, torch.tensor([[info["eot"]]], device=device), 300)[0].tolist()
            with contextlib.suppress(ValueError):           # without GPT-2's vocabulary, its ids
                text = tokenizer(info["tokenizer"])[1](text)
            nats = lines[-1]["val"]                         # also if nothing was left to do
            print(f"validation loss {nats:.4f} nats a token after {seconds:.0f} s; a sample:\n\n{text}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
