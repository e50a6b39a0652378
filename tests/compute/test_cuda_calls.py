"""Calls of CUDA's operators as torch accepts them, on tensors that have sizes, strides and a device, but no numbers.

The stand-ins of torch (FakeTensorMode) show the shapes that an operator makes of its arguments. tests.support.cuda_operators
checks the other demands of a kernel. Only a machine with a GPU shows that the kernels compute right: test_kernels.py.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ring_attention.compute import bands, cuda_kernels
from hf_ring_attention.compute.cuda_kernels import CudaEfficient, CudaFlash
from hf_ring_attention.compute.kernel import KernelCall, Saved
from hf_ring_attention.compute.merge import accumulation_dtype
from tests.support.cuda_operators import HALVES, CheckedOperators, WithoutDeviceGuard

SHAPES = ("full", "causal", "band")
CUDA_KERNELS = [
    *((CudaFlash(), dtype) for dtype in HALVES),
    *((CudaEfficient(), dtype) for dtype in (torch.float32, *HALVES)),
]
#: Of q and k, and of v.
WIDTHS = [(width, width) for width in (5, 8, 33, 64, 96, 128, 192, 256)]
WIDTHS += [(64, 128), (192, 128), (8, 5), (33, 256), (1, 40)]


@pytest.fixture(autouse=True)
def no_gpu():
    """Tensors of a CUDA device that hold nothing."""
    with FakeTensorMode(), WithoutDeviceGuard():
        yield


@pytest.fixture
def operators(monkeypatch):
    def checked(*dtypes):
        operators = CheckedOperators(dtypes=dtypes)
        monkeypatch.setattr(cuda_kernels, "aten", operators)
        return operators

    return checked


def ids(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.name + ("" if getattr(value, "softcap", None) is None else "_capped")


def packed(*size, dtype):
    return torch.empty(size, dtype=dtype, device="cuda")


def by_token(tiles, heads, rows, width, dtype):
    """Stored as models make them."""
    return packed(tiles, rows, heads, width, dtype=dtype).transpose(1, 2)


def of_wider_rows(tiles, heads, rows, width, dtype):
    """Columns 3 to 3 + width of rows that are wider by an odd number."""
    return packed(tiles, heads, rows, width + 5, dtype=dtype)[..., 3 : 3 + width]


def off_by_one(tiles, heads, rows, width, dtype):
    """Contiguous from the second number of a storage on."""
    return packed(tiles * heads * rows * width + 1, dtype=dtype)[1:].unflatten(0, (tiles, heads, rows, width))


def every_other_column(tiles, heads, rows, width, dtype):
    return packed(tiles, heads, rows, 2 * width, dtype=dtype)[..., ::2]


def one_tile_for_all(tiles, heads, rows, width, dtype):
    return packed(1, heads, rows, width, dtype=dtype).expand(tiles, -1, -1, -1)


def one_number_for_all(tiles, heads, rows, width, dtype):
    """As the gradient of a sum is."""
    return packed(1, 1, 1, 1, dtype=dtype).expand(tiles, heads, rows, width)


LAYOUTS = [by_token, of_wider_rows, off_by_one, every_other_column, one_tile_for_all, one_number_for_all]


def check(kernel, dtype, shape, sizes, fold_size, widths, layout=packed):
    """Forward and backward, with results of the right sizes, dtypes and device."""
    tiles, heads, group, queries, keys = sizes
    keys = queries if shape == "causal" else keys
    fold_size = 1 if shape != "band" or isinstance(kernel, CudaFlash) else fold_size
    rows, (width, value_width) = queries * fold_size, widths
    q = layout(tiles, heads * group, rows, width, dtype=dtype)
    k, v = (layout(tiles, heads, keys, wide, dtype=dtype) for wide in widths)
    out, lse = kernel.forward(q, k, v, KernelCall(shape, 0.3, fold_size))
    row_sizes = (tiles, heads * group, rows)
    assert (out.shape, out.dtype) == ((*row_sizes, value_width), dtype)
    assert (lse.shape, lse.dtype) == (row_sizes, accumulation_dtype(dtype))
    merged = out, lse
    dout = layout(*row_sizes, value_width, dtype=dtype)
    if layout is not packed:  # of a larger softmax, and so not from the kernel itself
        merged = layout(*row_sizes, value_width, dtype=dtype), layout(*row_sizes, 1, dtype=lse.dtype).squeeze(-1)
    grads = kernel.backward(dout, Saved(q, k, v, *merged), KernelCall(shape, 0.3, fold_size))
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, dtype)
    assert {x.device.type for x in (out, lse, *grads)} == {"cuda"}


def some_sizes(rng):
    """Tiles, key/value heads, query heads on each, queries and, for bands and rectangles, keys."""
    queries, width = rng.choice([1, 7, 32, 70]), rng.choice([1, 16, 40])
    return rng.choice([1, 1, 2, 5]), rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), queries, queries + width - 1


@pytest.mark.drawn
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kernel", "dtype"), CUDA_KERNELS, ids=ids)
def test_sizes_dtypes_and_devices(kernel, dtype, shape, operators, rng):
    checked = operators(dtype)
    for widths in rng.sample(WIDTHS, 5):
        check(kernel, dtype, shape, some_sizes(rng), rng.choice([1, 3]), widths)
    assert len(checked.calls) >= 2 * 5


@pytest.mark.drawn
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kernel", "dtype"), CUDA_KERNELS[::2], ids=ids)
def test_views(kernel, dtype, layout, operators, rng):
    operators(dtype)
    # Of widths that are padded, and that are not.
    for shape, widths in zip(SHAPES, rng.sample([(5, 5), (16, 24), (5, 16)], 3)):
        check(kernel, dtype, shape, some_sizes(rng), rng.choice([1, 3]), widths, layout)


@pytest.mark.drawn
@pytest.mark.parametrize("cut_from", [7, 10**6], ids=["cut", "masked"])
@pytest.mark.parametrize(("kernel", "dtype"), CUDA_KERNELS[2:], ids=ids)
def test_bands_in_stretches(kernel, dtype, cut_from, operators, monkeypatch, rng):
    """Bands of many stretches, cut into triangles and rectangles, or with one mask for all of them."""
    monkeypatch.setattr(bands, "CUT_FROM", cut_from)
    monkeypatch.setattr(bands, "CUT_ROWS", rng.randint(1, 5))
    monkeypatch.setattr(bands, "FEWEST_ROWS", rng.randint(1, 5))
    monkeypatch.setattr(bands, "MOST_ROWS", rng.randint(5, 9))
    monkeypatch.setattr(bands, "ROWS_OF_A_BLOCK", rng.randint(1, 3))
    monkeypatch.setattr(bands, "RESULTS_AT_ONCE", rng.choice([1, 40, 200]))
    monkeypatch.setattr(bands, "GRADIENTS_AT_ONCE", rng.choice([1, 40, 200]))
    checked = operators(dtype)
    queries, width = rng.randint(1, 30), rng.randint(7, 24)
    sizes = (rng.randint(1, 3), rng.randint(1, 3), rng.choice([1, 2, 4]), queries, queries + width - 1)
    layout = rng.choice([packed, by_token, of_wider_rows])
    fold_size = rng.choice([1, 3]) if width < cut_from else 1
    check(kernel, dtype, "band", sizes, fold_size, rng.choice([(8, 8), (5, 16)]), layout)
    masked = {given["attn_bias"] is not None for _, given in checked.calls}
    assert masked == {cut_from > width}


@pytest.mark.parametrize(("kernel", "dtype"), CUDA_KERNELS[1:3], ids=ids)
def test_rows_that_need_no_copy_have_none(kernel, dtype, operators):
    """Tensors as models store them are handed on as they are."""
    checked = operators(dtype)
    q, k, v = (by_token(2, 4, 6, 64, dtype) for _ in range(3))
    kernel.forward(q, k, v, KernelCall("causal", 0.3))
    [(_, given)] = checked.calls
    for name, x in (("query", q), ("key", k), ("value", v)):
        assert given[name].untyped_storage()._cdata == x.untyped_storage()._cdata


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=ids)
def test_a_bias_for_each_head_and_query(dtype, operators):
    """As few queries to a `PatternCache` have it: keys as views, and a bias that heads, rows and queries share or not."""
    checked = operators(dtype)
    checked.one_mask = False
    q, k = packed(2, 3, 4, 64, dtype=dtype), packed(2, 3, 40, 64, dtype=dtype)[:, :, :37]
    for sizes in ((1, 1, 4, 37), (2, 1, 4, 37), (1, 3, 4, 37), (2, 3, 4, 37)):
        out, lse = CudaEfficient().forward_masked(q, k, k, bands.Masked(False, 0.3, packed(*sizes, dtype=dtype)))
        assert (out.shape, lse.shape) == ((2, 3, 4, 64), (2, 3, 4))
    assert [given["attn_bias"].shape for _, given in checked.calls] == [(2, 3, 4, 37)] * 4
