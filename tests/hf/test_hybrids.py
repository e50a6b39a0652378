"""Hybrid models: documents keep their states apart, states pass along rings of any size, and generation goes on from them."""

import copy
import sys

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_ring_attention as ra
from hf_ring_attention.compute.private import checkpoint_activations
from hf_ring_attention.hf.cache import cache_argument, cache_in
from hf_ring_attention.hf.config import warn_once
from hf_ring_attention.hf.model_types import MIXERS
from hf_ring_attention.hf.rows import rows_of_call
from hf_ring_attention.hybrids import mixers, states
from hf_ring_attention.hybrids import models as hybrid_models
from hf_ring_attention.hybrids.models import mixers_of

from ..support.probe import BATCHES, TOKENS, alone, batch, distance, errors, over_ring
from ..support.ranks import on_ranks, run_simulated
from ..support.releases import needs_mixers
from ..support.tiny_models import tiny_model
from ..support.tolerance import EXACT, largest

pytestmark = needs_mixers

TYPES = [name for name in MIXERS if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
#: One of each kind of state: a convolution, a delta rule with one decay a head and with one a channel, Mamba 2, Mamba; and one
#: whose rows are gathered.
KINDS = ["lfm2", "qwen3_next", "kimi_linear", "bamba", "jamba", "minimax"]
#: All types; those beside `KINDS` take minutes.
ALL_TYPES = [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]


def errors_over_rings(models, kind, expected, world_size, **settings):
    """The errors of logits and of gradients on each rank."""

    def work(ring):
        return errors(over_ring(ra.patch_model(models[ring.rank], ring=ring), ring, *batch(kind)), expected)

    return run_simulated(work, world_size, **settings)


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_states_pass_along_rings(model_type):
    """Eight ranks have two or three tokens each, fewer than a convolution reaches back."""
    eager, models = tiny_model(model_type, "eager"), [tiny_model(model_type, "eager") for _ in range(8)]
    for number, kind in enumerate(BATCHES):
        expected = alone(eager, *batch(kind))
        world_size, layout = (3, 8)[number % 2], ("zigzag", "contiguous")[number // 2]
        found = errors_over_rings(models, kind, expected, world_size, layout=layout)
        assert largest(map(max, found)) <= EXACT, (world_size, kind, layout)


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", TYPES)
def test_float32_over_a_ring_is_as_near_as_on_one_process(model_type):
    """To float64: the recurrences of some models lose two more digits than 1e-5 leaves, on one process as well."""
    eager = tiny_model(model_type, "eager").float()
    exact = copy.deepcopy(eager).double()
    models = [tiny_model(model_type, "eager").float() for _ in range(2)]
    expected, found = (alone(model, *batch("packed")) for model in (exact, eager))
    bounds = [max(1e-5, 8 * error) for error in errors(found, expected)]
    for of_rank in errors_over_rings(models, "packed", expected, 2):
        assert all(error <= bound for error, bound in zip(of_rank, bounds)), (of_rank, bounds)


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


@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba"])
def test_nothing_of_transformers_is_overwritten(model_type):
    (_, mixer), *_ = mixers_of(model := tiny_model(model_type, "eager"), model.config)
    module = sys.modules[type(mixer).__module__]
    before = {**vars(module)}, {**vars(type(mixer))}
    on_ranks(lambda ring, model: over_ring(model, ring, *batch("packed")), lambda: tiny_model(model_type, "eager"))
    assert before == ({**vars(module)}, {**vars(type(mixer))})


def test_a_parameter_that_is_not_known_is_refused():
    model = tiny_model("bamba", "eager")
    (path, mixer), *_ = mixers_of(model, model.config)

    class Later(type(mixer)):
        def forward(self, hidden_states, cache=None, attention_mask=None, decays=None, **kwargs):
            return super().forward(hidden_states, cache, attention_mask, **kwargs)

    Later.__name__ = type(mixer).__name__
    mixer.__class__ = Later
    with pytest.raises(
        NotImplementedError, match=rf"{path} \(BambaMixer\) takes cache, decays, which .* does not know"
    ):
        ra.patch_model(model)
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
    monkeypatch.setitem(MIXERS, "bamba", "BambaMixerOfBefore")
    with pytest.raises(NotImplementedError, match="BambaForCausalLM has no module of the class BambaMixerOfBefore"):
        ra.patch_model(model)
    monkeypatch.setattr(hybrid_models, "MIXERS_SINCE", "99.1")
    with pytest.raises(
        NotImplementedError, match=r"BambaForCausalLM is a hybrid.*since Transformers 99\.1.*upgrade it"
    ):
        ra.patch_model(model)


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_layouts_that_know_the_documents(model_type):
    """Documents that are whole on a rank, cut ones, and padding."""
    eager, models = tiny_model(model_type, "eager"), [tiny_model(model_type, "eager") for _ in range(3)]
    inputs, labels = batch("packed")
    expected = alone(eager, inputs, labels)
    documents = rows_of_call(eager, labels, {"position_ids": inputs["position_ids"]}).documents

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        error = errors(over_ring(model, ring, inputs, labels), expected)
        return ring.layout_for(TOKENS, ra.Pattern.exact(), documents).rows, error

    for rows, error in run_simulated(work, 3, layout="documents"):
        assert rows, "the layout knows no documents"
        assert error.logits <= EXACT and error.gradients <= EXACT


@pytest.mark.parametrize("model_type", ["jamba", "minimax"])
def test_layers_that_recompute_find_their_documents(model_type):
    """On one device and over a ring, where the forward pass is over by then; two passes come before their backward."""
    eager, models = tiny_model(model_type, "eager"), [tiny_model(model_type, "eager") for _ in range(2)]
    cases = [batch("packed"), batch("left")]
    expected = [alone(eager, *case) for case in cases]
    gradients = {name: sum(answer.gradients[name] for answer in expected) for name in expected[0].gradients}

    def both(model, mean=lambda x: x):
        model.train()
        checkpoint_activations(model, {"use_reentrant": False})
        model.zero_grad()
        losses = []
        for inputs, labels in cases:
            logits = model(**inputs, use_cache=False).logits
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
                )
            )
        sum(losses).backward()
        found = {name: mean(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        nothing = torch.ones(1)
        return errors((nothing, found), (nothing, gradients)).gradients

    def work(ring):
        return both(ra.patch_model(models[ring.rank], ring=ring), lambda x: sum(ring.gather(x)) / ring.world_size)

    assert both(ra.patch_model(tiny_model(model_type, "eager"))) <= EXACT
    assert max(run_simulated(work, 2)) <= EXACT


@pytest.mark.drawn
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
        with pytest.raises(ValueError, match="17 tokens were to stay of 23"):
            cache.crop(17)
        cache = ra.prefill(model, ids[:, :3], mask[:, :3])
        return [*answers, generate(model, ids, attention_mask=mask, **cache_argument(cache))]

    if model_type == "recurrent_gemma":
        with pytest.raises(ValueError, match=r"would take padding into its state.*\[20, 13\] tokens"):
            generate(patched, ids, attention_mask=mask)
        with pytest.raises(NotImplementedError, match="keeps its state in the model itself"):
            on_ranks(work, lambda: tiny_model(model_type, "eager"), 2)
        with pytest.raises(NotImplementedError, match="keeps its state in the model itself"):
            ra.prefill(patched, ids[:, :5], mask[:, :5])  # It would begin anew behind them.
        return
    assert torch.equal(generate(patched, ids, attention_mask=mask), expected)
    if model_type != "minimax":  # The cache of minimax takes no chunks.
        assert torch.equal(generate(patched, ids, attention_mask=mask, prefill_chunk_size=3), expected)
    for answers in on_ranks(work, lambda: tiny_model(model_type, "eager"), 2):
        assert all(torch.equal(answer, expected) for answer in answers)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "lfm2", "jamba"])
