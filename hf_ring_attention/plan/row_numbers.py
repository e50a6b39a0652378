"""The bytes of the row numbers that a rank keeps on its device for a call, from integers alone.

Tiles and messages that are views of a tensor need no numbers: tiles of all batch rows and heads at equal distances, and
messages of one run of rows of every head. All others keep 8 bytes for each row number. Tiles of one shape keep the first row
of their queries, and of the rank's own keys; tiles that share a call keep all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .heads import pieces_of, place_of, problem_of_heads
from .joins import Joining, joined
from .plans import TileBatch, of_heads, plan_rank, tiles_from
from .problem import Problem
from .routes import KeyRows, Lap, needed, ring_laps

_NUMBER = 8  # bytes


def collective_numbers(problem: Problem, rank: int, joining: Joining | None) -> int:
    """Returns the most bytes of row numbers that the collective transport keeps for `rank`."""
    plan, heads, ranks = plan_rank(problem, rank), range(problem.num_kv_heads), range(problem.layout.world_size)
    sent = sum(len(needed(problem, reader, rank)) for reader in ranks if reader != rank)
    own = _of_tiles(problem, plan.own, heads, joining, views=True)
    return _NUMBER * (sent + own + _of_tiles(problem, plan.remote, heads, joining, views=False))


def ring_numbers(problem: Problem, rank: int, joining: Joining | None) -> int:
    """Returns the most bytes of row numbers that the ring transport keeps for `rank`."""
    return _NUMBER * sum(_of_lap(problem, rank, lap, joining) for lap in ring_laps(problem))


def heads_numbers(problem: Problem, rank: int, joining: Joining | None) -> int:
    """Returns the most bytes of row numbers that the heads transport keeps for `rank`."""
    group, member = place_of(problem, rank)
    pieces = pieces_of(problem, member)
    return sum(ring_numbers(problem_of_heads(problem, heads), group, joining) for heads in pieces)


def _of_lap(problem: Problem, rank: int, lap: Lap, joining: Joining | None) -> int:
    # Several heads, but not all, of several batch rows do not lie at equal distances.
    own_views = len(lap.heads) in (1, problem.num_kv_heads) or len(problem.documents) == 1
    following = (rank + lap.direction) % problem.layout.world_size
    route, numbers = lap.routes[rank], 0
    held_views = own_views  # whether rows of what the rank holds can be views
    for number in range(0 if lap.with_own else 1, lap.steps + 1):
        here, onward = lap.hop(rank, number), lap.hop(following, number + 1)
        sent = lap.hop(following, number) if number else None
        arriving_views = here is not None and here.rows.run(lap.heads) is not None
        if here or not number:
            batches = of_heads(tiles_from(problem, rank, lap.source(rank, number)), lap.heads, problem.group)
            views = number == 0 or arriving_views
            numbers += _of_tiles(problem, batches, lap.heads, joining, views=views, own=number == 0)
        home = [route[number - 1].finished] if 1 <= number <= len(route) else []
        numbers += _of_messages(lap.heads, home, own_views)
        numbers += _of_messages(lap.heads, [sent.rows] if sent else [], held_views)
        if here:
            parts = [here.carried, here.finished, *([onward.carried] if onward else [])]
            numbers += _of_messages(lap.heads, parts, arriving_views)
        held_views = arriving_views if number else own_views
    return numbers


def _of_tiles(
    problem: Problem,
    batches: Sequence[TileBatch],
    heads: range,
    joining: Joining | None,
    views: bool,
    own: bool = True,
) -> int:
    """Returns how many numbers tiles keep: rows of queries and keys, and lengths of tiles that share a call."""

    def is_view(batch: TileBatch) -> bool:
        return views and batch.as_one(len(problem.documents), heads) is not None

    numbers = 0
    for call in joined(batches, problem.group, joining, is_view):
        longest = call[0]
        if len(call) > 1:
            padded = [batch.like(longest) for batch in call] if joining and joining.kind == "padded" else call
            lengths = sum(batch.num_tiles * (1 + batch.num_queries * batch.fold_size) for batch in call)
            numbers += sum(batch.rows(problem.group) for batch in padded) + 1 + lengths
        elif not is_view(longest):
            queries = 1 if longest.per_query_head else problem.group
            numbers += longest.num_tiles * (queries + (1 if own and views else longest.num_keys))
    return numbers


def _of_messages(heads: range, messages: Iterable[KeyRows], views: bool) -> int:
    return sum(len(rows) for rows in messages if not views or (rows and rows.run(heads) is None))
