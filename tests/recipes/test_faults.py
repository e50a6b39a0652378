"""Faults of the recipes' runs: signals, disks that are full, and files that were cut short. What is whole stays readable.

| fault | what happens | test here |
|---|---|---|
| SIGTERM or Ctrl-C | the process ends the step, saves it and ends with 143 or 130 | test_a_signal_... |
| a second Ctrl-C | the process ends at once | test_a_second_... |
| the disk is full while a checkpoint, a model or a report is written | the run ends with the reason and the remedy; what was there before is whole | test_a_full_disk_... |
| a loss or a gradient norm is not finite | the run ends with the step, the last good checkpoint and the remedy, and saves nothing | test_a_loss_... |
| another run writes to the folder | the second one is refused | test_a_folder_... |
| a checkpoint was cut short | the one before is taken, with the reason; the damaged one is replaced | test_a_checkpoint_that_was_cut_short_... |
| the converted model was cut short, or its conversion was killed | the folder to delete is named; a killed conversion is made anew | test_a_converted_model_... |

Each run that goes on takes the steps of the uninterrupted one. Faults of one of two processes are in
tests/recipes/test_faults_of_two.py; processes that are killed, stall or raise in tests/ring/test_faults.py and
tests/training/test_failures.py.
"""  # noqa: E501

