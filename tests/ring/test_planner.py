"""Plans that are made ahead, in a thread that no call waits for without need, and the bindings that a ring keeps."""

import gc
import itertools
import threading
import weakref
from unittest import mock

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.ring import planner
from hf_ring_attention.ring.bindings import PARTS_OF_A_CALL, Bindings, PlannedCalls
from tests.support.ranks import CONTEXT, PROMPTLY, forked, run_simulated

LENGTH = 24
#: The documents of some batches of a row, each with other ones.
BATCHES = [(((0, cut), (cut, LENGTH)),) for cut in range(3, 20)]


def threads_of_planners():
    return [thread for thread in threading.enumerate() if thread.name == planner.THREAD]


def binding_after(act):
    """Has `act()` called before a call is bound."""
    local = planner.TRANSPORTS["local"]
    patched = local._replace(bind=lambda *call: act() or local.bind(*call))
    return mock.patch.dict(planner.TRANSPORTS, local=patched)


class Calls:
    """Calls of attention on a ring of this process, and the threads in which their bindings are made."""

    def __init__(self):
        self.ring, self.makers, self.error = ra.Ring.alone(), [], None
        self.q = torch.randn(1, 2, LENGTH, 8)

    def bound(self):
        self.makers.append(threading.current_thread())
        if self.error is not None:
            raise self.error

    def expect(self, documents, length=LENGTH):
        self.ring.planner.expect(ra.SequenceLayout("contiguous", length, 1), documents)

    def call(self, documents, pattern="window:4", rows=None):
        q = self.q if rows is None else rows
        return ra.ring_attention(q, q, q, pattern=pattern, ring=self.ring, documents=documents)

    def made_here(self):
        """How many bindings this thread made since it was last asked, once the planner is done."""
        self.ring.planner.wait()
        here, self.makers = self.makers.count(threading.current_thread()), []
        return here


@pytest.fixture
def calls():
    calls = Calls()
    with binding_after(calls.bound):
        yield calls


def test_calls_find_what_was_made_ahead(calls):
    calls.expect(BATCHES[0])
    calls.expect(BATCHES[1])
    for number, documents in enumerate(BATCHES[:-2]):
        for pattern in ("window:4", "exact"):
            calls.makers.clear()
            found = calls.call(documents, pattern)
            assert calls.made_here() == (0 if number else 1)
            alone = ra.ring_attention(*[calls.q] * 3, pattern=pattern, documents=documents, ring=ra.Ring.alone())
            assert torch.equal(found, alone)
        calls.expect(BATCHES[number + 2])
        calls.ring.planner.wait()
    documents = (((0, 30),), ((2, 9), (9, 31)))  # a batch of another shape
    calls.expect(documents, 31)
    calls.made_here()
    calls.call(documents, rows=torch.randn(2, 2, 31, 8))
    assert calls.made_here() == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("max_bytes", [256 << 20, 1 << 12])
def test_what_is_made_beside_a_busy_device_is_right(calls, max_bytes):
    """Also where its memory goes to others as soon as it is used; and on other streams than the thread's."""
    calls.ring.planned.max_bytes = max_bytes
    calls.q = torch.randn(1, 2, LENGTH, 8).cuda()
    work, pattern = torch.randn(2048, 2048).cuda(), ra.Pattern.pyramid(4, levels=2, ratio=2)
    calls.expect(BATCHES[0])
    with torch.cuda.stream(torch.cuda.Stream()):
        for documents, coming in itertools.pairwise(BATCHES):
            calls.expect(coming)
            for _ in range(20):
                work = (work @ work).clamp(-1, 1)
            out = calls.call(documents, pattern)
            whole = ra.ring_attention(*[calls.q.cpu()] * 3, pattern=pattern, documents=documents, ring=ra.Ring.alone())
            assert torch.allclose(out.cpu(), whole, atol=1e-5)


