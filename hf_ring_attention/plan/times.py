"""About how long a call takes, by its plan and two measured speeds: why one layout or transport is faster than another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from .heads import heads_traffic, pieces_of, place_of, problem_of_heads
from .plans import TileBatch, plan_rank
from .problem import Problem
from .tiles import pairs_of_tile
from .traffic import RowBytes, collective_traffic, ring_traffic

#: The keys that a kernel takes at once. A query on the diagonal of a tile waits for all keys of its last block, though it sees
#: only some of them: torch's CPU kernel has blocks of 512 keys, and documents of fewer take twice the time of their pairs.
KEYS_AT_ONCE = {"cpu": 512, "cuda": 128}

#: Kernels without windows take a band in stretches of so many queries, each with all keys that one of them sees.
_STRETCH = 128


class Speeds(NamedTuple):
    """What was measured on the devices and links that a call runs on.

    Attributes:
        seconds_of_pair: of a query, a key and a head, forward and backward, where sequences are long.
        seconds_of_byte: of a byte that is exchanged while nothing is computed.
        keys_at_once: those of the kernel (`KEYS_AT_ONCE`).
        alone: the time of a rank that computes while all others wait, over its time while all compute: below 1 where ranks
            share something, as the cores of one processor do.
    """

    seconds_of_pair: float
    seconds_of_byte: float
    keys_at_once: int
    alone: float = 1.0


def computed_pairs(batches: Iterable[TileBatch], group: int, keys_at_once: int) -> float:
    """Returns the query-key pairs that kernels compute for tiles: those that queries see, and the rest of their blocks of keys.

    Args:
        group: the number of query heads that share a key/value head.
    """
    pairs = 0.0
    for batch in batches:
        queries = batch.num_queries
        beside = {"full": 0, "causal": min(queries, keys_at_once) / 2, "band": _STRETCH - 1}[batch.shape]
        tile = pairs_of_tile(batch.shape, queries, batch.num_keys) + queries * beside
        pairs += tile * batch.fold_size * batch.num_tiles * (1 if batch.per_query_head else group)
    return pairs


def expected_seconds(problem: Problem, transport: str, sizes: RowBytes, speeds: Speeds) -> float:
    """Returns about how long forward and backward take the busiest rank, where no exchange hides behind the computation.

    The fewer ranks still compute, the nearer their speed is taken to be to that of a rank alone.
    """
    world_size = problem.layout.world_size
    ends = sorted(_seconds_of_rank(problem, rank, transport, sizes, speeds) for rank in range(world_size))
    seconds = ends[0]
    for done, (before, end) in enumerate(itertools.pairwise(ends), 1):
        waiting = done / (world_size - 1)
        seconds += (end - before) * (1 + waiting * (speeds.alone - 1))
    return seconds


def _seconds_of_rank(problem: Problem, rank: int, transport: str, sizes: RowBytes, speeds: Speeds) -> float:
    plans = [plan_rank(problem, rank)]
    if transport == "heads":
        group, member = place_of(problem, rank)
        plans = [plan_rank(problem_of_heads(problem, heads), group) for heads in pieces_of(problem, member)]
    pairs = sum(computed_pairs(plan.own + plan.remote, problem.group, speeds.keys_at_once) for plan in plans)
    moved = {"ring": ring_traffic, "collective": collective_traffic, "heads": heads_traffic}[transport]
    traffic = moved(problem, rank, sizes)
    received = traffic.forward.received + traffic.backward.received
    return pairs * speeds.seconds_of_pair + received * speeds.seconds_of_byte
