"""Models beside what users combine them with: PEFT, compilers, checkpointing, copies, saving, heads, images, pipelines, dtypes.

They compute what eager attention does in the same place, or are refused with a reason.
"""

import copy
import json

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CLIPTextConfig,
    CLIPTextModel,
    EsmConfig,
    EsmModel,
    GPT2DoubleHeadsModel,
    PreTrainedTokenizerFast,
    SiglipTextConfig,
    SiglipTextModel,
    pipeline,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
from tests.support.tiny_models import VOCAB, draw, tiny, tiny_config, tiny_model

PYRAMID = ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2)
LONGNET = ra.Pattern.longnet([4, 12, None], [1, 2, 4])
DYNAMIC_ROPE = {
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}
ENCODER = {"is_decoder": False}

# PEFT asks Transformers by names that a later 5 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


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
    draw(model)
    return model.eval()


@torch.no_grad()
def logits_of(model, inputs, labels):
    """Of the tokens that have labels."""
    return model(**inputs).logits[labels != -100]


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


def test_generation_with_lora_over_a_ring():
    """`prefill` of a wrapped model."""
    ids = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(4))
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = with_lora(llama()).generate(ids, **settings)
    made = [with_lora(llama()) for _ in range(2)]

    def work(ring):
        model = ra.patch_model(made[ring.rank], ring=ring)
        return model.generate(ids, past_key_values=ra.prefill(model, ids[:, :20]), **settings)

    for found in ra.run_simulated(work, 2, timeout=60):
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


@pytest.mark.parametrize(
    ("prefix", "message"), [("prefix", "takes no DynamicCache"), ("prompt", "position_ids are missing")]
)
def test_a_learned_prefix_over_a_ring_is_refused(prefix, message):
    made = [prompted(llama(), PREFIXES[prefix]) for _ in range(2)]

    def work(ring):
        ids = ring.shard(batch("plain")[0]["input_ids"], ring.layout_for(TOKENS, ra.Pattern.exact()))
        return ra.patch_model(made[ring.rank], ring=ring)(input_ids=ids)

    with pytest.raises(ValueError, match=message):
        ra.run_simulated(work, 2, timeout=60)


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
@pytest.mark.parametrize("kind", ["left", "right", "packed"])
def test_compiled(calls, kind):
    """Also where it was compiled first and patched then; each graph breaks at the attention, and nowhere else is lost."""
    inputs, labels = batch(kind)
    torch._dynamo.reset()
    model = llama()
    backend = CompileCounterWithBackend("aot_eager")
    model.compile(backend=backend)
    if kind != "packed":
        check(logits_and_gradients(model, inputs, labels), logits_and_gradients(llama(), inputs, labels))
        assert not calls
    ra.patch_model(model)
    expected = (alone if kind == "packed" else logits_and_gradients)(llama(), inputs, labels)
    graphs = backend.frame_count
    check(logits_and_gradients(model, inputs, labels), expected)
    assert backend.frame_count >= graphs + 3, "graphs before, between and after the attention of two layers"
    assert len(calls) == 2

    expected = logits_and_gradients(ra.patch_model(llama(), PYRAMID), inputs, labels)
    check(logits_and_gradients(ra.patch_model(model, PYRAMID), inputs, labels), expected)
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
        assert hooks(twin) == hooks(model) and (len(hooks(model)) == len(one_device) + 1 + 2 * bool(changes))
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
    rows = batch("left")
    model = ra.patch_model(llama(), PYRAMID, ring)
    ra.patch_config(model.config, LONGNET, layers=[1])
    assert model.state_dict().keys() == llama().state_dict().keys()
    model.save_pretrained(tmp_path)
    llama().save_pretrained(tmp_path / "unpatched")
    written, unpatched = (json.loads((path / "config.json").read_text()) for path in (tmp_path, tmp_path / "unpatched"))
    assert written == {**unpatched, "ring_dilated": {"pattern": PYRAMID.to_dict(), "layers": {"1": LONGNET.to_dict()}}}

    expected = logits_of(ra.patch_model(model), *rows)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ring_dilated").eval()
    for again in (loaded, ra.patch_model(AutoModelForCausalLM.from_pretrained(tmp_path).eval())):
        assert sharding.attached_ring(again) is None
        assert distance(logits_of(again, *rows), expected) <= LOGITS
    exact = logits_of(llama(), *rows)
    assert distance(exact, expected) > 1e-2
    for implementation in ("eager", "sdpa"):
        other = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation).eval()
        assert other.config._attn_implementation == implementation
        assert distance(logits_of(other, *rows), exact) <= LOGITS


