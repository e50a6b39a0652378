"""The tiles of each kind of branch, beside another one, are as often as the definition says: by exhaustion."""

import itertools

import pytest

from hf_ring_attention.plan import tiles
from hf_ring_attention.plan.branches import Segment, Sink, Window
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.plans import plan_rank
from tests.plan.test_plans import check, pairs_of
from tests.support.cases import problem_of

BRANCHES = [
    Segment(), Segment(4), Segment(6, 2), Segment(6, 3, "all"), Segment(None, 4), Segment(None, 2, "all"),
    Window(1), Window(5), Window(8, 2), Window(12, 4), Window(6, 2, "dilated"), Window(24, 8),
    Sink(3),
]  # fmt: skip
OTHERS = [(Window(1), "count"), (Window(4), "once"), (Segment(5), "once")]


@pytest.mark.drawn
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("other", "overlap"), OTHERS, ids=str)
@pytest.mark.parametrize("branch", BRANCHES, ids=str)
def test_each_branch_beside_another(branch, other, overlap, causal):
    for length, heads in itertools.product((1, 2, 5, 13, 24, 40), ((4, 2), (3, 3))):
        check(problem_of(Pattern((other, branch), overlap), length, heads=heads, causal=causal))


def test_the_example_of_tiles_is_what_is_computed():
    """Each letter of the picture is a tile, in their order."""
    lines = [line.split() for line in tiles.__doc__.splitlines() if line.strip().startswith("query ")]
    picture = [(row, column, letter) for row, words in enumerate(lines) for column, letter in enumerate(words[2:8])]
    problem = problem_of("window:3", 6)
    pairs = [pairs_of(batch, problem, [range(6)], [range(6)]) for batch in plan_rank(problem, 0).own]
    found = [(query, key, letter) for letter, of in zip("ab", pairs, strict=True) for _, _, query, key in of]
    assert sorted(found) == sorted(place for place in picture if place[2] != ".")
