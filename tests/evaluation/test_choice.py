"""The knapsack keeps its budget, knows what groups change together, and counts the costs of the definition."""

import itertools
import math

import numpy as np
import pytest

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import multiplicity_matrix
from hf_ring_attention.evaluation.calibration.choice import Cost, choose, squares_of
from hf_ring_attention.plan.problem import Problem
from hf_ring_attention.plan.traffic import exchanged
from tests.support.calibrations import MENU
from tests.support.refusals import refused


def nothing_together(costs):
    """Products of groups that change nothing together."""
    return np.zeros((*costs.shape, *costs.shape))


def drawn_costs(rng, fewest=1):
    """The numbers of groups and patterns, the costs of each, and a budget between the cheapest and the dearest."""
    groups, patterns = rng.randint(fewest, 5), rng.randint(2, 4)
    costs = np.array([[rng.randint(1, 30) for _ in range(patterns)] for _ in range(groups)])
    return groups, patterns, costs, rng.uniform(costs.min(1).sum(), costs.max(1).sum())


def test_a_choice_is_within_its_budget_and_nearly_the_best(rng):
    for _ in range(20):
        groups, patterns, costs, budget = drawn_costs(rng)
        scores = np.array([[rng.random() * rng.choice([1, -0.2]) for _ in range(patterns)] for _ in range(groups)])
        chosen, every = choose(scores, costs, budget, nothing_together(costs)), np.arange(groups)
        assert costs[every, chosen].sum() <= budget
        others = map(np.array, itertools.product(range(patterns), repeat=groups))
        harms = [(scores[every, x].sum(), (x != chosen).sum()) for x in others if costs[every, x].sum() <= budget]
        # A knapsack by prices may lose a change of a single group; changes of two groups are tried.
        assert scores[every, chosen].sum() <= min(harms)[0] + np.ptp(scores, axis=1).max()
        assert scores[every, chosen].sum() <= min(harm for harm, count in harms if count <= 2) + 1e-9
        assert np.array_equal(chosen, choose(scores, costs, budget, nothing_together(costs)))


def test_the_cheapest_patterns_fit_a_budget_that_rounding_lowers():
    costs = np.full((90, 2), 7.0)
    costs[:, 1] = 10
    budget = 0.7 * 90 * 10  # 630 exactly, or by an ulp less
    for rounded in (budget, np.nextafter(np.nextafter(630, 0), 0)):
        assert choose(np.zeros((90, 2)), costs, float(rounded), nothing_together(costs)).tolist() == [0] * 90
    told = "the cheapest patterns cost 630 together, and the budget is 629"
    refused(told, choose, np.zeros((90, 2)), costs, 629, nothing_together(costs))


def harm_of(products, chosen):
    every = np.arange(len(chosen))
    return products[every, chosen][:, every, chosen].sum() / 2


def random_products(rng, groups, patterns, tokens=6):
    """Of few tokens, so that the changes of groups have much in common."""
    generator = np.random.default_rng(rng.randrange(2**32))
    d = generator.normal(size=(groups, patterns, tokens)) * generator.exponential(size=(groups, patterns, 1))
    return np.einsum("gpn,hqn->gphq", d, d)


def test_a_choice_of_what_groups_change_together_cannot_be_bettered_by_a_change(rng):
    won = 0
    for _ in range(20):
        groups, patterns, costs, budget = drawn_costs(rng, 2)
        products = random_products(rng, groups, patterns)
        scores = np.array([[rng.uniform(-0.1, 0.1) for _ in range(patterns)] for _ in range(groups)])
        every = np.arange(groups)

        def harm(chosen, scores=scores, every=every, products=products):
            return scores[every, chosen].sum() + harm_of(products, chosen)

        chosen = choose(scores, costs, budget, products)
        assert costs[every, chosen].sum() <= budget
        others = [np.array(one) for one in itertools.product(range(patterns), repeat=groups)]
        near = [one for one in others if costs[every, one].sum() <= budget and (one != chosen).sum() == 1]
        assert all(harm(chosen) <= harm(one) + 1e-9 for one in near)
        alone = choose(scores + squares_of(products) / 2, costs, budget, nothing_together(costs))
        assert harm(chosen) <= harm(alone) + np.ptp(scores + squares_of(products), axis=1).max()
        won += harm(chosen) < harm(alone) - 1e-9
    assert won  # The best choice of each group by itself is not the best for all groups together.