# ---- heads


CLASSIFIED = [
    (model_type, head, kind)
    for model_type in ("llama", "bert")
    for head in (AutoModelForSequenceClassification, AutoModelForTokenClassification)
    for kind in ("plain", "left", "right")
    # There bert would classify by a padding token, of which ring_dilated computes nothing.
    if (model_type, head, kind) != ("bert", AutoModelForSequenceClassification, "left")
]


@pytest.mark.parametrize(("model_type", "head", "kind"), CLASSIFIED)
def test_classification(model_type, head, kind):
    """Of tokens; or of a row by one of its tokens: in llama the last one that is no padding, in bert the first one."""
    inputs, labels = batch(kind)
    if head is AutoModelForSequenceClassification:
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs.get("attention_mask", torch.tensor(1)) == 0, 0)
        labels = torch.tensor([1, 4])
    else:
        labels = labels.where(labels == -100, labels % 5)
    config = tiny_config(model_type, num_labels=5, **(ENCODER if model_type == "bert" else {}))
    expected = logits_and_gradients(built(head, config), inputs, labels)
    check(logits_and_gradients(ra.patch_model(built(head, config)), inputs, labels), expected)


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


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
ESM = {
    "mask_token_id": 4, "token_dropout": True, "position_embedding_type": "rotary", "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
#: Models with an output that mixes the tokens of a row beside attention: what it takes, their class, config and output.
MIXING = {
    "the last token": (SiglipTextModel, SiglipTextConfig(**SIZES, projection_size=32), "pooler_output"),
    "the end-of-text token": (CLIPTextModel, CLIPTextConfig(**SIZES, eos_token_id=96), "pooler_output"),
    "a chosen token": (GPT2DoubleHeadsModel, tiny_config("gpt2", num_labels=1), "mc_logits"),
    "the share of masked tokens": (EsmModel, EsmConfig(**SIZES, **ESM), "last_hidden_state"),
}


@pytest.mark.parametrize("name", MIXING)
def test_outputs_that_mix_the_tokens_of_a_row(name):
    """Over a ring they are one device's, or refused by name and with a remedy."""
    model_class, config, output = MIXING[name]
    inputs, _ = batch("plain")
    ids = inputs["input_ids"].clamp_max(90)
    ids[:, 3], ids[:, 5] = 4, 96
    inputs["input_ids"] = ids

    def make():
        model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.random.fork_rng(devices=[]):
            draw(model)
        return model.eval()

    with torch.no_grad():
        expected = make()(**inputs)[output]
        assert distance(ra.patch_model(make())(**inputs)[output], expected) <= LOGITS
    made = [make() for _ in range(2)]

    def work(ring):
        layout = ring.layout_for(TOKENS, ra.Pattern.exact())
        shards = {name: ring.shard(x, layout) for name, x in inputs.items()}
        found = ra.patch_model(made[ring.rank], ring=ring)(**shards)[output].detach()
        return ring.unshard(found, layout) if output == "last_hidden_state" else found

    try:
        found = ra.run_simulated(work, 2, timeout=60)
    except NotImplementedError as refused:
        if model_class.__name__ in str(refused) and "ring=None" in str(refused):
            return
        raise
    assert max([distance(one, expected) for one in found]) <= LOGITS


@pytest.mark.parametrize(
    ("auto", "names"),
    [(AutoModelForCausalLM, ["labels"]), (AutoModelForQuestionAnswering, ["start_positions", "end_positions"])],
)
def test_losses_of_whole_rows_over_a_ring_are_refused(auto, names):
    """A model would shift labels within its shard, and look for the places of an answer there."""
    inputs, labels = batch("plain")
    made = [built(auto, tiny_config("llama")) for _ in range(2)]

    def work(ring):
        model = ra.patch_model(made[ring.rank], ring=ring)
        layout = ring.layout_for(TOKENS, ra.Pattern.exact())
        wanted = ring.shard(labels, layout) if names == ["labels"] else torch.tensor([3, 15])
        shards = {name: ring.shard(x, layout) for name, x in inputs.items()}
        return model(**shards, **dict.fromkeys(names, wanted)).loss

    with pytest.raises((ValueError, NotImplementedError), match=names[0]):
        ra.run_simulated(work, 2, timeout=60)


# ---- models that see

IMAGE, IMAGE_START, IMAGE_END = 5, 6, 7
#: What makes the vision tower tiny, the tokens of an image, and the shape of two images' pixels.
SEEING = {
    "llava": ({"vision_config": {"image_size": 12, "patch_size": 4}}, 9, (2, 3, 12, 12)),
    "qwen2_vl": (
        {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            "vision_config": {"depth": 2, "embed_dim": 32, "patch_size": 2},
            "vision_start_token_id": IMAGE_START,
            "vision_end_token_id": IMAGE_END,
        },
        4,
        (2 * 4 * 4, 3 * 2 * 2 * 2),
    ),
    "gemma3": (
        {
            "vision_config": {"image_size": 16, "patch_size": 4},
            "mm_tokens_per_image": 4,
            "boi_token_index": IMAGE_START,
            "eoi_token_index": IMAGE_END,
        },
        4,
        (2, 3, 16, 16),
    ),
}
IMPLEMENTATIONS = {"text": {"text_config": "ring_dilated"}, "all": "ring_dilated", "patched": None}


def seeing(model_type, implementation="eager"):
    """None: patched."""
    changes = {**SEEING[model_type][0], "image_token_id": IMAGE}
    config = tiny(CONFIG_MAPPING[model_type](), changes)
    model = built(AutoModelForImageTextToText, config, implementation or "eager")
    return model if implementation else ra.patch_model(model)


def seen(model_type, images=True):
    """Inputs and labels of two rows, the second padded on the left, with an image each."""
    _, length, pixels = SEEING[model_type]
    inputs, labels = batch("left")
    del inputs["position_ids"]
    ids = inputs["input_ids"].clamp_min(8)
    if images:
        ids[:, 8] = IMAGE_START
        ids[:, 9 : 9 + length] = IMAGE
        ids[:, 9 + length] = IMAGE_END
        inputs["pixel_values"] = torch.randn(pixels, generator=torch.Generator().manual_seed(2))
        if model_type == "qwen2_vl":
            inputs |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": (ids == IMAGE).int()}
        elif model_type == "gemma3":
            inputs["token_type_ids"] = (ids == IMAGE).long()
    return {**inputs, "input_ids": ids}, labels


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_images(calls, model_type, implementation):
    """The vision tower keeps its own attention, or computes exact attention, whatever the text's pattern."""
    inputs, labels = seen(model_type)
    model = seeing(model_type, IMPLEMENTATIONS[implementation])
    expected = logits_and_gradients(seeing(model_type), inputs, labels)
    assert any("vision" in name or "visual" in name for name in expected[1])
    check(logits_and_gradients(model, inputs, labels), expected)
    assert len(calls) == (2 if implementation != "all" else {"llava": 2 + 2, "qwen2_vl": 2 + 2 * 2}[model_type])
    kept = {"text": "sdpa", "all": "ring_dilated", "patched": "eager"}[implementation]
    assert model.config.vision_config._attn_implementation == kept

    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **settings), seeing(model_type).generate(**inputs, **settings))

    ra.patch_config(model.config, PYRAMID)
    text = model.config.get_text_config()
    assert text.ring_dilated and not hasattr(model.config.vision_config, "ring_dilated")
    found = logits_of(model, inputs, labels)
    assert distance(found, expected[0]) > 1e-2
    assert distance(found, logits_of(ra.patch_model(seeing(model_type), PYRAMID), inputs, labels)) <= LOGITS


