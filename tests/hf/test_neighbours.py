"""Models beside what users combine them with: PEFT, compilers, checkpointing, copies, saving, heads, images, pipelines, dtypes.

They compute what eager attention does in the same place, or are refused with a reason.
"""

import copy
import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ring_attention as ra
from hf_ring_attention import modeling, sharding
from tests.support.probe import (
    GRADIENTS,
    LOGITS,
    TOKENS,
    alone,
    batch,
    distance,
    errors,
    logits_and_gradients,
    of_shards,
)
from tests.support.tiny_models import VOCAB, _draw, tiny_config, tiny_model

PYRAMID = ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2)
LONGNET = ra.Pattern.longnet([4, 12, None], [1, 2, 4])
DYNAMIC_ROPE = {
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}
ENCODER = {"is_decoder": False}

# PEFT asks Transformers by names that a later 5 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def calls(request, monkeypatch):
    """The layers that called "ring_dilated", of which there must be some, except in tests of refusals."""
    seen = []

    @torch.compiler.disable
    def counted(module, *args, **kwargs):
        seen.append(module)
        return modeling.ring_dilated_attention(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "ring_dilated", counted)
    yield seen
    assert seen or "refused" in request.node.name, "nothing called ring_dilated, so this shows nothing"


def llama(implementation="eager", **changes):
    return tiny_model("llama", implementation, **changes)


def built(auto, config, implementation="eager"):
    """Like `tiny_model`, of any class: the same large weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    _draw(model)
    return model.eval()


def check(found, expected):
    logits, gradients = errors(found, expected)
    assert logits <= LOGITS
    assert gradients <= GRADIENTS


def on_two_ranks(make, inputs, labels, pattern=None, use=lambda model: model):
    """`logits_and_gradients` of the model that each of two simulated ranks makes, patches and uses; of rank 0."""

    def work(ring):
        return of_shards(use(ra.patch_model(made[ring.rank], pattern, ring)), ring, inputs, labels)

    made = [make() for _ in range(2)]
    return ra.run_simulated(work, 2, timeout=60)[0]


# ---- PEFT


def with_lora(model):
    """LoRA on all projections, with weights that change the model."""
    lora = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return lora.eval()


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


@pytest.mark.parametrize("order", ORDERS)
def test_merged_lora(order, tmp_path):
    inputs, labels = batch("right")
    valid = labels != -100
    wrapped = lora_llama(order, PYRAMID)
    wrapped.save_pretrained(tmp_path)
    expected = wrapped(**inputs).logits[valid]
    merged = wrapped.merge_and_unload()
    assert distance(merged(**inputs).logits[valid], expected) <= LOGITS
    plain = llama()
    plain.load_state_dict(merged.state_dict())
    assert distance(plain(**inputs).logits[valid], expected) > 1e-2, "the pattern leaves nothing out"
    assert distance(ra.patch_model(plain, PYRAMID)(**inputs).logits[valid], expected) <= LOGITS
    loaded = PeftModel.from_pretrained(ra.patch_model(llama(), PYRAMID), tmp_path).eval()
    assert distance(loaded(**inputs).logits[valid], expected) <= LOGITS


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


@pytest.mark.parametrize("kind", ["plain", "right"])
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


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_learned_prefix_before_left_padding_is_refused(prefix):
    model = prompted(ra.patch_model(llama()), PREFIXES[prefix])
    with pytest.raises(ValueError, match=r"batch row 1 of the attention mask has padding inside a document.*\(0, 3\)"):
        model(**without_positions("left")[0])


# ---- gradient checkpointing and compilers


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
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("kind", ["plain", "left", "right", "packed"])
def test_compiled(calls, kind):
    inputs, labels = batch(kind)
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    model = ra.patch_model(llama())
    model.compile(backend=backend)
    expected = (alone if kind == "packed" else logits_and_gradients)(llama(), inputs, labels)
    check(logits_and_gradients(model, inputs, labels), expected)
    assert backend.frame_count >= 4, "graphs before, between and after the attention of two layers"

    expected = logits_and_gradients(ra.patch_model(llama(), PYRAMID), inputs, labels)
    check(logits_and_gradients(ra.patch_model(model, PYRAMID), inputs, labels), expected)
    assert len(calls) == 3 * 2
    torch._dynamo.reset()


# ---- copies


def hooks(model):
    """Names of this package's hooks by the module that has them."""
    return sorted(
        (name, hook.__name__)
        for name, module in model.named_modules()
        for kind in (module._forward_pre_hooks, module._forward_hooks)
        for hook in kind.values()
        if hook.__module__ == sharding.__name__
    )


def test_a_copy_and_its_original_have_patterns_of_their_own():
    inputs, labels = batch("left")
    expected = {
        pattern: logits_and_gradients(ra.patch_model(llama(), pattern), inputs, labels) for pattern in (PYRAMID, LONGNET)
    }
    assert distance(expected[PYRAMID][0], expected[LONGNET][0]) > 1e-2
    model = ra.patch_model(llama(), PYRAMID)
    twin = copy.deepcopy(model)
    assert hooks(twin) == hooks(model) == hooks(ra.patch_model(ra.patch_model(llama())))
    ra.patch_model(twin, LONGNET)
    assert hooks(twin) == hooks(model)
    check(logits_and_gradients(twin, inputs, labels), expected[LONGNET])
    check(logits_and_gradients(model, inputs, labels), expected[PYRAMID])


