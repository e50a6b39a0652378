"""The checkpoints of the recipes: whatever ends a run, and whenever, it resumes from a complete checkpoint.

`finetune.py` writes a checkpoint under a temporary name, and renames it once all of it is on the disk; then it renames and
deletes surplus checkpoints. A checkpoint lists its files and their sizes, so that a run skips a damaged one. Transformers'
Trainer writes under the final name, and its state last. `Stop` saves a checkpoint of the step in which SIGTERM or Ctrl-C comes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather
from arguments import plural
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState

_NAME = re.compile(r"checkpoint-([0-9]+)")
#: The last file of a checkpoint of `finetune.py`: the settings of its run, and the sizes of all other files in bytes.
_SETTINGS = "run.json"
#: The bytes at the end of a model's file that enter its checksum.
_END = 2**20
#: The errors of a full or broken disk, and the words of torch's and safetensors' errors if a file cannot be written.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_OF_WRITING = re.compile(r"PytorchStreamWriter|inline_container|basic_ios|iostream|os error (28|122|27|5|30)\b")


def step_of(checkpoint: Path) -> int | None:
    """Returns the step after which a checkpoint was written; None for a folder that is no checkpoint."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def checkpoints(output: Path) -> list[Path]:
    """Returns the folders in `output` that are called checkpoints, by step, and links that should lead to such folders."""
    folders = [path for path in output.glob("checkpoint-*") if path.is_dir() or path.is_symlink()]
    folders = [path for path in folders if step_of(path) is not None]
    return sorted(folders, key=lambda path: step_of(path) or 0)


def refuse_earlier(output: Path, resume: str, option: str) -> None:
    """Ends a new run in a folder with checkpoints of another run, which a later one would take for its own."""
    earlier = checkpoints(output)
    if earlier:
        raise SystemExit(
            f"{output} has {earlier[-1].name} of an earlier run: go on from it with {resume}, or name another folder with "
            f"{option}, or delete {', '.join(str(path) for path in earlier)}"
        )


@contextmanager
def own_run(output: Path, option: str) -> Iterator[None]:
    """Keeps other runs from writing to a folder; all processes enter it together, and end together if it is taken."""
    lock, error = FileLock(output / ".lock"), None
    if PartialState().is_main_process:
        try:
            output.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            error = f"another process writes to the folder {str(output)!r}: wait for it, or name another one"
        except OSError as reason:
            error = str(reason)
    (error,) = broadcast_object_list([error])
    if error:
        raise SystemExit(f"{option}: {error}")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(what: str, folder: Path, remedy: str) -> Iterator[None]:
    """Ends the program with the reason and the remedy if a disk is full or broken while the context writes."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not (error.errno in _OF_DISKS if isinstance(error, OSError) else _OF_WRITING.search(str(error))):
            raise
        disk = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
        free = shutil.disk_usage(disk).free / 2**20
        raise SystemExit(
            f"process {os.environ.get('RANK', 0)}: {what} could not be written ({' '.join(str(error).split())}; the disk of "
            f"{folder} has {free:.1f} MiB free): {remedy}"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Writes a file beside its name and renames it, so that the old or the new one is whole at any moment."""
    with writing(str(path), path.parent, "make space there, or name a file on another disk"):
        if path.exists() and not path.is_file():  # /dev/stdout, or a pipe
            path.write_text(text, encoding="utf-8")
            return
        part = path.with_name(f"{path.name}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def save(accelerator: Accelerator, output: Path, step: int, settings: Mapping[str, Any], keep: int = 1) -> None:
    """Writes the checkpoint of a step to a disk that all machines share; then deletes all but the last `keep`."""
    whole = output / f"checkpoint-{step}"
    part = output / f"{whole.name}.part"
    before = [path.name for path in checkpoints(output) if path != whole and lacks(path) is None]
    remedy = f"make space there, and go on with --resume from {before[-1]}" if before else "make space there"
    try:
        with writing(whole.name, output, f"{remedy}, or start again with an --output on another disk"):
            if accelerator.is_main_process:
                output.mkdir(parents=True, exist_ok=True)
                # Runs that were killed left these folders.
                for left in [*output.glob("checkpoint-*.part"), *output.glob("checkpoint-*.old")]:
                    _remove(left)
            accelerator.wait_for_everyone()
            accelerator.save_state(str(part))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (part / _SETTINGS).write_text(json.dumps({"settings": dict(settings), "files": _sizes(part)}))
                for file in part.rglob("*"):
                    if file.is_file():
                        with file.open("rb") as opened:  # A name must not outlive its content when the machine fails.
                            os.fsync(opened.fileno())
                # A checkpoint of this step or a later one was damaged, or the run would have gone on from it.
                later = [path for path in checkpoints(output) if (step_of(path) or 0) >= step]
                for damaged in later:
                    _remove(damaged.rename(output / f"{damaged.name}.old"))
                part.rename(whole)
                for older in checkpoints(output)[:-keep]:
                    # A folder that is deleted piece by piece must not bear the name of a whole one meanwhile.
                    _remove(older.rename(output / f"{older.name}.old"))
    except SystemExit:
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)  # An unfinished one fills the disk.
        raise