def test_a_seeing_model_is_saved_with_its_pattern(tmp_path):
    rows = seen("llava")
    model = ra.patch_model(seeing("llava"), PYRAMID)
    model.save_pretrained(tmp_path)
    for implementation in (IMPLEMENTATIONS["text"], IMPLEMENTATIONS["all"]):
        again = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=implementation).eval()
        assert distance(logits_of(again, *rows), logits_of(model, *rows)) <= LOGITS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_images_whose_tokens_see_each_other_are_refused(calls, implementation):
    model = seeing("gemma3", IMPLEMENTATIONS[implementation])
    inputs, labels = seen("gemma3", images=False)
    assert distance(logits_of(model, inputs, labels), logits_of(seeing("gemma3"), inputs, labels)) <= LOGITS
    calls.clear()
    with pytest.raises(ValueError, match=r"Gemma3.*cannot express this mask .*use 'eager' or 'sdpa'"):
        model(**seen("gemma3")[0])
    assert not any("Gemma3" in type(layer).__name__ for layer in calls)
    assert distance(logits_of(model, inputs, labels), logits_of(seeing("gemma3"), inputs, labels)) <= LOGITS


@pytest.mark.parametrize("model_type", SEEING)
def test_images_over_a_ring_are_refused(model_type):
    model = seeing(model_type)
    with pytest.raises(NotImplementedError, match=rf"{type(model).__name__} puts features of images .*ring=None"):
        ra.patch_model(model, ring=ra.simulate(2)[0])
    assert not hooks(model) and model.config.get_text_config()._attn_implementation == "eager"


