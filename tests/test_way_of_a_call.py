"""The way of one call of attention: how many functions and files of this package it passes before the kernel."""

import sys
from pathlib import Path

import pytest
import torch

import hf_ring_attention as ra
from tests.support.training import tiny_llama

PACKAGE = str(Path(ra.__file__).parent)
MOST_CALLS, MOST_FILES = 25, 10


def call():
    """`ring_attention` outside of a model."""
    x = torch.randn(1, 4, 64, 32)
    return lambda: ra.ring_attention(x, x, x, pattern="exact")


def layer():
    """Exact attention of a model on one device."""
    model, ids = ra.patch_model(tiny_llama(None), "exact").eval(), torch.arange(1, 33)[None]
    return lambda: model(ids)


@pytest.mark.parametrize(
    ("make", "begin", "number", "end"),
    [(call, "ring_attention", 1, "ring_attention"), (layer, "ring_dilated_attention", 2, "forward_masked")],
)
def test_what_has_been_planned_reaches_the_kernel_by_few_calls(make, begin, number, end):
    """The first call has planned it, and the second one finds the plan; a second layer uses the plan of the first."""
    begun, passed, ended = [], [], []

    def profile(frame, event, function):
        code = frame.f_code
        if event == "call" and code.co_name == begin:
            begun.append(frame)
        if len(begun) == number and not ended:
            if event == "call" and code.co_filename.startswith(PACKAGE):
                passed.append((code.co_filename.removeprefix(PACKAGE), code.co_name))
            ended.extend([True] * (event == "return" and code.co_name == end))

    work = make()
    with torch.no_grad():
        work()
        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(None)
    assert ended and ("/compute/kernels.py", "forward_masked") in passed
    assert len(passed) <= MOST_CALLS, "\n".join(map(str, passed))
    assert len({file for file, _ in passed}) <= MOST_FILES, passed
