"""What a query may not see changes nothing, bit for bit: later tokens, other documents, padding; nor has it a gradient."""

from dataclasses import replace

import pytest
import torch

import hf_ring_attention as ra
from tests.support.cases import random_case

CASES = 60
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class DrawnCase:
    """A random case with its tensors: rows of one document, or of several with padding between."""

    def __init__(self, rng, causal):
        case = random_case(rng, rng.choice(DTYPES), max_len=rng.choice([40, 40, 200]))
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

    def padding(self):
        """[B, n], True for tokens of no document."""
        outside = torch.ones(len(self.documents), self.seq_len, dtype=torch.bool)
        for row, start, stop in self.spans():
            outside[row, start:stop] = False
        return outside

    def changed(self, where, value=None):
        """q, k and v with other values at the tokens `where` [B, n]: `value`, or large random ones."""
        where = where[:, None, :, None]
        return [torch.where(where, 100 * self.draw(*x.shape) if value is None else value, x) for x in self.whole]

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
    """A function that gives random cases, with this causality where it is told."""
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


@pytest.mark.parametrize("causal", [True, False])
def test_other_documents_and_other_rows(causal, drawn_cases):
    compared = 0
    for drawn in drawn_cases(causal):
        want = drawn.attention(drawn.whole)
        for row, start, stop in drawn.spans():
            kept = drawn.document(row, start, stop)
            got = drawn.attention(drawn.changed(~kept))
            assert same_at(kept, got, want), f"{drawn.case}: row {row}, document {start}:{stop}"
            compared += int(not kept.all())
    assert compared >= CASES / 2


@pytest.mark.parametrize("value", [None, torch.nan, torch.inf], ids=["random", "nan", "inf"])
def test_padding(value, drawn_cases):
    """Also of values that any arithmetic would spread, in outputs and in gradients."""
    compared = 0
    for drawn in drawn_cases():
        padding = drawn.padding()
        found = []
        for tensors in (drawn.whole, drawn.changed(padding, value)):
            leaves = [x.clone().requires_grad_() for x in tensors]
            out, lse = drawn.attention(leaves)
            # The gradient that comes back at padding is as arbitrary as what stands there.
            dout = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out).to(out.dtype)
            if found:
                dout = torch.where(padding[:, None, :, None], 7 if value is None else value, dout)
            out.backward(dout)
            found.append((out.detach(), lse, *(x.grad for x in leaves)))
        want, got = found
        assert same_at(~padding, got, want), drawn.case
        out, lse, *grads = (x.movedim(2, 1)[padding] for x in got)
        assert torch.all(out == 0), drawn.case
        assert torch.all(lse == -torch.inf), drawn.case
        assert all(torch.all(grad == 0) for grad in grads), drawn.case
        compared += int(padding.any() and not padding.all())
    assert compared >= CASES / 10


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


def test_tokens_that_are_seen_do_change_the_output(drawn_cases):
    """The comparisons above can tell outputs apart: each query sees itself."""
    for drawn in drawn_cases():
        want = drawn.attention(drawn.whole)
        for row, start, stop in drawn.spans():
            kept = drawn.document(row, stop - 1, stop)
            got = drawn.attention(drawn.changed(kept))
            assert not same_at(kept, got, want), f"{drawn.case}: row {row}, document {start}:{stop}"
