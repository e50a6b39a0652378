"""Numbers at their limits: infinities and NaNs, large and tiny scores, float16, equal bits, long sequences, later tokens."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.plan.traffic import RowBytes, collective_traffic, ring_traffic
from tests.support.cases import check_simulated, problem_of, random_case, random_pattern
from tests.support.ranks import run_simulated
from tests.support.tolerance import allowed

#: A transport, and the ranks of its ring.
WAYS = [("ring", 1), ("ring", 3), ("collective", 2), ("heads", 2)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PATTERNS = ("exact", "window:8+2", "pyramid:8,2", "longnet:16/1,64/4")
NAMES = ("out", "dq", "dk", "dv")


def outputs(ring, tensors, dout, *, dtype=None, **options):
    """Whole [out, dq, dk, dv] of a call on one ring; `tensors` are whole q, k, v."""
    layout = ring.layout_for(tensors[0].shape[2], options["pattern"], options.get("documents"))
    local = [ring.shard(x, layout, dim=2).clone().requires_grad_() for x in tensors]
    out = ra.ring_attention(*local, ring=ring, layout=layout, **options)
    out.backward(ring.shard(dout, layout, dim=2))
    return [ring.unshard(x.detach(), layout, dim=2) for x in (out, *(x.grad for x in local))]


def on_ranks(world_size, transport, tensors, dout, **options):
    """`outputs` of the first of simulated ranks."""
    return run_simulated(lambda ring: outputs(ring, tensors, dout, **options), world_size, transport=transport)[0]


def drawn(dtype=torch.float32, tokens=64, heads=2, width=8):
    *tensors, dout = (torch.randn(1, heads, tokens, width).to(dtype) for _ in range(4))
    return tensors, dout


@pytest.mark.parametrize(("transport", "world_size"), WAYS)
def test_what_is_not_finite_stays_in_its_document(transport, world_size, rng):
    """Neither padding nor another document changes a bit of a document's outputs and gradients."""
    documents = [[(2, 20), (20, 50)]]
    outside = {"padding": [*range(2), *range(50, 64)], "the first": [*range(2, 20)], "the second": [*range(20, 50)]}
    values = itertools.cycle(rng.sample([math.nan, math.inf, -math.inf], 3))
    for pattern in (*rng.sample(PATTERNS, 2), random_pattern(rng)):
        tensors, dout = drawn(torch.float64)
        next(values)  # Each of the three places has other values under the next pattern.
        clean = on_ranks(world_size, transport, tensors, dout, pattern=pattern, documents=documents)
        for name, places in outside.items():
            spoilt, value = [x.clone() for x in (*tensors, dout)], next(values)
            for x in spoilt:
                x[:, :, rng.sample(places, rng.randint(1, len(places)))] = value
            found = on_ranks(world_size, transport, spoilt[:3], spoilt[3], pattern=pattern, documents=documents)
            others = sorted({*range(64)} - {*places})
            for which, x, right in zip(NAMES, found, clean):
                assert torch.equal(x[:, :, others], right[:, :, others]), f"{value} in {name}: {which} under {pattern}"


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("transport", "world_size"), WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_scores_of_ten_thousand(dtype, transport, world_size, rng):
    """Softmax picks a key or two there. A weight is off by the rounding of its score: 10,000 times a number's rounding.

    A plain computation does not show this, as it is exact if it picks one key; so the rounding of a score is the bound.
    """
    cases, largest = [], 1e4
    for _ in range(3):
        case = random_case(rng, dtype, heads=(4, 2) if transport == "heads" else None, softcap=None)
        q, k, *_ = case.tensors
        norms = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()  # No score is above their product.
        cases.append(replace(case, scale=largest / float(norms)))
    tolerance = allowed(largest * torch.finfo(dtype).eps, dtype)
    check_simulated(cases, world_size, tolerance=tolerance, transport=transport)


@pytest.mark.parametrize(("transport", "world_size", "pattern"), [(*way, x) for way, x in zip(WAYS, PATTERNS)])
def test_float16_to_its_bounds(pattern, transport, world_size):
    """Means of almost the largest numbers are these to some roundings; scores beyond the largest are not infinite.

    Of the very largest, torch's own kernel makes infinities at times, since its weights add up to 1 and a rounding.
    """
    off = allowed(0, torch.float16)
    value = torch.finfo(torch.float16).max * (1 - 2 * off)
    (q, k, v), dout = drawn(torch.float16)
    signs = torch.where(torch.arange(2) == 0, 1.0, -1.0)[None, :, None, None]
    v = (signs * value).expand_as(v).to(torch.float16).contiguous()
    out, *_ = on_ranks(world_size, transport, (q, k, v), dout, pattern=pattern)
    assert float((out.double() - v.double()).abs().max()) <= off * value
    q, k = (128 * x.sign() for x in (q, k))  # Scores of up to 128 * 128 * 8, twice the largest number of float16.
    found = on_ranks(world_size, transport, (q, k, dout), dout, pattern=pattern, scale=1.0)
    plain = on_ranks(1, "ring", (q, k, dout), dout, pattern=pattern, scale=1.0)
    right = on_ranks(1, "ring", [x.double() for x in (q, k, dout)], dout.double(), pattern=pattern, scale=1.0)
    largest = max(float(x.abs().max()) for x in right)
    rounding = max(float((x - exact).abs().max()) for x, exact in zip(plain, right)) / largest
    for name, x, exact in zip(NAMES, found, right):
        error = float((x - exact).abs().max()) / largest
        assert error <= allowed(rounding, torch.float16), f"{name} is {error} off, where one device is {rounding}"


