"""Merging partial softmaxes: the whole softmax in float64, rows without a key, extreme scores, and no error that grows."""

import itertools
import math

import pytest
import torch

from hf_ring_attention.compute.merge import accumulation_dtype, merge_


def merged(parts, dtype=torch.float64):
    """All (out, lse) parts, one after another, into rows that have seen no key."""
    out = torch.zeros(parts[0][0].shape, dtype=dtype)
    lse = torch.full(parts[0][1].shape, -torch.inf, dtype=dtype)
    for new_out, new_lse in parts:
        before = new_out.clone(), new_lse.clone()
        assert merge_(out, lse, new_out, new_lse) is None
        assert all(map(torch.equal, (new_out, new_lse), before))
    return out, lse


def by_logsumexp(parts):
    """The same by the definition, in float64: parts weigh by the softmax of their log-sum-exps."""
    outs, lses = (torch.stack([part[i].double() for part in parts]) for i in range(2))
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lse == -torch.inf, 0.0, torch.softmax(lses, 0))
    return (weights.unsqueeze(-1) * outs).sum(0), lse


def random_parts(count, generator, shape=(2, 3, 20), width=8, spread=4.0):
    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    return [(draw(*shape, width), spread * draw(*shape)) for _ in range(count)]


def without_keys(part, rows):
    out, lse = part
    return out.masked_fill(rows.unsqueeze(-1), 0), lse.masked_fill(rows, -torch.inf)


def test_rows_without_a_key(generator):
    """On either side, on both, and between parts that have keys."""
    parts = random_parts(5, generator)
    parts = [without_keys(part, torch.rand(part[1].shape, generator=generator) < 0.6) for part in parts]
    none = torch.stack([lse for _, lse in parts]).amax(0) == -torch.inf
    assert none.any() and not none.all()
    out, lse = merged(parts)
    want_out, want_lse = by_logsumexp(parts)
    assert torch.equal(lse == -torch.inf, none)
    assert torch.all(out[none] == 0)
    torch.testing.assert_close((out, lse), (want_out, want_lse), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_part_without_keys_changes_no_bit(dtype, generator):
    wide = accumulation_dtype(dtype)
    part, empty = ((out.to(dtype), lse.to(wide)) for out, lse in random_parts(2, generator))
    empty = without_keys(empty, torch.ones_like(empty[1], dtype=torch.bool))
    for first, second in ((part, empty), (empty, part)):
        got = [x.clone() for x in first]
        merge_(*got, *second)
        assert all(map(torch.equal, got, part))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_extreme_scores(dtype):
    extremes = [1e4, -1e4, 0.0, 88.0, -104.0, -math.inf]
    for first, second in itertools.product(extremes, repeat=2):
        parts = [
            (torch.tensor([[value, -value]], dtype=dtype), torch.tensor([lse], dtype=dtype))
            for lse, value in ((first, 3.0), (second, 5.0))
        ]
        parts = [without_keys(part, part[1] == -torch.inf) for part in parts]
        found = tuple(x.double() for x in merged(parts, dtype))
        rounding = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found, by_logsumexp(parts), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_error_of_parts_in_16_bits_does_not_grow(dtype, generator):
    """Merged in float32, parts rounded to 16 bits are off by one rounding of the largest, be they 2 or 64."""
    errors = {}
    for count in (2, 4, 8, 16, 32, 64):
        parts = random_parts(count, generator, shape=(1, 4, 100), width=16, spread=1.0)
        parts = [(out.clamp(-1, 1), lse) for out, lse in parts]
        exact, _ = by_logsumexp(parts)
        got, _ = merged([(out.to(dtype), lse.float()) for out, lse in parts], torch.float32)
        error = got.double() - exact
        # 1 is the largest: rounding to nearest is half the spacing below 1, a quarter of eps. float32 adds its rounding.
        assert error.abs().max() <= torch.finfo(dtype).eps / 4 + count * torch.finfo(torch.float32).eps
        errors[count] = float(error.square().mean().sqrt())
    # Roundings of different parts are independent, so that more of them even out.
    assert errors[64] <= errors[2], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_parts_in_16_bits_are_merged_with_one_more_rounding(dtype, generator):
    """Rounding to nearest is off by a quarter of eps below 1: once for out (1 - w), and once for the sum."""
    for spread in (0.3, 4.0, 30.0):
        parts = random_parts(2, generator, shape=(1, 4, 500), width=16, spread=spread)
        (out, lse), (new_out, new_lse) = [(out.clamp(-1, 1).to(dtype), lse.float()) for out, lse in parts]
        exact, exact_lse = by_logsumexp([(out, lse), (new_out, new_lse)])
        merge_(out, lse, new_out, new_lse)
        assert out.dtype == dtype
        assert (out.double() - exact).abs().max() <= torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
