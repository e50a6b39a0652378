"""What each transport moves and holds: bytes and buffers of a call, from integers alone."""

from __future__ import annotations

from typing import NamedTuple

from .problem import Problem
from .routes import needed, ring_laps


class RowBytes(NamedTuple):
    """What a row weighs: a key and a value in bytes, and their gradients."""

    row_bytes: int
    grad_bytes: int


class Bytes(NamedTuple):
    """What a rank moves."""

    sent: int
    received: int


class RankTraffic(NamedTuple):
    """Bytes that a rank moves in one call.

    Attributes:
        buffers: keys, values and gradients of other ranks, and copies on their way, held at once in backward at most.
    """

    forward: Bytes
    backward: Bytes
    buffers: int


def ring_traffic(problem: Problem, rank: int, sizes: RowBytes) -> RankTraffic:
    """What the ring transport moves for `rank`.

    Buffers are all as large as the largest message: for keys and values two, and one more where rows are left behind on
    the way or travel both ways; for gradients three: those of the payload at hand, and those that leave and arrive meanwhile.
    """
    rows, grads = [0, 0], [0, 0]
    largest, largest_grads, left_behind = 0, 0, False
    for lap in ring_laps(problem):
        for step in range(lap.steps + 1):
            held, coming = lap.hop(rank, step), lap.hop(rank, step + 1)
            going = lap.hop((rank + lap.direction) % len(lap.routes), step + 1)
            route = lap.routes[rank]
            home = len(route[step - 1].finished) if 1 <= step <= len(route) else 0
            carried = len(coming.carried) if coming else 0
            sent, received, here = (len(hop.rows) if hop else 0 for hop in (going, coming, held))
            rows[0] += sent
            rows[1] += received
            grads[0] += (len(going.carried) if going else 0) + (len(held.finished) if held else 0)
            grads[1] += carried + home
            largest, largest_grads = max(largest, sent, received), max(largest_grads, here, carried + home)
            # A message of its own beside the payload at hand, which in a second round is the first one's last.
            left_behind |= 0 < sent < here or (step == 0 and sent > 0 and not lap.with_own)
    forward, gradients = ([count * size for count in counts] for counts, size in zip((rows, grads), sizes))
    return RankTraffic(
        Bytes(*forward),
        Bytes(forward[0] + gradients[0], forward[1] + gradients[1]),
        largest * (2 + left_behind) * sizes.row_bytes + 3 * largest_grads * sizes.grad_bytes,
    )


def exchanged(problem: Problem) -> list[list[int]]:
    """[rank][source] rows that the collective transport takes from `source` to `rank`."""
    ranks = range(problem.layout.world_size)
    return [[len(needed(problem, rank, source)) if rank != source else 0 for source in ranks] for rank in ranks]


def collective_traffic(problem: Problem, rank: int, sizes: RowBytes) -> RankTraffic:
    """What the collective transport moves for `rank`."""
    rows = exchanged(problem)
    received, sent = sum(rows[rank]), sum(row[rank] for row in rows)
    both = sizes.row_bytes + sizes.grad_bytes
    return RankTraffic(
        Bytes(sent * sizes.row_bytes, received * sizes.row_bytes),
        Bytes(
            sent * sizes.row_bytes + received * sizes.grad_bytes, received * sizes.row_bytes + sent * sizes.grad_bytes
        ),
        max((sent + received) * sizes.row_bytes, received * both + sent * sizes.grad_bytes),
    )
