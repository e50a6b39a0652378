"""Plans bound to tensors: row numbers on a device, made once per problem and kept."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .plans import Item, Problem, TileBatch, held_tiles, of_heads, plan_rank, tiles_from
from .routes import Hop, KeyRows, Round, needed, ring_rounds
from .rows import IndexRows, Rows, ViewRows


@dataclass(frozen=True)
class BoundBatch:
    """One kernel call's rows."""

    queries: Rows
    keys: Rows
    causal: bool

    def parts(self, max_rows: int) -> list[BoundBatch]:
        """The batch in parts of about `max_rows` query and key rows, so that what a call holds stays small."""
        size = max(1, max_rows // (self.queries.rows_per_unit + self.keys.rows_per_unit))
        if size >= self.queries.units:
            return [self]
        parts = zip(self.queries.split(size), self.keys.split(size))
        return [BoundBatch(queries, keys, self.causal) for queries, keys in parts]


class Runs(NamedTuple):
    """`copies` runs of `length` rows, `distance` rows from start to start."""

    start: int
    length: int
    distance: int
    copies: int

    def numbers(self) -> Tensor:
        """Of the rows, ascending."""
        starts = self.start + torch.arange(self.copies) * self.distance
        return (starts[:, None] + torch.arange(self.length)).flatten()

    def of(self, rows: Tensor) -> Tensor:
        """[copies, length, ...] view of rows [R, ...]."""
        stop = self.start + (self.copies - 1) * self.distance + self.length
        return rows[self.start : stop].unfold(0, self.length, self.distance).movedim(-1, 1)


@dataclass(frozen=True)
class Selection:
    """Some rows of a tensor, by their ascending numbers in x.flatten(0, 2): as runs where they are, else by an index.

    Neither runs nor an index: all of them, in order.
    """

    count: int
    index: Tensor | None = None
    runs: Runs | None = None

    @classmethod
    def of(cls, numbers: Tensor, total: int) -> Selection:
        """These rows of `total`; numbers ascend."""
        count = len(numbers)
        if count == total:
            return cls(count)
        if not count:
            return cls(0, numbers)
        breaks = torch.nonzero(numbers[1:] != numbers[:-1] + 1).flatten()
        length = int(breaks[0]) + 1 if len(breaks) else count
        starts = numbers[::length]
        distance = int(starts[1] - starts[0]) if len(starts) > 1 else length
        runs = Runs(int(starts[0]), length, distance, len(starts))
        if count == length * len(starts) and torch.equal(runs.numbers().to(numbers.device), numbers):
            return cls(count, None, runs)
        return cls(count, numbers)

    @property
    def everything(self) -> bool:
        return self.index is None and self.runs is None

    def take(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[B, H, n, ...] -> [rows, ...]; into `out`, [1, 1, rows, ...], where it is given."""
        rows, out = x.flatten(0, 2), None if out is None else out.flatten(0, 2)
        if self.index is not None:
            return torch.index_select(rows, 0, self.index, out=out)
        if self.runs is not None:
            view = self.runs.of(rows)
            if out is None:
                return view.flatten(0, 1)
            out.unflatten(0, (self.runs.copies, self.runs.length)).copy_(view)
            return out
        return rows if out is None else out.copy_(rows)

    def add_(self, x: Tensor, values: Tensor) -> None:
        """Adds [rows, ...] to the rows of a contiguous x [B, H, n, ...]."""
        rows = x.view(-1, *x.shape[3:])
        if self.index is not None:
            rows.index_add_(0, self.index, values)
        elif self.runs is not None:
            self.runs.of(rows).add_(values.unflatten(0, (self.runs.copies, self.runs.length)))
        else:
            rows.add_(values)


@dataclass(frozen=True)
class OwnBinding:
    """A rank's tiles with its own keys; `whole`: one tile is the whole of the rank's work, every query once."""

    batches: tuple[BoundBatch, ...]
    whole: bool


@dataclass(frozen=True)
class CollectiveBinding:
    """One exchange: this rank's rows to send, in the order of the ranks that need them, and tiles with what comes."""

    own: OwnBinding
    remote: tuple[BoundBatch, ...]
    used: bool
    send: Selection
    send_counts: list[int]
    receive_counts: list[int]


@dataclass(frozen=True)
class RingStep:
    """What a rank does at one step of a round: tiles, and rows that arrive for them and leave.

    Attributes:
        number: hops between this rank and the one whose rows it holds; 0: its own.
        of: steps of the round.
        source: whose rows these are.
        following, previous: the neighbours that rows go to and come from.
        shape: of the payload, as a [B, heads, rows] tensor or as [1, 1, rows].
        sent: rows of what was held a step before, that go to `following` while these arrive.
        carried: rows of the payload whose gradients arrive from `previous` after its part is done.
        goes_on: rows of the payload whose gradients go to `following`.
        finished: rows of the payload whose gradients go home, to `source`.
        home: rows of this rank whose gradients come home, from `last_user`.
    """

    batches: tuple[BoundBatch, ...]
    number: int
    of: int
    source: int
    following: int
    previous: int
    last_user: int
    shape: tuple[int, int, int]
    sent: Selection
    carried: Selection
    goes_on: Selection
    finished: Selection
    home: Selection

    @property
    def arriving(self) -> int:
        """Rows of the payload; 0 at step 0."""
        return self.shape[0] * self.shape[1] * self.shape[2]


@dataclass(frozen=True)
class RingBinding:
    """The steps of all rounds, in their order; `whole` as in `OwnBinding`."""

    steps: tuple[RingStep, ...]
    whole: BoundBatch | None


class _Payload:
    """Key rows in the order in which they are sent: by batch row, head, row."""

    def __init__(self, rows: KeyRows, problem: Problem, heads: range, device: torch.device) -> None:
        count, local_len = problem.num_kv_heads, problem.layout.local_len
        numbers: dict[int, Tensor] = {}  # of equal sets, once
        row_class = {row: i for i, (_, rows_) in enumerate(problem.row_classes) for row in rows_}
        parts = []
        for batch_row, head in itertools.product(range(len(problem.documents)), heads):
            bits = rows.sets[row_class[batch_row] * count + head]
            if bits:
                if bits not in numbers:
                    numbers[bits] = _bit_numbers(bits)
                parts.append(numbers[bits] + (batch_row * count + head) * local_len)
        #: Ascending numbers in a [B, Hkv, n] tensor of the source.
        self.numbers = torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.int64, device=device)
        self.shape = (1, 1, len(self.numbers))
        #: The first row of every head, where all batch rows and heads have the same run of rows.
        self.first: int | None = None
        if len(numbers) == 1 and len(parts) == len(problem.documents) * len(heads):
            ((bits, run),) = numbers.items()
            if int(run[-1] - run[0]) + 1 == len(run):
                self.first = int(run[0])
                self.shape = (len(problem.documents), len(heads), len(run))

    def places(self, numbers: Tensor) -> Tensor:
        """Where these rows, all of them in the payload, are in it."""
        return torch.searchsorted(self.numbers, numbers)

    def selection(self, chosen: _Payload) -> Selection:
        """Rows of another payload, all of them in this one, as rows of this one."""
        return Selection.of(self.places(chosen.numbers), len(self.numbers))


def _bit_numbers(bits: int) -> Tensor:
    """The numbers of the bits that are set, ascending."""
    octets = torch.frombuffer(bytearray(bits.to_bytes(-(-bits.bit_length() // 8), "little")), dtype=torch.uint8)
    return torch.nonzero((octets[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()).flatten()


class _Binder:
    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem = problem
        self.device = device
        self.batch = len(problem.documents)
        self.group = problem.group
        held = problem.held
        #: Rows a head of this rank's query and key tensors.
        self.query_rows = problem.layout.local_len if held is None else held.num_queries
        self.key_rows = problem.layout.local_len if held is None else held.num_rows

    def own(self, batch: TileBatch, heads: range) -> BoundBatch:
        """Tiles of these heads with keys of this rank."""
        view = self._view(batch, heads, self.problem.num_kv_heads, heads.start, 0)
        if view is not None:
            return view
        if self.problem.held is not None:  # few queries: their rows are written out, once for all layers
            queries = IndexRows(None, 0, batch.num_queries, self._queries(batch).numbers())
            return BoundBatch(
                queries, IndexRows(None, 0, batch.num_keys, self._all_keys(batch, self.key_rows)), batch.causal
            )
        keys = IndexRows(self._first_rows(batch, self.key_rows, "keys"), batch.key_stride, batch.num_keys)
        return BoundBatch(self._queries(batch), keys, batch.causal)

    def whole(self, batches: tuple[BoundBatch, ...]) -> bool:
        """Whether one tile, of views, is all queries with all keys."""
        if len(batches) != 1 or not isinstance(batches[0].queries, ViewRows):
            return False
        rows = batches[0].queries.rows_per_unit, batches[0].keys.rows_per_unit
        per_key_head = self.batch * self.problem.num_kv_heads
        return rows == (per_key_head * self.group * self.query_rows, per_key_head * self.key_rows)

    def in_payload(self, batch: TileBatch, heads: range, payload: _Payload) -> BoundBatch:
        """Tiles of these heads with keys of a payload; key rows are numbered as in its source."""
        if payload.first is not None:
            view = self._view(batch, heads, len(heads), 0, payload.first)
            if view is not None:
                return view
        keys = payload.places(self._all_keys(batch, self.key_rows))
        return BoundBatch(self._queries(batch), IndexRows(None, 0, batch.num_keys, keys), batch.causal)

    def _queries(self, batch: TileBatch) -> IndexRows:
        return IndexRows(self._first_rows(batch, self.query_rows, "queries"), batch.query_stride, batch.num_queries)

    def _view(
        self, batch: TileBatch, heads: range, key_heads: int, first_key_head: int, first_key: int
    ) -> BoundBatch | None:
        """Rows as views, where the tiles take all batch rows and these heads and lie at equal distances.

        The keys are heads `first_key_head` and on of a tensor whose rows begin with row `first_key`.
        """
        items = batch.items
        everything = (tuple(range(self.batch)), tuple(heads))
        if batch.per_query_head or any((item.batch_rows, item.heads) != everything for item in items):
            return None
        if (batch.query_stride != 1 and batch.num_queries > 1) or (batch.key_stride != 1 and batch.num_keys > 1):
            return None
        starts = [
            (item.query_row + copy * item.advance, item.key_row + copy * item.advance)
            for item in items
            for copy in range(item.copies)
        ]
        advance = starts[1][0] - starts[0][0] if len(starts) > 1 else 0
        for (query, key), (next_query, next_key) in itertools.pairwise(starts):
            if next_query - query != advance or next_key - key != advance:
                return None
        if len(starts) > 1 and advance < batch.num_queries:
            return None
        (query, key), copies = starts[0], len(starts)
        first_head, num_heads = heads.start * self.group, len(heads) * self.group
        return BoundBatch(
            ViewRows(self.batch, num_heads, query, batch.num_queries, copies, advance, first_head),
            ViewRows(self.batch, len(heads), key - first_key, batch.num_keys, copies, advance, first_key_head),
            batch.causal,
        )

    def _units(self, batch: TileBatch, item: Item) -> tuple[Tensor, Tensor, Tensor]:
        """(batch row, head, copy) of every tile of an item."""
        tensors = (torch.tensor(item.batch_rows), torch.tensor(item.heads), torch.arange(item.copies))
        grid = torch.meshgrid(*tensors, indexing="ij")
        return grid[0].flatten(), grid[1].flatten(), grid[2].flatten()

    def _first_rows(self, batch: TileBatch, length: int, side: str) -> Tensor:
        """[tiles, heads of a tile] number of the first row in a [B, H, length] tensor of queries or of keys."""
        problem, first = self.problem, []
        for item in batch.items:
            row, head, copy = self._units(batch, item)
            moved = copy * item.advance
            if side == "queries":
                heads = head[:, None] if batch.per_query_head else head[:, None] * self.group + torch.arange(self.group)
                number, count, start = heads, problem.num_heads, item.query_row
            else:
                kv_head = head // self.group if batch.per_query_head else head
                number, count, start = kv_head[:, None], problem.num_kv_heads, item.key_row
            first.append((row[:, None] * count + number) * length + (start + moved)[:, None])
        return torch.cat(first).to(self.device)

    def _all_keys(self, batch: TileBatch, length: int) -> Tensor:
        """[tiles, 1, L] key rows, numbered in a [B, Hkv, length] tensor."""
        first = self._first_rows(batch, length, "keys")
        return first.unsqueeze(-1) + torch.arange(batch.num_keys, device=self.device) * batch.key_stride

    def in_rows(self, batch: TileBatch, numbers: Tensor, places: Tensor) -> BoundBatch:
        """Tiles with keys at `places`, in the order of their ascending `numbers` in a [B, Hkv, padded_len] tensor."""
        keys = places[torch.searchsorted(numbers, self._all_keys(batch, self.problem.layout.padded_len))]
        return BoundBatch(self._queries(batch), IndexRows(None, 0, batch.num_keys, keys), batch.causal)


@lru_cache(maxsize=64)
def bind_own(problem: Problem, rank: int, device: torch.device) -> OwnBinding:
    """The tiles of `rank` with its own keys; cached by value."""
    binder, plan, heads = _Binder(problem, device), plan_rank(problem, rank), range(problem.num_kv_heads)
    batches = tuple(binder.own(batch, heads) for batch in plan.own)
    return OwnBinding(batches, not plan.remote and binder.whole(batches))


@lru_cache(maxsize=64)
def bind_held(problem: Problem, device: torch.device) -> OwnBinding:
    """The tiles of queries with held keys; cached by value, so that the layers of a step share it."""
    binder, heads = _Binder(problem, device), range(problem.num_kv_heads)
    batches = tuple(binder.own(batch, heads) for batch in held_tiles(problem))
    return OwnBinding(batches, binder.whole(batches))


@lru_cache(maxsize=64)
def bind_collective(problem: Problem, rank: int, device: torch.device) -> CollectiveBinding:
    """The plan of `rank` for one exchange of the needed rows; cached by value."""
    binder, layout, heads = _Binder(problem, device), problem.layout, range(problem.num_kv_heads)
    others = [other for other in range(layout.world_size) if other != rank]

    def payload(reader: int, source: int) -> Tensor:
        return _Payload(needed(problem, reader, source), problem, heads, device).numbers

    send = {other: payload(other, rank) for other in others}
    receive = {other: payload(rank, other) for other in others}
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    send_counts, receive_counts = (
        [len(rows.get(other, nothing)) for other in range(layout.world_size)] for rows in (send, receive)
    )
    # What is received lies by source and then by number there; tiles number it as in whole rows.
    whole = []
    for other, numbers in receive.items():
        positions = torch.tensor(layout.positions(other), device=device)
        local = numbers % layout.local_len
        whole.append(numbers // layout.local_len * layout.padded_len + positions[local])
    numbers, places = torch.sort(torch.cat(whole)) if whole else (nothing, nothing)
    return CollectiveBinding(
        own=bind_own(problem, rank, device),
        remote=tuple(binder.in_rows(batch, numbers, places) for batch in plan_rank(problem, rank).remote),
        used=any(needed(problem, a, b) for a in range(layout.world_size) for b in range(layout.world_size)),
        send=Selection(sum(send_counts), torch.cat([nothing, *send.values()])),  # not ascending
        send_counts=send_counts,
        receive_counts=receive_counts,
    )


@lru_cache(maxsize=64)
def bind_ring(problem: Problem, rank: int, device: torch.device) -> RingBinding:
    """The steps of `rank` round the ring; cached by value."""
    own, rounds = bind_own(problem, rank, device), ring_rounds(problem)
    steps = tuple(step for tour in rounds for step in _round_steps(problem, rank, device, tour))
    # A rank that needs nobody's keys may yet have to send its own.
    alone = own.whole and not any(tour.steps for tour in rounds)
    return RingBinding(steps, own.batches[0] if alone else None)


def _round_steps(problem: Problem, rank: int, device: torch.device, tour: Round) -> list[RingStep]:
    binder, p, heads = _Binder(problem, device), problem.layout.world_size, tour.heads

    def payload(rows: KeyRows | None) -> _Payload:
        return _Payload(nothing if rows is None else rows, problem, heads, device)

    def of(hop: Hop | None, name: str) -> _Payload:
        return payload(None if hop is None else getattr(hop, name))

    nothing = KeyRows(problem.num_kv_heads, (), (0,) * (len(problem.row_classes) * problem.num_kv_heads))
    own_rows = len(problem.documents) * problem.num_kv_heads * problem.layout.local_len
    following = (rank + tour.direction) % p
    route = tour.routes[rank]
    steps = []
    held: _Payload | None = None  # own rows, which are numbered as they are
    for number in range(0 if tour.with_own else 1, tour.steps + 1):
        source = tour.source(rank, number)
        here, onward = tour.hop(rank, number), tour.hop(following, number + 1)
        sent = of(tour.hop(following, number) if number else None, "rows")
        home = payload(route[number - 1].finished if 1 <= number <= len(route) else None)
        arrived = of(here, "rows")
        tiles = of_heads(tiles_from(problem, rank, source), heads, binder.group) if here or not number else ()
        batches = tuple(binder.in_payload(b, heads, arrived) if number else binder.own(b, heads) for b in tiles)
        steps.append(
            RingStep(
                batches,
                number,
                tour.steps,
                source,
                following,
                (rank - tour.direction) % p,
                (rank + number * tour.direction) % p,
                arrived.shape,
                Selection.of(sent.numbers, own_rows) if held is None else held.selection(sent),
                arrived.selection(of(here, "carried")),
                arrived.selection(of(onward if number else None, "carried")),
                arrived.selection(of(here, "finished")),
                Selection.of(home.numbers, own_rows),
            )
        )
        held = arrived if number else None
    return steps
