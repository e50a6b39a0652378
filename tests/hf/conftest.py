"""Tests of models compute in float64; tests beside other libraries show that models reach ring_dilated at all."""

import pytest
import torch
from transformers import AttentionInterface

from hf_ring_attention.hf.forward_pass import running
from hf_ring_attention.hf.layer import attention


@pytest.fixture(autouse=True)
def models_compute_in_float64(in_float64):
    """All of them, but for tests that are marked as being about other dtypes."""


@pytest.fixture
def calls(request, monkeypatch):
    """The layers that called "ring_dilated", of which there must be some, except in tests of refusals."""
    seen = []

    @torch.compiler.disable
    def counted(module, *args, **kwargs):
        now = running().forward_pass
        if now is None or not now.probes:
            seen.append(module)
        return attention.ring_dilated_attention(module, *args, **kwargs)

    # Where it is registered: an entry of `ALL_ATTENTION_FUNCTIONS` would stay, and hide what later tests register.
    monkeypatch.setitem(AttentionInterface._global_mapping, "ring_dilated", counted)
    yield seen
    assert seen or "refused" in request.node.name, "nothing called ring_dilated, so this shows nothing"
