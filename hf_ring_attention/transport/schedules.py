"""The rows that a rank sends, receives and computes with at each step: plans bound to tensors, made once per problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..compute.binding import Binder, BoundBatch, OwnBinding, bind_own
from ..compute.rows import IndexRows
from ..plan.joins import Joining
from ..plan.plans import TileBatch, of_heads, plan_rank, tiles_from
from ..plan.problem import Problem
from ..plan.routes import Hop, KeyRows, Lap, needed, ring_laps
from .row_sets import Payload, RowSet


@dataclass(frozen=True, kw_only=True)
class CollectiveBinding:
    """The work of a rank around one exchange of rows: tiles with its own keys, and tiles with the keys that arrive."""

    own: OwnBinding
    remote: tuple[BoundBatch, ...]
    used: bool  # whether any rank needs rows of another
    send: RowSet  # this rank's rows to send, in the order of the ranks that need them
    send_counts: list[int]  # the number of rows to each rank
    receive_counts: list[int]  # the number of rows from each rank


@dataclass(frozen=True, kw_only=True)
class RingStep:
    """One step of a rank in a lap: its tiles, and the rows that arrive for them and leave."""

    batches: tuple[BoundBatch, ...]
    number: int  # hops between this rank and the owner of the rows that it holds; 0 for its own rows
    of: int  # steps of the lap
    source: int  # the owner of the rows
    following: int  # the neighbour that rows go to
    previous: int  # the neighbour that rows come from
    last_user: int  # the rank that holds this rank's rows at this step, and is the last to use the rows in `home`
    shape: tuple[int, int, int]  # of the payload's rows: [B, heads, rows] or [1, 1, rows]
    sent: RowSet  # rows of the step before that go to `following` while this step's payload arrives
    carried: RowSet  # rows of the payload whose gradients arrive from `previous` after its part is done
    goes_on: RowSet  # rows of the payload whose gradients go to `following`
    finished: RowSet  # rows of the payload whose gradients go home, to `source`
    home: RowSet  # rows of this rank whose gradients come home, from `last_user`

    @property
    def arriving(self) -> int:
        """The number of rows of the payload; 0 at step 0."""
        return self.shape[0] * self.shape[1] * self.shape[2]


@dataclass(frozen=True)
class RingBinding:
    """The steps of all laps, in their order; `whole` is the tile that is all work of the rank, if there is such a tile."""

    steps: tuple[RingStep, ...]
    whole: BoundBatch | None


def bind_collective(problem: Problem, rank: int, device: torch.device, joining: Joining | None) -> CollectiveBinding:
    """Binds the plan of `rank` for one exchange of the rows that ranks need."""
    binder, layout, heads = Binder(problem, device, joining), problem.layout, range(problem.num_kv_heads)
    peers = [peer for peer in range(layout.world_size) if peer != rank]

    def payload(reader: int, source: int) -> Tensor:
        return Payload(needed(problem, reader, source), problem, heads, device).numbers

    send = {peer: payload(peer, rank) for peer in peers}
    receive = {peer: payload(rank, peer) for peer in peers}
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    send_counts, receive_counts = (
        [len(rows.get(peer, nothing)) for peer in range(layout.world_size)] for rows in (send, receive)
    )
    # Rows arrive by source, and by their number there; tiles number them as in the whole sequence.
    whole = []
    for peer, numbers in receive.items():
        rows = [layout.positions(peer, row) for row in range(len(layout.rows) or 1)]
        positions, local = torch.tensor(rows, device=device), numbers % layout.local_len
        row_of_head = numbers // layout.local_len
        batch_row = row_of_head // problem.num_kv_heads if layout.rows else torch.zeros_like(local)
        whole.append(row_of_head * layout.padded_len + positions[batch_row, local])
    numbers, places = torch.sort(torch.cat(whole)) if whole else (nothing, nothing)

    def arrived(batch: TileBatch) -> IndexRows:
        rows = places[torch.searchsorted(numbers, binder.key_numbers(batch, layout.padded_len))]
        return IndexRows(batch.num_keys, rows=rows)

    return CollectiveBinding(
        own=bind_own(problem, rank, device, joining),
        remote=binder.calls(plan_rank(problem, rank).remote, lambda batch: None, arrived),
        used=any(needed(problem, a, b) for a in range(layout.world_size) for b in range(layout.world_size)),
        send=RowSet(sum(send_counts), torch.cat([nothing, *send.values()])),  # by reader, not ascending
        send_counts=send_counts,
        receive_counts=receive_counts,
    )


def _with_payload(
    binder: Binder, batches: tuple[TileBatch, ...], heads: range, payload: Payload
) -> tuple[BoundBatch, ...]:
    """Returns the kernel calls of tiles of these heads with a payload's keys; tiles number keys as its source does."""
    first = payload.first

    def view(batch: TileBatch) -> BoundBatch | None:
        return None if first is None else binder.view(batch, heads, 0, first)

    def keys(batch: TileBatch) -> IndexRows:
        return IndexRows(batch.num_keys, rows=payload.places(binder.key_numbers(batch, binder.key_rows)))

    return binder.calls(batches, view, keys)


