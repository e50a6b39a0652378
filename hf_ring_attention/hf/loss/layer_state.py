"""An output layer as it was in a call: logits that are formed later are the logits of that call, or an error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...compute.private import tree_flatten, version_of

#: The beginnings of the names of attributes in which ZeRO-3 counts passes.
_OF_ZERO = ("ds_", "applied_pre_backward", "pre_bwd", "post_bwd")

#: Numbers in each sum that is kept of a tensor; one number in about as many is kept, too.
_SUMMED = 256

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class LayerState:
    """What decides the logits of an output layer."""

    tensors: list[Tensor]  # its weights and buffers
    versions: list[int]  # how often each was written to
    #: Of the tensors, which optimizers and `.data` write into without a new version; [] if none may.
    numbers: list[Tensor]
    settings: tuple[list[Any], Any]  # the attributes of its modules: adapters, probabilities of dropout, hooks
    modes: list[bool]  # whether each of its modules trains

    @staticmethod
    def of(layer: nn.Module, with_numbers: bool) -> LayerState:
        """Returns the state of a layer, whose weights must be whole."""
        tensors = tensors_of(layer)
        numbers = [number for x in tensors for number in _numbers_of(x)] if with_numbers else []
        modes = [module.training for module in layer.modules()]
        return LayerState(tensors, [*map(version_of, tensors)], numbers, _settings_of(layer), modes)

    def has_settings_of(self, layer: nn.Module) -> bool:
        """Returns whether the modules of a layer have the same settings; their modes do not count."""
        (before, form), (now, form_now) = self.settings, _settings_of(layer)
        others = [(x, y) for x, y in zip(before, now) if x is not y]
        return form == form_now and all(isinstance(x, _BY_VALUE) and x == y for x, y in others)

    def has_weights_of(self, layer: nn.Module, recorded: bool) -> bool:
        """Returns whether a layer has the same weights, and also the same tensors if gradients are recorded for them."""
        tensors = tensors_of(layer)
        if recorded and [*map(id, tensors)] != [*map(id, self.tensors)]:
            return False
        numbers = [number for x in tensors for number in _numbers_of(x)] if self.numbers else []
        return len(numbers) == len(self.numbers) and all(map(_equal, numbers, self.numbers))

    @contextmanager
    def restored_modes(self, layer: nn.Module) -> Iterator[None]:
        """A context in which the modules of a layer train, or not, as they did."""
        modules = [*layer.modules()]
        now = [module.training for module in modules]
        for module, mode in zip(modules, self.modes):
            module.training = mode
        try:
            yield
        finally:
            for module, mode in zip(modules, now):
                module.training = mode


_BY_VALUE = (bool, int, float, str)


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)


def _settings_of(layer: nn.Module) -> tuple[list[Any], Any]:
    """Returns the attributes of all modules of a layer but tensors, modes, and what ZeRO counts."""
    attributes = [
        {name: x for name, x in vars(module).items() if name != "training" and not name.startswith(_OF_ZERO)}
        for module in layer.modules()
    ]
    leaves, form = tree_flatten(attributes)
    return [None if isinstance(x, Tensor) else x for x in leaves], form


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Returns the parameters and buffers of a module, and views of weights that FSDP 1 puts there."""
    found = [
        x
        for inner in module.modules()
        for x in (*inner.parameters(False), *inner.buffers(False), *vars(inner).values())
    ]
    return list({id(x): x for x in found if isinstance(x, Tensor)}.values())


def has_given_weights(module: nn.Module) -> bool:
    """Returns whether tensors stand in place of a module's parameters for this call, as in `torch.func.functional_call`."""
    return not all(isinstance(x, nn.Parameter) for x in module.parameters())


def _numbers_of(x: Tensor) -> list[Tensor]:
    """Returns exact sums of a tensor's bits, and some of its numbers, by which others are told from it."""
    if hasattr(x, "__tensor_flatten__"):  # a quantized or divided one
        return [number for name in x.__tensor_flatten__()[0] for number in _numbers_of(getattr(x, name))]
    flat = x.detach().reshape(-1)
    size, offset = flat.element_size(), flat.storage_offset() * flat.element_size()
    words = flat.view(_WORDS[math.gcd(8, flat.numel() * size, offset)]) if flat.numel() else flat
    whole = len(words) // _SUMMED * _SUMMED
    sums = words[:whole].view(-1, _SUMMED).sum(1, dtype=torch.int64)
    return [sums, words[whole:].clone(), words[:: _SUMMED + 1].clone()]
