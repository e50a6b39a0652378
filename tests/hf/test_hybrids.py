"""Hybrid models: documents keep their states apart, states pass along rings of any size, and generation goes on from them."""

import copy
import sys
from functools import partial

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.types import INDEXED, MIXERS
from hf_ring_attention.hf.model.wrappers import cache_argument, cache_in
from hf_ring_attention.hybrids import mixers, states
from hf_ring_attention.hybrids.models import mixers_of

from ..support.neighbours import check
from ..support.probe import TOKENS, alone, batch, distance, errors, over_ring
from ..support.ranks import on_ranks
from ..support.tiny_models import tiny_model
from ..support.tolerance import EXACT
from .alike import assert_alike, assert_on_ranks, refused

#: Hybrids whose layers choose keys are in tests/hf/test_indexed.py.
TYPES = [name for name in MIXERS if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name not in INDEXED]
#: One of each kind of state: a convolution, a delta rule with one decay a head and with one a channel, Mamba 2, Mamba; and one
#: whose rows are gathered.
KINDS = ["lfm2", "qwen3_next", "kimi_linear", "bamba", "jamba", "minimax"]


def make(model_type):
    return partial(tiny_model, model_type, "eager")


@pytest.mark.drawn
@pytest.mark.parametrize(("kind", "world_size", "layout"), [("left", 3, "zigzag"), ("packed", 8, "contiguous")])
@pytest.mark.parametrize("model_type", KINDS)
def test_states_pass_along_rings(model_type, kind, world_size, layout):
    """Eight ranks have two or three tokens each, fewer than a convolution reaches back."""
    rows = batch(kind)
    expected = alone(tiny_model(model_type, "eager"), *rows)
    for found in on_ranks(
        lambda ring, model: over_ring(model, ring, *rows), make(model_type), world_size, layout=layout
    ):
        check(found, expected)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("model_type", TYPES)
def test_float32_over_a_ring_is_as_near_as_on_one_process(model_type):
    """To float64: the recurrences of some models lose two more digits than 1e-5 leaves, on one process as well."""
    rows, eager = batch("packed"), tiny_model(model_type, "eager").float()
    expected, found = alone(tiny_model(model_type, "eager").float().double(), *rows), alone(eager, *rows)
    bounds = [max(1e-5, 8 * error) for error in errors(found, expected)]
    make = lambda: tiny_model(model_type, "eager").float()  # noqa: E731
    for found in on_ranks(lambda ring, model: over_ring(model, ring, *rows), make):
        check(found, expected, bounds)


@pytest.mark.parametrize("model_type", KINDS)
@torch.no_grad()
def test_a_batch_of_padding(model_type):
    """Nothing of it enters the states: tokens behind it are the first of their rows."""
    inputs, _ = batch("plain")
    ids, token = inputs["input_ids"], inputs["input_ids"][:, :1]
    model = ra.patch_model(tiny_model(model_type, "eager"))
    mask = torch.zeros_like(ids)
    output = model(ids, attention_mask=mask)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    found = model(token, attention_mask=mask, **cache_argument(cache_in(output))).logits
    assert distance(found, model(token, use_cache=False).logits) <= EXACT


def test_which_states_pass_and_which_rows_are_gathered():
    passed = {}
    for model_type in TYPES:
        model = tiny_model(model_type, "eager")
        found = mixers_of(model, model.config.get_text_config())
        assert found, model_type
        passed[model_type] = {states.passing_forward(type(mixer)) is not None for _, mixer in found}
    assert {name for name, answers in passed.items() if answers == {False}} == {"minimax", "recurrent_gemma"}
    assert all(len(answers) == 1 for answers in passed.values())


def test_nothing_of_transformers_is_overwritten():
    (_, mixer), *_ = mixers_of(model := tiny_model("jamba", "eager"), model.config)
    module = sys.modules[type(mixer).__module__]
    before = {**vars(module)}, {**vars(type(mixer))}
    on_ranks(lambda ring, model: over_ring(model, ring, *batch("packed")), make("jamba"))
    assert before == ({**vars(module)}, {**vars(type(mixer))})


def test_a_parameter_that_is_not_known_is_refused():
    model = tiny_model("bamba", "eager")
    (path, mixer), *_ = mixers_of(model, model.config)

    class Later(type(mixer)):
        def forward(self, hidden_states, cache=None, attention_mask=None, decays=None, **kwargs):
            return super().forward(hidden_states, cache, attention_mask, **kwargs)

    Later.__name__ = type(mixer).__name__
    mixer.__class__ = Later
    said = rf"{path} \(BambaMixer\) takes decays, which .* does not know"
    refused(said, ra.patch_model, model, error=NotImplementedError)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("first", ["wrapped", "patched"])
