"""Later tokens change nothing, bit for bit, and have no gradient; test_numbers.py is about other documents and padding."""

import torch

import hf_ring_attention as ra
from tests.support.cases import random_case

CASES = 24
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def cut_documents(rng):
    """(case, kept, later) of every document of random cases: [B, n] its first tokens, at least one, and its later ones."""
    for _ in range(CASES):
        case = random_case(rng, rng.choice(DTYPES), rng.choice([30, 30, 90]), causal=True)
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
