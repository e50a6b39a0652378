"""Modules that are installed, as if they were not."""

import builtins
import importlib.util


def without(monkeypatch, *names):
    """As if these modules were not installed."""
    find, load = importlib.util.find_spec, builtins.__import__

    def refuse(name, *rest, **more):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *rest, **more)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name, *rest))
    monkeypatch.setattr(builtins, "__import__", refuse)
