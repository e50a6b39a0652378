"""Attention patterns: the keys that a query sees, defined only by token positions.

A position is a token's index inside its document. A `Pattern` is a tuple of branches; `Pattern.multiplicity` is the
definition that every other module executes and that the reference implementation evaluates directly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar, Literal

from . import notation
from .branches import (
    BRANCH_TYPES,
    LARGEST,
    Branch,
    Segment,
    Sink,
    Window,
    check_choice,
    check_count,
)

Overlap = Literal["count", "once"]

_KINDS = ", ".join(kind.__name__ for kind in BRANCH_TYPES)


@dataclass(frozen=True)
class Pattern:
    """The keys that a query sees: the keys of every branch, each once or as often as branches show it.

    With m(q, k, h) = `multiplicity` and s = scale * q.k, a head computes

        out(q) = sum_k m e^s v_k / sum_k m e^s        lse(q) = log sum_k m e^s

    Args:
        branches: `Segment`, `Window` and `Sink` objects, at least one of them a segment or window of dilation 1, so
            that every query sees itself.
        overlap: "count" takes a key as often as branches show it, which mixes the branches by their softmax
            denominators, as LongNet does. "once" takes each visible key once; it asks for nested branches, each dilation
            dividing the next.
        kv_heads: the pattern of each key/value head, for all query heads that share it, in place of branches:
            `by_kv_head` makes it.

    Raises:
        ValueError: no branches, a branch of another type, a pattern that leaves queries without a key, or branches
            that `overlap="once"` cannot nest.

    Example:
        >>> pattern = ra.Pattern([ra.Sink(1), ra.Window(3)])
        >>> for query in range(5):
        ...     print([pattern.multiplicity(query, key, head=0, num_heads=1, num_kv_heads=1) for key in range(5)])
        [1, 0, 0, 0, 0]
        [1, 1, 0, 0, 0]
        [1, 1, 1, 0, 0]
        [1, 1, 1, 1, 0]
        [1, 0, 1, 1, 1]
    """

    branches: tuple[Branch, ...]
    overlap: Overlap = "once"
    kv_heads: tuple[Pattern, ...] = ()
    _num_kv_heads: int | None = field(default=None, init=False, repr=False, compare=False)

    #: (pattern, seq_len, num_heads, num_kv_heads, causal) -> query-key pairs; `plan/__init__.py` sets it.
    count_pairs: ClassVar[Callable[[Pattern, int, int, int, bool], int]]

    def __post_init__(self) -> None:
        if self.kv_heads:
            self._check_kv_heads()
            return
        branches: Any = self.branches
        if isinstance(branches, BRANCH_TYPES):
            branches = (branches,)
        if not isinstance(branches, Iterable):
            raise ValueError(f"Pattern: branches must be a sequence of {_KINDS}, got {branches!r}")
        branches = tuple(branches)
        object.__setattr__(self, "branches", branches)
        for branch in branches:
            if not isinstance(branch, BRANCH_TYPES):
                raise ValueError(f"Pattern: a branch must be one of {_KINDS}, got {branch!r}")
        check_choice("Pattern", "overlap", self.overlap, ("count", "once"))
        dilated = [branch for branch in branches if isinstance(branch, (Segment, Window))]
        if all(branch.dilation != 1 for branch in dilated):
            raise ValueError(
                f"Pattern: no branch of dilation 1 covers the query itself, so some queries would see no key; got "
                f"{list(branches)}: add a Window or Segment with dilation 1"
            )
        if self.overlap == "once":
            for earlier, later in itertools.pairwise(dilated):
                if later.dilation % earlier.dilation:
                    raise ValueError(
                        f"Pattern: overlap='once' needs each dilation to divide the next, got {earlier.dilation} before "
                        f"{later.dilation}: order the branches, make each dilation a multiple of the one before, or use "
                        f"overlap='count'"
                    )

    def _check_kv_heads(self) -> None:
        if self.branches or self.overlap != "once":
            raise ValueError(
                "Pattern: with kv_heads, each head's pattern has the branches and overlap: leave them out, or use "
                "Pattern.by_kv_head"
            )
        heads = tuple(self.kv_heads)
        for head, pattern in enumerate(heads):
            if not isinstance(pattern, Pattern) or pattern.kv_heads:
                raise ValueError(
                    f"Pattern: kv_heads must be patterns with branches, one for each key/value head, got {pattern!r} for head "
                    f"{head}"
                )
        same = {"kv_heads": heads} if len({*heads}) > 1 else vars(heads[0])  # One plan serves heads that are the same.
        for name, value in {**same, "_num_kv_heads": len(heads)}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def by_kv_head(cls, patterns: Sequence[Pattern | str]) -> Pattern:
        """Makes a pattern whose heads differ: one pattern for each key/value head and the query heads that share it.

        A few heads of a model look far back, and the others need only a window with sinks (DuoAttention,
        arXiv 2410.10819).

        Args:
            patterns: the pattern of each key/value head, or its text. The result is only for models with this number of heads.

        Raises:
            ValueError: no patterns, or a pattern that differs by heads itself.

        Example:
            >>> few = ra.Pattern.by_kv_head(["exact" if head in (0, 5) else "window:512+4" for head in range(8)])
            >>> print(few)
            kv0,5=exact;kv1-4,6-7=window:512+4
            >>> round(few.flop_share(32768), 3)
            0.273
        """
        heads = tuple(as_pattern(pattern, "Pattern.by_kv_head") for pattern in patterns)
        nested = next((x for x in heads if x.num_kv_heads), None)
        if not heads or nested:
            got = f"one for {nested.num_kv_heads} heads itself: {nested}" if nested else "none"
            raise ValueError(f"Pattern.by_kv_head: a pattern for each key/value head was expected, got {got}")
        return cls((), kv_heads=heads)

    @property
    def num_kv_heads(self) -> int | None:
        """The number of key/value heads that the pattern names, also if all have the same branches; None if it names none."""
        return self._num_kv_heads

    def of_kv_head(self, kv_head: int) -> Pattern:
        """Returns the pattern of a key/value head."""
        return self.kv_heads[kv_head] if self.kv_heads else replace(self)  # without a number of heads

    def check_heads(self, num_kv_heads: int, whose: str) -> None:
        """Refuses another number of key/value heads than the pattern has."""
        if self.num_kv_heads not in (None, num_kv_heads):
            raise ValueError(
                f"the pattern {self} is for {self.num_kv_heads} key/value heads, and {whose} has {num_kv_heads}: give one "
                f"pattern for each"
            )

    @classmethod
    @cache
    def exact(cls) -> Pattern:
        """Makes ordinary full attention."""
        return cls((Segment(),))

    @classmethod
    def window(cls, length: int, sinks: int = 0) -> Pattern:
        """Makes a sliding window of `length` tokens, and `sinks` first tokens of the document that every query sees.

        Example:
            >>> print(ra.Pattern.window(512, sinks=4))
            window:512+4
        """
        return cls((*_sinks("Pattern.window", sinks), Window(length)))

    @classmethod
    def longnet(cls, segment_lengths: Sequence[int | None], dilation_rates: Sequence[int]) -> Pattern:
        """Makes LongNet's dilated attention: a `Segment` for each pair, with overlap "count" (arXiv 2307.02486, section 2).

        Args:
            segment_lengths: tokens of a segment; None for the whole document.
            dilation_rates: one for each segment length; one of them is 1.

        Example:
            >>> longnet = ra.Pattern.longnet([2048, 8192, None], [1, 4, 16])
            >>> print(longnet)
            longnet:2048/1,8192/4,all/16
        """
        lengths, rates = list(segment_lengths), list(dilation_rates)
        if len(lengths) != len(rates):
            raise ValueError(
                f"Pattern.longnet: as many dilation_rates as segment_lengths are needed, got {len(rates)} for {len(lengths)}: "
                f"{rates} and {lengths}"
            )
        return cls(tuple(map(Segment, lengths, rates)), overlap="count")

    @classmethod
    def pyramid(cls, window: int, levels: int, ratio: int = 4, sinks: int = 4) -> Pattern:
        """Makes windows of `window * ratio**i` tokens at dilation `ratio**i`: all near keys, and ever fewer of the far ones.

        Args:
            window: tokens of the nearest, dense window.
            levels: number of windows.
            ratio: growth of length and dilation from one window to the next.
            sinks: first tokens of the document that every query sees; 0 for none.

        Example:
            >>> ra.Pattern.pyramid(512, levels=2).branches
            (Sink(tokens=4), Window(length=512, dilation=1, queries='all'), Window(length=2048, dilation=4, queries='all'))
        """
        check_count("Pattern.pyramid", "window", window)
        # With a ratio of 2, the window of the last level is then as long as any sequence can be.
        check_count("Pattern.pyramid", "levels", levels, most=LARGEST.bit_length())
        check_count("Pattern.pyramid", "ratio", ratio)
        check_count("Pattern.pyramid", "window * ratio ** (levels - 1)", window * ratio ** (levels - 1))
        windows = (Window(window * ratio**level, ratio**level) for level in range(levels))
        return cls((*_sinks("Pattern.pyramid", sinks), *windows))

    def multiplicity(
        self, query: int, key: int, *, head: int, num_heads: int, num_kv_heads: int, causal: bool = True
    ) -> int:
        """Returns how often the key at position `key` counts for the query at position `query` of the same document.

        This is the definition, by brute force: the number of branches that show the key (`overlap="count"`) or 1 if any
        does (`"once"`); 0 for a later key under `causal`. A head's phase is the index of its key/value head.
        """
        if causal and key > query:
            return 0
        kv_head = head // (num_heads // num_kv_heads)
        pattern = self.of_kv_head(kv_head)
        count = sum(branch.shows(query, key, kv_head) for branch in pattern.branches)
        return count if pattern.overlap == "count" else min(count, 1)

    def flop_share(
        self, seq_len: int, *, num_heads: int | None = None, num_kv_heads: int | None = None, causal: bool = True
    ) -> float:
        """Returns the floating point operations of attention, as a share of exact attention's.

        Args:
            seq_len: tokens of a sequence of one document.
            num_heads: None for `num_kv_heads`.
            num_kv_heads: None for the number that the pattern has, or else `num_heads`, or else 1. Heads have different
                phases, and so may differ a little.

        Raises:
            ValueError: numbers below 1, or heads that do not divide.

        Example:
            >>> round(ra.Pattern.parse("window:512+4").flop_share(32768), 4)
            0.0312
        """
        num_kv_heads = num_kv_heads or self.num_kv_heads or num_heads or 1
        self.check_heads(num_kv_heads, "Pattern.flop_share")
        heads = num_heads or num_kv_heads, num_kv_heads
        pairs, exact = (Pattern.count_pairs(x, seq_len, *heads, causal) for x in (self, Pattern.exact()))
        return pairs / exact

    @cached_property
    def exact_lengths(self) -> tuple[float, ...]:
        """By key/value head, the most tokens of a document in which one branch shows every key; one number for equal heads."""
        if self.kv_heads:
            return tuple(own.exact_lengths[0] for own in self.kv_heads)
        if self.overlap == "count" and len(self.branches) > 1:
            return (0,)
        lengths = [x.tokens if isinstance(x, Sink) else x.length or math.inf for x in self.branches if x.dilation == 1]
        return (max(lengths),)

    def within(self, length: int) -> Pattern:
        """Returns the pattern of documents of `length` tokens: exact attention in heads where a branch shows every key.

        Example:
            >>> print(ra.Pattern.parse("window:512+4").within(512))
            exact
        """
        heads = zip(self.kv_heads or (self,), self.exact_lengths)
        own = [Pattern.exact() if length <= limit else pattern for pattern, limit in heads]
        return Pattern((), kv_heads=tuple(own)) if self.kv_heads else own[0]

    def __str__(self) -> str:
        """Returns the pattern's text, such as "pyramid:512,3"; `parse` reads it back."""
        if self.kv_heads:
            return notation.write_heads([str(pattern) for pattern in self.kv_heads])
        text = notation.write(self.branches, self.overlap)
        return notation.write_heads([text] * self.num_kv_heads) if self.num_kv_heads else text

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Reads a text: "exact", "window:512+4" (512 tokens and 4 sinks), "pyramid:512,3", "longnet:512/1,all/8".

        `hf_ring_attention.plan.notation` lists the forms. Every function that takes a pattern takes its text too.

        Raises:
            ValueError: a text that names no pattern; the message lists the forms.

        Example:
            >>> ra.Pattern.parse("window:512+4").branches
            (Sink(tokens=4), Window(length=512, dilation=1, queries='all'))
        """
        pattern: Pattern = notation.read(text, cls)
        return pattern

    def to_dict(self) -> dict[str, str]:
        """Returns {"pattern": text}; `from_dict` reads it back."""
        return {"pattern": str(self)}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Pattern:
        """Returns the pattern that `to_dict` returned.

        Raises:
            ValueError: another dict, or a text that names no pattern.
        """
        if not isinstance(d, Mapping) or d.keys() != {"pattern"}:
            got = f"keys {sorted(map(str, d))}" if isinstance(d, Mapping) else repr(d)
            raise ValueError(
                f"Pattern.from_dict: expected {{'pattern': TEXT}}, got {got}: read a text by Pattern.parse, and write branches "
                f"of version 0.2 as text"
            )
        return as_pattern(d["pattern"], "Pattern.from_dict")


def _sinks(owner: str, tokens: int) -> tuple[Branch, ...]:
    check_count(owner, "sinks", tokens, least=0)
    return (Sink(tokens),) if tokens else ()


@lru_cache(maxsize=256)  # Each call of attention may name its pattern.
def _parsed(text: str) -> Pattern:
    return Pattern.parse(text)


def as_pattern(pattern: Pattern | str, caller: str) -> Pattern:
    """Returns a pattern from a `Pattern` or its text; errors begin with the name of the caller."""
    try:
        if isinstance(pattern, str):
            return _parsed(pattern)
        return pattern if isinstance(pattern, Pattern) else Pattern.parse(pattern)
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None
