"""Every private name of other libraries that this package uses, except operators in kernels; each in one function.

Other libraries may rename these in any release. A probe looks for each name before its first use, and for the names of torch
and Transformers when the package is loaded; an error lists the missing names and the library's version.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from importlib.metadata import version as installed_version
from pkgutil import resolve_name
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_HOOKS_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_HOOKS_OF_GRADIENTS = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

#: A module whose attributes are looked at: torch.compile puts another function in place of `Module.__init__`.
PLAIN_MODULE = nn.Module()

_ATTENTIONS = ("flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_KERNELS = (*(f"_scaled_dot_product_{kind}{way}" for kind in _ATTENTIONS for way in ("", "_backward")),)

#: The private names, by library and place. A place is found by its name, unless `check` is given it. It may be a function:
#: the name is then its variable, or an attribute that it reads or sets.
PROBED: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {
        "torch": ("_C",),
        "torch.nn.Module": ("_call_impl",),
        f"{__name__}.PLAIN_MODULE": (*_HOOKS_BEFORE, *_HOOKS_AFTER, *_HOOKS_OF_GRADIENTS),
        "torch.Tensor": ("_base", "_make_wrapper_subclass", "_version"),
        "torch.utils": ("_pytree", "_python_dispatch"),
        "torch._C": ("_SetExcludeDispatchKeyGuard", "_autograd"),
        "torch._C._autograd": ("_top_saved_tensors_default_hooks",),
        "torch.autograd.grad_mode": ("_unsafe_preserve_version_counter",),
        "torch.ops.aten": (*_KERNELS, "_flash_attention_forward", "_flash_attention_backward", "_grouped_mm"),
    },
    "torch.distributed": {
        "torch.distributed.distributed_c10d": ("_get_default_store", "_object_to_tensor", "_tensor_to_object"),
        "torch.distributed.ProcessGroup": ("_get_backend", "_device_types"),
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper.__init__": ("checkpoint_fn",),
    },
    "torch.gloo": {"torch.distributed.ProcessGroupGloo.Options": ("_timeout",)},
    "torch.compile": {"OptimizedModule": ("_orig_mod",)},
    "transformers": {
        "transformers.modeling_utils.PreTrainedModel": (
            "_can_set_attn_implementation",
            "_is_stateful",
            "_supports_sdpa",
        ),
        "transformers.modeling_utils.PreTrainedModel._set_gradient_checkpointing": ("_gradient_checkpointing_func",),
        "transformers.configuration_utils.PretrainedConfig": ("_attn_implementation",),
        "transformers.utils.output_capturing": ("_active_collector",),
    },
    "transformers.mtp": {"transformers.PreTrainedModel": ("_init_weights", "_keys_to_ignore_on_load_unexpected")},
    "transformers.generate": {"transformers.GenerationMixin": ("_prepare_cache_for_generation",)},
    "transformers.Trainer": {
        "transformers.Trainer": ("_get_dataloader", "_get_grad_norm", "_set_signature_columns_if_needed"),
        "transformers.Trainer._set_signature_columns_if_needed": ("_signature_columns",),
    },
    "accelerate": {
        "accelerate.Accelerator": ("_prepare_deepspeed", "_prepare_device_mesh"),
        "accelerate.Accelerator.__init__": ("_dataloaders", "_models", "_schedulers"),
        "accelerate.Accelerator.prepare_data_loader": ("_is_accelerate_prepared",),
    },
    "deepspeed": {"deepspeed.utils.set_z3_leaf_module": ("_z3_leaf",)},
    "trl.GRPOTrainer": {"trl.GRPOTrainer": ("_generate_single_turn", "_get_tool_suffix_ids")},
    "trl.RLOOTrainer": {"trl.RLOOTrainer": ("_generate_single_turn",)},
    "trl.DPOTrainer": {"trl.DPOTrainer.__init__": ("_precompute_model_hash", "_precompute_ref_logps")},
    "trl.KTOTrainer": {"trl.KTOTrainer.__init__": ("_precompute_model_hash", "_precompute_ref_logps")},
    "trl.SFTTrainer": {"trl.SFTTrainer": ("_prepare_dataset",)},
    "lm_eval": {"HFLM": ("_loglikelihood_tokens", "_model_call", "_model_generate")},
}


def _has(place: Any, name: str) -> bool:
    """Returns whether an object has an attribute, or a function's code contains the name."""
    code = code_of(place) if isinstance(place, FunctionType) else None
    if code is not None:
        return name in (*code.co_names, *code.co_consts, *code.co_varnames)
    return hasattr(place, name)


