"""A process that is killed while training ends the others, by name; its checkpoint goes on."""

import os
import re
import signal
import time

import pytest

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.training import assert_equal_runs, documents, tiny_llama, trainer

pytestmark = pytest.mark.usefixtures("in_float64")

DATA = {"rows": documents(8, 20, 61, seed=0), "batch_size": 1, "steps": 6, "include_num_input_tokens_seen": "all"}
SAVING = {"save_strategy": "steps", "save_steps": 2}


class Killed(ra.RingTrainer):
    """The last process dies in the middle of its fourth step."""

    def training_step(self, *args, **kwargs):
        if self.state.global_step == 3 and self.args.process_index == self.args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(*args, **kwargs)


def killed(rank, folder, ring_size):
    start = time.monotonic()
    try:
        trainer(rank, folder, ring_size=ring_size, trainer_class=Killed, **DATA, **SAVING)
    except RuntimeError as error:
        (folder / f"error{rank}").write_text(f"{time.monotonic() - start:.1f} s: {error}")
        raise


def whole_and_resumed(rank, folder, ring_size):
    """A whole run, and one that goes on from the killed run's checkpoint, in the middle of an epoch."""
    whole, made = trainer(rank, folder / "whole", ring_size=ring_size, **DATA)
    tokens = made.state.num_input_tokens_seen
    checkpoint = {"model": tiny_llama(seed=9), "resume": str(folder / "checkpoint-2")}  # all that counts is in it
    resumed, made = trainer(rank, folder / "resumed", ring_size=ring_size, **checkpoint, **DATA)
    assert made.state.num_input_tokens_seen == tokens > 0
    assert len(resumed["losses"]) == DATA["steps"], "the history before the checkpoint is kept"
    return whole, resumed


@pytest.mark.slow
def test_a_killed_process_ends_the_others_by_name(tmp_path, programs):
    world_size, ring_size = 4, 2
    with pytest.raises(AssertionError, match="ended without an answer"):
        run_ranks(killed, world_size, tmp_path, ring_size)
    for rank in range(world_size - 1):
        said = (tmp_path / f"error{rank}").read_text()
        # The other ring may still wait when this ring names the process that does not answer.
        named = re.search(r"lost (?:process|one or more of the processes) \[?([\d, ]+)", said)
        assert named is not None, said
        assert str(world_size - 1) in named[1].replace(" ", "").split(",")
    for whole, resumed in programs.run(whole_and_resumed, world_size, tmp_path, ring_size):
        assert_equal_runs(resumed, whole, "resumed")
