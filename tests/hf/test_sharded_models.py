"""Tiny models on 2 gloo ranks: logits and parameter gradients of one process, and refusals that reach every rank."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

import hf_ring_attention as ra
from tests.support.ranks import PROMPTLY
from tests.support.tiny_models import with_large_weights
from tests.support.tolerance import EXACT, distance, largest

VOCAB, TOKENS = 97, 21  # padded to 22 over 2 ranks, to 24 in zigzag
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, **WIDTHS, num_key_value_heads=2),
    "mistral": lambda: MistralConfig(**SIZES, **WIDTHS, num_key_value_heads=2, sliding_window=5),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    ),
}  # fmt: skip
PATTERNS = {"exact": ra.Pattern.exact(), "pyramid": ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2)}
LAYOUTS = ("contiguous", "zigzag")
PADDINGS = ("none", "left", "right")
CASES = [
    (name, layout, padding, pattern)
    for name in CONFIGS
    for layout in LAYOUTS
    for padding in PADDINGS
    for pattern in PATTERNS
]
#: What the error of a forward pass must say.
REFUSALS = {
    "rank 1 trains": r"disagree on whether the model trains: rank 0: False, rank 1: True",
    "dropout in rank 1's layers": r"LlamaAttention: attention dropout 0\.1 was asked for.*model\.eval\(\)",
    "a mask with a hole": r"batch row 1 of the attention mask has padding inside a document.*takes padding before and after",
}


def make(name):
    config = CONFIGS[name]()
    return with_large_weights(AutoModelForCausalLM.from_config(config, attn_implementation="ring_dilated"))


def batch(padding):
    """Whole rows: ids, mask, positions and labels that are shifted already, [2, TOKENS] each."""
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    if padding == "left":
        mask[1, :13] = 0  # more than a rank's share
    elif padding == "right":
        mask[1, -13:] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    labels = F.pad(ids[:, 1:].masked_fill(mask[:, 1:] * mask[:, :-1] == 0, -100), (0, 1), value=-100)
    return ids, mask, positions, labels


def run(model, inputs, labels):
    """Logits, and the gradients of the mean loss."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def errors(rank, name, layout_name, padding, pattern_name, checkpointing=None, transport=None):
    """Of the logits and of the mean of the ranks' gradients, against one process.

    Without a transport, as keywords of `Ring`, the layouts have one each: "auto" takes one for rows as short as these.
    """
    pattern = PATTERNS[pattern_name]
    ids, mask, positions, labels = batch(padding)
    whole = {"input_ids": ids, "position_ids": positions, "attention_mask": None if padding == "none" else mask}
    want, want_grads = run(ra.patch_model(make(name), pattern), whole, labels)

    transport = transport or {"transport": {"contiguous": "collective", "zigzag": "ring"}[layout_name]}
    ring = ra.Ring(layout=layout_name, **transport)
    model = ra.patch_model(make(name), pattern, ring).train()
    if checkpointing is not None:
        # A later Transformers 5 renamed it, and warns of the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointing})
    assert ring.layout_for(TOKENS, pattern).kind == layout_name
    got, grads = run(model, whole, labels)
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= ring.world_size
    valid = mask.bool()
    floor = 1e-3 * max(float(grad.abs().max()) for grad in want_grads.values())
    worst = largest(
        float((grads[key] - want_grads[key]).abs().max()) / max(float(want_grads[key].abs().max()), floor)
        for key in want_grads
    )
    return distance(got[valid], want[valid]), worst


def assert_equal(errors_of_ranks):
    for logits, gradients in errors_of_ranks:
        assert logits <= EXACT
        assert gradients <= EXACT


@pytest.mark.drawn
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_logits_and_gradients_of_one_process(ranks, case):
    assert_equal(ranks.run(errors, 2, *case))


# GPT-2 hands the mask to its layers by position, and torch's reentrant checkpoint repeats them with a copy of it.
@pytest.mark.parametrize(("name", "layout"), [("llama", "contiguous"), ("llama", "zigzag"), ("gpt2", "zigzag")])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(ranks, use_reentrant, name, layout):
    assert_equal(ranks.run(errors, 2, name, layout, "left", "pyramid", use_reentrant))


@pytest.mark.parametrize(("world_size", "heads"), [(2, None), (4, 2)])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_by_heads(ranks, use_reentrant, world_size, heads):
    transport = {"transport": "heads", "heads": heads}
    assert_equal(ranks.run(errors, world_size, "mistral", "zigzag", "left", "pyramid", use_reentrant, transport))


def refused(rank, name, layout_name):
    """The seconds until a pass was refused, and the error of a correct one after it."""
    ring = ra.Ring(layout=layout_name)
    model = ra.patch_model(make("llama"), ring=ring)
    ids, mask, _, _ = batch("none")
    inputs = {"input_ids": ids, "attention_mask": mask.clone()}
    if name == "a mask with a hole":
        inputs["attention_mask"][1, 9] = 0
    model.train(name == "rank 1 trains" and rank == 1)
    for layer in model.model.layers:
        layer.self_attn.train(name == "dropout in rank 1's layers" and rank == 1)
        layer.self_attn.attention_dropout = 0.1
    start = time.perf_counter()
    with pytest.raises(ValueError, match=REFUSALS[name]):
        model(**inputs, use_cache=False)
    seconds = time.perf_counter() - start
    dist.barrier()
    model.eval()
    want = ra.patch_model(make("llama"))(ids).logits
    # Also of a copy: a process group in its modules must not stand in its way.
    return seconds, distance(copy.deepcopy(model)(ids).logits, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", REFUSALS)
def test_refused_on_every_rank_and_the_next_pass_is_right(ranks, name, layout):
    for seconds, error in ranks.run(refused, 2, name, layout):
        assert seconds < PROMPTLY
        assert error <= EXACT
