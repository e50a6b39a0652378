"""Models and PEFT, in either order: they compute what eager attention does, or are refused with a reason."""

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model

import hf_ring_attention as ra
from hf_ring_attention.hf.cache import cache_argument
from tests.support.neighbours import PYRAMID, check, llama, logits_of, on_two_ranks, with_lora
from tests.support.probe import (
    LOGITS,
    TOKENS,
    alone,
    batch,
    distance,
    logits_and_gradients,
)
from tests.support.ranks import run_simulated
from tests.support.tiny_models import VOCAB

# PEFT calls Transformers by names that 5.24 has renamed.
pytestmark = [
    pytest.mark.usefixtures("calls"),
    pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|past_key_values).*:FutureWarning"),
]


def lora_llama(order, pattern=None):
    if order == "wrapped, then patched":
        return ra.patch_model(with_lora(llama()), pattern)
    return with_lora(ra.patch_model(llama(), pattern))


ORDERS = ("wrapped, then patched", "patched, then wrapped")


@pytest.mark.parametrize("kind", ["left", "packed"])
@pytest.mark.parametrize("order", ORDERS)
def test_lora(order, kind):
    inputs, labels = batch(kind)
    expected = (alone if kind == "packed" else logits_and_gradients)(with_lora(llama()), inputs, labels)
    assert all("lora_" in name for name in expected[1]) and len(expected[1]) == 2 * 2 * 7
    check(logits_and_gradients(lora_llama(order), inputs, labels), expected)


def test_lora_over_a_ring():
    inputs, labels = batch("packed")
    expected = logits_and_gradients(lora_llama(ORDERS[0], PYRAMID), inputs, labels)
    check(on_two_ranks(lambda: with_lora(llama()), inputs, labels, PYRAMID), expected)


def test_generation_with_lora_over_a_ring():
    """`prefill` of a wrapped model."""
    ids = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(4))
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = with_lora(llama()).generate(ids, **settings)
    made = [with_lora(llama()) for _ in range(2)]

    def work(ring):
        model = ra.patch_model(made[ring.rank], ring=ring)
        return model.generate(ids, **cache_argument(ra.prefill(model, ids[:, :20])), **settings)

    for found in run_simulated(work, 2):
        assert torch.equal(found, expected)


def test_perplexity_with_lora():
    ids = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = with_lora(llama())(ids).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    found = ra.perplexity(lora_llama(ORDERS[0]), ids)
    assert abs(found.nll / float(expected) - 1) <= LOGITS


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


@pytest.mark.parametrize("kind", ["plain", "left", "right"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_learned_prefix(prefix, kind):
    """Prefix tuning: fewer queries than keys. Prompt tuning: embeddings for tokens."""
    inputs, labels = without_positions(kind)
    found = []
    for model in (llama(), ra.patch_model(llama())):
        model = prompted(model, PREFIXES[prefix])
        model.zero_grad()
        logits = model(**inputs).logits[:, -TOKENS:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        found.append(
            (logits.detach()[labels != -100], {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    assert len(found[0][1]) == 1
    check(found[1], found[0])


@pytest.mark.parametrize(
    ("prefix", "message"), [("prefix", "takes no DynamicCache"), ("prompt", "position_ids are missing")]
)
def test_a_learned_prefix_over_a_ring_is_refused(prefix, message):
    made = [prompted(llama(), PREFIXES[prefix]) for _ in range(2)]

    def work(ring):
        ids = ring.shard(batch("plain")[0]["input_ids"], ring.layout_for(TOKENS, ra.Pattern.exact()))
        return ra.patch_model(made[ring.rank], ring=ring)(input_ids=ids)

    with pytest.raises(ValueError, match=message):
        run_simulated(work, 2)


def checkpointed(model, use_reentrant):
    # A later Transformers 5 renamed it, and warns of the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model.train()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_lora_on_packed_rows(calls, use_reentrant, ranks):
    inputs, labels = batch("packed")
    expected = alone(with_lora(llama()), inputs, labels)
    if ranks == 2:
        found = on_two_ranks(
            lambda: with_lora(llama()), inputs, labels, use=lambda model: checkpointed(model, use_reentrant)
        )
    else:
        found = logits_and_gradients(checkpointed(lora_llama(ORDERS[0]), use_reentrant), inputs, labels)
    check(found, expected)
    assert len(calls) == 2 * 2 * ranks, "two layers, each computed twice"


# Dynamo reads gradients of tensors that have none, and hides the warning in a way that an error passes by.
