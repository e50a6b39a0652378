"""The work of the fused kernels as lists of integers, by numpy: tiles, blocks of query rows, and blocks of keys.

A *tile* is q0, qs, fold, nq, k0, ks, lo0, ls, hi0, hs, nk, and one unused integer. Query row x has the number
i = (x - q0) // qs if (x - q0) % qs < fold and i < nq. It sees the key numbers j with lo0 + ls i <= j < hi0 + hs i and
0 <= j < nk; key number j is row k0 + j ks. All shapes of `plan/tiles.py`, folds, dilation and reversed ranges have this form.

An *item* is first, step, count, b, hq, hk, and a range of references to the tiles that hold some of its query
rows first, first + step, ... Its rows are those of some neighbouring query heads from hq on, which share key/value head hk. One
program of a kernel computes an item. A launch has no query row of a head twice, so it needs no atomic operations. The first
launch of a rank has all rows, also those without tiles. Rows of dilated queries are far apart, so separate launches, which
resume the results of the first, take them in blocks of one residue.

A *key item* is a block of keys of a tile: tile, j0, count, b, hq, hk, and a range of the tile's query rows that see some of
these keys, counted along folds. Few keys that many queries see, as sinks are, would be long work for one program: it is cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ...plan.plans import Item, TileBatch

Integers = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers")
#: Takes the numbers of key rows in a [B, Hkv, rows] tensor to their rows in a payload.
Places = Callable[[Integers], Integers]

#: Strided queries get a separate launch from this many rows on.
_FEWEST_STRIDED = 16
#: A key item has at most this many rows, or a share of all rows that leaves each processor of a GPU many items.
_MOST_ROWS, _KEY_ITEMS = 2048, 4096


class Blocks(NamedTuple):
    """The sizes of blocks of one device and dtype. A block of `rows` rows has those of all heads of an item.

    As `Kernel.joining`, they are also the request for work lists.
    """

    rows: int  # of an item, a power of 2
    keys: int  # that an item reads at once
    warps: int
    stages: int
    query_rows: int  # that a key item reads at once, a power of 2
    key_rows: int  # of a key item
    key_warps: int
    key_stages: int


class Sizes(NamedTuple):
    """The sizes of a rank's tensors: q [batch, heads, query_rows, D], k [batch, kv_heads, key_rows, D]."""

    batch: int
    heads: int
    kv_heads: int
    query_rows: int
    key_rows: int

    @property
    def group(self) -> int:
        """The number of query heads that share a key/value head."""
        return self.heads // self.kv_heads


class Launch(NamedTuple, Generic[Numbers]):
    """Items, or key items, that run at once; all have as many query heads. Key items need no references."""

    heads: int
    items: Numbers
    references: Numbers


class WorkLists(NamedTuple):
    """All launches of some tiles."""

    tiles: Integers
    launches: list[Launch[Integers]]
    key_launches: list[Launch[Integers]]


class _Tiles(NamedTuple):
    """Columns of tiles, each with the class of its batch rows and heads."""

    q0: Integers
    qs: Integers
    fold: Integers
    nq: Integers
    k0: Integers
    ks: Integers
    lo0: Integers
    ls: Integers
    hi0: Integers
    hs: Integers
    nk: Integers
    owner: Integers

    def take(self, numbers: Integers) -> _Tiles:
        return _Tiles(*(column[numbers] for column in self))


#: The query heads of programs that share all tiles: rows (b, hq, hk).
_Units = list[tuple[int, int, int]]


def heads_of_an_item(group: int, blocks: Blocks) -> int:
    """Returns how many query heads of a group share the items: a divisor of their number that fits into blocks of rows."""
    most = min(group, blocks.rows, blocks.query_rows)
    return max(count for count in range(1, most + 1) if group % count == 0)


