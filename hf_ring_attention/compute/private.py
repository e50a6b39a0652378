"""Every private name of other libraries that this package uses, but for the operators in `kernels`; each in one function.

Other libraries may rename these in any release. All of them exist in the releases that pyproject.toml allows;
`check_torch` and `check_transformers` look when the package is loaded, and name what is missing and the library's version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# ---- torch

_HOOKS_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_HOOKS_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def check_torch() -> None:
    """Raises ImportError where this release of torch lacks a private name that is used here."""
    module = nn.Module()
    missing = [f"torch.nn.Module.{name}" for name in (*_HOOKS_BEFORE, *_HOOKS_AFTER) if not hasattr(module, name)]
    if not hasattr(torch.Tensor, "_version"):
        missing.append("torch.Tensor._version")
    if dist.is_available() and not hasattr(dist.distributed_c10d, "_get_default_store"):
        missing.append("torch.distributed.distributed_c10d._get_default_store")
    _check_found(missing, f"torch {torch.__version__}")


def version_of(x: Tensor) -> int:
    """Returns how often a tensor was written to; 0 for an inference tensor, which has no ._version."""
    return 0 if x.is_inference() else x._version


def remove_hooks(module: nn.Module, unwanted: Callable[[Any], bool]) -> None:
    """Removes a module's `unwanted` hooks, before and after its forward, without their handles."""
    for kind, *marks in (_HOOKS_BEFORE, _HOOKS_AFTER):
        hooks = getattr(module, kind)
        for number in [number for number, hook in hooks.items() if unwanted(hook)]:
            del hooks[number]
            for mark in marks:
                getattr(module, mark).pop(number, None)


def compiled_module(model: Any) -> Any:
    """Returns the module inside a result of torch.compile; None for other modules."""
    return getattr(model, "_orig_mod", None)


def default_store() -> Any:
    """Returns the key-value store by which the processes of the default process group found each other."""
    return dist.distributed_c10d._get_default_store()


# ---- Transformers


def check_transformers(model_class: Any, config_class: Any) -> None:
    """Raises ImportError where this release of Transformers lacks a private name that is used here.

    Args:
        model_class, config_class: PreTrainedModel and PretrainedConfig.
    """
    missing = [f"{model_class.__name__}.{n}" for n in ("_can_set_attn_implementation",) if not hasattr(model_class, n)]
    missing += [f"{config_class.__name__}.{n}" for n in ("_attn_implementation",) if not hasattr(config_class, n)]
    import transformers

    _check_found(missing, f"transformers {transformers.__version__}")


def implementation_of(config: Any) -> str | None:
    """Returns the attention implementation of a config, and so of a model that has this config."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def set_implementation(config: Any, name: str) -> None:
    """Sets the attention implementation of a config, and so of a model that has this config."""
    config._attn_implementation = name


def calls_the_interface(model_class: Any) -> bool:
    """Returns whether a model class calls Transformers' attention interface."""
    return bool(model_class._can_set_attn_implementation())


def is_stateful(model_class: Any) -> bool:
    """Returns whether a model class passes a state from token to token."""
    return bool(getattr(model_class, "_is_stateful", False))


def attentions_are_collected() -> bool:
    """Returns whether the running forward pass has output_attentions=True, also where the model does not pass it on."""
    from transformers.utils import output_capturing

    collector = getattr(output_capturing, "_active_collector", None)
    return bool(collector is not None and "attentions" in (collector.get() or ()))


# ---- Accelerate and datasets


def schedules_of(accelerator: Any) -> list[Any]:
    """Returns the learning rate schedules that an accelerator has prepared."""
    return list(getattr(accelerator, "_schedulers", ()))


def prepared_models(accelerator: Any) -> list[Any]:
    """Returns the models that an accelerator has prepared."""
    return list(getattr(accelerator, "_models", ()))


def is_prepared(loader: Any) -> bool:
    """Returns whether Accelerate has prepared a data loader, or takes it for a prepared one."""
    return bool(getattr(loader, "_is_accelerate_prepared", False))


def mark_prepared(loader: Any) -> None:
    """Makes Accelerate leave a data loader as it is."""
    loader._is_accelerate_prepared = True


def part_of_stream(dataset: Any) -> Any:
    """Returns the part (rank, world_size) of a streamed data set that `split_dataset_by_node` left; None for all of it."""
    return getattr(dataset, "_distributed", None)


def selected_rows(table: Any) -> Any:
    """Returns the row numbers that select, filter or shuffle left of a `datasets.Dataset`; None for all rows."""
    return table._indices


def _check_found(missing: list[str], version: str) -> None:
    if missing:
        raise ImportError(
            f"hf_ring_attention uses {', '.join(missing)}, which {version} does not have: install a release that "
            f"pyproject.toml of hf_ring_attention names as tested"
        )


check_torch()
