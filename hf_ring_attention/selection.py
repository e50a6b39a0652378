"""The choices the program makes for a call, each with its reason: layout and transport."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .layouts import LayoutKind, SequenceLayout
from .patterns import Pattern
from .plans import Problem, plan_rank
from .routes import Sizes, exchanged

#: Contiguous pieces are kept while the busiest rank does at most this much more than the mean.
IMBALANCE_WORTH_A_ZIGZAG = 1.05
#: The collective transport holds at most this many bytes of other ranks' keys and values where the ring would do.
COLLECTIVE_BYTES = 1 << 20


@dataclass(frozen=True)
class Decision:
    """What was chosen and why."""

    choice: str
    reason: str


def imbalance(problem: Problem) -> float:
    """Query-key pairs of the busiest rank over the mean of all ranks."""
    pairs = [plan_rank(problem, rank).pairs for rank in range(problem.layout.world_size)]
    return max(pairs) * len(pairs) / (sum(pairs) or 1)


@lru_cache(maxsize=256)
def balanced_layout(seq_len: int, world_size: int, pattern: Pattern) -> LayoutKind:
    """Zigzag where a causal row of one document would leave contiguous pieces with unequal work."""

    def of(kind: LayoutKind) -> float:
        layout = SequenceLayout(kind, seq_len, world_size)
        return imbalance(Problem(pattern, layout, (((0, seq_len),),), num_heads=1, num_kv_heads=1))

    if world_size == 1:
        return "contiguous"
    contiguous = of("contiguous")
    if contiguous <= IMBALANCE_WORTH_A_ZIGZAG or contiguous <= of("zigzag"):
        return "contiguous"
    return "zigzag"


@lru_cache(maxsize=256)
def choose_transport(problem: Problem, sizes: Sizes) -> Decision:
    """Local, collective or ring for a call of this problem; the same on all ranks.

    The collective waits once, the ring holds little. So the collective is taken where it holds little too: as much as
    the ring's payloads, or `COLLECTIVE_BYTES`.
    """
    p = problem.layout.world_size
    if p == 1:
        return Decision("local", "one rank holds the whole sequence")
    rows = max(map(sum, exchanged(problem)))
    if not rows:
        return Decision("local", "no rank needs a key of another one")
    shard = problem.num_kv_heads * problem.layout.local_len * len(problem.documents)
    size, own = rows * sizes.row_bytes, shard * sizes.row_bytes
    needs = f"the busiest of {p} ranks needs {_mib(size)} of keys and values of others"
    if size <= COLLECTIVE_BYTES:
        return Decision("collective", f"{needs}, at most {_mib(COLLECTIVE_BYTES)}: one exchange")
    if rows <= shard:
        return Decision("collective", f"{needs}, no more than its own {_mib(own)}: one exchange")
    return Decision("ring", f"{needs}, more than its own {_mib(own)}: neighbour to neighbour it holds two payloads")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
