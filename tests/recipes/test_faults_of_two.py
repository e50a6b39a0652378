"""Faults of the recipes' runs on two processes: a signal, a full disk, a kill or a loss that is NaN in one ends both.

Run as a program, this file is finetune.py with a fault, the first argument, in process 1.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress

import checkpoints
import finetune
import psutil
import pytest

from tests.support.programs import run_program
from tests.support.ranks import TIMEOUT
from tests.support.recipe_runs import ENVIRONMENT, RECIPES, at_step, losses_of, save_inputs, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_inputs(tmp_path_factory.mktemp("tiny"))


def two(folder, output, fault, *more):
    """finetune.py on two processes; the second has a fault in its third step or its second save."""
    output.mkdir(exist_ok=True)
    path = os.pathsep.join(map(str, (RECIPES, RECIPES.parent)))
    options = {"processes": 2, "environment": {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}, "timeout": TIMEOUT}
    return run_program(__file__, fault, *words(folder, output, "--ranks", "2", *more), **options)


def test_a_loss_that_is_not_finite_ends_both(folder, tmp_path):
    """One process goes on after it in test_faults.py."""
    done = two(folder, tmp_path, "NaN", "--save-every", "2")
    told = r"step 3: loss nan, gradient norm nan: .*checkpoint-2\. Start again with a smaller --lr"
    assert done.returncode == 1 and re.search(told, done.stderr), done.stderr[-3000:]
    assert done.stderr.count("training stops") == 1 and not (tmp_path / "config.json").exists()
    assert checkpoints.last_saved(tmp_path).name == "checkpoint-2"


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("fault", "status", "told"),
    [("disk", 1, "process 1: checkpoint-4 could not be written"), ("SIGKILL", 9, r"lost process 1 of 2 \(killed")],
)
def test_a_fault_of_one_while_both_save_ends_both(fault, status, told, folder, tmp_path):
    """And leaves the checkpoint before it whole, from which a test below shows how they go on."""
    done = two(folder, tmp_path, fault, "--save-every", "2")
    assert done.returncode == status and re.search(told, done.stderr), done.stderr[-3000:]
    # Named once, in any number of contexts.
    assert max(line.count("lost process 1 of 2") for line in done.stderr.splitlines()) == 1
    assert checkpoints.last_saved(tmp_path).name == "checkpoint-2"


def test_a_signal_to_one_ends_both_and_they_go_on(folder, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert two(folder, whole, "none").returncode == 0
    done = two(folder, stopped, "SIGTERM", "--save-every", "2")
    assert done.returncode == 143, done.stderr[-3000:]
    assert re.search("SIGTERM: saved .*checkpoint-3; go on from it with --resume", done.stderr)
    done = two(folder, stopped, "none", "--resume")
    assert done.returncode == 0 and "going on after step 3" in done.stdout, done.stderr[-3000:]
    assert losses_of(stopped) == losses_of(whole)


@pytest.mark.slow
def test_torchrun_passes_a_signal_on_and_leaves_no_process(folder, tmp_path):
    """To the launcher alone, as a cluster sends it: both processes save, and none is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(RECIPES / "finetune.py"), *words(folder, tmp_path, "--ranks", "2", "--save-every", "2")]
    command[command.index("--steps") + 1] = "10000"
    environment, left = {**os.environ, **ENVIRONMENT}, []
    with (
        (tmp_path / "output").open("w+") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as launcher,
    ):
        try:
            deadline = time.monotonic() + TIMEOUT
            while not checkpoints.checkpoints(tmp_path) and launcher.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            left = processes = psutil.Process(launcher.pid).children(recursive=True)
            launcher.send_signal(signal.SIGTERM)
            status = launcher.wait(TIMEOUT)
            left = psutil.wait_procs(processes, timeout=TIMEOUT)[1]
        finally:
            for process in (launcher, *left):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        output.seek(0)
        printed = output.read()
    assert len(processes) >= 2 and not left, printed[-3000:]
    step = re.search(r"SIGTERM: saved .*checkpoint-(\d+); go on from it", printed)
    assert step and checkpoints.last_saved(tmp_path).name == f"checkpoint-{step[1]}", printed[-3000:]
    assert status == 1 and "SignalException" in printed.splitlines()[-1], "failing.md tells what the launcher does"


def faulty(fault):
    """Gives this process a fault: in its third step, or a disk that does not take its second save, or a kill in it."""
    if fault == "SIGTERM":
        at_step(pytest.MonkeyPatch(), finetune, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    elif fault == "NaN":
        calls, loss_of = iter(range(1, 100)), finetune.batch_loss
        finetune.batch_loss = lambda *x, **y: loss_of(*x, **y) * (float("nan") if next(calls) == 3 else 1)
    elif fault in ("disk", "SIGKILL"):
        saves, save_state = iter((1, 2)), finetune.Accelerator.save_state

        def saving(self, folder):
            if next(saves) == 2:
                if fault == "SIGKILL":
                    os.kill(os.getpid(), signal.SIGKILL)
                resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, resource.RLIM_INFINITY))
            return save_state(self, folder)

        finetune.Accelerator.save_state = saving


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if os.environ["RANK"] == "1":
        faulty(fault)
    with finetune.ra.naming_lost_processes(), finetune.ra.naming_lost_processes():
        finetune.main()
