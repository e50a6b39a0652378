"""The fused kernels in Triton's interpreter: outputs, log-sum-exps and all gradients equal the oracle."""

import itertools
import sys
from functools import partial

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.compute import proof
from hf_ring_attention.compute.fused import choice, tiles
from hf_ring_attention.compute.fused.choice import fused_kernel, settings_for, why_not_fused
from hf_ring_attention.compute.fused.columns import Sizes
from hf_ring_attention.compute.fused.settings import Setting, Settings
from hf_ring_attention.compute.fused.tiles import Fused, FusedTiles
from hf_ring_attention.compute.kernel import Saved
from hf_ring_attention.plan.kernel_choice import ANY_TILES
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.plans import plan_rank
from tests.support import cases
from tests.support.cases import check_cases
from tests.support.fused import SMALL_BLOCKS, computed_by_fused, needs_interpreter, small_settings
from tests.support.patches import replaced
from tests.support.ring_cases import draw_fused_case

pytestmark = needs_interpreter
CPU = torch.device("cpu")


ALONE = [pytest.param(1, number, marks=pytest.mark.drawn(6)) for number in range(12)]
RINGS = [pytest.param(world_size, 0, marks=pytest.mark.drawn(3)) for world_size in (2, 3, 4)]


@pytest.mark.parametrize(("world_size", "number"), ALONE + RINGS)
def test_random_cases(world_size, number, rng):
    """Random patterns, packed and padded rows, groups of heads, widths, caps and sinks; with rows in other storage orders.

    Steps of a ring, or an exchange, resume the results of those before.
    """
    draw_fused_case(rng.randrange(2**31), world_sizes=(world_size,)).run()


case_of = partial(cases.case_of, dtype=torch.float32, head_dim=16, value_dim=16)


@pytest.mark.parametrize(
    "case",
    [
        case_of("window:12+3", documents=[[(0, 1), (1, 2), (2, 30), (33, 40)]]),
        case_of("longnet:8/1,all/2", num_heads=2, seq_len=24),
        case_of("pyramid:4,2", num_heads=7, num_kv_heads=1, value_dim=24, seq_len=20),
        case_of("exact", causal=False, softcap=2.0, sinks=True, seq_len=20),
    ],
    ids=["window", "longnet", "pyramid", "exact"],
)
def test_patterns(case):
    """Patterns that users ask for, of documents of one token too, groups of 7 heads, and two widths."""
    with computed_by_fused(SMALL_BLOCKS):
        check_cases(ra.Ring.alone(), [case])


def work_of(case, settings):
    problem = case.problem(SequenceLayout("contiguous", case.seq_len, 1))
    sizes = Sizes(case.batch, case.num_heads, case.num_kv_heads, case.seq_len, case.seq_len)
    return FusedTiles.of(plan_rank(problem, 0).own, sizes, settings, CPU)


@pytest.mark.parametrize(
    ("text", "length", "launches", "slots"),
    [("window:12", 32, 1, 0), ("window:12+3", 64, 1, 12), ("longnet:8/1,all/2", 32, 2, None)],
)
def test_launches_and_dtypes(text, length, launches, slots):
    """One launch of all tiles writes 16 bits at once; rows of dilated queries are added in float32 by a separate launch.

    A backward pass of a window is a launch of dq and one of dk and dv; with sinks that many queries see, two more. Keys that
    several branches show are added in float32.
    """
    case = case_of(text, seq_len=length)
    kernel = fused_kernel(CPU, torch.float16, 16, 16)
    started = count_launches(kernel)
    settings = small_settings(few_keys=True)._replace(dkdv=2 * (Setting(16, 32, 4, 1),), most_rows=48 if slots else 64)
    work = work_of(case, settings)
    assert (len(work.forward_launches), len(work.dq_launches)) == (launches, launches)
    q, k, v, dout, _ = (None if x is None else x.to(torch.float16) for x in case.tensors)
    out, lse = work.forward(kernel, q, k, v, 0.25)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    started.clear()
    grads = work.backward(kernel, dout, Saved(q, k, v, out, lse), 0.25)
    added = [launches > 1, slots is None, slots is None]
    assert [x.dtype for x in grads] == [torch.float32 if x else torch.float16 for x in added]
    of_keys = ["dkdv_kernel"] if not slots else ["dkdv_kernel", "dkdv_kernel", "sum_kernel"]
    assert started == [*["dq_kernel"] * launches, *of_keys]
    assert (work.sums and work.sums.slots) == slots  # The 3 sinks of 2 heads, in 2 parts.


def count_launches(kernel):
    """Returns a list that gets the name of each kernel that starts."""
    started = []

    class Counted:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(kernel, name)

        def __getitem__(self, grid):
            started.append(self.name)
            return self.kernel[grid]

    for name in ("forward_kernel", "dq_kernel", "dkdv_kernel", "sum_kernel"):
        setattr(kernel, name, Counted(name))
    return started


