"""Rows as views and rows by number take, add and write as plain indexing does; partial softmaxes are merged."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ring_attention.compute.merge import accumulation_dtype, merge_
from hf_ring_attention.compute.rows import IndexRows, ViewRows

N = 24  # rows of a head


def tensor(rng, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def view_case(rng, apart):
    """ViewRows and their rows written out: for each tile, (batch row, [(head, [row, ...]), ...]). `apart`: no overlap."""
    batch, heads, length, copies = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 7), rng.randint(1, 4)
    advance = rng.randint(length if apart else 1, length + 2)
    while (copies - 1) * advance + length > N:
        copies -= 1
    advance = advance if copies > 1 else rng.choice([0, advance])  # one copy has nothing to advance to
    start = rng.randint(0, N - (copies - 1) * advance - length)
    tiles = [
        (row, [(head, [start + copy * advance + i for i in range(length)]) for head in range(heads)])
        for row, copy in itertools.product(range(batch), range(copies))
    ]
    stretches = {"start": start, "length": length, "copies": copies, "advance": advance}
    rows = ViewRows(batch=batch, heads=heads, **stretches, of_head=N, of_batch_row=heads * N)
    return rows, (batch, heads), tiles


def index_case(rng, apart, explicit):
    """IndexRows likewise, of some heads of some batch rows; `explicit`: each row by its number, in any order."""
    batch, heads, length = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 5)
    stride, per_tile, tiles, used = rng.choice([1, 2, 4, -1, -3]), rng.randint(1, heads), [], set()
    for _ in range(rng.randint(1, 6)):
        row, start = rng.randrange(batch), rng.randrange(N)
        chosen = rng.sample(range(heads), per_tile)
        rows = rng.sample(range(N), length) if explicit else [start + i * stride for i in range(length)]
        taken = {(row, head, r) for head in chosen for r in rows}
        if not all(0 <= r < N for r in rows) or (apart and used & taken):
            continue
        used |= taken
        tiles.append((row, [(head, rows) for head in chosen]))
    if not tiles:
        return index_case(rng, apart, explicit)
    numbers = torch.tensor(
        [[[(row * heads + head) * N + r for r in rows] for head, rows in of_heads] for row, of_heads in tiles]
    )
    rows = IndexRows(numbers) if explicit else IndexRows(numbers[..., :1], torch.arange(length) * stride)
    return rows, (batch, heads), tiles


def cases(rng, apart=False, count=25):
    for _ in range(count):
        yield view_case(rng, apart)
        yield index_case(rng, apart, explicit=False)
        yield index_case(rng, apart, explicit=True)


def plain(x, tiles):
    """[tiles, heads, L, ...], a row at a time."""
    return torch.stack(
        [torch.stack([torch.stack([x[row, head, r] for r in rows]) for head, rows in heads]) for row, heads in tiles]
    )


def each_row(tiles):
    """((batch row, head, row), (tile, head of the tile, i)) of every row of every tile."""
    for number, (row, heads) in enumerate(tiles):
        for place, (head, rows) in enumerate(heads):
            yield from (((row, head, r), (number, place, i)) for i, r in enumerate(rows))


def test_add_where_rows_repeat_and_overlap(rng):
    overlapping = 0
    for rows, sizes, tiles in cases(rng, count=40):
        overlapping += isinstance(rows, ViewRows) and rows.copies > 1 and rows.advance < rows.length
        x = tensor(rng, *sizes, N, 5)
        values = tensor(rng, len(tiles), len(tiles[0][1]), len(tiles[0][1][0][1]), 5)
        want = x.clone()
        for at, place in each_row(tiles):
            want[at] += values[place]
        rows.add_(x.view(-1, 5), values)
        torch.testing.assert_close(x, want, rtol=1e-13, atol=1e-13, msg=lambda text, rows=rows: f"{rows}: {text}")
    assert overlapping


class EachElementIsWrittenOnce(TorchDispatchMode):
    """No operation writes to a view that holds an element twice.

    One thread would get such an addition right, by luck; several, or a GPU, would lose terms.
    """

    writes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                x = args[place] if place < len(args) else kwargs[argument.name]
                numbers = torch.arange(x.untyped_storage().nbytes() // x.element_size())
                numbers = numbers.as_strided(x.shape, x.stride(), x.storage_offset())
                assert numbers.unique().numel() == x.numel(), f"{func} writes to elements more than once"
                self.writes += 1
        return func(*args, **kwargs)


def test_every_overlap_of_stretches():
    """All lengths and distances: copies that overlap their neighbours, and theirs, by any number of rows."""
    for length, advance, copies in itertools.product(range(1, 8), range(1, 9), range(1, 8)):
        last = (copies - 1) * advance + length
        x = torch.zeros(1, 2, last + 3)
        values = torch.arange(1.0, copies * 2 * length + 1).reshape(copies, 2, length)
        want = x.clone()
        for copy in range(copies):
            want[0, :, 2 + copy * advance : 2 + copy * advance + length] += values[copy]
        with EachElementIsWrittenOnce() as watch:
            n = x.shape[2]
            stretches = {"start": 2, "length": length, "copies": copies, "advance": advance}
            rows = ViewRows(batch=1, heads=2, **stretches, of_head=n, of_batch_row=2 * n)
            rows.add_(x.view(-1, 1), values.unsqueeze(-1))
        assert watch.writes
        assert torch.equal(x, want), (length, advance, copies)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_write(dtype, rng):
    """Values come to their rows, and rows of no tile keep every bit; views write by themselves."""
    views = 0
    for rows, sizes, tiles in cases(rng, apart=True):
        x, lse = tensor(rng, *sizes, N, 5), tensor(rng, *sizes, N)
        values = tensor(rng, len(tiles), len(tiles[0][1]), len(tiles[0][1][0][1]), 5, dtype=dtype)
        want, want_lse, seen = x.clone(), lse.clone(), x.clone()
        for at, place in each_row(tiles):
            want[at], want_lse[at] = values[place].to(x.dtype), values[place][0].to(x.dtype)
        rows.write_(x.view(-1, 5), values)
        rows.write_(lse.view(-1), values[..., 0])
        assert torch.equal(x, want)
        assert torch.equal(lse, want_lse)
        taken = rows.take(seen.view(-1, 5)).copy_(values)
        assert torch.equal(seen, want) == rows.is_view, rows
        assert torch.equal(taken, values.to(x.dtype))
        views += rows.is_view
    assert views


# ---- merging partial softmaxes


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
