"""Checkpoints of the recipes: a run that is killed at any moment goes on from a checkpoint that is whole."""

import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import checkpoints
import pytest
import torch
from transformers import get_scheduler

from tests.support.ranks import run_ranks

SETTINGS = {"pattern": "exact", "lr": 1e-4}
#: What changes a folder. Each is told to Python's auditors before it is done.
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


class Killed(BaseException):
    """Ends a save before one of its changes, as a kill would: nothing catches it and nothing is tidied up."""


class Killer:
    """Counts changes, and raises before one of them."""

    def __init__(self):
        self.left = None
        sys.addaudithook(self.hook)

    def hook(self, event, arguments):
        if self.left is None or event not in CHANGES:
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return  # it is read
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise Killed

    def kills(self, before, function):
        """Whether the function makes more than `before` changes; it then ends there."""
        self.left = before
        try:
            function()
        except Killed:
            return True
        finally:
            self.left = None
        return False


def accelerator(step):
    """What `save` uses of an accelerator, with a state of two files, one in a folder."""

    def save_state(folder):
        for name in ("model/weights", "random_0"):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(step))

    return SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None, save_state=save_state)


def save(output, step):
    checkpoints.save(accelerator(step), output, step, SETTINGS)


def assert_whole(checkpoint):
    """All files are there, all of its step."""
    step = checkpoints.step_of(checkpoint)
    files = {str(path.relative_to(checkpoint)): path.read_text() for path in checkpoint.rglob("*") if path.is_file()}
    assert json.loads(files.pop("run.json"))["settings"] == SETTINGS
    assert files == dict.fromkeys(("model/weights", "random_0"), str(step))
    return step


def killed_everywhere(rank, folder):
    """Kills the second save at each change, and some third ones of the run that goes on; returns how often each was killed."""
    killer, counts = Killer(), [0, 0]
    os.fsync = lambda file: None  # A kill leaves what was written, and the disks of the tests need not be waited for.
    for first in itertools.count():
        output = Path(folder, str(first))
        save(output, 1)
        before = set(output.iterdir())
        if not killer.kills(first, lambda output=output: save(output, 2)):
            break
        counts[0] += 1
        step = assert_whole(checkpoints.last_saved(output))
        assert step == 2 or before <= set(output.iterdir())
        for second in itertools.count() if first % 3 == 0 else ():
            again = Path(folder, f"{first}-{second}")
            shutil.copytree(output, again)
            killed = killer.kills(second, lambda again=again, step=step: save(again, step + 1))
            assert assert_whole(checkpoints.last_saved(again)) in (step, step + 1)
            save(again, step + 2)
            assert [path.name for path in again.iterdir()] == [f"checkpoint-{step + 2}"]
            assert_whole(checkpoints.last_saved(again))
            if not killed:
                break
            counts[1] += 1
    return counts


def test_a_run_killed_at_any_change_goes_on_from_a_whole_checkpoint(tmp_path):
    """In a process of its own, since auditors stay."""
    ((once, twice),) = run_ranks(killed_everywhere, 1, str(tmp_path), timeout=600)
    assert once > 10 and twice > 3 * once  # two files and a folder written, renamed, and as many deleted


@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_that_was_moved_and_linked_to_is_replaced(there, tmp_path):
    """Of what was moved elsewhere only the link goes; so does a link that leads nowhere any more."""
    output, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(output, 2)
    (output / "checkpoint-2").rename(elsewhere)
    (output / "checkpoint-2").symlink_to(elsewhere)
    (output / "checkpoint-1.old").symlink_to(elsewhere)  # left by a run that could not delete a link
    (output / "checkpoint-4").symlink_to(elsewhere / "nowhere")
    if there:
        assert checkpoints.last_saved(output).name == "checkpoint-2"
    else:
        shutil.rmtree(elsewhere)
        with pytest.raises(SystemExit, match=r"no whole checkpoint in .*; checkpoint-2 lacks run\.json"):
            checkpoints.last_saved(output)
    for step in (3, 4, 5):
        save(output, step)
        assert [path.name for path in output.iterdir()] == [f"checkpoint-{step}"]
        assert_whole(output / f"checkpoint-{step}")
    assert not there or (elsewhere / "run.json").is_file()


def test_a_first_save_that_was_killed_is_told(tmp_path):
    (tmp_path / "checkpoint-3.part").mkdir()
    with pytest.raises(SystemExit, match=r"no whole checkpoint in .*; checkpoint-3\.part was not finished\. A run"):
        checkpoints.last_saved(tmp_path)
    save(tmp_path, 3)
    assert checkpoints.last_saved(tmp_path) == tmp_path / "checkpoint-3"


def test_models_are_known_by_their_files_wherever_they_lie(tmp_path):
    for name, weights in {"one": b"abc", "moved": b"abc", "other": b"abd"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    one, moved, other = (checkpoints.stamp_of_model(str(tmp_path / name)) for name in ("one", "moved", "other"))
    assert one == moved != other
    assert checkpoints.stamp_of_model("owner/name") == "owner/name"


@pytest.mark.parametrize("kind", ["linear", "cosine", "inverse_sqrt", "constant"])
def test_rates_of_a_run_that_goes_on_for_more_steps_are_those_of_its_schedule(kind):
    def run(steps, loaded=None, until=None):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.01)
        schedule, used = get_scheduler(kind, optimizer, 1, steps), []
        if loaded:
            optimizer.load_state_dict(loaded[0])
            schedule.load_state_dict(loaded[1])
            checkpoints.set_rates(optimizer, schedule)
        for _ in range(schedule.last_epoch, until or steps):
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return used, (optimizer.state_dict(), schedule.state_dict())

    whole, _ = run(6)
    # It was to end after 2 steps of the same schedule, or of a shorter one.
    for steps in (6, 2):
        _, saved = run(steps, until=2)
        assert run(6, saved)[0] == pytest.approx(whole[2:])


def test_figures_go_on_and_facts_are_those_of_the_run_that_goes_on():
    done = {"steps": [{"loss": 2.0}], "held_out": {0: 1.5}, "perplexity_before": 4.5}
    before = checkpoints.Figures(world_size=2, **done, seconds=9)
    after = checkpoints.Figures(world_size=1, pattern="exact", steps=[], held_out={})
    after.load_state_dict(before.state_dict())
    assert after == {"world_size": 1, "pattern": "exact", **done}


def test_a_checkpoint_named_to_the_trainer_must_be_one_and_the_last(tmp_path):
    state = {"global_step": 2}
    for step in (2, 3, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state | {"global_step": step}))
    (tmp_path / "checkpoint-final").mkdir()
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (2, 3, 10)]
    checkpoints.check_trainer(tmp_path / "checkpoint-10", tmp_path)
    checkpoints.check_trainer(tmp_path / "checkpoint-2", tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match=r"written after step 2, and the run would write over .*checkpoint-3, .*-10"):
        checkpoints.check_trainer(tmp_path / "checkpoint-2", tmp_path)
    with pytest.raises(SystemExit, match=r"got one without trainer_state\.json"):
        checkpoints.check_trainer(tmp_path / "yes", tmp_path)
