"""What a pattern in one key/value head costs: pairs of a whole text, keys of the next token, or rows that a ring moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ...plan.branches import Segment, Window
from ...plan.layouts import SequenceLayout
from ...plan.parts import Part, parts_of
from ...plan.patterns import Pattern
from ...plan.plans import pairs_of_row
from ...plan.problem import Problem
from ...plan.traffic import exchanged

#: What a budget limits, as a share of what exact attention takes: the FLOPs of attention over a whole text, the rows of the
#: key/value cache that attention reads for the next token after it, or the bytes of a ring.
BudgetOf = Literal["flops", "cache_reads", "bytes"]


@dataclass(frozen=True)
class Cost:
    """What is counted of a pattern in one key/value head, for a text that is a single causal document.

    Heads have different phases in dilated branches, so that their costs may differ a little.

    Attributes:
        of: "flops" counts the query-key pairs of all queries of one query head; "cache_reads" those of the query behind the
            text, where segments have the mean of all places in them, since they are as often nearly empty as nearly full;
            and "bytes" the rows of keys and values that the ranks of a ring take from each other. They are divided in a
            zigzag, as they are for layers of which some attend to all tokens.
        seq_len: tokens of the text.
        ranks: of "bytes", those of the ring.
    """

    of: BudgetOf
    seq_len: int
    ranks: int | None = None

    def of_exact(self) -> int:
        """Returns the cost of exact attention in one head."""
        return self.of_pattern(Pattern.exact(), 0, 1)

    def of_pattern(self, pattern: Pattern, kv_head: int, num_kv_heads: int) -> int:
        """Returns the cost of a pattern in one of so many key/value heads."""
        if self.of == "bytes":
            assert self.ranks is not None
            return _rows_moved(_in_one_head(pattern, kv_head, num_kv_heads), num_kv_heads, self.seq_len, self.ranks)
        if self.of == "cache_reads":
            return sum(self._reads(part, kv_head, num_kv_heads) for part in parts_of(pattern))
        return self._pairs(pattern, kv_head, num_kv_heads, self.seq_len)

    def _pairs(self, pattern: Pattern, kv_head: int, num_kv_heads: int, tokens: int) -> int:
        by_head = _in_one_head(pattern, kv_head, num_kv_heads)
        return _pairs_shown(by_head, num_kv_heads, tokens) - (num_kv_heads - 1) * tokens

    def _reads(self, part: Part, kv_head: int, num_kv_heads: int) -> int:
        """Returns the keys that a part of a pattern shows the query behind the text, which is the last one of its row."""
        if part.queries.but:
            return 0
        if part.queries.within:
            return self.seq_len + 1
        lengths = (branch.length for branch in part.pattern.branches if isinstance(branch, Segment))
        period = max((length for length in lengths if length is not None and length <= self.seq_len), default=1)
        # The pairs of so many queries behind the text: one in each place of the longest segment, of which the mean is taken.
        more = [self._pairs(part.pattern, kv_head, num_kv_heads, self.seq_len + tokens) for tokens in (0, period)]
        return -((more[0] - more[1]) // period)

    def of_menu(self, menu: Sequence[Pattern], num_kv_heads: int) -> np.ndarray:
        """Returns [num_kv_heads, len(menu)] int64: the cost of each pattern in each head."""
        return np.array([[self.of_pattern(one, head, num_kv_heads) for one in menu] for head in range(num_kv_heads)])


def _in_one_head(pattern: Pattern, kv_head: int, num_kv_heads: int) -> Pattern:
    """Returns a pattern for one of so many key/value heads; the others see each query itself, and no row of another rank."""
    if num_kv_heads == 1:
        return pattern
    alone = [Pattern((Window(1),))] * num_kv_heads
    alone[kv_head] = pattern
    return Pattern.by_kv_head(alone)


@lru_cache(maxsize=8192)
def _pairs_shown(pattern: Pattern, num_kv_heads: int, seq_len: int) -> int:
    return pairs_of_row(pattern, seq_len, num_kv_heads, num_kv_heads, True)


@lru_cache(maxsize=8192)
def _rows_moved(pattern: Pattern, num_kv_heads: int, seq_len: int, ranks: int) -> int:
    layout = SequenceLayout("zigzag", seq_len, ranks)
    problem = Problem(pattern, layout, (((0, seq_len),),), num_heads=num_kv_heads, num_kv_heads=num_kv_heads)
    return sum(map(sum, exchanged(problem)))
