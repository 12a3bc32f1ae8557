"""
One run of the table of the APE authors' reply: 11 tasks, 5 variants with sequence positions, and tree-APE.

$ python experiments/ape_tasks.py ape-init-train rotate-d 0      experiments/ape_tasks.sh has all

The metric is the teacher-forced perplexity of the target on 1,024 held-out samples. No arm has a factor that
weakens the logits with the distance, which the authors' code gives to APE alone.

Rates were chosen on seed 100, by the loss there: A's, started as RoPE, for each of five tasks (a task in the
other order, and copy and repeat, take their nearest relative's), those of rope-train and ape-tree on rotate-d
alone. LOG.md has the losses.
"""
import sys

import torch

from once import once, train
from rope import RoPE

COMMON = ("--heads 2 --layers 2 --batch 16 --steps 600 --lr 2e-3 --eval_every 600 --eval_windows 1024 "
          "--dtype fp32 --no-compile")                      # compiling takes what it saves in 600 steps
ARMS = {                                                    # in the order that the reply found
    "ape-init-train": "--pe ape",
    "rope-train": "--pe rope-train --pe_lr 1e-3",
    "ape-frozen": "--pe ape --ape_init near_identity --freeze_pe",
    "ape-train": "--pe ape --ape_init near_identity",
    "rope": "--pe rope",
    "ape-tree": "--pe ape-tree --pe_lr 1e-2",
}
A_RATES = {"copy": "1e-3", "repeat": "1e-3", "reverse": "1e-3", "tree-copy": "4e-3"}     # others: 3e-2


class NaiveRoPE(RoPE):
    """theta itself is the parameter: a step of one size for frequencies powers of ten apart."""
    def __init__(self, d, base):
        super().__init__(d, base)
        self.frequencies = torch.nn.Parameter(super().theta().float())

    def theta(self, device=None):
        return self.frequencies.to(device, torch.float64)


if __name__ == "__main__":
    arm, task, seed, *flags = sys.argv[1:]
    rate = A_RATES.get(task.removesuffix("-b").removesuffix("-d"), "3e-2")
    train.encodings["rope-train"] = lambda c: NaiveRoPE(c["d"], c["base"])
    once("-".join([f"ape_tasks/{task}", arm, *flags[1::2], f"s{seed}"]),
         [*COMMON.split(), *(["--pe_lr", rate] * arm.startswith("ape")), *ARMS[arm].split(), "--data", task,
          "--seed", seed, *flags])
