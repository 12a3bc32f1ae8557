#!/usr/bin/env bash
# Needles in a haystack: three encodings with three paired seeds, and nope once, by niah.py.
# $ bash experiments/niah.sh      logs in experiments/logs/niah/, heat maps in out/niah/; then README's table
cd "$(dirname "$0")/.." && mkdir -p out/niah
export OMP_NUM_THREADS=1
{
    for seed in 0 1 2; do for pe in lerope rope prope; do echo "$pe $seed"; done; done
    echo "nope 0"
} | while read -r pe seed; do                           # once.py would skip them too, but starts Python first
    [ -f "experiments/logs/niah/$pe-s$seed.jsonl" ] || echo "$pe $seed"
done | xargs -P 2 -L 1 sh -c 'IFS=-; log="out/niah/$*.txt"
    python experiments/niah.py "$@" > "$log" 2>&1 || echo "failed: see $log"' run
python experiments/report.py
