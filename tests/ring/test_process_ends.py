"""No process ends by a signal: torch aborts one whose thread of gloo drops a tensor while Python ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import TIMEOUT


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "launches", "at_once", "processes"), [("slow", 16, 1, 16), ("rings", 200, 6, 800)])
def test_processes_end_without_a_signal(kind, launches, at_once, processes):
    command = [sys.executable, "-m", "tests.support.process_ends", kind, str(launches), str(at_once)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": Path(__file__).parents[2], "env": environment, "timeout": max(TIMEOUT, 5 * launches)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, **options)
    assert done.stdout == f"{{0: {processes}}}\n", done.stderr
