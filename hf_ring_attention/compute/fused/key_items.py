"""The key items of the fused kernels, and the sums of those that share key rows; `lists.py` describes them."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from .columns import Integers, Signatures, Sizes, Tiles, expanded, seeing, sees_many, table_of
from .settings import FEW_KEYS, Setting, Settings

Numbers = TypeVar("Numbers")
#: With this many key items, each processor of a GPU has many.
_KEY_ITEMS = 4096


class Sums(NamedTuple, Generic[Numbers]):
    """The sums of key rows that several key items write, and the references to their slots."""

    items: Numbers
    references: Numbers
    slots: int


def key_launches(
    tiles: Tiles, signatures: Signatures, sizes: Sizes, settings: Settings, apart: bool
) -> tuple[list[tuple[Setting, Integers]], Sums[Integers] | None, Integers]:
    """Returns key items by the setting of their launch, their sums, and more tiles, of key rows that no query sees.

    If units have all tiles of their keys, `apart`, key rows that one program writes need no sums of float32.
    """
    setting = settings.dkdv[sees_many(tiles, tiles.fold, len(signatures.count) * sizes.query_rows)]
    tile, block = expanded(-(-tiles.nk // setting.keys))
    of_block, j0 = tiles.take(tile), block * setting.keys
    count = np.minimum(setting.keys, of_block.nk - j0)
    low, high = seeing(of_block, j0, count)
    low, high = low * of_block.fold, np.maximum(high, low) * of_block.fold
    rows = high - low
    all_rows = int((rows * signatures.count[signatures.number[tile]]).sum())
    most = max(settings.most_rows, -(-all_rows // _KEY_ITEMS))
    entry, part = expanded(-(-rows // most))
    begin = low[entry] + part * most
    end = np.minimum(begin + most, high[entry])
    tile, j0, count = tile[entry], j0[entry], count[entry]
    number, table, sums = signatures.number[tile], table_of(tiles), None
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
            entry, block = expanded(-(-unseen[:, 1] // setting.keys))
            start, rows = unseen[entry].T
            more = np.zeros((len(unseen), 12), np.int64)
            more[:, 1:3], more[:, 4], more[:, 5], more[:, 10] = 1, unseen[:, 0] % sizes.key_rows, 1, unseen[:, 1]
            tile = np.concatenate([tile, len(table) + entry])
            j0 = np.concatenate([j0, block * setting.keys])
            count = np.concatenate([count, np.minimum(setting.keys, rows - block * setting.keys)])
            number = np.concatenate([number, start // sizes.key_rows])
            begin, end, slot = (
                np.pad(x, (0, len(entry)), constant_values=y) for x, y in ((begin, 0), (end, 0), (slot, -1))
            )
            table = np.concatenate([table, more])
    item, within, unit = signatures.per_unit(number)
    first = (np.cumsum(size * signatures.count) - size * signatures.count)[number[item]] + within * size[number[item]]
    slot = np.where(slot[item] < 0, -1, slot[item] + first)
    tile, j0, count, begin, end = (x[item] for x in (tile, j0, count, begin, end))
    items = np.stack([tile, j0, count, *unit.T, begin, end, slot], 1)
    few = (count <= FEW_KEYS) & (settings.few_keys is not None)
    parts = ((settings.few_keys or setting, items[few]), (setting, items[~few]))
    return [(x, some) for x, some in parts if len(some)], sums, table


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
    key: Integers, count: Integers, slot: Integers, size: Integers, signatures: Signatures, key_rows: int, slots: int
) -> Sums[Integers]:
    """Returns the sums of the keys of key items, whose slots begin at `slot`; a unit of each set has `size` slots."""
    entry, within = expanded(count)
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