def check(library: str, found: Mapping[str, Any] | None = None) -> None:
    """Raises ImportError for the names in `PROBED` that a library lacks; `found` has places that no name leads to."""
    missing = []
    for place in PROBED[library] if found is None else found:
        try:
            there = resolve_name(place) if found is None else found[place]
        except (ImportError, AttributeError):
            there = None
        missing += [f"{place}.{name}" for name in PROBED[library][place] if not _has(there, name)]
    if missing:
        root = library.partition(".")[0]
        raise ImportError(
            f"hf_ring_attention uses {', '.join(missing)}, which {root} {installed_version(root)} does not have: install "
            f"a release that pyproject.toml of hf_ring_attention allows"
        )


def code_of(function: Any) -> CodeType | None:
    """Returns the code of a function without its decorators; None for other callables."""
    return getattr(inspect.unwrap(function), "__code__", None)


def version_of(x: Tensor) -> int:
    """Returns how often a tensor was written to; 0 for an inference tensor, which lacks ._version."""
    return 0 if x.is_inference() else x._version


def detached(x: Tensor) -> Tensor:
    """Returns a tensor inside an operator without its gradient, which counts with it how often it is written to."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def saved_tensor_hooks() -> Any:
    """Returns the hooks that pack and unpack tensors that autograd saves now; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def calling_frame(module: nn.Module) -> FrameType | None:
    """Returns the frame of torch's call of a module, for a hook of this module; None if compiled code calls it."""
    frame, code = inspect.currentframe(), nn.Module._call_impl.__code__
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is module):
        frame = frame.f_back
    return frame


def is_running(frame: FrameType) -> bool:
    """Returns whether a frame is among those that called this function."""
    now = inspect.currentframe()
    while now is not None and now is not frame:
        now = now.f_back
    return now is frame


def remove_hooks(module: nn.Module, unwanted: Callable[[Any], bool]) -> None:
    """Removes a module's `unwanted` hooks, before and after its forward, without their handles."""
    for kind, *marks in (_HOOKS_BEFORE, _HOOKS_AFTER):
        hooks = getattr(module, kind)
        for number in [number for number, hook in hooks.items() if unwanted(hook)]:
            del hooks[number]
            for mark in marks:
                getattr(module, mark).pop(number, None)


