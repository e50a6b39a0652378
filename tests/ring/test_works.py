"""The work of a rank: tiles that write their results, packed documents in place, and calls of few tiles."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ring_attention as ra
from hf_ring_attention.compute import batched
from hf_ring_attention.compute.batched import BatchedTiles
from hf_ring_attention.compute.binding import bind_own
from hf_ring_attention.compute.cuda_kernels import CudaFlash
from hf_ring_attention.compute.kernels import CpuFlash, Math
from hf_ring_attention.compute.packed_row import PackedRow
from hf_ring_attention.compute.rows import IndexRows
from hf_ring_attention.plan.joins import Joining
from hf_ring_attention.ring import planned
from hf_ring_attention.ring.engine import Execution, backward_pass, forward_pass
from hf_ring_attention.transport.transports import LocalTransport
from tests.support.cases import case_of, check_cases, check_simulated, random_cases
from tests.support.cuda_operators import FlashAttention2
from tests.support.largest_result import LargestResult
from tests.support.ranks import run_simulated
from tests.support.tolerance import assert_exact

CPU = torch.device("cpu")
#: Unequal documents, and documents of one token.
DOCUMENTS = [(0, 9), (9, 10), (10, 32), (32, 40)]
KERNELS = [CpuFlash(), Math(), CudaFlash()]


@pytest.fixture
def flash(checked_operators):
    """FlashAttention for CUDA: its calls are checked, and computed in float64."""
    return checked_operators(torch.float64, played_by=FlashAttention2)


def drawn_case(rng, pattern, documents, causal=True, batch=1):
    """A case of 40 tokens in which 2 query heads share a key/value head, with documents of each batch row."""
    sizes = {"batch": batch, "sinks": rng.random() < 0.3, "seed": rng.randrange(2**31)}
    return case_of(pattern, documents=documents, causal=causal, **sizes)


def work_of(case, kernel):
    return bind_own(case.problem(ra.SequenceLayout("contiguous", case.seq_len, 1)), 0, CPU, kernel.joining)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_tiles_that_share_no_query_write_their_results(kernel, flash, computed_by, rng):
    """Windows and exact documents write every row once; other patterns merge some tiles."""
    computed_by(kernel)
    for pattern, documents, direct in [
        ("window:5", None, True),
        ("window:5", [DOCUMENTS], True),
        ("window:5", [DOCUMENTS[1:]], True),
        ("exact", [DOCUMENTS, DOCUMENTS[:2]], True),
        ("window:5+2", None, False),
        ("pyramid:4,2", [DOCUMENTS], False),
    ]:
        case = drawn_case(rng, pattern, documents, batch=len(documents or [1]))
        work = work_of(case, kernel)
        if isinstance(work, BatchedTiles):
            assert all(batch.fresh for batch in work.batches) == direct, pattern
            assert work.batches[0].fresh
        check_cases(ra.Ring(), [case])


def test_tiles_of_one_head_are_views_of_all_batch_rows(rng):
    """The stretches of a batch row end where the next row's begin."""
    case = drawn_case(rng, "branches:segment=4,segment=2@count", None, batch=3)
    case = replace(case, num_heads=1, num_kv_heads=1)
    assert all(batch.queries.is_view for batch in work_of(case, Math()).batches)
    check_cases(ra.Ring(), [case])


@pytest.mark.parametrize(("pattern", "direct"), [("window:64", True), ("window:64+4", True), ("pyramid:64,2", False)])
def test_windows_need_no_float32_of_whole_rows(pattern, direct, rng):
    """Nor do sinks beside them; of three tiles that share queries, results are merged in float32."""
    heads, tokens = 16, 4096
    case = replace(drawn_case(rng, pattern, None), seq_len=tokens, num_heads=heads, num_kv_heads=1)
    q, k, v, dout = (torch.randn(1, h, tokens, 8).bfloat16() for h in (heads, 1, 1, heads))
    execution = Execution(LocalTransport(work_of(case, CpuFlash())), CpuFlash(), 0.3)
    with LargestResult(torch.float32) as found:
        saved = forward_pass(q, k, v, None, execution)
        backward_pass(dout, saved, None, execution)
    assert (found.elements < q.numel()) == direct


class Copies(TorchDispatchMode):
    """How often a tensor is copied."""

    def __init__(self, x):
        super().__init__()
        self.x, self.count = x, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.clone.default and args[0].data_ptr() == self.x.data_ptr()
        return func(*args, **(kwargs or {}))


