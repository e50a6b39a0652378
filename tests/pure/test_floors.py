"""The floors of the package: modules import downward only, and torch and its companions begin at their own floor."""

import ast
import graphlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.ranks import TIMEOUT

PACKAGE = "hf_ring_attention"
FOLDER = Path(__file__).parents[2] / PACKAGE
#: A new module must be placed here.
FLOORS = [
    ("patterns", "layouts", "tiles", "plans", "routes", "selection"),  # ints: the standard library alone
    ("blocks", "kernels", "rows", "bindings", "reference"),  # torch
    ("communicators", "failures", "transports"),  # torch.distributed
    ("engine",),
    # Accelerate and datasets, for loaders
    ("packing", "batches", "collators", "lengths", "samplers", "loaders", "ring", "attention", "simulation", "explain"),
    (
        "models",
        "gate",
        "heads",
        "configuration",
        "masks",
        "caches",
        "sharding",
        "generation",
        "modeling",
        "losses",
        "perplexity",
    ),  # Transformers
    ("training",),  # Trainers
    ("arguments", "cli", "bench", "plots", "estimate", "__main__"),
]
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
#: The first floor that may import a library.
OPENS_AT = {"torch": 1, "torch.distributed": 2, "transformers": 5, "accelerate": 4}
#: They meet in the engine.
STRANGERS = ({"kernels", "transports"}, {"kernels", "communicators"})

#: Every .py file, by its module name inside the package, but for the version and the list of public names.
SOURCES = {
    path.relative_to(FOLDER).with_suffix("").as_posix().replace("/", "."): path.read_text(encoding="utf-8")
    for path in sorted(FOLDER.rglob("*.py"))
}
MODULES = {name: source for name, source in SOURCES.items() if name not in ("__init__", "_version")}


def imports(source):
    """(module, name) of every import, wherever it stands; relative modules with the package's name in front.

    The name is None for `import module`. `torch.distributed` written out counts as its import.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, "a relative import that leaves the package"
            module = ".".join(part for part in (PACKAGE if node.level else None, node.module) if part)
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch", "distributed"


def modules_imported(source):
    """The modules of this package that a source imports; the package itself is "__init__"."""
    found = set()
    for module, name in imports(source):
        root, _, inside = module.partition(".")
        if root == PACKAGE and inside:
            found.add(inside.split(".")[0])
        elif root == PACKAGE:
            found.add(name if name in SOURCES or name in FLOOR_OF else "__init__")
    return found


def libraries_imported(source):
    """The names of `OPENS_AT` that a source imports, whole or in part."""
    names = [f"{module}.{name}." if name else f"{module}." for module, name in imports(source)]
    return {library for library in OPENS_AT if any(name.startswith(f"{library}.") for name in names)}


@pytest.mark.parametrize(
    ("source", "modules", "libraries"),
    [
        ("from . import rows", {"rows"}, set()),
        ("from .rows import Rows", {"rows"}, set()),
        ("import hf_ring_attention.rows as r", {"rows"}, set()),
        ("from hf_ring_attention import rows", {"rows"}, set()),
        ("from hf_ring_attention.rows import Rows", {"rows"}, set()),
        ("from hf_ring_attention import Ring", {"__init__"}, set()),
        ("import hf_ring_attention", {"__init__"}, set()),
        ("if TYPE_CHECKING:\n    from .engine import RingAttention", {"engine"}, set()),
        ("def f():\n    from .ring import Ring", {"ring"}, set()),
        ("import torch.nn.functional as F", set(), {"torch"}),
        ("from torch import distributed as dist", set(), {"torch", "torch.distributed"}),
        ("from torch.distributed.device_mesh import f", set(), {"torch", "torch.distributed"}),
        ("import torch\nx = torch.distributed.get_rank()", set(), {"torch", "torch.distributed"}),
        ("import torchvision, transformers.utils", set(), {"transformers"}),
    ],
)
def test_imports_are_found(source, modules, libraries):
    assert modules_imported(source) == modules
    assert libraries_imported(source) == libraries


def test_the_package_is_read():
    assert {"patterns", "kernels", "transports", "engine", "ring", "modeling"} <= MODULES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_downward(module):
    assert module in FLOOR_OF, f"{module} has no floor: place it in FLOORS"
    imported = modules_imported(MODULES[module])
    assert "__init__" not in imported, f"{module} imports the whole package"
    above = {other for other in imported - {"_version"} if FLOOR_OF[other] > FLOOR_OF[module]}
    assert not above, f"{module} on floor {FLOOR_OF[module]} imports {above} from above"


def test_modules_of_a_floor_import_each_other_one_way():
    graph = {module: modules_imported(source) for module, source in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", MODULES)
def test_strangers_never_meet(module):
    imported = modules_imported(MODULES[module])
    for strangers in STRANGERS:
        if module in strangers:
            assert not imported & strangers
    assert "reference" not in imported, "the reference is for tests"


def test_the_package_does_not_import_the_reference():
    assert "reference" not in modules_imported(SOURCES["__init__"])


@pytest.mark.parametrize("module", MODULES)
def test_libraries_open_at_their_floor(module):
    early = {library for library in libraries_imported(MODULES[module]) if FLOOR_OF[module] < OPENS_AT[library]}
    assert not early, f"{module} is on floor {FLOOR_OF[module]}"


@pytest.mark.parametrize("module", FLOORS[0])
def test_the_ground_floor_needs_the_standard_library_alone(module):
    roots = {name.split(".")[0] for name, _ in imports(MODULES[module])} - {PACKAGE}
    assert roots <= sys.stdlib_module_names


def test_the_ground_floor_runs_without_torch():
    script = f"""
        import importlib, sys, types

        sys.modules["torch"] = None  # any import of it fails
        package = types.ModuleType({PACKAGE!r})  # the real one imports everything
        package.__path__ = [{str(FOLDER)!r}]
        sys.modules[{PACKAGE!r}] = package
        patterns, layouts, tiles, plans, *_ = (importlib.import_module({PACKAGE!r} + "." + name) for name in {FLOORS[0]!r})
        layout = layouts.SequenceLayout("zigzag", 64, 2)
        problem = plans.Problem(patterns.Pattern.exact(), layout, (((0, 64),),), 2, 1)
        print(sum(plans.plan_rank(problem, rank).pairs for rank in range(2)))
    """
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(2 * 64 * 65 // 2), "")


@pytest.mark.parametrize("module", SOURCES)
def test_no_error_is_swallowed_unnamed(module):
    for node in ast.walk(ast.parse(SOURCES[module])):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {None if kind is None else ast.unparse(kind) for kind in caught}
            assert not names & {None, "Exception", "BaseException"}, f"{module}.py, line {node.lineno}: {names}"


@pytest.mark.parametrize("module", SOURCES)
def test_no_global_is_rebound(module):
    lines = [node.lineno for node in ast.walk(ast.parse(SOURCES[module])) if isinstance(node, ast.Global)]
    assert not lines, f"{module}.py rebinds globals in lines {lines}"
