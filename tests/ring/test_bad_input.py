"""Wrong arguments raise ValueErrors that name the argument and its value; on a ring, on every rank and at once."""

import re
import time

import pytest
import torch
import torch.distributed as dist

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import reference_attention
from tests.support.cases import EXACT_ATTENTION
from tests.support.ranks import PROMPTLY, run_simulated

EXACT = ra.Pattern.exact()
BATCH, HEADS, KV_HEADS, TOKENS, WIDTH = 2, 4, 2, 6, 8


def tensors(seed=0, tokens=TOKENS, dtype=torch.float32):
    """Arguments of a call that is right."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (BATCH, HEADS, tokens, WIDTH), "k": (BATCH, KV_HEADS, tokens, WIDTH)}
    shapes["v"] = shapes["k"]
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {**{name: x.to(dtype) for name, x in drawn.items()}, "pattern": EXACT}


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


WRONG_TENSORS = {
    "q of 3 dimensions": ({"q": zeros(HEADS, TOKENS, WIDTH)}, r"q must be a tensor \[batch, .*got \(4, 6, 8\)"),
    "k a list": ({"k": [1.0]}, "k must be a tensor .*got list"),
    "fewer query heads than key heads": ({"q": zeros(BATCH, 1, TOKENS, WIDTH)}, "multiple of .*got 1 and 2"),
    "batch sizes": ({"q": zeros(1, HEADS, TOKENS, WIDTH)}, r"batch .* equal, got q \(1, 4, 6, 8\), k \(2, 2, 6, 8\)"),
    "heads of k and v": ({"v": zeros(BATCH, 1, TOKENS, WIDTH)}, r"k \(2, 2, 6, 8\), v \(2, 1, 6, 8\)"),
    "tokens of k and v": ({"v": zeros(BATCH, KV_HEADS, 5, WIDTH)}, r"k \(2, 2, 6, 8\), v \(2, 2, 5, 8\)"),
    "tokens of q and k": ({"q": zeros(BATCH, HEADS, 1, WIDTH)}, r"as many query tokens as key tokens .*got 1 and 6"),
    "head sizes of q and k": ({"q": zeros(BATCH, HEADS, TOKENS, 4)}, "q and k must have one head size, got 4 and 8"),
    "no tokens": (
        {"q": zeros(BATCH, HEADS, 0, WIDTH), "k": zeros(BATCH, KV_HEADS, 0, WIDTH), "v": zeros(BATCH, KV_HEADS, 0, 8)},
        r"at least 1, got q \(2, 4, 0, 8\)",
    ),
    "head size 0": ({"v": zeros(BATCH, KV_HEADS, TOKENS, 0)}, r"at least 1, got .*v \(2, 2, 6, 0\)"),
    "mixed dtypes": (
        {"v": zeros(BATCH, KV_HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)},
        r"one dtype .*q torch\.float32 .*v torch\.bfloat16",
    ),
    "integers": (tensors(dtype=torch.int64), r"floating point tensors, got torch\.int64"),
}
WRONG_OPTIONS = {
    "scale below 0": ({"scale": -0.5}, r"scale must be above 0, or None for D \*\* -0\.5, got -0\.5"),
    "scale 0": ({"scale": 0.0}, r"scale must be above 0, or None for D \*\* -0\.5, got 0\.0"),
    "an unknown pattern": ({"pattern": "exactly"}, "ring_attention: pattern 'exactly' is not known"),
    "pattern as a dict": ({"pattern": EXACT.to_dict()}, "pattern must be a Pattern, or its text .*, got {'pattern'"),
    "documents that overlap": (
        {"documents": [[(0, 6)], [(0, 4), (3, 6)]]},
        r"batch row 1 must be ascending, apart.*\(3, 6\) after 4 tokens",
    ),
    "an empty document": ({"documents": [[(2, 2)], []]}, r"not empty .*\(2, 2\)"),
    "a document beyond the row": ({"documents": [[], [(4, 7)]]}, r"within the sequence of 6 tokens.*\(4, 7\)"),
    "documents for another batch": ({"documents": [[(0, 6)]]}, "one list for each batch row, got 1 for 2 batch rows"),
    "documents of no batch row": ({"documents": [(0, 3), (3, 6)]}, "documents"),
    "documents of fractions": ({"documents": [[(0.5, 2.9)], []]}, r"documents|0\.5"),
    "a layout by name": ({"layout": "zigzag"}, "layout"),
    "a layout without a hash": ({"layout": ["zigzag"]}, "layout must be a SequenceLayout"),
    "a layout of another length": (
        {"layout": ra.SequenceLayout("contiguous", 7, 1)},
        r"seq_len=7.* = 7 tokens, got 6: shard whole sequences of 7 tokens with ring\.shard",
    ),
    "a layout of more ranks": (
        {"layout": ra.SequenceLayout("contiguous", 12, 2)},
        "layout is for 2 ranks, the ring has 1",
    ),
}
WRONG = {**WRONG_TENSORS, **WRONG_OPTIONS}


@pytest.mark.parametrize("name", WRONG)
def test_one_rank(name):
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        ra.ring_attention(**{**tensors(), **changes})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layout": "striped"},
            "layout must be one of 'auto', 'contiguous', 'zigzag', 'documents', got 'striped'",
        ),
        ({"transport": "nccl"}, "transport must be one of 'auto', 'ring', 'collective', 'heads', 'local', got 'nccl'"),
        ({"transport": "collective"}, r"transport='collective' needs torch\.distributed to be initialized"),
    ],
    ids=str,
)
def test_settings_of_a_ring(settings, message):
    with pytest.raises(ValueError, match=message):
        ra.Ring(**settings)


def test_rows_to_shard():
    ring = ra.Ring()
    layout = ring.layout_for(6, EXACT)
    for move in (ring.shard, ring.unshard):
        with pytest.raises(ValueError, match=rf"{move.__name__}: expected 6 tokens along dim 1, got 5 in \(2, 5\)"):
            move(zeros(2, 5), layout)
        with pytest.raises(ValueError, match="layout is for 2 ranks, the ring has 1"):
            move(zeros(2, 6), ra.SequenceLayout("contiguous", 6, 2))
    with pytest.raises(ValueError, match="seq_len must be an integer of at least 1, got 0"):
        ring.layout_for(0, EXACT)


#: What rank 1 alone passes otherwise, and what both ranks must read: the name, and both values.
DIFFERENT = {
    "shape": (
        {"q": zeros(BATCH, 2, TOKENS, WIDTH)},
        r"disagree on the shape of q.*rank 0: \(2, 4, 6, 8\), rank 1: \(2, 2, 6, 8\)",
    ),
    "key heads": (
        {"k": zeros(BATCH, 1, TOKENS, WIDTH), "v": zeros(BATCH, 1, TOKENS, WIDTH)},
        "disagree on the number of key/value heads: rank 0: 2, rank 1: 1",
    ),
    "width of v": ({"v": zeros(BATCH, KV_HEADS, TOKENS, 5)}, "disagree on the width of v: rank 0: 8, rank 1: 5"),
    "dtype": (tensors(dtype=torch.float64), r"disagree on dtype: rank 0: torch\.float32, rank 1: torch\.float64"),
    "another pattern": (
        {"pattern": ra.Pattern((ra.Window(3),)), "layout": None},
        "disagree on pattern: rank 0: exact, rank 1: window:3",
    ),
    "layout kind": (
        {"layout": ra.SequenceLayout("contiguous", 2 * TOKENS, 2)},
        "disagree on layout: rank 0: .*'zigzag'.*rank 1: .*'contiguous'",
    ),
    "length of the row": (
        {"layout": ra.SequenceLayout("zigzag", 2 * TOKENS - 1, 2)},
        "disagree on layout: rank 0: .*seq_len=12.*rank 1: .*seq_len=11",
    ),
    "causal": ({"causal": False}, "disagree on causal: rank 0: True, rank 1: False"),
    "scale": ({"scale": 0.25}, r"disagree on scale: rank 0: 0\.35\d*, rank 1: 0\.25"),
    "other documents": (
        {"documents": [[(0, 12)], [(0, 5), (5, 12)]]},
        r"disagree on documents: rank 0: \(\(\(0, 12\),\), \(\(0, 12\),\)\), rank 1: .*\(\(0, 5\), \(5, 12\)\)",
    ),
}
#: What rank 1 alone passes and would be refused alone too.
INVALID = {
    "q of 3 dimensions": ({"q": zeros(HEADS, TOKENS, WIDTH)}, r"q must be a tensor"),
    "head counts": ({"q": zeros(BATCH, 3, TOKENS, WIDTH)}, "multiple of .*got 3 and 2"),
    "mixed dtypes": ({"v": zeros(BATCH, KV_HEADS, TOKENS, WIDTH, dtype=torch.float64)}, "one dtype"),
    "integers": (tensors(dtype=torch.int64), r"floating point tensors, got torch\.int64"),
    "pattern": ({"pattern": "exactly"}, "ring_attention: pattern 'exactly' is not known"),
    "documents": ({"documents": [[(0, 13)], []]}, r"within the sequence of 12 tokens.*\(0, 13\)"),
    "layout": ({"layout": ra.SequenceLayout("zigzag", 12, 3)}, "layout is for 3 ranks, the ring has 2"),
    "tokens": (
        {"q": zeros(BATCH, HEADS, 5, 8), "k": zeros(BATCH, KV_HEADS, 5, 8), "v": zeros(BATCH, KV_HEADS, 5, 8)},
        r"got 5|shape of q.*rank 1: \(2, 4, 5, 8\)|disagree on",
    ),
}


def right_call_error(ring):
    """Of a call in which all ranks agree, in float64, relative to the oracle."""
    whole = tensors(seed=7, tokens=2 * TOKENS, dtype=torch.float64)
    pattern = whole.pop("pattern")
    layout = ring.layout_for(2 * TOKENS, pattern)
    local = {name: ring.shard(x, layout, dim=2) for name, x in whole.items()}
    got = ring.unshard(ra.ring_attention(**local, pattern=pattern, ring=ring), layout, dim=2)
    want, _ = reference_attention(**whole, pattern=pattern)
    return float((got - want).abs().max() / want.abs().max())


def check_settings_of_a_ring_of_two(rank):
    with pytest.raises(ValueError, match="transport='local' serves 1 rank, got 2: use 'auto', 'ring' or 'collective'"):
        ra.Ring(transport="local")
    group = dist.new_group([0])
    if rank == 0:
        assert ra.Ring(group).world_size == 1
    else:
        with pytest.raises(ValueError, match="rank 1 of the world is not in the group"):
            ra.Ring(group)
    alone = ra.Ring.alone()
    assert (alone.rank, alone.world_size) == (0, 1)


def refused_on_both_ranks(rank):
    """At first, and after right calls, which all ranks have agreed on."""
    check_settings_of_a_ring_of_two(rank)
    ring = ra.Ring(layout="zigzag")
    for _ in range(2):
        for name, (changes, message) in (DIFFERENT | INVALID).items():
            call = {**tensors(), "layout": ring.layout_for(2 * TOKENS, EXACT)}
            if rank == 1:
                call |= {key: value for key, value in changes.items() if value is not None}
            start = time.perf_counter()
            with pytest.raises(ValueError) as refused:
                ra.ring_attention(**call, ring=ring)
            assert re.search(message, str(refused.value), re.DOTALL), f"{name}, rank {rank}: {refused.value}"
            assert time.perf_counter() - start < PROMPTLY, f"{name}, rank {rank}"
            dist.barrier()
        assert right_call_error(ring) <= EXACT_ATTENTION
        # The call that rank 0 makes in each case above.
        ra.ring_attention(**tensors(), layout=ring.layout_for(2 * TOKENS, EXACT), ring=ring)


def test_ranks_that_differ(ranks):
    ranks.run(refused_on_both_ranks, 2)


def test_pieces_of_a_document_out_of_its_order():
    rows = (((range(6, 8), range(0, 2)), (range(2, 6),)),)
    layout = ra.SequenceLayout("documents", 8, 2, rows)

    def call(ring):
        x = torch.zeros(1, 1, 4, 4)
        with pytest.raises(
            ValueError, match=r"rank 0 holds tokens of document \(0, 8\) of batch row 0 out of their order"
        ):
            ra.ring_attention(x, x, x, pattern="exact", ring=ring, layout=layout)
        apart = ra.ring_attention(x, x, x, pattern="exact", ring=ring, layout=layout, documents=[[(0, 5), (5, 8)]])
        assert apart.shape == x.shape

    run_simulated(call, 2)
