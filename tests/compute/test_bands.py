"""Tiles of any sizes are what plain math makes of them: bands in stretches, masked and cut, and calls of CUDA's operators."""

import pytest
import torch

from hf_ring_attention.compute import bands
from hf_ring_attention.compute.cuda_kernels import CudaEfficient, CudaFlash, Cudnn
from hf_ring_attention.compute.kernel import KernelCall, Saved
from hf_ring_attention.compute.kernels import CpuFlash, Math
from hf_ring_attention.compute.merge import merge_
from tests.support.cuda_operators import CudnnAttention, EfficientAttention, FlashAttention2, scores_of


def drawn(generator, *sizes):
    return torch.randn(*sizes, dtype=torch.float64, generator=generator)


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def check(kernel, shape, rng, generator):
    """Forward and backward of a tile, also into totals and sums, and as the share of a tile in a larger softmax."""
    tiles, heads, group = rng.randint(1, 3), rng.randint(1, 3), rng.choice([1, 2, 4])
    fold_size, step = rng.choice([1, 1, 2, 3]), 8 if isinstance(kernel, Cudnn) else 1
    queries, width = rng.choice([1, *[rng.randint(1, 30)] * 3]), rng.choice([1, *[rng.randint(1, 24)] * 3])
    if shape != "band" or width >= bands.CUT_FROM or isinstance(kernel, CudaFlash):
        fold_size = 1
    keys = {"full": rng.randint(1, 40), "causal": queries, "band": queries + width - 1}[shape]
    head_dim, value_dim = (step * rng.randint(1, 20 if step == 1 else 16) for _ in range(2))
    value_dim = head_dim if isinstance(kernel, CudaEfficient) else value_dim  # as its stand-in wants them
    rows = tiles, heads * group, queries * fold_size
    q, dout = drawn(generator, *rows, head_dim), drawn(generator, *rows, value_dim)
    k, v = (drawn(generator, tiles, heads, keys, wide) for wide in (head_dim, value_dim))
    if rng.random() < 0.5:  # as models store them
        q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
    call, other = KernelCall(shape, 0.3, fold_size), KernelCall(shape, 0.7, fold_size)
    out, lse = Math().forward(q, k, v, call)
    # In the whole softmax there are other keys, too.
    saved = Saved(q, k, v, drawn(generator, *out.shape), lse + torch.rand_like(lse))
    want = Math().backward(dout, saved, call)
    assert_same((*kernel.forward(q, k, v, call), *kernel.backward(dout, saved, call)), (out, lse, *want))
    totals, wanted = ((torch.zeros_like(out), torch.full_like(lse, -torch.inf)) for _ in range(2))
    for part in (call, other):  # Another scale stands for other keys.
        merge_(*wanted, *Math().forward(q, k, v, part))
        assert kernel.forward(q, k, v, part, totals) is totals
    sums = tuple(torch.randn_like(x) for x in (q, k, v))
    wanted = *wanted, *(start + x for start, x in zip(sums, want))
    assert kernel.backward(dout, saved, call, sums) is sums
    assert_same((*totals, *sums), wanted)


@pytest.mark.parametrize("cut_from", [7, 10**6], ids=["cut", "masked"])
def test_every_band_is_what_plain_math_makes_of_it(cut_from, short_stretches, rng, generator):
    """Bands of any width and length, in stretches of a few rows, a few of which are at hand at once in backward."""
    for _ in range(25):
        short_stretches(cut_from, rng.choice([1, 100, 10**6]))
        check(CpuFlash(), "band", rng, generator)


@pytest.mark.parametrize(
    ("kernel", "operators", "shapes"),
    [
        (CudaFlash(), FlashAttention2, ("full", "causal", "band")),
        (CudaEfficient(), EfficientAttention, ("full", "causal", "band")),
        (Cudnn(), CudnnAttention(), ("full", "causal")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_kernels_for_cuda_are_what_plain_math_makes_of_it(
    kernel, operators, shapes, checked_operators, short_stretches, rng, generator
):
    """They see the keys that plain math sees: plain math in float64 stands in for their operators."""
    checked = checked_operators(torch.float64, played_by=operators)
    for cut_from in (None, 7, 10**6):
        if cut_from:  # bands of many stretches, cut into triangles and rectangles, or with one mask for all
            short_stretches(cut_from)
        for shape in shapes * 5:
            check(kernel, shape, rng, generator)
    assert len(checked.calls) >= len(shapes) * 15 * 5


def test_the_stand_in_sees_what_flash_attention_documents(generator):
    """The two pictures of its README: 2 queries of 5 keys and 5 of 2, causal, and a window beside it."""
    for queries, keys, causal, left, right, seen in [
        (2, 5, True, None, None, ["11110", "11111"]),
        (5, 2, True, None, None, ["00", "00", "00", "10", "11"]),
        (2, 5, False, 1, 0, ["00110", "00011"]),
        (3, 5, False, 1, 1, ["01110", "00111", "00011"]),
        (2, 3, False, -1, -1, ["111", "111"]),
        (2, 3, False, None, 0, ["110", "111"]),
    ]:
        q, k = drawn(generator, 1, queries, 2, 8), drawn(generator, 1, keys, 1, 8)
        scores = scores_of(q, k, 0.3, causal, left, right)
        assert [["01"[bool(x)] for x in row] for row in torch.isfinite(scores[0, 1])] == [list(row) for row in seen]
