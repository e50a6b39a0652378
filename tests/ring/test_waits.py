"""A rank that waits for others logs for whom and in what, once a wait, and ends when its time is over."""

import logging
import re
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_ring_attention as ra
from hf_ring_attention.ring import planned
from hf_ring_attention.transport import waits
from hf_ring_attention.transport.communicators import Message
from hf_ring_attention.transport.transports import Link, Traffic
from tests.support.cases import TRANSPORTS
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


# ---- requests: a ring waits for each once and counts it, and never waits for all ranks


class CountedWork:
    """A work of torch.distributed that counts how often it is waited for."""

    def __init__(self, work):
        self.work, self.waits = work, 0

    def wait(self):
        self.waits += 1
        if self.waits == 1:  # gloo's would wait for another message
            self.work.wait()


@contextmanager
def counted_works():
    """Yields the works begun inside, and the rows that torch.distributed is given to send."""
    works, sent = [], []

    def exchange(operations, begin=dist.batch_isend_irecv):
        # Integers belong to the comparison of calls, which does not count as traffic.
        sent.extend(x.tensor for x in operations if x.op is dist.isend and x.tensor.is_floating_point())
        begun = [CountedWork(work) for work in begin(operations)]
        works.extend(begun)
        return begun

    def all_to_all(received, rows, *args, begin=dist.all_to_all_single, **options):
        sent.append(rows)
        works.append(CountedWork(begin(received, rows, *args, **options)))
        return works[-1]

    with (
        mock.patch.object(dist, "batch_isend_irecv", exchange),
        mock.patch.object(dist, "all_to_all_single", all_to_all),
    ):
        yield works, sent


def waits_of_a_process(rank, transport):
    """How often each work of the forward pass was waited for, and each work of both passes; then the uncounted bytes."""
    ring = ra.Ring(transport=transport)
    pattern = ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2)
    layout = ring.layout_for(31, pattern)
    q, k, v = (torch.randn(2, heads, layout.local_len, 8, dtype=torch.float64) for heads in (4, 2, 2))
    with counted_works() as (works, sent):
        out = ra.ring_attention(q.requires_grad_(), k, v, pattern=pattern, ring=ring, layout=layout)
        in_forward = [work.waits for work in works]
        out.sum().backward()
        in_both = [work.waits for work in works]
    return in_forward, in_both, sum(x.nbytes for x in sent) - ring.traffic().sent_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_request_is_waited_for_once(ranks, transport):
    """In the pass that began it; and `traffic` counts all bytes that torch.distributed got."""
    for in_forward, in_both, more_bytes in ranks.run(waits_of_a_process, 3, transport):
        assert 0 < len(in_forward) < len(in_both)
        assert set(in_forward) == set(in_both) == {1}
        assert more_bytes == 0


def test_seconds_in_which_a_call_waits_for_its_plan_are_counted(monkeypatch):
    ring = ra.Ring.alone()
    decide, q = planned.decide_call, torch.randn(1, 2, 12, 4)
    monkeypatch.setattr(planned, "decide_call", lambda *call: time.sleep(0.05) or decide(*call))
    assert ring.traffic().planned_seconds == 0
    for number in (1, 2):
        seconds = []
        for _ in range(2):  # An equal call has its plan.
            ra.ring_attention(q, q, q, pattern="window:4", ring=ring, documents=[[(0, number), (number, 12)]])
            seconds.append(ring.traffic().planned_seconds)
        assert seconds[0] == seconds[1] >= 0.05 * number
    ring.reset_traffic()
    assert ring.traffic().planned_seconds == 0
