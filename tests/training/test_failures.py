"""A process that is killed while training ends the others, by name; its checkpoint goes on."""

import os
import signal

import pytest

import hf_ring_attention as ra
from hf_ring_attention.transport import lost_processes
from tests.support.ranks import run_ranks
from tests.support.training import assert_equal_runs, documents, tiny_llama, trainer

pytestmark = pytest.mark.usefixtures("in_float64")

DATA = {"rows": documents(4, 20, 61, seed=0), "ring_size": 2, "steps": 4}
SAVING = {"save_strategy": "steps", "save_steps": 2}


class Killed(ra.RingTrainer):
    """The last process dies in the middle of its fourth step."""

    def training_step(self, *args, **kwargs):
        if self.state.global_step == 3 and self.args.process_index == self.args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(*args, **kwargs)


def killed(rank, folder):
    try:
        trainer(rank, folder, trainer_class=Killed, **DATA, **SAVING)
    except RuntimeError as error:
        (folder / f"error{rank}").write_text(str(error))
        raise


def whole_and_resumed(rank, folder):
    whole, _ = trainer(rank, folder / "whole", **DATA)
    other, last = tiny_llama(seed=9), str(folder / "checkpoint-2")
    return whole, trainer(rank, folder / "resumed", model=other, resume=last, **DATA)[0]


def test_a_killed_process_ends_the_other_by_name(tmp_path, programs):
    with pytest.raises(AssertionError, match="ended without an answer"):
        run_ranks(killed, 2, tmp_path)
    assert "lost process 1 of 2" in (tmp_path / "error0").read_text()
    for whole, resumed in programs.run(whole_and_resumed, 2, tmp_path):
        assert_equal_runs(resumed, whole, "resumed")


def test_an_error_of_the_program_itself_is_not_blamed_on_others(monkeypatch):
    monkeypatch.setattr(lost_processes.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(lost_processes.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(lost_processes.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(lost_processes, "_silent", lambda seconds: [1])
    with pytest.raises(RuntimeError, match=r"^cannot restore"), ra.naming_lost_processes():
        raise RuntimeError("cannot restore a tensor")
    # Told once, however many contexts there are.
    told_once = r"^lost process 1 ((?!lost).)*gloo: timed out$"
    with pytest.raises(RuntimeError, match=told_once), ra.naming_lost_processes(), ra.naming_lost_processes():
        raise RuntimeError("gloo: timed out")