def test_a_wrapper_around_a_mixer_goes_on_to_run(first):
    """As Accelerate's hooks are, which move weights; whether a model is patched before, after or again."""
    (inputs, labels), calls = batch("packed"), []
    model = tiny_model("qwen3_next", "eager")
    expected = alone(model, inputs, labels)[0]
    if first == "patched":
        ra.patch_model(model)
    for _, mixer in mixers_of(model, model.config):

        def doubled(*args, own=mixer.forward, **kwargs):
            calls.append(own)
            return own(*args, **kwargs)

        mixer.forward = doubled
    for _ in range(2):
        ra.patch_model(model)
        calls.clear()
        assert distance(model(**inputs).logits[labels != -100], expected) <= EXACT
        assert calls
    for _, mixer in mixers_of(copied := copy.deepcopy(model), model.config):
        assert vars(mixer)["_ring_dilated_by_documents"].module is mixer, copied


def test_mixers_of_another_release_are_refused(monkeypatch):
    """They have other names and calls there: states would not pass, and nothing would show it."""
    model = tiny_model("bamba", "eager")
    monkeypatch.setitem(MIXERS, "bamba", ("BambaMixerOfBefore",))
    said = "BambaForCausalLM has no module of the class BambaMixerOfBefore"
    refused(said, ra.patch_model, model, error=NotImplementedError)


def test_layers_that_recompute_find_their_documents():
    """The forward pass is over by then, and two passes come before their backward; on rings see tests/hf/test_pairs.py."""
    eager, patched = tiny_model("jamba", "eager"), ra.patch_model(tiny_model("jamba", "eager")).train()
    patched.activation_checkpointing_enable({"use_reentrant": False})
    expected, losses = {}, []
    for inputs, labels in (batch("packed"), batch("left")):
        for name, x in alone(eager, inputs, labels).gradients.items():
            expected[name] = expected.get(name, 0) + x
        logits = patched(**inputs, use_cache=False).logits[labels != -100]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[labels != -100], reduction="sum"))
    sum(losses).backward()
    assert_alike({name: x.grad for name, x in patched.named_parameters() if x.grad is not None}, expected)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("model_type", TYPES)
def test_generation_goes_on_from_the_states(model_type):
    """Padded rows generate as each row does by itself: in one batch, after one or two sharded prefills, or behind padding."""
    ids, mask = batch("plain")[0]["input_ids"], batch("left")[0]["attention_mask"]

    def generate(model, ids, **kwargs):
        return model.generate(ids, do_sample=False, max_new_tokens=4, min_new_tokens=4, pad_token_id=0, **kwargs)

    eager, patched = tiny_model(model_type, "eager"), ra.patch_model(tiny_model(model_type, "eager"))
    expected = torch.cat([generate(eager, ids[:1]), torch.cat([ids[1:, :7], generate(eager, ids[1:, 7:])], 1)])
    assert torch.equal(generate(patched, ids[:1]), expected[:1])

    def work(ring, model):
        cache = ra.prefill(model, ids[:, :16], mask[:, :16])
        answers = []
        for _ in range(2):
            answers.append(generate(model, ids, attention_mask=mask, **cache_argument(cache)))
            cache.crop(16 - cache.get_seq_length())
        generate(model, ids, attention_mask=mask, **cache_argument(cache))
        refused("no state behind 17 tokens is kept, of 23 tokens", cache.crop, 17 - 23)
        cache = ra.prefill(model, ids[:, :3], mask[:, :3])
        return [*answers, generate(model, ids, attention_mask=mask, **cache_argument(cache))]

    if model_type == "recurrent_gemma":
        said = r"would take padding into its state.*\[20, 13\] tokens"
        refused(said, generate, patched, ids, attention_mask=mask)
        said = "keeps its state in the model"
        refused(said, on_ranks, work, make(model_type), error=NotImplementedError)
        # It would begin anew behind them.
        refused(said, ra.prefill, patched, ids[:, :5], mask[:, :5], error=NotImplementedError)
        return
    assert torch.equal(generate(patched, ids, attention_mask=mask), expected)
    if model_type != "minimax":  # The cache of minimax takes no chunks.
        assert torch.equal(generate(patched, ids, attention_mask=mask, prefill_chunk_size=3), expected)
    assert_on_ranks(work, make(model_type), [expected] * 3)


@pytest.mark.parametrize(("model_type", "train"), [("recurrent_gemma", True), ("lfm2", True), ("jamba", False)])
def test_generation_in_other_ways_goes_on_from_the_states(model_type, train):
    """In training mode, as if `model.eval()` was forgotten; and with a static cache, whose masks are made before the call."""
    row, mask = batch("plain")[0]["input_ids"], batch("plain" if train else "left")[0].get("attention_mask")
    ways = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "attention_mask": mask}
    ways |= {} if train else {"cache_implementation": "static"}
    models = tiny_model(model_type, "eager"), ra.patch_model(tiny_model(model_type, "eager"))
    assert torch.equal(*(model.train(train).generate(row, **ways) for model in models))


