"""Random attention problems, and the comparison of outputs and all gradients with the oracle."""

import itertools
import random

import torch

import hf_ring_attention as ra
from hf_ring_attention.reference import reference_attention


def random_pattern(rng):
    """Any legal pattern, small: up to 4 dilated branches and 2 sinks."""
    while True:
        chain = [1]
        for _ in range(rng.randint(0, 3)):
            chain.append(chain[-1] * rng.choice([1, 2, 2, 3, 4]))
        overlap = rng.choice(["once", "count"])
        if overlap == "count":
            chain = [rng.choice([1, 2, 3, 4, 6]) for _ in chain] + [1]
            rng.shuffle(chain)
        branches = []
        for dilation in chain:
            kind = rng.choice([ra.Segment, ra.Window])
            length = dilation * rng.randint(1, 12)
            if kind is ra.Segment and rng.random() < 0.3:
                length = None
            branches.append(kind(length, dilation, rng.choice(["all", "dilated"])))
        for _ in range(rng.choice([0, 0, 1, 2])):
            branches.insert(rng.randint(0, len(branches)), ra.Sink(rng.randint(1, 9)))
        try:
            return ra.Pattern(tuple(branches), overlap, rng.choice(["kv_head", "query_head"]))
        except ValueError:
            continue


def random_documents(rng, batch, seq_len):
    """None, or documents with gaps (padding) between them, other ones in each batch row."""
    if rng.random() < 0.4:
        return None
    rows = []
    for _ in range(batch):
        cuts = sorted(rng.sample(range(seq_len + 1), min(seq_len + 1, rng.choice([2, 3, 4, 6]))))
        rows.append([pair for pair in itertools.pairwise(cuts) if rng.random() < 0.8])
    return rows


def random_case(rng, dtype=torch.float64, max_len=40):
    """Keyword arguments of `compare`."""
    batch, seq_len = rng.randint(1, 3), rng.randint(1, max_len)
    num_kv_heads = rng.randint(1, 4)
    head_dim = rng.choice([4, 7, 8, 16])
    return {
        "pattern": random_pattern(rng),
        "batch": batch,
        "seq_len": seq_len,
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * rng.randint(1, 3),
        "head_dim": head_dim,
        "value_dim": rng.choice([head_dim, head_dim, 3, 9]),
        "causal": rng.random() < 0.6,
        "documents": random_documents(rng, batch, seq_len),
        "scale": rng.choice([None, 0.3]),
        "softcap": rng.choice([None, None, 1.5]),
        "with_sinks": rng.random() < 0.3,
        "dtype": dtype,
        "seed": rng.randrange(2**31),
    }


def compare(
    ring,
    *,
    pattern,
    batch,
    seq_len,
    num_heads,
    num_kv_heads,
    head_dim,
    value_dim,
    causal,
    documents,
    scale,
    dtype,
    seed,
    softcap=None,
    with_sinks=False,
    device="cpu",
):
    """The largest error of out, lse, dq, dk, dv and the sinks' gradient, relative to the largest value (of any gradient).

    Every rank makes the same whole tensors, keeps its part, and compares the unsharded results.
    """
    generator = torch.Generator().manual_seed(seed)

    def tensor(heads, width):
        return torch.randn(batch, heads, seq_len, width, generator=generator, dtype=torch.float64).to(dtype)

    whole = [tensor(num_heads, head_dim), tensor(num_kv_heads, head_dim), tensor(num_kv_heads, value_dim)]
    dout = tensor(num_heads, value_dim)
    layout = ring.layout_for(seq_len, pattern)
    local = [ring.shard(x, layout, dim=2).to(device).requires_grad_() for x in whole]
    logits = torch.randn(num_heads, generator=generator, dtype=torch.float64).to(dtype) if with_sinks else None
    sinks = None if logits is None else logits.to(device, copy=True).requires_grad_()
    out, lse = ra.ring_attention(
        *local,
        pattern=pattern,
        ring=ring,
        layout=layout,
        causal=causal,
        scale=scale,
        documents=documents,
        softcap=softcap,
        sinks=sinks,
        return_lse=True,
    )
    assert out.dtype == dtype
    out.backward(ring.shard(dout, layout, dim=2).to(device))
    assert all(x.grad.dtype == dtype for x in local)
    got_out, got_lse, *got_grads = (
        ring.unshard(x.detach().cpu(), layout, dim=2) for x in (out, lse, *(x.grad for x in local))
    )

    exact = [x.double().requires_grad_() for x in whole]
    exact_sinks = None if logits is None else logits.to(torch.float64, copy=True).requires_grad_()
    want_out, want_lse = reference_attention(
        *exact, pattern=pattern, documents=documents, causal=causal, scale=scale, softcap=softcap, sinks=exact_sinks
    )
    want_out.backward(dout.double())
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in exact]
    if sinks is not None:
        got_grads.append(torch.stack(ring.gather(sinks.grad.cpu())).double().sum(0))
        grads.append(exact_sinks.grad)
    want_out, want_lse = want_out.detach(), want_lse.detach()
    empty = want_lse == -torch.inf
    assert torch.equal(got_lse == -torch.inf, empty), "queries without a key"
    assert torch.all(got_out[empty] == 0), "output of queries without a key"
    largest = max(float(grad.abs().max()) for grad in grads) or 1.0
    return {
        "out": float((got_out - want_out).abs().max()) / (float(want_out.abs().max()) or 1.0),
        "lse": float((got_lse - want_lse)[~empty].abs().max()) if (~empty).any() else 0.0,
        **{
            name: float((got - want).abs().max()) / largest
            for name, got, want in zip(("dq", "dk", "dv", "dsinks"), got_grads, grads)
        },
    }


def check_random_cases(ring, *, seed, count, tolerance, dtype=torch.float64, max_len=40, device="cpu"):
    """Compares `count` random cases; the seed decides them, the same on every rank. Returns the largest error."""
    worst = 0.0
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        case = random_case(rng, dtype, max_len)
        errors = compare(ring, **case, device=device)
        assert max(errors.values()) <= tolerance, f"seed {seed}, case {number}, {ring}: {errors} in {case}"
        worst = max(worst, *errors.values())
    return worst
