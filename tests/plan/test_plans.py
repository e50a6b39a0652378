"""Plans of all ranks together cover every query-key pair as often as the definition does, in few batches and quickly."""

import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from hf_ring_attention.compute.reference import multiplicity_matrix
from hf_ring_attention.plan.branches import Window
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.plans import plan_rank, tiles_from
from hf_ring_attention.plan.problem import HeldKeys
from tests.plan.strategies import problems, query_rows
from tests.support.cases import problem_of


def pairs_of(batch, problem, query_positions, key_positions):
    """Counter of (batch row, query head, query position, key position), and what one kernel call relies on."""
    pairs, queries_seen = Counter(), Counter()
    assert batch.num_queries > 0
    assert batch.num_keys > 0
    assert batch.shape != "causal" or batch.num_queries == batch.num_keys
    assert batch.fold_size == 1 or batch.num_queries > 1
    for item in batch.items:
        assert len(set(item.batch_rows)) == len(item.batch_rows) > 0
        assert len(set(item.heads)) == len(item.heads) > 0
        assert item.copies > 0
        assert batch.fold_size == 1 or item.copies == 1
    for batch_row, head, row, key_rows in query_rows(batch, problem.group):
        assert 0 <= row < len(query_positions[batch_row])
        assert min(key_rows) >= 0 and max(key_rows) < len(key_positions[batch_row])
        queries_seen[batch_row, head, row] += 1
        query, positions = query_positions[batch_row][row], key_positions[batch_row]
        pairs.update((batch_row, head, query, positions[key]) for key in key_rows)
    assert max(queries_seen.values()) == 1, "two tiles of a batch share a query row of a head"
    return pairs


def expected(problem):
    pairs = Counter()
    for batch_row, documents in enumerate(problem.documents):
        for start, stop in documents:
            heads = problem.num_heads, problem.num_kv_heads
            counts = multiplicity_matrix(problem.pattern, stop - start, *heads, problem.causal).int()
            for head, query, key in counts.nonzero().tolist():
                pairs[batch_row, head, start + query, start + key] = int(counts[head, query, key])
    return pairs


def check(problem):
    """Every rank's tiles, own and remote, against the definition."""
    layout = problem.layout
    whole = range(layout.padded_len)
    total = Counter()
    for rank in range(layout.world_size):
        plan = plan_rank(problem, rank)
        mine = [layout.positions(rank, row) for row in range(len(problem.documents))]
        of_rank = Counter()
        for batch in plan.own:
            of_rank += pairs_of(batch, problem, mine, mine)
        for batch in plan.remote:
            elsewhere = pairs_of(batch, problem, mine, [whole] * len(mine))
            assert not any(key in mine[row] for row, *_, key in elsewhere), "a rank's own keys are asked of others"
            of_rank += elsewhere
        assert plan.pairs == of_rank.total(), (problem, rank)
        total += of_rank
    assert total == expected(problem), problem


@settings(max_examples=80)
@given(problems)
def test_all_ranks_together_are_the_definition(problem):
    check(problem)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("causal", "overlap"), [(True, "once"), (False, "count")])
def test_wide_bands(causal, overlap, rng):
    """Windows of many keys, dilated and not, in documents a few times as long, whole and over two ranks."""
    pattern = Pattern((Window(rng.randint(65, 110)), Window(2 * rng.randint(70, 110), 2)), overlap)
    layout = SequenceLayout(rng.choice(["contiguous", "zigzag"]), rng.randint(200, 260), rng.randint(1, 2))
    check(problem_of(pattern, layout, [[(3, layout.seq_len)]], (2, 2), causal=causal))


def test_batch_rows_with_equal_documents_share_items():
    rows = [((0, 5), (5, 12))]
    one, three = (plan_rank(problem_of("exact", ("contiguous", 12, 2), rows * n, (2, 2)), 1) for n in (1, 3))
    assert [len(batch.items) for batch in one.own] == [len(batch.items) for batch in three.own]
    assert {item.batch_rows for batch in three.own + three.remote for item in batch.items} == {(0, 1, 2)}
    assert three.pairs == 3 * one.pairs


@pytest.mark.parametrize("pattern", ["longnet:2048/1,8192/4,32768/16", "pyramid:512,3"])
@pytest.mark.parametrize("causal", [True, False])
def test_few_batches_planned_quickly(pattern, causal):
    """Kernel calls and planning must not eat what sparsity saves: tokens are never planned one at a time."""

    def problem(world_size=1):
        return problem_of(pattern, ("contiguous", 32768, world_size), heads=(32, 8), causal=causal)

    seconds = []
    for _ in range(3):
        plan_rank.cache_clear()
        start = time.process_time()
        plan = plan_rank(problem(), 0)
        seconds.append(time.process_time() - start)
    assert len(plan.own) + len(plan.remote) <= (12 if causal else 30)
    assert min(seconds) < 0.1
    for plan_of_rank in (plan_rank(problem(4), rank) for rank in range(4) if causal):
        assert len(plan_of_rank.own) + len(plan_of_rank.remote) <= 16
    assert plan_rank(problem(), 0) is plan, "an equal problem, made anew, finds it"


def test_a_plan_does_not_grow_with_the_dilation():
    """Residues that see the same keys are one tile, however many they are."""
    sizes = set()
    for dilation in (4, 64, 2**12):
        pattern = Pattern((Window(dilation), Window(8 * dilation, dilation)))
        plan = plan_rank(problem_of(pattern, 1 << 18, heads=(4, 4)), 0)
        sizes.add((len(plan.own), sum(len(batch.items) for batch in plan.own)))
    assert len(sizes) == 1


def test_a_step_of_generation_is_planned_in_tiles_of_its_levels_and_heads():
    """However long the cache is: a level has a tile of each phase, and each key/value head sees each key once at most."""
    levels, heads = 6, 8
    for length in (131072, 1 << 20):
        problem = problem_of(Pattern.pyramid(512, levels), length, heads=(32, heads))
        batches = tiles_from(replace(problem, held=HeldKeys.whole(length, 1, length)), 0, 0)
        assert sum(batch.num_tiles for batch in batches) <= (levels + 1) * heads
        assert len(batches) <= levels + 2
