"""The work of the fused kernels as lists of integers, by numpy: tiles, blocks of query rows, and blocks of keys.

A *tile* is q0, qs, fold, nq, k0, ks, lo0, ls, hi0, hs, nk, and one unused integer. Query row x has the number
i = (x - q0) // qs if (x - q0) % qs < fold and i < nq. It sees the key numbers j with lo0 + ls i <= j < hi0 + hs i and
0 <= j < nk; key number j is row k0 + j ks. All shapes of `plan/tiles.py`, folds, dilation and reversed ranges have this form.

An *item* is first, step, count, b, hq, hk, and a range of references to the tiles that hold some of its query
rows first, first + step, ... Its rows are those of some neighbouring query heads from hq on, which share key/value head hk. One
program of a kernel computes an item. A launch has each query row of a head once, so it needs no atomic operations. The first
launch of a rank has all rows, also those without tiles. Rows of dilated queries are far apart, so separate launches, which
resume the results of the first, take them in blocks of one residue.

A *key item* is a block of keys of a tile: tile, j0, count, b, hq, hk, a range of the tile's query rows that see some of
these keys, counted along folds, and a slot. Few keys that many queries see, as sinks are, would be long work for one program:
it is cut. The program of a key item writes the gradients of rows that only it has; then the slot is -1. Key items that share
rows put their gradients into slots, one for each key from the first on, and a *sum* adds those of a row: b, hk, row, first
slot, and a range of references to slots from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np
import numpy.typing as npt

from ...plan.plans import TileBatch
from .columns import Integers, Places, Signatures, Sizes, Tiles, expanded, in_payload, sees_many, tiles_of, units_of
from .key_items import Numbers, Sums, key_launches
from .settings import Setting, Settings, heads_of_an_item

#: Strided queries get a separate launch from this many rows on.
_FEWEST_STRIDED = 16


class Launch(NamedTuple, Generic[Numbers]):
    """Items, or key items, that run at once; all have as many query heads. Key items need no references."""

    setting: Setting
    heads: int
    items: Numbers
    references: Numbers


class WorkLists(NamedTuple):
    """All launches of some tiles, by kernel.

    Without `sums`, key items have no slots: all add to the same tensors.
    """

    tiles: Integers
    forward: list[Launch[Integers]]
    dq: list[Launch[Integers]]
    dkdv: list[Launch[Integers]]
    sums: Sums[Integers] | None


def work_lists(
    batches: Sequence[TileBatch], sizes: Sizes, settings: Settings, places: Places | None, complete: bool
) -> WorkLists:
    """Returns the work of some tiles.

    Args:
        places: the places of key rows in a payload; None if k and v are tensors [B, Hkv, key_rows, D].
        complete: whether the first launch has all query rows, so that results need no other initial values.
    """
    owners: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    tiles = tiles_of(batches, owners)
    together = heads_of_an_item(sizes.group, settings)
    signatures = Signatures(units_of(owners, sizes, together), tiles, places is not None)
    some = signatures.tiles if places is None else in_payload(signatures, sizes, places)
    # Without other heads that read the same keys, a unit has all tiles of its keys.
    apart = complete and places is None and together == sizes.group
    of_keys, sums, table = key_launches(some, signatures, sizes, settings, apart)
    made: dict[tuple[int, int], tuple[Integers, Integers]] = {}
    forward, dq = (
        _launches(some, signatures, sizes.query_rows, pair, together, complete, made)
        for pair in (settings.forward, settings.dq)
    )
    return WorkLists(table, forward, dq, [Launch(x, together, y, y[:0, 0]) for x, y in of_keys], sums)


def _launches(
    tiles: Tiles, signatures: Signatures, num_rows: int, settings: tuple[Setting, Setting], heads: int,
    complete: bool, made: dict[tuple[int, int], tuple[Integers, Integers]],
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
        entry, within = expanded(folds)
        of_row, tile = tiles.take(mine[entry]), mine[entry]
        number, residue = np.divmod(of_row.q0 + within, distance)
        name = signatures.number[tile] * distance + residue
        some = tiles.take(mine)
        setting = settings[sees_many(some, some.fold, len(np.unique(name)) * num_rows / distance)]
        if (distance, setting.rows) not in made:
            length = of_row.nq if distance > 1 else (of_row.nq - 1) * of_row.qs + of_row.fold
            items, references = _items(
                tiles, signatures, tile, name, number, length, distance, setting.rows // heads, num_rows,
                complete and distance == 1,
            )  # fmt: skip
            made[distance, setting.rows] = items, references
        launches.append(Launch(setting, heads, *made[distance, setting.rows]))
    return launches


def _items(
    tiles: Tiles, signatures: Signatures, tile: Integers, name: Integers, number: Integers, length: Integers,
    distance: int, rows: int, num_rows: int, complete: bool,
) -> tuple[Integers, Integers]:  # fmt: skip
    """Returns the items of rows at a distance, and their references to tiles.

    Each `tile` has `length` rows from the row `number` of a residue on; `name` counts the residues of all signatures.
    """
    block = number // rows
    entry, within = expanded((number + length - 1) // rows - block + 1)
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


def _keys_read(tiles: Tiles, tile: Integers, first: Integers, last: Integers) -> npt.NDArray[np.float32]:
    """Returns about how many keys of each tile the rows from `first` to `last` see together."""
    slopes = tiles.ls / tiles.qs, tiles.hs / tiles.qs  # the ends of the keys are functions of the row
    ends = (tiles.lo0 - slopes[0] * tiles.q0, slopes[0], tiles.hi0 - slopes[1] * tiles.q0, slopes[1], tiles.nk)
    low0, lower, high0, upper, most = (x.astype(np.float32)[tile] for x in ends)
    high = np.minimum(high0 + upper * last.astype(np.float32), most)
    keys: npt.NDArray[np.float32] = np.clip(high - np.maximum(low0 + lower * first.astype(np.float32), 0), 0, most)
    return keys
