"""Every kernel against the formula in float64, forward and backward, and as one of several tiles of a softmax."""

import itertools

import pytest
import torch

from hf_ring_attention.compute import kernels
from hf_ring_attention.compute.cuda_kernels import CudaEfficient, CudaFlash, Cudnn
from hf_ring_attention.compute.kernel import KernelCall, Saved
from hf_ring_attention.compute.kernels import CpuFlash, Math, choose_kernel
from hf_ring_attention.compute.merge import accumulation_dtype
from hf_ring_attention.plan.kernel_choice import TileKinds
from tests.support.cuda_operators import HALVES, FlashAttention2
from tests.support.largest_result import LargestResult
from tests.support.patches import replaced

CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FLASH = pytest.mark.skipif(
    not torch.backends.cuda.is_flash_attention_available(), reason="torch was built without FlashAttention for CUDA"
)
FLOATS = (torch.float64, torch.float32, *HALVES)

# (kernel, device, dtypes it computes in)
KERNELS = [
    pytest.param(CpuFlash(), "cpu", FLOATS, id="cpu_flash"),
    pytest.param(Math(), "cpu", FLOATS, id="math"),
    pytest.param(CudaFlash(), "cuda", HALVES, id="cuda_flash", marks=[*CUDA, FLASH]),
    pytest.param(CudaEfficient(), "cuda", (torch.float32, *HALVES), id="cuda_efficient", marks=CUDA),
    pytest.param(Math(), "cuda", FLOATS, id="cuda_math", marks=CUDA),
]

# tiles, key/value heads, query heads on each, queries, keys, width of q and k, width of v
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 2, 3, 17, 17, 8, 8),
    (3, 1, 2, 5, 33, 7, 16),
    (1, 2, 4, 70, 9, 16, 5),
    (2, 3, 1, 64, 64, 33, 13),
    (1, 1, 2, 130, 130, 16, 24),
    (1, 2, 1, 1, 40, 64, 64),
    (1, 1, 3, 90, 280, 8, 8),
    (1, 1, 1, 40, 1, 5, 3),
]
CASES = [(sizes, "full") for sizes in SHAPES]
CASES += [(sizes, "causal") for sizes in SHAPES if sizes[3] == sizes[4]]
CASES += [(sizes, "band") for sizes in SHAPES if sizes[3] <= sizes[4]]


def visible(queries, keys, shape):
    everything = torch.ones(queries, keys, dtype=torch.bool)
    if shape == "band":
        return everything.triu().tril(keys - queries)
    return everything.tril() if shape == "causal" else everything


def formula(dtype, q, k, v, dout, shape, scale):
    """out, dq, dk, dv and lse, computed in `dtype` and given in float64."""
    q, k, v, dout = (x.detach().cpu().to(dtype).transpose(1, 2) for x in (q, k, v, dout))
    window = {"full": (False, None, None), "causal": (True, None, None), "band": (False, k.shape[1] - q.shape[1], 0)}
    out, lse = FlashAttention2.forward(q, k, v, scale, *window[shape])
    grads = FlashAttention2.backward(dout, q, k, v, out, lse, scale, *window[shape])
    return [*(x.transpose(1, 2).double() for x in (out, *grads)), lse.double()]


def test_the_formula_is_what_autograd_finds(generator):
    for sizes, shape in CASES:
        _, _, group, queries, keys, *_ = sizes
        q, k, v, dout = make(sizes, torch.float64, generator)
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        bias = torch.zeros(queries, keys, dtype=torch.float64).masked_fill(~visible(queries, keys, shape), -torch.inf)
        keys, values = (y.repeat_interleave(group, 1) for y in x[1:])
        out = torch.softmax(0.3 * x[0] @ keys.mT + bias, -1) @ values
        want = [out, *torch.autograd.grad(out, x, dout)]
        for got, exact in zip(formula(torch.float64, q, k, v, dout, shape, 0.3), want, strict=False):
            torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def make(shape, dtype, generator, device="cpu"):
    """q, k, v and the gradient of out."""
    tiles, heads, group, queries, keys, width, value_width = shape
    counts = ((heads * group, queries), (heads, keys), (heads, keys), (heads * group, queries))
    sizes = [(tiles, *count, wide) for count, wide in zip(counts, (width, width, value_width, value_width))]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype) for size in sizes]


def largest(x):
    return float(x.abs().max())


