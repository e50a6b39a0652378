"""A callback that evaluates on one process alone ends all of them, with an error that says who does what."""

import time

import pytest
from transformers import TrainerCallback

import hf_ring_attention as ra
from tests.support.ranks import PROMPTLY, run_ranks
from tests.support.training import documents, trainer

ROWS = documents(12, 20, 40, seed=0)


class AsksForOne(TrainerCallback):
    """Asks for an evaluation after the second step, on process 1."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step == 2 and args.process_index == 1


class Asked(ra.RingTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, callbacks=[AsksForOne()], **kwargs)


def error_of(rank, folder, ring_size):
    start, data = time.monotonic(), {"rows": ROWS, "eval_rows": ROWS, "collator": ra.PaddingCollator()}
    with pytest.raises(ValueError) as raised:
        trainer(rank, folder, ring_size=ring_size, trainer_class=Asked, steps=5, **data)
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("ring_size", [1, 2])
def test_an_evaluation_on_one_process_alone(ring_size, tmp_path):
    expected = (
        "the processes disagree on the call: process 0: batch 2 of the loader of training, process 1: preparing the loader "
        "of an evaluation; all must make the same calls in one order"
    )
    for error, seconds in run_ranks(error_of, 2, tmp_path, ring_size):
        assert error == expected
        assert seconds < PROMPTLY