def test_backward_copies_strided_queries_once():
    """Graphs save queries as models store them; steps take rows."""

    def copies(ring):
        q, k, dout = (torch.randn(1, 8, heads, 8).transpose(1, 2) for heads in (2, 1, 2))
        execution = planned.planned_call(ring, q, k, k, None, "exact").plan()
        assert len(execution.transport.works) == 3
        saved = forward_pass(q, k, k, None, execution)._replace(q=q)
        with Copies(q) as found:
            backward_pass(dout, saved, None, execution)
        return found.count

    assert run_simulated(copies, 3, layout="zigzag", transport="ring") == [1, 1, 1]


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_are_one_call(causal, flash, computed_by, rng):
    """On one device, and for the local keys of ranks that share documents; padding is a separate sequence."""
    computed_by(CudaFlash())
    for rows in ([DOCUMENTS], [DOCUMENTS[:3]], [DOCUMENTS[2:], DOCUMENTS[:2]], [[(0, 40)], DOCUMENTS[:3]]):
        case = drawn_case(rng, "exact", rows, causal, len(rows))
        assert isinstance(work_of(case, CudaFlash()), PackedRow)
        check_cases(ra.Ring(), [case])
        assert [given["cum_seq_q"] is not None for _, given in flash.calls] == [True, True]
        flash.calls.clear()
        check_simulated([case], 3, layout="documents", transport="ring")
        assert any(given["cum_seq_q"] is not None for _, given in flash.calls)
        flash.calls.clear()


def test_other_tiles_are_not_packed_documents(rng):
    """One document a row needs no ends; keys that count twice, windows, groups of heads, and pieces of documents."""
    for pattern, documents, packed in [
        ("exact", None, False),
        ("window:5", [DOCUMENTS], False),
        ("branches:segment=64,segment=64@count", [DOCUMENTS], False),
        ("exact", [[(i, i + 1) for i in range(40)]], True),
    ]:
        work = work_of(drawn_case(rng, pattern, documents), CudaFlash())
        assert isinstance(work, PackedRow) == packed, (pattern, documents)
    assert work_of(drawn_case(rng, "exact", None, batch=2), CudaFlash()).takes_views


def test_packed_documents_take_rows_as_models_store_them(flash, computed_by):
    """The operator gets the very rows; padding that is not finite changes no other row."""
    computed_by(CudaFlash())
    q, k, v = (torch.randn(2, 12, heads, 8, dtype=torch.float64).transpose(1, 2) for heads in (4, 2, 2))
    documents = [[(0, 5), (7, 12)], [(2, 12)]]

    def results(tensors):
        leaves = [x.requires_grad_() for x in tensors]
        out = ra.ring_attention(*leaves, pattern="exact", documents=documents)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    clean = results([q, k, v])
    for _, given in flash.calls:
        stored = [given[name].untyped_storage().data_ptr() for name in ("query", "key", "value")]
        assert stored == [x.untyped_storage().data_ptr() for x in (q, k, v)]
    spoilt = [x.detach().clone() for x in (q, k, v)]
    for x in spoilt:
        x[0, :, 5:7], x[1, :, :2] = math.nan, math.inf
    for name, x, y in zip(("out", "dq", "dk", "dv"), results(spoilt), clean):
        assert_exact(x, y, name)
        assert not x[0, :, 5:7].any()


class Calls:
    """A kernel that notes the tiles of its calls."""

    def __init__(self, kernel):
        self.kernel, self.name, self.joining = kernel, kernel.name, kernel.joining
        self.sizes = []

    def forward(self, q, *others):
        self.sizes.append(q.shape)
        return self.kernel.forward(q, *others)

    def backward(self, dout, *others):
        self.sizes.append(dout.shape)
        return self.kernel.backward(dout, *others)


def test_calls_take_few_tiles(flash, computed_by, monkeypatch, rng):
    """At most as many as a kernel's grid has room for; each batch row is a separate tile."""
    calls = Calls(CudaFlash())
    computed_by(calls)
    cases = [drawn_case(rng, pattern, None, batch=2) for pattern in ("pyramid:4,2", "longnet:8/1,16/2")]
    check_cases(ra.Ring(), cases)
    assert max(size[0] for size in calls.sizes) > 4
    calls.sizes.clear()
    monkeypatch.setattr(batched, "MOST_TILES", 4)
    check_cases(ra.Ring(), [replace(case, seed=case.seed + 1) for case in cases])
    assert max(size[0] for size in calls.sizes) == 4


