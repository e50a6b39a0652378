"""Small tensors on one thread: more threads only wait for each other, above all on a busy machine."""

import torch

torch.set_num_threads(1)
