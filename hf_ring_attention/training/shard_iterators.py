"""An iterator that turns batches of whole sequences into shards, while all processes compare what they have read."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..plan.patterns import Pattern
from ..ring.ring import Ring
from .shards import blank, cut_batch, digests, outline

#: Numbers that a process sends in place of a checksum: it has no batch left, or it failed to read one.
_NONE, _FAILED = -1, -2

#: The low bits of the number that a process sends are a checksum of the order of rows; the others are that of the batch.
_ORDER_BITS = 24


class Shards:
    """An iterator over this rank's shards of batches of whole sequences; all processes take each batch together.

    It ends when no ring has a batch left, or with `drop_last` when one ring has none. Until then a ring without a batch
    takes part with a shard of nothing but padding.

    Args:
        batches: gives the batches of this ring.
        drop_last: whether to leave out batches that not all rings have.
        order: returns a checksum of the order of rows, 0 if it is unknown.
        name: what errors call the loader if another process does something else meanwhile.

    Raises:
        ValueError: on every process: the ranks of a ring have different rows, or rings read them in different orders.
        ValueError, RuntimeError: another process failed to read or to shard its batch.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        ring: Ring,
        pattern: Pattern | None,
        drop_last: bool,
        order: Callable[[], int],
        name: str,
    ) -> None:
        self.source = batches
        self.batches: Iterator[Any] | None = None
        self.ring, self.pattern, self.drop_last, self.order = ring, pattern, drop_last, order
        self.name, self.count = name, 0

    def __iter__(self) -> Shards:
        return self

    def __next__(self) -> dict[str, Any]:
        cut = batch = None
        signal = _FAILED
        try:
            if self.batches is None:
                self.batches = iter(self.source)
            batch = next(self.batches, None)
            if batch is not None:
                cut = cut_batch(batch, self.ring, self.pattern, self.ring.device)
            signal = _NONE if batch is None else _checksum(batch) << _ORDER_BITS | self.order() % (1 << _ORDER_BITS)
        finally:  # the other processes must learn of an error before it leaves this function
            by_process = self._compare(signal, batch, sys.exc_info()[1] if signal == _FAILED else None)
        self.count += 1
        has_batch = [number >= 0 for number in by_process]
        if not any(has_batch) or (self.drop_last and not all(has_batch)):
            raise StopIteration
        if not all(has_batch):
            # A shard of padding needs every tensor that the shards of other rings have: a loop may ask for any of them.
            outlines = self.ring.agree_everywhere(
                "the outline of a batch", {}, tell=None if batch is None else outline(batch)
            )
            template = next(entries for entries in outlines if entries is not None)
            if cut is None:
                batch = blank(self.ring.world_size, template)
                cut = cut_batch(batch, self.ring, self.pattern, self.ring.device)
                cut = cut._replace(shard=dict.fromkeys(batch) | cut.shard)
        assert cut is not None
        # The loader has told of this batch as it read it, but not of padding; nor have loaders that Accelerate made anew.
        self.ring.planner.expect(cut.layout, cut.documents)
        return cut.shard

    def _compare(self, signal: int, batch: Any, error: BaseException | None) -> list[int]:
        """Returns the numbers of all processes if they fit each other; else raises on every process."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        told = self.ring.agree_everywhere(f"batch {self.count} of {self.name}", {}, tell=(signal, text))
        by_process = [number for number, _ in told]
        if _FAILED in by_process:
            if error is None:
                process = by_process.index(_FAILED)
                text = told[process][1]
                kind = ValueError if text.startswith("ValueError") else RuntimeError
                raise kind(f"process {process} could not take batch {self.count}: {text}")
            return by_process
        orders = {number % (1 << _ORDER_BITS): process for process, number in enumerate(by_process) if number >= 0}
        orders.pop(0, None)  # these processes do not know their order
        if len(orders) > 1:
            raise ValueError(
                f"processes {' and '.join(map(str, sorted(orders.values())))} read rows in different orders at batch "
                f"{self.count}, so some rows would be read twice, and others not at all: a sampler or iterable dataset must "
                f"give all processes the same rows, of which the ring's loader takes its own: draw from Python's, numpy's or "
                f"torch's global generators, which the loader seeds, or seed a generator of your own alike on all processes"
            )
        size = self.ring.world_size
        rings = [by_process[start : start + size] for start in range(0, len(by_process), size)]
        different = [ring for ring, numbers in enumerate(rings) if len(set(numbers)) > 1]
        if different:
            contents = self.ring.agree_everywhere(
                "the content of a batch", {}, tell={"batch": "none"} if batch is None else digests(batch)
            )
            first = different[0] * size
            by_rank = contents[first : first + size]
            differences = "; ".join(
                f"process {first + rank}: "
                + ", ".join(f"{name} {x}" for name, x in own.items() if any(other.get(name) != x for other in by_rank))
                for rank, own in enumerate(by_rank)
            )
            raise ValueError(
                f"the ranks of ring {different[0]} read different rows at batch {self.count} ({differences}), and each would "
                f"attend to rows of another: the content of a dataset must not depend on the process: leave out what divides "
                f"it by processes, and seed a random generator of its own alike on all ranks of a ring (the loader seeds the "
                f"global generators of Python, numpy and torch)"
            )
        return by_process


def _checksum(batch: Any) -> int:
    """Returns 38 bits: with those of the order a process's number has 62, and is a positive int64."""
    text = repr(digests(batch)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> _ORDER_BITS + 2
