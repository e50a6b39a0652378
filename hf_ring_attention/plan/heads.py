"""The heads transport in integers: each rank computes some heads of the whole sequence (Ulysses, arXiv 2309.14509).

Rank i of p has the i-th of p equal parts of the query heads, and the key/value heads that these share. Where there are fewer
key/value heads than ranks, several ranks have the same one, each with its part of the query heads that share it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

from .layouts import SequenceLayout
from .plans import plan_rank
from .problem import Problem
from .traffic import Bytes, RankTraffic, RowBytes

#: A rank's heads are exchanged in at most so many pieces, one of which travels while another is computed.
MOST_PIECES = 4


class Heads(NamedTuple):
    """Query heads, and the key/value heads that they share."""

    query: range
    kv: range


def heads_fit(num_heads: int, num_kv_heads: int, world_size: int) -> bool:
    """Returns whether each rank can have as many heads as the others."""
    return not num_heads % world_size and 0 in (num_kv_heads % world_size, world_size % num_kv_heads)


def check_heads(num_heads: int, num_kv_heads: int, world_size: int) -> None:
    """Refuses numbers of heads that do not divide among the ranks.

    Raises:
        ValueError: the message has the arithmetic.
    """
    if num_heads % world_size:
        raise ValueError(
            f"transport='heads' gives each of {world_size} ranks as many query heads, and {num_heads} / {world_size} = "
            f"{num_heads / world_size:.2f}: use a number of ranks that divides {num_heads}, or transport='ring'"
        )
    if not heads_fit(num_heads, num_kv_heads, world_size):
        raise ValueError(
            f"transport='heads' gives each of {world_size} ranks as many key/value heads, or several ranks one: "
            f"{num_kv_heads} of them and {world_size} ranks divide neither way: use another number of ranks, or "
            f"transport='ring'"
        )


def pieces_of(problem: Problem, rank: int) -> tuple[Heads, ...]:
    """Returns the heads of a rank in pieces; those of all ranks are as large as each other."""
    p = problem.layout.world_size
    check_heads(problem.num_heads, problem.num_kv_heads, p)
    share, kv_share = problem.num_heads // p, max(1, problem.num_kv_heads // p)
    first, first_kv = rank * share, rank * problem.num_kv_heads // p
    if problem.num_kv_heads <= p:
        return (Heads(range(first, first + share), range(first_kv, first_kv + 1)),)
    rows = share * problem.layout.padded_len * len(problem.documents)
    count = max(1, min(kv_share, MOST_PIECES, rows // problem.settings.rows_of_a_head_group))
    cuts = [number * kv_share // count for number in range(count + 1)]
    group = problem.group
    return tuple(
        Heads(range(first + low * group, first + high * group), range(first_kv + low, first_kv + high))
        for low, high in itertools.pairwise(cuts)
    )


def problem_of_heads(problem: Problem, heads: Heads) -> Problem:
    """Returns the problem of one rank that has these heads of the whole sequence, with its padding."""
    return replace(
        problem,
        layout=SequenceLayout("contiguous", problem.layout.padded_len, 1),
        num_heads=len(heads.query),
        num_kv_heads=len(heads.kv),
        first_head=heads.query.start,
        first_kv_head=heads.kv.start,
    )


def heads_pairs(problem: Problem, rank: int) -> int:
    """Returns the query-key pairs that `rank` computes, over all batch rows and query heads."""
    return sum(plan_rank(problem_of_heads(problem, heads), 0).pairs for heads in pieces_of(problem, rank))


def heads_traffic(problem: Problem, rank: int, sizes: RowBytes) -> RankTraffic:
    """Returns what the heads transport moves and holds for `rank`.

    A row of a query and of its output are as many bytes as one of a key and a value, and so are those of their gradients,
    which travel in the dtype of the rows. Two exchanges are under way at once at most: that of the next piece's queries,
    keys and values, and that of the last piece's outputs; each holds what is sent and what arrives.
    """
    layout, pieces = problem.layout, pieces_of(problem, rank)
    tokens = len(problem.documents) * layout.local_len * (layout.world_size - 1)
    heads = sum(len(piece.query) + len(piece.kv) for piece in pieces)
    largest = max(len(piece.query) + len(piece.kv) for piece in pieces)
    moved = Bytes(*(2 * [tokens * heads * sizes.row_bytes]))
    return RankTraffic(forward=moved, backward=moved, buffers=2 * tokens * largest * sizes.row_bytes)