def test_calls_pad_few_rows():
    """Padded to blocks, the rows of a call are at most so many times the rows that are copied at once."""
    tiles, block, most = 1000, 128, 256
    rows = IndexRows(torch.arange(tiles * 2 * 3).view(tiles, 2, 3))
    parts = batched.BoundBatch(rows, rows, "full").parts(most, block)
    held = [part.queries.units * 2 * block for part in parts]
    assert sum(part.queries.units for part in parts) == tiles
    assert max(held) == batched.PADDED_ROWS * most
    assert len(batched.BoundBatch(rows, rows, "full").parts(10**6, 1)) == 1


# ---- tiles of unequal lengths in one kernel call, padded or in place, are those of separate calls

#: All tiles that may share a call do, whatever it costs; and up to some rows, or if it costs little.
EVERYTHING = {"rows": 10**9, "pairs": 10**9, "most_rows": 10**9}
LITTLE = [EVERYTHING, {**EVERYTHING, "most_rows": 30}, {**EVERYTHING, "rows": 8}, {**EVERYTHING, "pairs": 10}]


class JoinedCalls:
    """Hands calls on to a kernel and counts the calls with tiles of several lengths."""

    def __init__(self, kernel, joining):
        self.kernel, self.joining, self.name = kernel, joining, kernel.name
        self.with_lengths = self.padded = 0

    def forward(self, *tensors_and_tiles):
        self.with_lengths += tensors_and_tiles[3].lengths is not None
        return self.kernel.forward(*tensors_and_tiles)

    def backward(self, *tensors_and_tiles):
        self.padded += bool(torch.isinf(tensors_and_tiles[1].lse).any())
        return self.kernel.backward(*tensors_and_tiles)


def joined_cases(rng, kernel, count):
    """Random cases, whose scores are capped if plain math computes them alone.

    The first one has tiles of each shape in unequal lengths: documents that are shorter than its window, and longer ones.
    """
    cases = random_cases(rng, count)
    cases[0] = replace(
        cases[0],
        pattern=ra.Pattern.parse("window:12+2"),
        batch=1,
        seq_len=60,
        causal=True,
        documents=[[(0, 9), (9, 22), (22, 40), (40, 57)]],
    )
    capped = kernel.softcap if isinstance(kernel, Math) else None
    return [replace(case, softcap=capped) for case in cases]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "kernel", [CpuFlash(), Math(), Math(softcap=3.0)], ids=["cpu_flash", "math", "math with capped scores"]
)
@pytest.mark.parametrize("bounds", LITTLE, ids=["all", "few rows", "little padding", "few pairs"])
def test_padded_tiles(kernel, bounds, computed_by, rng):
    counted = JoinedCalls(kernel, Joining(**bounds))
    computed_by(counted)
    cases = joined_cases(rng, kernel, 8)
    check_cases(ra.Ring(), cases)
    for transport in ("ring", "collective"):
        check_simulated(cases[:3], 3, layout="zigzag", transport=transport)
    if bounds is EVERYTHING:
        assert counted.with_lengths
        assert counted.padded


def test_tiles_of_flash_attention(computed_by, checked_operators, rng):
    """FlashAttention for CUDA: its calls are checked, and computed in float64."""
    operators = checked_operators(torch.float64, played_by=FlashAttention2)
    computed_by(CudaFlash())
    cases = joined_cases(rng, CudaFlash(), 8)
    check_cases(ra.Ring(), cases)
    for transport in ("ring", "collective"):
        check_simulated(cases[:3], 3, layout="zigzag", transport=transport)
    shapes = {(given["is_causal"], "window_size_left" in given) for _, given in operators.calls}
    assert shapes == {(False, False), (True, False), (False, True)}


def test_joined_calls_are_never_cut(computed_by, monkeypatch, rng):
    """Their lengths would go with the rows; other calls are cut after a few."""
    monkeypatch.setattr(batched, "PART_ROWS", 1)
    counted = JoinedCalls(CpuFlash(), Joining(**EVERYTHING))
    computed_by(counted)
    check_cases(ra.Ring(), joined_cases(rng, CpuFlash(), 8))
    assert counted.with_lengths and counted.padded
