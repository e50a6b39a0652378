"""Logits that are formed later are those of the layer as it was in the call: equal to the stock model's, or refused."""

import contextlib
import copy
import random

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attention as ra
from tests.support.ranks import on_ranks
from tests.support.tolerance import assert_exact, float64

CONFIG = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
IDS = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
LORA = {"r": 2, "init_lora_weights": False}
HEADS = {
    "plain": None,
    "LoRA": LoraConfig(target_modules=["q_proj", "lm_head"], **LORA),
    "dropout": LoraConfig(target_modules=["q_proj", "lm_head"], lora_dropout=0.4, **LORA),
    "DoRA": LoraConfig(target_modules=["q_proj", "lm_head"], use_dora=True, **LORA),
    "a copy": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **LORA),
}


def made(head="plain"):
    """A model with such an output layer, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(copy.deepcopy(CONFIG), attn_implementation="eager")
        if HEADS[head] is not None:
            model = get_peft_model(model, copy.deepcopy(HEADS[head]))
            model.add_adapter("other", copy.deepcopy(HEADS[head]))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def head_of(model):
    return model.get_output_embeddings()


def called(model, **more):
    return model(**BATCH, **more).logits


def without_adapters(model):
    with model.disable_adapter():
        return called(model)


def with_another_adapter(model):
    model.set_adapter("other")
    logits = called(model)
    model.set_adapter("default")
    return logits


def with_given_weights(model):
    names = [name for name, _ in model.named_parameters()]
    given = {name: 1.1 * x.detach() for name, x in model.named_parameters()}
    assert names
    return torch.func.functional_call(model, given, kwargs=BATCH).logits


def with_averaged_weights(model):
    kept = [x.clone() for x in model.parameters()]
    for x in model.parameters():
        x.data.mul_(0.9)
    logits = called(model)
    for x, before in zip(model.parameters(), kept):
        x.data.copy_(before)
    return logits


def behind_a_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with torch.enable_grad():
        output = model(**BATCH)
        output.loss.backward()
    optimizer.step()
    return output.logits.detach()


def in_the_other_mode(model):
    logits = called(model.eval())
    model.train()
    return logits


#: Programs by the output layer that they need, each with the answer: "equal" without gradients and with them, or "refused".
PROGRAMS = [
    (without_adapters, "LoRA", "equal", "equal"),
    (without_adapters, "a copy", "equal", "equal"),
    (with_another_adapter, "LoRA", "equal", "refused"),
    (with_another_adapter, "a copy", "equal", "refused"),
    (with_given_weights, "plain", "equal", "equal"),
    (with_averaged_weights, "plain", "refused", "refused"),
    (behind_a_step, "plain", "refused", "refused"),
    (in_the_other_mode, "plain", "equal", "equal"),
    (in_the_other_mode, "dropout", "equal", "equal"),
]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("program", "head", "unrecorded_answer", "recorded_answer"), PROGRAMS)
def test_logits_of_the_layer_in_the_call(program, head, unrecorded_answer, recorded_answer, recorded):
    answer = recorded_answer if recorded else unrecorded_answer

    def work(model):
        with torch.set_grad_enabled(recorded):
            return torch.logsumexp(program(model), -1).mean().detach()

    expected = work(made(head))

    def on_a_rank(ring, model):
        with contextlib.nullcontext() if answer == "equal" else pytest.raises(RuntimeError, match="changed after the call"):
            assert_exact(work(model), expected)

    for world_size in (1, 2):
        on_ranks(on_a_rank, lambda: made(head), world_size)
