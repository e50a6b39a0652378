"""The examples in the docstrings of public names run, and print the text below them."""

import contextlib
import doctest
import inspect
import re
import runpy

import pytest

import hf_ring_attention as ra
from tests.pages import HEAD
from tests.support.releases import with_names_of_this_release

with contextlib.suppress(ImportError):  # At its first use DeepSpeed prints which device it takes.
    import deepspeed.accelerator

    deepspeed.accelerator.get_accelerator()

PUBLIC = [name for name in ra.__all__ if name != "__version__"]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", PUBLIC)
def test_the_examples_of_a_public_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where an example may write
    (tmp_path / "begin.py").write_text(re.search(r"```python\n(.*?)```", HEAD, flags=re.DOTALL)[1])
    names = runpy.run_path("begin.py")
    public = getattr(ra, name)
    examples = doctest.DocTestFinder(exclude_empty=True).find(public, name, inspect.getmodule(public), globs=names)
    assert any(example.examples for example in examples), f"the docstring of ra.{name} has no example"
    runner = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS)
    printed = []
    for example in examples:
        for step in example.examples:
            step.source = with_names_of_this_release(step.source)
        runner.run(example, out=printed.append)
    assert not runner.failures, "".join(printed)
