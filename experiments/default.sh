#!/usr/bin/env bash
# The four default runs of the README, seed 0. About 8 minutes a run on two cores.
# $ bash experiments/default.sh      runs in out/, logs in experiments/logs/default/
cd "$(dirname "$0")/.." && mkdir -p experiments/logs/default
for pe in rope prope nope lerope; do                # a run whose log is there is not repeated
    log=experiments/logs/default/$pe.jsonl
    [ -f "$log" ] || { python train.py --pe $pe && cp "out/$pe-s0/log.jsonl" "$log"; }
done
for log in experiments/logs/default/*.jsonl; do
    echo "$(basename "$log" .jsonl)  $(tail -n 1 "$log" |
        grep -oE '"(val|bits_per_byte|seconds)": [0-9.]*' | tr '\n' ' ')"
done
