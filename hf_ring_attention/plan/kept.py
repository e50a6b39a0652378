"""The keys that a cache keeps: those that the next query of a document, or a later one, can still see.

They follow from the borders of the branches, which never fall from one query to the next: in a branch, no later query sees a
key in front of those that the next query sees there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .branches import LARGEST
from .patterns import Pattern

#: Dilations and blocks whose least common multiple is larger are no longer tried together, at each position.
_LONGEST_PERIOD = 512


class KeptKeys(NamedTuple):
    """The keys from `first` on and before `beyond` whose positions have this residue modulo `stride`.

    These are integers, or tensors of integers that broadcast.
    """

    first: Any
    beyond: Any
    stride: int
    residue: Any


def kept_keys(pattern: Pattern, phase: Any, length: Any) -> list[KeptKeys]:
    """Returns the keys that query `length` or a later one sees, for each branch; causality aside.

    The phase of a head and the length are integers, or tensors of integers that broadcast.
    """
    kept = []
    for branch in pattern.branches:
        residue = phase % branch.dilation
        query = length if branch.queries == "all" else length + (residue - length) % branch.dilation
        first, beyond = branch.borders()
        kept.append(KeptKeys(first.position(query), beyond.position(query), branch.dilation, residue))
    return kept


def period_of(pattern: Pattern) -> int:
    """Returns the smallest number whose multiples can be added to a phase without a difference."""
    return math.lcm(*(branch.dilation for branch in pattern.branches))


def keeps_all(pattern: Pattern) -> bool:
    """Returns whether every key of every head is seen by some later query, however long the document is."""
    return all(any(_is_all(kept) for kept in kept_keys(own, 0, LARGEST >> 8)) for own in pattern.kv_heads or (pattern,))


def _is_all(kept: KeptKeys) -> bool:
    return kept.first <= 0 and kept.beyond >= LARGEST >> 8 and kept.stride == 1


def sees_all_kept(pattern: Pattern) -> bool:
    """Returns whether each query sees every key that was kept for it and for later queries, and sees it once."""
    every_query = all(branch.queries == "all" or branch.dilation == 1 for branch in pattern.branches)
    return every_query and (pattern.overlap == "once" or len(pattern.branches) == 1)


def count_kept(pattern: Pattern, phase: int, length: int) -> int:
    """Returns how many of the first `length` keys some later query sees, in a head with this phase."""
    every = kept_keys(pattern, phase, length)
    spans = {(max(0, x.first), min(length, x.beyond), x.stride, x.residue) for x in every}
    ends = sorted({end for first, beyond, *_ in spans for end in (first, beyond) if first < beyond})
    return sum(
        _count_classes(
            sorted({(stride, residue) for first, beyond, stride, residue in spans if first <= low and high <= beyond}),
            low,
            high,
        )
        for low, high in itertools.pairwise(ends)
    )


def _count_classes(classes: Sequence[tuple[int, int]], low: int, high: int) -> int:
    """Returns how many numbers from low on and below high have one of the residues, each modulo its stride."""
    if not classes:
        return 0
    (stride, residue), *rest = classes
    found = (high - 1 - residue) // stride - (low - 1 - residue) // stride
    both = [x for other in rest if (x := _both(stride, residue, *other)) is not None]
    return found + _count_classes(rest, low, high) - _count_classes(sorted({*both}), low, high)


def _both(stride: int, residue: int, other: int, of_other: int) -> tuple[int, int] | None:
    """Returns the stride and the residue of the numbers that are in both classes; None if none are."""
    common = math.gcd(stride, other)
    if (of_other - residue) % common:
        return None
    steps = (of_other - residue) // common * pow(stride // common, -1, other // common)
    both = stride // common * other
    return both, (residue + stride * steps) % both


def heads_of_patterns(
    pattern: Pattern, num_kv_heads: int, first_kv_head: int = 0
) -> Iterator[tuple[Pattern, tuple[int, ...], tuple[int, ...]]]:
    """Yields (pattern, key/value heads, the phase of each) for heads that have one pattern.

    Heads are counted from `first_kv_head` on in the attention, and from 0 here; equal phases are one number.
    """
    heads_of: dict[Pattern, list[int]] = {}
    for head in range(num_kv_heads):
        heads_of.setdefault(pattern.of_kv_head(first_kv_head + head), []).append(head)
    for own, heads in heads_of.items():
        period = period_of(own)
        yield own, tuple(heads), tuple((first_kv_head + head) % period for head in heads)


@lru_cache(maxsize=256)
def most_rows(pattern: Pattern, phase: int, length: int) -> int:
    """Returns the most rows that a head's cache holds at once until it has `length` tokens, one of them new.

    Blocks are left behind at their ends, and dilated windows keep more or fewer rows in turn. So the most rows are shortly
    before the end of the document or of a block.
    """
    borders = (border for branch in pattern.branches for border in branch.borders())
    widths = {border.value for border in borders if border.kind == "block"}
    ends = {length, *((length - 1) // width * width for width in widths)}
    ends |= {end // width * width for end in ends for width in widths}
    period = period_of(pattern)
    together = math.lcm(period, *widths)
    period = together if together <= _LONGEST_PERIOD else min(period, _LONGEST_PERIOD)
    after = {end - 1 - step for end in ends for step in range(period)}
    return max(count_kept(pattern, phase, x) for x in after if 0 <= x < length) + 1 if length else 0


def cache_rows(pattern: Pattern, num_kv_heads: int, length: int) -> int:
    """Returns the most rows of keys that a layer's `PatternCache` holds for a row of `length` tokens, over its key/value heads.

    Heads with the same pattern have as many rows as the one that needs the most.
    """
    groups = heads_of_patterns(pattern, num_kv_heads)
    return sum(len(heads) * max(most_rows(own, x, length) for x in {*phases}) for own, heads, phases in groups)
