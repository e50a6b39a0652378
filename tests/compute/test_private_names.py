"""Private names of other libraries are looked for before they are used, and one that is missing is named with its release."""

import ast
import re
from functools import partial
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
import trl

import hf_ring_attention
from hf_ring_attention.compute import private
from hf_ring_attention.training.trainer import check_trl
from tests.support.patches import replaced

FOLDER = Path(hf_ring_attention.__file__).parent
LIBRARIES = {"torch": torch, "transformers": transformers, "accelerate": accelerate, "trl": trl}
#: The place in a library, as the error has it, and the name.
NAMES = [
    (library, place, name) for library, places in private.PROBED.items() for place in places for name in places[place]
]
PRIVATE = re.compile("_[a-zA-Z]\\w*")


class HarnessModel:
    """Stands in for the harness's class, which is compared if the harness is installed."""

    __version__ = "0.4.13"
    _loglikelihood_tokens = _model_call = _model_generate = None


class OptimizedModule(torch.nn.Module):
    """What torch.compile returns has a class of this name."""


def set_z3_leaf_module(model, flag):
    """Stands in for DeepSpeed's function, which test_sliced_layers.py checks."""
    model._z3_leaf = flag


CHECKS = {library: partial(private.check, library) for library in private.PROBED} | {
    "torch.compile": lambda: private.compiled_module(OptimizedModule()),
    "lm_eval": lambda: private.check("lm_eval", {"HFLM": HarnessModel}),
    "deepspeed": lambda: private.check("deepspeed", {"deepspeed.utils.set_z3_leaf_module": set_z3_leaf_module}),
}
LIBRARIES |= {"lm_eval": HarnessModel, "deepspeed": HarnessModel}


def test_all_names_are_in_these_releases():
    for library, check in CHECKS.items():
        if library != "torch.compile":  # an example of that library alone has its name
            check()
    assert private.compiled_module(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("name", ["DPOTrainer", "KTOTrainer"])
def test_a_trainer_may_have_the_name_of_its_class_in_trl(name):
    """As Trainers of trl.experimental do; names are looked for where they are used."""
    check_trl(type(name, (getattr(trl, name),), {"__init__": lambda self: None}))


@pytest.mark.parametrize(("library", "place", "name"), NAMES)
def test_a_name_that_is_missing_is_named_with_the_release(library, place, name, monkeypatch):
    has = private._has
    replaced(
        monkeypatch,
        private,
        _has=lambda where, wanted: wanted != name and has(where, wanted),
        installed_version=lambda root: LIBRARIES[root].__version__,
    )
    root = library.split(".")[0]
    with pytest.raises(ImportError) as raised:
        CHECKS[library]()
    text = str(raised.value)
    assert f"{place}.{name}" in text
    assert f"which {root} {LIBRARIES[root].__version__} does not have: install a release that " in text
    assert "\n" not in text


def own_names(tree):
    """Private names that a file defines: its functions, classes, globals, arguments, and attributes that it sets on self."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def names_used(tree):
    """Private names that are read or set as attributes, or by getattr, hasattr and setattr, and in imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            yield from (argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (*node.module.split("."), *(alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.rglob("*.py"))}
#: Names that the package defines anywhere, and so does not take from other libraries.
OWN = {name for tree in TREES.values() for name in own_names(tree)}
#: Methods that Python documents, private by their look alone.
DOCUMENTED = {"_replace", "_exit", "_asdict", "_fields", "_make"}


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_every_private_name_of_others_is_looked_for(path):
    probed = {name for _, _, name in NAMES}
    used = {name for name in names_used(TREES[path]) if PRIVATE.fullmatch(str(name))}
    # What an override calls of the class above is a name of that library, though the package defines it too.
    inherited = {
        node.attr
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()" and PRIVATE.fullmatch(node.attr)
    }
    assert not (used - OWN | inherited) - DOCUMENTED - probed


def test_no_name_is_looked_for_in_vain():
    """Hooks are the values of a constant, one variable is in a frame, one method is replaced; others are used by name."""
    used = {name for tree in TREES.values() for name in names_used(tree)}
    used |= {*private._HOOKS_BEFORE, *private._HOOKS_AFTER, "input_chunks", "_prepare_device_mesh"}
    assert {name for _, _, name in NAMES} <= used