def work_lists(
    batches: Sequence[TileBatch], sizes: Sizes, blocks: Blocks, places: Places | None, complete: bool
) -> WorkLists:
    """Returns the work of some tiles.

    Args:
        places: the places of key rows in a payload; None if k and v are tensors [B, Hkv, key_rows, D].
        complete: whether the first launch has all query rows, so that results need no other initial values.
    """
    owners: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], int] = {}
    tiles = _tiles_of(batches, owners)
    together = heads_of_an_item(sizes.group, blocks)
    whole, single = _units_of(owners, sizes, together)
    launches: list[Launch[Integers]] = []
    key_launches: list[Launch[Integers]] = []
    numbered: list[Integers] = []
    # Query heads that share a key/value head come together, or one by one if their tiles differ.
    for heads, units in ((together, whole), (1, single)):
        covers = complete and units is whole
        if not units:
            continue
        signatures = _Signatures(units, tiles, places is not None)
        some = signatures.tiles if places is None else _in_payload(signatures, sizes, places)
        first_number = sum(len(x) for x in numbered)
        numbered.append(_table(some))
        launches += _launches(some, signatures, sizes.query_rows, blocks, heads, covers, first_number)
        key_items = _key_items(some, signatures, blocks, first_number)
        if len(key_items):
            key_launches.append(Launch(heads, key_items, key_items[:0, 0]))
    table = np.concatenate(numbered) if numbered else np.zeros((0, 12), np.int64)
    return WorkLists(table, launches, key_launches)


def _tiles_of(batches: Sequence[TileBatch], owners: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], int]) -> _Tiles:
    """Returns all tiles with ascending rows; `owners` gets the number of each kind of head with its batch rows."""
    items: list[Item] = [*itertools.chain.from_iterable(batch.items for batch in batches)]
    count = [len(batch.items) for batch in batches]
    number = np.repeat(np.arange(len(batches)), count)
    alone = [batch.per_query_head for batch in batches for _ in batch.items]
    owner = [
        owners.setdefault((x, item.batch_rows, item.heads), len(owners)) for x, item in zip(alone, items, strict=True)
    ]
    columns = np.array([(item.query_row, item.key_row, item.copies) for item in items], np.int64).reshape(-1, 3)
    sides = np.array(
        [(b.num_queries, b.fold_size, b.query_stride, b.num_keys, b.key_stride) for b in batches], np.int64
    ).reshape(-1, 5)
    shape = np.array([("full", "causal", "band").index(batch.shape) for batch in batches], np.int64)[number]
    (q0, k0, copies), (nq, fold, qs, nk, ks) = columns.T, sides[number].T
    reversed_ = (qs < 0) & (nq > 1)
    q0 = np.where(reversed_, q0 + (nq - 1) * qs, q0)
    k0 = np.where((ks < 0) & (nk > 1), k0 + (nk - 1) * ks, k0)
    fold = np.where(nq == 1, copies, fold)  # The copies of a single row are a fold.
    qs = np.where(nq == 1, fold, abs(qs))
    # A triangle with both ranges reversed: key j is seen by the queries up to j.
    opens_up = (shape == 1) & reversed_
    width = np.choose(shape, [nk, np.ones_like(nk), nk - nq + 1])
    return _Tiles(
        q0, qs, fold, nq, k0, np.where(nk == 1, 1, abs(ks)),
        lo0=np.zeros_like(q0), ls=((shape == 2) | opens_up).astype(np.int64),
        hi0=np.where(opens_up, nk, width), hs=((shape > 0) & ~opens_up).astype(np.int64),
        nk=nk, owner=np.array(owner, np.int64),
    )  # fmt: skip


def _units_of(
    owners: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], int], sizes: Sizes, together: int
) -> tuple[list[tuple[list[int], _Units]], list[tuple[list[int], _Units]]]:
    """Returns units by the owners of their tiles: first all units of several query heads, then those of single ones."""
    group = sizes.group
    of_unit: dict[tuple[bool, int, int], list[int]] = {
        (False, b, h): [] for b in range(sizes.batch) for h in range(sizes.kv_heads)
    }
    for (single, batch_rows, heads), owner in owners.items():
        for b, h in itertools.product(batch_rows, heads):
            of_unit.setdefault((single, b, h), []).append(owner)
    alike: dict[tuple[bool, tuple[int, ...]], _Units] = {}
    for (single, b, h), own in of_unit.items():
        kv = h // group if single else h
        first = range(h, h + 1) if single else range(h * group, (h + 1) * group, together)
        alike.setdefault((single, tuple(own)), []).extend((b, hq, kv) for hq in first)
    whole, alone = ([([*own], units) for (x, own), units in alike.items() if x is single] for single in (False, True))
    return whole, alone


