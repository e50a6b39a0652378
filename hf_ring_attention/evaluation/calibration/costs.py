"""The cost of a pattern in one key/value head: pairs of a whole text, keys of the next token, or rows that a ring moves."""

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

#: What a budget limits, as a share of exact attention's cost: the FLOPs of attention over a whole text, the rows of the
#: key/value cache that attention reads for the token after it, or the bytes that the ranks of a ring exchange.
BudgetOf = Literal["flops", "cache_reads", "bytes"]


@dataclass(frozen=True)
class Cost:
    """Counts the cost of a pattern in one key/value head, for a text of `seq_len` tokens that is a single causal document.

    "flops" counts the query-key pairs of one query head. "cache_reads" counts the pairs of the query behind the text; in
    segments it takes the mean of all places, which are as often nearly empty as nearly full. "bytes" counts the rows of keys
    and values that the ranks of a ring receive from each other in a zigzag. Heads have different phases in dilated branches, so
    their costs may differ a little.
    """

    of: BudgetOf
    seq_len: int
    ranks: int | None = None

    def of_exact(self) -> int:
        """Returns the cost of exact attention in one head."""
        return self.of_pattern(Pattern.exact(), 0, 1)

    def of_menu(self, menu: Sequence[Pattern], num_kv_heads: int) -> np.ndarray:
        """Returns [num_kv_heads, len(menu)] int64: the cost of each pattern in each head."""
        heads = range(num_kv_heads)
        return np.array([[self.of_pattern(pattern, head, num_kv_heads) for pattern in menu] for head in heads])

    def of_pattern(self, pattern: Pattern, kv_head: int, num_kv_heads: int) -> int:
        """Returns the cost of a pattern in one of several key/value heads."""
        if self.of == "bytes":
            assert self.ranks is not None
            return _rows_moved(_in_one_head(pattern, kv_head, num_kv_heads), num_kv_heads, self.seq_len, self.ranks)
        if self.of == "flops":
            return _pairs_in_head(pattern, kv_head, num_kv_heads, self.seq_len)
        return sum(self._reads(part, kv_head, num_kv_heads) for part in parts_of(pattern))

    def _reads(self, part: Part, kv_head: int, num_kv_heads: int) -> int:
        """Returns the keys that a part of a pattern shows to the query behind the text, the last one of its row."""
        if part.queries.but:
            return 0
        if part.queries.within:
            return self.seq_len + 1
        lengths = (branch.length for branch in part.pattern.branches if isinstance(branch, Segment))
        period = max((length for length in lengths if length is not None and length <= self.seq_len), default=1)
        # The mean over one query in each place of the longest segment.
        pairs, more = (
            _pairs_in_head(part.pattern, kv_head, num_kv_heads, self.seq_len + tokens) for tokens in (0, period)
        )
        return -((pairs - more) // period)


def _in_one_head(pattern: Pattern, kv_head: int, num_kv_heads: int) -> Pattern:
    """Returns a pattern for one head; a query of the other heads sees only itself, and no row of another rank."""
    patterns = [Pattern((Window(1),))] * num_kv_heads
    patterns[kv_head] = pattern
    return Pattern.by_kv_head(patterns)


@lru_cache(maxsize=8192)
def _pairs_in_head(pattern: Pattern, kv_head: int, num_kv_heads: int, tokens: int) -> int:
    one_head = _in_one_head(pattern, kv_head, num_kv_heads)
    return pairs_of_row(one_head, tokens, num_kv_heads, num_kv_heads, causal=True) - (num_kv_heads - 1) * tokens


@lru_cache(maxsize=8192)
def _rows_moved(pattern: Pattern, num_kv_heads: int, seq_len: int, ranks: int) -> int:
    layout = SequenceLayout("zigzag", seq_len, ranks)
    problem = Problem(pattern, layout, (((0, seq_len),),), num_heads=num_kv_heads, num_kv_heads=num_kv_heads)
    return sum(map(sum, exchanged(problem)))
