"""Finds a Transformers model inside its wrappers, its parts, its ring, and the heads that tensor parallelism gives a rank."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from ...compute.private import compiled_module
from ...ring.operator import Numbered
from ...ring.ring import Ring, ring_alone
from .types import INDEXED, INDEXED_LAYERS

#: Returns the signature of the forward of a class.
signature_of = functools.cache(inspect.signature)

#: The attribute of a patched model's modules that holds their `Attachment`.
ATTACHMENT = "_ring_dilated"
#: The models that `patch_model` was called for; it keeps none of them alive.
_PATCHED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()

#: The modules of patched models, by the numbers that name them in graphs.
MODULES: Numbered[nn.Module] = Numbered("the model of this graph is gone: compile the model again")

#: The name that Transformers and Accelerate give to the mesh dimension along which they divide heads.
_NAME = "tp"


@dataclass
class Attachment:
    """What `patch_model` gives to a module: the ring that cuts its rows, and its number in graphs of torch.compile.

    Copies of a module have no number, so graphs break at them: they would name the module that was copied. A file has no ring.
    """

    ring: Ring | None = None
    kernel: str = "auto"  # for the rows of a model without a ring
    number: str = ""  # dynamo would take a number for a size that may change
    in_graphs: bool = False  # whether a graph can hold calls of its model
    is_decoder: bool = False
    runs: bool = False  # whether a call of it has begun outside of a graph, so that no part of it may begin in one
    loss_in_parts: bool = False  # whether its loss is one of next tokens, which each rank can compute for its part
    inside: int | None = None  # names the modules and hooks inside that `hf/probe.py` has looked at
    own_attention: bool = False  # whether its layers attend as in Transformers, over a ring with its `RingCache`
    trained: int = 0  # its calls over a ring while it trains

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return Attachment(self.ring, self.kernel)

    def __reduce__(self) -> Any:
        return _loaded_attachment, (self.kernel, 1 if self.ring is None else self.ring.world_size)


def _loaded_attachment(kernel: str, ranks: int) -> Attachment:
    """Returns the attachment of a module that was pickled, and says once that its ring is gone."""
    if ranks > 1:
        _warn_of_lost_ring(ranks)
    return Attachment(kernel=kernel)


@functools.cache
def _warn_of_lost_ring(ranks: int) -> None:
    logging.getLogger("hf_ring_attention").warning(
        f"a model of a ring of {ranks} ranks was loaded without its ring, so each process computes whole rows: call "
        f"ra.patch_model(model, ring=ring)"
    )


def wrapped_modules(model: Any) -> list[Any]:
    """Returns a model with all that torch.compile, PEFT, DDP, FSDP, DeepSpeed and others put around it, from the outside in."""
    modules = [model]
    while not isinstance(model, PreTrainedModel):
        if compiled_module(model) is not None:
            model = compiled_module(model)
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        elif hasattr(model, "get_base_model"):
            tuner, model = getattr(model, "base_model", None), model.get_base_model()
            if tuner is not model and isinstance(tuner, nn.Module):
                modules.append(tuner)
        elif isinstance(getattr(model, "transformers_model", None), nn.Module):  # as sentence-transformers names it
            model = model.transformers_model
        else:
            break
        modules.append(model)
    return modules


def unwrapped(model: Any) -> Any:
    """Returns the innermost of the `wrapped_modules`: the Transformers model."""
    return wrapped_modules(model)[-1]


def inner_model(model: Any, caller: str) -> PreTrainedModel:
    """Returns the `unwrapped` model; refuses other things than models of Transformers."""
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"{caller}: expected a Transformers model, or a wrapper of one, got {type(model).__name__}")
    return inner


def whole_model(model: Any, caller: str) -> PreTrainedModel:
    """Returns the `inner_model`, for a caller that runs only this; refuses models with virtual tokens of PEFT."""
    inner, peft_config = inner_model(model, caller), cast(Any, getattr(model, "active_peft_config", None))
    if getattr(peft_config, "is_prompt_learning", False):
        raise ValueError(
            f"{caller}: PEFT adds {peft_config.num_virtual_tokens} virtual tokens without positions to each row of "
            f"{type(inner).__name__}: use an adapter without prompts, such as LoRA"
        )
    return inner


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode; afterwards each module returns to the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def runner_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the module that every forward pass over tokens runs and that makes the masks; some heads skip the base model."""
    base: Any = model.base_model
    runner: PreTrainedModel = base.get_decoder() if hasattr(base, "get_decoder") else base
    if runner is model and model.get_output_embeddings() is not None:
        # Some text models of larger models have the name of a part that only these have (`base_model_prefix`).
        inner = (x for x in model.children() if isinstance(x, PreTrainedModel) and x.config is model.config)
        return next(inner, model)
    return runner


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Returns the part of a model whose rows are tokens: all of it, or the text model of one that also sees or hears."""
    config = model.config.get_text_config()
    return next((module for module in model.modules() if getattr(module, "config", None) is config), model)


def share_config(runner: PreTrainedModel) -> None:
    """Gives copied layers of a decoder, which have a copy of its config, the config itself: it names their model."""
    of_models = [module.config for module in runner.modules() if isinstance(module, PreTrainedModel)]
    for module in runner.modules():
        config = getattr(module, "config", None)
        if type(config) is type(runner.config) and all(config is not other for other in of_models):
            module.config = runner.config


def models_inside(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Returns the models beside a model's decoder that are no part of it, such as a frozen teacher."""
    runner, parts, config = runner_of(model), [model.config], model.config.get_text_config()
    for whole in parts:
        parts += [x for x in vars(whole).values() if isinstance(x, PretrainedConfig)]
    beside = [x for x in model.modules() if isinstance(x, PreTrainedModel) and x is not model]
    apart = [
        x for x in beside if all(x is not y for y in runner.modules()) and all(y is not runner for y in x.modules())
    ]
    return [x for x in apart if x.config is config or all(x.config is not y for y in parts)]


