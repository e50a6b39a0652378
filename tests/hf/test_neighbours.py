"""Models beside inference mode, copies and other ways of passing inputs: as under eager attention."""

import copy
import inspect
from functools import partial

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModel, LlamaForSequenceClassification, pipeline
from transformers.generation.continuous_batching import continuous_api

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import warn_once
from tests.hf.alike import assert_on_ranks, refused
from tests.support.checkpoints import word_tokenizer
from tests.support.neighbours import DYNAMIC_ROPE, LONGNET, PYRAMID, built, check, hooks, llama, logits_of
from tests.support.probe import LOGITS, batch, distance, logits_and_gradients, over_ring
from tests.support.ranks import TIMEOUT, on_ranks, run_simulated
from tests.support.tiny_models import VOCAB, tiny_config, tiny_model
from tests.support.tolerance import EXACT

pytestmark = pytest.mark.usefixtures("calls")


def test_inference_mode():
    """Also before training, which uses its plans again and cannot save inference tensors."""
    ids = torch.randint(3, VOCAB, (3, 23))  # rows of no other test, so nothing has been planned for them
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, -9:] = 0
    inputs, labels = {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected, tokens = logits_and_gradients(llama(), inputs, labels), llama().generate(ids[:2], **settings)

    def work(ring, model):
        with torch.inference_mode():
            found = model(**inputs).logits
            assert torch.equal(model.generate(ids[:2], **settings), tokens)
        assert found.is_inference()
        return found[labels != -100].clone(), over_ring(model, ring, inputs, labels)

    for inferred, trained in on_ranks(work, llama):
        assert distance(inferred, expected[0]) <= LOGITS
        check(trained, expected)


def test_inputs_embeds_that_are_not_contiguous():
    inputs, labels = batch("left")
    expected = logits_and_gradients(llama(), inputs, labels)
    expected[1].pop("model.embed_tokens.weight")
    embeds = llama().get_input_embeddings()(inputs.pop("input_ids")).detach()
    embeds = embeds.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    inputs = {name: x.T.contiguous().T for name, x in inputs.items()} | {"inputs_embeds": embeds}
    assert not any(x.is_contiguous() for x in inputs.values())
    for found in on_ranks(lambda ring, model: over_ring(model, ring, inputs, labels), llama):
        check(found, expected)


@torch.no_grad()
def test_arguments_by_position():
    """The base model's mask and positions, as its signature orders them."""
    inputs, labels = batch("left")
    make = partial(built, AutoModel, tiny_config("llama"))

    @torch.no_grad()
    def work(ring, model):
        return model(*(inputs[name] for name in ("input_ids", "attention_mask", "position_ids"))).last_hidden_state

    assert_on_ranks(work, make, make()(**inputs).last_hidden_state, valid=labels != -100)


@pytest.mark.parametrize("patched", ["before", "after"])
def test_weights_that_accelerate_loads_layer_by_layer(patched):
    rows = batch("left")
    expected = logits_of(ra.patch_model(llama(), PYRAMID), *rows)
    model = ra.patch_model(llama(), PYRAMID) if patched == "before" else llama()
    cpu_offload(model, execution_device="cpu")
    assert next(model.parameters()).device.type == "meta"
    if patched == "after":
        ra.patch_model(model, PYRAMID)
    assert distance(logits_of(model, *rows), expected) <= LOGITS


def test_a_copy_and_its_original_have_patterns_of_their_own():
    rows = batch("left")
    expected = {pattern: logits_of(ra.patch_model(llama(), pattern), *rows) for pattern in (PYRAMID, LONGNET)}
    assert distance(*expected.values()) > 1e-2
    model = ra.patch_model(llama(), PYRAMID)
    twin = ra.patch_model(copy.deepcopy(model), LONGNET)
    assert hooks(twin) == hooks(model) == hooks(ra.patch_model(ra.patch_model(llama())))
    for one, pattern in ((twin, LONGNET), (model, PYRAMID)):
        assert distance(logits_of(one, *rows), expected[pattern]) <= LOGITS


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
        assert hooks(twin) == hooks(model) == one_device
        other, found = others[ring.rank], []
        for changed, kept, now in ((model, twin, None), (twin, model, other)):
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
        assert len(found) == 4
        for one in found:
            check(one, expected)


def larger(model):
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    with torch.no_grad():  # New rows are random, and ranks must have the same.
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[VOCAB:] = 0
    return model


@torch.no_grad()
def around(model):
    classifier = LlamaForSequenceClassification(model.config).eval()
    classifier.model = model.model
    classifier.score.weight.copy_(torch.arange(classifier.score.weight.numel()).view_as(classifier.score.weight).cos())
    return classifier


@pytest.mark.parametrize("change", [larger, around])
def test_a_patched_model_with_larger_embeddings_or_another_head_keeps_its_ring(change):
    ids, models = torch.randint(3, VOCAB, (1, 20)), [llama() for _ in range(2)]
    expected = change(ra.patch_model(llama(), "window:4+2"))(ids).logits.detach()[..., :VOCAB]

    def work(ring):
        model = change(ra.patch_model(models[ring.rank], "window:4+2", ring=ring))
        return model(ids).logits.detach()[..., :VOCAB], ring.traffic().sent_bytes

    for logits, sent in run_simulated(work, 2):
        assert distance(logits, expected) <= EXACT
        assert sent > 0


TEXTS = ["w10 w11 w12 w13 w14 w15 w16 w17 w18", "w20 w21", "w30 w31 w32 w33 w34"]


def test_text_generation_pipeline():
    """Texts of other lengths in a batch, whose padding is at the left, are those of each text alone."""
    words = ["<s>", "<pad>", "</s>", *(f"w{number}" for number in range(3, VOCAB))]
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = word_tokenizer(words, padding_side="left", **tokens)

    def generated(model, batch_size):
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        settings = {"return_tensors": True, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        return [text[0]["generated_token_ids"][-6:] for text in generate(TEXTS, batch_size=batch_size, **settings)]

    exact, found = (generated(ra.patch_model(llama(), pattern), 3) for pattern in (None, PYRAMID))
    assert exact == generated(llama(), 3) and found == generated(ra.patch_model(llama(), PYRAMID), 1)
    assert found != exact, "the pattern leaves nothing out"


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_the_forward_of_a_decoder_is_its_call(model_type):
    """Some libraries call `forward` itself, whose packed rows need the hooks of the module."""
    make = partial(built, AutoModel, tiny_config(model_type))
    ids, positions = torch.arange(3, 23)[None], torch.cat([torch.arange(12), torch.arange(8)])[None]
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    stock, model = make(), ra.patch_model(make(), "window:4+1")
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        for called in (model, copy.deepcopy(model), ra.patch_model(model)):
            assert torch.equal(called.forward(**inputs).last_hidden_state, expected)

    def work(ring, model):
        with torch.no_grad():
            return ra.patch_model(model, "window:4+1", ring).forward(**inputs).last_hidden_state

    assert_on_ranks(work, make, expected)


def test_continuous_batching_is_refused_and_a_pattern_without_effect_is_named(monkeypatch, caplog):
    """If flash attention is installed, Transformers takes it in place of the pattern."""
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **options: True)
    model = ra.patch_model(tiny_model("llama", "eager"), "window:4+1")
    said = r"generate_batch computes exact attention, and LlamaForCausalLM has the pattern window:4\+1: call generate"
    for again in (model, copy.deepcopy(model)):
        refused(said, again.generate_batch, [[3, 4, 5]], max_new_tokens=2)
    models = [tiny_model("llama", "eager") for _ in range(2)]

    def over_ring(ring):
        """Another implementation does not change that its rows would be cut."""
        own = ra.patch_model(models[ring.rank], ring=ring)
        own.set_attn_implementation("sdpa")
        refused("LlamaForCausalLM a ring of 2 ranks: call generate", own.generate_batch, [[3, 4, 5]], max_new_tokens=2)

    ra.run_simulated(over_ring, 2)
    model.set_attn_implementation("sdpa")
    warn_once.cache_clear()
    for _ in range(2):
        model(torch.arange(3, 9)[None])
    assert (
        caplog.text.count("computes attention by 'sdpa', where the pattern has no effect: call ra.patch_model(model)")
        == 1
    )