@pytest.mark.parametrize(("transport", "world_size", "dtype"), [(*way, x) for way, x in zip(WAYS, DTYPES)])
def test_two_runs_have_the_same_bits(transport, world_size, dtype, rng):
    documents = [[(0, 20), (20, 50)], [(3, 64)]]
    for pattern in ("exact", random_pattern(rng)):
        tensors, dout = drawn(dtype)
        tensors, dout = [torch.cat([x, x.flip(2)]) for x in tensors], torch.cat([dout, dout])
        first, again = (
            on_ranks(world_size, transport, tensors, dout, pattern=pattern, documents=documents) for _ in range(2)
        )
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_plans_of_more_elements_than_32_bits_count(kind):
    """2^22 tokens of 8 heads x 128, 2^32 numbers, of which a window needs the last rows of each piece's neighbour."""
    tokens, world_size, heads, width = 2**22, 8, 8, 4096
    sizes = RowBytes(4 * 128, 8 * 128)
    problem = problem_of(f"window:{width}", (kind, tokens, world_size), heads=(heads, heads))
    # In zigzag the last rank has two pieces that are neighbours.
    pieces = world_size if kind == "contiguous" else 2 * world_size - 1
    needed = (pieces - 1) * (width - 1) * heads
    for traffic in (ring_traffic, collective_traffic):
        moved = sum(traffic(problem, rank, sizes).forward.received for rank in range(world_size))
        assert moved == needed * sizes.row_bytes
    sizes = {"seq_len": tokens, "ring_size": world_size, "num_heads": heads, "head_dim": 128}
    call = ra.explain("exact", **sizes, layout=kind, transport="ring")
    of_last = (world_size - 1) * (tokens // world_size) * heads * 2 * 128 * 2
    assert max(share.collective.forward.received for share in call.ranks) == of_last > 2**33


# ---- later tokens change nothing

CASES = 8


def cut_documents(rng):
    """(case, kept, later) of every document of random cases: [B, n] its first tokens, at least one, and its later ones."""
    for _ in range(CASES):
        case = random_case(rng, rng.choice(DTYPES[:3]), rng.choice([30, 30, 90]), causal=True)
        for row, (start, stop) in ((row, span) for row, spans in enumerate(case.rows) for span in spans):
            cut, (kept, later) = (
                rng.randint(start + 1, stop),
                torch.zeros(2, case.batch, case.seq_len, dtype=torch.bool),
            )
            kept[row, start:cut] = later[row, cut:stop] = True
            yield case, kept, later


def draw(case, x):
    return torch.randn(x.shape, dtype=torch.float64).to(case.dtype)


def attention(case, tensors):
    return ra.ring_attention(*tensors, **case.options, return_lse=True)


def test_later_tokens(rng):
    compared = 0
    for case, kept, later in cut_documents(rng):
        changed = [torch.where(later[:, None, :, None], 100 * draw(case, x), x) for x in case.tensors[:3]]
        for got, want in zip(attention(case, changed), attention(case, case.tensors[:3]), strict=True):
            assert torch.equal(got.movedim(2, 1)[kept], want.movedim(2, 1)[kept]), f"{case}: {kept.nonzero().tolist()}"
        compared += int(later.any())
    assert compared >= CASES / 2


def test_gradients(rng):
    """Of a document's first outputs, with respect to every other token: exactly 0; with respect to themselves: not."""
    for case, kept, _ in cut_documents(rng):
        leaves = [x.clone().requires_grad_() for x in case.tensors[:3]]
        out, _ = attention(case, leaves)
        # What else the loss takes from these outputs is 0, not left out: the engine computes with it.
        out.backward(torch.where(kept[:, None, :, None], draw(case, out), 0))
        grads = [x.grad.movedim(2, 1) for x in leaves]
        assert all(torch.all(grad[~kept] == 0) for grad in grads), f"{case}: {kept.nonzero().tolist()}"
        assert torch.any(grads[2][kept] != 0), f"{case}: {kept.nonzero().tolist()}"
