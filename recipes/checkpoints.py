"""The checkpoints of the recipes: whatever ends a run, and when, it goes on from a checkpoint that is whole.

A checkpoint of `finetune.py` is written beside its name and renamed when all of it is there, so every folder
`checkpoint-STEP` is whole; only then are surplus checkpoints renamed and deleted. Transformers' Trainer writes
to the name itself, and its state last.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.trainer_callback import TrainerState

_NAME = re.compile(r"checkpoint-([0-9]+)")
_SETTINGS = "run.json"


def step_of(checkpoint: Path) -> int | None:
    """Returns the step after which a checkpoint was written; None for a folder that is no checkpoint."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def checkpoints(output: Path) -> list[Path]:
    """Returns the folders in `output` that are called checkpoints, by step."""
    folders = [path for path in output.glob("checkpoint-*") if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=lambda path: step_of(path) or 0)


def refuse_earlier(output: Path, resume: str, option: str) -> None:
    """Ends a new run in a folder with checkpoints of another run, which a later one would take for its own."""
    earlier = checkpoints(output)
    if earlier:
        raise SystemExit(
            f"{output} has {earlier[-1].name} of an earlier run: go on from it with {resume}, or name another folder with "
            f"{option}, or delete {', '.join(str(path) for path in earlier)}"
        )


def save(accelerator: Accelerator, output: Path, step: int, settings: Mapping[str, Any], keep: int = 1) -> None:
    """Writes the checkpoint of a step to a disk that all machines share; then deletes all but the last `keep`."""
    whole = output / f"checkpoint-{step}"
    part = output / f"{whole.name}.part"
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        # Runs that were killed left these folders.
        for left in [*output.glob("checkpoint-*.part"), *output.glob("checkpoint-*.old")]:
            shutil.rmtree(left)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (part / _SETTINGS).write_text(json.dumps(dict(settings)))
        part.rename(whole)
        for older in checkpoints(output)[:-keep]:
            # A folder that is deleted piece by piece must not bear the name of a whole one meanwhile.
            shutil.rmtree(older.rename(output / f"{older.name}.old"))


def last_saved(output: Path) -> Path:
    """Returns the last checkpoint of a run of `finetune.py`."""
    saved = checkpoints(output)
    if not saved:
        unfinished = [path.name for path in output.glob("checkpoint-*.part")]
        raise SystemExit(
            f"--resume: there is no checkpoint in {output}; a run with --save-every writes it"
            + (f" ({', '.join(unfinished)} was not finished)" if unfinished else "")
        )
    return saved[-1]


def check_settings(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Ends a run that would go on from a checkpoint with other data, another model's pattern or another learning rate."""
    before = json.loads((checkpoint / _SETTINGS).read_text())
    different = [
        f"{name} {before.get(name)!r} there and {value!r} here"
        for name, value in settings.items()
        if before.get(name) != value
    ]
    if different:
        raise SystemExit(
            f"--resume: {checkpoint} is of a run with other settings ({'; '.join(different)}): start with those, or name "
            f"another folder with --output"
        )


def last_of_trainer(output: Path, processes: int) -> Path:
    """Returns the last whole checkpoint that Transformers' Trainer wrote from this number of processes."""
    folders = checkpoints(output)
    obstacles = {path: lacking for path in folders if (lacking := _lacks_of_trainer(path, processes))}
    whole = [path for path in folders if path not in obstacles]
    if whole:
        return whole[-1]
    reasons = "".join(f"; {path.name} lacks {lacking}" for path, lacking in obstacles.items())
    raise SystemExit(
        f"--resume_from_checkpoint: there is no whole checkpoint of {processes} process(es) in {output}{reasons}. A run with "
        f"--save_strategy steps writes them; to take one as it is, name its folder"
    )


def check_trainer(checkpoint: Path, output: Path) -> None:
    """Ends a run that would go on from a folder without Trainer's state, or write over later checkpoints in `output`."""
    if not (checkpoint / "trainer_state.json").is_file():
        raise SystemExit(
            f"--resume_from_checkpoint {checkpoint}: 'true', or the folder of a checkpoint was expected; there is no "
            f"trainer_state.json in it"
        )
    step = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).global_step
    later = [str(path) for path in checkpoints(output) if (step_of(path) or 0) > step]
    if later:
        raise SystemExit(
            f"--resume_from_checkpoint {checkpoint}: it was written after step {step}, and the run would write over "
            f"{', '.join(later)}: delete what is later, or name another folder with --output_dir"
        )


def _lacks_of_trainer(checkpoint: Path, processes: int) -> str | None:
    """Returns what a checkpoint of Trainer lacks, or None: the random states of all processes are written before its state."""
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{process}.pth" for process in range(processes)]
    for name in names:
        if not (checkpoint / name).is_file():
            return name
        if not zipfile.is_zipfile(checkpoint / name):
            return f"the end of {name}"
    if not (checkpoint / "trainer_state.json").is_file():
        return "trainer_state.json"
    try:
        TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    except ValueError:
        return "the end of trainer_state.json"
    return None
