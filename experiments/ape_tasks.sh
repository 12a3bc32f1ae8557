#!/usr/bin/env bash
# The table of the APE authors' reply, and tree-APE, by ape_tasks.py: all tasks with one seed, five of
# them with three; two runs of one thread at a time, 1 to 2 minutes each. Logs: experiments/logs/ape_tasks/
# The rates of what is learned, in ARMS there, are the best of those below on a seed of their own (100).
# $ bash experiments/ape_tasks.sh      prints the table at its end
cd "$(dirname "$0")/.." && mkdir -p out/ape_tasks
export OMP_NUM_THREADS=1
sequence="ape-init-train rope-train ape-frozen ape-train rope"
{
    for rate in 1e-3 4e-3 1e-2 3e-2 1e-1; do
        for arm in ape-init-train ape-train ape-tree; do echo "$arm rotate-d 100 --pe_lr $rate"; done
    done
    for rate in 2.5e-4 1e-3 4e-3; do echo "rope-train rotate-d 100 --pe_lr $rate"; done
    for task in rotate-d reverse tree-copy-d c3-d op-d; do for seed in 0 1 2; do
        for arm in $sequence ape-tree; do [ $task-$arm = reverse-ape-tree ] || echo "$arm $task $seed"; done
    done; done
    for task in copy repeat tree-copy-b rotate-b c3-b op-b; do
        for arm in $sequence; do echo "$arm $task 0"; done
        case $task in *-b) echo "ape-tree $task 0";; esac
    done
} | xargs -P 2 -L 1 sh -c 'IFS=-; log="out/ape_tasks/$*.txt"
    python experiments/ape_tasks.py "$@" > "$log" 2>&1 || echo "failed: see $log"' run
python experiments/ape_tasks.py
