"""Later tokens change nothing, bit for bit, and have no gradient; test_numbers.py is about other documents and padding."""

from dataclasses import replace

import pytest
import torch

import hf_ring_attention as ra
from tests.support.cases import random_case

CASES = 24
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class DrawnCase:
    """A random case with its tensors: rows of one document, or of several with padding between."""

    def __init__(self, rng, causal):
        case = random_case(rng, rng.choice(DTYPES), max_len=rng.choice([30, 30, 90]))
        self.case = case if causal is None else replace(case, causal=causal)
        self.rng, self.seq_len, self.documents = rng, case.seq_len, case.rows
        self.whole = self.case.tensors[:3]

    def draw(self, *shape):
        return torch.randn(shape, dtype=torch.float64).to(self.case.dtype)

    def attention(self, tensors):
        return ra.ring_attention(*tensors, **self.case.options, return_lse=True)

    def spans(self):
        """(batch row, start, stop) of every document."""
        return [(row, *span) for row, spans in enumerate(self.documents) for span in spans]

    def changed(self, where):
        """q, k and v with large random values at the tokens `where` [B, n]."""
        return [torch.where(where[:, None, :, None], 100 * self.draw(*x.shape), x) for x in self.whole]

    def earlier(self, row, start, stop):
        """[B, n], True for the first tokens of a document, at least one."""
        return self.document(row, start, self.rng.randint(start + 1, stop))

    def document(self, row, start, stop):
        """[B, n], True for the tokens of a document."""
        kept = torch.zeros(len(self.documents), self.seq_len, dtype=torch.bool)
        kept[row, start:stop] = True
        return kept


@pytest.fixture
def drawn_cases(rng):
    """A function that gives random cases, with the given causality if any."""
    return lambda causal=None: (DrawnCase(rng, causal) for _ in range(CASES))


def same_at(kept, got, want):
    """Whether outs [B, H, n, Dv] and lses [B, H, n] are equal, bit for bit, at the tokens `kept` [B, n]."""
    return all(torch.equal(x.movedim(2, 1)[kept], y.movedim(2, 1)[kept]) for x, y in zip(got, want, strict=True))


def test_later_tokens(drawn_cases):
    compared = 0
    for drawn in drawn_cases(causal=True):
        want = drawn.attention(drawn.whole)
        for row, start, stop in drawn.spans():
            kept = drawn.earlier(row, start, stop)
            later = drawn.document(row, start, stop) & ~kept
            got = drawn.attention(drawn.changed(later))
            assert same_at(kept, got, want), f"{drawn.case}: row {row}, {int(kept.sum())} tokens from {start}"
            compared += int(later.any())
    assert compared >= CASES / 2


def test_gradients(drawn_cases):
    """Of a document's first outputs, with respect to every other token: exactly 0; with respect to themselves: not."""
    for drawn in drawn_cases(causal=True):
        for row, start, stop in drawn.spans():
            kept = drawn.earlier(row, start, stop)
            leaves = [x.clone().requires_grad_() for x in drawn.whole]
            out, _ = drawn.attention(leaves)
            # What else the loss takes from these outputs is 0, not left out: the engine computes with it.
            out.backward(torch.where(kept[:, None, :, None], drawn.draw(*out.shape), 0))
            grads = [x.grad.movedim(2, 1) for x in leaves]
            where = f"{drawn.case}: row {row}, {int(kept.sum())} tokens from {start}"
            assert all(torch.all(grad[~kept] == 0) for grad in grads), where
            assert torch.any(grads[2][kept] != 0), where
