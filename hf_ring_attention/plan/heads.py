"""The heads transport in integers: each rank computes some heads of the whole sequence (Ulysses, arXiv 2309.14509).

Of h ranks that exchange heads, the i-th has the i-th of h equal parts of the query heads, and the key/value heads that these
share. With fewer key/value heads than ranks, several ranks have the same key/value head, each with its part of the query heads
that share it.

With p > h ranks, h neighbours form a group that exchanges heads: the group holds the tokens of its ranks. The p / h ranks that
have the same heads, one in each group, form a ring (USP, arXiv 2405.07719). h neighbours together hold one contiguous piece of
a contiguous layout, or both pieces of one of p / h ranks of a zigzag: so the ring has a layout of the same kind.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from .layouts import SequenceLayout, merged_pieces
from .plans import plan_rank
from .problem import Problem
from .traffic import Bytes, RankTraffic, RowBytes, ring_traffic

#: A rank's heads are exchanged in at most this many pieces: a piece travels while the one before is computed.
MOST_PIECES = 4


class Heads(NamedTuple):
    """Query heads, and the key/value heads that they share."""

    query: range
    kv: range


class Place(NamedTuple):
    """A rank's place: the number of its group, which exchanges heads, and its number there."""

    group: int
    member: int


def heads_fit(num_heads: int, num_kv_heads: int, world_size: int) -> bool:
    """Returns whether each rank can have as many heads as the others."""
    return not num_heads % world_size and 0 in (num_kv_heads % world_size, world_size % num_kv_heads)


def check_heads(num_heads: int, num_kv_heads: int, world_size: int) -> None:
    """Refuses numbers of heads that do not divide among the ranks."""
    if num_heads % world_size:
        raise ValueError(
            f"transport='heads' needs equal query heads on {world_size} ranks, got {num_heads} / {world_size} = "
            f"{num_heads / world_size:.2f}: use a number of ranks that divides {num_heads}, or transport='ring'"
        )
    if not heads_fit(num_heads, num_kv_heads, world_size):
        raise ValueError(
            f"transport='heads': {num_kv_heads} key/value heads and {world_size} ranks divide neither way: use another number "
            f"of ranks, or transport='ring'"
        )


def group_size(problem: Problem) -> int:
    """Returns how many ranks exchange heads with each other."""
    return problem.settings.heads or problem.layout.world_size


def place_of(problem: Problem, rank: int) -> Place:
    """Returns the place of a rank."""
    return Place(*divmod(rank, group_size(problem)))


def pieces_of(problem: Problem, member: int) -> tuple[Heads, ...]:
    """Returns the heads of a member of each group, in pieces; the pieces of all members have equal sizes."""
    size = group_size(problem)
    share, kv_share = problem.num_heads // size, max(1, problem.num_kv_heads // size)
    first, first_kv = member * share, member * problem.num_kv_heads // size
    if problem.num_kv_heads <= size:
        return (Heads(range(first, first + share), range(first_kv, first_kv + 1)),)
    rows = share * problem.layout.local_len * size * len(problem.documents)
    count = max(1, min(kv_share, MOST_PIECES, rows // problem.settings.rows_of_a_head_group))
    cuts = [number * kv_share // count for number in range(count + 1)]
    group = problem.group
    return tuple(
        Heads(range(first + low * group, first + high * group), range(first_kv + low, first_kv + high))
        for low, high in itertools.pairwise(cuts)
    )


@lru_cache(maxsize=256)
def layout_of_groups(problem: Problem) -> SequenceLayout:
    """Returns the division of rows, with their padding, among the groups."""
    layout, size = problem.layout, group_size(problem)
    groups = layout.world_size // size
    if groups == 1:
        return SequenceLayout("contiguous", layout.padded_len, 1)
    rows = tuple(
        tuple(merged_pieces(itertools.chain(*row[group * size : (group + 1) * size])) for group in range(groups))
        for row in layout.rows
    )
    return SequenceLayout(layout.kind, layout.padded_len, groups, rows)


def problem_of_heads(problem: Problem, heads: Heads) -> Problem:
    """Returns the problem of the ring of the ranks that have these heads, one in each group."""
    return replace(
        problem,
        layout=layout_of_groups(problem),
        num_heads=len(heads.query),
        num_kv_heads=len(heads.kv),
        settings=replace(problem.settings, heads=None),
        first_kv_head=problem.first_kv_head + heads.kv.start,
    )


def rows_of_member(problem: Problem, place: Place, batch_row: int = 0) -> tuple[range, ...]:
    """Returns the runs of a member's tokens among the rows of its group, in its order."""
    of_group = layout_of_groups(problem).placed_pieces(place.group, batch_row)
    runs = []
    for run in problem.layout.pieces(place.group * group_size(problem) + place.member, batch_row):
        row, piece = next((row, piece) for row, piece in of_group if run.start in piece)
        runs.append(range(row + run.start - piece.start, row + run.stop - piece.start))
    return tuple(runs)


def heads_pairs(problem: Problem, rank: int) -> int:
    """Returns the query-key pairs that `rank` computes, over all batch rows and query heads."""
    group, member = place_of(problem, rank)
    return sum(plan_rank(problem_of_heads(problem, heads), group).pairs for heads in pieces_of(problem, member))


def heads_traffic(problem: Problem, rank: int, sizes: RowBytes) -> RankTraffic:
    """Returns the bytes that the heads transport moves and holds for `rank`, with the rings between groups.

    A query row and its output row together have the bytes of a key row and a value row; gradients have the dtype of the rows.
    At most two exchanges are under way at once, the next piece's and the last piece's, each with sent and arriving rows.
    """
    (group, member), size = place_of(problem, rank), group_size(problem)
    pieces = pieces_of(problem, member)
    tokens = len(problem.documents) * problem.layout.local_len * (size - 1)
    heads = sum(len(piece.query) + len(piece.kv) for piece in pieces)
    largest = max(len(piece.query) + len(piece.kv) for piece in pieces)
    moved, buffers = tokens * heads * sizes.row_bytes, 2 * tokens * largest * sizes.row_bytes
    rings = [ring_traffic(problem_of_heads(problem, piece), group, sizes) for piece in pieces]
    return RankTraffic(
        forward=Bytes(*(moved + sum(counts) for counts in zip(*(ring.forward for ring in rings)))),
        backward=Bytes(*(moved + sum(counts) for counts in zip(*(ring.backward for ring in rings)))),
        buffers=buffers + max(ring.buffers for ring in rings),
    )
