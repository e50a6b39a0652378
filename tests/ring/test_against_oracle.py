"""Outputs, log-sum-exps and all gradients equal the dense oracle: random patterns, lengths, heads, documents, layouts."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import multiplicity_matrix
from hf_ring_attention.plan import routes
from hf_ring_attention.plan.problem import RingSettings
from tests.support.cases import (
    EXACT_ATTENTION,
    TRANSPORTS,
    case_of,
    check_cases,
    check_simulated,
    random_case,
    random_cases,
)
from tests.support.ranks import run_simulated

DTYPES = (torch.float64, torch.float32)
#: CUDA's kernels sum in another order than the CPU's. Kernels for bfloat16, which keeps 8 bits, round the weights of values
#: too.
ON_CUDA = {torch.float64: EXACT_ATTENTION, torch.float32: 1e-5, torch.bfloat16: 2e-2}
LAYOUTS = ("contiguous", "zigzag", "documents")
#: A transport, and whether in as many head groups as there can be.
WAYS = {"ring of head groups": ("ring", True), **{name: (name, False) for name in TRANSPORTS}}
#: The settings of rings whose payloads travel as usual; and in as many head groups as there can be, however small.
SETTINGS = {False: RingSettings(), True: RingSettings(rows_of_a_head_group=1, large_payload=10**9)}
#: The ranks of the rings that one launch of 8 processes forms, each with its number of cases.
RINGS = (((0, 1), 2), ((2, 3, 4), 2), ((0, 5, 6, 7), 2), (tuple(range(8)), 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_local(dtype, rng):
    check_cases(ra.Ring(), random_cases(rng, 100 if dtype == torch.float64 else 30, dtype))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_local_on_cuda(dtype, rng):
    check_cases(ra.Ring(), random_cases(rng, 100, dtype), tolerance=ON_CUDA[dtype], device="cuda")


def sharded(rank, seed):
    """Each case in all ways before the next one, so that they share its plans; each way in one dtype, and then in the other."""
    groups = [dist.new_group(list(ranks)) for ranks, _ in RINGS]
    for group, (ranks, count) in zip(groups, RINGS):
        if rank not in ranks:
            continue
        rng = random.Random(f"{seed} {ranks}")
        dtypes = itertools.cycle(DTYPES)  # of an odd number of ways
        for case in random_cases(rng, count):
            for (transport, split), layout in itertools.product(WAYS.values(), LAYOUTS):
                ring = ra.Ring(group, layout=layout, transport=transport)
                ring.settings = SETTINGS[split]
                check_cases(ring, [replace(case, dtype=next(dtypes))])


def test_sharded(rng, ranks):
    """Rings of 2, 3, 4 and 8 processes: with the default head groups, and with as many as can be."""
    ranks.run(sharded, 8, rng.random())


def plan_once(problem):
    """Makes what ranks share before they do: each of 64 threads would find it missing, and make it."""
    for start, stop in {document for row in problem.documents for document in row}:
        multiplicity_matrix(problem.pattern, stop - start, problem.num_heads, problem.num_kv_heads, problem.causal)
    routes.ring_laps(problem)


@pytest.mark.parametrize(
    ("layout", "transport", "world_size"), [("contiguous", "ring", 64), ("zigzag", "collective", 16)]
)
def test_simulated_on_many_ranks(layout, transport, world_size, rng):
    """Rows of several tokens a rank, and few heads: every rank has the whole tensors. For 32 in zigzag see `test_bfloat16`."""
    seq_len = rng.randint(130, 140)
    documents = [[(0, seq_len)], [(0, 70), (71, seq_len)]]
    case = random_case(rng, heads=(4, 2), batch=2, seq_len=seq_len, documents=documents)
    plan_once(case.problem(ra.SequenceLayout(layout, seq_len, world_size)))
    check_simulated([case], world_size, layout=layout, transport=transport)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_simulated_on_cuda(world_size, transport, dtype, rng):
    for layout in LAYOUTS:
        options = {"tolerance": ON_CUDA[dtype], "device": "cuda", "layout": layout, "transport": transport}
        check_simulated(random_cases(rng, 10, dtype), world_size, **options)


def root_mean_square_errors(case, world_size, transport):
    """Errors of out, dq, dk and dv against the oracle."""
    layout = ra.SequenceLayout("zigzag", case.seq_len, world_size)
    plan_once(case.problem(layout))
    *tensors, dout, _ = case.tensors
    out, _, *grads = case.definition

    def attention(ring):
        leaves = [ring.shard(x, layout, dim=2).requires_grad_() for x in tensors]
        local = ra.ring_attention(*leaves, pattern=case.pattern, ring=ring, layout=layout)
        local.backward(ring.shard(dout, layout, dim=2))
        pairs = zip((local.detach(), *(x.grad for x in leaves)), (out, *grads), strict=True)
        return torch.stack([(x.double() - ring.shard(y, layout, dim=2)).square().sum() for x, y in pairs])

    squares = sum(run_simulated(attention, world_size, transport=transport))
    return (squares / torch.tensor([x.numel() for x in (out, *grads)])).sqrt()


@pytest.mark.parametrize(("pattern", "most"), [("exact", 32), ("longnet:128/1,all/4", 16)])
def test_bfloat16(pattern, most, rng):
    """A ring is as exact as one device, and more ranks do not make it less exact; many steps of small tiles are slow.

    The measure is the root mean square error: over some 10,000 numbers it hardly depends on the seed. The largest error
    comes from a single rounding and may double by chance.
    """
    sizes = {"seq_len": 256, "head_dim": 32, "value_dim": 32, "seed": rng.randrange(2**31)}
    case = case_of(pattern, dtype=torch.bfloat16, **sizes)
    alone = root_mean_square_errors(case, 1, "auto")
    assert torch.all(alone > 0)
    for transport in TRANSPORTS:
        few, many = (root_mean_square_errors(case, world_size, transport) for world_size in (2, most))
        assert torch.all(few.maximum(many) <= 2 * alone), f"{transport}: {few} and {many}, alone {alone}"
        assert torch.all(many <= 1.5 * few), f"{transport}: {few}, and {many} on {most} ranks"
