#!/usr/bin/env bash
# The learning rates of the default run, on a seed of their own (100), at half its steps: 4 minutes a run.
# $ bash experiments/sweep.sh        logs in experiments/logs/sweep/
cd "$(dirname "$0")/.." && mkdir -p experiments/logs/sweep
run() {                                             # name, flags: a run whose log is there is not repeated
    local name=$1 log=experiments/logs/sweep/$1.jsonl; shift
    [ -f "$log" ] || { python train.py --seed 100 --steps 800 --out "out/sweep-$name" "$@" &&
                       cp "out/sweep-$name/log.jsonl" "$log"; }
}
for lr in 5e-4 1e-3 2e-3; do run "rope-lr$lr" --pe rope --lr $lr; done
for pe_lr in 3e-3 1e-2 3e-2; do run "lerope-pe_lr$pe_lr" --pe lerope --pe_lr $pe_lr; done
for log in experiments/logs/sweep/*.jsonl; do
    echo "$(basename "$log" .jsonl)  $(tail -n 1 "$log" | grep -o '"val": [0-9.]*')"
done