@pytest.mark.drawn(20)
@pytest.mark.parametrize("kind", ["left", "right", "packed"])
@pytest.mark.parametrize("model_type", [*TYPES, "qwen4_exp_text"])
def test_the_default_cache_of_a_forward_pass_keeps_documents_apart(model_type, kind):
    """Logits and gradients in training mode, in which models make a cache too, unless use_cache=False is passed."""
    inputs, labels = batch(kind)
    expected = alone(tiny_model(model_type, "eager").train(), inputs, labels)
    patched = ra.patch_model(tiny_model(model_type, "eager")).train()
    logits = patched(**inputs).logits[labels != -100]
    torch.nn.functional.cross_entropy(logits, labels[labels != -100], reduction="sum").backward()
    found = logits.detach(), {name: x.grad for name, x in patched.named_parameters() if x.grad is not None}
    check(found, expected, [2e-5] * 2 if model_type in INDEXED else (EXACT, EXACT))


def test_beams_over_a_sharded_cache():
    """And of one of its rows: the tokens of one device."""
    row, kept = batch("plain")[0]["input_ids"], TOKENS - 4
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
    expected = tiny_model("jamba", "eager").generate(row, **settings)

    def work(ring, model):
        cache = ra.prefill(model, row[:, :kept])
        said = r"holds 2 batch rows, and 6 came: .* cache\.batch_repeat_interleave"
        refused(said, model.generate, row, **cache_argument(cache), **settings)
        cache.batch_repeat_interleave(3)
        answer = model.generate(row, **cache_argument(cache), **settings)
        cache.crop(kept - cache.get_seq_length())
        cache.batch_select_indices(torch.tensor([3, 4, 5]))
        return answer, model.generate(row[1:], **cache_argument(cache), **settings)

    assert_on_ranks(work, make("jamba"), (expected, expected[1:]))


def test_packed_rows_with_a_cache_go_on_from_their_last_documents():
    eager, patched = tiny_model("bamba", "eager"), ra.patch_model(tiny_model("bamba", "eager"))
    inputs, _ = batch("packed")
    out = patched(**inputs, use_cache=True)
    alone_ = eager(inputs["input_ids"][:, 16:], use_cache=True)
    assert_alike(out.logits[:, 16:], alone_.logits)
    for layer, of_alone in zip(cache_in(out).layers, cache_in(alone_).layers):
        if hasattr(layer, "recurrent_states"):
            assert_alike(layer.recurrent_states[0], of_alone.recurrent_states[0])
            assert_alike(layer.conv_states[0], of_alone.conv_states[0])


def test_a_mixer_of_a_shard_is_not_run_by_itself():
    def work(ring, model):
        ((_, mixer),) = mixers_of(model, model.config)
        said = r"BambaMixer .* outside of its model's forward pass.*activation_checkpointing_enable"
        refused(said, mixer, torch.zeros(1, 4, model.config.hidden_size), error=RuntimeError)

    on_ranks(work, make("bamba"))


def test_a_hybrid_that_is_loaded_by_name_is_patched_by_its_first_call_and_one_that_is_switched_is_refused():
    inputs, _ = batch("packed")
    patched, named = ra.patch_model(tiny_model("bamba", "eager")), tiny_model("bamba", "ring_dilated")
    assert torch.equal(*(model(**inputs, use_cache=False).logits for model in (patched, named)))
    switched = tiny_model("bamba", "eager")
    switched.set_attn_implementation("ring_dilated")
    said = r"BambaAttention attends beside recurrent layers.*call ra.patch_model"
    refused(said, switched, **inputs, use_cache=False)


def test_rows_that_are_gathered_are_bounded_and_logged(monkeypatch, caplog):
    def work(ring, model):
        return over_ring(model, ring, *batch("plain"))

    warn_once.cache_clear()
    on_ranks(work, make("minimax"))
    assert caplog.text.count("MiniMaxLightningAttention passes no state from rank to rank: its rows are gathered") == 1
    monkeypatch.setattr(mixers, "MOST_GATHERED", 10_000)
    said = r"gathering 2 x 20 tokens would take 10240 bytes, above 10000"
    refused(said, on_ranks, work, make("minimax"), error=NotImplementedError)


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", TYPES)
def test_numbers_of_documents_reach_no_mixer(model_type):
    """Without a kernel for them, some mixers refuse them, also if a row is one document or has several."""
    model = ra.patch_model(tiny_model(model_type, "eager"))
    for kind in ("plain", "packed"):
        inputs, _ = batch(kind)
        numbers = (inputs["position_ids"] == 0).cumsum(1) - 1 if "position_ids" in inputs else 0 * inputs["input_ids"]
        assert int(numbers.max()) == (2 if kind == "packed" else 0)
        numbered = model(**inputs, seq_idx=numbers.int(), use_cache=False).logits
        assert torch.equal(numbered, model(**inputs, use_cache=False).logits)
