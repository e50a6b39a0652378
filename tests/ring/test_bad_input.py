"""Wrong arguments raise ValueErrors that name the argument and its value; on a ring, on every rank and at once."""

import time

import pytest
import torch
import torch.distributed as dist

import hf_ring_attention as ra
from tests.support.cases import EVERY_TRANSPORT, case_of, check_cases
from tests.support.ranks import PROMPTLY, run_simulated
from tests.support.refusals import refused

EXACT = ra.Pattern.exact()
BATCH, HEADS, KV_HEADS, TOKENS, WIDTH = 2, 4, 2, 6, 8
ROWS = (BATCH, KV_HEADS, TOKENS, WIDTH)


def tensors(dtype=torch.float32):
    """Arguments of a call that is right."""
    case = case_of("exact", batch=BATCH, seq_len=TOKENS, dtype=torch.float64)
    return {name: x.to(dtype) for name, x in zip("qkv", case.tensors)} | {"pattern": EXACT}


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


#: Texts of errors, by what is wrong: tensors, and then options.
WRONG = {
    r"q must be a tensor \[batch, .*got \(4, 6, 8\)": {"q": zeros(HEADS, TOKENS, WIDTH)},
    "k must be a tensor .*got list": {"k": [1.0]},
    "multiple of .*got 1 and 2": {"q": zeros(BATCH, 1, TOKENS, WIDTH)},
    r"batch .* equal, got q \(1, 4, 6, 8\), k \(2, 2, 6, 8\)": {"q": zeros(1, HEADS, TOKENS, WIDTH)},
    "k (2, 2, 6, 8), v (2, 1, 6, 8)": {"v": zeros(BATCH, 1, TOKENS, WIDTH)},
    "as many query tokens as key tokens .*got 1 and 6": {"q": zeros(BATCH, HEADS, 1, WIDTH)},
    "q and k must have one head size, got 4 and 8": {"q": zeros(BATCH, HEADS, TOKENS, 4)},
    "at least 1, got q (2, 4, 0, 8)": {name: zeros(BATCH, n, 0, WIDTH) for name, n in (("q", 4), ("k", 2), ("v", 2))},
    r"at least 1, got .*v \(2, 2, 6, 0\)": {"v": zeros(BATCH, KV_HEADS, TOKENS, 0)},
    r"one dtype .*q torch\.float32 .*v torch\.bfloat16": {"v": zeros(*ROWS, dtype=torch.bfloat16)},
    "floating point tensors, got torch.int64": tensors(dtype=torch.int64),
    "scale must be above 0, or None for D ** -0.5, got -0.5": {"scale": -0.5},
    "ring_attention: pattern 'exactly' is not known": {"pattern": "exactly"},
    "pattern must be a Pattern, or its text .*, got {'pattern'": {"pattern": EXACT.to_dict()},
    r"batch row 1 must be ascending, apart.*\(3, 6\) after 4 tokens": {"documents": [[(0, 6)], [(0, 4), (3, 6)]]},
    r"not empty .*\(2, 2\)": {"documents": [[(2, 2)], []]},
    r"within the sequence of 6 tokens.*\(4, 7\)": {"documents": [[], [(4, 7)]]},
    "one list for each batch row, got 1 for 2 batch rows": {"documents": [[(0, 6)]]},
    "documents": {"documents": [(0, 3), (3, 6)]},  # of no batch row
    r"documents|0\.5": {"documents": [[(0.5, 2.9)], []]},
    "layout must be a SequenceLayout": {"layout": ["zigzag"]},
    r"seq_len=7.* = 7 tokens, got 6: shard whole sequences of 7 tokens with ring\.shard": {
        "layout": ra.SequenceLayout("contiguous", 7, 1)
    },
    "layout is for 2 ranks, the ring has 1": {"layout": ra.SequenceLayout("contiguous", 12, 2)},
}


@pytest.mark.parametrize(("message", "changes"), WRONG.items())
def test_one_rank(message, changes):
    refused(message, ra.ring_attention, **{**tensors(), **changes})


def test_settings_of_a_ring():
    kinds = "'auto', 'contiguous', 'zigzag', 'documents', got 'striped'"
    refused(f"layout must be one of {kinds}", ra.Ring, layout="striped")
    kinds = "'auto', 'ring', 'collective', 'heads', 'local', got 'nccl'"
    refused(f"transport must be one of {kinds}", ra.Ring, transport="nccl")
    needs = "transport='collective' needs torch.distributed to be initialized"
    refused(needs, ra.Ring, transport="collective")