# ---- pipelines

TEXTS = ["w10 w11 w12 w13 w14 w15 w16 w17 w18", "w20 w21", "w30 w31 w32 w33 w34"]


def tokenizer(side):
    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCAB))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side=side
    )


@pytest.mark.parametrize("pattern", [None, PYRAMID], ids=["exact", "pyramid"])
def test_text_generation_pipeline(pattern):
    def generated(model, batch_size):
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer("left"), device="cpu")
        settings = {"return_tensors": True, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        return [text[0]["generated_token_ids"][-6:] for text in generate(TEXTS, batch_size=batch_size, **settings)]

    found = generated(ra.patch_model(llama(), pattern), 3)
    same = ra.patch_model(llama(), pattern) if pattern else llama()
    assert found == generated(same, 1 if pattern else 3)
    assert pattern is None or found != generated(llama(), 3), "the pattern leaves nothing out"


@pytest.mark.parametrize("pattern", [None, PYRAMID], ids=["exact", "pyramid"])
@pytest.mark.parametrize(("model_type", "side"), [("llama", "left"), ("llama", "right"), ("bert", "right")])
def test_feature_extraction_pipeline(model_type, side, pattern):
    """A text's features do not depend on those beside it."""
    config = tiny_config(model_type, **(ENCODER if model_type == "bert" else {}))

    def features(model, batch_size):
        extract = pipeline("feature-extraction", model=model, tokenizer=tokenizer(side), device="cpu")
        found = extract(TEXTS, batch_size=batch_size, return_tensors=True)
        lengths = [len(text.split()) for text in TEXTS]
        return torch.cat([one[0, -n:] if side == "left" else one[0, :n] for one, n in zip(found, lengths)])

    found = features(ra.patch_model(built(AutoModel, config), pattern), 3)
    same = ra.patch_model(built(AutoModel, config), pattern) if pattern else built(AutoModel, config)
    assert distance(found, features(same, 1 if pattern else 3)) <= LOGITS
    if pattern:
        assert distance(found, features(built(AutoModel, config), 3)) > 1e-2, "the pattern leaves nothing out"


# ---- dtypes, inference mode, inputs


def norm_error(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["converted", "autocast with LoRA"])
def test_half_precision(how, dtype):
    """Eager attention rounds as often, so both are as far from float32; by chance one of them may be nearer."""
    inputs, labels = batch("left")
    valid = labels != -100

    def found(model, context):
        with context:
            logits = model(**inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[valid].float(), labels[valid])
        model.zero_grad()
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        assert len({gradient.dtype for gradient in gradients}) == 1
        return logits.dtype, gradients[0].dtype, logits.detach()[valid], torch.cat(gradients)

    wrap = with_lora if how != "converted" else lambda model: model
    reached = {}
    for name in ("exact", "eager", "ours"):
        model = wrap(llama())
        if name == "ours":
            ra.patch_model(model)
        if name != "exact" and how == "converted":
            model = model.to(dtype)
        autocast = torch.autocast("cpu", dtype, enabled=name != "exact" and how != "converted")
        reached[name] = found(model, autocast)
    _, _, logits, gradients = reached["exact"]
    assert reached["ours"][:2] == reached["eager"][:2] and dtype in reached["ours"]
    errors_of = {name: (norm_error(made[2], logits), norm_error(made[3], gradients)) for name, made in reached.items()}
    for ours, eager in zip(errors_of["ours"], errors_of["eager"]):
        assert 0 < ours <= 1.5 * eager < 0.5, errors_of


def test_inference_mode():
    """Also first: what was planned in it serves training later, in which inference tensors cannot be saved."""
    rows = 3, 23  # of no other test, so nothing has been planned for them
    ids = torch.randint(3, VOCAB, rows, generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, -9:] = 0
    inputs, labels = {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)
    model = ra.patch_model(llama())
    expected = logits_and_gradients(llama(), inputs, labels)
    with torch.inference_mode():
        found = model(**inputs).logits
        settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(ids[:2], **settings), llama().generate(ids[:2], **settings))
    assert found.is_inference() and distance(found[labels != -100].clone(), expected[0]) <= LOGITS
    check(logits_and_gradients(model, inputs, labels), expected)


