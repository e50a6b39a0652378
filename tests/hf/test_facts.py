"""Layers with equal facts share a planned call: whatever their checks read must be among the facts."""

import dataclasses
import inspect

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.hf.forward_pass import new_pass
from hf_ring_attention.hf.layer import attention
from hf_ring_attention.hf.layer.attention import LayerFacts, facts_of, ring_dilated_attention
from hf_ring_attention.hf.layer.masks import Tokens
from hf_ring_attention.hf.model.config import Patterns
from hf_ring_attention.plan.branches import Window
from tests.support.tiny_models import tiny_model

#: A call of a layer, and another value of each of its arguments.
ROWS = {"query": torch.ones(1, 4, 6, 8), "key": torch.ones(1, 2, 6, 8), "value": torch.ones(1, 2, 6, 8)}
ARGUMENTS = {
    "module": tiny_model("qwen3", "ring_dilated").model.layers[0].self_attn,
    "query": ROWS["query"].double(),
    "key": ROWS["key"][:, :1],
    "value": ROWS["value"].clone().requires_grad_(),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]),
    "dropout": 0.5,
    "scaling": 2.0,
    "sliding_window": 3,
    "softcap": 5.0,
    "s_aux": torch.ones(4),
    "kwargs": {"is_causal": False},
}
#: Other values of what a mask says.
OF_MASKS = {
    "documents": (((0, 3), (3, 6)),),
    "length": 7,
    "written": 5,
    "causal": True,
    "own": (Window, 3),
    "before": 1,
    "missing": (2,),
    "layout": ra.SequenceLayout("contiguous", 6, 1),
    "valid": torch.ones(1, 6, dtype=torch.bool),
}
#: What the way of a layer's call reads of its pass: facts, each with another value, and what no check depends on.
OF_PASSES = {
    "patterns": Patterns({None: ra.Pattern.window(4)}),
    "exact": True,
    "skipped": (1,),
    "runner": object(),
    "ring": ra.Ring.alone(kernel="math"),
}
#: "decides" is made of the facts, and `Tokens` of the last two.
BESIDE = {"decides", "kept", "probes", "layout", "documents"}


@pytest.fixture
def layer():
    return tiny_model("llama", "ring_dilated").model.layers[0].self_attn


def facts_of_call(monkeypatch, module, **arguments):
    """The facts of a call, which may be refused behind them."""
    found = []
    monkeypatch.setattr(attention, "facts_of", lambda *given: found.append(facts_of(*given)) or found[-1])
    more = arguments.pop("kwargs", {})
    try:
        ring_dilated_attention(module, **{**ROWS, "attention_mask": None, **arguments}, **more)
    except (ValueError, NotImplementedError):
        assert found
    return found[0]


def facts(layer, now, tokens=None, *recorded):
    call = (*ROWS.values(), None), tokens or Tokens(length=6), (0.0, None, None, None, {})
    return facts_of(layer, *call, now, *recorded)


def test_every_argument_of_a_layer_is_a_fact(layer, monkeypatch):
    names = {*inspect.signature(ring_dilated_attention).parameters}
    assert {*ARGUMENTS} == names, "give the new one another value here"
    expected = facts_of_call(monkeypatch, layer)
    assert facts_of_call(monkeypatch, layer) == expected
    for name, other in ARGUMENTS.items():
        module, arguments = (other, {}) if name == "module" else (layer, {name: other})
        assert facts_of_call(monkeypatch, module, **arguments) != expected, name


def test_all_that_a_mask_says_is_a_fact(layer):
    assert {*OF_MASKS} == {field.name for field in dataclasses.fields(Tokens)}, "give the new one another value here"
    now, tokens = new_pass(layer), Tokens(length=6)
    for name, other in OF_MASKS.items():
        assert facts(layer, now, dataclasses.replace(tokens, **{name: other})) != facts(layer, now, tokens), name


class Recorded:
    """A pass whose attributes are noted when they are read."""

    def __init__(self, now, read):
        vars(self).update(now=now, read=read)

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.now, name)

    def __setattr__(self, name, value):
        setattr(self.now, name, value)


def test_whatever_the_checks_read_of_a_pass_is_a_fact(layer, monkeypatch):
    read, now = set(), new_pass(layer)
    monkeypatch.setattr(attention, "forward_pass_of", lambda *_: Recorded(now, read))
    ring_dilated_attention(layer, **ROWS, attention_mask=None)
    assert read <= {*OF_PASSES} | BESIDE, "a fact of a pass: add it to LayerFacts, and here"
    for name, other in OF_PASSES.items():
        assert facts(layer, dataclasses.replace(now, **{name: other})) != facts(layer, now), name


def test_gradients_and_graphs_are_facts(layer):
    now = new_pass(layer)
    with torch.no_grad():
        found = [facts(layer, now, None, recorded) for recorded in (None, False, True)]
    assert len({*found, facts(layer, now)}) == 4 and isinstance(found[0], LayerFacts)
