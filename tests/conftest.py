"""Small tensors on one thread: more threads only wait for each other, above all on a busy machine."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")

torch.set_num_threads(1)
