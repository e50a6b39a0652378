"""Faults of the recipes' runs: signals, disks that are full, and files that were cut short. What is whole stays readable.

Each run that goes on takes the steps of the uninterrupted one. Faults of one of two processes are in test_faults_of_two.py;
processes that are killed, stall or raise in tests/ring/test_faults.py.
"""

import errno
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
from types import SimpleNamespace

import checkpoints
import common
import finetune
import finetune_trainer
import pytest
import torch

from hf_ring_attention.evaluation.whole_files import own_folder
from tests.support.patches import replaced
from tests.support.recipe_runs import STEPS, at_step, launch, losses_of, refused, run, save_inputs, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_inputs(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(folder):
    """The losses of a run that nothing interrupts."""
    return losses_after(folder, folder / "whole")


def losses_after(folder, output, *more):
    output.mkdir(exist_ok=True)
    run("finetune.py", *words(folder, output, *more))
    return losses_of(output)


def assert_goes_on(folder, output, whole, step):
    """From the step to the losses of the uninterrupted run."""
    assert f"going on after step {step}, " in run("finetune.py", *words(folder, output, "--resume"))
    assert losses_of(output) == whole


def test_a_signal_saves_the_step_and_the_run_goes_on(folder, whole, tmp_path, monkeypatch):
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        at_step(patch, finetune, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert launch("finetune.py", *words(folder, tmp_path)).returncode == 128 + signal.SIGINT
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-3"]
    assert_goes_on(folder, tmp_path, whole, 3)


def test_a_second_ctrl_c_ends_at_once(folder, tmp_path, monkeypatch):
    at_step(monkeypatch, finetune, 2, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        launch("finetune.py", *words(folder, tmp_path))
    assert checkpoints.checkpoints(tmp_path) == []


TRAINER = {"--steps": "--max_steps", "--lr": "--learning_rate", "--output": "--output_dir"}
TRAINER |= {"--schedule": "--lr_scheduler_type"}


def by_the_trainer(folder, output, *more):
    """What became of a run of finetune_trainer.py."""
    arguments = [TRAINER.get(word, word) for word in words(folder, output)[:-2]]
    quiet = ["--disable_tqdm", "true", "--dataloader_pin_memory", "false"]
    return launch("finetune_trainer.py", *arguments, *quiet, *more)


def losses_of_trainer(output):
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


SAVING = ("--save_strategy", "steps", "--save_steps", "2")
RESUME = (*SAVING, "--resume_from_checkpoint", "true")


def test_the_trainer_stops_saves_and_goes_on(folder, tmp_path, monkeypatch, disk):
    """By a signal, by a full disk, and not at all."""
    assert not by_the_trainer(folder, tmp_path / "whole", *SAVING).returncode
    step, calls = finetune_trainer.ra.RingTrainer.training_step, []

    def stopping(act):
        def training_step(*args, **options):
            calls.append(None)
            if len(calls) == 3:
                act()
            return step(*args, **options)

        return training_step

    output = disk.folder / "run"
    with monkeypatch.context() as patch:
        act = stopping(lambda: os.kill(os.getpid(), signal.SIGTERM))
        replaced(patch, finetune_trainer.ra.RingTrainer, training_step=act)
        assert by_the_trainer(folder, output, *SAVING).returncode == 128 + signal.SIGTERM
        assert checkpoints.last_saved(output, 1).name == "checkpoint-3"
        calls.clear()
        replaced(patch, finetune_trainer.ra.RingTrainer, training_step=stopping(disk.fill))
        told = r"process 0: a checkpoint could not be written \(.*make space there, and go on with --resume_from_checkpoint"
        assert re.search(told, by_the_trainer(folder, output, *RESUME).stderr)
        disk.free()
    # The steps are 3, and after it 4, which was saved, 5, and 6, which was not.
    assert checkpoints.last_saved(output, 1).name == "checkpoint-4"
    assert not by_the_trainer(folder, output, *RESUME).returncode
    assert losses_of_trainer(output) == losses_of_trainer(tmp_path / "whole")


@pytest.mark.parametrize(("loss", "norm"), [("nan", "nan"), (r"\d\.\d+", "inf")])
def test_a_loss_or_a_norm_that_is_not_finite_ends_the_run(loss, norm, folder, tmp_path, monkeypatch, whole):
    """Before the step's weights are saved: what is left goes on."""
    with monkeypatch.context() as patch:
        if loss == "nan":
            nan_at_step_4(patch, finetune, "batch_loss")
        else:
            norms = iter([1.0, 1.0, 1.0, math.inf])
            replaced(patch, finetune.Accelerator, clip_grad_norm_=lambda *_: torch.tensor(next(norms)))
        told = rf"^step 4: loss {loss}, gradient norm {norm}: training stops.* Last good checkpoint: .*/checkpoint-3\. "
        error = refused("finetune.py", *words(folder, tmp_path, "--save-every", "1", "--keep", "1"))
        assert re.search(told + "Start again with a smaller --lr,", error, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-3"]
    if loss == "nan":
        assert_goes_on(folder, tmp_path, whole, 3)


def nan_at_step_4(patch, owner, name):
    calls, sound = iter(range(1, 100)), getattr(owner, name)
    patch.setattr(owner, name, lambda *x, **y: sound(*x, **y) * (math.nan if next(calls) == 4 else 1))


def test_the_trainer_recipe_stops_at_a_loss_that_is_not_finite(folder, tmp_path, monkeypatch):
    nan_at_step_4(monkeypatch, finetune_trainer.ra.RingTrainer, "compute_loss")
    told = r"^step 4: loss nan, gradient norm nan: .*/checkpoint-2\. Start again with a smaller --learning_rate"
    error = by_the_trainer(folder, tmp_path, *SAVING, "--save_total_limit", "1").stderr
    assert re.search(told, error, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-2"]


def test_float16_skips_steps_whose_gradients_overflow():
    """Until the loss is no longer scaled up."""
    for loss, norm, kind, scale, expected in (
        (1.0, math.nan, "bf16", None, False),
        (1.0, math.inf, "fp16", 2.0**16, True),
        (1.0, math.inf, "fp16", 0.5, False),
        (math.nan, math.inf, "fp16", 2.0**16, False),
    ):
        scaler = None if scale is None else SimpleNamespace(get_scale=lambda scale=scale: scale)
        accelerator = SimpleNamespace(mixed_precision=kind, scaler=scaler)
        assert checkpoints.is_finite_step(accelerator, loss, norm) is expected


def test_a_folder_that_another_run_writes_to_is_refused(folder, tmp_path):
    for start in (lambda: launch("finetune.py", *words(folder, tmp_path)), lambda: by_the_trainer(folder, tmp_path)):
        with own_folder(tmp_path):
            assert re.search(r"^--output(_dir)?: another process writes to the folder", start().stderr, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


class Disk:
    """A folder whose disk can be filled: the system then refuses long files to this process, as a full disk does."""

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def __init__(self, folder):
        self.folder = folder

    def fill(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, self.limits[1]))

    def free(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path)
    yield made
    made.free()


@pytest.mark.parametrize(
    ("every", "step", "last", "told"),
    [
        (2, 3, 2, r"checkpoint-4 could not be written \(.*make space there, and go on with --resume from checkpoint-2"),
        (4, 5, 4, r"the model could not be written \(.*make space there; --resume goes on from the last checkpoint"),
    ],
)
def test_a_full_disk_ends_the_run_which_goes_on(every, step, last, told, disk, folder, whole, monkeypatch):
    output = disk.folder / "run"
    output.mkdir()
    with monkeypatch.context() as patch:
        at_step(patch, finetune, step, disk.fill)
        assert re.search(f"process 0: {told}", refused("finetune.py", *words(folder, output, "--save-every", every)))
    disk.free()
    assert [path.name for path in output.glob("checkpoint-*")] == [f"checkpoint-{last}"]
    assert checkpoints.last_saved(output).name == f"checkpoint-{last}"
    assert_goes_on(folder, output, whole, last)


def test_a_report_on_a_full_disk_is_the_old_one(disk):
    report = disk.folder / "report.json"
    checkpoints.write_text(report, "the old one")
    disk.fill()
    with pytest.raises(SystemExit, match=r"report\.json could not be written .*: make space there, or name a file on"):
        checkpoints.write_text(report, "x" * 10**6)
    assert [path.name for path in disk.folder.iterdir()] == ["report.json"]
    disk.free()
    assert report.read_text() == "the old one"
    checkpoints.write_text(report, "the new one")
    assert report.read_text() == "the new one"


def test_errors_of_disks_are_known_and_others_come_as_they_are(tmp_path):
    of_libraries = ("PytorchStreamWriter failed writing file", "I/O error: No space left on device (os error 28)")
    of_disks = [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), *map(RuntimeError, of_libraries)]
    for error in (*of_disks, OSError(errno.ENOENT, "no such data set"), RuntimeError("out of memory")):
        kind = SystemExit if error in of_disks else type(error)
        with pytest.raises(kind) as raised, checkpoints.writing("a checkpoint", tmp_path, "make space"):
            raise error
        assert error in (raised.value, raised.value.__cause__)


def cut(file):
    """A file's first half."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def test_a_checkpoint_that_was_cut_short_is_passed_over(folder, whole, tmp_path, rng):
    output = tmp_path / "run"
    assert losses_after(folder, output, "--save-every", 2, "--keep", 2) == whole
    last = output / "checkpoint-6"
    files = [path for path in last.rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        cut(file)
        assert file.name in checkpoints.lacks(last), file
        file.unlink()
        assert checkpoints.lacks(last) == str(file.relative_to(last))
        assert checkpoints.last_saved(output).name == "checkpoint-4"
        file.write_bytes(content)
    assert checkpoints.lacks(last) is None
    cut(rng.choice(files))
    out = run("finetune.py", *words(folder, output, "--save-every", 2, "--resume"))
    assert "checkpoint-6 is not whole and will be replaced: it lacks " in out and "going on after step 4" in out
    assert losses_of(output) == whole
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-6"]
    assert checkpoints.lacks(last) is None
    cut(rng.choice(files))
    error = refused("finetune.py", *words(folder, output, "--resume"))
    assert re.search(r"there is no whole checkpoint in .*; checkpoint-6 lacks ", error)


def test_a_conversion_that_was_killed_is_made_anew(folder, tmp_path, monkeypatch):
    """With the tiny model in place of the bundled one."""
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", str(tmp_path))
    replaced(monkeypatch, common, obstacle=lambda: None)
    converted = tmp_path / common.BUNDLED
    part = converted.with_name(f"{common.BUNDLED}.part-1")

    def killed(command):
        part.mkdir()
        (part / "model.safetensors").write_bytes(b"half")
        return subprocess.CompletedProcess(command, -signal.SIGKILL)

    def converting(command):
        assert not part.exists()
        shutil.copytree(folder / "model", converted)
        return subprocess.CompletedProcess(command, 0)

    replaced(monkeypatch, common.subprocess, run=killed)
    with pytest.raises(SystemExit, match="was not converted"):
        common.load_model(common.BUNDLED)
    assert part.exists() and not converted.exists()
    replaced(monkeypatch, common.subprocess, run=converting)
    assert common.load_model(common.BUNDLED).config.hidden_size == 32