def test_generation_in_training_mode_goes_on_from_the_states(model_type):
    """As Transformers' does: whoever forgets `model.eval()` gets the same tokens."""
    eager, model = (tiny_model(model_type, name).train() for name in ("eager", "ring_dilated"))
    row = torch.arange(3, 17)[None]
    generated = [x.generate(row, max_new_tokens=5, min_new_tokens=5, do_sample=False) for x in (eager, model)]
    assert torch.equal(*generated)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "jamba"])
def test_a_static_cache_whose_masks_are_made_before_the_call(model_type):
    ids, mask = batch("plain")[0]["input_ids"], batch("left")[0]["attention_mask"]
    how = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "cache_implementation": "static"}
    models = tiny_model(model_type, "eager"), ra.patch_model(tiny_model(model_type, "eager"))
    assert torch.equal(*(model.generate(ids, attention_mask=mask, **how) for model in models))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("kind", ["left", "right", "packed"])
@pytest.mark.parametrize("model_type", TYPES)
def test_the_default_cache_of_a_forward_pass_keeps_documents_apart(model_type, kind):
    """Logits and gradients in training mode, in which models make a cache too, unless use_cache=False is passed."""
    inputs, labels = batch(kind)
    expected = alone(tiny_model(model_type, "eager").train(), inputs, labels)
    patched = ra.patch_model(tiny_model(model_type, "eager")).train()
    logits = patched(**inputs).logits[labels != -100]
    torch.nn.functional.cross_entropy(logits, labels[labels != -100], reduction="sum").backward()
    found = logits.detach(), {name: x.grad for name, x in patched.named_parameters() if x.grad is not None}
    assert largest(errors(found, expected)) <= EXACT


