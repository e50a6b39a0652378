"""Bands in stretches, masked and cut, at sizes at which all of that happens to a few rows."""

import pytest
import torch

from hf_ring_attention.compute import bands
from hf_ring_attention.compute.kernel import KernelCall, Saved
from hf_ring_attention.compute.kernels import CpuFlash
from hf_ring_attention.compute.math_kernel import Math
from hf_ring_attention.compute.merge import merge_


@pytest.mark.parametrize("cut_from", [7, 10**6], ids=["cut", "masked"])
def test_every_band_is_what_plain_math_makes_of_it(cut_from, monkeypatch, rng):
    """Bands of any width and length, in stretches of a few rows, a few of which are at hand at once in backward."""
    for _ in range(60):
        monkeypatch.setattr(bands, "CUT_FROM", cut_from)
        monkeypatch.setattr(bands, "CUT_ROWS", rng.randint(1, 5))
        monkeypatch.setattr(bands, "FEWEST_ROWS", rng.randint(1, 5))
        monkeypatch.setattr(bands, "MOST_ROWS", rng.randint(5, 9))
        monkeypatch.setattr(bands, "ROWS_OF_A_BLOCK", rng.randint(1, 3))
        monkeypatch.setattr(bands, "LARGEST_MASK", rng.choice([1, 100, 10**6]))
        monkeypatch.setattr(bands, "RESULTS_AT_ONCE", rng.choice([1, 40, 200]))
        monkeypatch.setattr(bands, "GRADIENTS_AT_ONCE", rng.choice([1, 40, 200]))
        tiles, heads, group = (rng.randint(1, 3) for _ in range(3))
        queries, width, fold_size = rng.randint(1, 30), rng.randint(1, 24), rng.choice([1, 1, 3])
        q, dout = (torch.randn(tiles, heads * group, queries * fold_size, 4, dtype=torch.float64) for _ in range(2))
        k, v = (torch.randn(tiles, heads, queries + width - 1, 4, dtype=torch.float64) for _ in range(2))
        if rng.random() < 0.5:  # as models store them
            q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
        out, lse = Math().forward(q, k, v, KernelCall("band", 0.3, fold_size))
        # In the whole softmax there are other keys, too.
        whole = torch.randn_like(out), lse + torch.rand_like(lse)
        want = out, lse, *Math().backward(dout, Saved(q, k, v, *whole), KernelCall("band", 0.3, fold_size))
        flash = CpuFlash()
        got = (
            *flash.forward(q, k, v, KernelCall("band", 0.3, fold_size)),
            *flash.backward(dout, Saved(q, k, v, *whole), KernelCall("band", 0.3, fold_size)),
        )
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        totals, wanted = ((torch.zeros_like(out), torch.full_like(lse, -torch.inf)) for _ in range(2))
        for other in (0.3, 0.7):  # Another scale stands for other keys.
            merge_(*wanted, *Math().forward(q, k, v, KernelCall("band", other, fold_size)))
            assert flash.forward(q, k, v, KernelCall("band", other, fold_size), totals) is totals
        for x, y in zip(totals, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        sums = tuple(torch.randn_like(x) for x in (q, k, v))
        before = [x.clone() for x in sums]
        assert flash.backward(dout, Saved(q, k, v, *whole), KernelCall("band", 0.3, fold_size), sums) is sums
        for x, start, y in zip(sums, before, want[2:], strict=True):
            torch.testing.assert_close(x, start + y, rtol=1e-12, atol=1e-12)
