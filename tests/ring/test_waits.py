"""A rank that waits for others logs for whom and in what, once a wait, and ends when its time is over."""

import logging
import re
import threading
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_ring_attention as ra
from hf_ring_attention.transport import waits
from hf_ring_attention.transport.communicators import Message
from hf_ring_attention.transport.transports import Link, Traffic
from tests.support.ranks import PROMPTLY, run_simulated
from tests.support.training import tiny_llama


class Lines(logging.Handler):
    """The lines that are logged about waits that last for some looks."""

    def __init__(self, expected):
        super().__init__()
        self.expected, self.texts, self.here = expected, [], threading.Event()

    def emit(self, record):
        self.texts.append(record.getMessage())
        if len(self.texts) == self.expected:
            self.here.set()

    def come(self):
        """Waits until all lines are here, and for more looks at the waits."""
        assert self.here.wait(PROMPTLY), self.texts
        threading.Event().wait(5 * waits.LOOKS_EVERY)


@contextmanager
def lines_of(expected):
    lines = Lines(expected)
    waits.logger.addHandler(lines)
    with mock.patch.multiple(waits, SILENCE=0.2, LOOKS_EVERY=0.05):
        yield lines
    waits.logger.removeHandler(lines)


def late(waiting, others):
    everybody = "processes" if "process" in waiting else "ranks"
    return f"comparing the calls of all {everybody}, on {waiting}, in a call: {others} did not answer for 0.2 s; still waiting"


@pytest.mark.parametrize(
    ("absent", "everywhere", "expected"),
    [
        ((1, 2), False, [late("rank 0", "ranks 1, 2")]),
        ((1, 2), True, [late("process 0", "processes 1, 2")]),
        ((0,), False, [late("rank 1", "rank 0"), late("rank 2", "rank 0")]),
    ],
)
def test_a_late_rank_is_named_once_a_wait(absent, everywhere, expected):
    def work(ring):
        if ring.rank in absent:
            lines.come()
        for _ in range(2):  # Nobody waits in the second call.
            with ring.agreement("a call", everywhere=everywhere):
                pass

    with lines_of(len(expected)) as lines:
        run_simulated(work, 3)
    assert sorted(lines.texts) == expected


def test_a_rank_that_stops_inside_a_call_is_named():
    def work(ring):
        if ring.rank == 2:
            lines.come()
        link = Link(ring.communicator, Traffic(), "ring attention")
        x = torch.ones(1)
        following, previous = (ring.rank + 1) % 3, (ring.rank - 1) % 3
        link.exchange("step 1", [Message(following, x)], [Message(previous, torch.empty(1))])()
        link.all_to_all("outputs", torch.ones(3), [1, 1, 1], [1, 1, 1])[1]()

    with lines_of(2) as lines:
        run_simulated(work, 3)
    assert sorted(lines.texts) == [
        "ring attention, outputs, on rank 1: one of ranks 0, 2 did not answer for 0.2 s; still waiting",
        "ring attention, step 1, on rank 0: rank 2 did not answer for 0.2 s; still waiting",
    ]


def on_the_main_process_only(rank):
    """The lines and the error of a forward pass on rank 0, while the others do something else."""
    model, error = ra.patch_model(tiny_llama(), ring=ra.Ring(dist.new_group(timeout=timedelta(seconds=2)))), ""
    with lines_of(1) as lines:
        if rank == 0:
            with pytest.raises(RuntimeError) as caught:
                model(input_ids=torch.arange(40)[None])
            error = str(caught.value)
        dist.barrier()
    return lines.texts, error


def test_a_forward_pass_on_the_main_process_only(ranks):
    """It logs the ranks for which it waits, and ends at the timeout of its group."""
    where = "comparing the calls of all ranks, on rank 0, in a forward pass of a model: "
    (lines, error), *others = ranks.run(on_the_main_process_only, 3)
    assert lines == [f"{where}ranks 1, 2 did not answer for 0.2 s; still waiting"]
    assert re.match(rf"{where}\w+ing (to|from) rank [12] did not end: ", error), error
    assert others == [([], "")] * 2