@pytest.mark.parametrize("model_type", ["lfm2", "jamba", "minimax"])
def test_beams_over_a_sharded_cache(model_type):
    """Twice from one cache, and of two rows: the tokens of one device."""
    row, kept = batch("plain")[0]["input_ids"], TOKENS - 4
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
    expected = tiny_model(model_type, "eager").generate(row, **settings)

    def work(ring, model):
        cache = ra.prefill(model, row[:, :kept])
        with pytest.raises(ValueError, match=r"holds 2 batch rows, and 6 came: .* cache\.batch_repeat_interleave"):
            model.generate(row, **cache_argument(cache), **settings)
        cache.batch_repeat_interleave(3)
        answers = []
        for _ in range(2):
            answers.append(model.generate(row, **cache_argument(cache), **settings))
            cache.crop(kept - cache.get_seq_length())
        cache.batch_select_indices(torch.tensor([3, 4, 5]))
        return answers, model.generate(row[1:], **cache_argument(cache), **settings)

    for answers, second in on_ranks(work, lambda: tiny_model(model_type, "eager"), 2):
        assert all(torch.equal(answer, expected) for answer in answers)
        assert torch.equal(second, expected[1:])


def test_packed_rows_with_a_cache_go_on_from_their_last_documents():
    eager, patched = tiny_model("bamba", "eager"), ra.patch_model(tiny_model("bamba", "eager"))
    inputs, _ = batch("packed")
    out = patched(**inputs, use_cache=True)
    alone_ = eager(inputs["input_ids"][:, 16:], use_cache=True)
    assert torch.allclose(out.logits[:, 16:], alone_.logits, rtol=EXACT, atol=EXACT)
    for layer, of_alone in zip(cache_in(out).layers, cache_in(alone_).layers):
        if hasattr(layer, "recurrent_states"):
            assert torch.allclose(layer.recurrent_states[0], of_alone.recurrent_states[0], rtol=1e-9, atol=1e-9)
            assert torch.allclose(layer.conv_states[0], of_alone.conv_states[0], rtol=1e-9, atol=1e-9)


def test_a_mixer_of_a_shard_is_not_run_by_itself():

    def work(ring, model):
        ((_, mixer),) = mixers_of(model, model.config)
        with pytest.raises(
            RuntimeError, match=r"BambaMixer .* outside of its model's forward pass.*activation_checkpointing_enable"
        ):
            mixer(torch.zeros(1, 4, model.config.hidden_size))

    on_ranks(work, lambda: tiny_model("bamba", "eager"), 2)


def test_a_hybrid_that_is_loaded_by_name_is_patched_by_its_first_call_and_one_that_is_switched_is_refused():
    inputs, _ = batch("packed")
    patched, named = ra.patch_model(tiny_model("bamba", "eager")), tiny_model("bamba", "ring_dilated")
    assert torch.equal(*(model(**inputs, use_cache=False).logits for model in (patched, named)))
    switched = tiny_model("bamba", "eager")
    switched.set_attn_implementation("ring_dilated")
    with pytest.raises(ValueError, match=r"BambaAttention attends beside recurrent layers.*call ra.patch_model"):
        switched(**inputs, use_cache=False)


def test_rows_that_are_gathered_are_bounded_and_logged(monkeypatch, caplog):
    def work(ring, model):
        return over_ring(model, ring, *batch("plain"))

    warn_once.cache_clear()
    on_ranks(work, lambda: tiny_model("minimax", "eager"))
    assert caplog.text.count("MiniMaxLightningAttention passes no state from rank to rank: its rows are gathered") == 1
    monkeypatch.setattr(mixers, "MOST_GATHERED", 10_000)
    with pytest.raises(NotImplementedError, match=r"2 x 20 tokens x 32 x 8 bytes = 10240, above 10000"):
        on_ranks(work, lambda: tiny_model("minimax", "eager"))


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", TYPES)
def test_numbers_of_documents_reach_no_mixer(model_type):
    """Without a kernel for them, some mixers refuse them, also where a row is one document or has several."""
    model = ra.patch_model(tiny_model(model_type, "eager"))
    for kind in ("plain", "packed"):
        inputs, _ = batch(kind)
        numbers = (inputs["position_ids"] == 0).cumsum(1) - 1 if "position_ids" in inputs else 0 * inputs["input_ids"]
        assert int(numbers.max()) == (2 if kind == "packed" else 0)
        numbered = model(**inputs, seq_idx=numbers.int(), use_cache=False).logits
        assert torch.equal(numbered, model(**inputs, use_cache=False).logits)