def check(kernel, q, k, v, dout, shape, scale=None, between=lambda out, lse: (out, lse)):
    """Forward and backward against the formula: twice the error that the formula itself makes in the dtype.

    `between` may lay out (out, lse) anew before they are handed to backward.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype, inputs = q.dtype, (q, k, v, dout)
    before = [x.clone() for x in inputs]
    out, lse = kernel.forward(q, k, v, KernelCall(shape, scale))
    grads = kernel.backward(dout, Saved(q, k, v, *between(out, lse)), KernelCall(shape, scale))
    assert all(torch.equal(x, x_before) for x, x_before in zip(inputs, before, strict=True)), "an input was changed"
    assert out.shape == (*q.shape[:3], v.shape[-1])
    assert lse.shape == q.shape[:3]
    assert (out.dtype, lse.dtype) == (dtype, accumulation_dtype(dtype))
    sums = tuple(torch.ones_like(x, dtype=accumulation_dtype(dtype)) for x in (q, k, v))
    assert kernel.backward(dout, Saved(q, k, v, *between(out, lse)), KernelCall(shape, scale, 1), sums) is sums
    for total, grad in zip(sums, grads, strict=True):
        difference, size = largest(total.double() - 1 - grad.double()), largest(grad.double())
        assert difference <= 8 * torch.finfo(dtype).eps * (size + 1)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert grad.dtype == x.dtype

    *want, want_lse = formula(torch.float64, *inputs, shape, scale)
    # Nothing is more exact than float64: take the error of float32, smaller by the ratio of their roundings.
    lower = torch.float32 if dtype == torch.float64 else dtype
    *low, _ = formula(lower, *inputs, shape, scale)
    rounding = torch.finfo(dtype).eps
    # All gradients share a scale: if a row has one key, dq and dk are differences that vanish.
    scales = [largest(want[0])] + [max(map(largest, want[1:]))] * 3
    error = max(largest(a - b) / size for a, b, size in zip(low, want, scales, strict=True))
    error = (2 * error * rounding / torch.finfo(lower).eps) + rounding
    if dtype in (torch.float32, torch.float64):
        error *= 8  # the order of sums is the kernel's own, which at the last digit can be the whole of the error
    for name, got, exact, size in zip(("out", "dq", "dk", "dv"), (out, *grads), want, scales, strict=True):
        difference = largest(got.detach().cpu().double() - exact)
        assert difference <= error * size, f"{kernel.name}, {dtype}: {name} is {difference} off, of {error * size}"
    # CPU flash has an approximate exponential for 16 bits: 6e-5 off, a tenth of the rounding of the inputs.
    error = 2**-13 if dtype in HALVES else 16 * rounding * max(1.0, largest(want_lse))
    difference = largest(lse.cpu().double() - want_lse)
    assert difference <= error, f"{kernel.name}, {dtype}: lse is {difference} off, of {error}"


@pytest.mark.parametrize(("sizes", "shape"), CASES, ids=str)
@pytest.mark.parametrize(("kernel", "device", "dtypes"), KERNELS)
def test_forward_and_backward(kernel, device, dtypes, sizes, shape, generator):
    for dtype in dtypes:
        check(kernel, *make(sizes, dtype, generator, device), shape)


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or (torch.backends.cudnn.version() or 0) <= 91500,
    reason="needs a CUDA device, and cuDNN 9.15.1",
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 64, 64, 8, 8), (2, 2, 3, 70, 70, 64, 128), (3, 1, 2, 65, 130, 128, 16), (1, 2, 4, 200, 64, 32, 40)],
)
def test_cudnn(sizes, dtype, generator):
    """It takes full and causal tiles of 64 rows or more, of widths that 8 divides; against plain math in float64."""
    for shape, lay_out in itertools.product(("full", "causal")[: 1 + (sizes[3] == sizes[4])], (torch.clone, by_token)):
        q, k, v, dout = map(lay_out, make(sizes, dtype, generator, "cuda"))
        call = KernelCall(shape, 0.3)
        out, lse = Cudnn().forward(q, k, v, call)
        merged = 0.5 * out, lse + 0.7  # of a softmax with other keys
        found = out, lse, *Cudnn().backward(dout, Saved(q, k, v, *merged), call)
        wide = [x.double() for x in (q, k, v, *merged)]
        want = *Math().forward(*wide[:3], call), *Math().backward(dout.double(), Saved(*wide), call)
        for x, y in zip(found, want, strict=True):
            assert largest(x.double() - y) <= 8 * torch.finfo(dtype).eps * largest(y)
        sums = tuple(torch.ones_like(x, dtype=lse.dtype) for x in (q, k, v))
        assert Cudnn().backward(dout, Saved(q, k, v, *merged), call, sums) is sums
        for total, gradient in zip(sums, found[2:], strict=True):
            torch.testing.assert_close(total, 1 + gradient.to(total.dtype))


def by_token(x):
    """The same values, stored [T, L, H, D] as models make them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other_column(x):
    return x.repeat_interleave(2, -1)[..., ::2]


