"""Requests of a ring: it waits for each request once and counts it, and never waits for all ranks."""

import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_ring_attention as ra
from hf_ring_attention.ring import planned
from tests.support.cases import TRANSPORTS


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
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_request_is_waited_for_once(ranks, world_size, transport):
    """In the pass that began it; and `traffic` counts all bytes that torch.distributed got."""
    for in_forward, in_both, more_bytes in ranks.run(waits_of_a_process, world_size, transport):
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
