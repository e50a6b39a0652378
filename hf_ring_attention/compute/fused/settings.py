"""How the fused kernels run: their blocks, warps and loops, by the kind of launch."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: How a kernel loops over a tile (`kernels.py`).
Loops = Literal["one", "edges", "split", "staged"]
#: Tiles and key items of at most this many keys may have blocks of this many, the fewest of a product.
FEW_KEYS = 16


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
    most_rows: int = 2048  # of a key item, unless all items would then be more than processors need

    def kinds(self) -> list[Settings]:
        """Returns the settings of each kind of launch for all launches, and small key items, which proofs of 256 tokens cut."""
        forward, dq, dkdv = self[:3]
        kinds = (
            self._replace(forward=2 * (f,), dq=2 * (q,), dkdv=2 * (kv,), most_rows=160)
            for f, q, kv in zip(forward, dq, dkdv)
        )
        return list(dict.fromkeys(kinds))


def heads_of_an_item(group: int, settings: Settings) -> int:
    """Returns how many query heads of a group share the items: a divisor of their number that fits into blocks of rows."""
    every = (*settings.forward, *settings.dq, *settings.dkdv, *filter(None, [settings.few_keys]))
    most = min(group, *(setting.rows for setting in every))
    return max(count for count in range(1, most + 1) if group % count == 0)
