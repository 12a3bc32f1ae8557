#!/usr/bin/env bash
# Text in a regime that two slow cores allow, by text.py: rates on seed 100, then every arm on paired seeds.
# $ bash experiments/text.sh      logs in experiments/logs/text/; then README's tables
cd "$(dirname "$0")/.." && mkdir -p out/text
export OMP_NUM_THREADS=1
{
    for rate in 2e-3 4e-3 8e-3; do echo "rope 100 --lr $rate"; done
    for rate in 1e-2 2e-2 4e-2; do echo "lerope 100 --pe_lr $rate"; done
    for seed in 0 1 2 3 4; do for arm in rope prope lerope; do echo "$arm $seed"; done; done
    for seed in 0 1 2; do
        for arm in nope prope-0.25 prope-reverse rope-500k lerope-linear rope-learned rope-longer on-as-rope \
            on-as-prope on-as-reverse rope-625 prope-625 lerope-625; do echo "$arm $seed"; done
    done
} | while read -r arm seed flag rate; do                # once.py would skip them too, but starts Python first
    log=experiments/logs/text/$arm-${flag:+${flag#--}-$rate-}s$seed.jsonl
    [ -f "$log" ] || echo $arm $seed $flag $rate        # unquoted: a blank at the end would join lines
done | xargs -P "${1:-2}" -L 1 sh -c 'IFS=-; log="out/text/$*.txt"
    python experiments/text.py "$@" > "$log" 2>&1 || echo "failed: see $log"' run
python experiments/report.py