@pytest.mark.slow
def test_a_proof_runs_all_programs(monkeypatch):
    """Launches of few and of many keys, key rows that one program writes, that several write, and that are added."""
    replaced(monkeypatch, proof, _FAULTS={}, cases_of=lambda tiles: ["window"])
    few, many = Setting(64, 64, 4, 1, "one", small=True), Setting(128, 32, 4, 1, "split")
    settings = Settings((few, many), (few, many), (few, few), few._replace(keys=16))
    kernel, seen = Fused(settings), set()

    def start(function, items, arguments, **options):
        seen.add((function.fn.__name__, options.get("LOOPS"), options.get("RESUME"), options.get("ADD")))
        launch(function, items, arguments, **options)

    launch = tiles._start
    monkeypatch.setattr(tiles, "_start", start)
    assert proof.fault_of(kernel, None, ANY_TILES, CPU, torch.float16, 1, 16, 16) is None
    both = {
        (name, loops, add, None)
        for name, loops, add in itertools.product(("forward_kernel", "dq_kernel"), ("one", "split"), (False, True))
    }
    of_keys = {("dkdv_kernel", "one", None, add) for add in (False, True)}
    assert seen == both | of_keys | {("sum_kernel", None, None, None)}


def test_padding_may_hold_any_numbers(rng):
    """Rows without a key have out 0 and no gradient, even if q, k, v and dout are not numbers there."""
    case = case_of("window:6+2", documents=[[(3, 20), (22, 35)]], batch=1)
    q, k, v, dout, _ = (x if x is None else x.clone() for x in case.tensors)
    padding = [0, 1, 2, 20, 21, *range(35, 40)]
    for x in (q, k, v, dout):
        x[:, :, padding] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with computed_by_fused(SMALL_BLOCKS):
        out, lse = ra.ring_attention(*leaves, pattern=case.pattern, documents=case.documents, return_lse=True)
        out.backward(dout)
    assert torch.isneginf(lse[:, :, padding]).all()
    for x in (out.detach(), *(leaf.grad for leaf in leaves)):
        assert torch.isfinite(x).all()
        assert not x[:, :, padding].any()


def test_views_are_read_in_place():
    """Tensors as models store them, and results stored the same way."""
    case = case_of("window:6+2", seq_len=20)
    kernel = fused_kernel(CPU, torch.float32, 16, 16)
    q, k, v, dout, _ = case.tensors
    stored = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    work = work_of(case, SMALL_BLOCKS)
    (out, lse), (plain, plain_lse) = (work.forward(kernel, *some, 0.25) for some in (stored, (q, k, v)))
    assert torch.equal(out, plain)
    assert torch.equal(lse, plain_lse)
    assert out.transpose(1, 2).is_contiguous()
    gradients = [work.backward(kernel, dout, Saved(*stored, out, x), 0.25) for x in (lse, lse.mT.contiguous().mT)]
    for x, of_strided_lse in zip(*gradients, strict=True):
        assert torch.equal(x, of_strided_lse)


def test_one_batch_row_may_have_any_stride():
    """Numbers that 16 does not divide would have Triton compile again, and read number by number."""
    case, calls = case_of("window:6+2"), []
    kernel, work = fused_kernel(CPU, torch.float32, 16, 16), work_of(case, SMALL_BLOCKS)
    kernel.forward_kernel = {(len(work.forward_launches[0].items),): lambda *call, **_: calls.append(call)}
    q, k, v, _, _ = case.tensors
    for stride in (q.stride(0), 1, 7):
        work.forward(kernel, q.as_strided(q.shape, (stride, *q.stride()[1:])), k, v, 0.25)
    first, *others = ([x for x in call if isinstance(x, int)] for call in calls)
    assert others == [first, first]


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "reason"),
    [
        ("cpu", torch.float64, (16, 16), "no products of float64"),
        ("cpu", torch.bfloat16, (16, 16), "interpreter computes wrong products of bfloat16"),
        ("cpu", torch.float32, (16, 257), "at most 256 numbers, and these have 257"),
        ("meta", torch.float32, (16, 16), "needs a GPU, and the tensors are on meta"),
        ("cpu", torch.float16, (256, 1), None),
    ],
)
def test_reasons_against(device, dtype, widths, reason):
    against = why_not_fused(torch.device(device), dtype, *widths)
    assert against is reason is None or reason in against


def test_without_triton_and_without_its_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "needs a GPU" in why_not_fused(CPU, torch.float32, 16, 16)
    monkeypatch.setitem(sys.modules, "triton", None)
    choice._why_no_triton.cache_clear()
    assert "Triton cannot be imported (import of triton halted" in why_not_fused(CPU, torch.float32, 16, 16)
    choice._why_no_triton.cache_clear()


@pytest.mark.parametrize(("capability", "refused"), [((7, 0), True), ((7, 5), True), ((8, 0), False), ((12, 0), False)])
def test_older_devices_are_refused(capability, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = why_not_fused(torch.device("cuda"), torch.float16, 64, 64)
    assert ("needs compute capability 8.0" in (reason or "")) is refused


@pytest.mark.parametrize("kind", ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx90a"])
def test_every_device_has_settings(kind):
    for dtype, width in itertools.product((torch.float16, torch.float32), (1, 64, 80, 128, 192, 256)):
        settings = settings_for(dtype, width, kind)
        for setting in (*settings.forward, *settings.dq, *settings.dkdv):
            assert all(rows >= 16 and rows & (rows - 1) == 0 for rows in (setting.rows, setting.keys))