def test_rows_to_shard():
    ring = ra.Ring()
    layout, of_two = ring.layout_for(6, EXACT), ra.SequenceLayout("contiguous", 6, 2)
    for move in (ring.shard, ring.unshard):
        refused(f"{move.__name__}: expected 6 tokens along dim 1, got 5 in (2, 5)", move, zeros(2, 5), layout)
        refused("layout is for 2 ranks, the ring has 1", move, zeros(2, 6), of_two)
    refused("seq_len must be an integer of at least 1, got 0", ring.layout_for, 0, EXACT)


#: What both ranks must read, the name and both values, by what rank 1 alone passes otherwise.
DIFFERENT = {
    r"the shape of q.*rank 0: \(2, 4, 6, 8\), rank 1: \(2, 2, 6, 8\)": {"q": zeros(BATCH, 2, TOKENS, WIDTH)},
    "the number of key/value heads: rank 0: 2, rank 1: 1": dict.fromkeys("kv", zeros(BATCH, 1, TOKENS, WIDTH)),
    "dtype: rank 0: torch.float32, rank 1: torch.float64": tensors(dtype=torch.float64),
    "pattern: rank 0: exact, rank 1: window:3": {"pattern": ra.Pattern((ra.Window(3),))},
    "layout: rank 0: .*'zigzag'.*rank 1: .*'contiguous'": {"layout": ra.SequenceLayout("contiguous", 2 * TOKENS, 2)},
    "layout: rank 0: .*seq_len=12.*rank 1: .*seq_len=11": {"layout": ra.SequenceLayout("zigzag", 2 * TOKENS - 1, 2)},
    "causal: rank 0: True, rank 1: False": {"causal": False},
    r"scale: rank 0: 0\.35\d*, rank 1: 0\.25": {"scale": 0.25},
    r"documents: rank 0: \(\(\(0, 12\),\), \(\(0, 12\),\)\), rank 1: .*\(\(0, 5\), \(5, 12\)\)": {
        "documents": [[(0, 12)], [(0, 5), (5, 12)]]
    },
}
#: The same of what would be refused on one rank too.
INVALID = {
    "q must be a tensor": {"q": zeros(HEADS, TOKENS, WIDTH)},
    "one dtype": {"v": zeros(*ROWS, dtype=torch.float64)},
    "floating point tensors, got torch.int64": tensors(dtype=torch.int64),
    "ring_attention: pattern 'exactly' is not known": {"pattern": "exactly"},
    r"within the sequence of 12 tokens.*\(0, 13\)": {"documents": [[(0, 13)], []]},
    "layout is for 3 ranks, the ring has 2": {"layout": ra.SequenceLayout("zigzag", 12, 3)},
    r"got 5|shape of q.*rank 1: \(2, 4, 5, 8\)|disagree on": {
        name: zeros(BATCH, n, 5, WIDTH) for name, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    },
}


def check_right_call(ring):
    """A call in which all ranks agree, in float64."""
    check_cases(ring, [case_of("exact", batch=BATCH, seq_len=2 * TOKENS)])


def check_settings_of_a_ring_of_two(rank):
    refused("transport='local' serves 1 rank, got 2: use 'auto', 'ring' or 'collective'", ra.Ring, transport="local")
    group = dist.new_group([0])
    if rank == 0:
        assert ra.Ring(group).world_size == 1
    else:
        refused("rank 1 of the world is not in the group", ra.Ring, group)
    alone = ra.Ring.alone()
    assert (alone.rank, alone.world_size) == (0, 1)


def refused_on_both_ranks(rank):
    """At first, and after right calls, which all ranks have agreed on."""
    check_settings_of_a_ring_of_two(rank)
    ring = ra.Ring(layout="zigzag")
    for _ in range(2):
        for message, changes in (DIFFERENT | INVALID).items():
            call = {**tensors(), "layout": ring.layout_for(2 * TOKENS, EXACT), **(changes if rank == 1 else {})}
            message = f"disagree on {message}" if message in DIFFERENT else message
            start = time.perf_counter()
            refused(message, ra.ring_attention, **call, ring=ring)
            assert time.perf_counter() - start < PROMPTLY, message
            dist.barrier()
        check_right_call(ring)
        # The call that rank 0 makes in each case above.
        ra.ring_attention(**tensors(), layout=ring.layout_for(2 * TOKENS, EXACT), ring=ring)


def test_ranks_that_differ(ranks):
    ranks.run(refused_on_both_ranks, 2)


def test_pieces_of_a_document_out_of_its_order():
    rows = (((range(6, 8), range(0, 2)), (range(2, 6),)),)
    layout = ra.SequenceLayout("documents", 8, 2, rows)

    def call(ring):
        x = torch.zeros(1, 1, 4, 4)
        said = "rank 0 holds tokens of document (0, 8) of batch row 0 out of their order"
        refused(said, ra.ring_attention, x, x, x, pattern="exact", ring=ring, layout=layout)
        apart = ra.ring_attention(x, x, x, pattern="exact", ring=ring, layout=layout, documents=[[(0, 5), (5, 8)]])
        assert apart.shape == x.shape

    run_simulated(call, 2)


