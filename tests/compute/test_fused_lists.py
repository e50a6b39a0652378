"""The lists of the fused kernels have each pair of a query and a key as often as the plan's tiles, under all settings."""

import itertools
import random

import numpy as np
import pytest

from hf_ring_attention.compute.fused.columns import Sizes
from hf_ring_attention.compute.fused.lists import work_lists
from hf_ring_attention.compute.fused.settings import Setting, Settings, heads_of_an_item
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.plans import plan_rank, tiles_from
from hf_ring_attention.plan.problem import HeldKeys
from tests.plan.strategies import query_rows, random_layout
from tests.support.cases import problem_of, random_case
from tests.support.fused import SMALL_BLOCKS, random_settings_of_kernels, small_settings


def pairs_of_tiles(batches, sizes):
    """How often each query row sees each key row, [B, H, query rows, key rows], by the words of `TileBatch`."""
    count = np.zeros((sizes.batch, sizes.heads, sizes.query_rows, sizes.key_rows), np.int64)
    for batch in batches:
        for b, head, row, key_rows in query_rows(batch, sizes.group):
            count[b, head, row, key_rows] += 1
    return count


def pairs_of_items(lists, sizes, places, complete):
    """The same by the items of forward, of dq, and by key items; `places` finds the row of a place in a payload."""
    found = [np.zeros((sizes.batch, sizes.heads, sizes.query_rows, sizes.key_rows), np.int64) for _ in range(3)]

    def see(count, tile, b, hq, hk, x, keys):
        q0, qs, fold, nq, k0, ks, lo0, ls, hi0, hs, nk, _ = tile
        i = (x - q0) // qs
        if not (x >= q0 and i < nq and (x - q0) % qs < fold):
            return
        for j in (j for j in keys if max(lo0 + ls * i, 0) <= j < min(hi0 + hs * i, nk)):
            assert hk == hq // sizes.group
            row = k0 + j * ks
            count[b, hq, x, row if places is None else places[b, hk, row]] += 1

    tiles = lists.tiles.tolist()
    for launches, count in ((lists.forward, found[0]), (lists.dq, found[1])):
        for number, launch in enumerate(launches):
            visited = np.zeros((sizes.batch, sizes.heads, sizes.query_rows), np.int64)
            for first, step, rows, b, hq, hk, begin, end in launch.items.tolist():
                assert rows * launch.heads <= launch.setting.rows
                for x, head in itertools.product(range(first, first + rows * step, step), range(hq, hq + launch.heads)):
                    visited[b, head, x] += 1
                    for reference in launch.references[begin:end].tolist():
                        see(count, tiles[reference], b, head, hk, x, range(tiles[reference][10]))
            assert visited.max(initial=0) <= 1, "two items of a launch have a row in common"
            assert number > 0 or not complete or visited.all()
    for launch in lists.dkdv:
        for tile, j0, count, b, hq, hk, begin, end, _ in launch.items.tolist():
            q0, qs, fold, *_ = tiles[tile]
            assert begin < end or lists.sums is not None
            assert count <= launch.setting.keys
            for r, head in itertools.product(range(begin, end), range(hq, hq + launch.heads)):
                x = q0 + r // fold * qs + r % fold
                see(found[2], tiles[tile], b, head, hk, x, range(j0, j0 + count))
    return found


def check_writers(lists, sizes):
    """Each key row is written once: by a key item, or by the sum of all slots that key items put it into."""
    written = np.zeros((sizes.batch, sizes.kv_heads, sizes.key_rows), np.int64)
    row_of_slot = {}
    for launch in lists.dkdv:
        for tile, j0, count, b, _, hk, _, _, slot in launch.items.tolist():
            k0, ks = lists.tiles[tile, 4:6].tolist()
            for j in range(count):
                row = b, hk, k0 + (j0 + j) * ks
                if slot < 0:
                    written[row] += 1
                else:
                    assert slot + j not in row_of_slot
                    row_of_slot[slot + j] = row
    assert sorted(row_of_slot) == [*range(lists.sums.slots)]
    for b, hk, row, first, begin, end in lists.sums.items.tolist():
        written[b, hk, row] += 1
        for slot in lists.sums.references[begin:end].tolist():
            assert row_of_slot.pop(first + slot) == (b, hk, row)
    assert (written == 1).all()
    assert not row_of_slot


def check(batches, sizes, settings, rng, payload=False, complete=True):
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

    lists = work_lists(batches, sizes, settings, places, complete)
    for found in pairs_of_items(lists, sizes, of_place, complete):
        np.testing.assert_array_equal(found, expected)
    if lists.sums is not None:
        check_writers(lists, sizes)
    return lists


