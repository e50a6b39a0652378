"""The bytes that each transport moves in a call, and its buffers, as integers."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from .problem import Problem
from .routes import needed, ring_laps

TransportKind = Literal["auto", "ring", "collective", "heads", "local"]


class RowBytes(NamedTuple):
    """The bytes of a row: of a key and a value together, and of their gradients."""

    row_bytes: int
    grad_bytes: int


class Bytes(NamedTuple):
    """The bytes that a rank sends and receives."""

    sent: int
    received: int


def short_bytes(size: float) -> str:
    """Returns bytes in the unit that suits them."""
    power = min(4, max(0, int(size).bit_length() - 1) // 10)
    return f"{size / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


class RankTraffic(NamedTuple):
    """The bytes that a rank moves and holds in one call."""

    forward: Bytes
    backward: Bytes
    buffers: int  # the most that keys, values and gradients of other ranks, and copies on their way, take at once


def ring_traffic(problem: Problem, rank: int, sizes: RowBytes) -> RankTraffic:
    """Returns the bytes that the ring transport moves and holds for `rank`.

    Each buffer has the size of the largest message. Keys and values take two, and one more if rows are left behind on
    the way or travel both ways. Gradients take three: of the payload at hand, leaving, and arriving.
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
            # The message to send is then a third buffer. When a second lap starts, the first lap's last payload is still held.
            left_behind |= 0 < sent < here or (step == 0 and sent > 0 and not lap.with_own)
    forward, gradients = ([count * size for count in counts] for counts, size in zip((rows, grads), sizes))
    return RankTraffic(
        forward=Bytes(*forward),
        backward=Bytes(forward[0] + gradients[0], forward[1] + gradients[1]),
        buffers=largest * (2 + left_behind) * sizes.row_bytes + 3 * largest_grads * sizes.grad_bytes,
    )


@lru_cache(maxsize=64)
def exchanged(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Returns, as [rank][source], the number of rows that the collective transport takes from `source` to `rank`."""
    ranks = range(problem.layout.world_size)
    return tuple(tuple(len(needed(problem, rank, source)) for source in ranks) for rank in ranks)


def collective_traffic(problem: Problem, rank: int, sizes: RowBytes) -> RankTraffic:
    """Returns the bytes that the collective transport moves and holds for `rank`."""
    rows = exchanged(problem)
    received, sent = sum(rows[rank]), sum(row[rank] for row in rows)
    both = sizes.row_bytes + sizes.grad_bytes
    return RankTraffic(
        forward=Bytes(sent * sizes.row_bytes, received * sizes.row_bytes),
        backward=Bytes(
            sent * sizes.row_bytes + received * sizes.grad_bytes, received * sizes.row_bytes + sent * sizes.grad_bytes
        ),
        buffers=max((sent + received) * sizes.row_bytes, received * both + sent * sizes.grad_bytes),
    )
