"""Calls of CUDA's operators as torch accepts them, on tensors that have sizes, strides and a device, but no numbers.

The stand-ins of torch (FakeTensorMode) show the shapes that an operator makes of its arguments. tests.support.cuda_operators
checks the other demands of a kernel. Only a machine with a GPU shows that the kernels compute right: test_kernels.py.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ring_attention.compute.bands import Masked
from hf_ring_attention.compute.cuda_kernels import CudaEfficient, CudaFlash, Cudnn
from hf_ring_attention.compute.kernel import KernelCall, Saved
from hf_ring_attention.compute.merge import accumulation_dtype
from tests.support.cuda_operators import HALVES, WithoutDeviceGuard

SHAPES = ("full", "causal", "band")
CUDA_KERNELS = [
    *((CudaFlash(), dtype) for dtype in HALVES),
    *((CudaEfficient(), dtype) for dtype in (torch.float32, *HALVES)),
    *((Cudnn(), dtype) for dtype in HALVES),
]
#: Of q and k, and of v.
WIDTHS = [(width, width) for width in (5, 8, 33, 64, 96, 128, 192, 256)]
WIDTHS += [(64, 128), (192, 128), (8, 5), (33, 256), (1, 40)]
#: cuDNN takes full and causal tiles of 64 rows or more, of these widths.
CUDNN_WIDTHS = [(8, 8), (64, 128), (128, 16), (32, 40), (96, 96)]


@pytest.fixture(autouse=True)
def no_gpu():
    """Tensors of a CUDA device that hold nothing."""
    with FakeTensorMode(), WithoutDeviceGuard():
        yield


def ids(value):
    return getattr(value, "name", str(value).removeprefix("torch."))


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
    dout = layout(*row_sizes, value_width, dtype=dtype)
    # Of a larger softmax, out and lse are not the kernel's own, and may be stored in any way.
    other = by_token if layout is packed else layout
    merged = other(*row_sizes, value_width, dtype=dtype), other(*row_sizes, 1, dtype=lse.dtype).squeeze(-1)
    for saved in ((out, lse), merged):
        grads = kernel.backward(dout, Saved(q, k, v, *saved), KernelCall(shape, 0.3, fold_size))
        for grad, x in zip(grads, (q, k, v), strict=True):
            assert (grad.shape, grad.dtype) == (x.shape, dtype)
    assert {x.device.type for x in (out, lse, *grads)} == {"cuda"}


def some_sizes(rng, kernel):
    """Tiles, key/value heads, query heads on each, queries and, for bands and rectangles, keys."""
    queries, width = rng.choice([1, 7, 32, 70]), rng.choice([1, 16, 40])
    if isinstance(kernel, Cudnn):
        queries = rng.choice([64, 65, 70, 200])
    return rng.choice([1, 1, 2, 5]), rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), queries, queries + width - 1


def shapes_of(kernel):
    return SHAPES[:2] if isinstance(kernel, Cudnn) else SHAPES


def drawn(kernel, *others):
    """A case, of which each run has one in four; the few cases of cuDNN always run."""
    return pytest.param(kernel, *others, marks=[] if isinstance(kernel, Cudnn) else [pytest.mark.drawn])


CALLS = [drawn(*call, shape) for call in CUDA_KERNELS for shape in shapes_of(call[0])]


@pytest.mark.parametrize(("kernel", "dtype", "shape"), CALLS, ids=ids)
def test_sizes_dtypes_and_devices(kernel, dtype, shape, checked_operators, rng):
    checked = checked_operators(dtype)
    for widths in rng.sample(CUDNN_WIDTHS if isinstance(kernel, Cudnn) else WIDTHS, 5):
        # Widths that are padded, and that are not, in tensors of any layout.
        layout = rng.choice([packed, *LAYOUTS])
        check(kernel, dtype, shape, some_sizes(rng, kernel), rng.choice([1, 3]), widths, layout)
    assert len(checked.calls) >= 3 * 5


@pytest.mark.parametrize(("kernel", "dtype"), CUDA_KERNELS[::2], ids=ids)
def test_rows_that_need_no_copy_have_none(kernel, dtype, checked_operators):
    """Tensors as models store them are handed on as they are."""
    checked = checked_operators(dtype)
    q, k, v, dout = (by_token(2, 4, 64, 64, dtype) for _ in range(4))
    out, lse = kernel.forward(q, k, v, KernelCall("causal", 0.3))
    kernel.backward(dout, Saved(q, k, v, out, lse), KernelCall("causal", 0.3))
    (_, forward), (_, backward) = checked.calls
    tensors = {"query": q, "key": k, "value": v}
    of_backward = {"grad_out_": dout} if isinstance(kernel, CudaEfficient) else {"grad_out": dout, "out": out}
    for given, named in ((forward, tensors), (backward, tensors | of_backward)):
        for name, x in named.items():
            assert given[name].untyped_storage()._cdata == x.untyped_storage()._cdata, name


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=ids)
def test_a_bias_for_each_head_and_query(dtype, checked_operators):
    """As few queries to a `PatternCache` have it: keys as views, and a bias that heads, rows and queries share or not."""
    checked = checked_operators(dtype)
    checked.one_mask = False
    q, k = packed(2, 3, 4, 64, dtype=dtype), packed(2, 3, 40, 64, dtype=dtype)[:, :, :37]
    for sizes in ((1, 1, 4, 37), (2, 1, 4, 37), (1, 3, 4, 37), (2, 3, 4, 37)):
        out, lse = CudaEfficient().forward_masked(q, k, k, Masked(False, 0.3, packed(*sizes, dtype=dtype)))
        assert (out.shape, lse.shape) == ((2, 3, 4, 64), (2, 3, 4))
    assert [given["attn_bias"].shape for _, given in checked.calls] == [(2, 3, 4, 37)] * 4
