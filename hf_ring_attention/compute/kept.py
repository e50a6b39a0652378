"""Results of operators that checkpointing keeps, so that backward does not compute them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .private import DispatchMode, detached, saved_tensor_hooks, tree_flatten, tree_unflatten, version_of


def kept_results(operators: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the contexts of a forward pass and of its recomputation, as torch's checkpoint asks its `context_fn` for them.

    Unlike the contexts of torch (`create_selective_checkpoint_contexts`), these let other operators differ, such as the casts
    that autocast has made before, and results go through the hooks of saved tensors around the layer: if these offload
    a layer's input, they offload the results, too.
    """
    results: list[Any] = []
    hooks = saved_tensor_hooks() or (_with_version, _of_version)
    return _Keeping(operators, results, hooks[0]), _Returning(operators, results, hooks[1])


class _Keeping(DispatchMode):
    """Keeps results, packed."""

    def __init__(self, operators: Sequence[Any], results: list[Any], pack: Any) -> None:
        super().__init__()
        self.operators, self.results, self.pack = operators, results, pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.operators:
            tensors, structure = tree_flatten(out)
            self.results.append(([self.pack(detached(x)) for x in tensors], structure))
        return out


class _Returning(DispatchMode):
    """Returns the kept results in the order of the forward pass."""

    def __init__(self, operators: Sequence[Any], results: list[Any], unpack: Any) -> None:
        super().__init__()
        self.operators, self.results, self.unpack, self.number = operators, results, unpack, 0

    def __enter__(self) -> Any:
        self.number = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.operators:
            return func(*args, **(kwargs or {}))
        packed, structure = self.results[self.number]
        self.number += 1
        return tree_unflatten([self.unpack(x) for x in packed], structure)


def _with_version(x: Tensor) -> tuple[Tensor, int]:
    return x, version_of(x)


def _of_version(kept: tuple[Tensor, int]) -> Tensor:
    x, version = kept
    if version_of(x) != version:
        raise RuntimeError(
            "a layer changed the output of its attention in place: checkpoint it without ra.keep_attention"
        )
    return x
