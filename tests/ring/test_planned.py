"""Planned calls are found by value: equal calls share a plan, and all that decides a result makes another one."""

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.plan.problem import HeldKeys, RingSettings
from hf_ring_attention.ring.bindings import PARTS_OF_A_CALL, PlannedCalls
from hf_ring_attention.ring.planned import planned_call
from hf_ring_attention.ring.ring import Ring
from tests.support.ranks import run_simulated
from tests.support.refusals import refused
from tests.support.training import tiny_llama

LENGTH = 24


def drawn(heads=4, length=LENGTH, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(2, heads, length, width, dtype=dtype, generator=generator)


HEADS = {"q": 4, "k": 2, "v": 2}
SHORTER = ra.SequenceLayout("contiguous", LENGTH - 1, 1)


def arguments():
    return {"q": drawn(), "k": drawn(2), "v": drawn(2), "sinks": None, "pattern": "window:4+2"}


#: Another value of each argument that decides a call, its tensors included.
OTHERS = {
    "q": {"q": drawn(2)},
    "k": {"k": drawn(1), "v": drawn(1)},
    "v": {"v": drawn(2, width=4)},
    "dtype": {name: drawn(heads, dtype=torch.float64) for name, heads in HEADS.items()},
    "length": {name: drawn(heads, 16) for name, heads in HEADS.items()},
    "recorded": {"q": drawn().requires_grad_()},
    "sinks": {"sinks": torch.zeros(4)},
    "pattern": {"pattern": "window:5+2"},
    "layout": {"layout": SHORTER, **{name: drawn(heads, LENGTH - 1) for name, heads in HEADS.items()}},
    "causal": {"causal": False},
    "scale": {"scale": 0.5},
    "documents": {"documents": [[(0, 9), (9, LENGTH)], [(0, LENGTH)]]},
    "softcap": {"softcap": 3.0},
    "head_shard": {"head_shard": (1, 2)},
    "held": {"q": drawn(length=2), "held": HeldKeys.whole(LENGTH, 2, LENGTH)},
    "with_lse": {"with_lse": True},
    "in_graph": {"recorded_in_graph": False},
}


def planned(ring, **changes):
    return planned_call(ring, **{**arguments(), **changes})


def test_equal_calls_share_a_plan():
    ring = Ring.alone()
    first = planned(ring)
    assert planned(ring, pattern=ra.Pattern.parse("window:4+2")) is first  # other tensors of the same shapes
    rows = [[(0, 9), (9, LENGTH)], [(0, LENGTH)]]
    assert planned(ring, head_shard=[0, 1]) is first
    assert planned(ring, documents=rows) is planned(ring, documents=tuple(map(tuple, rows))) is not first


def test_each_value_that_decides_a_call_makes_another_plan():
    """Each of the changes above changes its field, and all fields are changed, so that a new field gets a test."""
    ring, fields = Ring.alone(), set()
    first = planned(ring)
    for name, changes in OTHERS.items():
        other = planned(ring, **changes)
        assert first is not other and first.call != other.call, name
        assert planned(ring) is first and planned(ring, **changes) is other, name
        fields |= {field for field in first.call._fields if getattr(first.call, field) != getattr(other.call, field)}
    assert fields == {*first.call._fields} - {"outside"}  # Settings beside the call are tested below.


def test_the_world_outside_changes_between_two_calls(monkeypatch):
    """Determinism, the kernel, transport and settings of a ring, and documents that are edited in place."""
    ring, q = Ring.alone(), drawn()
    plain = planned(ring)
    torch.use_deterministic_algorithms(True)
    try:
        assert planned(ring).call.outside.deterministic and planned(ring) is not plain
    finally:
        torch.use_deterministic_algorithms(False)
    assert planned(ring) is plain
    monkeypatch.setattr(ring, "kernel", "math")
    assert type(planned(ring).kernel).__name__ == "Math" and planned(ring) is not plain
    monkeypatch.undo()
    for name, value in (("transport", "local"), ("settings", RingSettings(head_groups=1))):
        monkeypatch.setattr(ring, name, value)
        assert planned(ring) is not plain
        monkeypatch.undo()
    documents = [[(0, 9), (9, LENGTH)], [(0, LENGTH)]]

    def attend():
        return ra.ring_attention(q, q, q, pattern="window:4+2", ring=ring, documents=documents)

    before = attend()
    documents[0][:] = [(0, 5), (5, LENGTH)]
    fresh = ra.ring_attention(q, q, q, pattern="window:4+2", ring=Ring.alone(), documents=documents)
    assert torch.equal(attend(), fresh) and not torch.equal(before, fresh)


def test_a_model_whose_pattern_changes_between_two_calls():
    """By `patch_config`, by a layer, and by an entry of the saved settings that is edited in place."""
    model, ids = ra.patch_model(tiny_llama(None), "window:4+2").eval(), torch.arange(1, 33)[None]

    def checked():
        with torch.no_grad():
            fresh = tiny_llama(None)
            fresh.config.ring_dilated = model.config.ring_dilated
            return torch.equal(model(ids).logits, ra.patch_model(fresh).eval()(ids).logits)

    assert checked() and checked()
    ra.patch_config(model.config, "window:7")
    assert checked()
    ra.patch_config(model.config, "exact", layers=[1])
    assert checked()
    model.config.ring_dilated["layers"] = {}
    assert checked()


def test_ranks_compare_calls_that_they_have_planned():
    """A repeated call beside another one is refused on both ranks, and the next equal calls go on."""

    def calls(ring):
        q, errors = drawn(), []
        for pattern in ("window:4", "window:5", "window:4"):
            ra.ring_attention(q, q, q, pattern=pattern, ring=ring)
        for patterns in (("window:4", "window:5"), ("window:5", "window:6")):
            call = {"pattern": patterns[ring.rank], "ring": ring}
            errors.append(refused("disagree on pattern", ra.ring_attention, q, q, q, **call))
        return errors, ra.ring_attention(q, q, q, pattern="window:4", ring=ring)

    (errors, first), (others, second) = run_simulated(calls, 2)
    assert errors == others and first.shape == second.shape


# ---- what a ring keeps of its calls, bounded in bytes and in parts


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
