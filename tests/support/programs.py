"""Runs a script as a process or as several ranks, forked from the process that imported the libraries already."""

import os
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks import TIMEOUT, begin_as_a_program, forked, free_port

ROOT = Path(__file__).parents[2]


@dataclass
class Ended:
    """What became of a program: the highest status of its ranks, and all that they printed."""

    returncode: int
    stdout: str
    stderr: str


def run_program(script, *arguments, processes=1, environment, timeout, folder=None):
    """What becomes of `python script arguments`, or of as many ranks, in this folder or the current one.

    It saves seconds of imports. Only tests of the launchers and of imports start Python anew.
    """
    if processes > 1:
        environment = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as outputs:
        ranks = []
        for rank in range(processes):
            of_rank = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {})
            ranks.append(forked(_program, command, of_rank, folder or os.getcwd(), f"{outputs}/{rank}"))
        for rank in ranks:
            rank.start()
        try:
            for rank in ranks:
                rank.join(timeout)
            if any(rank.is_alive() for rank in ranks):
                raise subprocess.TimeoutExpired(command, timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        out, err = (_printed(Path(outputs), f"*.{kind}") for kind in ("out", "err"))
    return Ended(max(abs(rank.exitcode) for rank in ranks), out, err)


def _printed(folder, files):
    """All that ranks have printed, in their order."""
    return "".join(file.read_text() for file in sorted(folder.glob(files)))


def _program(command, environment, folder, output):
    """Has the process itself print to files, and not Python's streams alone, since libraries write to the former."""
    for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
        file = os.open(f"{output}.{kind}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream.fileno())
    begin_as_a_program()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    path = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [os.path.dirname(command[0]), *path]
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def run_offline(script, *arguments, timeout=TIMEOUT, **how):
    """`run_program` with this checkout, on CPUs, without the hub."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    return run_program(script, *arguments, environment={**os.environ, **settings}, timeout=timeout, **how)
