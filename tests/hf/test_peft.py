"""Models and PEFT, in either order: they compute what eager attention does, or are refused with a reason."""

import copy
import json

import pytest
import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from transformers import LlamaConfig

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.wrappers import cache_argument
from tests.hf.alike import assert_on_ranks, refused
from tests.support.neighbours import PYRAMID, check, llama, logits_of, with_lora
from tests.support.probe import LOGITS, TOKENS, alone, batch, distance, logits_and_gradients, over_ring
from tests.support.ranks import on_ranks
from tests.support.tiny_models import VOCAB

# PEFT calls Transformers by names that 5.24 has renamed.
pytestmark = [
    pytest.mark.usefixtures("calls"),
    pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|past_key_values).*:FutureWarning"),
    # Models that were made here have no files, in which PEFT 0.18 looks for the size of the vocabulary.
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]


def lora_llama(order, pattern=None):
    if order == "wrapped, then patched":
        return ra.patch_model(with_lora(llama()), pattern)
    return with_lora(ra.patch_model(llama(), pattern))


ORDERS = ("wrapped, then patched", "patched, then wrapped")


@pytest.mark.parametrize(("order", "kind"), [*zip(ORDERS, ["left", "packed"])])
def test_lora(order, kind):
    inputs, labels = batch(kind)
    expected = (alone if kind == "packed" else logits_and_gradients)(with_lora(llama()), inputs, labels)
    assert all("lora_" in name for name in expected[1]) and len(expected[1]) == 2 * 2 * 7
    check(logits_and_gradients(lora_llama(order), inputs, labels), expected)


def test_generation_with_lora_over_a_ring():
    """`prefill` of a wrapped model."""
    ids = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(4))
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = with_lora(llama()).generate(ids, **settings)

    def work(ring, model):
        return model.generate(ids, **cache_argument(ra.prefill(model, ids[:, :20])), **settings)

    assert_on_ranks(work, lambda: with_lora(llama()), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_merged_lora(order, tmp_path):
    rows = batch("right")
    wrapped = lora_llama(order, PYRAMID)
    wrapped.save_pretrained(tmp_path, save_embedding_layers=False)
    expected = logits_of(wrapped, *rows)
    merged = wrapped.merge_and_unload()
    assert distance(logits_of(merged, *rows), expected) <= LOGITS
    plain = llama()
    plain.load_state_dict(merged.state_dict())
    assert distance(logits_of(plain, *rows), expected) > 1e-2, "the pattern leaves nothing out"
    assert distance(logits_of(ra.patch_model(plain, PYRAMID), *rows), expected) <= LOGITS
    loaded = PeftModel.from_pretrained(ra.patch_model(llama(), PYRAMID), tmp_path).eval()
    assert distance(logits_of(loaded, *rows), expected) <= LOGITS


# ---- the pattern that an adapter was trained under

WARNING = "was trained under the pattern window:4+2, and its model computes "


def save_adapter(order, folder, config=None, pattern="window:4+2"):
    """Saves an adapter of a model with a pattern; returns the model with it, and the settings saved with the adapter."""
    config = config or LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if order == "patched, then wrapped":
        model = get_peft_model(ra.patch_model(llama(), pattern), config)
    elif order == "wrapped, then patched":
        model = ra.patch_model(get_peft_model(llama(), config), pattern)
    else:
        model = get_peft_model(llama("ring_dilated"), config)
        ra.patch_config(model.get_base_model().config, pattern)
    model.save_pretrained(folder)
    saved = json.loads((folder / "adapter_config.json").read_text())["auto_mapping"]
    return model.eval(), saved


@pytest.fixture(autouse=True)
def unwarned():
    """A warning comes once in a process."""
    warn_once.cache_clear()


@pytest.mark.parametrize("order", [*ORDERS, "wrapped, then its config"])
def test_an_adapter_brings_its_pattern_back(order, tmp_path, caplog):
    model, saved = save_adapter(order, tmp_path)
    assert saved["ring_dilated"]["pattern"] and "import hf_ring_attention" in saved["ring_dilated"]["hint"]
    rows = batch("right")
    expected = logits_of(model, *rows)
    loaded = PeftModel.from_pretrained(llama("sdpa"), tmp_path).eval()
    assert [record.getMessage() for record in caplog.records if WARNING in record.getMessage()] == [
        f"adapter 'default' {WARNING}attention by 'sdpa': call ra.patch_model(model) for the pattern of the adapter"
    ]
    assert distance(logits_of(loaded, *rows), expected) > 1e-2, "the pattern leaves nothing out"
    assert distance(logits_of(ra.patch_model(loaded), *rows), expected) <= LOGITS
    # A loaded adapter is saved with its pattern again, whether the model computes the pattern or not.
    for number, model in enumerate((loaded, PeftModel.from_pretrained(llama("sdpa"), tmp_path))):
        model.save_pretrained(tmp_path / str(number))
        again = PeftModel.from_pretrained(llama("sdpa"), tmp_path / str(number)).eval()
        assert distance(logits_of(ra.patch_model(again), *rows), expected) <= LOGITS


def test_an_adapter_inside_an_unwrapped_model_brings_its_pattern_back(tmp_path):
    """As Transformers adds it."""
    save_adapter(ORDERS[0], tmp_path)
    model = ra.patch_model(inject_adapter_in_model(PeftConfig.from_pretrained(tmp_path), llama("sdpa"))).eval()
    assert model.config.ring_dilated["pattern"] == "window:4+2"
    logits_of(model, *batch("right"))


def test_an_adapter_on_a_model_with_its_pattern_or_another(tmp_path, caplog):
    save_adapter(ORDERS[0], tmp_path)
    PeftModel.from_pretrained(ra.patch_model(llama(), "window:4+2"), tmp_path)
    assert WARNING not in caplog.text
    other = PeftModel.from_pretrained(ra.patch_model(llama(), "window:8"), tmp_path)
    assert WARNING + "the pattern window:8: call ra.patch_model(model, pattern)" in caplog.text
    assert ra.patch_model(other).config.ring_dilated["pattern"] == "window:8"
    other.save_pretrained(tmp_path / "other")
    saved = json.loads((tmp_path / "other" / "adapter_config.json").read_text())["auto_mapping"]["ring_dilated"]
    assert saved["pattern"] == "window:8", "it is saved as what its model computes"
    logits_of(other, *batch("right"))


def test_an_adapter_of_exact_attention_is_saved_as_any_other(tmp_path):
    for pattern in ("exact", None):
        model, saved = save_adapter(ORDERS[1], tmp_path, pattern=pattern)
        assert saved is None
        logits_of(model, *batch("right"))


def test_an_adapter_without_a_task_says_that_its_pattern_is_not_saved(tmp_path, caplog):
    model, saved = save_adapter(ORDERS[0], tmp_path, LoraConfig(r=4, target_modules="all-linear"))
    logits_of(model, *batch("right"))
    assert {*saved} == {"base_model_class", "parent_library"}
    assert "PEFT saves no pattern with adapter 'default', which has no task_type: make it with one" in caplog.text


@pytest.mark.parametrize("order", ORDERS)
def test_prompts_are_saved_with_their_pattern(order, tmp_path):
    model, saved = save_adapter(order, tmp_path, copy.deepcopy(PREFIXES["prompt"]))
    model(**without_positions("plain")[0])
    assert saved["ring_dilated"]["pattern"] == "window:4+2"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "windw:4"}, "adapter 'default': config.ring_dilated must be as ra.patch_config.*did you mean"),
        ({"layers": {"1": {}}}, r"adapter .default.: config.ring_dilated must be .*or its text such as .*got {}"),
        (ra.patch_config(LlamaConfig(num_key_value_heads=3), "kv0=exact;kv1-2=window:4").ring_dilated, "is for 3 key"),
    ],
    ids=["text", "layer", "heads"],
)
def test_an_adapter_with_a_wrong_pattern_is_refused(settings, message, tmp_path):
    with_lora(llama()).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_mapping": {"ring_dilated": settings}}))
    refused(message, PeftModel.from_pretrained, llama(), tmp_path)