class _Signatures:
    """Sets of units that share all tiles, and their tiles, one set after the other.

    Args:
        apart: whether each unit is a separate set, since its keys lie elsewhere in a payload.
    """

    def __init__(self, units: list[tuple[list[int], _Units]], tiles: _Tiles, apart: bool) -> None:
        if apart:  # Query heads of one key/value head stay together.
            units = [
                (own, [*same])
                for own, some in units
                for _, same in itertools.groupby(sorted(some), key=lambda unit: (unit[0], unit[2]))
            ]
        of_owner: dict[int, Integers] = {}
        order = np.argsort(tiles.owner, kind="stable")
        ends = np.searchsorted(tiles.owner[order], np.arange(int(tiles.owner.max(initial=-1)) + 2))
        for owner, (start, stop) in enumerate(itertools.pairwise(ends.tolist())):
            of_owner[owner] = order[start:stop]
        nothing = np.zeros(0, np.int64)
        numbers = [np.concatenate([nothing, *(of_owner[owner] for owner in own)]) for own, _ in units]
        #: The set of each tile, and its columns.
        self.number = np.repeat(np.arange(len(units)), [len(x) for x in numbers])
        self.tiles = tiles.take(np.concatenate([nothing, *numbers]))
        self.units = np.array([unit for _, some in units for unit in some], np.int64).reshape(-1, 3)
        self.count = np.array([len(some) for _, some in units], np.int64)
        self.first = np.cumsum(self.count) - self.count

    def per_unit(self, number: Integers) -> tuple[Integers, Integers]:
        """Returns, for entries of sets, the entry and the unit of each program."""
        entry, within = _expanded(self.count[number])
        return entry, self.units[self.first[number[entry]] + within]


def _expanded(counts: Integers) -> tuple[Integers, Integers]:
    """Returns [0] * counts[0] + [1] * counts[1] + ..., and the place of each in its part."""
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)


def _in_payload(signatures: _Signatures, sizes: Sizes, places: Places) -> _Tiles:
    """Returns the tiles with the places of their keys, cut into parts whose places are equally far apart."""
    tiles, number = signatures.tiles, signatures.number
    batch_row, _, head = signatures.units[signatures.first].T
    first = ((batch_row * sizes.kv_heads + head) * sizes.key_rows)[number]
    tile, j = _expanded(tiles.nk)
    place = places(first[tile] + tiles.k0[tile] + tiles.ks[tile] * j)
    distance = np.diff(place, append=0)
    # A part ends where the distance between keys changes.
    starts = j == 0
    starts[2:] |= (j[2:] > 1) & (distance[1:-1] != distance[:-2])
    at = np.flatnonzero(starts)
    length, j = np.diff(at, append=len(tile)), j[at]
    cut = tiles.take(tile[at])._replace(k0=place[at], ks=np.where(length > 1, distance[at], 1), nk=length)
    cut = cut._replace(lo0=cut.lo0 - j, hi0=cut.hi0 - j)
    low, high = _seeing(cut, np.zeros_like(length), length)
    seen = high > low
    cut = cut._replace(
        q0=cut.q0 + low * cut.qs, nq=high - low, lo0=cut.lo0 + low * cut.ls, hi0=cut.hi0 + low * cut.hs
    ).take(np.flatnonzero(seen))
    signatures.number = number[tile[at[seen]]]
    return cut


