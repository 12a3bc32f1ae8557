#!/usr/bin/env bash
# Positions of two dimensions or of one on the task grid: the rates on seed 100, then 8 arms x 3 seeds. Two
# runs of one thread at a time, 2 to 4 minutes each: about 50 minutes on two cores.
# $ bash experiments/grid.sh      logs in experiments/logs/grid/; then README's table and figures/grid.png
cd "$(dirname "$0")/.." && mkdir -p out/grid
export OMP_NUM_THREADS=1
{
    for lr in 1e-3 2e-3 4e-3; do echo "axial 100 --lr $lr"; done
    for arm in mixed exp lie; do
        for pe_lr in 1e-3 3e-3 1e-2; do echo "$arm 100 --pe_lr $pe_lr"; done
    done
    for seed in 0 1 2; do
        for arm in lie lie-slow mixed exp cayley givens axial rope; do echo "$arm $seed"; done
    done
} | xargs -P 2 -L 1 sh -c 'IFS=-; log="out/grid/$*.txt"
    python experiments/grid.py "$@" > "$log" 2>&1 || echo "failed: see $log"' run
python experiments/report.py