def forward_hooks(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns the hooks before and after the forward of each module of a model, with the module's path."""
    return [
        (path, hook)
        for path, module in model.named_modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
    ]


def divides_weights(hook: Any) -> bool:
    """Returns whether a hook is of FSDP or ZeRO, which gather weights for a call and for its backward."""
    hook = hook.func if isinstance(hook, partial) else hook
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed.fsdp.", "deepspeed."))


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a module has hooks, other than those that gather its weights."""
    of_gradients = (module._backward_pre_hooks, module._backward_hooks)
    kinds = (module._forward_pre_hooks, module._forward_hooks, *of_gradients)
    return not all(divides_weights(hook) for hooks in kinds for hook in hooks.values())


def compiled_module(model: Any) -> Any:
    """Returns the module inside a result of torch.compile; None for other modules."""
    if type(model).__name__ == "OptimizedModule":
        check("torch.compile", {"OptimizedModule": model})
    return getattr(model, "_orig_mod", None)


def default_store() -> Any:
    """Returns the key-value store that the processes of the default process group used to find each other."""
    return dist.distributed_c10d._get_default_store()


def as_bytes(x: Any, group: Any) -> Tensor:
    """Returns a picklable object as bytes, as torch sends objects through a process group."""
    return dist.distributed_c10d._object_to_tensor(x, torch.device("cpu"), group)[0]


def from_bytes(content: Tensor, size: int, group: Any) -> Any:
    """Returns the object in the first `size` bytes."""
    return dist.distributed_c10d._tensor_to_object(content, size, group)


def timeout_of(group: Any) -> timedelta:
    """Returns how long the ranks of a process group wait for each other."""
    return group._get_backend(group._device_types[0]).options._timeout


def implementation_of(config: Any) -> str | None:
    """Returns the attention implementation of a config, and so of a model that has this config."""
    return getattr(config, "_attn_implementation", None)


def set_implementation(config: Any, name: str) -> None:
    """Sets the attention implementation of a config, and so of a model that has this config."""
    config._attn_implementation = name


def calls_the_interface(model_class: Any) -> bool:
    """Returns whether a model class calls Transformers' attention interface.

    Transformers reads the source of the class's module, or takes the answer that it found for a base before. Here, only a class
    whose source cannot be read, as in a REPL, has the answer of its first base with a source.
    """
    kinds = (kind for kind in model_class.__mro__ if hasattr(kind, "_can_set_attn_implementation"))
    kind = next(kind for kind in kinds if _has_source(kind.__module__))
    in_module = type(kind.__name__, (), {"__module__": kind.__module__})  # without bases, and so without their answers
    is_model = kind.__module__ != "transformers.modeling_utils"
    return is_model and bool(kind._can_set_attn_implementation.__func__(in_module))


def _has_source(module: str) -> bool:
    try:
        return bool(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return False


def set_implementation_of_parts(model: Any, implementation: Any) -> None:
    """Sets the attention implementation of a model and its parts; Transformers refuses classes whose source it cannot read."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(implementation)


def supports_sdpa(model: Any) -> bool:
    """Returns whether a model computes attention by torch's function of it, too."""
    return bool(model._supports_sdpa)


def is_stateful(model_class: Any) -> bool:
    """Returns whether a model class passes a state from token to token."""
    return bool(model_class._is_stateful)


def may_checkpoint(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model that have a function to checkpoint their forward pass."""
    return [x for x in model.modules() if "checkpoint_fn" in vars(x) or "_gradient_checkpointing_func" in vars(x)]


def checkpointing_of(module: nn.Module) -> Any:
    """Returns the function that checkpoints a module's forward pass; None if it does not."""
    if _wraps_a_layer(module):
        return module.checkpoint_fn
    function = vars(module).get("_gradient_checkpointing_func")
    return function if function is not None and getattr(module, "gradient_checkpointing", True) else None


def _wraps_a_layer(module: nn.Module) -> bool:
    """Returns whether a module is torch's wrapper of a layer that checkpoints, which FSDP's own option adds."""
    return isinstance(vars(module).get("checkpoint_fn"), partial)


def set_checkpointing(module: nn.Module, function: Any) -> None:
    """Makes a module checkpoint its forward pass by another function."""
    if _wraps_a_layer(module):
        module.checkpoint_fn = function
    else:
        module._gradient_checkpointing_func = function


def checkpoint_options(function: Any) -> dict[str, Any] | None:
    """Returns the options with which a function calls torch's checkpoint; None for other functions.

    Transformers' own function, which offloads, hands its options on.
    """
    options: dict[str, Any] = {}
    while isinstance(function, partial):
        options = function.keywords | options
        function = function.args[0] if function.args else function.func
    return options if function.__module__ in (checkpoint.__module__, "transformers.modeling_utils") else None


def make_cache_of_generate(model: Any, make: Callable[[Any, bool], Any]) -> None:
    """Makes `generate` of a model use the cache that `make` returns for the model, where it was asked for none.

    `make` also gets whether the model drafts tokens, and returns None for the cache that generate makes itself.
    """
    if not isinstance(vars(model).get("_prepare_cache_for_generation"), _CacheOfGenerate) and hasattr(
        model, "generate"
    ):
        check("transformers.generate")
        model._prepare_cache_for_generation = _CacheOfGenerate(_prepare_cache, model, make)


class _CacheOfGenerate(partial[Any]):
    """The method of a model that makes the cache of `generate`; copies of the model have copies of it."""


def _prepare_cache(
    model: Any, make: Callable[[Any, bool], Any], config: Any, arguments: dict[str, Any], *others: Any
) -> Any:
    before = {*arguments}
    result = type(model)._prepare_cache_for_generation(model, config, arguments, *others)
    made = [name for name in arguments.keys() - before if type(arguments[name]).__name__ == "DynamicCache"]
    if config.cache_implementation is None and made and (cache := make(model, config.is_assistant)) is not None:
        if config.is_assistant:
            cache.activate_past_recording()
        arguments[made[0]] = cache
    return result


def attentions_are_collected() -> bool:
    """Returns whether the running forward pass has output_attentions=True, even if the model does not pass it on."""
    from transformers.utils import output_capturing

    return "attentions" in (output_capturing._active_collector.get() or ())


def gather_as_one(module: Any) -> None:
    """Has ZeRO-3 gather all weights inside a module together, like DeepSpeed's `set_z3_leaf_module`, which it need not load."""
    if "deepspeed" in sys.modules:
        check("deepspeed")
    module._z3_leaf = True


def prepared_models(accelerator: Any) -> list[Any]:
    """Returns the models that an accelerator has prepared."""
    check("accelerate")
    return list(accelerator._models)


def divided_among_processes(accelerator: Any) -> bool:
    """Returns whether an accelerator has prepared loaders, or schedules of DeepSpeed, by its number of processes."""
    check("accelerate")
    schedules = {type(schedule).__name__ for schedule in accelerator._schedulers}
    return bool(accelerator._dataloaders) or "DeepSpeedSchedulerWrapper" in schedules


def is_prepared(loader: Any) -> bool:
    """Returns whether Accelerate has prepared a data loader, or treats it as prepared."""
    check("accelerate")
    return bool(getattr(loader, "_is_accelerate_prepared", False))


def mark_prepared(loader: Any) -> None:
    """Has `accelerator.prepare` return a loader as it is."""
    loader._is_accelerate_prepared = True


def draft_layers(model: Any, count: int | None, names: list[str]) -> Any:
    """Returns Transformers' layers that draft tokens: `count` new ones, else those of a checkpoint, by patterns of names."""
    check("transformers.mtp")
    from transformers.modeling_layers import MtpModel  # A class may know the names of one size only, or none.

    model._keys_to_ignore_on_load_unexpected = names
    drafts = MtpModel.from_pretrained(model) if count is None else MtpModel(model, count)
    if count is not None:
        drafts.layers.apply(model._init_weights)  # Transformers leaves experts and sinks as they are in memory.
    return drafts


def has_unexpected_name(model: Any, name: str) -> bool:
    """Returns whether a model's class leaves a weight of this name out when it loads a checkpoint."""
    return any(re.search(pattern, name) for pattern in type(model)._keys_to_ignore_on_load_unexpected or ())


check("torch")
if dist.is_available():
    check("torch.distributed")
if dist.is_available() and dist.is_gloo_available():
    check("torch.gloo")
#: Applies a function to each value inside lists, tuples and dicts.
tree_map: Any = torch.utils._pytree.tree_map
#: Lists the values inside lists, tuples and dicts.
tree_leaves: Any = torch.utils._pytree.tree_leaves
#: Lists the same, and returns the lists, tuples and dicts without them.
tree_flatten: Any = torch.utils._pytree.tree_flatten
#: A context where a method runs in place of each operator.
DispatchMode: Any = torch.utils._python_dispatch.TorchDispatchMode
#: The product of each group of rows with its matrix, for experts.
GROUPED_MM: Any = torch.ops.aten._grouped_mm.default
#: Makes a tensor of a class, a shape, a dtype and a device without numbers.
without_numbers: Any = Tensor._make_wrapper_subclass
#: A context where tensors of other classes are ordinary tensors.
plain_tensors: Any = torch._C.DisableTorchFunctionSubclass
#: A context that keeps the version numbers of tensors, so that autograd does not notice writes.
preserved_version: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
#: The attribute of a tensor that FSDP 2 asks for: the tensor that it is a view of.
BASE: Any = Tensor._base
