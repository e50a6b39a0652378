"""Small tensors on one thread: more threads only wait for each other, above all on a busy machine. Nothing is compiled."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
# An operator that were compiled, or loaded because another run compiled it, would fail.
os.environ.update(CC="no-compiler", CXX="no-compiler", TORCH_EXTENSIONS_DIR=os.path.join(os.devnull, "extensions"))

torch.set_num_threads(1)
