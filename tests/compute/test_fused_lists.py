"""The lists of the fused kernels have each pair of a query and a key as often as the plan's tiles, whatever the blocks."""

import itertools
import random

import numpy as np
import pytest

from hf_ring_attention.compute.fused.lists import Sizes, heads_of_an_item, work_lists
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.plans import of_heads, plan_rank, tiles_from
from hf_ring_attention.plan.problem import HeldKeys, Problem
from tests.support.cases import random_case, random_pieces, with_heads
from tests.support.fused import SMALL_BLOCKS, random_blocks

LAYOUTS = ("contiguous", "zigzag", "documents")


def pairs_of_tiles(batches, sizes):
    """How often each query row sees each key row, [B, H, query rows, key rows], by the words of `TileBatch`."""
    count = np.zeros((sizes.batch, sizes.heads, sizes.query_rows, sizes.key_rows), np.int64)
    for batch in batches:
        nq, nk = batch.num_queries, batch.num_keys
        for item in batch.items:
            for b, head, copy in itertools.product(item.batch_rows, item.heads, range(item.copies)):
                heads = [head] if batch.per_query_head else range(head * sizes.group, (head + 1) * sizes.group)
                for i, row in itertools.product(range(nq), range(batch.fold_size)):
                    x = item.query_row + copy + i * batch.query_stride + row
                    seen = {"full": range(nk), "causal": range(i + 1), "band": range(i, i + nk - nq + 1)}[batch.shape]
                    for hq, j in itertools.product(heads, seen):
                        count[b, hq, x, item.key_row + j * batch.key_stride] += 1
    return count


def pairs_of_items(lists, sizes, places, complete):
    """The same by the items of all launches, and by the key items; `places` finds the row of a place in a payload."""
    by_items, by_key_items = (
        np.zeros((sizes.batch, sizes.heads, sizes.query_rows, sizes.key_rows), np.int64) for _ in range(2)
    )

    def see(count, tile, b, hq, hk, x, keys):
        q0, qs, fold, nq, k0, ks, lo0, ls, hi0, hs, nk, _ = tile
        i = (x - q0) // qs
        if not (x >= q0 and i < nq and (x - q0) % qs < fold):
            return 0
        seen = [j for j in keys if max(lo0 + ls * i, 0) <= j < min(hi0 + hs * i, nk)]
        for j in seen:
            assert hk == hq // sizes.group
            row = k0 + j * ks
            count[b, hq, x, row if places is None else places[b, hk, row]] += 1
        return len(seen)

    tiles = lists.tiles.tolist()
    for number, launch in enumerate(lists.launches):
        visited = np.zeros((sizes.batch, sizes.heads, sizes.query_rows), np.int64)
        for first, step, rows, b, hq, hk, begin, end in launch.items.tolist():
            for x, head in itertools.product(range(first, first + rows * step, step), range(hq, hq + launch.heads)):
                visited[b, head, x] += 1
                for reference in launch.references[begin:end].tolist():
                    see(by_items, tiles[reference], b, head, hk, x, range(tiles[reference][10]))
        assert visited.max(initial=0) <= 1, "two items of a launch have a row in common"
        assert number > 0 or not complete or visited.all()
    for launch in lists.key_launches:
        for tile, j0, count, b, hq, hk, begin, end in launch.items.tolist():
            q0, qs, fold, *_ = tiles[tile]
            assert begin < end
            for r, head in itertools.product(range(begin, end), range(hq, hq + launch.heads)):
                x = q0 + r // fold * qs + r % fold
                see(by_key_items, tiles[tile], b, head, hk, x, range(j0, j0 + count))
    return by_items, by_key_items