def test_kinds_that_no_longer_come_are_forgotten(calls):
    calls.expect(BATCHES[0])
    calls.call(BATCHES[0], "exact")
    planned = []
    for documents in BATCHES[1:10]:
        calls.expect(documents)
        calls.ring.planner.wait()
        calls.makers = []
        calls.call(documents)
        calls.ring.planner.wait()
        planned.append(len(calls.ring.planner._kinds))
    assert planned[0] == 2 and planned[-1] == 1
    assert calls.ring.bindings.nbytes_ahead == 0


def test_a_call_waits_for_the_binding_under_way_and_counts_it(calls):
    begun, go_on = threading.Event(), threading.Event()

    def wait():
        if threading.current_thread().name == planner.THREAD:
            begun.set()
            assert go_on.wait(PROMPTLY)

    with binding_after(wait):
        calls.expect(BATCHES[0])
        calls.call(BATCHES[0])
        calls.expect(BATCHES[1])
        assert begun.wait(PROMPTLY)
        calls.call(BATCHES[2])  # Another plan is under way, and keeps no call that does not need it.
        assert [maker.name for maker in calls.makers].count(planner.THREAD) == 0 and len(calls.makers) == 2
        calls.ring.reset_traffic()
        waiting = threading.Thread(target=calls.call, args=(BATCHES[1],))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive() and calls.ring.traffic().planned_seconds == 0
        go_on.set()
        waiting.join(PROMPTLY)
    assert [maker.name for maker in calls.makers].count(planner.THREAD) == 1 and len(calls.makers) == 3
    assert calls.ring.traffic().planned_seconds > 0.05


def test_an_error_of_planning_ahead_is_that_of_the_call_alone(calls, recwarn, capfd):
    calls.expect(BATCHES[0])
    calls.call(BATCHES[0])
    calls.error = RuntimeError("no such plan")
    calls.expect(BATCHES[1])
    calls.ring.planner.wait()
    assert [thread.name for thread in calls.makers[1:]] == [planner.THREAD]
    calls.call(BATCHES[0])
    calls.expect(BATCHES[2])
    with pytest.raises(RuntimeError, match="no such plan"):
        calls.call(BATCHES[1])
    calls.error = None
    calls.expect((((5, 3),),))  # documents that no call could have
    calls.ring.planner.wait()
    calls.call(BATCHES[1])
    assert not recwarn.list and capfd.readouterr().err == ""


def test_threads_end_and_keep_no_ring(calls):
    for number in range(50):
        calls.expect(BATCHES[number % len(BATCHES)])
        calls.call(BATCHES[number % len(BATCHES)])
        assert len(threads_of_planners()) <= 2  # one may be about to end
    calls.ring.planner.wait()
    assert not threads_of_planners()
    ring = weakref.ref(calls.ring)
    calls.expect(BATCHES[0])
    calls.ring = None
    gc.collect()
    assert ring() is None


