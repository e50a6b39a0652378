"""What a pattern in one key/value head costs: pairs of a whole text, keys of the next token, or rows that a ring moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ...plan.branches import Window
from ...plan.layouts import SequenceLayout
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
            text; and "bytes" the rows of keys and values that the ranks of a ring take from each other. They are divided in a
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
        # The other heads see nothing but each query itself, which is a pair a query, and no row of another rank.
        alone = [Pattern((Window(1),))] * num_kv_heads
        alone[kv_head] = pattern
        by_head = pattern if num_kv_heads == 1 else Pattern.by_kv_head(alone)
        if self.of == "bytes":
            assert self.ranks is not None
            return _rows_moved(by_head, num_kv_heads, self.seq_len, self.ranks)
        if self.of == "cache_reads":
            return (
                _pairs_shown(by_head, num_kv_heads, self.seq_len + 1)
                - _pairs_shown(by_head, num_kv_heads, self.seq_len)
                - (num_kv_heads - 1)
            )
        return _pairs_shown(by_head, num_kv_heads, self.seq_len) - (num_kv_heads - 1) * self.seq_len

    def of_menu(self, menu: Sequence[Pattern], num_kv_heads: int) -> np.ndarray:
        """Returns [num_kv_heads, len(menu)] int64: the cost of each pattern in each head."""
        return np.array([[self.of_pattern(one, head, num_kv_heads) for one in menu] for head in range(num_kv_heads)])


@lru_cache(maxsize=8192)
def _pairs_shown(pattern: Pattern, num_kv_heads: int, seq_len: int) -> int:
    return pairs_of_row(pattern, seq_len, num_kv_heads, num_kv_heads, True)


@lru_cache(maxsize=8192)
def _rows_moved(pattern: Pattern, num_kv_heads: int, seq_len: int, ranks: int) -> int:
    layout = SequenceLayout("zigzag", seq_len, ranks)
    problem = Problem(pattern, layout, (((0, seq_len),),), num_heads=num_kv_heads, num_kv_heads=num_kv_heads)
    return sum(map(sum, exchanged(problem)))