def _remove(checkpoint: Path) -> None:
    """Removes a checkpoint; of one that was moved elsewhere and linked to, the link alone."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint)


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the bytes of each file of a checkpoint but the one that lists them."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.stat().st_size for name, path in files.items() if name != _SETTINGS}


def lacks(checkpoint: Path) -> str | None:
    """Returns what a checkpoint of `finetune.py` lacks, by the list of its files; None if it is whole."""
    if not (checkpoint / _SETTINGS).is_file():
        return _SETTINGS
    if lacks_end(checkpoint / _SETTINGS):
        return f"the end of {_SETTINGS}"
    expected, found = json.loads((checkpoint / _SETTINGS).read_text())["files"], _sizes(checkpoint)
    for name, size in expected.items():
        if found.get(name) != size:
            return name if name not in found else f"{name} of {size} bytes, which has {found[name]}"
    return None


def damaged(output: Path, processes: int | None = None) -> dict[str, str]:
    """Returns what the damaged checkpoints of `finetune.py`, or that Trainer wrote from `processes`, lack, by their names."""
    lacking = {path: lacks_of_trainer(path, processes) if processes else lacks(path) for path in checkpoints(output)}
    return {path.name: what for path, what in lacking.items() if what}


def last_whole(output: Path, processes: int | None = None) -> Path | None:
    """Returns the last checkpoint that is not `damaged`; None without any."""
    lacking = damaged(output, processes)
    return next((path for path in reversed(checkpoints(output)) if path.name not in lacking), None)


def last_saved(output: Path, processes: int | None = None) -> Path:
    """Returns `last_whole`; ends the program without any."""
    last = last_whole(output, processes)
    if last is not None:
        return last
    faults = [f"; {path.name} was not finished" for path in output.glob("checkpoint-*.part")]
    faults += [f"; {name} lacks {what}" for name, what in damaged(output, processes).items()]
    option, of, saving = "--resume", "", "--save-every"
    if processes:
        option, of, saving = (
            "--resume_from_checkpoint",
            f" of {plural(processes, 'process', 'processes')}",
            "--save_strategy steps",
        )
    raise SystemExit(
        f"{option}: there is no whole checkpoint{of} in {output}{''.join(faults)}. A run with {saving} writes them"
    )


def is_finite_step(accelerator: Accelerator, loss: float, norm: float) -> bool:
    """Returns whether the optimizer may take a step with this loss and this norm of the gradient.

    In float16 gradients may overflow: the step is skipped, and the loss is scaled by half as much, until none does.
    """
    scaler = accelerator.scaler
    skipped = accelerator.mixed_precision == "fp16" and (scaler is None or scaler.get_scale() >= 1)
    return math.isfinite(loss) and (math.isfinite(norm) or skipped)


def end_not_finite(step: int, loss: float, norm: float, last: Path | None, rate: str) -> NoReturn:
    """Ends all processes; the first one names the last whole checkpoint, and the option `rate` of the learning rate."""
    raise SystemExit(
        f"step {step}: loss {loss:g}, gradient norm {norm:g}: training stops, and saves nothing of it. Last good checkpoint: "
        f"{last or 'none'}. Start again with a smaller {rate}, or in bfloat16 instead of float16"
        if os.environ.get("RANK", "0") == "0"
        else 1
    )


def stamp_of_model(model: str) -> str:
    """Returns a checksum of a model: of the ends of a folder's files, wherever the folder lies; else the model's name."""
    if not Path(model).is_dir():
        return model
    checksum = hashlib.sha256()
    for file in sorted(path for path in Path(model).iterdir() if path.suffix in (".safetensors", ".bin", ".json")):
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - _END))
            checksum.update(repr((file.name, size, opened.read())).encode())
    return checksum.hexdigest()[:16]


def set_rates(optimizer: Any, schedule: LambdaLR) -> None:
    """Gives an optimizer that was loaded the learning rates of the schedule, which may have another number of steps now."""
    for group, highest, share in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = highest * share(schedule.last_epoch)


class Figures(dict):
    """The figures that a run reports, and a part of its checkpoints. `held_out` has the loss by evaluated step."""

    def state_dict(self) -> dict:
        return {**self}

    def load_state_dict(self, state: dict) -> None:
        # The resumed run may have other facts, such as its number of processes.
        self.update({name: x for name, x in state.items() if name in ("steps", "held_out") or "perplexity" in name})


def check_settings(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Ends a run that would go on from a checkpoint with other data, another model's pattern or another learning rate."""
    before = json.loads((checkpoint / _SETTINGS).read_text())["settings"]
    other = {name: value for name, value in settings.items() if before.get(name) != value}
    if other:
        different = "; ".join(f"{name} {before.get(name)!r} there and {value!r} here" for name, value in other.items())
        raise SystemExit(
            f"--resume: {checkpoint} is of a run with other settings ({different}): start with those, or name another folder "
            f"with --output"
        )


