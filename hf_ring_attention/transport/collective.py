"""The collective transport: rows reach all ranks that need them in one exchange, and their gradients go home in another."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compute.binding import Binder, bind_own
from ..compute.kernel import Work
from ..compute.merge import accumulation_dtype
from ..plan.plans import plan_rank
from ..plan.problem import Problem
from ..plan.routes import needed
from ..plan.traffic import exchanged
from .communicators import Communicator
from .row_sets import Payload, RowSet
from .transports import Link, Step, StepGradients, Traffic


@dataclass(frozen=True, kw_only=True)
class CollectiveBinding:
    """The work of a rank around one exchange of rows: tiles with local keys, and tiles with the keys that arrive."""

    own: Work
    remote: Work
    used: bool  # whether any rank needs rows of another
    send: RowSet  # this rank's rows to send, in the order of the ranks that need them
    send_counts: list[int]  # the number of rows to each rank
    receive_counts: list[int]  # the number of rows from each rank


def bind_collective(problem: Problem, rank: int, device: torch.device, joining: Hashable) -> CollectiveBinding:
    """Binds the plan of `rank` for one exchange of the rows that ranks need."""
    binder, layout, heads = Binder(problem, device, joining), problem.layout, range(problem.num_kv_heads)

    def rows_for(reader: int, source: int) -> Tensor:
        return Payload(needed(problem, reader, source), problem, heads, device).numbers

    ranks = range(layout.world_size)
    send, receive = [rows_for(peer, rank) for peer in ranks], [rows_for(rank, peer) for peer in ranks]
    # Rows arrive by source, and by their number there; tiles number them as in the whole sequence.
    whole = [receive[rank]]  # empty: a rank sends nothing to itself
    for peer, numbers in enumerate(receive):
        if not len(numbers):
            continue
        rows = [layout.positions(peer, row) for row in range(len(layout.rows) or 1)]
        positions, local = torch.tensor(rows, device=device), numbers % layout.local_len
        row_of_head = numbers // layout.local_len
        batch_row = row_of_head // problem.num_kv_heads if layout.rows else torch.zeros_like(local)
        whole.append(row_of_head * layout.padded_len + positions[batch_row, local])
    numbers, places = torch.sort(torch.cat(whole))

    def arrived(rows: Tensor) -> Tensor:
        return places[torch.searchsorted(numbers, rows)]

    return CollectiveBinding(
        own=bind_own(problem, rank, device, joining),
        remote=binder.work(plan_rank(problem, rank).remote, lambda batch: None, layout.padded_len, arrived),
        used=any(map(any, exchanged(problem))),
        send=RowSet(sum(map(len, send)), torch.cat(send)),  # by reader, not ascending
        send_counts=[*map(len, send)],
        receive_counts=[*map(len, receive)],
    )


class CollectiveTransport:
    """Exchanges the needed rows of all ranks, keys beside values, by one all-to-all in forward, and by two in backward."""

    def __init__(self, binding: CollectiveBinding, communicator: Communicator, traffic: Traffic) -> None:
        self.binding, self.works = binding, (binding.own, binding.remote)
        self.alone = None if binding.used else binding.own
        self.link = Link(communicator, traffic, "collective attention")

    def steps(self, k: Tensor, v: Tensor, gradients: StepGradients = None) -> Iterator[Step]:
        binding, widths = self.binding, [k.shape[-1], v.shape[-1]]
        counts = binding.send_counts, binding.receive_counts
        name = "forward" if gradients is None else "backward"
        received, wait = self.link.all_to_all(
            f"{name} pass, keys and values",
            torch.cat([binding.send.take(k.flatten(0, 2)), binding.send.take(v.flatten(0, 2))], dim=-1),
            *counts,
        )
        yield Step(k, v, binding.own, gradients)
        wait()
        keys, values = received.split(widths, dim=-1)
        if gradients is None:
            yield Step(keys, values, binding.remote)
            return
        grads = torch.zeros_like(received, dtype=accumulation_dtype(k.dtype))
        dkeys, dvalues = grads.split(widths, dim=-1)
        yield Step(keys, values, binding.remote, (dkeys, dvalues))
        home, wait = self.link.all_to_all("backward pass, gradients", grads, *reversed(counts))
        wait()
        for target, part in zip(gradients, home.split(widths, dim=-1)):
            binding.send.add_(target.flatten(0, 2), part)