def some_rows(x):
    """The same values inside a longer tensor."""
    return torch.cat([x.new_full((*x.shape[:2], 3, x.shape[3]), torch.nan), x], 2)[:, :, 3:]


def backwards(x):
    """The same values, stored with their tiles and heads the other way round."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("shape", ["full", "causal", "band"])
@pytest.mark.parametrize("rows_at_once", [0, 5, 31])
def test_math_gives_the_same_in_slices(shape, rows_at_once, generator):
    heads, group, n, width = 2, 3, 32, 4
    q, k, v, dout = make((1, heads, group, 21 if shape == "band" else n, n, width, width), torch.float64, generator)

    def both(kernel):
        out, lse = kernel.forward(q, k, v, KernelCall(shape, 0.5))
        return out, lse, *kernel.backward(dout, Saved(q, k, v, out, lse), KernelCall(shape, 0.5))

    sliced = Math()
    sliced.budget = heads * group * n * rows_at_once
    with LargestResult() as seen:
        got = both(sliced)
    # One row is the least there is; and the inputs are there anyway.
    assert seen.elements <= max(heads * group * n * max(rows_at_once, 1), q.numel())
    for part, whole in zip(got, both(Math()), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-13, atol=1e-13)
    for dtype in FLOATS:
        check(sliced, *(x.to(dtype) for x in (q, k, v, dout)), shape)


def expanded(x):
    """One tile for all, with a stride of 0."""
    return x[:1].expand_as(x)


@pytest.mark.parametrize("lay_out", [by_token, every_other_column, some_rows, backwards, expanded])
@pytest.mark.parametrize(("kernel", "device", "dtypes"), KERNELS)
def test_inputs_need_not_be_contiguous(kernel, device, dtypes, lay_out, generator):
    for shape in ((2, 2, 3, 17, 17, 8, 8), (2, 2, 2, 20, 20, 8, 5)):
        x = [lay_out(x) for x in make(shape, dtypes[0], generator, device)]
        assert not any(part.is_contiguous() for part in x)
        check(
            kernel, *x, "causal", between=lambda out, lse: (lay_out(out) if lay_out != expanded else out, by_token(lse))
        )


def test_kernels_are_chosen(monkeypatch):
    """By the facts of the very device, and of what torch was built with; plan/test_kernel_choice.py has the whole choice."""
    asked = []
    replaced(monkeypatch, kernels, fault_of=lambda *_: None, why_not_fused=lambda *_: "it is not built yet")

    def chosen(device, dtype, capability=(9, 0), flash=True, cudnn=None):
        replaced(monkeypatch, torch.cuda, get_device_capability=lambda device: asked.append(device) or capability)
        replaced(monkeypatch, torch.backends.cuda, is_flash_attention_available=lambda: flash)
        replaced(monkeypatch, torch.backends.cudnn, version=lambda: cudnn)
        tiles = TileKinds(rows=4096, full_rows=True)
        return type(choose_kernel(torch.device(device), dtype, 64, 64, tiles=tiles))

    half = torch.float16
    assert [chosen("cpu", half), chosen("mps", torch.float32)] == [CpuFlash, Math]
    # Old releases of cuDNN are not used, and older devices get kernels that they can run.
    for facts, kernel in (
        ({}, CudaFlash),
        ({"flash": False}, CudaEfficient),
        ({"cudnn": 91500}, CudaFlash),
        ({"cudnn": 91501}, Cudnn),
        ({"capability": (7, 5)}, CudaEfficient),
    ):
        assert chosen("cuda:1", half, **facts) is kernel
    assert set(asked) == {torch.device("cuda:1")}, "devices of one machine may differ"
    cpu = torch.device("cpu")
    assert choose_kernel(cpu, torch.float32, 8, 8) is choose_kernel(cpu, torch.float32, 8, 8)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_other_dtypes_are_refused(dtype, device):
    with pytest.raises(ValueError, match=f"attention needs floating point tensors, got {dtype}"):
        choose_kernel(torch.device(device), dtype, 64, 64)
