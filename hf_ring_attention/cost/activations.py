"""The memory of a step's activations, measured: layers run a step on torch's meta device, whose tensors hold no numbers.

What autograd saves, checkpointing keeps, norms copy and slices hold is then what Transformers does, for every model type.
The live bytes after each operation are linear in the tokens, and in the tokens of a slice, so short rows tell those of any row.
The layers up to the first one of each kind run, and count for all layers of their kinds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..compute.chosen import SLICE_BYTES, SLICE_BYTES_OF_CPUS, gathers
from ..hf.model.wrappers import by_name, cache_names, modules_with_choices, runner_of
from ..ring.operator import keep_attention
from ..training.sliced_layers import slice_modules
from .layers import ModelAttention
from .memory import TrainingSetting
from .shape import ModelShape
from .trace import KERNEL, CacheOfRing, InHost, Phase, SavedGradient, Trace, as_in_training

#: The tokens of a short row, at least.
_FEW_TOKENS = 64

#: For the operations of each part and layer: bytes, bytes for each token, and bytes for each token of a slice.
_Lines = dict[tuple[str, int], set[tuple[float, float, float]]]


@dataclass(frozen=True)
class Activations:
    """The bytes of activations in the layers of a step, in the memory of a device unless it is said otherwise."""

    saved: Sequence[int]  # behind the forward pass of each layer, by this layer and those before
    host: Sequence[int]  # the same in host memory
    loss: int  # in the loss: all of it, with the last hidden states and their gradient
    host_of_loss: int
    last_norm: int  # the most until backward comes to the last layer
    layers: Sequence[int]  # the most while a layer runs backward, beyond what it and those before had saved
    attention: Sequence[int]  # behind the backward of its attention, beyond the same; 0 without attention


@dataclass(frozen=True)
class _Way:
    """What decides the operations of a step."""

    dtype: str
    checkpointing: bool
    keep_attention: bool
    offload: bool
    sliced: bool
    one_tile: tuple[bool, ...]  # whether attention is one tile of all tokens, for each layer that runs
    is_fused: bool
    ranks: int  # whose keys layers gather; 1 for layers that a transport serves
    slices: tuple[int, bool] | None  # the fields of `_ChosenWithoutNumbers`; None where no query chooses keys


def activations(shape: ModelShape, setting: TrainingSetting) -> Activations:
    """Returns the activations of a step, without what only the transport and the kernel of attention know.

    Raises:
        ValueError: a model without the checkpointing of the setting.
        RuntimeError: a model without the slices of the setting, or one that computes with the numbers of tensors.
    """
    tokens, at_once = setting.local_tokens, setting.layer_tokens_at_once
    patterns = dict(zip(shape.attention.numbers, shape.attention.layers))
    one_tile = tuple(setting.is_one_tile(patterns.get(number)) for number in range(len(shape.stack)))
    keeps = setting.checkpointing and setting.keep_attention
    way = _Way(
        setting.dtype, setting.checkpointing, keeps, setting.offload, setting.slices(at_once), one_tile, setting.is_fused,
        setting.ring_size if shape.attention.gathering else 1, _slices_of_choices(shape.attention, setting),
    )  # fmt: skip
    if way not in shape.lines:
        shape.lines[way] = _measured_lines(shape, way)
    found = {
        phase: max(base + by_token * tokens + by_slice * at_once for base, by_token, by_slice in lines)
        for phase, lines in shape.lines[way].items()
    }
    return _of_all_layers(found, shape.kinds)


def _slices_of_choices(attention: ModelAttention, setting: TrainingSetting) -> tuple[int, bool] | None:
    """Returns the bytes of a slice of queries that choose keys, and whether their keys are gathered; None without any."""
    chosen = next((x.chosen for x in attention.gathering.values() if x.chosen is not None), None)
    if chosen is None:
        return None
    group = 1 if attention.latent else attention.num_heads // attention.num_kv_heads
    of_keys = gathers(chosen, setting.seq_len, group)
    if of_keys and setting.device == "cuda":  # Triton's kernels hold no slices.
        return 0, True
    of_query = setting.seq_len * setting.number_bytes  # a row of a mask
    if of_keys:
        of_query = 4 * chosen * attention.num_kv_heads * (attention.head_dim + attention.value_dim + group)
    most = SLICE_BYTES if setting.device == "cuda" else SLICE_BYTES_OF_CPUS
    return min(most, setting.local_tokens * of_query), of_keys


def _of_all_layers(found: Mapping[tuple[str, int], float], kinds: Sequence[int]) -> Activations:
    """Returns the bytes of all layers, from those of one layer of each kind."""

    def sums(name: str) -> list[int]:
        behind = [found[name, -1]]
        for kind in kinds:
            behind.append(behind[-1] + found[name, kind] - found[name, kind - 1])
        return [*map(math.ceil, behind[1:])]

    def beyond(name: str, number: int, before: int) -> int:
        return math.ceil(found[name, number]) - before if (name, number) in found else 0

    saved, host, last = sums("saved"), sums("host"), max(number for _, number in found)
    return Activations(
        saved=saved,
        host=host,
        loss=saved[-1] + beyond("loss", -1, saved[last]),
        host_of_loss=host[-1] + beyond("host of loss", -1, host[last]),
        last_norm=saved[-1] + beyond("last norm", -1, saved[last]),
        layers=[beyond("layer", kind, saved[kind]) for kind in kinds],
        attention=[beyond("attention", kind, saved[kind]) for kind in kinds],
    )


def _measured_lines(shape: ModelShape, way: _Way) -> _Lines:
    """Returns the lines through the bytes of short rows: of two, and of a third one if they are sliced.

    From the first slice of a module to the last one, bytes grow or fall evenly, so two slices tell those of any number. In n
    tokens and slices of s, the first slice has s of them, and the last one n - s, in place of s as the last of many.
    """
    at_once = max(_FEW_TOKENS, shape.attention.num_heads)  # Slices cut the longest dimension of [B, H, n, D].
    tokens, less = 2 * at_once - 1 if way.sliced else at_once, at_once // 2
    first, twice = (_phases_of_step(shape, way, times * tokens, times * at_once) for times in (1, 2))
    shorter = _phases_of_step(shape, way, tokens - less, at_once) if way.sliced else None
    lines: _Lines = {}
    for phase, sizes in first.items():
        of_layer = lines.setdefault(phase[:2], set())
        for number, (size, of_twice) in enumerate(zip(sizes, twice[phase], strict=True)):
            base = 2 * size - of_twice
            by_token = (size - base) / tokens if shorter is None else (size - shorter[phase][number]) / less
            by_slice = (size - base - by_token * tokens) / at_once
            of_layer.add((base, by_token + by_slice, -by_slice) if phase[2] else (base, by_token, by_slice))
    return lines


def _with_arguments(more: dict[str, Any], module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return (), {**by_name(module, args, kwargs), **more}


@as_in_training()
def _phases_of_step(shape: ModelShape, way: _Way, tokens: int, at_once: int) -> dict[Phase, list[int]]:
    """Returns the bytes after each operation of a step of the layers that run."""
    model: Any = shape.model
    decoder = runner_of(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, way.dtype))
    if way.checkpointing:
        keeping = {"context_fn": keep_attention} if way.keep_attention else {}
        model.activation_checkpointing_enable({"use_reentrant": False, **keeping})
    else:
        model.activation_checkpointing_disable()
    trace = Trace([*model.parameters(), *model.buffers()])
    sliced: list[Any] = [*slice_modules(model, at_once)[0].values()] if way.sliced else []
    for module in sliced:
        module.forward.own = partial(trace.run_slice, module)
    hooks = [x.register_post_accumulate_grad_hook(trace.drop_gradient) for x in model.parameters() if x.requires_grad]
    for number, (layer, is_one_tile) in enumerate(zip(shape.stack, way.one_tile)):
        hooks.append(layer.register_forward_hook(partial(trace.behind, number)))
        for module in layer.modules():
            setattr(module, KERNEL, (is_one_tile, way.is_fused, way.slices))
    hooks.append(shape.stack[0].register_forward_pre_hook(partial(trace.behind, -1, output=None)))
    for module in modules_with_choices(model) if way.ranks > 1 else ():
        cache = {cache_names(type(module).forward)[0]: CacheOfRing(way.ranks)}
        hooks.append(module.register_forward_pre_hook(partial(_with_arguments, cache), with_kwargs=True))
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    # Models make no mask beside one of four dimensions.
    given = {"input_ids": ids, "position_ids": ids, "use_cache": False}
    given["attention_mask"] = torch.empty(1, 1, 1, 1, device="meta")
    known = inspect.signature(decoder.forward).parameters
    offloading = saved_tensors_hooks(partial(InHost, trace), InHost.back) if way.offload else nullcontext()
    try:
        with trace, offloading:
            hidden = decoder(**{name: x for name, x in given.items() if name in known})[0]
            loss = SavedGradient.apply(hidden)
            trace.note("loss", -1, trace.now)
            trace.note("host of loss", -1, trace.host)
            del hidden
            trace.part = "last norm", -1
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
        for module in sliced:
            module.forward.own = None
            module.forward.undo()
    return trace.phases()
