"""No file of the repository runs code that it reads: no pickle, no shell, no eval, and only plain data from files."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in ("hf_ring_attention", "recipes", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
#: Modules whose data can run code as it is read.
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
#: Calls that run a text as code or as a shell's line, or that read data that can run code.
UNSAFE_CALLS = {
    "eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen", "subprocess.getoutput",
    "subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "commands.getoutput", "tempfile.mktemp", "yaml.load",
    "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "torch.hub.load", "torch.package.PackageImporter",
}  # fmt: skip
#: Arguments that make a call unsafe.
UNSAFE_ARGUMENTS = {"shell", "allow_pickle", "trust_remote_code"}
#: Tests pickle and copy the objects that users pickle and copy, and send them through pipes between their processes.
PICKLE_ALLOWED = {
    "tests/plan/test_patterns.py",
    "tests/hf/test_config.py",
    "tests/hf/test_every_causal_model.py",
    "tests/hf/test_indexed.py",
    "tests/hf/test_pattern_cache.py",
    "tests/training/test_sliced_layers.py",
    "tests/support/ranks.py",
    "hf_ring_attention/evaluation/calibration/search.py",  # names an error
}
#: Where a model's own code runs if the user passes --trust-remote-code.
REMOTE_CODE_ALLOWED = {"hf_ring_attention/cost/models.py", "hf_ring_attention/cli/loading.py", "recipes/common.py"}


def unsafe(source):
    """Unsafe code of a source, in the order of ast.walk: "line: reason"."""
    loads = {"torch.load"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # The dotted name identifies an imported function.
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if name in UNSAFE_CALLS or name.split(".")[0] in UNSAFE_MODULES:
                yield f"{node.lineno}: imports {name}"
        if "torch.load" in names:
            loads |= {alias.asname or alias.name for alias in node.names if alias.name == "load"}
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        # The values of arguments; None for all but constants.
        given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        if name in UNSAFE_CALLS:
            yield f"{node.lineno}: calls {name}"
        for argument in UNSAFE_ARGUMENTS & given.keys():
            if given[argument] is not False:
                yield f"{node.lineno}: passes {argument} to {name}"
        if name in loads and given.get("weights_only") is not True:
            yield f"{node.lineno}: calls {name} without weights_only=True"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os, dill.source", ["1: imports dill.source"]),
        ("from pickle import loads", ["1: imports pickle", "1: imports pickle.loads"]),
        ("from os import system", ["1: imports os.system"]),
        ("x = 1\nos.system('ls')", ["2: calls os.system"]),
        ("eval('1')", ["1: calls eval"]),
        ("model.eval()", []),
        ("re.compile('a')\ntorch.compile(f)", []),
        ("subprocess.run(line, shell=which)", ["1: passes shell to subprocess.run"]),
        ("subprocess.run(words, shell=False)", []),
        ("np.load(file, allow_pickle=True)", ["1: passes allow_pickle to np.load"]),
        ("yaml.load(text, Loader=yaml.Loader)", ["1: calls yaml.load"]),
        ("torch.load(file)", ["1: calls torch.load without weights_only=True"]),
        ("torch.load(file, weights_only=True)", []),
        ("from torch import load as read\nread(file)", ["2: calls read without weights_only=True"]),
        ("import torch\njson.load(file)\nload(file)", []),
    ],
)
def test_what_is_unsafe_is_found(source, found):
    assert list(unsafe(source)) == found


def test_nothing_that_is_read_runs():
    """And the exceptions above are still needed."""
    assert len(SOURCES) > 200
    allowed = dict.fromkeys(PICKLE_ALLOWED, "pickle") | dict.fromkeys(REMOTE_CODE_ALLOWED, "passes trust_remote_code")
    for path, source in SOURCES.items():
        kept = allowed.pop(path, None)
        reasons = list(unsafe(source))
        others = [reason for reason in reasons if kept is None or kept not in reason]
        assert not others, path
        assert kept is None or reasons, f"{path} no longer needs to be allowed"
    assert not allowed, "files that are not there"


def test_a_model_s_own_code_never_depends_on_a_prompt():
    """Without trust_remote_code, Transformers asks on standard input whether to run it."""
    for path, source in SOURCES.items():
        for call in ast.walk(ast.parse("" if path.startswith("tests/") else source)):
            if isinstance(call, ast.Call) and re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(call.func)):
                assert "trust_remote_code" in {keyword.arg for keyword in call.keywords}, f"{path}:{call.lineno}"


def test_the_files_for_launchers_are_plain_yaml():
    """Accelerate has a special loader for them; here a loader that only makes plain data must take them."""
    yaml = pytest.importorskip("yaml", reason="Transformers brings it")
    files = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
    assert files
    for path in files:
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)
