"""A kernel that is wrong on a device is refused with its errors, and the proof changes nothing around it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import hf_ring_attention as ra
from hf_ring_attention.compute import kernels, proof
from hf_ring_attention.compute.cuda_kernels import CudaFlash, Cudnn
from hf_ring_attention.compute.kernel import added, merged
from hf_ring_attention.compute.kernels import CpuFlash, Math
from hf_ring_attention.plan.kernel_choice import ANY_TILES, TileKinds
from hf_ring_attention.ring import attention, planned
from tests.support.cuda_operators import CudnnAttention, FlashAttention2
from tests.support.patches import replaced

CPU = torch.device("cpu")
#: Of patterns, of exact attention, and of both if one rank holds whole rows of one document.
TILES = {
    "window": ANY_TILES,
    "exact": TileKinds(rows=100, shapes=("causal", "full")),
    "whole window": TileKinds(whole_rows=True, full_rows=True, few_calls=True),
    "whole exact": TileKinds(rows=256, whole_rows=True, full_rows=True, shapes=("causal", "full")),
}
ALL_TILES = pytest.mark.parametrize("tiles", TILES)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def nothing_is_proved(monkeypatch):
    replaced(monkeypatch, proof, _FAULTS={})


def fault(kernel, dtype=torch.float32, widths=(16, 16), softcap=None, tiles="window", group=2):
    return proof.fault_of(kernel, softcap, TILES[tiles], CPU, dtype, group, *widths)


@pytest.mark.drawn(6)
@ALL_TILES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_that_are_right(dtype, tiles):
    for kernel, softcap, widths in ((CpuFlash(), None, (64, 128)), (Math(), None, (33, 5)), (Math(2.0), 2.0, (33, 5))):
        assert fault(kernel, dtype, widths, softcap, tiles) is None


def everything_is_seen(q, k, v, call):
    return q, k, v, call._replace(shape="full") if call.shape == "causal" else call._replace(scale=call.scale * 1.05)


def raises(*_):
    raise RuntimeError("no compiler\nand a long trace")


def changed(x, value, *index):
    """The tensor with another value at an index."""
    x = x.clone()
    x[index] = value
    return x


class Wrong(Math):
    """Plain math with a mistake in the arguments, the results or the gradients."""

    joining = None  # each tile in a separate call

    def __init__(self, before=lambda *x: x, after=lambda *x: x, backward=lambda *x: x):
        super().__init__()
        self.mistakes = before, after, backward

    def forward(self, q, k, v, call, totals=None):
        before, after, _ = self.mistakes
        return merged(after(*super().forward(*before(q, k, v, call))), totals)

    def backward(self, dout, saved, call, sums=None):
        return added(self.mistakes[2](*super().backward(dout, saved, call)), sums)


class OwnLse(Wrong):
    """In its backward pass, a softmax of its own keys."""

    def backward(self, dout, saved, call, sums=None):
        _, lse = Math.forward(self, *saved[:3], call)
        return super().backward(dout, saved._replace(lse=lse), call, sums)


def lse_to_base_2(out, lse):
    return out, lse / 0.69314718


WRONG = [
    (OwnLse(), "dv"),
    (Wrong(before=lambda q, k, v, call: (q, k, changed(v, 0, ..., -1, slice(None)), call)), "out"),
    (Wrong(before=everything_is_seen), "out"),
    (Wrong(before=raises), "RuntimeError: no compiler"),
    (Wrong(after=lambda out, lse: (changed(out, 0, 0, -1, -1), lse)), "out"),
    (Wrong(after=lambda out, lse: (changed(out, torch.nan, 0, 0, 0, 0), lse)), "out is inf off"),
    (Wrong(after=lse_to_base_2), "lse"),
    (Wrong(backward=lambda dq, dk, dv: (dq, 1.1 * dk, dv)), "dk"),
    (Wrong(backward=lambda dq, dk, dv: (dq, dk, changed(dv, 0, ..., -1, slice(None)))), "dv"),
]


@pytest.mark.drawn(9)
@ALL_TILES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kernel", "named"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_kernels_that_are_wrong(kernel, named, dtype, tiles):
    found = fault(kernel, dtype, tiles=tiles)
    assert named in (found or "nothing"), found
    assert "\n" not in found


def test_a_kernel_is_tried_once(monkeypatch):
    tried = []

    class Counted(Math):
        def forward(self, *call):
            tried.append(threading.current_thread())
            return super().forward(*call)

    assert fault(Counted()) is None
    assert tried
    assert threading.current_thread() not in tried, "the modes of this thread would be in force"
    count = len(tried)
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda _: fault(Counted()), range(8))] == [None] * 8
    assert len(tried) == count
    assert fault(Counted(), torch.float16) is None
    assert len(tried) > count


@pytest.mark.drawn(2)
@ALL_TILES
def test_each_group_of_heads_and_long_tiles_are_tried(tiles):
    """Kernels are compiled for each group, and blocks of keys that need no mask are other code."""

    def wrong_for_groups_of_3(q, k, v, call):
        return q, k * 1.1 if q.shape[1] == 3 * k.shape[1] else k, v, call

    def wrong_for_long_tiles(q, k, v, call):
        return q, k * 1.1 if q.shape[2] > 100 and call.shape == "causal" else k, v, call

    kernel = Wrong(before=wrong_for_groups_of_3)
    assert [fault(kernel, tiles=tiles, group=group) is None for group in (1, 2, 3)] == [True, True, False]
    assert "out" in fault(Wrong(before=wrong_for_long_tiles), torch.float16, tiles=tiles)


def test_lack_of_memory_is_no_fault_of_the_kernel():
    def full(*_):
        raise torch.OutOfMemoryError("full")

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            fault(Wrong(before=full))


@contextmanager
def changed_by(change, inside, outside):
    """The context between two calls of a function that changes a setting of torch."""
    change(inside)
    try:
        yield
    finally:
        change(outside)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "context",
    [
        partial(torch.autocast, "cpu", torch.bfloat16), torch.inference_mode, torch.enable_grad, FakeTensorMode,
        partial(torch.device, "meta"), partial(changed_by, torch.use_deterministic_algorithms, True, False),
        partial(changed_by, torch.set_default_dtype, torch.bfloat16, torch.float32),
    ],
)  # fmt: skip
def test_the_proof_is_the_same_in_any_context_and_draws_no_random_numbers(context):
    state = torch.get_rng_state()
    with context():
        assert fault(CpuFlash()) is None
        assert "lse" in fault(Wrong(after=lse_to_base_2), torch.float16)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(not attention._OBJECTS_ARE_CONSTANTS, reason="torch takes no objects as constants")
def test_inside_a_graph(monkeypatch):
    """Calls of a graph are planned, and kernels chosen, inside of the operator; a backward pass may choose, too."""
    found = []
    choose = planned.choose_kernel

    def chosen(*call):
        found.append(fault(CpuFlash()))
        proof._FAULTS.clear()
        return choose(*call)

    replaced(monkeypatch, planned, choose_kernel=chosen)
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    compiled = torch.compile(lambda x: ra.ring_attention(x, x, x, pattern="window:4"), backend="eager", fullgraph=True)
    compiled(x).sum().backward()
    checkpoint(lambda x: ra.ring_attention(x, x, x, pattern="window:4").sin(), x, use_reentrant=False).sum().backward()
    assert found
    assert set(found) == {None}


# ---- what is made of it


@pytest.fixture
def cuda_facts(monkeypatch):
    replaced(monkeypatch, torch.cuda, get_device_capability=lambda device: (9, 0))
    replaced(monkeypatch, torch.backends.cuda, is_flash_attention_available=lambda: True)
    replaced(monkeypatch, kernels, why_not_fused=lambda *_: "it is not here")
    faults = {}
    replaced(monkeypatch, kernels, fault_of=lambda kernel, *_: faults.get(kernel.name))
    return faults


def test_a_refused_kernel_is_named_and_the_next_one_taken(cuda_facts):
    noted = {}

    def chosen(setting="auto"):
        call = torch.device("cuda"), torch.bfloat16, 64, 64, None, setting, ANY_TILES
        kernel = kernels.choose_kernel(*call, noted.__setitem__)
        [decision] = noted.values()
        assert kernel.name == decision.choice
        return kernel.name, decision.reason

    assert chosen()[0] == "flash"
    cuda_facts["flash"] = "out is 3.0e-01 off, of at most 1.0e-02"
    name, reason = chosen()
    assert name == "efficient"
    assert reason.endswith("; flash failed its proof: out is 3.0e-01 off, of at most 1.0e-02")
    with pytest.raises(ValueError, match="kernel='flash' failed its proof on cuda: out is 3"):
        chosen("flash")
    cuda_facts["efficient"] = "RuntimeError: no kernel image"
    assert chosen()[0] == "math"


def test_a_fault_is_logged_once(caplog):
    with caplog.at_level("WARNING"):
        for _ in range(2):
            fault(Wrong(after=lse_to_base_2))
    [record] = caplog.records
    assert "kernel math is not used on cpu for torch.float32" in record.getMessage()
    assert "lse is" in record.getMessage()


def test_only_the_chosen_kernel_is_proved_and_the_next_if_it_fails(cuda_facts, monkeypatch):
    """For all tiles: other kernels that could compute the call are not compiled."""
    proved = []
    monkeypatch.setattr(
        kernels, "fault_of", lambda kernel, *_: proved.append(kernel.name) or cuda_facts.get(kernel.name)
    )
    replaced(monkeypatch, kernels, why_not_fused=lambda *_: None, fused_kernel=lambda *_: SimpleNamespace(name="fused"))
    replaced(monkeypatch, torch.backends.cudnn, version=lambda: 92000)
    kernels._kernel.cache_clear()

    def chosen(tiles, softcap=None, group=4):
        proved.clear()
        call = torch.device("cuda"), torch.bfloat16, 64, 64, softcap, "auto", tiles
        return kernels.choose_kernel(*call, group=group).name, [*proved]

    whole = TILES["whole exact"]._replace(rows=4096)
    for tiles, name in [(ANY_TILES, "fused"), (whole, "cudnn"), (TileKinds(few_queries=True), "flash")]:
        assert chosen(tiles) == (name, [name])
    assert chosen(ANY_TILES, 2.0) == ("fused", ["fused"])
    assert chosen(ANY_TILES, group=1) == ("fused", ["fused"])
    cuda_facts["cudnn"] = "out is off"
    assert chosen(whole) == ("flash", ["cudnn", "flash"])
    kernels._kernel.cache_clear()


class InFloat32:
    """Operators that compute in float32 and round their results."""

    def __init__(self, operators):
        self.operators = operators

    def __getattr__(self, name):
        def call(*args, **kwargs):
            dtype = args[0].dtype
            wide = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
            found = getattr(self.operators, name)(*wide, **kwargs)
            kept = (1,) if "back" not in name else ()  # a log-sum-exp
            return [x.to(dtype) if isinstance(x, torch.Tensor) and i not in kept else x for i, x in enumerate(found)]

        return call


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "operators", "tiles"),
    [
        *((CudaFlash(), FlashAttention2, tiles) for tiles in TILES),
        *((Cudnn(), CudnnAttention(), tiles) for tiles in ("exact", "whole exact")),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "name", ""),
)
def test_kernels_for_cuda_by_stand_ins(kernel, operators, tiles, dtype, checked_operators):
    checked_operators(dtype, played_by=InFloat32(operators))
    assert fault(kernel, dtype, (64, 64), None, tiles) is None
