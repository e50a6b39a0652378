"""What a query may not see changes nothing, bit for bit: later tokens, other documents, padding; nor has it a gradient."""

import random

import pytest
import torch

import hf_ring_attention as ra
from tests.support.cases import random_case

CASES = 60
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Problem:
    """A random case with its tensors: rows of one document, or of several with padding between."""

    def __init__(self, seed, number, causal=None):
        rng = random.Random(f"{seed}-{number}")
        case = random_case(rng, rng.choice(DTYPES), max_len=rng.choice([40, 40, 200]))
        self.case = {key: case[key] for key in ("pattern", "documents", "causal", "scale")}
        if causal is not None:
            self.case["causal"] = causal
        self.rng = rng
        self.generator = torch.Generator().manual_seed(case["seed"])
        self.seq_len = case["seq_len"]
        self.documents = case["documents"] or [[(0, self.seq_len)]] * case["batch"]
        sizes = [("num_heads", "head_dim"), ("num_kv_heads", "head_dim"), ("num_kv_heads", "value_dim")]
        self.dtype = case["dtype"]
        self.whole = [self.draw(case["batch"], case[heads], self.seq_len, case[width]) for heads, width in sizes]
        self.about = f"seed {seed}, case {number}: {self.dtype}, {self.seq_len} tokens, {self.case}"

    def draw(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def attention(self, tensors):
        return ra.ring_attention(*tensors, **self.case, return_lse=True)

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


def problems(causal=None):
    seed = random.randrange(2**32)
    for number in range(CASES):
        yield Problem(seed, number, causal)


def same_at(kept, got, want):
    """Whether outs [B, H, n, Dv] and lses [B, H, n] are equal, bit for bit, at the tokens `kept` [B, n]."""
    return all(torch.equal(x.movedim(2, 1)[kept], y.movedim(2, 1)[kept]) for x, y in zip(got, want, strict=True))


def test_later_tokens():
    compared = 0
    for problem in problems(causal=True):
        want = problem.attention(problem.whole)
        for row, start, stop in problem.spans():
            kept = problem.earlier(row, start, stop)
            later = problem.document(row, start, stop) & ~kept
            got = problem.attention(problem.changed(later))
            assert same_at(kept, got, want), f"{problem.about}: row {row}, {int(kept.sum())} tokens from {start}"
            compared += int(later.any())
    assert compared >= CASES / 2


@pytest.mark.parametrize("causal", [True, False])
def test_other_documents_and_other_rows(causal):
    compared = 0
    for problem in problems(causal):
        want = problem.attention(problem.whole)
        for row, start, stop in problem.spans():
            kept = problem.document(row, start, stop)
            got = problem.attention(problem.changed(~kept))
            assert same_at(kept, got, want), f"{problem.about}: row {row}, document {start}:{stop}"
            compared += int(not kept.all())
    assert compared >= CASES / 2


@pytest.mark.parametrize("value", [None, torch.nan, torch.inf], ids=["random", "nan", "inf"])
def test_padding(value):
    """Also of values that any arithmetic would spread, in outputs and in gradients."""
    compared = 0
    for problem in problems():
        padding = problem.padding()
        found = []
        for tensors in (problem.whole, problem.changed(padding, value)):
            leaves = [x.clone().requires_grad_() for x in tensors]
            out, lse = problem.attention(leaves)
            # The gradient that comes back at padding is as arbitrary as what stands there.
            dout = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out).to(out.dtype)
            if found:
                dout = torch.where(padding[:, None, :, None], 7 if value is None else value, dout)
            out.backward(dout)
            found.append((out.detach(), lse, *(x.grad for x in leaves)))
        want, got = found
        assert same_at(~padding, got, want), problem.about
        out, lse, *grads = (x.movedim(2, 1)[padding] for x in got)
        assert torch.all(out == 0), problem.about
        assert torch.all(lse == -torch.inf), problem.about
        assert all(torch.all(grad == 0) for grad in grads), problem.about
        compared += int(padding.any() and not padding.all())
    assert compared >= CASES / 10


def test_gradients():
    """Of a document's first outputs, with respect to every other token: exactly 0; with respect to themselves: not."""
    for problem in problems(causal=True):
        for row, start, stop in problem.spans():
            kept = problem.earlier(row, start, stop)
            leaves = [x.clone().requires_grad_() for x in problem.whole]
            out, _ = problem.attention(leaves)
            # What else the loss takes from these outputs is 0, not left out: the engine computes with it.
            out.backward(torch.where(kept[:, None, :, None], problem.draw(*out.shape), 0))
            grads = [x.grad.movedim(2, 1) for x in leaves]
            where = f"{problem.about}: row {row}, {int(kept.sum())} tokens from {start}"
            assert all(torch.all(grad[~kept] == 0) for grad in grads), where
            assert torch.any(grads[2][kept] != 0), where


def test_tokens_that_are_seen_do_change_the_output():
    """The comparisons above can tell outputs apart: each query sees itself."""
    for problem in problems():
        want = problem.attention(problem.whole)
        for row, start, stop in problem.spans():
            kept = problem.document(row, stop - 1, stop)
            got = problem.attention(problem.changed(kept))
            assert not same_at(kept, got, want), f"{problem.about}: row {row}, document {start}:{stop}"