def check_trainer(checkpoint: Path, output: Path) -> None:
    """Ends a run that would go on from a folder without Trainer's state, or write over later checkpoints in `output`."""
    state, option = checkpoint / "trainer_state.json", f"--resume_from_checkpoint {checkpoint}"
    if not state.is_file():
        raise SystemExit(f"{option}: expected 'true', or the folder of a checkpoint, got one without {state.name}")
    step = TrainerState.load_from_json(str(state)).global_step
    later = [str(path) for path in checkpoints(output) if (step_of(path) or 0) > step]
    if later:
        raise SystemExit(
            f"{option}: it was written after step {step}, and the run would write over {', '.join(later)}: delete them, or "
            f"name another folder with --output_dir"
        )


def lacks_of_trainer(checkpoint: Path, processes: int) -> str | None:
    """Returns what a checkpoint of Trainer lacks, or None: the random states of all processes are written before its state."""
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{process}.pth" for process in range(processes)]
    for name in (*names, "trainer_state.json"):
        if not (checkpoint / name).is_file():
            return name
    return next((f"the end of {file.name}" for file in sorted(checkpoint.iterdir()) if lacks_end(file)), None)


def lacks_end(file: Path) -> bool:
    """Returns whether a file in JSON, or of tensors by safetensors or torch, was cut short; others are not looked at."""
    if file.suffix == ".json":
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return True
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt"):  # It compares the sizes of the file and of its tensors.
                return False
        except SafetensorError:
            return True
    return file.suffix in (".bin", ".pt", ".pth") and file.is_file() and not zipfile.is_zipfile(file)


class Stop:
    """A context in which SIGTERM and Ctrl-C let the step under way end, for a checkpoint; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self._signal = 0
        #: The number of the signal that all processes have agreed to stop for; 0 for none.
        self.agreed = 0

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        # A signal may come inside a print, whose stream takes no other one then.
        os.write(2, f"{signal.Signals(number).name}: a checkpoint follows this step\n".encode())

    def agree(self, device: torch.device) -> bool:
        """Returns whether a signal came to any process; all of them call this after the same step."""
        self.agreed = int(gather(torch.tensor([self._signal], device=device)).max())
        return self.agreed > 0

    def end(self, checkpoint: Path, option: str) -> None:
        """Ends this process as one does that a signal ends, with the status 128 and the signal's number."""
        if os.environ.get("RANK", "0") == "0":
            name = signal.Signals(self.agreed).name
            print(f"{name}: saved {checkpoint}; go on from it with {option}", file=sys.stderr, flush=True)
        raise SystemExit(128 + self.agreed)


class StopTrainer(TrainerCallback):
    """The same for Transformers' Trainer; its own `enable_jit_checkpoint` lets each process save after a step of its own."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        if self.stop.agree(args.device):
            control.should_save = control.should_training_stop = True
        return control