def test_changes_that_cancel_are_chosen_together():
    d = np.zeros((3, 2, 1))  # The second pattern changes nothing; the first ones of two groups cancel.
    d[:, 0, 0] = 3.0, -3.0, 1.0
    products = np.einsum("gpn,hqn->gphq", d, d)
    costs = np.array([[1, 2]] * 3)
    assert choose(np.zeros((3, 2)), costs, 4, products).tolist() == [0, 0, 1]
    assert choose(squares_of(products) / 2, costs, 4, nothing_together(costs)).tolist() != [0, 0, 1]


def test_a_choice_by_scores_that_are_no_numbers_ends():
    products = np.full((2, 2, 2, 2), np.nan)
    products[:, 1, :, 1] = 0
    costs = np.array([[1, 4], [1, 4]])
    refused("must be finite", choose, np.zeros((2, 2)), costs, 4.0, products)
    refused("must be finite", choose, np.array([[0, np.inf], [0, 1]]), costs, 4.0, np.zeros((2, 2, 2, 2)))


@pytest.mark.parametrize("of", ["flops", "cache_reads"])
def test_costs_are_the_pairs_of_the_definition(of, rng):
    """Behind a text, a query is the last of its document; in segments, the cost is the mean over all places."""
    length = rng.randint(20, 60)
    menu = [ra.Pattern.parse(one) for one in MENU]
    costs = Cost(of, length).of_menu(menu, 3)
    for head, number in itertools.product(range(3), range(len(menu))):
        pattern = menu[number]

        def seen(query, head=head, pattern=pattern):
            heads = {"head": head, "num_heads": 3, "num_kv_heads": 3}
            return sum(pattern.multiplicity(query, key, **heads) for key in range(query + 1))

        if of == "flops":
            expected = sum(map(seen, range(length)))
        else:
            segments = [branch.length or 0 for branch in pattern.branches if isinstance(branch, ra.Segment)]
            period = max([one for one in segments if 0 < one <= length], default=1)
            expected = math.ceil(sum(map(seen, range(length, length + period))) / period)
        assert costs[head, number] == expected


def test_the_cost_of_a_cache_is_the_most_rows_that_later_queries_see(rng):
    length = rng.randint(20, 60)
    others = ("exact", "branches:window=4,window=24/3:dilated", "longnet:8/1,32/2")
    menu = [ra.Pattern.parse(one) for one in (*MENU, *others)]
    costs = Cost("cache", length).of_menu(menu, 3)
    for head, number in itertools.product(range(3), range(len(menu))):
        pattern, period = menu[number], math.lcm(*(branch.dilation for branch in menu[number].branches))
        heads = {"head": head, "num_heads": max(3, period), "num_kv_heads": max(3, period)}
        seen = np.zeros((3 * length, length), dtype=bool)
        for query, key in itertools.product(range(3 * length), range(length)):
            seen[query, key] = pattern.multiplicity(query, key, **heads) > 0
        kept = [int(seen[tokens:, :tokens].any(0).sum()) for tokens in range(length)]
        assert costs[head, number] == max(kept) + 1  # the new token beside the rows of those before
    assert costs[:, len(MENU)].tolist() == [length] * 3


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_bytes_are_the_rows_that_ranks_need_of_each_other(ranks, rng):
    """By the definition, and as the plan of a layer with all these patterns counts them."""
    length, heads = rng.randint(40, 90), 3
    menu = [ra.Pattern.parse(one) for one in MENU]
    cost = Cost("bytes", length, ranks)
    costs = cost.of_menu(menu, heads)
    layout = ra.SequenceLayout("zigzag", length, ranks)
    positions = [[token for token in layout.positions(rank) if token < length] for rank in range(ranks)]
    for head, number in itertools.product(range(heads), range(len(menu))):
        seen = multiplicity_matrix(menu[number], length, heads, heads, True)[head] > 0
        needed = sum(int(seen[own].any(0).sum()) - int(seen[own].any(0)[own].sum()) for own in positions)
        assert costs[head, number] == needed
    layer = [rng.randrange(len(menu)) for _ in range(heads)]
    pattern = ra.Pattern.by_kv_head([menu[number] for number in layer])
    problem = Problem(pattern, layout, (((0, length),),), num_heads=heads, num_kv_heads=heads)
    assert costs[range(heads), layer].sum() == sum(map(sum, exchanged(problem)))
    assert cost.of_exact() == costs[0, MENU.index("exact")] == costs.max()