@pytest.mark.parametrize("seed", range(40))
def test_random_plans(seed, rng):
    """Own tiles, and tiles of other ranks, whose keys are rows of a payload."""
    case, world_size = random_case(rng, max_len=30), rng.choice([1, 1, 2, 3])
    layout = random_layout(rng, case.seq_len, world_size, case.batch)
    problem, rank = case.problem(layout), rng.randrange(world_size)
    plan, settings = plan_rank(problem, rank), random_settings_of_kernels(rng)
    sizes = Sizes(case.batch, case.num_heads, case.num_kv_heads, layout.local_len, layout.local_len)
    check(plan.own, sizes, settings, rng)
    check(plan.own, sizes, settings, rng, payload=True)
    check(plan.remote, sizes._replace(key_rows=layout.padded_len), settings, rng, payload=True)


def own_tiles(case):
    return plan_rank(case.problem(SequenceLayout("contiguous", case.seq_len, 1)), 0).own


def test_keys_of_a_cache(rng):
    for _ in range(10):
        case = random_case(rng, max_len=24)
        held = HeldKeys.whole(case.seq_len, rng.randint(1, case.seq_len), case.seq_len + rng.randint(0, 3))
        heads = case.num_heads, case.num_kv_heads
        try:
            problem = problem_of(case.pattern, held.layout, case.rows, heads, held=held)
        except ValueError:  # a pattern of last queries
            continue
        sizes = Sizes(case.batch, *heads, held.num_queries, held.num_rows)
        check(tiles_from(problem, 0, 0), sizes, random_settings_of_kernels(rng), rng)


def test_few_keys_of_many_queries_are_cut():
    """Sinks of a long row are the work of many programs, not of one."""
    sizes, settings = Sizes(1, 2, 1, 64, 64), SMALL_BLOCKS._replace(most_rows=8)
    batches = plan_rank(problem_of("window:4+2", 64, heads=(2, 1)), 0).own
    [launch] = check(batches, sizes, settings, random.Random(0)).dkdv
    assert max(end - begin for *_, begin, end, _ in launch.items.tolist()) <= 8


@pytest.mark.parametrize(
    ("text", "slots"),
    [("window:7", 0), ("exact", 0), ("branches:segment=9", 0), ("window:5+2", 16), ("longnet:all/1,all/1", None)],
)
def test_each_key_row_is_written_once(text, slots):
    """Also the rows of padding, whose gradients are 0, and sinks that many queries see, whose gradients are sums."""
    problem = problem_of(text, 64, [((0, 1), (3, 40), (41, 60)), ((5, 64),), ()], (4, 2))
    for few_keys in (False, True):
        settings = small_settings(few_keys=few_keys)._replace(most_rows=30 if slots else 1000)
        lists = check(plan_rank(problem, 0).own, Sizes(3, 4, 2, 64, 64), settings, random.Random(0))
        assert (lists.sums and lists.sums.slots) == slots


def test_many_shared_key_rows_are_added_in_place():
    """If most key rows have several writers, sums of all rows take less memory than their parts."""
    batches = plan_rank(problem_of("branches:window=8,segment=32/2", 64, heads=(2, 1)), 0).own
    assert work_lists(batches, Sizes(1, 2, 1, 64, 64), SMALL_BLOCKS, None, True).sums is None


@pytest.mark.parametrize(
    ("text", "rows"), [("window:512", 16), ("window:1024", 32), ("exact", 32), ("pyramid:512,3", 32)]
)
def test_launches_whose_queries_see_few_keys_take_other_settings(text, rows):
    few, many = Setting(16, 64, 4, 1), Setting(32, 64, 4, 1)
    settings = Settings((few, many), (few, few), (few._replace(keys=32), many))
    lists = work_lists(plan_rank(problem_of(text, 8192), 0).own, Sizes(1, 1, 1, 8192, 8192), settings, None, True)
    assert [x.setting.rows for x in lists.forward] == [rows]
    assert [x.setting.rows for x in lists.dq] == [16]
    assert (lists.forward[0].items is lists.dq[0].items) == (rows == 16)
    assert [x.setting == many for x in lists.dkdv] == [rows == 32]


@pytest.mark.parametrize(("group", "expected"), [(1, 1), (4, 4), (7, 7), (16, 16), (24, 12), (32, 16), (71, 1)])
def test_heads_that_share_an_item(group, expected):
    assert heads_of_an_item(group, SMALL_BLOCKS) == expected
    assert heads_of_an_item(2 * group, small_settings(32)) == 2 * expected


def test_more_heads_than_rows_of_a_block(rng):
    """A block holds one row or more of all heads of an item, or its program would compute nothing, or never end."""
    case = random_case(rng, max_len=24, heads=(32, 1))
    check(own_tiles(case), Sizes(case.batch, 32, 1, case.seq_len, case.seq_len), SMALL_BLOCKS, rng)