@pytest.mark.parametrize("changes", [{}, DYNAMIC_ROPE], ids=["llama", "dynamic_rope"])
@pytest.mark.parametrize("first", ["copy", "original"])
def test_a_copy_and_its_original_have_rings_of_their_own(first, changes):
    """One keeps the ring while the other gets another ring or none; RoPE that depends on the length has hooks, too."""
    inputs, labels = batch("packed" if not changes else "right")
    expected = logits_and_gradients(ra.patch_model(llama(**changes), PYRAMID), inputs, labels)
    originals = [llama(**changes) for _ in range(2)]
    others = ra.simulate(2, transport="ring", timeout=60)
    one_device = hooks(ra.patch_model(llama(**changes)))

    def work(ring):
        model = ra.patch_model(originals[ring.rank], PYRAMID, ring)
        twin = copy.deepcopy(model)
        assert hooks(twin) == hooks(model) and (len(hooks(model)) == len(one_device) + 2 * bool(changes))
        changed, kept = (twin, model) if first == "copy" else (model, twin)
        other = others[ring.rank]
        found = []
        for now in (ring, other, None, other):
            ra.patch_model(changed, ring=now)
            assert hooks(changed) == (one_device if now is None else hooks(kept))
            if now is None:
                found.append(logits_and_gradients(changed, inputs, labels))
            else:
                found.append(of_shards(changed, now, inputs, labels))
            before = other.traffic()
            found.append(of_shards(kept, ring, inputs, labels))
            assert other.traffic() == before, "the one with the first ring used the other's"
        return found

    for found in ra.run_simulated(work, 2, timeout=60):
        assert len(found) == 8
        for one in found:
            check(one, expected)


def test_the_pooler_of_a_copy():
    """It reads the row's first token, which only rank 0 has."""
    inputs, _ = batch("right")
    config = tiny_config("bert", **ENCODER)
    expected = ra.patch_model(built(AutoModel, config))(**inputs).pooler_output.detach()
    originals = [built(AutoModel, config) for _ in range(2)]

    def work(ring):
        model = ra.patch_model(originals[ring.rank], ring=ring)
        layout = ring.layout_for(TOKENS, ra.Pattern.exact())
        shards = {name: ring.shard(x, layout) for name, x in inputs.items()}
        twin = copy.deepcopy(model)
        ra.patch_model(twin, ring=ring)
        ra.patch_model(model)
        return [twin(**shards).pooler_output.detach(), model(**inputs).pooler_output.detach()]

    for found in ra.run_simulated(work, 2, timeout=60):
        for one in found:
            assert distance(one, expected) <= LOGITS


# ---- saving


@pytest.mark.parametrize("ring", [None, ra.simulate(2)[0]], ids=["alone", "ring"])
def test_saved_and_loaded(tmp_path, ring):
    """Patterns are saved, of single layers too; rings are not; other implementations ignore both."""
    inputs, labels = batch("left")
    valid = labels != -100
    model = ra.patch_model(llama(), PYRAMID, ring)
    ra.patch_config(model.config, LONGNET, layers=[1])
    assert model.state_dict().keys() == llama().state_dict().keys()
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["ring_dilated"] == {"pattern": PYRAMID.to_dict(), "layers": {"1": LONGNET.to_dict()}}
    assert written.keys() == {*json.loads(llama().config.to_json_string()), "ring_dilated"}

    expected = ra.patch_model(model)(**inputs).logits[valid]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ring_dilated").eval()
    for again in (loaded, ra.patch_model(AutoModelForCausalLM.from_pretrained(tmp_path).eval())):
        assert sharding.attached_ring(again) is None
        assert distance(again(**inputs).logits[valid], expected) <= LOGITS
    exact = llama()(**inputs).logits[valid]
    assert distance(exact, expected) > 1e-2
    for implementation in ("eager", "sdpa"):
        other = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation).eval()
        assert other.config._attn_implementation == implementation
        assert distance(other(**inputs).logits[valid], exact) <= LOGITS


# ---- heads


@pytest.mark.parametrize("kind", ["plain", "left", "right"])
@pytest.mark.parametrize("head", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("bert", ENCODER)], ids=["llama", "bert"])
def test_classification(model_type, changes, head, kind):
    """Of a row by one of its tokens: in llama, the last one that is no padding."""
    config = tiny_config(model_type, num_labels=5, **changes)
    inputs, labels = batch(kind)
    if head is AutoModelForSequenceClassification:
        labels = torch.tensor([1, 4])
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs.get("attention_mask", torch.tensor(1)) == 0, 0)
    else:
        labels = labels.where(labels == -100, labels % 5)
    found = [logits_and_gradients(built(head, config), inputs, labels)]
    found.append(logits_and_gradients(ra.patch_model(built(head, config)), inputs, labels))
    check(found[1], found[0])


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_classification_of_rows_over_a_ring_is_refused(model_type):
    model = built(AutoModelForSequenceClassification, tiny_config(model_type, num_labels=5))
    name = f"{type(model).__name__} classifies a whole row .* shard the base model .{type(model.base_model).__name__}"
    with pytest.raises(NotImplementedError, match=rf"{name}\) and classify what ring\.unshard"):
        ra.patch_model(model, ring=ra.simulate(2)[0])
    assert not hooks(model) and model.config._attn_implementation == "eager", "a refused model is left as it was"


@pytest.mark.parametrize("kind", ["left", "right", "packed"])
@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("bert", ENCODER)], ids=["llama", "bert"])
def test_classification_of_tokens_over_a_ring(model_type, changes, kind):
    config = tiny_config(model_type, num_labels=5, **changes)
    inputs, labels = batch(kind)
    labels = labels.where(labels == -100, labels % 5)
    expected = logits_and_gradients(ra.patch_model(built(AutoModelForTokenClassification, config)), inputs, labels)
    check(on_two_ranks(lambda: built(AutoModelForTokenClassification, config), inputs, labels), expected)
