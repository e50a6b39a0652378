"""The positions of the rows in a `PatternCache`: which rows stay, which slots new rows take, and which rows a query sees.

They are small tensors of integers on the CPU. All layers share the table of heads that keep the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...plan.branches import LARGEST
from ...plan.intervals import borders_of
from ...plan.kept import keeps_all, kept_keys, most_rows, sees_all_kept
from ...plan.patterns import Pattern

#: Storage grows by this share of its rows, so that a token seldom copies all of them.
GROWTH = 32


@dataclass(frozen=True)
class Arrival:
    """The new tokens of a call; each tensor has B rows, or 1 row if all batch rows are alike."""

    number: int  # of the call
    seen: int  # the tokens in the cache before, with padding
    positions: Tensor  # [B or 1, n], -1 for padding
    rows: Tensor  # [B or 1, m], the positions of the new rows that this rank keeps; all of them without a ring
    pieces: tuple[int, ...]  # the tokens where this rank's pieces of rows begin and end; () without a ring
    before: Tensor  # [B or 1], the positions in the cache before
    floor: Tensor  # [B or 1], the fewest positions that `crop` may go back to
    document: Tensor | None  # [B or 1], the positions of a prefilled document, which `crop` may always go back to
    recording: bool  # whether `crop` may go back to `floor` after this call, too
    compact: bool  # whether many rows have just become free
    padding_inside: Tensor | None  # the mask [B, tokens] of all tokens, if a row has padding between tokens; else None

    @cached_property
    def padded(self) -> bool:
        """Whether some new tokens are padding."""
        return bool((self.positions < 0).any())

    @cached_property
    def total(self) -> int:
        """The tokens in the cache after the call, with padding."""
        return self.seen + self.positions.shape[1]

    @cached_property
    def after(self) -> Tensor:
        """The positions in the cache after the call."""
        return self.before + (self.positions >= 0).sum(-1)


#: No call has begun.
_NO_TOKENS = torch.empty(1, 0, dtype=torch.int64)
_NO_CALL = Arrival(0, 0, _NO_TOKENS, _NO_TOKENS, (), _NO_TOKENS, _NO_TOKENS, None, False, False, None)


class KeptRows:
    """The positions of the rows of heads with one pattern: [B or 1, heads or 1, slots], -1 for an empty slot.

    Args:
        pattern: without patterns by head.
        phases: of each key/value head.
        every: whether all rows stay, also those that no later query sees; then heads share their slots.
    """

    def __init__(self, pattern: Pattern, phases: tuple[int, ...], every: bool = False) -> None:
        self.pattern, self.phases = pattern, torch.tensor(phases)[:, None]  # [heads or 1, 1]
        needs_all = keeps_all(pattern)
        self.every = every or needs_all
        self._phase = phases[0] if len(phases) == 1 else None
        self.positions = torch.empty(1, 1 if self.every else len(phases), 0, dtype=torch.int64)
        self.old = self.positions  # those before the last call
        self.floor = torch.zeros(1, dtype=torch.int64)  # [B or 1], no row is missing that queries from here on see
        self.most = max(most_rows(pattern, x, LARGEST >> 8) for x in {*phases})
        self._sees_all = sees_all_kept(pattern) and needs_all == self.every
        self.begun, self.done, self._weighed = 0, 0, 0  # the numbers of the last calls
        #: After `insert`, where the rows of the last call are: [n], or [B or 1, heads or 1, n].
        self.slots = torch.empty(0, dtype=torch.int64)
        #: After `rebuild`, which of the rows in the cache and of the new ones the slots hold; None for all of them.
        self.order: Tensor | None = None
        #: The logarithm of how often each query sees each row [B, heads, queries, slots]; None if each is seen once.
        self.bias: Tensor | None = None
        #: The queries that see no row [B, heads, queries], as padding or over a ring; else None.
        self.blind: Tensor | None = None
        self._moved: dict[Any, Tensor] = {}  # the same on devices

    @property
    def num_slots(self) -> int:
        return self.positions.shape[2]

    @property
    def capacity(self) -> int:
        """The rows that a layer's storage has room for, once it needs more."""
        in_use = self.num_slots
        most = self.most if in_use <= self.most else 2 * self.most  # with the rows of a prefilled document
        return max(in_use, min(in_use + in_use // GROWTH + 1, most))

    def fill_like(self, other: KeptRows) -> None:
        """Takes the rows of another table."""
        self.positions, self.old, self.slots = other.positions, other.old, other.slots
        self.begun, self.done = other.begun, other.done

    def begin(self, new: Arrival) -> None:
        """Begins a call: its rows are `old` until the layers have stored their new rows."""
        if self.begun != new.number:
            self.begun = new.number
            self.old = self.positions
            if len(self.old) < len(new.positions):
                self.old = self.old.expand(len(new.positions), -1, -1)

    def insert(self, new: Arrival, group: int) -> None:
        """Gives the new rows of a call slots, and finds the rows that its queries see; for all layers once.

        Rows that no query from `floor` on sees lose their slots.

        Args:
            group: the query heads that share a key/value head.
        """
        if self._weighed == new.number:
            return
        self._weighed = new.number
        full = self.append(new, new.rows.shape[1]) if self.every else self._replace(new)
        # Every row is one that the query sees.
        full = full and new.positions.shape[1] == 1 and self._sees_all and not new.padded
        self.bias, self.blind = (None, None) if full else self._log_multiplicity(new, group)
        self._moved = {}

    def append(self, new: Arrival, count: int) -> bool:
        """Gives the new rows of a call `count` slots behind all others; those that this rank does not keep stay empty.

        Returns:
            Whether no slot is empty.
        """
        self.begin(new)
        if self.done != new.number:
            self.done = new.number
            rows = torch.nn.functional.pad(new.rows, (0, count - new.rows.shape[1]), value=-1)
            self.slots = torch.arange(self.old.shape[2], self.old.shape[2] + count)
            self.positions = torch.cat([self.old, rows[:, None].expand(len(self.old), 1, -1)], -1)
        return bool((self.positions >= 0).all())

    def sees_every_slot(self, new: Arrival) -> bool:
        """Returns whether a call surely needs no bias: an exact pattern, one query, no padding."""
        return self._sees_all and new.positions.shape[1] == 1 and self.is_filled(new)

    def is_filled(self, new: Arrival) -> bool:
        """Returns whether the slots hold the earlier tokens of this rank in their order, and no new one is padding."""
        self.begin(new)
        return self.every and not new.padded and bool((self.old >= 0).all())

    def _replace(self, new: Arrival) -> bool:
        """Gives the new rows of a call the slots of rows that no query from `floor` on sees, and new slots.

        Returns:
            Whether no slot is empty, and no row in a slot is unseen.
        """
        self.begin(new)
        self.done, self.floor = new.number, new.floor
        positions, n = self.old, new.rows.shape[1]
        unseen = free = ~self._kept(positions, new.floor, new.recording)
        counts = dropped = unseen.sum(-1)
        if new.document is not None:
            free = unseen & ~self._of_document(positions, new.document)
            counts = free.sum(-1)
        missing = n - int(counts.min())
        if missing > 0:
            positions, free = (
                torch.nn.functional.pad(x, (0, missing), value=y) for x, y in ((positions, -1), (free, 1))
            )
            dropped = dropped + missing
        slots = (
            free.to(torch.int8).sort(dim=-1, descending=True, stable=True)[1][..., :n]
            if n != 1
            else free.to(torch.int8).argmax(-1, keepdim=True)
        )
        values = new.rows[:, None].expand_as(slots)
        self.positions = positions.scatter(-1, slots, values)
        self.slots = slots[0, 0] if slots.shape[:2] == (1, 1) else slots
        return int(dropped.max()) == n and not new.recording

    def rebuild(self, new: Arrival) -> None:
        """Keeps the rows that later calls need, of those in the cache and of the new ones; for all layers once."""
        self.begin(new)
        if self.done == new.number:
            return
        self.done = new.number
        every = torch.cat([self.old, new.rows[:, None].expand(*self.old.shape[:2], -1)], -1)
        self.floor = new.floor if new.recording or new.compact else new.after
        kept = self._kept(every, self.floor, new.recording or new.compact)
        if new.document is not None:
            kept = kept | self._of_document(every, new.document)
        self.order, self.positions = None, every
        if not kept.all():  # A rank without rows has an empty slot, which kernels can read.
            order = (~kept).to(torch.int8).sort(dim=-1, stable=True)[1][..., : max(1, int(kept.sum(-1).max()))]
            self.order = order
            self.positions = every.gather(-1, order).masked_fill(~kept.gather(-1, order), -1)

    def crop(self, length: Tensor) -> None:
        """Forgets the rows from position `length` [B or 1] on."""
        self.positions = self.positions.masked_fill(self.positions >= length[:, None, None], -1)
        self.floor = torch.minimum(self.floor, length)
        if self.every:  # New rows come behind the last one.
            used = (self.positions >= 0).flatten(0, 1).any(0).nonzero()
            self.positions = self.positions[..., : int(used[-1]) + 1 if len(used) else 1]

    def has(self, length: Tensor, document: Tensor | None) -> bool:
        """Returns whether no row is missing, on any rank, that a query at position `length` [B or 1] or a later one sees."""
        if (length >= self.floor).all():
            return True
        rows = torch.arange(int(length.max()))[None, None]
        missing = (rows < length[:, None, None]) & self._kept(rows, length, later=False)
        missing = missing & ~self._kept(rows, self.floor, later=True)
        return not (missing if document is None else missing & ~self._of_document(rows, document)).any()

    def bias_for(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the bias of the last call for a kernel."""
        assert self.bias is not None
        key = dtype, device
        if key not in self._moved:
            self._moved[key] = self.bias.to(device, dtype)
        return self._moved[key]

    def slots_on(self, device: torch.device) -> Tensor:
        """Returns the slots of the last call on a device."""
        moved = self._moved.get(device)
        if moved is None:
            moved = self._moved[device] = self.slots.to(device)
        return moved

    def select(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies a choice of batch rows."""
        if len(self.positions) > 1:
            self.positions = rows(self.positions)
        if len(self.floor) > 1:
            self.floor = rows(self.floor)

    def _of_document(self, positions: Tensor, document: Tensor) -> Tensor:
        """Returns which positions belong to a document of `document` [B or 1] tokens and are seen behind it."""
        return (positions < document[:, None, None]) & self._kept(positions, document, later=False)

    def _kept(self, positions: Tensor, length: Tensor, later: bool) -> Tensor:
        """Returns which positions the query `length` [B or 1] or a later one sees, or which are not below it (`later`)."""
        if self.every:
            return positions >= 0
        # Integers where possible: each of their operations takes a fraction of the time.
        phases: Any = self.phases if self._phase is None else self._phase
        first_row: Any = int(length[0]) if len(length) == 1 else length.view(-1, 1, 1)
        kept = positions >= first_row if later else None
        for first, beyond, stride, residue in kept_keys(self.pattern, phases, first_row):
            inside = positions >= (max(first, 0) if isinstance(first, int) else first.clamp_min(0))
            if later or not isinstance(beyond, int) or not isinstance(first_row, int) or beyond < first_row:
                inside = inside & (positions < beyond)
            if stride > 1:
                inside = inside & (positions % stride == residue)
            kept = inside if kept is None else kept | inside
        assert kept is not None
        return kept

    def _log_multiplicity(self, new: Arrival, group: int) -> tuple[Tensor, Tensor | None]:
        """Returns `bias` and `blind`; the bias of blind queries is 0."""
        rows, queries = self.positions[:, :, None], new.positions[:, None, :, None]  # [B, heads, n, slots] together
        visible, phases = (rows >= 0) & (rows <= queries), self.phases[:, :, None]
        by_branch = []
        for branch in self.pattern.branches:
            firsts, beyonds = borders_of(branch, causal=True)
            seen = visible
            for border in firsts:
                seen = seen & (rows >= border.position(queries))  # type: ignore[arg-type]
            for border in beyonds:
                seen = seen & (rows < border.position(queries))  # type: ignore[arg-type]
            residue = phases % branch.dilation
            if branch.dilation > 1:
                seen = seen & (rows % branch.dilation == residue)
            if branch.queries == "dilated" and branch.dilation > 1:
                seen = seen & (queries % branch.dilation == residue)
            by_branch.append(seen)
        seen = torch.stack(torch.broadcast_tensors(*by_branch))
        counts = seen.any(0) if self.pattern.overlap == "once" else seen.sum(0)
        blind = ~counts.bool().any(-1)
        bias = torch.where(blind[..., None], 1, counts).to(torch.float64).log()
        # The queries of a group's heads follow each other.
        return bias.repeat(1, 1, group, 1), blind.repeat(1, 1, group) if blind.any() else None


class Shared:
    """What the layers of a cache share: the new tokens of the running call, and the tables.

    Args:
        keys: whether layers read the keys of others, which then keep the rows of a call until the next one.
        every: whether all rows stay.
    """

    def __init__(self, keys: bool, every: bool = False) -> None:
        self.keys, self.every, self.arrival = keys, every, _NO_CALL
        self.tables: dict[Any, KeptRows] = {}

    def table(self, pattern: Pattern, phases: tuple[int, ...]) -> KeptRows:
        """Returns the table of heads with this pattern and these phases; heads with equal phases share one row of it."""
        key = pattern, phases[:1] if len({*phases}) == 1 else phases
        if key not in self.tables:
            table = self.tables[key] = KeptRows(*key, self.every)
            if self.every:  # A layer that reads the keys of another may come with a pattern of its own.
                table.fill_like(next(iter(self.tables.values())))
        return self.tables[key]
