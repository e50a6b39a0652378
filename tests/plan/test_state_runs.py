"""Runs of documents: they cover each token once, follow each other, and give the ranks batches of even rows."""

import pytest

from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.state_runs import linked_runs, runs_of

DOCUMENTS = (((0, 7), (7, 16), (16, 40)), ((3, 37),))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_runs_cover_documents_in_order(kind, world_size, all_of_them):
    layout = SequenceLayout(kind, 40, world_size)
    runs = runs_of(DOCUMENTS, layout)
    linked, most = linked_runs(runs, all_of_them)
    for some in (runs, linked):
        for run in some:
            held = layout.positions(run.rank)[run.place : run.place + run.stop - run.start]
            assert held == list(range(run.start, run.stop))
            if run.before >= 0:
                assert (some[run.before].row, some[run.before].stop) == (run.row, run.start)
            else:
                assert run.start in [start for start, _ in DOCUMENTS[run.row]], "a run without the one before it"
    covered = [(run.row, token) for run in runs for token in range(run.start, run.stop)]
    assert sorted(covered) == [(row, x) for row, spans in enumerate(DOCUMENTS) for span in spans for x in range(*span)]
    again = [(run.row, x) for run in linked for x in range(run.start, run.stop)]
    assert again == [(run.row, x) for run in runs if all_of_them or not run.alone for x in range(run.start, run.stop)]
    for rank in {run.rank for run in linked}:
        own = [run for run in linked if run.rank == rank]
        assert len(own) == most or all(run.stop - run.start == 1 for run in own)


def test_a_rank_with_one_long_run_has_as_many_rows_as_the_others():
    """In a zigzag of two ranks, the middle of the row is one run of rank 1, beside two runs of rank 0, each half as long."""
    layout = SequenceLayout("zigzag", 64, 2)
    runs = runs_of((((0, 64),),), layout)
    assert [(run.rank, run.start, run.stop) for run in runs] == [(0, 0, 16), (1, 16, 48), (0, 48, 64)]
    linked, most = linked_runs(runs)
    assert most == 2
    assert [(run.rank, run.start, run.stop, run.before) for run in linked] == [
        (0, 0, 16, -1), (1, 16, 32, 0), (1, 32, 48, 1), (0, 48, 64, 2),
    ]  # fmt: skip
