"""The knapsack: one pattern for each group of heads, with the least harm that a budget allows."""

from __future__ import annotations

import numpy as np

#: How many single changes are tried in pairs: the best that gain, and the best that make room for another.
_TRIED_IN_PAIRS = 256
#: How far rounding may move a sum, relatively.
_ROUNDING = 1e-9


def choose(scores: np.ndarray, costs: np.ndarray, budget: float, products: np.ndarray) -> np.ndarray:
    """Returns [G] ints: the pattern of each group, so that their costs add up to no more than the budget.

    The harm of patterns c is sum_g scores[g, c_g] + 1/2 sum_g,h products[g, c_g, h, c_h]. Bisection finds a price on costs at
    which each group, as if it were alone, takes the pattern with the least harm + price * cost. What is left of the budget
    then pays for the changes that gain most, and for exchanges, in which one change makes room for another. The result
    depends on the arguments alone.

    Args:
        scores, costs: [G, P] float64 or ints, in any unit.
        budget: at least the sum of each group's least cost.
        products: [G, P, G, P], symmetric, without negative eigenvalues.
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
    while moves := _best_moves(scores, costs, budget, products, chosen, least_gain):
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

    A change is a number in G * P: group * P + the pattern that it takes.
    """
    every, (num_groups, num_patterns) = np.arange(len(chosen)), scores.shape
    groups = np.repeat(np.arange(num_groups), num_patterns)
    gain = (scores[every, chosen][:, None] - scores - _harm_of_changes(products, chosen)).ravel()
    price = (costs - costs[every, chosen][:, None]).ravel()
    room = budget - _cost(costs, chosen)
    best, moves = least_gain, list[int]()
    fitting = np.flatnonzero((price <= room) & (gain > least_gain))
    if len(fitting):
        first = int(fitting[gain[fitting].argmax()])
        best, moves = gain[first], [first]
    # Only a change that gains may take the room that another makes; the best few are enough.
    gaining, freeing = np.flatnonzero(gain > least_gain), np.flatnonzero(price < 0)
    gaining = gaining[np.argsort(-gain[gaining], kind="stable")][:_TRIED_IN_PAIRS]
    freeing = freeing[np.argsort(gain[freeing] / price[freeing], kind="stable")][:_TRIED_IN_PAIRS]
    if len(gaining) and len(freeing):
        both = gain[gaining][:, None] + gain[freeing] - _products_of_changes(products, chosen, gaining, freeing)
        allowed = (price[gaining][:, None] + price[freeing] <= room) & (groups[gaining][:, None] != groups[freeing])
        both = np.where(allowed, both, -np.inf)
        row, column = np.unravel_index(both.argmax(), both.shape)
        if both[row, column] > best + least_gain:
            moves = [int(gaining[row]), int(freeing[column])]
    return moves


def _harm_of_changes(products: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns [G, P]: the harm, by the products, if one group takes this pattern and the others stay."""
    every, squares = np.arange(len(chosen)), squares_of(products)
    with_chosen = products[:, :, every, chosen]  # [G, P, G]
    of_all, own = with_chosen.sum(2), with_chosen[every, :, every]
    change = squares + squares[every, chosen][:, None] - 2 * own
    return of_all - of_all[every, chosen][:, None] + change / 2


def _products_of_changes(products: np.ndarray, chosen: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns [m, k]: the harm of each two changes, beyond the harm of each by itself."""
    num_patterns = products.shape[1]
    flat = products.reshape(-1, products.shape[0] * num_patterns)
    before, other_before = (x // num_patterns * num_patterns + chosen[x // num_patterns] for x in (first, second))
    return (
        flat[np.ix_(first, second)]
        - flat[np.ix_(first, other_before)]
        - flat[np.ix_(before, second)]
        + flat[np.ix_(before, other_before)]
    )
