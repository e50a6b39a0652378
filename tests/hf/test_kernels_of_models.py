"""The kernel of a model without a ring, or of its ring."""

import copy
import threading

import pytest
import torch
from transformers import DynamicCache

import hf_ring_attention as ra
from hf_ring_attention.compute.kernels import Math
from hf_ring_attention.hf.model.wrappers import cache_argument
from tests.hf.alike import assert_on_ranks
from tests.support.ranks import on_ranks
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import assert_exact


@pytest.fixture
def by_math(monkeypatch):
    """The ranks that computed by plain math."""
    ranks, forward = [], Math.forward

    def counted(self, *call):
        ranks.append(threading.current_thread().name[-1])
        return forward(self, *call)

    monkeypatch.setattr(Math, "forward", counted)
    return ranks


def model():
    return tiny_model("llama", "sdpa")


def windowed():
    return ra.patch_model(model(), "window:4+1")


def ids():
    return torch.randint(3, VOCAB, (1, 12))


def outputs(model, ids):
    with torch.no_grad():
        return model(ids, labels=ids)


def test_a_model_without_a_ring(by_math):
    own, row = ra.patch_model(model(), "window:4+1"), ids()
    wanted = outputs(own, row)
    assert not by_math
    assert ra.patch_model(own, kernel="math") is own
    found = outputs(own, row)
    assert by_math
    # Its rows are whole ones, as before: logits are there beside the loss.
    assert_exact(found.logits, wanted.logits)
    assert_exact(found.loss, wanted.loss)


def test_it_stays_with_another_pattern_and_with_copies(by_math):
    own = ra.patch_model(model(), "window:4+1", kernel="math")
    for kept in (own, ra.patch_model(own, "window:5"), copy.deepcopy(own)):
        by_math.clear()
        outputs(kept, ids())
        assert by_math
    by_math.clear()
    outputs(ra.patch_model(own, kernel="auto"), ids())
    assert not by_math


def test_the_kernel_of_a_ring(by_math):
    row = ids()

    def work(ring, own):
        loss = outputs(own, row).loss
        assert {decision.choice for decision in ring.kernels().values()} == {"math"}
        return loss

    expected = outputs(windowed(), row).loss
    assert_on_ranks(work, windowed, expected, kernel="math")
    assert {*by_math} == {"0", "1"}


def test_rows_that_each_rank_computes_whole(by_math):
    """As of a cache that is not sharded."""
    row = ids()

    @torch.no_grad()
    def work(ring, own):
        own(row, **cache_argument(DynamicCache()))

    on_ranks(work, windowed, 1, kernel="math")
    of_one = len(by_math)
    on_ranks(work, windowed, 2, kernel="math")
    assert len(by_math) == 3 * of_one > 0
