"""Copies of models, and models that were saved and loaded, keep their patterns and have rings of their own."""

import copy

import pytest
import torch
from transformers import LlamaForSequenceClassification

import hf_ring_attention as ra
from tests.support.neighbours import DYNAMIC_ROPE, LONGNET, PYRAMID, check, hooks, llama
from tests.support.probe import batch, distance, logits_and_gradients, over_ring
from tests.support.ranks import TIMEOUT, run_simulated
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import EXACT

pytestmark = pytest.mark.usefixtures("calls")


def test_a_copy_and_its_original_have_patterns_of_their_own():
    inputs, labels = batch("left")
    expected = {
        pattern: logits_and_gradients(ra.patch_model(llama(), pattern), inputs, labels)
        for pattern in (PYRAMID, LONGNET)
    }
    assert distance(expected[PYRAMID][0], expected[LONGNET][0]) > 1e-2
    model = ra.patch_model(llama(), PYRAMID)
    twin = copy.deepcopy(model)
    assert hooks(twin) == hooks(model) == hooks(ra.patch_model(ra.patch_model(llama())))
    ra.patch_model(twin, LONGNET)
    assert hooks(twin) == hooks(model)
    check(logits_and_gradients(twin, inputs, labels), expected[LONGNET])
    check(logits_and_gradients(model, inputs, labels), expected[PYRAMID])


def test_a_copy_and_its_original_have_rings_of_their_own():
    """One keeps the ring while the other gets another ring or none; RoPE that depends on the length has hooks, too."""
    inputs, labels = batch("right")
    expected = logits_and_gradients(ra.patch_model(llama(**DYNAMIC_ROPE), PYRAMID), inputs, labels)
    originals = [llama(**DYNAMIC_ROPE) for _ in range(2)]
    others = ra.simulate(2, transport="ring", timeout=TIMEOUT)
    one_device = hooks(ra.patch_model(llama(**DYNAMIC_ROPE)))

    def work(ring):
        model = ra.patch_model(originals[ring.rank], PYRAMID, ring)
        twin = copy.deepcopy(model)
        assert hooks(twin) == hooks(model) and len(hooks(model)) == len(one_device) + 2
        other, found = others[ring.rank], []
        for changed, kept, now in ((model, twin, other), (model, twin, None), (twin, model, other)):
            ra.patch_model(kept, ring=ring)
            ra.patch_model(changed, ring=now)
            assert hooks(changed) == (one_device if now is None else hooks(kept))
            if now is None:
                found.append(logits_and_gradients(changed, inputs, labels))
            else:
                found.append(over_ring(changed, now, inputs, labels))
            before = other.traffic()
            found.append(over_ring(kept, ring, inputs, labels))
            assert other.traffic() == before, "the one with the first ring used the other's"
        return found

    for found in run_simulated(work, 2):
        assert len(found) == 6
        for one in found:
            check(one, expected)


@torch.no_grad()
def test_a_patched_model_keeps_its_ring_with_larger_embeddings():
    ids, models = torch.randint(3, VOCAB, (1, 20)), [tiny_model("llama", "eager") for _ in range(2)]
    expected = ra.patch_model(tiny_model("llama", "eager"), "window:4+2")(ids).logits

    def work(ring):
        model = ra.patch_model(models[ring.rank], "window:4+2", ring=ring)
        model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
        with torch.no_grad():
            return model(ids).logits, ring.traffic().sent_bytes

    for logits, sent in run_simulated(work, 2):
        assert distance(logits[..., : expected.shape[-1]], expected) <= EXACT
        assert sent > 0


@torch.no_grad()
def test_a_model_around_a_patched_decoder_takes_its_ring():
    ids, models = torch.randint(3, VOCAB, (1, 20)), [tiny_model("llama", "eager") for _ in range(2)]

    def classifier(decoder):
        model = LlamaForSequenceClassification(decoder.config).eval()
        model.model = decoder
        model.score.weight.copy_(torch.arange(model.score.weight.numel()).view_as(model.score.weight).cos())
        return model

    expected = classifier(ra.patch_model(tiny_model("llama", "eager"), "window:4+2").model)(ids).logits

    def work(ring):
        with torch.no_grad():
            model = classifier(ra.patch_model(models[ring.rank], "window:4+2", ring=ring).model)
            return model(ids).logits, ring.traffic().sent_bytes

    for logits, sent in run_simulated(work, 2):
        assert distance(logits, expected) <= EXACT
        assert sent > 0
