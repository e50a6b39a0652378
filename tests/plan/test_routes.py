"""Rows travel if a visible pair asks for them, each as far as its last reader and once: against sets of rows."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ring_attention.plan.branches import Sink, Window
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.plans import of_heads, tiles_from
from hf_ring_attention.plan.problem import RingSettings
from hf_ring_attention.plan.routes import needed, ring_laps
from hf_ring_attention.plan.traffic import Bytes, RowBytes, collective_traffic, exchanged, ring_traffic
from tests.plan.strategies import problems
from tests.plan.test_plans import expected, pairs_of
from tests.support.cases import problem_of

#: Small problems go head by head: every payload is large, and any number of query rows will do for a group.
HEAD_BY_HEAD = RingSettings(rows_of_a_head_group=1, large_payload=10**9)


# The definition, row by row. A row is (batch row, key/value head, local index in its source).


@lru_cache(maxsize=64)
def needs_of(problem):
    """{(reader, source): rows} of each pair of different ranks, as the visible pairs have them."""
    layout, group = problem.layout, problem.num_heads // problem.num_kv_heads
    ranks = range(layout.world_size)
    home = {
        (batch_row, position): (rank, row)
        for batch_row in range(len(problem.documents))
        for rank in ranks
        for row, position in enumerate(layout.positions(rank, batch_row))
    }
    needs = {(reader, source): set() for reader, source in itertools.permutations(ranks, 2)}
    for batch_row, head, query, key in expected(problem):
        (reader, _), (source, row) = home[batch_row, query], home[batch_row, key]
        if reader != source:
            needs[reader, source].add((batch_row, head // group, row))
    return needs


def distances_of_readers(problem, source, direction, reach):
    """{row: ascending distances of the ranks, at most `reach` away, that need it}."""
    p = problem.layout.world_size
    found = {}
    for distance in range(1, reach + 1):
        for row in needs_of(problem)[(source + distance * direction) % p, source]:
            found.setdefault(row, []).append(distance)
    return found


def rows_of(problem, key_rows):
    """`KeyRows` as a set of rows."""
    heads = problem.num_kv_heads
    assert key_rows.num_kv_heads == heads
    assert len(key_rows.sets) == len(key_rows.weights) == len(problem.row_classes) * heads
    found = set()
    for number, bits in enumerate(key_rows.sets):
        batch_rows = problem.row_classes[number // heads][1]
        rows = [row for row in range(bits.bit_length()) if bits >> row & 1]
        found |= set(itertools.product(batch_rows, [number % heads], rows))
    assert len(key_rows) == len(found)
    assert bool(key_rows) == bool(found)
    return found


def reach_of(problem):
    """{direction: ranks it serves}: one way round, or the nearer half of the ranks each way."""
    p = problem.layout.world_size
    directions = {lap.direction for lap in ring_laps(problem)}
    return {1: p // 2, -1: (p - 1) // 2} if directions == {1, -1} else {1: p - 1}


# The checks of one problem.


def check_needs(problem):
    for (reader, source), rows in needs_of(problem).items():
        assert rows_of(problem, needed(problem, reader, source)) == rows, (problem, reader, source)
    for rank in range(problem.layout.world_size):
        assert not needed(problem, rank, rank), (problem, rank)


def check_arrivals(problem):
    """Ranks hold the rows that they pass on, and get each row that they need once."""
    layout, p = problem.layout, problem.layout.world_size
    arrivals = Counter()
    for lap in ring_laps(problem):
        assert len(lap.routes) == p
        assert 0 <= lap.steps < p
        own = set(itertools.product(range(len(problem.documents)), lap.heads, range(layout.local_len)))
        held = [own] * p
        for step in range(1, lap.steps + 1):
            arriving = []
            for rank in range(p):
                sender = (rank - lap.direction) % p
                source = (rank - step * lap.direction) % p
                assert lap.source(rank, step) == lap.source(sender, step - 1) == source
                hop = lap.hop(rank, step)
                assert hop is (lap.routes[source][step - 1] if step <= len(lap.routes[source]) else None)
                rows = rows_of(problem, hop.rows) if hop else set()
                assert rows <= held[sender], (problem, lap, rank, step)
                arriving.append(rows)
                if rank != source:
                    arrivals.update((rank, source, row) for row in rows & needs_of(problem)[rank, source])
            assert any(arriving), (problem, lap, step)
            held = arriving
        for rank in range(p):
            assert lap.source(rank, 0) == rank
            assert lap.hop(rank, 0) is lap.hop(rank, lap.steps + 1) is None
    once = {(reader, source, row): 1 for (reader, source), rows in needs_of(problem).items() for row in rows}
    assert arrivals == once, problem


def check_hops(problem):
    """Rows go as far as their last reader, their gradients from the first reader to the last and home."""
    for lap in ring_laps(problem):
        for source, route in enumerate(lap.routes):
            readers = distances_of_readers(problem, source, lap.direction, len(route))
            readers = {row: distances for row, distances in readers.items() if row[1] in lap.heads}
            assert max((distances[-1] for distances in readers.values()), default=0) == len(route), (problem, lap)
            finished = Counter()
            for distance, hop in enumerate(route, 1):
                where = (problem, lap, source, distance)
                rows = {row for row, distances in readers.items() if distances[-1] >= distance}
                assert rows_of(problem, hop.rows) == rows, where
                used = {row for row in rows if readers[row][0] < distance}
                assert rows_of(problem, hop.carried) == used, where
                last = {row for row in rows if readers[row][-1] == distance}
                assert rows_of(problem, hop.finished) == last, where
                finished.update(rows_of(problem, hop.finished))
            assert finished == dict.fromkeys(readers, 1), (problem, lap, source)


def check_rounds(problem):
    """Every direction takes every head once, and ranks compute with their own keys of every head once."""
    heads, p = list(range(problem.num_kv_heads)), problem.layout.world_size
    laps = ring_laps(problem)
    assert [head for lap in laps if lap.with_own for head in lap.heads] == heads, problem
    assert all(lap.with_own or lap.steps for lap in laps), problem
    assert all(lap.direction == (1 if lap.with_own else -1) for lap in laps), problem
    back = [head for lap in laps if lap.direction == -1 for head in lap.heads]
    assert len(set(back)) == len(back), problem

    def hops(direction, reach):
        found = (distances_of_readers(problem, source, direction, reach) for source in range(p))
        return sum(distances[-1] for readers in found for distances in readers.values())

    # Rows go both ways where this moves much less, and stay where no rank needs them.
    one_way, both_ways = hops(1, p - 1), hops(1, p // 2) + hops(-1, (p - 1) // 2)
    assert (-1 in reach_of(problem)) == (p > 2 and 0 < both_ways <= RingSettings().both_ways_below * one_way), problem


def check_tiles(problem):
    """The tiles of all ranks and steps are the definition, and need no row that has not come."""
    layout, group = problem.layout, problem.num_heads // problem.num_kv_heads
    total = Counter()
    for lap, rank in itertools.product(ring_laps(problem), range(layout.world_size)):
        mine = [layout.positions(rank, row) for row in range(len(problem.documents))]
        if lap.with_own:
            for batch in of_heads(tiles_from(problem, rank, rank), lap.heads):
                total.update(pairs_of(batch, problem, mine, mine))
        for step in range(1, lap.steps + 1):
            hop, source = lap.hop(rank, step), lap.source(rank, step)
            if hop is None:
                continue
            theirs = [layout.positions(source, row) for row in range(len(problem.documents))]
            arrived = rows_of(problem, hop.rows)
            for batch in of_heads(tiles_from(problem, rank, source), lap.heads):
                pairs = pairs_of(batch, problem, mine, theirs)
                used = {(row, head // group, theirs[row].index(key)) for row, head, _, key in pairs}
                assert used <= arrived, (problem, lap, rank, step)
                total.update(pairs)
    assert total == expected(problem), problem


def check_traffic(problem):
    """Bytes add up over every row and every link that it crosses."""
    p, needs = problem.layout.world_size, needs_of(problem)
    sent, received, grads_sent, grads_received = Counter(), Counter(), Counter(), Counter()
    for (direction, reach), source in itertools.product(reach_of(problem).items(), range(p)):
        for distances in distances_of_readers(problem, source, direction, reach).values():
            first, last = distances[0], distances[-1]
            ranks = [(source + distance * direction) % p for distance in range(last + 1)]
            sent.update(ranks[:-1])
            received.update(ranks[1:])
            grads_sent.update([*ranks[first:-1], ranks[last]])
            grads_received.update([*ranks[first + 1 :], source])
    check_bytes(problem, ring_traffic, sent, received, grads_sent, grads_received)

    sent, received = Counter(), Counter()
    for (reader, source), rows in needs.items():
        received[reader] += len(rows)
        sent[source] += len(rows)
    check_bytes(problem, collective_traffic, sent, received, received, sent)
    assert exchanged(problem) == tuple(
        tuple(len(needs[rank, source]) if rank != source else 0 for source in range(p)) for rank in range(p)
    ), problem


def check_bytes(problem, traffic_of, sent, received, grads_sent, grads_received):
    ranks = range(problem.layout.world_size)
    for row_bytes, grad_bytes in ((1, 0), (0, 1), (3, 5)):
        traffic = [traffic_of(problem, rank, RowBytes(row_bytes, grad_bytes)) for rank in ranks]
        for rank in ranks:
            where = (problem, traffic_of.__name__, rank)
            forward = Bytes(sent[rank] * row_bytes, received[rank] * row_bytes)
            assert traffic[rank].forward == forward, where
            grads = Bytes(grads_sent[rank] * grad_bytes, grads_received[rank] * grad_bytes)
            assert traffic[rank].backward == tuple(map(sum, zip(forward, grads))), where
        for name in ("forward", "backward"):
            moved = [getattr(of_rank, name) for of_rank in traffic]
            assert sum(of_rank.sent for of_rank in moved) == sum(of_rank.received for of_rank in moved), problem


CHECKS = [check_needs, check_arrivals, check_hops, check_rounds, check_tiles, check_traffic]


def check_all(problem):
    """Returns whether the problem is split by heads."""
    for check in CHECKS:
        check(problem)
    return sum(lap.with_own for lap in ring_laps(problem)) > 1


@settings(max_examples=80)
@given(problems, st.booleans())
def test_random_problems(problem, by_heads):
    """Small problems are not split by heads unless it is asked for, nor is a single key/value head, or what never travels."""
    split = check_all(replace(problem, settings=HEAD_BY_HEAD) if by_heads else problem)
    assert not split or (by_heads and problem.num_kv_heads > 1 and problem.layout.world_size > 1)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("sinks", [(), (Sink(1),)], ids=["window", "sink and window"])
def test_every_window_and_number_of_ranks(sinks):
    """By exhaustion: rows near their readers, and one that all ranks read, however the others go."""
    for length, p, kind, causal in itertools.product(range(1, 9), range(1, 6), ["contiguous", "zigzag"], [True, False]):
        check_all(problem_of(Pattern((*sinks, Window(length))), (kind, 8, p), causal=causal))


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("documents", [(), ((),), ((), ())], ids=str)
def test_nothing_to_move(documents, p):
    """Padding alone: one round, in which no row leaves its rank."""
    problem = problem_of("exact", ("zigzag", 8, p), documents, (2, 2))
    (lap,) = ring_laps(problem)
    assert (lap.heads, lap.with_own, lap.steps, lap.routes) == (range(2), True, 0, ((),) * p)
    for check in CHECKS:
        check(problem)


# How calls are split by heads.


def window_problem(num_kv_heads=8):
    """2 batch rows, 16 tokens a rank: all of them are read by the next rank, 4 of them by the one after as well."""
    return problem_of("window:21", ("contiguous", 64, 4), [[(0, 64)]] * 2, (4 * num_kv_heads, num_kv_heads))


def heads_of_laps(problem, **settings):
    problem = replace(problem, settings=replace(HEAD_BY_HEAD, **settings))
    return [list(lap.heads) for lap in ring_laps(problem)]


def test_groups_of_heads():
    """As many as keep enough query rows each, all batch rows and query heads together."""
    problem, query_rows = window_problem(), 2 * 8 * 4 * 16
    for groups in (1, 2, 4, 8):
        for rows in (query_rows // groups, query_rows // (groups + 1) + 1):
            assert heads_of_laps(problem, rows_of_a_head_group=rows) == [
                list(range(first, first + 8 // groups)) for first in range(0, 8, 8 // groups)
            ]
    assert len(heads_of_laps(window_problem(3))) == 3, "a group has a head at least"
    for heads in (9, 12, 17):
        groups = heads_of_laps(window_problem(heads))
        assert len(groups) == RingSettings().head_groups
        assert list(itertools.chain.from_iterable(groups)) == list(range(heads))
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_small_payloads_go_in_one_lap():
    problem = window_problem()  # its largest payload: a key row for every 4 query rows
    assert len(heads_of_laps(problem, large_payload=4)) == 8
    assert len(heads_of_laps(problem, large_payload=3)) == 1


def test_the_example_of_the_module_is_what_is_computed():
    (lap,) = ring_laps(problem_of("window:6", ("contiguous", 16, 4)))
    hops = [[tuple(rows.sets[0] for rows in hop) for hop in route] for route in lap.routes]
    assert hops[0] == [(0b1111, 0, 0b0111), (0b1000, 0b1000, 0b1000)]
    assert hops[3] == []
