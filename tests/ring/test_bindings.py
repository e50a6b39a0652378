"""A ring keeps one binding for equal calls, bounded in bytes and in parts."""

import pytest
import torch

from hf_ring_attention.ring.bindings import PARTS_OF_A_CALL, PlannedCalls


def of_size(name, numbers):
    return (name, torch.zeros(numbers, dtype=torch.int64))


class OneCall:
    """A planned call, as far as the table knows it."""

    def __init__(self, planned, name, numbers):
        self.kept = planned.binding(of_size, name, numbers)


@pytest.mark.parametrize(
    ("bound", "sizes", "kept", "nbytes"),
    [
        ({"max_bytes": 64}, (4, 4, 1), "bc", 40),
        ({"max_parts": 2 * (1 + PARTS_OF_A_CALL)}, (4, 4, 1), "bc", 40),
        ({"max_bytes": 8}, (9,), "a", 72),  # one that is too large is kept until the next
        ({"max_bytes": 8}, (9, 1), "b", 8),
    ],
)
def test_the_oldest_goes_where_they_are_too_large_or_have_too_many_parts(bound, sizes, kept, nbytes):
    planned = PlannedCalls(**bound)
    for name, size in zip("abc", sizes):
        planned.keep(name, OneCall(planned, name, size))
        assert planned.find(name) is not None
    assert planned.nbytes == nbytes
    assert "".join(name for name in "abc" if planned.find(name) is not None) == kept


def test_calls_share_a_binding_which_counts_once():
    planned = PlannedCalls(max_bytes=40)
    for name in "abc":
        planned.keep(name, OneCall(planned, "one", 4))
    assert planned.nbytes == 32
    assert planned.find("a").kept is planned.find("c").kept
