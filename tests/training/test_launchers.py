"""Accelerate's launchers for notebooks; `accelerate launch` and torchrun start the recipes in tests/recipes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import debug_launcher, notebook_launcher

import hf_ring_attention as ra
from tests.support.training import documents, loop

ROWS = documents(6, 20, 61, seed=0)


def run(ring_size, folder):
    losses = loop(0, ring_size=ring_size, batch_size=2, rows=ROWS, collator=ra.PaddingCollator())["losses"]
    (folder / f"{ring_size}-{os.environ.get('LOCAL_RANK', 0)}.json").write_text(json.dumps(losses))


def test_launchers_of_notebooks(tmp_path):
    # A program of its own, that has neither threads nor an Accelerator yet.
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    done = subprocess.run(command, timeout=100, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "1 processes cannot form rings of 2" in done.stdout
    alone, *of_ranks = [json.loads((tmp_path / name).read_text()) for name in ("1-0.json", "2-0.json", "2-1.json")]
    for losses in of_ranks:
        assert losses == pytest.approx(alone, rel=1e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = (2, Path(sys.argv[1]))
    debug_launcher(run, arguments, num_processes=2)
    try:
        notebook_launcher(run, arguments, num_processes=2)
    except ValueError as error:  # without GPUs it starts a single process
        print(error)
    notebook_launcher(run, (1, Path(sys.argv[1])), num_processes=1)
