"""Models beside compilers, dtypes, inference mode and other ways of passing inputs: as under eager attention."""

import pytest
import torch
from accelerate import cpu_offload
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModel

import hf_ring_attention as ra
from tests.support.neighbours import (
    PYRAMID,
    built,
    check,
    exact_and_bounds,
    llama,
    logits_of,
    on_two_ranks,
    with_lora,
)
from tests.support.probe import LOGITS, batch, distance, logits_and_gradients, over_ring
from tests.support.ranks import on_ranks
from tests.support.threads import forget_modes
from tests.support.tiny_models import VOCAB, tiny_config

# PEFT asks Transformers by names that a later 5 has renamed.
pytestmark = [
    pytest.mark.usefixtures("calls"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


@pytest.mark.own_dtypes  # torch.compile compiles nothing where tests.support.tolerance turns float32 into float64
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled(calls, monkeypatch):
    """Also where it was compiled first and patched then; each graph breaks at the attention, and nowhere else is lost."""
    forget_modes(monkeypatch)
    rows = batch("left")
    torch._dynamo.reset()
    model = llama()
    backend = CompileCounterWithBackend("aot_eager")
    model.compile(backend=backend)
    expected = exact_and_bounds(logits_and_gradients, llama, *rows)
    check(logits_and_gradients(model, *rows), *expected)
    assert not calls
    ra.patch_model(model)
    graphs = backend.frame_count
    check(logits_and_gradients(model, *rows), *expected)
    assert backend.frame_count >= graphs + 3, "graphs before, between and after the attention of two layers"
    assert len(calls) == 2

    packed = batch("packed")
    expected = exact_and_bounds(logits_and_gradients, lambda: ra.patch_model(llama(), PYRAMID), *packed)
    check(logits_and_gradients(ra.patch_model(model, PYRAMID), *packed), *expected)
    torch._dynamo.reset()


def norm_error(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.own_dtypes
@pytest.mark.parametrize(("how", "dtype"), [("converted", torch.bfloat16), ("autocast with LoRA", torch.float16)])
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_inference_mode(ranks):
    """Also first: what was planned in it serves training later, in which inference tensors cannot be saved."""
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

    for inferred, trained in on_ranks(work, llama, ranks):
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

    def work(ring, model):
        rows = (inputs[name] for name in ("input_ids", "attention_mask", "position_ids"))
        return model(*rows).last_hidden_state.detach()[labels != -100]

    for found in on_ranks(work, lambda: built(AutoModel, config), ranks):
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