# ---- calls and backward passes that differ across ranks


def call(ring, seed):
    """A call of a rank, and a leaf that takes its gradient."""
    generator = torch.Generator().manual_seed(100 * seed + ring.rank)
    x = torch.randn(3, 1, 2, 6, 8, generator=generator, dtype=torch.float64).requires_grad_()
    return x, ra.ring_attention(*x, pattern=ra.Pattern.exact(), ring=ring)


def said(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def in_another_order(ring):
    """The error of two backward passes in another order on each rank; two passes in one order follow."""
    first, second = call(ring, 0), call(ring, 1)
    mixed = [first, second] if ring.rank == 0 else [second, first]
    error = said(lambda: [out.sum().backward() for _, out in mixed])
    # In any order that all ranks share, each call gets the right gradient.
    found = []
    for order in ((0, 1), (1, 0)):
        calls = [call(ring, 0), call(ring, 1)]
        for number in order:
            calls[number][1].sum().backward()
        found.append([x.grad for x, _ in calls])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    return error


def unrecorded_on_one_rank(ring):
    """The error of a call whose gradients one rank alone records; a call of all follows."""

    def frozen():
        with torch.set_grad_enabled(ring.rank == 0):
            call(ring, 0)

    error = said(frozen)
    x, out = call(ring, 0)
    out.sum().backward()
    assert x.grad is not None
    return error


def backward_against_forward(ring):
    """The error of a rank that runs a backward pass while the other makes another call."""
    _, out = call(ring, 0)
    return said((lambda: out.sum().backward()) if ring.rank else (lambda: call(ring, 1)))


def unsharding(ring):
    """The errors of calls of `unshard` that differ; one of all ranks follows."""
    layout = ring.layout_for(8, ra.Pattern.exact())
    errors = {}
    states = [torch.randn(1, 4, 3, requires_grad=True) for _ in range(2)]
    wholes = [ring.unshard(x, layout) for x in states]
    errors["order"] = said(lambda: [wholes[number].sum().backward() for number in ((0, 1), (1, 0))[ring.rank]])
    errors["shape"] = said(lambda: ring.unshard(torch.zeros(1, 4, 3 + ring.rank), layout))
    errors["one rank"] = said(lambda: ring.unshard(torch.zeros(1, 4 + ring.rank, 3), layout))
    errors["another call"] = said((lambda: call(ring, 0)) if ring.rank else lambda: ring.unshard(states[0], layout))
    # A gather would take the messages of another call at the same time.
    errors["gather"] = said((lambda: call(ring, 0)) if ring.rank else lambda: ring.gather(torch.zeros(2)))
    errors["gathered"] = said(lambda: ring.gather(torch.zeros(2 + ring.rank)))
    whole = ring.unshard(states[0].detach().requires_grad_(), layout)
    whole.sum().backward()
    return errors


def refusals(rank):
    of_transports = {}
    for transport in EVERY_TRANSPORT:
        ring = ra.Ring(transport=transport)
        of_transports[transport] = in_another_order(ring), unrecorded_on_one_rank(ring)
    return of_transports, backward_against_forward(ra.Ring()), unsharding(ra.Ring())


def test_calls_in_other_orders_are_refused_on_every_rank(ranks):
    expected = {
        "order": "disagree on the call: rank 0: the backward pass of call 1",
        "shape": "disagree on the shape of a rank's tensor: rank 0: (1, 4, 3), rank 1: (1, 4, 4)",
        "one rank": "expected 4 tokens along dim 1, got 5",
        "another call": "disagree on the call: rank 0: unshard, rank 1: a forward pass of attention",
        "gather": "disagree on the call: rank 0: gather, rank 1: a forward pass of attention",
        "gathered": "disagree on the shape of a tensor to gather: rank 0: (2,), rank 1: (3,)",
    }
    call = "the ranks of the ring disagree on the call: rank 0: the backward pass of call 1,"
    for of_transports, of_a_forward_pass, of_unsharding in ranks.run(refusals, 2):
        for transport, (order, gradients) in of_transports.items():
            assert call in order and "rank 1: the backward pass of call 2," in order, transport
            assert "disagree on whether gradients are recorded: rank 0: True, rank 1: False" in gradients, transport
        assert "rank 0: a forward pass of attention, rank 1: the backward pass of call 1" in of_a_forward_pass
        for name, text in expected.items():
            assert text in of_unsharding[name], name


def test_one_rank_compares_nothing():
    assert ra.Ring.alone().calls.next_number() == 0
