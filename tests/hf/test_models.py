"""Tiny models of several families: "ring_dilated" computes what eager does, and a pattern what its definition says."""

import inspect

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import reference_attention
from tests.support.tiny_models import with_large_weights
from tests.support.tolerance import EXACT, largest

VOCAB, TOKENS = 97, 20
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, **WIDTHS, "num_key_value_heads": 2, "intermediate_size": 64}
CONFIGS = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=5),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen2_sliding": lambda: Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "gemma2": lambda: Gemma2Config(**GROUPED, head_dim=8, sliding_window=6, attn_logit_softcapping=None),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, **WIDTHS, intermediate_size=64),
    "opt": lambda: OPTConfig(**SIZES, **WIDTHS, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0),
}  # fmt: skip
PYRAMID = ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2)
LONGNET = ra.Pattern.longnet([4, 12, None], [1, 2, 4])


def make(name, implementation="ring_dilated"):
    """A model with the same weights at every call."""
    config = CONFIGS[name]()
    return with_large_weights(AutoModelForCausalLM.from_config(config, attn_implementation=implementation)).eval()


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """name -> (eager model, its checkpoint loaded as "ring_dilated"), each made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            eager = make(name, "eager")
            eager.save_pretrained(folder)
            made[name] = eager, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ring_dilated").eval()
        return made[name]

    return get


def tokens(rows=2, length=TOKENS):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def padding_mask(side):
    """[2, TOKENS]: the second row has 7 tokens of padding."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    if side == "left":
        mask[1, :7] = 0
    elif side == "right":
        mask[1, -7:] = 0
    return mask


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp_min(0)


def labels_of(ids, mask):
    """Labels of the tokens that a valid token predicts; a padding token predicts the first one after left padding."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)
    return labels


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert grads
    return {name: grad.clone() for name, grad in grads.items()}


def largest_gradient_error(got, want):
    """Over all parameters, relative to the largest gradient of each; gradients that should be 0 relative to the others."""
    assert got.keys() == want.keys()
    floor = 1e-3 * max(float(grad.abs().max()) for grad in want.values())
    return largest(
        float((got[name] - want[name]).abs().max()) / max(float(want[name].abs().max()), floor) for name in want
    )


def relative_error(got, want):
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max()) / float(want.abs().max())


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_pattern_a_checkpoint_computes_what_eager_does(reloaded, name, padding):
    ids, mask = tokens(), padding_mask(padding)
    found = []
    for model in reloaded(name):
        output = model(
            input_ids=ids,
            attention_mask=None if padding == "none" else mask,
            position_ids=positions_of(mask),
            labels=labels_of(ids, mask),
            output_hidden_states=True,
            use_cache=False,
        )
        found.append((output.hidden_states, gradients(model, output.loss)))
    (want_states, want_grads), (got_states, got_grads) = found
    assert len(want_states) == 3
    valid = mask.bool()
    for got, want in zip(got_states, want_states, strict=True):
        assert relative_error(got[valid], want[valid]) <= EXACT
    assert largest_gradient_error(got_grads, want_grads) <= EXACT


@pytest.mark.own_dtypes
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pattern", [None, PYRAMID], ids=["exact", "pyramid"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_a_model_on_cuda_computes_what_it_does_on_the_cpu(padding, pattern):
    ids, mask = tokens(), padding_mask(padding)
    found = []
    for device in ("cpu", "cuda"):
        model = ra.patch_model(make("llama"), pattern).to(device)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask)}
        inputs = {name: x.to(device) for name, x in inputs.items()}
        output = model(**inputs, labels=labels_of(ids, mask).to(device), use_cache=False)
        grads = {name: grad.cpu() for name, grad in gradients(model, output.loss).items()}
        found.append((output.logits.cpu()[mask.bool()], grads))
    (want, want_grads), (got, got_grads) = found
    assert relative_error(got, want) <= 1e-4
    assert largest_gradient_error(got_grads, want_grads) <= 1e-3


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bidirectional_encoder(side):
    ids, mask = tokens(), padding_mask(side)
    config = BertConfig(**SIZES, **WIDTHS, intermediate_size=64, attention_probs_dropout_prob=0.0)
    want, got = (
        with_large_weights(BertModel._from_config(config, attn_implementation=implementation))
        .eval()(input_ids=ids, attention_mask=mask)
        .last_hidden_state
        for implementation in ("eager", "ring_dilated")
    )
    assert relative_error(got[mask.bool()], want[mask.bool()]) <= EXACT


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_compute_what_their_documents_do_alone(reloaded, name):
    """position_ids that restart, no mask, no cache: how Transformers' data collators pack."""
    ids, rows = tokens(), [[(0, 7), (7, 8), (8, 20)], [(0, 12), (12, 20)]]
    positions = torch.stack([torch.cat([torch.arange(stop - start) for start, stop in row]) for row in rows])
    eager, model = reloaded(name)
    got, want = (m(input_ids=ids, position_ids=positions, use_cache=False).logits for m in (model, eager))
    if name != "opt":  # which does not look for packing in position_ids by itself
        assert relative_error(got, want) <= EXACT
    for row, documents in enumerate(rows):
        for start, stop in documents:
            alone = model(input_ids=ids[row : row + 1, start:stop], use_cache=False).logits
            assert relative_error(got[row, start:stop], alone[0]) <= EXACT, (row, start, stop)


