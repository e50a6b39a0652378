"""Registers "ring_dilated" as soon as Transformers is loaded, and loads nothing itself."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: The module of Transformers that has the attention interface; `import transformers` alone does not load it.
_INTERFACE = "transformers.modeling_utils"


def register_with_transformers() -> None:
    """Registers "ring_dilated" now if Transformers' attention interface is loaded, or as soon as it is."""
    if _INTERFACE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    # The last line of this module registers; it still follows if the module itself is importing Transformers.
    from . import registration  # noqa: F401


class _Finder(MetaPathFinder):
    """Finds the interface's module as the other finders do, and registers once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _INTERFACE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute_and_register, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute_and_register(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    _register()
