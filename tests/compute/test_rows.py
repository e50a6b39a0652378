"""Rows as views and rows by number take, add, write and split as plain indexing does."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_split(rng):
    """Parts of at most so many units hold the same rows, each once, queries and keys cut alike."""
    for rows, sizes, tiles in cases(rng):
        x = torch.arange(float(sizes[0] * sizes[1] * N)).reshape(*sizes, N)  # every row knows its number
        assert rows.units * rows.rows_per_unit == sum(1 for _ in each_row(tiles))
        for size in (1, 2, 3, 100):
            parts = list(rows.split(size))
            assert [part.units for part in parts[:-1]] == [size] * (len(parts) - 1)
            assert 0 < parts[-1].units <= size
            assert sum(part.units for part in parts) == rows.units
            assert {(type(part), part.rows_per_unit) for part in parts} == {(type(rows), rows.rows_per_unit)}
            taken = [part.take(x.view(-1, 1)).squeeze(-1) for part in parts]
            if isinstance(rows, ViewRows):
                # Stretches are cut, and each part has them of all batch rows.
                whole = plain(x, tiles).unflatten(0, (sizes[0], rows.copies))
                taken = torch.cat([part.unflatten(0, (sizes[0], -1)) for part in taken], 1)
            else:
                whole, taken = plain(x, tiles), torch.cat(taken)
            assert torch.equal(taken, whole), rows
