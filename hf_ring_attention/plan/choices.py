"""The choices that the program makes for a call, each with its reason: layout and transport."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from .balance import balanced_layout, busiest_over_mean, estimated_imbalance, mean_keys
from .branches import check_choice
from .heads import check_heads, group_size, heads_fit, layout_of_groups
from .layouts import LayoutKind, SequenceLayout
from .patterns import Pattern
from .plans import plan_rank
from .problem import Documents, Problem
from .traffic import RowBytes, TransportKind, exchanged, short_bytes

#: Contiguous pieces are kept while the busiest rank does at most this many times the mean work.
IMBALANCE_WORTH_A_ZIGZAG = 1.05

#: Pieces are made for the documents of a batch if otherwise the busiest rank would do more than so many times the mean work.
IMBALANCE_WORTH_PIECES = 1.1

#: One exchange of at most this many bytes is as fast as the ring's hops, or faster: `recipes/bench/peers.py` measures both.
COLLECTIVE_BYTES = 8 << 20

#: Upper bound on the cost of moving one token of one head, in query-key pairs: 110 were measured between processes of a CPU;
#: a GPU computes about a thousand in the time that its link takes.
HEADS_AS_KEYS = 1024
#: Heads are exchanged if waiting for the busiest rank would take at least so many times as long.
WORTH_AN_EXCHANGE = 1.05

#: The reason of a choice that the caller made.
ASKED_FOR = "it was asked for"

#: The kernels that a caller may ask for; "auto" takes the first of `kernel_choice.kernel_candidates`.
KernelSetting = Literal["auto", "fused", "flash", "cudnn", "efficient", "math"]

#: If a rank's remote keys are at most this share of its local keys, the collective holds little, whatever the length.
COLLECTIVE_SHARE = 0.25


@dataclass(frozen=True)
class Decision:
    """A choice of the program, with its reason.

    Attributes:
        choice, reason: a name, such as "zigzag" or "ring", and a sentence.
        heads: the number of neighbours that exchange heads, if the choice is "heads" and not all ranks do.

    Example:
        >>> call = ra.explain("exact", seq_len=8192, ring_size=4, num_heads=8, head_dim=64)
        >>> call.layout_decision.choice, call.layout_decision.reason
        ('zigzag', 'with contiguous pieces the busiest rank does 1.75 times the mean work, in zigzag 1.00')
    """

    choice: str
    reason: str
    heads: int | None = None


def imbalance(problem: Problem) -> float:
    """Returns the query-key pairs of the busiest rank, divided by the mean of all ranks."""
    return busiest_over_mean([plan_rank(problem, rank).pairs for rank in range(problem.layout.world_size)])


def check_choices(layout: str, transport: str, world_size: int, heads: int | None = None, kernel: str = "auto") -> None:
    """Refuses unknown names, and transports or groups (`heads`) that cannot serve this many ranks."""
    check_choice("Ring", "layout", layout, ("auto", *get_args(LayoutKind)))
    check_choice("Ring", "transport", transport, get_args(TransportKind))
    check_choice("Ring", "kernel", kernel, get_args(KernelSetting))
    if transport == "local" and world_size > 1:
        raise ValueError(f"transport='local' serves 1 rank, got {world_size}: use 'auto', 'ring' or 'collective'")
    if heads is None:
        return
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or world_size % heads:
        raise ValueError(
            f"heads must be a divisor of the ring's {world_size} ranks, got {heads!r}: groups of that many neighbours "
            f"exchange heads"
        )
    if transport != "heads":
        raise ValueError(f"heads={heads} needs transport='heads', got {transport!r}")


@lru_cache(maxsize=256)
def choose_layout(seq_len: int, world_size: int, pattern: Pattern) -> Decision:
    """Chooses zigzag if contiguous pieces of a causal sequence of one document would have unequal work."""
    if world_size == 1:
        return Decision("contiguous", "one rank holds the whole sequence")
    # Both layouts are compared at a length that needs no padding, so that a sequence and its padded form are divided alike.
    unit = 2 * world_size
    length = -(-seq_len // unit) * unit

    def imbalance_in(kind: LayoutKind) -> float:
        layout = SequenceLayout(kind, length, world_size)
        heads = pattern.num_kv_heads or 1
        return imbalance(Problem(pattern, layout, (((0, length),),), num_heads=heads, num_kv_heads=heads))

    contiguous = imbalance_in("contiguous")
    busiest = f"with contiguous pieces the busiest rank does {contiguous:.2f} times the mean work"
    if contiguous <= IMBALANCE_WORTH_A_ZIGZAG:
        return Decision("contiguous", busiest)
    zigzag = imbalance_in("zigzag")
    choice = "contiguous" if contiguous <= zigzag else "zigzag"
    return Decision(choice, f"{busiest}, in zigzag {zigzag:.2f}")


@lru_cache(maxsize=64)
def decide_layout(
    kind: str,
    seq_len: int,
    world_size: int,
    pattern: Pattern,
    documents: Documents | None = None,
    transport: str = "auto",
    heads: int | None = None,
) -> tuple[SequenceLayout, Decision]:
    """Returns the layout of a batch, and its kind with the reason: the kind asked for, or with "auto" a balanced one.

    Without documents, each row is one document. If all ranks exchange heads, they have equal work in every layout.
    """
    if kind == "documents" and documents is not None:
        return balanced_layout(seq_len, world_size, pattern, documents), Decision(kind, ASKED_FOR)
    unasked = kind in ("auto", "documents") or world_size == 1  # One rank needs no division, nor padding for it.
    decision = choose_layout(seq_len, world_size, pattern) if unasked else Decision(kind, ASKED_FOR)
    layout = SequenceLayout(decision.choice, seq_len, world_size)  # type: ignore[arg-type]
    by_heads = transport == "heads" and heads in (None, world_size)
    if kind != "auto" or documents is None or world_size == 1 or by_heads:
        return layout, decision
    busiest = estimated_imbalance(layout, pattern, documents)
    if busiest <= IMBALANCE_WORTH_PIECES:
        return layout, decision
    balanced = balanced_layout(seq_len, world_size, pattern, documents)
    balance = estimated_imbalance(balanced, pattern, documents)
    reason = f"with these documents the busiest rank does {busiest:.2f} times the mean work in {layout.kind} pieces"
    if balance >= busiest:
        return layout, Decision(layout.kind, f"{reason}, and {balance:.2f} in pieces made for them")
    return balanced, Decision("documents", f"{reason}, {balance:.2f} in pieces made for them")


@lru_cache(maxsize=256)
def choose_transport(problem: Problem, sizes: RowBytes) -> Decision:
    """Chooses local, collective, ring or heads for a call of this problem; all ranks choose alike.

    The collective waits once and holds all rows that a rank needs of others; the ring hides its hops behind the
    computation and holds a few payloads, whatever the number of ranks. So the collective is chosen if it holds little:
    in bytes (`COLLECTIVE_BYTES`) or beside the rank's own keys (`COLLECTIVE_SHARE`). Heads are exchanged if work is so uneven
    that an exchange costs less than waiting for the busiest rank (`HEADS_AS_KEYS`).
    """
    p = problem.layout.world_size
    if p == 1:
        return Decision("local", "one rank holds the whole sequence")
    by_heads = _choose_heads(problem)
    if by_heads is not None:
        return by_heads
    rows = max(map(sum, exchanged(problem)))
    if not rows:
        return Decision("local", "no rank needs a key of another rank")
    shard = problem.num_kv_heads * problem.layout.local_len * len(problem.documents)
    size, own = rows * sizes.row_bytes, shard * sizes.row_bytes
    needs = f"the busiest of {p} ranks needs {short_bytes(size)} of keys and values of others"
    if size <= COLLECTIVE_BYTES:
        return Decision(
            "collective",
            f"{needs}, at most {short_bytes(COLLECTIVE_BYTES)}: one exchange is as fast as hops, or faster",
        )
    share = f"{rows / shard:.2f} times its own {short_bytes(own)}"
    if rows <= COLLECTIVE_SHARE * shard:
        return Decision("collective", f"{needs}, {share}: one exchange holds little")
    return Decision("ring", f"{needs}, {share}: the ring holds a few payloads, and moves them while ranks compute")


def _choose_heads(problem: Problem) -> Decision | None:
    """Returns the choice of exchanging heads if it is worth it; else None."""
    layout, p = problem.layout, problem.layout.world_size
    sizes = [size for size in range(p, 1, -1) if p % size == 0]
    sizes = [size for size in sizes if heads_fit(problem.num_heads, problem.num_kv_heads, size)]
    if not sizes or not problem.causal or problem.held is not None or not problem.settings.may_exchange_heads:
        return None
    keys = mean_keys(problem.pattern, problem.documents) * sum(b - a for row in problem.documents for a, b in row)
    cost = HEADS_AS_KEYS * layout.padded_len * len(problem.documents) / keys if keys else math.inf
    busiest = estimated_imbalance(layout, problem.pattern, problem.documents)
    if busiest <= (1 + cost) * WORTH_AN_EXCHANGE:
        return None

    def in_groups(size: int) -> float:
        busiest = estimated_imbalance(layout_of_groups(problem.in_groups(size)), problem.pattern, problem.documents)
        return busiest * _imbalance_of_heads(problem, size) + cost

    size = min(sizes, key=in_groups)
    if busiest <= in_groups(size) * WORTH_AN_EXCHANGE:
        return None
    who = f"all {p} ranks exchange heads" if size == p else f"{size} neighbours exchange heads"
    return Decision(
        "heads",
        f"the busiest of {p} ranks does {busiest:.2f} times the mean work in {layout.kind} pieces, and if {who} "
        f"{in_groups(size) - cost:.2f} times, which is worth the exchange of a token for about {HEADS_AS_KEYS} keys of a query",
        None if size == p else size,
    )


def _imbalance_of_heads(problem: Problem, size: int) -> float:
    """Returns about how many times the mean work the busiest member of a group does: patterns may differ by heads."""
    pattern, heads = problem.pattern, problem.num_kv_heads
    if not pattern.kv_heads:
        return 1.0
    work = [mean_keys(pattern.of_kv_head(problem.first_kv_head + head), problem.documents) for head in range(heads)]
    share = max(1, heads // size)
    return busiest_over_mean([sum(work[first : first + share]) for first in range(0, heads, share)])


def decide_call(transport: str, problem: Problem, sizes: RowBytes) -> tuple[Problem, Decision]:
    """Returns the problem as it is computed, and its transport: the one asked for, or with "auto" by `choose_transport`."""
    if transport == "heads":
        check_heads(problem.num_heads, problem.num_kv_heads, group_size(problem))
    decision = choose_transport(problem, sizes) if transport == "auto" else Decision(transport, ASKED_FOR)
    return problem if decision.heads is None else problem.in_groups(decision.heads), decision