@pytest.mark.parametrize("pattern", [PYRAMID, LONGNET], ids=["pyramid", "longnet"])
@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "gpt2", "gpt_neox"])
def test_padding_and_packing_change_nothing_under_a_pattern(name, pattern):
    model = ra.patch_model(make(name), pattern)
    document, other = tokens(1, 13), tokens(1, 18)[:, 13:]
    alone = model(input_ids=document, use_cache=False).logits[0]
    exact = make(name)(input_ids=document, use_cache=False).logits[0]
    assert relative_error(alone, exact) > 1e-2, "the pattern leaves nothing out, so this shows nothing"

    for before, after in ((5, 0), (0, 6), (3, 3)):
        ids = torch.nn.functional.pad(document, (before, after))
        mask = torch.nn.functional.pad(torch.ones_like(document), (before, after))
        padded = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).logits
        assert relative_error(padded[0, before : before + 13], alone) <= EXACT, (before, after)
    for parts in ([other, document], [document, other], [other, document, other]):
        positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
        packed = model(input_ids=torch.cat(parts, 1), position_ids=positions, use_cache=False).logits
        start = 0 if parts[0] is document else other.shape[1]
        assert relative_error(packed[0, start : start + 13], alone) <= EXACT, [part.shape[1] for part in parts]


#: What each of the two layers computes when PYRAMID is set for all layers, and when LONGNET is set for layer 1 besides.
WINDOW = {"mistral": ra.Pattern((ra.Window(5),)), "qwen2_sliding": ra.Pattern((ra.Window(4),))}
OWN_LAYERS = {"mistral": (0, 1), "qwen2_sliding": (1,)}


