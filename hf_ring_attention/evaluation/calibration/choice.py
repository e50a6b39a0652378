"""The knapsack: one pattern for each group of heads, with the least harm that a budget allows; and what patterns cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import numpy as np

from ...plan.branches import Segment, Window
from ...plan.kept import most_rows, period_of
from ...plan.layouts import SequenceLayout
from ...plan.patterns import Pattern
from ...plan.plans import pairs_of_row
from ...plan.problem import Problem
from ...plan.traffic import exchanged

#: The cost that a budget limits, see `Cost`.
BudgetOf = Literal["flops", "cache_reads", "cache", "bytes"]
#: How many single changes are tried in pairs: the best that gain, and the best that make room for another.
_TRIED_IN_PAIRS = 256
#: How far rounding may move a sum, relatively.
_ROUNDING = 1e-9


def choose(scores: np.ndarray, costs: np.ndarray, budget: float, products: np.ndarray) -> np.ndarray:
    """Returns [G] ints: the pattern of each group, so that their costs add up to no more than the budget.

    The harm of patterns c is sum_g scores[g, c_g] + 1/2 sum_g,h products[g, c_g, h, c_h]. Bisection finds a price on costs at
    which each group, as if it were alone, takes the pattern with the least harm + price * cost. What is left of the budget
    then pays for the changes that gain most, and for exchanges, in which one change makes room for another.

    `scores` and `costs` are [G, P]; `products` are [G, P, G, P], symmetric, without negative eigenvalues.
    """
    least = float(costs.min(1).sum())
    if least > budget * (1 + _ROUNDING):
        raise ValueError(f"the cheapest patterns cost {least:g} together, and the budget is {budget:g}")
    budget = max(budget, least)
    if not all(np.isfinite(x).all() for x in (scores, costs, products)):
        raise ValueError("scores, products and costs must be finite, or no price would keep the budget")
    alone = scores + squares_of(products) / 2
    # At a high enough price each group takes its cheapest pattern, the best of them by score.
    low, high = 0.0, 1.0
    while _cost(costs, _at_price(alone, costs, high)) > budget:
        low, high = high, 4 * high
    for _ in range(100):
        price = (low + high) / 2
        if _cost(costs, _at_price(alone, costs, price)) > budget:
            low = price
        else:
            high = price
    chosen = _at_price(alone, costs, high)
    # Smaller gains are rounding errors.
    least_gain = 1e-12 * max(float(np.abs(scores).max()), float(squares_of(products).max()), 1e-300)
    flat = products.reshape(scores.size, scores.size)
    while moves := _best_moves(scores.ravel(), costs.ravel(), budget, flat, chosen, least_gain):
        for move in moves:
            group, chosen_pattern = divmod(move, scores.shape[1])
            chosen[group] = chosen_pattern
    return chosen


def squares_of(products: np.ndarray) -> np.ndarray:
    """Returns [G, P] of [G, P, G, P]: the products of each pattern with itself."""
    groups, patterns = products.shape[:2]
    return np.diagonal(products.reshape(groups * patterns, -1)).reshape(groups, patterns)


def _at_price(scores: np.ndarray, costs: np.ndarray, price: float) -> np.ndarray:
    """Returns [G]: the best pattern of each group at a price, the cheapest of equally good ones."""
    return np.lexsort((costs, scores + price * costs), axis=1)[:, 0]


def _cost(costs: np.ndarray, chosen: np.ndarray) -> float:
    return float(costs[np.arange(len(chosen)), chosen].sum())


def _best_moves(
    scores: np.ndarray, costs: np.ndarray, budget: float, products: np.ndarray, chosen: np.ndarray, least_gain: float
) -> list[int]:
    """Returns the change, or the two changes, that lower the harm most within the budget; none if nothing lowers it.

    A change is a number in G * P: group * P + the pattern that it takes. `scores` and `costs` are [G * P], and `products` are
    [G * P, G * P].
    """
    changes, num_patterns = np.arange(len(scores)), len(scores) // len(chosen)
    before = changes // num_patterns * num_patterns + np.repeat(chosen, num_patterns)
    taken = before[::num_patterns]

    def together(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns the harm of two changes together, beyond the harm of each by itself."""
        others = before[first], before[second]
        return products[first, second] - products[first, others[1]] - products[others[0], second] + products[others]

    pulls = products[:, taken].sum(1)
    gain = scores[before] - scores + pulls[before] - pulls - together(changes, changes) / 2
    price, room = costs - costs[before], budget - float(costs[taken].sum())
    best, moves = least_gain, list[int]()
    fitting = np.flatnonzero((price <= room) & (gain > least_gain))
    if len(fitting):
        first = int(fitting[gain[fitting].argmax()])
        best, moves = gain[first], [first]
    # Only a change that gains may take the room that another makes; the best few are enough.
    gaining, freeing = np.flatnonzero(gain > least_gain), np.flatnonzero(price < 0)
    gaining = gaining[np.argsort(-gain[gaining], kind="stable")][:_TRIED_IN_PAIRS, None]
    freeing = freeing[np.argsort(gain[freeing] / price[freeing], kind="stable")][:_TRIED_IN_PAIRS]
    if len(gaining) and len(freeing):
        allowed = (price[gaining] + price[freeing] <= room) & (before[gaining] != before[freeing])
        both = np.where(allowed, gain[gaining] + gain[freeing] - together(gaining, freeing), -np.inf)
        row, column = np.unravel_index(both.argmax(), both.shape)
        if both[row, column] > best + least_gain:
            moves = [int(gaining[row, 0]), int(freeing[column])]
    return moves


# ---- costs


@dataclass(frozen=True)
class Cost:
    """Counts the cost of a pattern in one key/value head, for a text of `seq_len` tokens that is a single causal document.

    "flops" counts the query-key pairs of one query head. "cache_reads" counts the pairs of the query behind the text; in
    segments it takes the mean of all places, which are as often nearly empty as nearly full. "cache" counts the most rows that
    a `PatternCache` of the text holds for the head. "bytes" counts the rows of keys and values that the ranks of a ring receive
    from each other in a zigzag. Costs of heads differ by their phases.
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
        if self.of == "cache":
            own = pattern.of_kv_head(kv_head)
            return most_rows(own, kv_head % period_of(own), self.seq_len)
        lengths = (branch.length for branch in pattern.branches if isinstance(branch, Segment))
        period = max((length for length in lengths if length is not None and length <= self.seq_len), default=1)
        # The mean over one query in each place of the longest segment.
        pairs = partial(_pairs_in_head, pattern, kv_head, num_kv_heads)
        return -((pairs(self.seq_len) - pairs(self.seq_len + period)) // period)


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
