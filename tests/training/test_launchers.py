"""Accelerate's launchers for notebooks; `accelerate launch` and torchrun start the recipes in tests/recipes."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import debug_launcher, notebook_launcher

from tests.support.programs import run_program
from tests.support.ranks import TIMEOUT, free_ports
from tests.support.tolerance import EXACT, float64
from tests.support.training import documents, loop

ROWS = documents(6, 20, 61, seed=0)


def run(file, ring_size):
    with float64():
        losses = loop(0, ring_size=ring_size, batch_size=2, rows=ROWS)["losses"]
    rank = dist.get_rank() if dist.is_initialized() else 0
    Path(f"{file}.{rank}").write_text(json.dumps(losses))


def test_launchers_of_notebooks(tmp_path):
    # A program of its own, that has neither threads nor an Accelerator yet.
    done = run_program(__file__, tmp_path, environment=dict(os.environ), timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    names = ("alone.0", "notebook.0", "notebook.1", "debug.0", "debug.1")
    alone, *of_ranks = [json.loads((tmp_path / name).read_text()) for name in names]
    for losses in of_ranks:
        assert losses == pytest.approx(alone, rel=EXACT)


if __name__ == "__main__":
    torch.set_num_threads(1)
    port = str(*free_ports(1))
    debug_launcher(run, (f"{sys.argv[1]}/debug", 2), num_processes=2)
    notebook_launcher(run, (f"{sys.argv[1]}/notebook", 2), num_processes=2, use_port=port)
    notebook_launcher(run, (f"{sys.argv[1]}/alone", 1), num_processes=1)