def test_inference_mode_over_a_ring():
    inputs, labels = batch("left")
    expected = logits_and_gradients(ra.patch_model(llama(), LONGNET), inputs, labels)
    made = [llama() for _ in range(2)]

    def work(ring):
        model = ra.patch_model(made[ring.rank], LONGNET, ring)
        layout = ring.layout_for(TOKENS, LONGNET)
        with torch.inference_mode():
            local = model(**{name: ring.shard(x, layout) for name, x in inputs.items()}).logits
            found = ring.unshard(local, layout)[labels != -100]
        return found.clone(), of_shards(model, ring, inputs, labels)

    for inferred, trained in ra.run_simulated(work, 2, timeout=60):
        assert distance(inferred, expected[0]) <= LOGITS
        check(trained, expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_inputs_embeds_that_are_not_contiguous(ranks):
    inputs, labels = batch("left")
    expected = logits_and_gradients(llama(), inputs, labels)
    expected[1].pop("model.embed_tokens.weight")
    embeds = llama().get_input_embeddings()(inputs.pop("input_ids")).detach()
    embeds = embeds.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    inputs = {name: x.T.contiguous().T for name, x in inputs.items()} | {"inputs_embeds": embeds}
    assert not any(x.is_contiguous() for x in inputs.values())
    if ranks == 1:
        check(logits_and_gradients(ra.patch_model(llama()), inputs, labels), expected)
    else:
        check(on_two_ranks(llama, inputs, labels), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_arguments_by_position(ranks):
    """The base model's mask and positions, as its signature orders them."""
    inputs, labels = batch("left")
    config = tiny_config("llama")
    expected = built(AutoModel, config)(**inputs).last_hidden_state.detach()[labels != -100]
    made = [built(AutoModel, config) for _ in range(ranks)]

    def work(ring):
        model = ra.patch_model(made[ring.rank], ring=ring)
        layout = ring.layout_for(TOKENS, ra.Pattern.exact())
        shards = (ring.shard(inputs[name], layout) for name in ("input_ids", "attention_mask", "position_ids"))
        return ring.unshard(model(*shards).last_hidden_state.detach(), layout)[labels != -100]

    for found in ra.run_simulated(work, ranks, timeout=60):
        assert distance(found, expected) <= LOGITS


@pytest.mark.parametrize("patched", ["before", "after"])
def test_weights_that_accelerate_loads_layer_by_layer(patched):
    rows = batch("left")
    model = ra.patch_model(llama(), PYRAMID) if patched == "before" else llama()
    expected = logits_of(ra.patch_model(llama(), PYRAMID), *rows)
    cpu_offload(model, execution_device="cpu")
    assert next(model.parameters()).device.type == "meta"
    if patched == "after":
        ra.patch_model(model, PYRAMID)
    assert distance(logits_of(model, *rows), expected) <= LOGITS
