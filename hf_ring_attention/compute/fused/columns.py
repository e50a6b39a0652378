"""The tiles of the fused kernels as columns of integers, and the heads that share them; `lists.py` describes a tile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...plan.plans import Item, TileBatch

Integers = npt.NDArray[np.int64]
#: Takes the numbers of key rows in a [B, Hkv, rows] tensor to their rows in a payload.
Places = Callable[[Integers], Integers]
#: Queries that see at least this many keys on average see many.
_MANY_KEYS = 768


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


class Tiles(NamedTuple):
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

    def take(self, numbers: Integers) -> Tiles:
        return Tiles(*(column[numbers] for column in self))


#: The query heads of programs that share all tiles: rows (b, hq, hk).
_Units = list[tuple[int, int, int]]


def tiles_of(batches: Sequence[TileBatch], owners: dict[tuple[tuple[int, ...], tuple[int, ...]], int]) -> Tiles:
    """Returns all tiles with ascending rows; `owners` gets the number of each set of batch rows and heads."""
    items: list[Item] = [*itertools.chain.from_iterable(batch.items for batch in batches)]
    count = [len(batch.items) for batch in batches]
    number = np.repeat(np.arange(len(batches)), count)
    owner = [owners.setdefault((item.batch_rows, item.heads), len(owners)) for item in items]
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
    tiles = Tiles(
        q0, qs, fold, nq, k0, np.where(nk == 1, 1, abs(ks)),
        lo0=np.zeros_like(q0), ls=((shape == 2) | opens_up).astype(np.int64),
        hi0=np.where(opens_up, nk, width), hs=((shape > 0) & ~opens_up).astype(np.int64),
        nk=nk, owner=np.array(owner, np.int64),
    )  # fmt: skip
    tiles = tiles.take(np.lexsort((tiles.q0, tiles.k0 % tiles.ks, tiles.ks, tiles.qs, tiles.fold, tiles.owner)))
    before = 0
    while len(tiles.q0) != before:
        before, tiles = len(tiles.q0), _joined(tiles)
    return tiles


def _joined(tiles: Tiles) -> Tiles:
    """Returns the tiles, with neighbours that continue each other as one: a window's first triangle and its band, for example.

    Both see the keys between the same two lines, cut at the first and the last key.
    """
    a, b = (Tiles(*(column[some] for column in tiles)) for some in (slice(None, -1), slice(1, None)))
    alike = (a.owner == b.owner) & (a.qs == b.qs) & (a.fold == b.fold) & (a.ks == b.ks)
    follows = alike & (b.q0 == a.q0 + a.nq * a.qs) & (b.k0 >= a.k0) & ((b.k0 - a.k0) % a.ks == 0)
    # Of b, in the numbers of queries and keys of a.
    shift = (b.k0 - a.k0) // a.ks
    low, high, nk = shift + b.lo0 - b.ls * a.nq, shift + b.hi0 - b.hs * a.nq, shift + b.nk
    # The end: the line of a, which the last key may cut in b; or none of both has a line.
    rises = ((a.hs == 1) | (a.nq == 1)) & (a.hi0 + a.nq - 1 <= np.minimum(a.nk, nk))
    rises &= np.where(b.hs == 1, high == a.hi0, (high >= nk) & (a.hi0 + a.nq >= nk))
    constant = (a.hs == 0) & (b.hs == 0) & (np.minimum(a.hi0, a.nk) == np.minimum(high, nk))
    # The begin: the line of b, which the first key may cut in a; or none of both has a line.
    begins = np.where(a.ls == 1, a.lo0 == low, (a.lo0 <= 0) & (low + a.nq <= 1))
    begins = np.where(b.ls == 1, (b.lo0 >= 0) & begins, (a.ls == 0) & (np.maximum(a.lo0, 0) == np.maximum(low, shift)))
    at = np.flatnonzero(follows & (rises | constant) & begins)
    at = at[np.diff(at, prepend=-2) > 1]  # A tile joins one other at a time.
    every = Tiles(*(column.copy() for column in tiles))
    every.nq[at] += b.nq[at]
    every.nk[at] = nk[at]
    every.hi0[at] = np.where(rises[at], a.hi0[at], np.minimum(a.hi0, a.nk)[at])
    every.hs[at] = rises[at]
    every.ls[at] = b.ls[at]
    every.lo0[at] = np.where(b.ls[at] == 1, low[at], a.lo0[at])
    return every.take(np.delete(np.arange(len(tiles.q0)), at + 1))


def units_of(
    owners: dict[tuple[tuple[int, ...], tuple[int, ...]], int], sizes: Sizes, together: int
) -> list[tuple[list[int], _Units]]:
    """Returns the units by the owners of their tiles."""
    group = sizes.group
    owners_of: dict[tuple[int, int], list[int]] = {
        (b, h): [] for b in range(sizes.batch) for h in range(sizes.kv_heads)
    }
    for (batch_rows, heads), owner in owners.items():
        for head in itertools.product(batch_rows, heads):
            owners_of[head].append(owner)
    alike: dict[tuple[int, ...], _Units] = {}
    for (b, h), found in owners_of.items():
        alike.setdefault(tuple(found), []).extend((b, hq, h) for hq in range(h * group, (h + 1) * group, together))
    return [([*found], units) for found, units in alike.items()]


class Signatures:
    """Sets of units that share all tiles, and their tiles, one set after the other.

    Args:
        apart: whether each unit is a separate set, since its keys lie elsewhere in a payload.
    """

    def __init__(self, units: list[tuple[list[int], _Units]], tiles: Tiles, apart: bool) -> None:
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

    def per_unit(self, number: Integers) -> tuple[Integers, Integers, Integers]:
        """Returns, for entries of sets, the entry of each program, and its unit: the place in the set, and (b, hq, hk)."""
        entry, within = expanded(self.count[number])
        return entry, within, self.units[self.first[number[entry]] + within]


def expanded(counts: Integers) -> tuple[Integers, Integers]:
    """Returns [0] * counts[0] + [1] * counts[1] + ..., and the place of each in its part."""
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)


def in_payload(signatures: Signatures, sizes: Sizes, places: Places) -> Tiles:
    """Returns the tiles with the places of their keys, cut into parts whose places are equally far apart."""
    tiles, number = signatures.tiles, signatures.number
    batch_row, _, head = signatures.units[signatures.first].T
    first = ((batch_row * sizes.kv_heads + head) * sizes.key_rows)[number]
    tile, j = expanded(tiles.nk)
    place = places(first[tile] + tiles.k0[tile] + tiles.ks[tile] * j)
    distance = np.diff(place, append=0)
    # A part ends where the distance between keys changes.
    starts = j == 0
    starts[2:] |= (j[2:] > 1) & (distance[1:-1] != distance[:-2])
    at = np.flatnonzero(starts)
    length, j = np.diff(at, append=len(tile)), j[at]
    cut = tiles.take(tile[at])._replace(k0=place[at], ks=np.where(length > 1, distance[at], 1), nk=length)
    cut = cut._replace(lo0=cut.lo0 - j, hi0=cut.hi0 - j)
    low, high = seeing(cut, np.zeros_like(length), length)
    seen = high > low
    cut = cut._replace(
        q0=cut.q0 + low * cut.qs, nq=high - low, lo0=cut.lo0 + low * cut.ls, hi0=cut.hi0 + low * cut.hs
    ).take(np.flatnonzero(seen))
    signatures.number = number[tile[at[seen]]]
    return cut


def seeing(tiles: Tiles, first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """Returns the range of query numbers that see some of `count` keys from `first` on; it may end before it begins."""
    low = np.where(tiles.hs > 0, np.maximum(first - tiles.hi0 + 1, 0), np.where(tiles.hi0 > first, 0, tiles.nq))
    beyond = first + count - tiles.lo0
    return low, np.where(tiles.ls > 0, np.minimum(tiles.nq, beyond), np.where(beyond > 0, tiles.nq, 0))


def table_of(tiles: Tiles) -> Integers:
    """Returns the tiles as rows of integers."""
    return np.stack([*tiles[:11], np.zeros_like(tiles.q0)], 1)


def sees_many(tiles: Tiles, folds: Integers, rows: float) -> bool:
    """Returns whether `rows` queries see many keys of the tiles on average; `folds` has the queries of a number."""
    i = tiles.nq * np.arange(1, 16, 2)[:, None] // 16
    keys = np.minimum(tiles.hi0 + tiles.hs * i, tiles.nk) - np.maximum(tiles.lo0 + tiles.ls * i, 0)
    pairs = keys.clip(0).mean(0) * tiles.nq * folds
    return bool(pairs.sum() >= _MANY_KEYS * rows)
