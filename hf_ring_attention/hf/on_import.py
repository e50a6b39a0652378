"""Registers "ring_dilated" as soon as Transformers is loaded, and loads nothing itself."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

#: The module of Transformers that has the attention interface; `import transformers` does not load it.
_INTERFACE = "transformers.modeling_utils"


def register_with_transformers() -> None:
    """Registers "ring_dilated" now if Transformers' attention interface is loaded, or as soon as it is."""
    if _INTERFACE in sys.modules:
        # The last line of this module registers; it still follows if the module itself is importing Transformers.
        from . import registration  # noqa: F401
    elif _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    """Finds the interface's module as the other finders do, and registers once it has been executed."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != _INTERFACE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register_with_transformers()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()
