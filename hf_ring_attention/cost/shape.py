"""The sizes of a model that decide its memory: its parameters, and the layers whose activations are measured.

The model is made on torch's meta device, where tensors hold no numbers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

from ..hf.layer.indexed import attach_indexers
from ..hf.model.models import why_not
from ..hf.model.wrappers import runner_of
from ..hf.names import IMPLEMENTATION
from ..hybrids.mixers import leave_out
from ..hybrids.models import mixers_of
from ..plan.patterns import Pattern
from .layers import ModelAttention
from .models import UNREADABLE, attention_of_model, config_of, unreadable
from .trace import MEASURING, as_in_training


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer."""

    parameters: int  # all experts included
    shared: int  # of the parameters, with a later layer


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model."""

    attention: ModelAttention
    model_type: str
    width: int
    vocabulary: int
    caps_logits: bool
    embedding: int  # the parameters of the token embeddings; the head has as many, or is the same tensor
    layers: tuple[LayerShape, ...]
    parameters: int
    largest: int  # the number of parameters in the largest tensor
    whole: str | None  # the type of a model that also sees or hears; only its text model is counted
    model: nn.Module = field(repr=False, compare=False)  # on the meta device, with only the first layers
    stack: nn.ModuleList = field(repr=False, compare=False)  # these layers: at least one of each kind
    kinds: tuple[int, ...]  # for each layer of the whole model, the one in the stack that is measured for it
    lines: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # what `activations` has measured


def shape_of_model(model: Any, pattern: Pattern | str | None = None) -> ModelShape:
    """Returns the sizes of what `config_of` reads; a pattern replaces the config's for layers without their own window."""
    config = config_of(model)
    text = copy.deepcopy(config.get_text_config())
    if refused := why_not(text.model_type):
        raise ValueError(refused)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"Transformers makes no causal language model of type {text.model_type!r}")
    attention = attention_of_model(config, config.name_or_path or text.model_type, pattern)
    if hasattr(text, IMPLEMENTATION):
        delattr(text, IMPLEMENTATION)  # Only the sizes of the model count here.
    try:
        with torch.device("meta"), as_in_training():
            made = _on_meta_device(text)
    except UNREADABLE as error:  # Some types have no model of their default config.
        raise ValueError(unreadable(text.model_type, error)) from error
    sizes = [parameter.numel() for parameter in made.parameters()]
    embeddings = made.get_input_embeddings().weight
    stack = _stack_of(made, text)
    layers, kinds = _read_layers(stack), _kinds_of(stack, text, attention)
    for _, mixer in mixers_of(made, text):
        leave_out(mixer)
    attach_indexers(runner_of(made))
    return ModelShape(
        attention=attention,
        model_type=text.model_type,
        width=getattr(text, "hidden_size", None) or embeddings.shape[1],
        vocabulary=text.vocab_size,
        caps_logits=bool(getattr(text, "final_logit_softcapping", None)),
        embedding=embeddings.numel(),
        layers=layers,
        parameters=sum(sizes),
        largest=max(sizes),
        whole=None if config.get_text_config() is config else config.model_type,
        model=made.to("meta").train(),  # A few parameters ignore the context.
        stack=_leave_layers(made, stack, max(kinds) + 1),
        kinds=tuple(kinds),
    )


def _on_meta_device(text: PretrainedConfig) -> Any:
    """Returns the model of a config; RoPE that asks for the positions of a row becomes plain, which holds as much."""
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            rope["rope_type"] = "default"
    for name in ("layerdrop", "decoder_layerdrop"):  # Layers left out at random would differ from row to row.
        if hasattr(text, name):
            setattr(text, name, 0.0)
    make = partial(AutoModelForCausalLM.from_config, attn_implementation=MEASURING, trust_remote_code=False)
    try:  # Other implementations of experts ask for the numbers of routers.
        return make(copy.deepcopy(text), experts_implementation="grouped_mm")
    except ValueError:
        return make(text)


def _stack_of(made: nn.Module, text: PretrainedConfig) -> nn.ModuleList:
    """Returns the layers of a model."""
    count = text.num_hidden_layers
    stack = next((x for x in made.modules() if isinstance(x, nn.ModuleList) and len(x) == count), None)
    if stack is None:
        raise ValueError(f"no list of {count} layers was found in a model of type {text.model_type!r}")
    return stack


def _read_layers(stack: nn.ModuleList) -> tuple[LayerShape, ...]:
    counted: set[int] = set()
    layers: list[LayerShape] = []
    # Backward begins with the last layer, so parameters that several layers share get their gradients there.
    for layer in reversed(stack):
        sizes = {id(x): x.numel() for x in layer.parameters()}
        shared = sum(size for one, size in sizes.items() if one in counted)
        counted |= sizes.keys()
        layers.append(LayerShape(sum(sizes.values()), shared))
    return tuple(reversed(layers))


def _kinds_of(stack: nn.ModuleList, text: PretrainedConfig, attention: ModelAttention) -> list[int]:
    """Returns for each layer the layer of its kind that is measured: the last one of those that run."""
    types, patterns = getattr(text, "layer_types", None), dict(zip(attention.numbers, attention.layers))

    def kind(number: int, layer: nn.Module) -> Any:
        """Returns all that tells kinds of layers apart: modules, sizes, and settings beside numbers."""
        exact = patterns.get(number) == Pattern.exact()
        settings = [
            (path, name, x)
            for path, module in layer.named_modules()
            for name, x in vars(module).items()
            if isinstance(x, (bool, str, type(None)))
        ]
        sizes = [(path, tuple(x.shape)) for path, x in layer.named_parameters()]
        return types[number] if types else None, exact, type(layer), tuple(settings), tuple(sizes)

    kinds = [kind(number, layer) for number, layer in enumerate(stack)]
    # Behind the third layer, a model's variables hold as many hidden states as behind later ones.
    running = kinds[: max(3, 1 + max(map(kinds.index, kinds)))]
    return [len(running) - 1 - running[::-1].index(x) for x in kinds]


def _leave_layers(made: nn.Module, stack: nn.ModuleList, count: int) -> nn.ModuleList:
    """Leaves the first layers in a model, and returns them."""
    few = stack[:count]
    for module in [*made.modules()]:
        for name, child in [*module.named_children()]:
            if child is stack:
                setattr(module, name, few)
    return few
