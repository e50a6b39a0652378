"""FlashAttention for CUDA sees the keys that plain math sees: its calls, with what they mean computed in float64."""

import pytest
import torch

from hf_ring_attention.compute import cuda_kernels
from hf_ring_attention.compute.cuda_kernels import CudaFlash
from hf_ring_attention.compute.kernel import KernelCall, Saved
from hf_ring_attention.compute.math_kernel import Math
from tests.support.cuda_operators import CheckedOperators, FlashAttention2, scores_of


def drawn(generator, *sizes):
    return torch.randn(*sizes, dtype=torch.float64, generator=generator)


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


@pytest.mark.parametrize("shape", ["full", "causal", "band"])
def test_cuda_flash_is_what_plain_math_makes_of_it(shape, monkeypatch, rng, generator):
    """Also the share of a tile in a larger softmax: with the out and lse of that, as merging gives them."""
    checked = CheckedOperators(played_by=FlashAttention2, dtypes=(torch.float64,))
    monkeypatch.setattr(cuda_kernels, "aten", checked)
    for _ in range(60):
        tiles, heads = (rng.randint(1, 3) for _ in range(2))
        group, fold_size = rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 3])
        queries, width = rng.choice([1, rng.randint(1, 30)]), rng.choice([1, rng.randint(1, 24)])
        keys = {"full": rng.randint(1, 40), "causal": queries, "band": queries + width - 1}[shape]
        head_dim, value_dim = rng.randint(1, 20), rng.randint(1, 20)
        rows = (tiles, heads * group, queries * fold_size)
        q, dout = drawn(generator, *rows, head_dim), drawn(generator, *rows, value_dim)
        k, v = (drawn(generator, tiles, heads, keys, wide) for wide in (head_dim, value_dim))
        if rng.random() < 0.5:  # as models store them
            q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
        out, lse = Math().forward(q, k, v, KernelCall(shape, 0.3, fold_size))
        # In the whole softmax there are other keys, too.
        whole = drawn(generator, *out.shape), lse + torch.rand(lse.shape, dtype=lse.dtype, generator=generator)
        want = out, lse, *Math().backward(dout, Saved(q, k, v, *whole), KernelCall(shape, 0.3, fold_size))
        flash = CudaFlash()
        got = (
            *flash.forward(q, k, v, KernelCall(shape, 0.3, fold_size)),
            *flash.backward(dout, Saved(q, k, v, *whole), KernelCall(shape, 0.3, fold_size)),
        )
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert len(checked.calls) == 120
