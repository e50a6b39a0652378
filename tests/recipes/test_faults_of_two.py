"""Faults of the recipes' runs on two processes: a signal to one, or a loss that is not finite, ends both, and they go on.

Run as a program, this file is finetune.py with a fault, the first argument, in process 1.
"""

import os
import re
import signal
import sys

import checkpoints
import finetune
import pytest

from tests.support.programs import run_program
from tests.support.ranks import TIMEOUT
from tests.support.recipe_runs import ENVIRONMENT, RECIPES, at_step, losses_of, save_inputs, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_inputs(tmp_path_factory.mktemp("tiny"))


def two(folder, output, fault, *more):
    """finetune.py on two processes; the second has a fault in its third step."""
    output.mkdir(exist_ok=True)
    path = os.pathsep.join(map(str, (RECIPES, RECIPES.parent)))
    options = {"processes": 2, "environment": {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}, "timeout": TIMEOUT}
    return run_program(__file__, fault, *words(folder, output, "--ring-size", "2", *more), **options)


def test_a_loss_that_is_not_finite_ends_both(folder, tmp_path):
    """One process goes on after it in test_faults.py."""
    done = two(folder, tmp_path, "NaN", "--save-every", "2")
    told = r"step 3: loss nan, gradient norm nan: .*checkpoint-2\. Start again with a smaller --lr"
    assert done.returncode == 1 and re.search(told, done.stderr), done.stderr[-3000:]
    assert done.stderr.count("training stops") == 1 and not (tmp_path / "config.json").exists()
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


def faulty(fault):
    """Gives this process a fault in its third step."""
    if fault == "SIGTERM":
        at_step(pytest.MonkeyPatch(), finetune, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    elif fault == "NaN":
        calls, loss_of = iter(range(1, 100)), finetune.batch_loss
        finetune.batch_loss = lambda *x, **y: loss_of(*x, **y) * (float("nan") if next(calls) == 3 else 1)


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if os.environ["RANK"] == "1":
        faulty(fault)
    with finetune.ra.naming_lost_processes():
        finetune.main()
