"""The operators behind attention, as torch's own checks of operators see them; and what only they do."""

import gc
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import hf_ring_attention as ra
from hf_ring_attention.ring.planned import planned_call
from hf_ring_attention.ring.ring import ring_alone
from tests.support.ranks import run_ranks
from tests.support.tolerance import EXACT, distance

OPERATORS = torch.ops.hf_ring_attention
in_graphs = pytest.mark.skipif(
    TorchVersion(torch.__version__) < TorchVersion("2.13"), reason="torch takes no objects as constants"
)


def tensors(tokens=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(2, heads, tokens, 8, dtype=dtype, generator=generator) for heads in (4, 2, 2))
    return [x.requires_grad_() for x in (q, k, v)]


def call_of(q, k, v, sinks=None, ring=None, **options):
    """A planned call, which the caller must keep, and the number that names it."""
    call = planned_call(ring or ring_alone(), q, k, v, sinks, "window:4+1", **options)
    return call, call.number


@pytest.mark.parametrize(("dtype", "with_sinks"), [(torch.float64, True), (torch.float32, False)])
def test_torch_checks_the_operator(dtype, with_sinks):
    """Schema, autograd, shapes of fake tensors, and tracing with dynamic shapes, by `torch.library.opcheck`."""
    q, k, v = tensors(dtype=dtype)
    sinks = torch.randn(4, dtype=dtype, requires_grad=True) if with_sinks else None
    call, number = call_of(q, k, v, sinks)
    torch.library.opcheck(OPERATORS.attend.default, (q, k, v, sinks, number, 0, "", []))
    with torch.no_grad():
        out, lse = OPERATORS.attend(q, k, v, sinks, number, 0, "", [])
        saved = [x.detach() for x in (q, k, v, out, lse)]
        torch.library.opcheck(
            OPERATORS.attend_backward.default, (torch.randn_like(out), saved, sinks, number, 0, "", [])
        )
    assert call.problem.num_heads == 4


@pytest.mark.parametrize("pattern", ["exact", "window:4+1"])
def test_outputs_keep_no_padding_of_kernels(pattern):
    """Values that are narrower than keys, in float32, whose kernel takes one width."""
    q, k, v = tensors(dtype=torch.float32)
    whole = ra.ring_attention(q, k, v, pattern=pattern)
    out = ra.ring_attention(q, k, v[..., :5], pattern=pattern)
    assert out.untyped_storage().nbytes() == out.nbytes
    assert distance(out, whole[..., :5]) <= 1e-6


def _checked_on_a_ring(rank):
    """The same of the operators that gather and cut, and of the heads transport's."""
    ring = ra.Ring(transport="heads")
    local = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(OPERATORS.side_by_side.default, (local, ring.number, 1))
    torch.library.opcheck(OPERATORS.to_owners.default, (torch.randn(2, 6, 4), ring.number, 1))
    q, k, v = tensors()
    _, number = call_of(q, k, v, ring=ring, with_lse=True)
    torch.library.opcheck(
        OPERATORS.attend_by_heads.default,
        (q, k, v, None, number, 0, "", []),
        test_utils=("test_schema", "test_autograd_registration"),
    )


def test_torch_checks_the_operators_of_a_ring():
    run_ranks(_checked_on_a_ring, 2)


def apart(functions, x, *scales):
    """The largest distance of outputs and gradients of two functions."""
    results = []
    for function in functions:
        out = function(*x, *scales)
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    return max(map(distance, *results))


def _in_one_graph(rank):
    """Compares the function in a graph, over lengths, with the function itself."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    ring = ra.Ring(transport="ring")

    def attend(q, k, v):
        return ra.ring_attention(1.5 * q, k, v, pattern="pyramid:4,2", ring=ring).sin()

    call = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (16, 24, 36):
        assert apart((attend, call), tensors(tokens)) <= EXACT
        assert counter.frame_count == 1


@in_graphs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_one_graph_holds_the_function():
    run_ranks(_in_one_graph, 2)


@in_graphs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_one_graph_holds_scales_that_change():
    """More of them than torch would compile anew."""
    torch._dynamo.reset()
    counter, pattern = CompileCounterWithBackend("aot_eager"), ra.Pattern.window(4)

    def attend(q, k, v, scale, softcap):
        return ra.ring_attention(1.5 * q, k, v, pattern=pattern, scale=scale, softcap=softcap).sin()

    call, x = torch.compile(attend, fullgraph=True, backend=counter), tensors()
    for number in range(9):
        assert apart((attend, call), x, 0.1 + 0.1 * number, 2.0 + number) <= EXACT
    assert counter.frame_count <= 3


@in_graphs
def test_graphs_keep_no_ring_alive():
    """Nor do the last runs of graphs, which wait for a backward pass, once others have come."""
    x = torch.randn(1, 2, 8, 4)

    def traced():
        torch._dynamo.reset()
        ring = ra.Ring.alone()
        torch.compile(
            lambda x: ra.ring_attention(x, x, x, pattern="window:4", ring=ring), fullgraph=True, backend="eager"
        )(x)
        torch._dynamo.reset()
        return weakref.ref(ring)

    kept = traced()
    for _ in range(300):
        torch.ops.hf_ring_attention.begin_call(x, 0, "exact", True, (0, 1), None, None)
    gc.collect()
    assert kept() is None


def test_a_second_derivative_is_refused():
    q, k, v = tensors()
    out = ra.ring_attention(q, k, v, pattern="window:4")
    with pytest.raises(RuntimeError, match="no second derivative: leave out create_graph=True"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: ra.ring_attention(x, k, v, pattern="window:4"), (q.detach(),), (q.detach(),))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_parts_of_a_layer_that_keeps_attention(whole):
    """torch.compile compiles them, and what holds attention itself; the kept results are used all the same."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x.sin().cos(), backend=counter)

    def attend(x):
        return ra.ring_attention(x, x, x, pattern="window:4+1")

    layers = [lambda x: attend(x).sin().cos(), lambda x: compiled(attend(x))]
    if whole:
        layers[1] = torch.compile(layers[0], backend=counter)
    x, gradients = torch.randn(1, 2, 12, 8, dtype=torch.float64, requires_grad=True), []
    for layer in layers:
        out = checkpoint(layer, x, use_reentrant=False, context_fn=ra.keep_attention)
        gradients += torch.autograd.grad(out.square().sum(), x)
    assert counter.frame_count > 0 and distance(*gradients) <= EXACT