import contextlib
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
from tests.support.ranks import TIMEOUT
from tests.support.recipe_runs import ENVIRONMENT, STEPS, at_step, losses_of, save_inputs, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_inputs(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def here(monkeypatch):
    """Runs a recipe in this process, whose name is that of a module."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def run(recipe, arguments):
        monkeypatch.setattr("sys.argv", [recipe.__name__, *arguments])
        recipe.main()

    return run


@pytest.fixture(scope="module")
def whole(folder):
    """The losses of a run that nothing interrupts."""
    output = folder / "whole"
    output.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr("sys.argv", ["finetune.py", *words(folder, output)])
        finetune.main()
    return losses_of(output)


def assert_goes_on(here, folder, output, whole, step, capsys):
    """From the step to the losses of the uninterrupted run."""
    capsys.readouterr()
    here(finetune, words(folder, output, "--resume"))
    assert f"going on after step {step}, " in capsys.readouterr().out
    assert losses_of(output) == whole


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_the_run_goes_on(number, here, folder, whole, tmp_path, monkeypatch, capsys):
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        at_step(patch, finetune, 3, lambda: os.kill(os.getpid(), number))
        with pytest.raises(SystemExit) as end:
            here(finetune, words(folder, tmp_path))
    assert end.value.code == 128 + number
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-3"]
    assert_goes_on(here, folder, tmp_path, whole, 3, capsys)


def test_a_second_ctrl_c_ends_at_once(here, folder, tmp_path, monkeypatch):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(monkeypatch, finetune, 2, twice)
    with pytest.raises(KeyboardInterrupt):
        here(finetune, words(folder, tmp_path))
    assert checkpoints.checkpoints(tmp_path) == []


TRAINER = {"--seq-len": "--seq_len", "--steps": "--max_steps", "--lr": "--learning_rate", "--output": "--output_dir"}
TRAINER |= {"--schedule": "--lr_scheduler_type"}


def by_the_trainer(here, folder, output, *more):
    """A run of finetune_trainer.py."""
    arguments = [TRAINER.get(word, word) for word in words(folder, output)[:-2]]
    quiet = ["--disable_tqdm", "true", "--dataloader_pin_memory", "false"]
    here(finetune_trainer, [*arguments, *quiet, *more])


def losses_of_trainer(output):
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


SAVING = ("--save_strategy", "steps", "--save_steps", "2")
RESUME = (*SAVING, "--resume_from_checkpoint", "true")


def test_the_trainer_stops_saves_and_goes_on(here, folder, tmp_path, monkeypatch, disk):
    """By a signal, by a full disk, and not at all."""
    by_the_trainer(here, folder, tmp_path / "whole", *SAVING)
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
        patch.setattr(finetune_trainer.ra.RingTrainer, "training_step", act)
        with pytest.raises(SystemExit) as end:
            by_the_trainer(here, folder, output, *SAVING)
        assert end.value.code == 128 + signal.SIGTERM
        assert checkpoints.last_saved(output, 1).name == "checkpoint-3"
        calls.clear()
        patch.setattr(finetune_trainer.ra.RingTrainer, "training_step", stopping(disk.fill))
        told = r"process 0: a checkpoint could not be written \(.*make space there, and go on with --resume_from_checkpoint"
        with pytest.raises(SystemExit, match=told):
            by_the_trainer(here, folder, output, *RESUME)
        disk.free()
    # The steps are 3, and after it 4, which was saved, 5, and 6, which was not.
    assert checkpoints.last_saved(output, 1).name == "checkpoint-4"
    by_the_trainer(here, folder, output, *RESUME)
    assert losses_of_trainer(output) == losses_of_trainer(tmp_path / "whole")


# ---- numbers that are not finite


@pytest.mark.parametrize(("loss", "norm"), [("nan", "nan"), (r"\d\.\d+", "inf")])
def test_a_loss_or_a_norm_that_is_not_finite_ends_the_run(
    loss, norm, here, folder, tmp_path, monkeypatch, whole, capsys
):
    """Before the step's weights are saved: what is left goes on."""
    with monkeypatch.context() as patch:
        if loss == "nan":
            calls, sound = iter(range(1, 100)), finetune.batch_loss
            patch.setattr(
                finetune, "batch_loss", lambda *x, **y: sound(*x, **y) * (math.nan if next(calls) == 4 else 1)
            )
        else:
            norms = iter([1.0, 1.0, 1.0, math.inf])
            patch.setattr(finetune.Accelerator, "clip_grad_norm_", lambda *_: torch.tensor(next(norms)))
        told = rf"^step 4: loss {loss}, gradient norm {norm}: training stops.* Last good checkpoint: .*/checkpoint-3\. "
        with pytest.raises(SystemExit, match=told + "Start again with a smaller --lr,"):
            here(finetune, words(folder, tmp_path, "--save-every", "1", "--keep", "1"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-3"]
    if loss == "nan":
        assert_goes_on(here, folder, tmp_path, whole, 3, capsys)


def test_the_trainer_recipe_stops_at_a_loss_that_is_not_finite(here, folder, tmp_path, monkeypatch):
    step, calls = finetune_trainer.ra.RingTrainer.compute_loss, iter(range(1, 100))
    monkeypatch.setattr(
        finetune_trainer.ra.RingTrainer,
        "compute_loss",
        lambda *x, **options: step(*x, **options) * (math.nan if next(calls) == 4 else 1),
    )
    told = r"^step 4: loss nan, gradient norm nan: .*/checkpoint-2\. Start again with a smaller --learning_rate"
    with pytest.raises(SystemExit, match=told):
        by_the_trainer(here, folder, tmp_path, *SAVING, "--save_total_limit", "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-2"]


def test_a_finite_step_is_known():
    """In float16, the scaler skips steps whose gradients overflow, until the loss is no longer scaled up."""

    def accelerator(precision, scale=None):
        scaler = None if scale is None else SimpleNamespace(get_scale=lambda: scale)
        return SimpleNamespace(mixed_precision=precision, scaler=scaler)

    for loss, norm, kind, scale, expected in (
        (1.0, 2.0, "no", None, True),
        (1.0, math.nan, "bf16", None, False),
        (math.inf, 1.0, "no", None, False),
        (1.0, math.inf, "fp16", 2.0**16, True),
        (1.0, math.inf, "fp16", 0.5, False),
        (math.nan, math.inf, "fp16", 2.0**16, False),
    ):
        assert checkpoints.is_finite_step(accelerator(kind, scale), loss, norm) is expected


# ---- two runs


def by_accelerate(here, folder, output):
    """A run of finetune.py."""
    here(finetune, words(folder, output))


@pytest.mark.parametrize("run", [by_accelerate, by_the_trainer])
def test_a_folder_that_another_run_writes_to_is_refused(run, here, folder, tmp_path):
    told = r"^--output(_dir)?: another process writes to the folder"
    with own_folder(tmp_path), pytest.raises(SystemExit, match=told):
        run(here, folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# ---- full disks


class Disk:
    """A folder whose disk can be filled: it then takes 32 KiB more, and no model."""

    def __init__(self, folder):
        self.folder = folder

    def fill(self):
        """On a disk of its own, by a file."""
        with contextlib.suppress(OSError), open(self.folder / "filler", "wb", buffering=0) as file:
            while file.write(bytes(2**16)) == 2**16:
                pass
        size = (self.folder / "filler").stat().st_size
        os.truncate(self.folder / "filler", size - 2**15)

    def free(self):
        (self.folder / "filler").unlink()


class LimitedDisk(Disk):
    """Where none can be mounted: the system refuses long files to this process, as a full disk does."""

    def fill(self):
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, self.limits[1]))

    def free(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


@pytest.fixture(params=["a disk of its own", "a limit"])
def disk(request, tmp_path):
    """A small tmpfs, and the limit by which other machines test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "a limit":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        yield LimitedDisk(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return
    mount = shutil.which("mount")
    if mount is None or os.name != "posix":
        pytest.skip("this machine has no mount command: the test with a limit on files shows the same")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=20m", "none", folder], capture_output=True, text=True, timeout=TIMEOUT
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted ({done.stderr.strip()}): the test with a limit on files shows the same")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", folder], check=True, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("every", "step", "last", "told"),
    [
        (2, 3, 2, r"checkpoint-4 could not be written \(.*make space there, and go on with --resume from checkpoint-2"),
        (4, 5, 4, r"the model could not be written \(.*make space there; --resume goes on from the last checkpoint"),
    ],
)
def test_a_full_disk_ends_the_run_which_goes_on(
    every, step, last, told, disk, here, folder, whole, monkeypatch, capsys
):
    output, saving = disk.folder / "run", ("--save-every", str(every))
    output.mkdir()
    with monkeypatch.context() as patch:
        at_step(patch, finetune, step, disk.fill)
        with pytest.raises(SystemExit, match=f"process 0: {told}"):
            here(finetune, words(folder, output, *saving))
    disk.free()
    assert [path.name for path in output.glob("checkpoint-*")] == [f"checkpoint-{last}"]
    assert checkpoints.last_saved(output).name == f"checkpoint-{last}"
    assert_goes_on(here, folder, output, whole, last, capsys)


def test_a_report_on_a_full_disk_is_the_old_one(disk):
    report = disk.folder / "report.json"
    checkpoints.write_text(report, "the old one")
    disk.fill()
    with pytest.raises(SystemExit, match=r"report\.json could not be written .*: make space there, or name a file on"):
        checkpoints.write_text(report, "x" * 10**6)
    assert [path.name for path in disk.folder.iterdir() if path.name != "filler"] == ["report.json"]
    disk.free()
    assert report.read_text() == "the old one"
    checkpoints.write_text(report, "the new one")
    assert report.read_text() == "the new one"


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "no such data set"), RuntimeError("out of memory")])
def test_other_errors_come_as_they_are(error, tmp_path):
    with pytest.raises(type(error)) as raised, checkpoints.writing("a checkpoint", tmp_path, "make space"):
        raise error
    assert raised.value is error


# ---- files that were cut short


def cut(file):
    """A file's first half."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def test_a_checkpoint_that_was_cut_short_is_passed_over(here, folder, whole, tmp_path, rng, capsys):
    output = tmp_path / "run"
    output.mkdir()
    here(finetune, words(folder, output, "--save-every", "2", "--keep", "2"))
    assert losses_of(output) == whole
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
    capsys.readouterr()
    here(finetune, words(folder, output, "--save-every", "2", "--resume"))
    out = capsys.readouterr().out
    assert (
        re.search("checkpoint-6 is not whole and will be replaced: it lacks ", out) and "going on after step 4" in out
    )
    assert losses_of(output) == whole
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-6"]
    assert checkpoints.lacks(last) is None
    cut(rng.choice(files))
    with pytest.raises(SystemExit, match=r"there is no whole checkpoint in .*; checkpoint-6 lacks "):
        here(finetune, words(folder, output, "--resume"))


@pytest.fixture
def converted(folder, tmp_path, monkeypatch):
    """The folder of a converted model, with the tiny one in place of the bundled."""
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(common.INSTALLED, common.BUNDLED, common.Installed("nothing", (), lambda folder: folder))
    monkeypatch.setattr(common, "missing_extra", lambda *_: None)
    shutil.copytree(folder / "model", tmp_path / "cache" / common.BUNDLED)
    return tmp_path / "cache" / common.BUNDLED


def test_a_converted_model_that_was_cut_short_is_told(converted, capsys):
    common.load_model()
    files = sorted(converted.iterdir())
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        cut(file)
        told = f"lacks the end of {re.escape(file.name)}: delete that folder, and it is made again: rm -r "
        with pytest.raises(SystemExit, match=told):
            common.load_model()
        with pytest.raises(SystemExit) as refused:
            finetune.parse_args(["--model", common.BUNDLED])
        assert refused.value.code == 2 and f"lacks the end of {file.name}" in capsys.readouterr().err
        file.write_bytes(content)
    common.load_model()


def test_a_conversion_that_was_killed_is_made_anew(converted, folder, monkeypatch):
    shutil.rmtree(converted)
    part = converted.with_name(f"{common.BUNDLED}.part-1")

    def killed(command):
        part.mkdir()
        (part / "model.safetensors").write_bytes(b"half")
        return subprocess.CompletedProcess(command, -signal.SIGKILL)

    def converting(command):
        assert not part.exists()
        shutil.copytree(folder / "model", converted)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(common.subprocess, "run", killed)
    with pytest.raises(SystemExit, match="was not converted"):
        common.load_model(common.BUNDLED)
    assert part.exists() and not converted.exists()
    monkeypatch.setattr(common.subprocess, "run", converting)
    assert common.load_model(common.BUNDLED).config.hidden_size == 32
