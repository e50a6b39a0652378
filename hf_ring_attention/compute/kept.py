"""Results of operators that checkpointing keeps, so that backward does not compute them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .private import DispatchMode, detached, saved_tensor_hooks, tree_map, version_of


def kept_results(operators: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the contexts of a forward pass and of its recomputation, as torch's checkpoint asks its `context_fn` for them.

    Unlike the contexts of torch (`create_selective_checkpoint_contexts`), these let other operators differ, such as the casts
    that autocast has made before. The hooks of saved tensors around the layer get the results, too: if these hooks offload
    the layer's input, they offload its results.
    """
    results: list[Any] = []
    pack, unpack = saved_tensor_hooks() or (_with_version, _of_version)
    return _Keeping(operators, results, lambda x: partial(unpack, pack(detached(x)))), _Returning(operators, results)


class _Mode(DispatchMode):
    """A mode under which torch.compile compiles parts of a layer as it does elsewhere."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keeping(_Mode):
    """Keeps each result as a function that returns it."""

    def __init__(self, operators: Sequence[Any], results: list[Any], keep: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.operators, self.results, self.keep = operators, results, keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.operators:
            self.results.append(tree_map(self.keep, out))
        return out


class _Returning(_Mode):
    """Returns the kept results in the order of the forward pass."""

    def __init__(self, operators: Sequence[Any], results: list[Any]) -> None:
        super().__init__()
        self.operators, self.results, self.number = operators, results, 0

    def __enter__(self) -> Any:
        self.number = 0  # Backward may run again, with retain_graph=True.
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.operators:
            return func(*args, **(kwargs or {}))
        self.number += 1
        return tree_map(lambda kept: kept(), self.results[self.number - 1])


def _with_version(x: Tensor) -> tuple[Tensor, int]:
    return x, version_of(x)


def _of_version(kept: tuple[Tensor, int]) -> Tensor:
    x, version = kept
    if version_of(x) != version:
        raise RuntimeError(
            "a layer changed the output of its attention in place: checkpoint it without ra.keep_attention"
        )
    return x
