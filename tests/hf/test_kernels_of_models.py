"""The kernel of a model without a ring, or of its ring."""

import copy
import threading

import pytest
import torch
from transformers import DynamicCache

import hf_ring_attention as ra
from hf_ring_attention.compute.kernels import Math
from hf_ring_attention.hf.cache import cache_argument
from tests.support.ranks import run_simulated
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


def ids(rows=1):
    return torch.randint(3, VOCAB, (rows, 12))


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
    models, row = [model(), model()], ids()

    def call(ring):
        own = ra.patch_model(models[ring.rank], "window:4+1", ring=ring)
        loss = outputs(own, row).loss
        return loss, ring.kernels()

    for loss, found in run_simulated(call, 2, kernel="math"):
        assert_exact(loss, outputs(ra.patch_model(model(), "window:4+1"), row).loss)
        assert {decision.choice for decision in found.values()} == {"math"}
    assert {*by_math} == {"0", "1"}


def test_rows_that_each_rank_computes_whole(by_math):
    """As of a cache that is not sharded."""
    models, row = [model(), model()], ids()

    def call(ring):
        own = ra.patch_model(models[ring.rank], "window:4+1", ring=ring)
        with torch.no_grad():
            own(row, **cache_argument(DynamicCache()))

    call(ra.Ring.alone(kernel="math"))
    of_one = len(by_math)
    run_simulated(call, 2, kernel="math")
    assert len(by_math) == 3 * of_one > 0


def test_a_kernel_that_contradicts_the_ring():
    ring = ra.Ring.alone(kernel="math")
    with pytest.raises(ValueError, match="got kernel='flash' and a ring with kernel='math': make the ring with it"):
        ra.patch_model(model(), ring=ring, kernel="flash")
    with pytest.raises(ValueError, match=r"patch_model: kernel must be one of 'auto', .*, got 'triton'"):
        ra.patch_model(model(), kernel="triton")
    assert ra.patch_model(model(), ring=ring, kernel="math") is not None


def test_kernels_that_a_cpu_does_not_have():
    own = ra.patch_model(model(), "window:4+1", kernel="flash")
    with pytest.raises(ValueError, match=r"kernel='flash' cannot compute this call: it computes on CUDA devices"):
        outputs(own, ids())
