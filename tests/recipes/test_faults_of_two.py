"""Faults of the recipes' runs on two processes: a signal, a full disk or a kill of one ends both, and they go on.

Run as a program, this file is finetune.py with a fault, the first argument, in process 1.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time

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
    """finetune.py on two processes; the second has a fault in its third step or its save."""
    return run_two(fault, words(folder, output, "--ring-size", "2", *more))


def run_two(fault, arguments):
    return run_program(
        __file__,
        fault,
        *arguments,
        processes=2,
        environment={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, (RECIPES, RECIPES.parent)))},
        timeout=TIMEOUT,
    )


@pytest.fixture(scope="module")
def whole_of_two(folder):
    output = folder / "two"
    output.mkdir()
    done = two(folder, output, "none")
    assert done.returncode == 0, done.stderr[-3000:]
    return losses_of(output)


@pytest.mark.parametrize(
    ("fault", "status", "step", "told"),
    [
        ("NaN", 1, 2, r"step 3: loss nan, gradient norm nan: .*checkpoint-2\. Start again with a smaller --lr"),
        ("SIGTERM", 143, 3, "SIGTERM: saved .*checkpoint-3; go on from it with --resume"),
        pytest.param("disk", 1, 2, "process 1: checkpoint-4 could not be written", marks=pytest.mark.slow),
        pytest.param("SIGKILL", 9, 2, r"lost process 1 of 2 \(killed", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_one_process_ends_both_and_they_go_on(fault, status, step, told, folder, whole_of_two, tmp_path):
    done = two(folder, tmp_path, fault, "--save-every", "2")
    assert done.returncode == status, done.stderr[-3000:]
    assert re.search(told, done.stderr), done.stderr[-3000:]
    if fault == "NaN":
        assert done.stderr.count("training stops") == 1 and not (tmp_path / "config.json").exists()
    elif fault != "SIGTERM":
        assert "lost process 1 of 2" in done.stderr
    assert checkpoints.last_saved(tmp_path).name == f"checkpoint-{step}"
    if fault == "NaN":
        return  # One process goes on after it in test_faults.py.
    done = two(folder, tmp_path, "none", "--save-every", "2", "--resume")
    assert done.returncode == 0 and f"going on after step {step}" in done.stdout, done.stderr[-3000:]
    assert losses_of(tmp_path) == whole_of_two


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_passes_a_signal_on_and_leaves_no_process(number, folder, tmp_path):
    """To the launcher alone, as a scheduler and a terminal do: both processes save, and none is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(RECIPES / "finetune.py"), *words(folder, tmp_path, "--ring-size", "2", "--save-every", "2")]
    command[command.index("--steps") + 1] = "10000"
    environment = {**os.environ, **ENVIRONMENT}
    with (
        (tmp_path / "output").open("w+") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as launcher,
    ):
        try:
            deadline = time.monotonic() + TIMEOUT
            while not checkpoints.checkpoints(tmp_path) and time.monotonic() < deadline:
                time.sleep(0.05)
            processes = psutil.Process(launcher.pid).children(recursive=True)
            launcher.send_signal(number)
            assert launcher.wait(TIMEOUT) != 0
            left = psutil.wait_procs(processes, timeout=TIMEOUT)[1]
        finally:
            launcher.kill()
        output.seek(0)
        said = output.read()
    assert len(processes) >= 2 and not left
    step = int(re.search(rf"{signal.Signals(number).name}: saved .*checkpoint-(\d+); go on from it", said)[1])
    assert checkpoints.last_saved(tmp_path).name == f"checkpoint-{step}"
    losses = []
    for output, more in ((tmp_path, ["--resume"]), (tmp_path / "again", [])):
        output.mkdir(exist_ok=True)
        arguments = [*words(folder, output, "--ring-size", "2", *more), "--steps", str(step + 2)]
        done = run_two("none", arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append(losses_of(output))
    assert losses[0] == losses[1] and len(losses[0]) == step + 2


def faulty(fault):
    """Gives this process a fault: a signal in its third step, or a disk that does not take its second save."""
    if fault == "SIGTERM":
        at_step(pytest.MonkeyPatch(), finetune, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        return
    if fault == "NaN":
        calls, loss_of = iter(range(1, 100)), finetune.batch_loss
        finetune.batch_loss = lambda *x, **y: loss_of(*x, **y) * (float("nan") if next(calls) == 3 else 1)
        return
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
    if os.environ["RANK"] == "1" and fault != "none":
        faulty(fault)
    with finetune.ra.naming_lost_processes():
        finetune.main()