def bind_ring(problem: Problem, rank: int, device: torch.device, joining: Joining | None) -> RingBinding:
    """Binds the steps of `rank` round the ring."""
    own, laps = bind_own(problem, rank, device, joining), ring_laps(problem)
    steps = tuple(step for lap in laps for step in _lap_steps(problem, rank, device, joining, lap))
    # A rank that needs no keys of others may still have to send its own.
    return RingBinding(steps, None if any(lap.steps for lap in laps) else own.whole)


def _lap_steps(problem: Problem, rank: int, device: torch.device, joining: Joining | None, lap: Lap) -> list[RingStep]:
    binder, p, heads = Binder(problem, device, joining), problem.layout.world_size, lap.heads

    def payload(rows: KeyRows | None) -> Payload:
        return Payload(nothing if rows is None else rows, problem, heads, device)

    def payload_of(hop: Hop | None, name: str) -> Payload:
        return payload(None if hop is None else getattr(hop, name))

    nothing = KeyRows(problem.num_kv_heads, (), (0,) * (len(problem.row_classes) * problem.num_kv_heads))
    own_rows = len(problem.documents) * problem.num_kv_heads * problem.layout.local_len
    following = (rank + lap.direction) % p
    route = lap.routes[rank]
    steps = []
    held: Payload | None = None  # this rank's own rows, which need no payload
    for number in range(0 if lap.with_own else 1, lap.steps + 1):
        source = lap.source(rank, number)
        here, onward = lap.hop(rank, number), lap.hop(following, number + 1)
        sent = payload_of(lap.hop(following, number) if number else None, "rows")
        home = payload(route[number - 1].finished if 1 <= number <= len(route) else None)
        arriving = payload_of(here, "rows")
        tiles = of_heads(tiles_from(problem, rank, source), heads, binder.group) if here or not number else ()
        batches = _with_payload(binder, tiles, heads, arriving) if number else binder.own(tiles, heads)
        steps.append(
            RingStep(
                batches=batches,
                number=number,
                of=lap.steps,
                source=source,
                following=following,
                previous=(rank - lap.direction) % p,
                last_user=(rank + number * lap.direction) % p,
                shape=arriving.shape,
                sent=RowSet.of(sent.numbers, own_rows) if held is None else held.row_set(sent),
                carried=arriving.row_set(payload_of(here, "carried")),
                goes_on=arriving.row_set(payload_of(onward if number else None, "carried")),
                finished=arriving.row_set(payload_of(here, "finished")),
                home=RowSet.of(home.numbers, own_rows),
            )
        )
        held = arriving if number else None
    return steps