def check(batches, sizes, blocks, rng, payload=False, complete=True):
    complete = complete and not payload
    expected, places, of_place = pairs_of_tiles(batches, sizes), None, None
    if payload:  # Some runs of the rows that are seen, in another order, as they may arrive.
        seen = expected.reshape(sizes.batch, sizes.kv_heads, sizes.group, -1, sizes.key_rows).any((2, 3))
        numbers = np.flatnonzero(seen | (np.array(rng.choices([0, 1], k=seen.size)).reshape(seen.shape) > 0))
        cuts = [0, *sorted(rng.sample(range(len(numbers) + 1), min(2, len(numbers)))), len(numbers)]
        runs = [numbers[a:b] for a, b in itertools.pairwise(cuts)]
        rng.shuffle(runs)
        arrived = np.concatenate(runs)
        place = np.full(seen.size, -1)
        place[arrived] = np.arange(len(arrived))
        of_place = {
            (b, h, int(place[number])): number % sizes.key_rows
            for number in arrived.tolist()
            for b, h in [divmod(number // sizes.key_rows, sizes.kv_heads)]
        }

        def places(rows):
            assert (place[rows] >= 0).all()
            return place[rows]

    lists = work_lists(batches, sizes, blocks, places, complete)
    for found in pairs_of_items(lists, sizes, of_place, complete):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("seed", range(40))
def test_random_plans(seed, rng):
    """Own tiles, and tiles of other ranks, whose keys are rows of a payload."""
    case, world_size = random_case(rng, max_len=30), rng.choice([1, 1, 2, 3])
    kind = rng.choice(LAYOUTS)
    layout = (
        random_pieces(rng, case.seq_len, world_size, case.batch)
        if kind == "documents"
        else SequenceLayout(kind, case.seq_len, world_size)
    )
    problem, rank = case.problem(layout), rng.randrange(world_size)
    plan, blocks = plan_rank(problem, rank), random_blocks(rng)
    sizes = Sizes(case.batch, case.num_heads, case.num_kv_heads, layout.local_len, layout.local_len)
    check(plan.own, sizes, blocks, rng)
    check(plan.own, sizes, blocks, rng, payload=True)
    check(plan.remote, sizes._replace(key_rows=layout.padded_len), blocks, rng, payload=True)


def test_some_key_value_heads(rng):
    """A lap of a ring may have some of the heads alone."""
    for _ in range(10):
        case = with_heads(rng, random_case(rng, max_len=24), 6, 3)
        layout = SequenceLayout("contiguous", case.seq_len, 1)
        heads = range(rng.randrange(3), 3)
        batches = of_heads(plan_rank(case.problem(layout), 0).own, heads, 2)
        check(batches, Sizes(case.batch, 6, 3, case.seq_len, case.seq_len), random_blocks(rng), rng, complete=False)


def test_keys_of_a_cache(rng):
    for _ in range(10):
        case = random_case(rng, max_len=24)
        held = HeldKeys.whole(case.seq_len, rng.randint(1, case.seq_len), case.seq_len + rng.randint(0, 3))
        try:
            problem = Problem(
                case.pattern, held.layout, tuple(map(tuple, case.rows)), num_heads=case.num_heads,
                num_kv_heads=case.num_kv_heads, held=held,
            )  # fmt: skip
        except ValueError:  # a pattern of last queries
            continue
        sizes = Sizes(case.batch, case.num_heads, case.num_kv_heads, held.num_queries, held.num_rows)
        check(tiles_from(problem, 0, 0), sizes, random_blocks(rng), rng)


def test_few_keys_of_many_queries_are_cut(monkeypatch):
    """Sinks of a long row are the work of many programs, not of one."""
    monkeypatch.setattr("hf_ring_attention.compute.fused.lists._MOST_ROWS", 8)
    problem = Problem(
        Pattern.parse("window:4+2"), SequenceLayout("contiguous", 64, 1), (((0, 64),),), num_heads=2, num_kv_heads=1
    )
    monkeypatch.setattr("hf_ring_attention.compute.fused.lists._KEY_ITEMS", 100)
    sizes, blocks = Sizes(1, 2, 1, 64, 64), SMALL_BLOCKS
    batches = plan_rank(problem, 0).own
    lists = work_lists(batches, sizes, blocks, None, True)
    [launch] = lists.key_launches
    assert max(end - begin for *_, begin, end in launch.items.tolist()) <= 8
    check(batches, sizes, blocks, random.Random(0))


@pytest.mark.parametrize(("group", "expected"), [(1, 1), (4, 4), (7, 7), (16, 16), (24, 12), (32, 16), (71, 1)])
def test_heads_that_share_an_item(group, expected):
    assert heads_of_an_item(group, SMALL_BLOCKS) == expected
    assert heads_of_an_item(2 * group, SMALL_BLOCKS._replace(rows=64, query_rows=32)) == 2 * expected


def test_more_heads_than_rows_of_a_block(rng):
    """A block holds one row or more of all heads of an item, or its program would compute nothing, or never end."""
    case = with_heads(rng, random_case(rng, max_len=24), 32, 1)
    batches = plan_rank(case.problem(SequenceLayout("contiguous", case.seq_len, 1)), 0).own
    check(batches, Sizes(case.batch, 32, 1, case.seq_len, case.seq_len), SMALL_BLOCKS, rng)
