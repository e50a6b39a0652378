"""Models and calls that "ring_dilated" refuses, before it would compute wrong results; the message names the remedy."""

import importlib
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.hf.layer.masks import ring_dilated_mask
from hf_ring_attention.hf.model.wrappers import cache_argument
from tests.hf.alike import refused
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tiny_models import VOCAB, tiny_config, tiny_model

IDS = torch.arange(3, 23).reshape(2, 10)
PATTERN = ra.Pattern.pyramid(window=3, levels=2, ratio=2)


def make(model_type, **changes):
    return tiny_model(model_type, "ring_dilated", **changes)


WIDE = torch.ones(2, 1, 10, 10)
SQUARE = r"mask .*\[.*\].*, got \(2, 1, 10, 10\): pass the .*mask, and for packed documents position_ids that restart"
HOLE = torch.ones(2, 10, dtype=torch.long).index_put((torch.tensor(1), torch.tensor(5)), torch.tensor(0))
OF_HEADS = "is for {} key/value heads, and LlamaModel has 2: give one pattern for each"


def of_kernels(**settings):
    return ra.patch_model(tiny_model("llama", "sdpa"), "window:4+1", **settings)


def greedy(model, cache):
    return model.generate(IDS, max_new_tokens=2, do_sample=False, **cache_argument(cache))


def windows_by_layer():
    """A model with windows of its own, and a longer pattern in layer 0."""
    model = ra.patch_model(tiny_model("mistral", "eager"))
    ra.patch_config(model.config, "window:3+1", layers=[0])
    return model


