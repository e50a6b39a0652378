"""Long rows: 65536 tokens over four processes, one training step in less than 2 GiB each."""

import re
from pathlib import Path

import torch

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.training import loop

TOKENS = 65536


def step(rank):
    ids = torch.randint(1, 97, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    row = {"input_ids": ids, "labels": ids}
    figures = loop(rank, ring_size=4, rows=[row], steps=1, pattern=ra.Pattern.pyramid(512, levels=3), shuffle=False)
    # Not ru_maxrss, which begins at the value of the parent process.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return figures["losses"][0], int(peak[1]) * 1024


def test_a_step_of_65536_tokens_fits():
    for loss, peak in run_ranks(step, 4):
        assert 3 < loss < 7
        assert peak < 2 * 2**30, f"{peak / 2**30:.2f} GiB"
        print(f"peak {peak / 2**30:.2f} GiB")
