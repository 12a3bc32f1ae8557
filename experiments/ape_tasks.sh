#!/usr/bin/env bash
# The table of the APE authors' reply, and tree-APE, by ape_tasks.py: the rates on seed 100, five tasks with
# three seeds, six with one; two runs of one thread at a time, 1 to 2 minutes each, about 100 minutes in all.
# $ bash experiments/ape_tasks.sh      logs in experiments/logs/ape_tasks/; then README's table
cd "$(dirname "$0")/.." && mkdir -p out/ape_tasks
export OMP_NUM_THREADS=1
sequence="ape-init-train ape-train rope-train ape-frozen rope"
{
    for rate in 1e-3 4e-3 1e-2 3e-2 1e-1; do
        for arm in ape-init-train ape-train ape-tree; do echo "$arm rotate-d 100 --pe_lr $rate"; done
    done
    for rate in 1e-3 4e-3 1e-2 3e-2; do
        for task in reverse tree-copy-d c3-d op-d; do echo "ape-init-train $task 100 --pe_lr $rate"; done
    done
    for rate in 2.5e-4 1e-3 4e-3; do echo "rope-train rotate-d 100 --pe_lr $rate"; done
    for task in rotate-d tree-copy-d reverse c3-d op-d; do for seed in 0 1 2; do
        for arm in $sequence ape-tree; do [ $task-$arm = reverse-ape-tree ] || echo "$arm $task $seed"; done
    done; done
    for task in rotate-b c3-b tree-copy-b repeat copy op-b; do
        for arm in $sequence; do echo "$arm $task 0"; done
        case $task in *-b) echo "ape-tree $task 0";; esac
    done
} | while read -r arm task seed flag rate; do           # once.py would skip them too, but starts Python first
    log=experiments/logs/ape_tasks/$task-$arm-${rate:+$rate-}s$seed.jsonl
    [ -f "$log" ] || echo $arm $task $seed $flag $rate     # unquoted: a blank at the end would join lines
done | xargs -P 2 -L 1 sh -c 'IFS=-; log="out/ape_tasks/$*.txt"
    python experiments/ape_tasks.py "$@" > "$log" 2>&1 || echo "failed: see $log"' run
python experiments/report.py
