"""The ring transport: rows travel from neighbour to neighbour, each as far as its last reader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compute.batched import BoundBatch
from ..compute.binding import Binder, bind_own
from ..compute.kernel import Work
from ..compute.merge import accumulation_dtype
from ..plan.plans import TileBatch, of_heads, tiles_from
from ..plan.problem import Problem
from ..plan.routes import Hop, KeyRows, Lap, ring_laps
from .communicators import Communicator, Message
from .row_sets import MessagePool, MessageRows, Payload, RowSet
from .transports import Link, Step, StepGradients, Traffic

#: Ends an exchange of gradients, with the gradients of the next payload; None for this rank's own rows.
_Finish = Callable[[MessageRows | None], None]


@dataclass(frozen=True, kw_only=True)
class RingStep:
    """One step of a rank in a lap: its work, and the rows that arrive for it and leave."""

    work: Work
    number: int  # hops between this rank and the owner of the rows that it holds; 0 for local rows
    of: int  # steps of the lap
    source: int  # the owner of the rows
    following: int  # the neighbour that rows go to
    previous: int  # the neighbour that rows come from
    last_user: int  # the rank that holds this rank's rows at this step, and is the last to use the rows in `home`
    arriving: int  # the rows of the payload; 0 at step 0
    sent: RowSet  # rows of the step before that go to `following` while this step's payload arrives
    carried: RowSet  # rows of the payload whose gradients arrive from `previous` after its part is done
    goes_on: RowSet  # rows of the payload whose gradients go to `following`
    finished: RowSet  # rows of the payload whose gradients go home, to `source`
    home: RowSet  # rows of this rank whose gradients come home, from `last_user`


@dataclass(frozen=True)
class RingBinding:
    """The steps of all laps, in their order; or the rank's work, if no rank needs another."""

    steps: tuple[RingStep, ...]
    alone: Work | None = None


def _with_payload(binder: Binder, batches: tuple[TileBatch, ...], heads: range, payload: Payload) -> Work:
    """Returns the work of tiles of these heads with a payload's keys; tiles number keys as its source does."""

    def view(batch: TileBatch) -> BoundBatch | None:
        run = payload.run
        return None if run is None else binder.view(batch, heads, -run.start, len(run), len(heads))

    return binder.work(batches, view, binder.key_rows, payload.places)


def bind_ring(problem: Problem, rank: int, device: torch.device, joining: Hashable) -> RingBinding:
    """Binds the steps of `rank` round the ring."""
    laps = ring_laps(problem)
    if not any(lap.steps for lap in laps):  # A rank that needs no keys of others may still have to send keys.
        return RingBinding((), bind_own(problem, rank, device, joining))
    return RingBinding(tuple(step for lap in laps for step in _lap_steps(problem, rank, device, joining, lap)))


def _lap_steps(problem: Problem, rank: int, device: torch.device, joining: Hashable, lap: Lap) -> list[RingStep]:
    binder, p, heads = Binder(problem, device, joining), problem.layout.world_size, lap.heads

    def payload_of(hop: Hop | None, name: str) -> Payload:
        return Payload(nothing if hop is None else getattr(hop, name), problem, heads, device)

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
        home = payload_of(route[number - 1] if 1 <= number <= len(route) else None, "finished")
        arriving = payload_of(here, "rows")
        tiles = of_heads(tiles_from(problem, rank, source), heads) if here or not number else ()
        work = _with_payload(binder, tiles, heads, arriving) if number else binder.own(tiles, heads)
        steps.append(
            RingStep(
                work=work,
                number=number,
                of=lap.steps,
                source=source,
                following=following,
                previous=(rank - lap.direction) % p,
                last_user=(rank + number * lap.direction) % p,
                arriving=len(arriving.numbers),
                sent=RowSet.of(sent.numbers, own_rows) if held is None else held.row_set(sent),
                carried=arriving.row_set(payload_of(here, "carried")),
                goes_on=arriving.row_set(payload_of(onward if number else None, "carried")),
                finished=arriving.row_set(payload_of(here, "finished")),
                home=RowSet.of(home.numbers, own_rows),
            )
        )
        held = arriving if number else None
    return steps


