"""cuDNN's attention for CUDA: torch accepts its calls, and the kernel converts their results."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ring_attention.compute import cuda_kernels
from hf_ring_attention.compute.cuda_kernels import Cudnn
from hf_ring_attention.compute.kernel import KernelCall, Saved
from hf_ring_attention.compute.kernels import Math
from tests.support.cuda_operators import HALVES, CheckedOperators, CudnnAttention, WithoutDeviceGuard

HAS_CUDNN = torch.cuda.is_available() and (torch.backends.cudnn.version() or 0) > 91500
CUDA = [pytest.mark.cuda, pytest.mark.skipif(not HAS_CUDNN, reason="needs a CUDA device, and cuDNN 9.15.1")]
#: Tiles, key/value heads, query heads on each, queries, keys, width of q and k, width of v.
SIZES = [(1, 1, 1, 64, 64, 8, 8), (2, 2, 3, 70, 70, 64, 128), (3, 1, 2, 65, 130, 128, 16), (1, 2, 4, 200, 64, 32, 40)]
CASES = [(sizes, shape) for sizes in SIZES for shape in ("full", "causal") if shape == "full" or sizes[3] == sizes[4]]


def by_head(*size):
    return size, lambda x: x


def by_token(tiles, heads, rows, width):
    return (tiles, rows, heads, width), lambda x: x.transpose(1, 2)


def of_wider_rows(tiles, heads, rows, width):
    return (tiles, heads, rows, width + 5), lambda x: x[..., 3 : 3 + width]


LAYOUTS = [by_head, by_token, of_wider_rows]


def tensors(sizes, make, layout=by_head):
    """q, k, v and the gradient of out."""
    tiles, heads, group, queries, keys, width, value_width = sizes
    shapes = [(heads * group, queries, width), (heads, keys, width), (heads, keys, value_width)]
    laid_out = [layout(tiles, *shape) for shape in (*shapes, (heads * group, queries, value_width))]
    return [turn(make(size)) for size, turn in laid_out]


@pytest.mark.parametrize(("sizes", "shape"), CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_calls_without_a_gpu(dtype, layout, sizes, shape, monkeypatch):
    with FakeTensorMode(), WithoutDeviceGuard():
        operators = CheckedOperators(dtypes=(dtype,))
        monkeypatch.setattr(cuda_kernels, "aten", operators)
        q, k, v, dout = tensors(sizes, lambda size: torch.empty(size, dtype=dtype, device="cuda"), layout)
        out, lse = Cudnn().forward(q, k, v, KernelCall(shape, 0.3))
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (dout.shape, dtype, q.shape[:3], torch.float32)
        # Out may be stored in any way: merged, kept by checkpointing, or sliced from more heads.
        for other in LAYOUTS:
            *_, merged = tensors(sizes, lambda size: torch.empty(size, dtype=dtype, device="cuda"), other)
            grads = Cudnn().backward(dout, Saved(q, k, v, merged, lse.mT.contiguous().mT), KernelCall(shape, 0.3))
            assert [(x.shape, x.dtype, x.device.type) for x in grads] == [(x.shape, dtype, "cuda") for x in (q, k, v)]
        assert len(operators.calls) == 4


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_tensors_as_models_store_them_are_not_copied(dtype, monkeypatch):
    with FakeTensorMode(), WithoutDeviceGuard():
        operators = CheckedOperators(dtypes=(dtype,))
        monkeypatch.setattr(cuda_kernels, "aten", operators)
        inputs = tensors(SIZES[1], lambda size: torch.empty(size, dtype=dtype, device="cuda"), by_token)
        out, lse = Cudnn().forward(*inputs[:3], KernelCall("causal", 0.3))
        Cudnn().backward(inputs[3], Saved(*inputs[:3], out, lse), KernelCall("causal", 0.3))
        (_, forward), (_, backward) = operators.calls
        for name, x in zip(("query", "key", "value", "grad_out"), inputs, strict=True):
            assert storage(backward[name]) == storage(x)
        assert storage(forward["query"]) == storage(inputs[0])
        assert storage(backward["out"]) == storage(out)


def storage(x):
    return x.untyped_storage()._cdata


@pytest.mark.parametrize("lse_dims", [3, 4])
@pytest.mark.parametrize(("sizes", "shape"), CASES, ids=str)
def test_the_kernel_computes_what_plain_math_does(sizes, shape, lse_dims, monkeypatch, generator):
    """As one of several tiles of a softmax, too: with an out and an lse of more keys."""
    operators = CheckedOperators(CudnnAttention(lse_dims), dtypes=(torch.float64,))
    monkeypatch.setattr(cuda_kernels, "aten", operators)
    compare(tensors(sizes, lambda size: torch.randn(size, generator=generator, dtype=torch.float64)), shape, 1e-12)


@pytest.mark.parametrize(("sizes", "shape"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=CUDA, id=str(dtype)) for dtype in HALVES])
def test_on_a_gpu(dtype, sizes, shape, generator):
    for layout in LAYOUTS[:2]:
        inputs = tensors(sizes, lambda size: torch.randn(size, generator=generator).to("cuda", dtype), layout)
        compare(inputs, shape, 8 * torch.finfo(dtype).eps)


def compare(inputs, shape, tolerance):
    q, k, v, dout = inputs
    call = KernelCall(shape, 0.3)
    out, lse = Cudnn().forward(q, k, v, call)
    merged, merged_lse = 0.5 * out, lse + 0.7
    found = out, lse, *Cudnn().backward(dout, Saved(q, k, v, merged, merged_lse), call)
    wide = [x.double() for x in (q, k, v, merged, merged_lse)]
    want = *Math().forward(*wide[:3], call), *Math().backward(dout.double(), Saved(*wide), call)
    for x, y in zip(found, want, strict=True):
        assert float((x.double() - y).abs().max()) <= tolerance * float(y.abs().max())
    sums = tuple(torch.ones_like(x, dtype=lse.dtype) for x in (q, k, v))
    assert Cudnn().backward(dout, Saved(q, k, v, merged, merged_lse), call, sums) is sums
    for total, gradient in zip(sums, found[2:], strict=True):
        torch.testing.assert_close(total, 1 + gradient.to(total.dtype))
