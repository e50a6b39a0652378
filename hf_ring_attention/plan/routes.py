"""Which key rows each rank needs from the others, and the hops of the ring, as integers.

A set of rows is an integer whose bit i stands for row i, so that unions and differences of any strides are one
operation each. Needs are exact, since they come from the tiles: a rank needs a row if and only if one of its tiles has it.

A window of 6 tokens over 16 tokens on 4 ranks, each with 4 tokens (its rows 0 to 3):

    rank 0        rank 1        rank 2        rank 3
    0 1 2 3       4 5 6 7       8 9 10 11     12 13 14 15
          |--->   needs all     needs the     needs none
                  4 of them     last one      of rank 0

So the rows of rank 0 make two hops. The first takes 0b1111 to rank 1, the last user of 0b0111: in backward it sends the
gradients of these three rows home. The second takes 0b1000 on to rank 2. Rank 1 has begun the gradient of this row (it is
`carried`), so in backward the gradient goes along, and rank 2 sends it home. No rank needs the rows of rank 3: they make no
hop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import and_, mul, or_
from typing import NamedTuple

from .layouts import SequenceLayout
from .plans import remote_tiles
from .problem import Problem


@dataclass(frozen=True)
class KeyRows:
    """Rows of key/value heads."""

    num_kv_heads: int
    weights: tuple[int, ...]  # the number of batch rows that each set stands for
    sets: tuple[int, ...]  # the rows of each class of batch rows and each head in it, as bits of an integer

    def __len__(self) -> int:
        """Returns the number of rows over all batch rows and heads."""
        return self._length

    @cached_property
    def _length(self) -> int:
        return sum(map(mul, self.weights, map(int.bit_count, self.sets)))

    def __bool__(self) -> bool:
        return any(self.sets)

    def _with(self, sets: Iterable[int]) -> KeyRows:
        return KeyRows(self.num_kv_heads, self.weights, tuple(sets))

    def __or__(self, other: KeyRows) -> KeyRows:
        return self._with(map(or_, self.sets, other.sets))

    def __and__(self, other: KeyRows) -> KeyRows:
        return self._with(map(and_, self.sets, other.sets))

    def __sub__(self, other: KeyRows) -> KeyRows:
        return self._with(a & ~b for a, b in zip(self.sets, other.sets))

    def run(self, heads: range) -> range | None:
        """Returns the rows of these heads if they are one run, the same in every batch row and head; else None."""
        count = self.num_kv_heads
        sets = {rows for i, rows in enumerate(self.sets) if i % count in heads}
        if len(sets) != 1 or not any(sets):
            return None
        (bits,) = sets
        start, stop = (bits & -bits).bit_length() - 1, bits.bit_length()
        return range(start, stop) if bits.bit_count() == stop - start else None

    def of_heads(self, heads: range) -> KeyRows:
        """Returns the rows of these heads."""
        if len(heads) == self.num_kv_heads:
            return self
        before, behind = (0,) * heads.start, (0,) * (self.num_kv_heads - heads.stop)
        of_classes = (self.sets[i:][heads.start : heads.stop] for i in range(0, len(self.sets), self.num_kv_heads))
        return self._with(itertools.chain.from_iterable(before + sets + behind for sets in of_classes))


class Hop(NamedTuple):
    """The rows that go from one rank to the next."""

    rows: KeyRows  # keys and values that the next rank or a later one needs
    carried: KeyRows  # rows that a rank before this hop has used: in backward, their gradients go along
    finished: KeyRows  # rows that the next rank is the last to use: in backward, it sends their gradients home


@dataclass(frozen=True)
class Lap:
    """One way round the ring, in one direction, for the rows of some key/value heads."""

    heads: range
    direction: int  # 1 if rank i sends to rank i + 1, -1 if it sends to rank i - 1
    with_own: bool  # whether ranks compute with their local keys of these heads in this lap
    routes: tuple[tuple[Hop, ...], ...]  # for each source rank the hops of its rows, up to the last rank that needs one

    def of_heads(self, heads: range) -> Lap:
        """Returns the lap with only the rows of these heads."""
        hops = ((Hop(*(rows.of_heads(heads) for rows in hop)) for hop in route) for route in self.routes)
        return Lap(heads, self.direction, self.with_own, tuple(tuple(h for h in route if h.rows) for route in hops))

    @property
    def steps(self) -> int:
        """The number of hops of the longest route."""
        return max(map(len, self.routes))

    def source(self, rank: int, step: int) -> int:
        """Returns the rank whose rows `rank` holds at a step; `rank` itself at step 0."""
        return (rank - step * self.direction) % len(self.routes)

    def hop(self, rank: int, step: int) -> Hop | None:
        """Returns the hop that arrives at `rank` for a step; else None."""
        route = self.routes[self.source(rank, step)]
        return route[step - 1] if 1 <= step <= len(route) else None


@lru_cache(maxsize=1024)
def _comb(stride: int, count: int) -> int:
    """Returns `count` rows, `stride` apart, from row 0 on."""
    rows, done = 1, 1
    while done < count:
        more = min(done, count - done)
        rows |= rows << more * stride
        done += more
    return rows


@lru_cache(maxsize=64)
def _needs(problem: Problem, rank: int) -> tuple[KeyRows, ...]:
    """Returns the rows of each source, by local index, that `rank` needs."""
    number = {rows: i for i, (_, rows) in enumerate(problem.row_classes)}
    sets = [0] * (len(number) * problem.num_kv_heads)
    for batch in remote_tiles(problem, rank):
        for item in batch.items:
            lowest = item.key_row + min(0, (batch.num_keys - 1) * batch.key_stride)
            rows = _comb(abs(batch.key_stride), batch.num_keys) << lowest
            first = number[item.batch_rows] * problem.num_kv_heads
            for head in item.heads:
                sets[first + head] |= rows
    known: dict[tuple[int, int], list[int]] = {}  # Heads often need the same.
    by_source = []
    for i, rows in enumerate(sets):
        _, batch_rows = problem.row_classes[i // problem.num_kv_heads]
        if (batch_rows[0], rows) not in known:
            known[batch_rows[0], rows] = _by_source(problem.layout, batch_rows[0], rows)
        by_source.append(known[batch_rows[0], rows])
    weights = tuple(len(rows) for _, rows in problem.row_classes for _ in range(problem.num_kv_heads))
    return tuple(
        KeyRows(problem.num_kv_heads, weights, tuple(rows[source] for rows in by_source))
        for source in range(problem.layout.world_size)
    )


def _by_source(layout: SequenceLayout, batch_row: int, rows: int) -> list[int]:
    """Returns the part of these rows of the whole sequence that each rank holds, by local index."""
    if not rows:
        return [0] * layout.world_size
    octets = rows.to_bytes(-(-rows.bit_length() // 8), "little")

    def local(piece: range) -> int:
        # Shifting the whole integer for each piece would copy it each time.
        octets_of_piece = octets[piece.start // 8 : -(-piece.stop // 8)]
        return int.from_bytes(octets_of_piece, "little") >> piece.start % 8 & (1 << len(piece)) - 1

    sources = (layout.placed_pieces(source, batch_row) for source in range(layout.world_size))
    return [sum(local(piece) << place for place, piece in pieces) for pieces in sources]


def needed(problem: Problem, rank: int, source: int) -> KeyRows:
    """Returns the rows of `source`, by local index, that `rank` needs."""
    return _needs(problem, rank)[source]


def _route(needs: list[KeyRows]) -> tuple[Hop, ...]:
    """Returns the hops that take rows to readers 1, 2, ... steps away."""
    hops: list[Hop] = []
    nothing = needs[0] - needs[0]
    before = list(itertools.accumulate(needs[:-1], or_, initial=nothing))  # for each reader, the needs of earlier ones
    later = nothing
    for used, earlier in zip(reversed(needs), reversed(before)):
        rows = used | later
        if rows:
            hops.append(Hop(rows, rows & earlier, used - later))
        later = rows
    return tuple(reversed(hops))


def _lap(problem: Problem, direction: int, reach: int, with_own: bool) -> Lap:
    """Returns the lap of all heads in one direction round the ring, up to the rank `reach` steps away."""
    p = problem.layout.world_size
    readers = range(direction, (reach + 1) * direction, direction)
    routes = [
        _route([needed(problem, (source + step) % p, source) for step in readers]) if readers else ()
        for source in range(p)
    ]
    return Lap(range(problem.num_kv_heads), direction, with_own, tuple(routes))


def _hop_rows(laps: Sequence[Lap]) -> list[int]:
    """Returns the number of rows of each hop."""
    return [len(hop.rows) for lap in laps for route in lap.routes for hop in route]


@lru_cache(maxsize=8)
def ring_laps(problem: Problem) -> tuple[Lap, ...]:
    """Returns the laps of a call in their order; they are the same on all ranks.

    Rows that are near their readers both ways (windows that look ahead, or pieces in zigzag) go both ways. Payloads
    that are large beside the queries go head group by head group: buffers are smaller by the number of groups, and the
    gradients of a group travel home while the next group is computed.
    """
    layout, settings = problem.layout, problem.settings
    p, heads = layout.world_size, range(problem.num_kv_heads)
    if p == 1:
        return (Lap(heads, 1, True, ((),)),)
    laps = [_lap(problem, 1, p - 1, True)]
    if p > 2:
        both = [_lap(problem, 1, p // 2, True), _lap(problem, -1, (p - 1) // 2, False)]
        if sum(_hop_rows(both)) <= settings.both_ways_below * sum(_hop_rows(laps)):
            laps = both
    query_rows = problem.num_heads * layout.local_len * len(problem.documents)
    payload = max(_hop_rows(laps), default=0)
    groups = max(1, min(settings.head_groups, len(heads), query_rows // settings.rows_of_a_head_group))
    if groups > 1 and settings.large_payload * payload >= query_rows:
        borders = [len(heads) * i // groups for i in range(groups + 1)]
        laps = [lap.of_heads(range(first, last)) for first, last in itertools.pairwise(borders) for lap in laps]
    return tuple(lap for lap in laps if lap.with_own or lap.steps)