class RingTransport:
    """Rows travel from neighbour to neighbour, each as far as its last reader; gradients follow them, and come home.

    While the caller computes with one payload, the next is under way: two payloads are held, whatever the number of ranks. In
    backward, the gradients of a payload's rows follow one computation behind, in the accumulation dtype, and the last rank to
    use a row sends its gradient to the row's owner.
    """

    def __init__(
        self, binding: RingBinding, communicator: Communicator, traffic: Traffic, members: Sequence[int] | None = None
    ) -> None:
        self.binding, self.alone = binding, binding.alone
        self.link = Link(communicator, traffic, "ring attention", members)

    @property
    def works(self) -> list[Work]:
        return [step.work for step in self.binding.steps]

    def _travel(self, k: Tensor, v: Tensor, name: str) -> Iterator[tuple[RingStep, RingStep | None, Tensor, Tensor]]:
        """Yields each step, the next one, and the step's keys and values, while the keys of the next step are under way."""
        steps, widths = self.binding.steps, (k.shape[-1], v.shape[-1])
        pool = MessagePool(k, widths, k.dtype, max(max(step.arriving, step.sent.count) for step in steps))
        own = MessageRows(k.new_empty(0), k.flatten(0, 2), v.flatten(0, 2))
        held = MessageRows(own.message, k, v)
        for step, following in zip(steps, (*steps[1:], None)):
            if following is None or not following.number:
                yield step, following, held.first, held.second
                pool.give(held)
                held = MessageRows(own.message, k, v)
                continue
            (coming,) = pool.take(following.arriving)
            (going,) = pool.pack(own if following.number == 1 else held, following.sent)
            wait = self.link.exchange(
                f"{name} pass, step {following.number} of {following.of}, keys and values",
                [Message(following.following, going.message)],
                [Message(following.previous, coming.message)],
            )
            yield step, following, held.first, held.second
            wait()
            pool.give(held)
            if going.buffer is not held.buffer:
                pool.give(going)
            held = coming

    def steps(self, k: Tensor, v: Tensor, gradients: StepGradients = None) -> Iterator[Step]:
        if gradients is not None:
            return self._backward(k, v, gradients)
        return (Step(keys, values, step.work) for step, _, keys, values in self._travel(k, v, "forward"))

    def _backward(self, k: Tensor, v: Tensor, own: tuple[Tensor, Tensor]) -> Iterator[Step]:
        steps, widths = self.binding.steps, (k.shape[-1], v.shape[-1])
        coming = [step.home.count + after.carried.count for step, after in itertools.pairwise(steps)]
        most = max(steps[-1].home.count, *coming, *(step.arriving for step in steps))
        pool = MessagePool(k, widths, accumulation_dtype(k.dtype), most)
        own_rows = own[0].flatten(0, 2), own[1].flatten(0, 2)
        finish: _Finish | None = None  # ends the exchange of gradients that is under way
        for step, following, keys, values in self._travel(k, v, "backward"):
            grads = None
            if step.number:
                (grads,) = pool.take(step.arriving)
                grads.message.zero_()
            yield Step(keys, values, step.work, own if grads is None else (grads.first, grads.second))
            if finish is not None:
                finish(grads)
            finish = None if grads is None else self._start_gradients(step, following, pool, grads, own_rows)
        if finish is not None:
            finish(None)

    def _start_gradients(
        self,
        step: RingStep,
        following: RingStep | None,
        pool: MessagePool,
        grads: MessageRows,
        own: tuple[Tensor, Tensor],
    ) -> _Finish:
        """Starts to send the gradients of a step's payload onward and home, and to receive the neighbours' gradients.

        The end adds the gradients that came: for own rows to dk and dv, and for the next payload's rows to its gradients.
        """
        carried = 0 if following is None else following.carried.count
        onward, home = pool.take(carried, step.home.count)
        goes_on, finished = pool.pack(grads, step.goes_on, step.finished)
        if goes_on.buffer is not grads.buffer:
            pool.give(grads)
        wait = self.link.exchange(
            f"backward pass, step {step.number} of {step.of}, gradients",
            [Message(step.following, goes_on.message), Message(step.source, finished.message)],
            [Message(step.previous, onward.message), Message(step.last_user, home.message)],
        )

        def finish(payload: MessageRows | None) -> None:
            wait()
            came = [(step.home, own, home)]
            if payload is not None and following is not None:
                came.append((following.carried, (payload.first, payload.second), onward))
            for rows, sums, arrived in came:
                if rows.count:
                    rows.add_(sums[0], arrived.first)
                    rows.add_(sums[1], arrived.second)
            pool.give(onward)
            pool.give(goes_on)

        return finish
