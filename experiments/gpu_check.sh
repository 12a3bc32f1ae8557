#!/usr/bin/env bash
# What a CPU cannot show: that a CUDA GPU computes the same, that each encoding compiles whole and once there,
# and what each costs. One GPU, no network, under 8 minutes. Prints to the terminal and to
# experiments/gpu_check.txt; the exit code is 1 if a line says FAILED.
# $ bash experiments/gpu_check.sh
# $ DEVICE=cpu bash experiments/gpu_check.sh      the script itself, at toy size without a GPU; leaves no file
set -uo pipefail
cd "$(dirname "$0")/.."
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
export DEVICE=${DEVICE:-cuda} small=8 L=1024 batch=16
large=12 steps=300 rounds=20 out=experiments/gpu_check.txt
if [ "$DEVICE" = cpu ]; then small=1 L=32 batch=2 large=2 steps=20 rounds=2 out=$runs/out.txt; fi
python -c "import sys, torch; sys.exit(not getattr(torch, '$DEVICE').is_available())" 2> /dev/null || {
    echo "torch finds no $DEVICE here; DEVICE=cpu tries the script without a GPU" >&2; exit 2; }
encodings=$(python -c "import train; print(*(pe for pe in train.encodings if pe[:4] != 'ape-'))")   # of text
limit() { timeout $((SECONDS < 465 ? 470 - SECONDS : 5)) "$@"; }           # what is left of the 8 minutes

logits() {
    limit python - <<'EOF'
# The same weights and tokens on the CPU in float32 and on the device, far from position 0, where float32
# angles would be up to 0.004 off; what an encoding learns is moved off its start.
import copy, os
import torch
from train import GPT, encodings
device, H, L = os.environ["DEVICE"], int(os.environ["small"]), int(os.environ["L"])
torch.set_float32_matmul_precision("highest")
print("logits      |device - CPU| / |CPU|: float32, to be below 1e-4; bfloat16, to be below 5e-2")
for pe in (pe for pe in encodings if pe[:4] != "ape-"):
    torch.manual_seed(0)
    model = GPT({"vocab": 257, "heads": H, "layers": max(1, 3 * H // 4), "pe": pe}).requires_grad_(False)
    for w in model.pe.parameters():
        w.add_(0.1 * torch.randn_like(w))
    idx, pos, errors = torch.randint(257, (2, L)), 100_000 + torch.arange(L), []
    expected, _ = model(idx, pos=pos)
    there = copy.deepcopy(model).to(device)
    for bf16 in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            logits, _ = there(idx.to(device), pos=pos.to(device))
        errors.append(((logits.float().cpu() - expected).norm() / expected.norm()).item())
    verdict = "ok" if errors[0] < 1e-4 and errors[1] < 5e-2 else "FAILED"
    print(f"{pe:10} {errors[0]:10.1e} {errors[1]:10.1e}   {verdict}")
EOF
}

run() {                                             # encoding, heads: training, into a file of that name
    local log=$runs/$1-$2.txt
    limit env TORCH_LOGS=graph_breaks,recompiles python train.py --pe "$1" --heads "$2" --L $L \
        --batch $batch --steps $steps --eval_every $((steps / 2)) --eval_windows 128 --device "$DEVICE" \
        --out "$runs/$1-$2" > "$log" 2>&1 || echo "FAILED with exit code $?" >> "$log"
}

report() {                                          # encoding, heads: what that file says
    local log=$runs/$1-$2.txt noise='\[__(graph_breaks|recompiles)\]'
    local found verdict=FAILED; found=$(grep -acE "$noise" "$log")
    [ "$found" = 0 ] && verdict=ok
    echo "$1, $2 heads: $found lines on graph breaks or recompiles: $verdict"
    grep -aE '^step .* val ' "$log" || echo "FAILED: no evaluation"
    grep -aE -A 8 "$noise" "$log" | head -n 40
    if grep -aq '^FAILED' "$log"; then tail -n 20 "$log"; fi
}

rotation() {
    limit env TORCHINDUCTOR_FX_GRAPH_CACHE=0 TORCHINDUCTOR_AUTOGRAD_CACHE=0 python - <<'EOF'
# Does a compiled step make cos and sin, in float64, once, or again in each kernel that rotates? Two answers:
# the kernels of its generated code that compute a cosine (LeRoPE's backward pass has one more), and its time
# beside the same step with the identity for rho. Two layers. Inductor's caches are off: they give no code.
import os, re, statistics
import torch
import train
from bench import in_rounds, ratio, training_step
from torch._inductor.utils import run_and_get_code
device, H, L, B = os.environ["DEVICE"], *(int(os.environ[name]) for name in ("small", "L", "batch"))

class Identity(torch.nn.Module):
    temperature = 1.0
    def forward(self, pos):
        return lambda x: x

train.encodings["identity"] = lambda c: Identity()
x, y = torch.randint(257, (2, B, L), device=device)
torch.set_float32_matmul_precision("high")
made = {pe: training_step({"vocab": 257, "heads": H, "layers": 2, "pe": pe}, x, y, "bf16", True)[0]
        for pe in ("identity", "rope", "lerope")}
for pe, step in made.items():
    _, codes = run_and_get_code(step)
    kernels = [k for code in codes for k in re.split(r"async_compile\.(?:triton|cpp\w*)\(", code)[1:]]
    cosines = sum(bool(re.search(r"\bcos\(", k)) for k in kernels)
    print(f"{pe:10} {cosines} of {len(kernels)} kernels, forward and backward, compute a cosine")
ms = in_rounds(made, 20 if device == "cuda" else 2, device)
for pe in ms:
    t = statistics.median(a - b for a, b in zip(ms[pe], ms["identity"])) / 2
    print(f"{pe:10} {statistics.median(ms[pe]):8.3f} ms a step, {t:6.3f} ms a layer more than the identity, "
          f"ratio {ratio(ms[pe], ms['identity'])}")
EOF
}

bench() { limit python bench.py --device "$DEVICE" --heads "$1" --L $L --batch $batch --rounds $rounds; }

everything() {
    date -u +%F
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null
    python -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
    echo; logits || echo "FAILED: logits"
    echo; for pe in $encodings; do run "$pe" $small & done; wait         # all at once: bench.py has the speed
    for pe in rope lerope; do run $pe $large & done; wait
    for pe in $encodings; do report "$pe" $small; done
    for pe in rope lerope; do report $pe $large; done
    echo; bench $small || echo "FAILED: bench.py"
    echo; rotation || echo "FAILED: the cost of rho"
    echo; bench $large || echo "FAILED: bench.py --heads $large, or the time was up"
    echo; echo "$SECONDS s"
}

everything 2>&1 | tee "$out"
! grep -aq FAILED "$out"