#: A call, and what its error says.
REFUSED = {
    **{
        name: (
            lambda model_type=model_type, name=name: make(model_type, **{name: 0.1}).train()(IDS),
            rf"{layer}Attention: attention dropout 0\.1 .*to 0 \(attention_dropout, attn_pdrop\)",
        )
        for model_type, name, layer in (("gpt2", "attn_pdrop", "GPT2"), ("llama", "attention_dropout", "Llama"))
    },
    "weights": (
        lambda: make("llama")(IDS, output_attentions=True),
        r"output_attentions=True .*never forms the attention weights: use .*'eager'",
    ),
    "square mask": (lambda: make("llama")(IDS, attention_mask=WIDE), SQUARE),
    "padding in a window": (
        lambda: make("mistral", sliding_window=4)(IDS, attention_mask=HOLE),
        r"layer 0 has a window .* 4 tokens, .*padding inside a document",
    ),
    "no model": (
        lambda: ra.patch_model(torch.nn.Linear(2, 2), PATTERN),
        "expected a Transformers model, or a wrapper of one, got Linear",
    ),
    **{
        text: (lambda text=text: ra.patch_model(make("llama"), text), OF_HEADS.format(heads))
        for text, heads in {"kv0-1=exact;kv2=window:4": 3, "kv0=window:4": 1, "kv0-3=window:4": 4}.items()
    },
    **{
        f"pattern {pattern}": (lambda pattern=pattern: ra.patch_config(tiny_config("llama"), pattern), said)
        for pattern, said in (
            (None, "pattern must be a Pattern, or its text .*, got None"),
            (PATTERN.to_dict(), "pattern must be a Pattern, or its text .*, got {'pattern'"),
        )
    },
    **{
        f"layers {layers}": (
            lambda layers=layers: ra.patch_config(tiny_config("llama"), PATTERN, layers),
            rf"layers must be integers among 0\.\.1, got {said}" if said else "layers is empty",
        )
        for layers, said in (
            ([], ""), ([0, 2], "2"), (range(10**12), "2"), ([np.int64(1)], ".*1"), ([-1], "-1"), ([True], "True"),
            (["0"], "'0'"),
        )
    },
    "a cache that drops keys": (
        lambda: greedy(model := windows_by_layer(), DynamicCache(config=model.config)),
        r"layer 0 has the pattern window:3\+1, and its cache keeps only",
    ),
    "another kernel": (
        lambda: of_kernels(ring=ra.Ring.alone(kernel="math"), kernel="flash"),
        "got kernel='flash' and a ring with kernel='math': make the ring with it",
    ),
    "no kernel": (lambda: of_kernels(kernel="triton"), r"patch_model: kernel must be one of 'auto', .*, got 'triton'"),
    "a kernel of GPUs": (
        lambda: of_kernels(kernel="flash")(IDS), "kernel='flash' cannot compute this call: it computes on CUDA devices",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, said = REFUSED[name]
    refused(said, call, error=(ValueError, NotImplementedError))


def test_nothing_of_what_is_refused_stays_behind():
    model, config = make("llama"), tiny_config("llama")
    expected = model(IDS).logits
    refused("output_attentions=True", model, IDS, output_attentions=True)
    assert torch.equal(model(IDS).logits, expected)
    refused("layers is empty", ra.patch_config, config, PATTERN, layers=[])
    assert not hasattr(config, "ring_dilated")
    assert greedy(windows_by_layer(), DynamicCache()).shape == (2, 12)
    on_ranks(lambda ring, model: refused(SQUARE, model, IDS, attention_mask=WIDE), lambda: make("llama"))


def test_arguments_that_a_later_transformers_could_pass():
    """A mask function and a layer refuse unknown arguments, but not the entries of a user's batch."""
    model = make("llama")
    said, unknown = r"does not know the mask argument block_ids: use 'eager'", {"block_ids": torch.zeros(2, 10)}
    refused(said, ring_dilated_mask, 2, 10, 10, config=model.config, **unknown, error=NotImplementedError)

    class Later(type(model.model.layers[1].self_attn)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **{**kwargs, "temperatures": torch.ones(10)})

    expected = model(input_ids=IDS).logits
    assert torch.equal(model(input_ids=IDS, temperatures=torch.ones(10)).logits, expected)

    class Wrapped(Later):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    for kind in (Later, Wrapped):
        model.model.layers[1].self_attn.__class__ = kind
        said = rf"{kind.__name__}: layer 1 came with temperatures, which would"
        refused(said, model, input_ids=IDS, error=NotImplementedError)


class Logits(torch.nn.Module):
    """A model that gives a tensor, as torch.jit.trace asks for."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


class Attention(torch.nn.Module):
    """The function without a model."""

    def forward(self, q):
        q = q[:, None, :, None].float()
        return ra.ring_attention(q, q, q, pattern=ra.Pattern.exact())


TRACED = {
    "strict export": lambda ids: torch.export.export(Logits(tiny_model("llama", "ring_dilated")), (ids,), strict=True),
    "trace": lambda ids: torch.jit.trace(Logits(ra.patch_model(tiny_model("llama", "eager"))), ids),
    "export of the function": lambda ids: torch.export.export(Attention(), (ids,)),
}


def said(rank, traced):
    """Returns the error of tracing. It runs in a fresh process, as torch leaves its modes behind if tracing fails."""
    warnings.simplefilter("ignore")
    with pytest.raises((NotImplementedError, RuntimeError)) as error:
        TRACED[traced](torch.randint(3, VOCAB, (2, 20)))
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.own_dtypes  # nothing is compiled if tests.support.tolerance turns float32 into float64
@pytest.mark.drawn(3)
@pytest.mark.parametrize("traced", TRACED)
def test_tracing_is_refused_by_name(traced):
    (text,) = run_ranks(said, 1, traced)
    assert "which no exported program can: export with attn_implementation='sdpa'" in text
    if traced != "strict export":
        assert text.startswith("NotImplementedError: torch.export or torch.jit.trace was asked for")


# ---- classes that users write

BESIDE_ATTENTION = """
from torch import nn
from transformers import LlamaForCausalLM

class Own(LlamaForCausalLM):
    pass

class PlainAttention(nn.Module):
    pass
"""


@pytest.fixture
def unasked(monkeypatch):
    """Transformers has read no source yet."""
    for kind in (LlamaForCausalLM, LlamaForCausalLM.__mro__[1]):
        monkeypatch.delattr(kind, "_can_set_attn_implementation_cached_value", raising=False)


@pytest.mark.parametrize("pattern", [None, "window:4"])
def test_a_class_of_a_console_computes_as_its_base(pattern, unasked, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "console", types.ModuleType("console"))
    base, ids = tiny_model("llama", "sdpa"), torch.randint(3, VOCAB, (1, 20))
    own = type("Own", (LlamaForCausalLM,), {"__module__": "console"})(base.config)
    own.load_state_dict(base.state_dict())
    caplog.clear()
    found = ra.patch_model(own.eval(), pattern)(ids).logits
    assert torch.equal(found, ra.patch_model(base, pattern)(ids).logits) and not caplog.records


@pytest.mark.parametrize("asked", [False, True])
def test_a_class_beside_attention_that_calls_no_interface_is_refused(asked, unasked, monkeypatch, tmp_path):
    """Whether or not Transformers was asked about its base before."""
    (tmp_path / "own_attention.py").write_text(BESIDE_ATTENTION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_attention", raising=False)
    base = tiny_model("llama", "sdpa")
    if asked:
        base.set_attn_implementation("eager")
    own = importlib.import_module("own_attention").Own(base.config)
    refused("Own does not call Transformers' attention interface", ra.patch_model, own)
