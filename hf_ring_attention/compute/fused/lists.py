"""The work of the fused kernels as lists of integers, by numpy: tiles, blocks of query rows, and blocks of keys.

A *tile* is q0, qs, fold, nq, k0, ks, lo0, ls, hi0, hs, nk, and one unused integer. Query row x has the number
i = (x - q0) // qs if (x - q0) % qs < fold and i < nq. It sees the key numbers j with lo0 + ls i <= j < hi0 + hs i and
0 <= j < nk; key number j is row k0 + j ks. All shapes of `plan/tiles.py`, folds, dilation and reversed ranges have this form.

An *item* is first, step, count, b, hq, hk, and a range of references to the tiles that hold some of its query
rows first, first + step, ... Its rows are those of some neighbouring query heads from hq on, which share key/value head hk. One
program of a kernel computes an item. A launch has no query row of a head twice, so it needs no atomic operations. The first
launch of a rank has all rows, also those without tiles. Rows of dilated queries are far apart, so separate launches, which
resume the results of the first, take them in blocks of one residue.

A *key item* is a block of keys of a tile: tile, j0, count, b, hq, hk, a range of the tile's query rows that see some of
these keys, counted along folds, and a slot. Few keys that many queries see, as sinks are, would be long work for one program: it
is cut. Where a key row belongs to one key item, its program writes the row's gradients, and the slot is -1. Key items that share
rows put their gradients into slots, a slot for each key from the first one on, and a *sum* adds those of a row: b, hk, row, first
slot, and a range of references to slots from there on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ...plan.plans import Item, TileBatch

Integers = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers")
#: How a kernel loops over a tile (`kernels.py`).
Loops = Literal["one", "split", "staged"]
#: Takes the numbers of key rows in a [B, Hkv, rows] tensor to their rows in a payload.
Places = Callable[[Integers], Integers]

#: Strided queries get a separate launch from this many rows on.
_FEWEST_STRIDED = 16
#: Queries that see at least this many keys on average see many.
_MANY_KEYS = 768
#: Key items of at most this many keys may have a separate launch; `kernels.py` has blocks of as many.
FEW_KEYS = 16
#: A key item has at most this many rows, or a share of all rows that leaves each processor of a GPU many items.
_MOST_ROWS, _KEY_ITEMS = 2048, 4096


class Setting(NamedTuple):
    """How a kernel computes the items of a launch. A block of `rows` rows has those of all heads of an item."""

    rows: int  # query rows of an item, or that a key item reads at once; a power of 2
    keys: int  # keys that an item reads at once, or of a key item
    warps: int
    stages: int
    loops: Loops = "one"
    small: bool = False  # whether tiles of few keys take smaller blocks


class Settings(NamedTuple):
    """The settings of one device, dtype and width: of launches whose queries see few keys, and many.

    As `Kernel.joining`, they are also the request for work lists.
    """

    forward: tuple[Setting, Setting]
    dq: tuple[Setting, Setting]
    dkdv: tuple[Setting, Setting]
    few_keys: Setting | None = None  # of key items of at most 16 keys, in a separate launch; None: as others


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

    setting: Setting
    heads: int
    items: Numbers
    references: Numbers


class Sums(NamedTuple, Generic[Numbers]):
    """The sums of key rows that several key items write, and the references to their slots."""

    items: Numbers
    references: Numbers
    slots: int


class WorkLists(NamedTuple):
    """All launches of some tiles, by kernel.

    Without `sums`, key items have no slots: all add to the same tensors.
    """

    tiles: Integers
    forward: list[Launch[Integers]]
    dq: list[Launch[Integers]]
    dkdv: list[Launch[Integers]]
    sums: Sums[Integers] | None


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


def heads_of_an_item(group: int, settings: Settings) -> int:
    """Returns how many query heads of a group share the items: a divisor of their number that fits into blocks of rows."""
    every = (*settings.forward, *settings.dq, *settings.dkdv, *filter(None, [settings.few_keys]))
    most = min(group, *(setting.rows for setting in every))
    return max(count for count in range(1, most + 1) if group % count == 0)


def work_lists(
    batches: Sequence[TileBatch], sizes: Sizes, settings: Settings, places: Places | None, complete: bool
) -> WorkLists:
    """Returns the work of some tiles.

    Args:
        places: the places of key rows in a payload; None if k and v are tensors [B, Hkv, key_rows, D].
        complete: whether the first launch has all query rows, so that results need no other initial values.
    """
    owners: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], int] = {}
    tiles = _tiles_of(batches, owners)
    together = heads_of_an_item(sizes.group, settings)
    whole, single = _units_of(owners, sizes, together)
    lists = WorkLists(np.zeros((0, 12), np.int64), [], [], [], None)
    # Query heads that share a key/value head come together, or one by one if their tiles differ.
    for heads, units in ((together, whole), (1, single)):
        covers = complete and units is whole
        if not units:
            continue
        signatures = _Signatures(units, tiles, places is not None)
        some = signatures.tiles if places is None else _in_payload(signatures, sizes, places)
        # Without other heads that read the same keys, a unit has all tiles of its keys.
        apart = complete and places is None and not single and together == sizes.group
        first_number = len(lists.tiles)
        key_launches, sums, table = _key_launches(some, signatures, sizes, settings, heads, first_number, apart)
        made: dict[tuple[int, int], tuple[Integers, Integers]] = {}
        forward, dq = (
            _launches(some, signatures, sizes.query_rows, pair, heads, covers, first_number, made)
            for pair in (settings.forward, settings.dq)
        )
        tables = np.concatenate([lists.tiles, table])
        lists = WorkLists(tables, lists.forward + forward, lists.dq + dq, lists.dkdv + key_launches, sums)
    return lists


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
    tiles = _Tiles(
        q0, qs, fold, nq, k0, np.where(nk == 1, 1, abs(ks)),
        lo0=np.zeros_like(q0), ls=((shape == 2) | opens_up).astype(np.int64),
        hi0=np.where(opens_up, nk, width), hs=((shape > 0) & ~opens_up).astype(np.int64),
        nk=nk, owner=np.array(owner, np.int64),
    )  # fmt: skip
    count = 0
    while len(tiles.q0) != count:
        count, tiles = len(tiles.q0), _joined(tiles)
    return tiles


def _joined(tiles: _Tiles) -> _Tiles:
    """Returns the tiles, with those that continue each other as one: a window's first triangle and its band, for example.

    Both see the keys between the same two lines, cut at the first and the last key.
    """
    order = np.lexsort((tiles.q0, tiles.k0 % tiles.ks, tiles.ks, tiles.qs, tiles.fold, tiles.owner))
    tiles = tiles.take(order)
    a, b = tiles.take(np.arange(len(order) - 1)), tiles.take(np.arange(1, len(order)))
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
    every = _Tiles(*(column.copy() for column in tiles))
    every.nq[at] += b.nq[at]
    every.nk[at] = nk[at]
    every.hi0[at] = np.where(rises[at], a.hi0[at], np.minimum(a.hi0, a.nk)[at])
    every.hs[at] = rises[at]
    every.ls[at] = b.ls[at]
    every.lo0[at] = np.where(b.ls[at] == 1, low[at], a.lo0[at])
    return every.take(np.setdiff1d(np.arange(len(order)), at + 1))


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

    def per_unit(self, number: Integers) -> tuple[Integers, Integers, Integers]:
        """Returns, for entries of sets, the entry of each program, and its unit: the place in the set, and (b, hq, hk)."""
        entry, within = _expanded(self.count[number])
        return entry, within, self.units[self.first[number[entry]] + within]


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


def _sees_many(tiles: _Tiles, folds: Integers, rows: float) -> bool:
    """Returns whether `rows` queries see many keys of the tiles on average; `folds` has the queries of a number."""
    i = tiles.nq * np.arange(1, 16, 2)[:, None] // 16
    keys = np.minimum(tiles.hi0 + tiles.hs * i, tiles.nk) - np.maximum(tiles.lo0 + tiles.ls * i, 0)
    pairs = keys.clip(0).mean(0) * tiles.nq * folds
    return bool(pairs.sum() >= _MANY_KEYS * rows)


def _launches(
    tiles: _Tiles, signatures: _Signatures, num_rows: int, settings: tuple[Setting, Setting], heads: int,
    complete: bool, first_number: int, made: dict[tuple[int, int], tuple[Integers, Integers]],
) -> list[Launch[Integers]]:  # fmt: skip
    """Returns the launches of tiles: of neighbouring rows first, then of rows that are farther and farther apart.

    `made` has the items and references by the distance and number of rows: kernels that take as many rows share them.
    """
    strided = (2 * tiles.fold <= tiles.qs) & (tiles.nq >= _FEWEST_STRIDED)
    step = np.where(strided, tiles.qs, 1)
    launches = []
    for distance in sorted({1, *step.tolist()} if complete else {*step.tolist()}):
        mine = np.flatnonzero(step == distance)
        # The rows of a fold have different residues.
        folds = tiles.fold[mine] if distance > 1 else np.ones(len(mine), np.int64)
        entry, within = _expanded(folds)
        of_row, tile = tiles.take(mine[entry]), mine[entry]
        number, residue = np.divmod(of_row.q0 + within, distance)
        name = signatures.number[tile] * distance + residue
        some = tiles.take(mine)
        setting = settings[_sees_many(some, some.fold, len(np.unique(name)) * num_rows / distance)]
        if (distance, setting.rows) not in made:
            length = of_row.nq if distance > 1 else (of_row.nq - 1) * of_row.qs + of_row.fold
            items, references = _items(
                tiles, signatures, tile, name, number, length, distance, setting.rows // heads, num_rows,
                complete and distance == 1,
            )  # fmt: skip
            made[distance, setting.rows] = items, references + first_number
        launches.append(Launch(setting, heads, *made[distance, setting.rows]))
    return launches


def _items(
    tiles: _Tiles, signatures: _Signatures, tile: Integers, name: Integers, number: Integers, length: Integers,
    distance: int, rows: int, num_rows: int, complete: bool,
) -> tuple[Integers, Integers]:  # fmt: skip
    """Returns the items of rows at a distance, and their references to tiles.

    Each `tile` has `length` rows from the row `number` of a residue on; `name` counts the residues of all signatures.
    """
    block = number // rows
    entry, within = _expanded((number + length - 1) // rows - block + 1)
    most_blocks = -(-num_rows // rows)
    name = name[entry] * most_blocks + block[entry] + within
    order = np.sort(name * len(name) + np.arange(len(name)))  # much faster than a stable argsort
    name, order = np.divmod(order, max(1, len(name)))
    tile = tile[entry][order]
    if complete:
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
    entry, _, unit = signatures.per_unit(signature[order])
    first, count, begin, end = (x[order][entry] for x in (first, count, begin, end))
    return np.stack([first, np.full_like(first, distance), count, *unit.T, begin, end], 1), tile


def _keys_read(tiles: _Tiles, tile: Integers, first: Integers, last: Integers) -> npt.NDArray[np.float32]:
    """Returns about how many keys of each tile the rows from `first` to `last` see together."""
    slopes = tiles.ls / tiles.qs, tiles.hs / tiles.qs  # the ends of the keys are functions of the row
    ends = (tiles.lo0 - slopes[0] * tiles.q0, slopes[0], tiles.hi0 - slopes[1] * tiles.q0, slopes[1], tiles.nk)
    low0, lower, high0, upper, most = (x.astype(np.float32)[tile] for x in ends)
    high = np.minimum(high0 + upper * last.astype(np.float32), most)
    keys: npt.NDArray[np.float32] = np.clip(high - np.maximum(low0 + lower * first.astype(np.float32), 0), 0, most)
    return keys


def _key_launches(
    tiles: _Tiles, signatures: _Signatures, sizes: Sizes, settings: Settings, heads: int, first_number: int, apart: bool
) -> tuple[list[Launch[Integers]], Sums[Integers] | None, Integers]:
    """Returns the launches of key items, their sums, and more tiles, of key rows that no query sees.

    If units have all tiles of their keys, `apart`, key rows that one program writes need no sums of float32.
    """
    setting = settings.dkdv[_sees_many(tiles, tiles.fold, len(signatures.count) * sizes.query_rows)]
    tile, block = _expanded(-(-tiles.nk // setting.keys))
    of_block, j0 = tiles.take(tile), block * setting.keys
    count = np.minimum(setting.keys, of_block.nk - j0)
    low, high = _seeing(of_block, j0, count)
    low, high = low * of_block.fold, np.maximum(high, low) * of_block.fold
    rows = high - low
    all_rows = int((rows * signatures.count[signatures.number[tile]]).sum())
    most = max(_MOST_ROWS, -(-all_rows // _KEY_ITEMS))
    entry, part = _expanded(-(-rows // most))
    begin = low[entry] + part * most
    end = np.minimum(begin + most, high[entry])
    tile, j0, count = tile[entry], j0[entry], count[entry]
    number, table, sums = signatures.number[tile], _table(tiles), None
    slot, size = np.full(len(tile), -1), np.zeros(len(signatures.count), np.int64)
    if apart and (tiles.ks == 1).all():
        key = number * sizes.key_rows + tiles.k0[tile] + j0
        shared, unseen = _shared_and_unseen(key, count, len(signatures.count), sizes.key_rows)
        size = np.bincount(number[shared], count[shared], len(size)).astype(np.int64)  # slots of a unit
        slots = int((size * signatures.count).sum())
        if slots <= sizes.batch * sizes.kv_heads * sizes.key_rows:  # With more, sums of all rows take less memory.
            slot[shared] = np.cumsum(count[shared]) - count[shared] - (np.cumsum(size) - size)[number[shared]]
            sums = _sums(key[shared], count[shared], slot[shared], size, signatures, sizes.key_rows, slots)
            # Blocks of rows without a query, as tiles without one.
            entry, block = _expanded(-(-unseen[:, 1] // setting.keys))
            start, rows = unseen[entry].T
            more = np.zeros((len(unseen), 12), np.int64)
            more[:, 1:3], more[:, 4], more[:, 5], more[:, 10] = 1, unseen[:, 0] % sizes.key_rows, 1, unseen[:, 1]
            tile = np.concatenate([tile, len(table) + entry])
            j0 = np.concatenate([j0, block * setting.keys])
            count = np.concatenate([count, np.minimum(setting.keys, rows - block * setting.keys)])
            number = np.concatenate([number, start // sizes.key_rows])
            begin, end, slot = (np.pad(x, (0, len(entry)), constant_values=y) for x, y in ((begin, 0), (end, 0), (slot, -1)))
            table = np.concatenate([table, more])
    item, within, unit = signatures.per_unit(number)
    first = (np.cumsum(size * signatures.count) - size * signatures.count)[number[item]] + within * size[number[item]]
    slot = np.where(slot[item] < 0, -1, slot[item] + first)
    tile, j0, count, begin, end = (x[item] for x in (tile + first_number, j0, count, begin, end))
    items = np.stack([tile, j0, count, *unit.T, begin, end, slot], 1)
    few = (count <= FEW_KEYS) & (settings.few_keys is not None)
    parts = ((settings.few_keys or setting, items[few]), (setting, items[~few]))
    return [Launch(x, heads, some, some[:0, 0]) for x, some in parts if len(some)], sums, table


def _shared_and_unseen(key: Integers, count: Integers, sets: int, key_rows: int) -> tuple[Integers, Integers]:
    """Returns the key items, of `count` keys from `key` on, that share a key, and the keys outside of all items.

    Keys are numbered through all sets. Those outside are rows: the first one, and how many follow each other.
    """
    ends = np.arange(sets + 1) * key_rows  # Nothing goes beyond a set.
    low, high = np.concatenate([ends, key]), np.concatenate([ends, key + count])
    order = np.argsort(low, kind="stable")
    low, high = low[order], high[order]
    before = np.concatenate([[0], np.maximum.accumulate(high)[:-1]])
    is_shared = low < before
    is_shared[:-1] |= low[1:] < high[:-1]
    gaps = np.flatnonzero(low > before)
    number = order - len(ends)
    return np.sort(number[is_shared & (number >= 0)]), np.stack([before[gaps], low[gaps] - before[gaps]], 1)


def _sums(
    key: Integers, count: Integers, slot: Integers, size: Integers, signatures: _Signatures, key_rows: int, slots: int
) -> Sums[Integers]:
    """Returns the sums of the keys of key items, whose slots begin at `slot`; a unit of each set has `size` slots."""
    entry, within = _expanded(count)
    key, references = key[entry] + within, slot[entry] + within
    order = np.argsort(key, kind="stable")
    key, references = key[order], references[order]
    begin = np.flatnonzero(np.diff(key, prepend=-1))
    number, row = np.divmod(key[begin], key_rows)
    item, within, unit = signatures.per_unit(number)
    first = (np.cumsum(size * signatures.count) - size * signatures.count)[number[item]] + within * size[number[item]]
    end = np.append(begin[1:], len(key))
    batch_row, _, head = unit.T
    return Sums(np.stack([batch_row, head, row[item], first, begin[item], end[item]], 1), references, slots)
