"""One thread: tensors this small take ten times as long where threads wait for each other."""
import torch

torch.set_num_threads(1)