def test_adapters_of_several_patterns_are_refused(tmp_path):
    for name, pattern in (("one", "window:4+2"), ("two", "window:8")):
        save_adapter(ORDERS[0], tmp_path / name, pattern=pattern)
    model = PeftModel.from_pretrained(llama(), tmp_path / "one", adapter_name="one")
    model.load_adapter(tmp_path / "two", adapter_name="two")
    refused(r"trained under different patterns, {'one': .*window:4\+2.*: pass one of them", ra.patch_model, model)
    assert ra.patch_model(model, "window:8") is model


def prompted(model, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, config).eval()


PREFIXES = {
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def without_positions(kind):
    """PEFT numbers the tokens behind a prefix itself."""
    inputs, labels = batch(kind)
    del inputs["position_ids"]
    return inputs, labels


@pytest.mark.parametrize("prefix", PREFIXES)
def test_learned_prefix(prefix):
    """Prefix tuning: fewer queries than keys. Prompt tuning: embeddings for tokens. On one process, and over a ring."""
    inputs, labels = without_positions("right")

    def answer(model):
        logits = model(**inputs).logits[:, -TOKENS:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return logits.detach()[labels != -100], gradients

    expected = answer(prompted(llama(), PREFIXES[prefix]))
    assert len(expected[1]) == 1
    check(answer(prompted(ra.patch_model(llama()), PREFIXES[prefix])), expected)
    for found, _ in on_ranks(lambda ring, model: answer(model), lambda: prompted(llama(), PREFIXES[prefix])):
        assert distance(found, expected[0]) <= LOGITS


def checkpointed(model, use_reentrant):
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model.train()


@pytest.mark.parametrize(("use_reentrant", "ranks"), [(True, 1), (False, 2)])
def test_checkpointed_lora_on_packed_rows(calls, use_reentrant, ranks):
    inputs, labels = batch("packed")
    expected = alone(with_lora(llama()), inputs, labels)

    def work(ring, model):
        return over_ring(checkpointed(model, use_reentrant), ring, inputs, labels)

    for found in on_ranks(work, lambda: with_lora(llama()), ranks):
        check(found, expected)
    assert len(calls) == 2 * 2 * ranks, "two layers, each computed twice"