@pytest.mark.parametrize("own", [False, True], ids=["all_layers", "one_layer_of_its_own"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_sliding", "gpt2", "gpt_neox", "opt"])
def test_layers_compute_the_definition(monkeypatch, name, own):
    """Against a model whose attention is the dense oracle, each layer with the pattern it should have."""
    patterns = [WINDOW[name] if layer in OWN_LAYERS.get(name, ()) else PYRAMID for layer in (0, 1)]
    model = make(name)
    ra.patch_config(model.config, PYRAMID)
    if own:
        patterns[1] = LONGNET
        ra.patch_config(model.config, LONGNET, layers=[1])
    ids, mask = tokens(), padding_mask("left")
    documents = [[(0, TOKENS)], [(7, TOKENS)]]
    seen = []

    def oracle(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen.append(module.layer_idx)
        out, _ = reference_attention(
            query, key, value, pattern=patterns[module.layer_idx], documents=documents, scale=scaling
        )
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "oracle", oracle)
    inputs = {"input_ids": ids, "position_ids": positions_of(mask), "labels": labels_of(ids, mask), "use_cache": False}
    output = model(**inputs, attention_mask=mask)
    want_model = make(name, "oracle")
    want = want_model(**inputs)  # no mask: the oracle knows the documents
    assert seen == [0, 1]
    valid = mask.bool()
    assert relative_error(output.logits[valid], want.logits[valid]) <= EXACT
    grads = gradients(model, output.loss), gradients(want_model, want.loss)
    assert largest_gradient_error(*grads) <= EXACT


def test_a_pattern_is_saved_and_loaded_with_the_model(tmp_path):
    ids = tokens()
    model = make("llama")
    exact = model(input_ids=ids).logits
    assert ra.patch_config(model.config, LONGNET) is model.config
    ra.patch_config(model.config, PYRAMID, layers=[1])
    stored = model.config.ring_dilated
    assert ra.Pattern.from_dict(stored["pattern"]) == LONGNET
    assert {int(layer): ra.Pattern.from_dict(d) for layer, d in stored["layers"].items()} == {1: PYRAMID}
    dilated = model(input_ids=ids).logits
    assert relative_error(dilated, exact) > 1e-2

    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).ring_dilated == stored
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ring_dilated").eval()
    assert again.config.ring_dilated == stored
    assert torch.equal(again(input_ids=ids).logits, dilated)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert relative_error(eager(input_ids=ids).logits, exact) <= EXACT, "a pattern is ring_dilated's alone"


def test_patch_config_replaces_what_was_set():
    """A pattern of layers leaves those of others, and one for all layers leaves none."""
    config = ra.patch_config(CONFIGS["llama"](), LONGNET)
    ra.patch_config(config, LONGNET, layers=[0])
    ra.patch_config(config, PYRAMID, layers=[1])
    want = {"pattern": LONGNET.to_dict(), "layers": {"0": LONGNET.to_dict(), "1": PYRAMID.to_dict()}}
    hint = {"hint": config.ring_dilated["hint"]}
    assert config.ring_dilated == want | hint
    ra.patch_config(config, PYRAMID)
    assert config.ring_dilated == {"pattern": PYRAMID.to_dict()} | hint


def test_patch_model_is_patch_config_and_the_implementation():
    ids = tokens()
    want = make("llama")
    ra.patch_config(want.config, PYRAMID)
    model = make("llama", "eager")
    assert ra.patch_model(model, PYRAMID) is model
    assert model.config._attn_implementation == "ring_dilated"
    assert torch.equal(model(input_ids=ids).logits, want(input_ids=ids).logits)
    assert torch.equal(ra.patch_model(model)(input_ids=ids).logits, want(input_ids=ids).logits), "pattern=None keeps it"


def enable_checkpointing(model, use_reentrant):
    # A later Transformers 5 renamed it, and warns of the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("rows", ["left", "packed"])
def test_gradient_checkpointing(rows, use_reentrant):
    ids, mask = tokens(), padding_mask("left")
    inputs = {"attention_mask": mask, "position_ids": positions_of(mask), "labels": labels_of(ids, mask)}
    if rows == "packed":
        inputs = {"position_ids": torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1), "labels": ids}
    found = []
    for checkpointed in (False, True):
        model = ra.patch_model(make("llama"), PYRAMID).train()
        if checkpointed:
            enable_checkpointing(model, use_reentrant)
        calls = []
        model.model.layers[0].self_attn.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        found.append(gradients(model, model(input_ids=ids, use_cache=False, **inputs).loss))
        assert len(calls) == (2 if checkpointed else 1)
    assert largest_gradient_error(found[1], found[0]) <= EXACT


@pytest.mark.own_dtypes
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_autocast(name):
    """No further from float32 than twice what eager attention is under the same autocast."""
    ids, mask = tokens(), padding_mask("left")
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask), "use_cache": False}
    exact = make(name, "eager")(**inputs).logits[mask.bool()].detach()
    errors = {}
    for implementation in ("eager", "ring_dilated"):
        model = make(name, implementation)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**inputs, labels=labels_of(ids, mask))
        logits = output.logits[mask.bool()].detach().float()
        errors[implementation] = float((logits - exact).norm() / exact.norm())
        grads = gradients(model, output.loss)
        assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads.values())
    assert 0 < errors["ring_dilated"] <= 2 * errors["eager"] <= 0.2


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "gpt2"])
def test_generate_without_a_cache(reloaded, name):
    mask = padding_mask("left")
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "use_cache": False}
    want, got = (model.generate(tokens(), attention_mask=mask, **settings) for model in reloaded(name))
    assert torch.equal(got, want)


def test_a_boolean_mask_that_the_caller_edits_in_place(reloaded):
    """What was read from a mask must not outlive its contents, though the tensor object is the same."""
    eager, model = reloaded("llama")
    ids, mask = tokens(), padding_mask("none").bool()
    model(input_ids=ids, attention_mask=mask)
    mask[1, :7] = False
    want, got = (m(input_ids=ids, attention_mask=mask).logits[mask] for m in (eager, model))
    assert relative_error(got, want) <= EXACT


def test_every_family_is_asked_for_its_positions():
    """The tests above pass position_ids to every model; a model that takes none would make them say less."""
    for name in CONFIGS:
        assert "position_ids" in inspect.signature(make(name).forward).parameters, name