def class_of_transformers(module: nn.Module) -> type:
    """Returns Transformers' class of a module, else the module's class; FSDP 2 makes a class for each module it shards."""
    kinds = type(module).__mro__
    return next((kind for kind in kinds if kind.__module__.startswith("transformers.")), kinds[0])


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of a model by their names, also if its class passes them on as *args."""
    if not args:
        return dict(kwargs)
    forwards = [signature_of(vars(kind)["forward"]) for kind in type(module).__mro__ if "forward" in vars(kind)]
    signature = next((x for x in forwards if "input_ids" in x.parameters), forwards[0])
    _, *named = signature.bind_partial(module, *args).arguments.items()
    return {**dict(named), **kwargs}


def numbers_documents(mask: Any) -> bool:
    """Returns whether a mask [B, n] has the numbers of several documents in a row, and 0 for padding."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype == torch.bool or 0 in mask.shape:
        return False
    least = mask.masked_fill(mask <= 0, torch.inf if mask.is_floating_point() else torch.iinfo(mask.dtype).max).amin(1)
    return bool((mask.amax(1) > least).any())


def tokens_in(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the tokens [B, n] or embeddings [B, n, width] among the arguments of a model; else None."""
    ids: Tensor | None = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if ids is None else ids


def takes(module: nn.Module, name: str) -> bool:
    """Returns whether the forward of a module's class has a parameter of this name."""
    return name in signature_of(type(module).forward).parameters


def attachment_of(module: nn.Module) -> Attachment:
    """Returns what `patch_model` gave to a module, with a ring or without one; an empty `Attachment` for other modules."""
    return getattr(module, ATTACHMENT, None) or Attachment()


def ring_of_calls(module: nn.Module) -> Ring:
    """Returns the ring of a module's model, or a ring of this process if it has none."""
    attachment = attachment_of(module)
    return attachment.ring or ring_alone(attachment.kernel)


def set_attachments(model: PreTrainedModel, attachment: Attachment) -> None:
    """Gives an attachment to the modules of a model; only the model and the modules of its decoder get the ring."""
    _PATCHED.add(model)
    of_ring, runner = {model, *decoder_of(model).modules()}, runner_of(model)
    for module in model.modules():
        ring, number = attachment.ring if module in of_ring else None, str(MODULES.add(module))
        setattr(module, ATTACHMENT, replace(attachment, ring=ring, number=number, is_decoder=module is runner))


def models_of(ring: Ring) -> list[PreTrainedModel]:
    """Returns the models that were patched with this ring and still exist."""
    return [model for model in _PATCHED if attachment_of(model).ring is ring]


def head_shard(module: nn.Module, query: Tensor, key: Tensor) -> tuple[int, int]:
    """Returns (i, t): this rank has the i-th of t equal parts of the layer's heads; (0, 1) if it has all of them.

    The weights of a divided layer are a `DTensor` on each rank. Some plans gather the heads before attention. The query
    [B, H, m, D] and the key [B, Hkv, n, D] have the heads of this rank.
    """
    config, heads, kv_heads = getattr(module, "config", None), query.shape[1], key.shape[1]
    # `num_heads` counts the heads of all ranks. Some layers differ from the config.
    names = ((module, "num_heads"), (module, "num_attention_heads"), (config, "num_attention_heads"))
    total = next((count for owner, name in names if isinstance(count := getattr(owner, name, None), int)), heads)
    if total == heads or not any(isinstance(weight, DTensor) for weight in module.parameters()):
        return 0, 1
    mesh = tensor_parallel_mesh(module, unnamed=True)
    size = 1 if mesh is None else mesh.size()
    if mesh is None or total != heads * size or heads != kv_heads * getattr(module, "num_key_value_groups", 1):
        raise ValueError(
            f"{type(module).__name__}: layer {getattr(module, 'layer_idx', None)} has {total} query heads, and this rank "
            f"{heads} with {kv_heads} key/value heads: divide both evenly among ranks of a mesh dimension {_NAME!r}"
        )
    return mesh.get_local_rank(), size


def tensor_parallel_mesh(module: nn.Module, unnamed: bool = False) -> DeviceMesh | None:
    """Returns the mesh of the ranks among which tensor parallelism divides the weights of a module; None if it does not.

    The usual mesh of FSDP has no name: `unnamed` also accepts such a mesh.
    """
    meshes = [weight.device_mesh for weight in module.parameters() if isinstance(weight, DTensor)]
    named = next((mesh for mesh in meshes if _NAME in (mesh.mesh_dim_names or ())), None)
    if named is not None:
        return named if named.ndim == 1 else named[_NAME]
    return next((mesh for mesh in meshes if unnamed and mesh.ndim == 1 and mesh.mesh_dim_names is None), None)


def check_ring(model: nn.Module, ring: Ring) -> None:
    """Refuses a ring of ranks that have different heads of the same tokens."""
    mesh = tensor_parallel_mesh(model)
    both = [] if mesh is None else sorted({*ring.global_ranks} & {*dist.get_process_group_ranks(mesh.get_group())})
    if len(both) > 1:
        raise ValueError(
            f"patch_model: tensor parallelism divides {class_of_transformers(model).__name__} among ranks {both}, which cannot "
            f"share a ring: use ra.Ring(mesh) of another mesh dimension, or ring=None"
        )


def cache_in(arguments: Mapping[str, Any]) -> Cache | None:
    """Returns the cache among the arguments of a call, whatever its name: releases of Transformers rename it."""
    return next((value for value in arguments.values() if isinstance(value, Cache)), None)


def modules_with_choices(decoder: nn.Module) -> list[Any]:
    """Returns the attention modules of a decoder whose queries choose their keys, by an indexer of their own or of another."""
    config: Any = decoder.config
    kinds = (getattr(config, "layer_types", None) or ()) if config.model_type in INDEXED else ()
    numbers = [number for number, kind in enumerate(kinds) if kind in INDEXED_LAYERS]
    return [x for x in decoder.modules() if hasattr(x, "indexer") and getattr(x, "layer_idx", None) in numbers]


@functools.cache
def cache_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the parameters that hold a cache, such as "cache" (since 5.24) or "past_key_values", or are annotated so."""
    return tuple(
        x.name
        for x in signature_of(forward).parameters.values()
        if x.name in ("cache", "past_key_values") or re.search(r"Cache\b", inspect.formatannotation(x.annotation))
    )


def cache_argument(cache: Cache | None) -> dict[str, Cache | None]:
    """Returns the keyword argument that gives a cache to a model or to its `generate` in this release of Transformers."""
    (name,) = cache_names(GenerationMixin.prepare_inputs_for_generation)
    return {name: cache}


def tokens_skipped(cache: Cache | None) -> tuple[int, ...]:
    """Returns how many tokens each layer of a cache skips at the start of a row; () for a cache whose layers skip none.

    Layers that draft tokens (`use_mtp` of generate) read later tokens than the model does, and never have keys of the first.
    """
    if cache is None or type(cache).get_query_offset is Cache.get_query_offset:
        return ()
    layers: Any = cache.layers
    return tuple(cache.get_mask_sizes(1, n)[1] - layer.get_mask_sizes(1)[1] for n, layer in enumerate(layers))
