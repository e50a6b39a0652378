"""The way of one call of attention: how many functions and files of this package it passes before the kernel."""

import sys
from pathlib import Path

import pytest
import torch

import hf_ring_attention as ra
from tests.support.training import tiny_llama

PACKAGE = str(Path(ra.__file__).parent)
MOST_CALLS, MOST_FILES = 25, 10


@pytest.mark.parametrize("pattern", ["exact", "window:64+4", "pyramid:64,3"])
def test_a_call_that_has_been_planned_reaches_the_kernel_by_few_calls(pattern):
    """`ring_attention` outside of a model; the first call has planned it, and the second one finds the plan.

    All 64 tokens see each other, so every pattern is one tile.
    """
    x, passed = torch.randn(1, 4, 64, 32), []

    def profile(frame, event, function):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            passed.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name))

    with torch.no_grad():
        ra.ring_attention(x, x, x, pattern=pattern)
        sys.setprofile(profile)
        try:
            ra.ring_attention(x, x, x, pattern=pattern)
        finally:
            sys.setprofile(None)
    files = {file for file, _ in passed}
    assert ("/compute/kernels.py", "forward_masked") in passed
    assert len(passed) <= MOST_CALLS, "\n".join(map(str, passed))
    assert len(files) <= MOST_FILES, files


def test_a_layer_reaches_the_kernel_by_few_calls():
    """Exact attention on one device; the first layer of a pass has planned it, and the second one uses the plan."""
    model, ids = ra.patch_model(tiny_llama(None), "exact").eval(), torch.arange(1, 33)[None]
    layers, passed, found = [], [], []

    def profile(frame, event, function):
        code = frame.f_code
        if event == "call" and code.co_name == "ring_dilated_attention":
            layers.append(frame)
        inside = len(layers) == 2 and not found
        if inside and event == "call" and code.co_filename.startswith(PACKAGE):
            passed.append((code.co_filename.removeprefix(PACKAGE), code.co_name))
        if inside and event == "return" and code.co_name == "forward_masked":
            found.append(True)

    with torch.no_grad():
        model(ids)
        sys.setprofile(profile)
        try:
            model(ids)
        finally:
            sys.setprofile(None)
    files = {file for file, _ in passed}
    assert found
    assert len(passed) <= MOST_CALLS, "\n".join(map(str, passed))
    assert len(files) <= MOST_FILES, files
