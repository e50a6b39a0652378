"""The way of a call: how many functions and files of this package it passes, once an equal call has been planned."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import hf_ring_attention as ra
from hf_ring_attention.hf.model.wrappers import cache_argument
from tests.support.training import tiny_llama

PACKAGE = str(Path(ra.__file__).parent)


def way_of(work, begin=None, number=1, end=None):
    """The (file, function) that `work` passes, all or from call `number` of the function `begin` up to the return of `end`."""
    begun, passed, ended = [], [], []

    def profile(frame, event, function):
        code = frame.f_code
        if event == "call" and code.co_name == begin:
            begun.append(frame)
        if (begin is None or len(begun) == number) and not ended:
            if event == "call" and code.co_filename.startswith(PACKAGE):
                passed.append((code.co_filename.removeprefix(PACKAGE), code.co_name))
            ended.extend([True] * (event == "return" and code.co_name == end))

    with torch.no_grad():
        work()
        work()
        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(None)
    assert ("/compute/kernels.py", "forward_masked") in passed
    return passed


def is_short(passed, files, calls):
    assert len(passed) <= calls, "\n".join(map(str, passed))
    assert len({file for file, _ in passed}) <= files, {file for file, _ in passed}


@pytest.mark.parametrize("pattern", ["exact", "window:64+4", "pyramid:64,3"])
def test_attention_outside_of_a_model(pattern):
    """All 64 tokens see each other, so every pattern is one tile."""
    x = torch.randn(1, 4, 64, 32)
    is_short(way_of(lambda: ra.ring_attention(x, x, x, pattern=pattern)), files=10, calls=25)


def test_a_layer():
    """Exact attention on one device, from the second layer on."""
    model, ids = ra.patch_model(tiny_llama(None), "exact").eval(), torch.arange(1, 33)[None]
    is_short(way_of(lambda: model(ids), "ring_dilated_attention", 2, "forward_masked"), files=10, calls=25)


@pytest.mark.parametrize(("pattern", "calls"), [("exact", 635), ("window:16+4", 900)])
def test_a_model_over_a_ring(pattern, calls):
    """Four layers and a loss on a ring of 2, whose simulated communication is a part of the way."""
    whole = tiny_llama(None, num_hidden_layers=4)

    def work(ring):
        model, ids = ra.patch_model(copy.deepcopy(whole), pattern, ring=ring), torch.arange(1, 65)[None]
        if ring.rank == 0:
            return way_of(lambda: model(ids, labels=ids))
        with torch.no_grad():
            return [model(ids, labels=ids) for _ in range(3)]

    is_short(ra.run_simulated(work, 2)[0], files=36, calls=calls)


@pytest.mark.parametrize(
    ("pattern", "make", "files", "calls"),
    [
        ("exact", lambda model: DynamicCache(), 34, 360),
        ("exact", ra.PatternCache, 19, 220),
        ("window:16+4", ra.PatternCache, 19, 220),
    ],
)
def test_a_step_of_decoding(pattern, make, files, calls):
    """Four layers on one device; a cache of Transformers grows, so each step is planned."""
    model = ra.patch_model(tiny_llama(None, num_hidden_layers=4), pattern).eval()
    cache, ids = make(model), torch.arange(1, 65)[None]
    with torch.no_grad():
        model(ids, **cache_argument(cache))
    is_short(way_of(lambda: model(ids[:, :1], **cache_argument(cache))), files=files, calls=calls)