@pytest.mark.parametrize("transport", ["auto", "ring", "collective"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_simulated_ranks_plan_ahead(world_size, transport):
    length = 16 * world_size
    batches = [(((0, cut), (cut, length)),) for cut in range(5, 12)]
    x = torch.randn(1, 2, length, 8)

    def attend(ring):
        layout = ring.layout_for(length, "window:9")
        shard, outs, ready = ring.shard(x, layout, dim=2), [], []
        ring.planner.expect(layout, batches[0])
        for documents, coming in zip(batches, [*batches[1:], None]):
            if coming is not None:
                ring.planner.expect(layout, coming)
            ring.planner.wait()
            ready.append(len(ring.bindings._ahead))
            call = {"pattern": "window:9", "layout": layout, "documents": documents}
            out = ra.ring_attention(shard, shard, shard, ring=ring, **call)
            outs.append(ring.unshard(out, layout, dim=2))
        return outs, ready

    for outs, ready in run_simulated(attend, world_size, transport=transport):
        assert ready == [0, *[2] * (len(batches) - 2), 1]  # the next batch, and the one after it
        for out, documents in zip(outs, batches):
            whole = ra.ring_attention(x, x, x, pattern="window:9", documents=documents)
            assert torch.allclose(out, whole, atol=1e-5)


def end_while_planning(connection):
    """Ends while the planner makes the first of many plans."""
    begun, main, calls = threading.Event(), threading.main_thread(), Calls()

    def outlive():
        if threading.current_thread().name == planner.THREAD:
            begun.set()
            main.join()
            connection.send("planned")

    binding_after(outlive).start()
    for documents in BATCHES:
        calls.expect(documents)
    calls.call(BATCHES[0])
    begun.wait()
    connection.send("done")


def test_a_process_that_ends_waits_for_the_plan_under_way_alone():
    ours, theirs = CONTEXT.Pipe()
    process = forked(end_while_planning, theirs)
    process.start()
    theirs.close()
    assert [ours.recv(), ours.recv()] == ["done", "planned"]
    with pytest.raises(EOFError):
        ours.recv()
    process.join(PROMPTLY)
    assert process.exitcode == 0


# ---- memory on devices: a ring keeps one binding for equal calls, bounded in bytes and in parts


def of_size(name, numbers):
    return (name, torch.zeros(numbers, dtype=torch.int64))


class OneCall:
    """A planned call, as far as the table knows it."""

    def __init__(self, bindings, name, numbers):
        self.kept = bindings.of(of_size, name, numbers)


@pytest.mark.parametrize(
    ("bound", "sizes", "kept", "nbytes"),
    [
        ({"max_bytes": 64}, (4, 4, 1), "bc", 40),
        ({"max_parts": 2 * (1 + PARTS_OF_A_CALL)}, (4, 4, 1), "bc", 40),
        ({"max_bytes": 8}, (9,), "a", 72),  # one that is too large is kept until the next
        ({"max_bytes": 8}, (9, 1), "b", 8),
    ],
)
def test_the_oldest_goes_where_they_are_too_large_or_have_too_many_parts(bound, sizes, kept, nbytes):
    planned, bindings = PlannedCalls(**bound), Bindings()
    for name, size in zip("abc", sizes):
        planned.keep(name, OneCall(bindings, name, size))
        assert planned.find(name) is not None
    assert planned.nbytes == nbytes
    assert "".join(name for name in "abc" if planned.find(name) is not None) == kept


def test_calls_share_a_binding_which_counts_once():
    planned, bindings = PlannedCalls(max_bytes=40), Bindings()
    for name in "abc":
        planned.keep(name, OneCall(bindings, "one", 4))
    assert planned.nbytes == 32
    assert planned.find("a").kept is planned.find("c").kept


def test_what_is_made_ahead_is_bounded_and_made_once():
    bindings, cpu = Bindings(max_bytes=32), torch.device("cpu")
    used = bindings.of(of_size, "a", 8)
    bindings.make_ahead(cpu, of_size, "a", 8)
    assert bindings.of(of_size, "a", 8) is used and bindings.nbytes_ahead == 0
    for name in "bcd":
        bindings.make_ahead(cpu, of_size, name, 2)
    assert bindings.nbytes_ahead == 32
    bindings.of(of_size, "b", 2)
    assert bindings.nbytes_ahead == 16
    for _ in range(9):
        bindings.next_round()
    assert bindings.nbytes_ahead == 0


def test_turns_are_of_equal_keys_and_leave_nothing():
    with planner.in_turn("a"), planner.in_turn("b"):
        waiting = threading.Thread(target=lambda: planner.in_turn("a").__enter__())
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(PROMPTLY)
    assert not waiting.is_alive()
    gc.collect()
    assert not planner._TURNS


def test_kinds_whose_rows_are_never_the_expected_ones_rest(calls):
    for documents in BATCHES[:4]:
        calls.expect(documents)
        calls.call([[(0, 9)]], rows=calls.q[:, :, :9])
    calls.ring.planner.wait()
    assert calls.makers == [threading.current_thread()]