def _seeing(tiles: _Tiles, first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """Returns the range of query numbers that see some of `count` keys from `first` on; it may end before it begins."""
    low = np.where(tiles.hs > 0, np.maximum(first - tiles.hi0 + 1, 0), np.where(tiles.hi0 > first, 0, tiles.nq))
    beyond = first + count - tiles.lo0
    return low, np.where(tiles.ls > 0, np.minimum(tiles.nq, beyond), np.where(beyond > 0, tiles.nq, 0))


def _table(tiles: _Tiles) -> Integers:
    """Returns the tiles as rows of integers."""
    return np.stack([*tiles[:11], np.zeros_like(tiles.q0)], 1)


def _launches(
    tiles: _Tiles, signatures: _Signatures, num_rows: int, blocks: Blocks, heads: int, complete: bool, first_number: int
) -> list[Launch[Integers]]:
    """Returns the launches of tiles: of neighbouring rows first, then of rows that are farther and farther apart."""
    rows = blocks.rows // heads
    strided = (2 * tiles.fold <= tiles.qs) & (tiles.nq >= _FEWEST_STRIDED)
    step = np.where(strided, tiles.qs, 1)
    launches = []
    for distance in sorted({1, *step.tolist()} if complete else {*step.tolist()}):
        mine = np.flatnonzero(step == distance)
        # The rows of a fold have different residues.
        entry, within = _expanded(tiles.fold[mine] if distance > 1 else np.ones(len(mine), np.int64))
        of_row, tile = tiles.take(mine[entry]), mine[entry]
        number, residue = np.divmod(of_row.q0 + within, distance)
        length = of_row.nq if distance > 1 else (of_row.nq - 1) * of_row.qs + of_row.fold
        block = number // rows
        entry, within = _expanded((number + length - 1) // rows - block + 1)
        tile, block, residue = tile[entry], block[entry] + within, residue[entry]
        most_blocks = -(-num_rows // rows)
        name = (signatures.number[tile] * distance + residue) * most_blocks + block
        order = np.sort(name * len(name) + np.arange(len(name)))  # much faster than a stable argsort
        name, order = np.divmod(order, max(1, len(name)))
        tile = tile[order]
        if complete and distance == 1:
            end = np.cumsum(np.bincount(name, minlength=len(signatures.count) * most_blocks))
            names = np.arange(len(end))
        else:
            end = np.flatnonzero(np.diff(name, append=-1)) + 1
            names = name[end - 1]
        begin = np.concatenate([[0], end[:-1]])
        block, (signature, residue) = names % most_blocks, np.divmod(names // most_blocks, distance)
        first = residue + block * rows * distance
        count = np.minimum(rows, -(-(num_rows - first) // distance))
        last = first + (count - 1) * distance
        keys = _keys_read(tiles, tile, *(np.repeat(x, end - begin) for x in (first, last)))
        total = np.concatenate([[0.0], np.cumsum(keys, dtype=np.float64)])
        # The longest items come first, those of about one length in their order, which share keys.
        share = total[end] - total[begin]
        order = np.argsort((-16 / max(1, share.max(initial=0)) * share).astype(np.int16), kind="stable")
        entry, unit = signatures.per_unit(signature[order])
        first, count, begin, end = (x[order][entry] for x in (first, count, begin, end))
        items = np.stack([first, np.full_like(first, distance), count, *unit.T, begin, end], 1)
        launches.append(Launch(heads, items, tile + first_number))
    return launches


def _keys_read(tiles: _Tiles, tile: Integers, first: Integers, last: Integers) -> npt.NDArray[np.float32]:
    """Returns about how many keys of each tile the rows from `first` to `last` see together."""
    slopes = tiles.ls / tiles.qs, tiles.hs / tiles.qs  # the ends of the keys are functions of the row
    ends = (tiles.lo0 - slopes[0] * tiles.q0, slopes[0], tiles.hi0 - slopes[1] * tiles.q0, slopes[1], tiles.nk)
    low0, lower, high0, upper, most = (x.astype(np.float32)[tile] for x in ends)
    high = np.minimum(high0 + upper * last.astype(np.float32), most)
    keys: npt.NDArray[np.float32] = np.clip(high - np.maximum(low0 + lower * first.astype(np.float32), 0), 0, most)
    return keys


def _key_items(tiles: _Tiles, signatures: _Signatures, blocks: Blocks, first_number: int) -> Integers:
    """Returns the key items of tiles."""
    tile, block = _expanded(-(-tiles.nk // blocks.key_rows))
    of_block, j0 = tiles.take(tile), block * blocks.key_rows
    count = np.minimum(blocks.key_rows, of_block.nk - j0)
    low, high = _seeing(of_block, j0, count)
    low, high = low * of_block.fold, np.maximum(high, low) * of_block.fold
    rows = high - low
    all_rows = int((rows * signatures.count[signatures.number[tile]]).sum())
    most = max(_MOST_ROWS, -(-all_rows // _KEY_ITEMS))
    entry, part = _expanded(-(-rows // most))
    begin = low[entry] + part * most
    end = np.minimum(begin + most, high[entry])
    item, unit = signatures.per_unit(signatures.number[tile[entry]])
    tile, j0, count = (x[entry][item] for x in (tile + first_number, j0, count))
    return np.stack([tile, j0, count, *unit.T, begin[item], end[item]], 1)
