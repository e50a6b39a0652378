"""The knapsack: one pattern for each group of heads, at the least harm that a budget allows."""

from __future__ import annotations

import numpy as np

#: Of the changes of single groups, how many are tried in pairs: the best of those that gain, and of those that make room.
_TRIED_IN_PAIRS = 256
#: How far sums may be from what they would be without rounding, relatively.
_ROUNDING = 1e-9


def choose(scores: np.ndarray, costs: np.ndarray, budget: float, products: np.ndarray | None = None) -> np.ndarray:
    """Returns [G] ints: the pattern of each group, so that their costs add up to no more than the budget.

    What the patterns c do harm is sum_g scores[g, c_g] + 1/2 sum_g,h products[g, c_g, h, c_h], the second sum only where there
    are products. A price on costs is found by bisection, at which each group, as if it were alone, takes the pattern of the
    least harm + price * cost. From there on, what is left of the budget is spent on the changes that gain most, and on
    exchanges, of which one makes room for another. The result follows from the arguments alone.

    Args:
        scores: [G, P] float64, in any unit.
        costs: [G, P] float64 or ints.
        budget: at least the sum of each group's least cost.
        products: [G, P, G, P], symmetric, without negative eigenvalues.

    Raises:
        ValueError: a smaller budget; scores, products or costs that are no finite numbers.
    """
    least = float(costs.min(1).sum())
    if least > budget * (1 + _ROUNDING):
        raise ValueError(f"the cheapest patterns cost {least:g} together, and the budget is {budget:g}")
    budget = max(budget, least)
    if not all(np.isfinite(x).all() for x in (scores, costs, *(() if products is None else (products,)))):
        raise ValueError("scores, products and costs must be finite, or no price would keep the budget")
    alone = scores if products is None else scores + squares_of(products) / 2
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
    return _improved(scores, costs, budget, products, _at_price(alone, costs, high))


def squares_of(products: np.ndarray) -> np.ndarray:
    """Returns [G, P] of [G, P, G, P]: the products of each pattern with itself."""
    groups, patterns = products.shape[:2]
    return np.diagonal(products.reshape(groups * patterns, -1)).reshape(groups, patterns)


def _at_price(scores: np.ndarray, costs: np.ndarray, price: float) -> np.ndarray:
    total = scores + price * costs
    # Where several patterns are equally good, the cheapest of them.
    return np.lexsort((costs, total), axis=1)[:, 0]


def _cost(costs: np.ndarray, chosen: np.ndarray) -> float:
    return float(np.take_along_axis(costs, chosen[:, None], 1).sum())


def _improved(
    scores: np.ndarray, costs: np.ndarray, budget: float, products: np.ndarray | None, chosen: np.ndarray
) -> np.ndarray:
    """Spends what is left of a budget, by single changes and by pairs of changes, until none of them lowers the harm."""
    chosen = chosen.copy()
    num_patterns = scores.shape[1]
    groups = np.repeat(np.arange(len(scores)), num_patterns)
    patterns = np.tile(np.arange(num_patterns), len(scores))
    together = None if products is None else _Together(products, chosen)
    tiny = 1e-12 * max(float(np.abs(scores).max()), 1e-300)
    if together is not None:
        tiny = max(tiny, 1e-12 * float(squares_of(together.products).max()))
    while True:
        gain = np.take_along_axis(scores, chosen[:, None], 1) - scores
        if together is not None:
            gain = gain - together.harm_of_changes()
        gain = gain.ravel()
        price = (costs - np.take_along_axis(costs, chosen[:, None], 1)).ravel()
        room = budget - _cost(costs, chosen)
        best, moves = tiny, tuple[int, ...]()
        fitting = np.flatnonzero((price <= room) & (gain > tiny))
        if len(fitting):
            first = fitting[gain[fitting].argmax()]
            best, moves = gain[first], (int(first),)
        freeing = np.flatnonzero(price < 0)
        # Only what gains something may take the room that another change makes; the best few are enough.
        gaining = np.flatnonzero(gain > tiny)
        gaining = gaining[np.argsort(-gain[gaining], kind="stable")][:_TRIED_IN_PAIRS]
        freeing = freeing[np.argsort(gain[freeing] / price[freeing], kind="stable")][:_TRIED_IN_PAIRS]
        if len(gaining) and len(freeing):
            both = gain[gaining][:, None] + gain[freeing]
            if together is not None:
                both -= together.products_of_changes(gaining, freeing)
            allowed = (price[gaining][:, None] + price[freeing] <= room) & (groups[gaining][:, None] != groups[freeing])
            both = np.where(allowed, both, -np.inf)
            place = np.unravel_index(both.argmax(), both.shape)
            if both[place] > best + tiny:
                moves = (int(gaining[place[0]]), int(freeing[place[1]]))
        if not moves:
            return chosen
        for move in moves:
            group, pattern = groups[move], patterns[move]
            if together is not None:
                together.change(group, pattern)
            chosen[group] = pattern


class _Together:
    """What changes of chosen patterns do by the products, the other groups as they are.

    Args:
        products: [G, P, G, P].
        chosen: [G] the patterns to begin with.
    """

    def __init__(self, products: np.ndarray, chosen: np.ndarray) -> None:
        self.products, self._chosen = products, chosen.copy()
        self._every = np.arange(len(chosen))
        self._flat = products.reshape(-1, len(chosen) * products.shape[1])
        self._squares = squares_of(products)
        self._of_all = products[:, :, self._every, chosen].sum(2)  # [G, P]: each pattern's product with all chosen ones

    def harm_of_changes(self) -> np.ndarray:
        """Returns [G, P]: what it does harm that a group takes a pattern in the place of its own."""
        every, chosen = self._every, self._chosen
        own = self.products[every, :, every, chosen]  # [G, P]
        squares = self._squares + self._squares[every, chosen][:, None] - 2 * own
        return self._of_all - self._of_all[every, chosen][:, None] + squares / 2

    def products_of_changes(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns [m, k]: the products of two changes, each a number in G * P; what both do beyond what each does."""
        num_patterns = self.products.shape[1]
        mine, other = (x // num_patterns * num_patterns + self._chosen[x // num_patterns] for x in (first, second))
        flat = self._flat
        return (
            flat[np.ix_(first, second)]
            - flat[np.ix_(first, other)]
            - flat[np.ix_(mine, second)]
            + flat[np.ix_(mine, other)]
        )

    def change(self, group: int, pattern: int) -> None:
        """Has a group take a pattern."""
        self._of_all += self.products[:, :, group, pattern] - self.products[:, :, group, self._chosen[group]]
        self._chosen[group] = pattern
