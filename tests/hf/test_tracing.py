"""Graphs that would record one batch's plan are refused by name."""

import warnings

import pytest
import torch

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.own_dtypes  # nothing is compiled where tests.support.tolerance turns float32 into float64

MADE = {
    "unpatched": lambda: tiny_model("llama", "ring_dilated"),
    "patched": lambda: ra.patch_model(tiny_model("llama", "eager")),
}
TRACED = {
    "export": lambda model, ids: torch.export.export(model, (ids,)),
    "strict export": lambda model, ids: torch.export.export(model, (ids,), strict=True),
    "trace": lambda model, ids: torch.jit.trace(model, ids),
}


class Logits(torch.nn.Module):
    """A model that gives a tensor, as torch.jit.trace asks for."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


class Attention(torch.nn.Module):
    """The function without a model."""

    def forward(self, q):
        q = q[:, None, :, None].float()
        return ra.ring_attention(q, q, q, pattern=ra.Pattern.exact())


def said(rank, made, traced):
    """What tracing says, in a process of its own: torch leaves its modes behind where tracing fails."""
    warnings.simplefilter("ignore")
    model = Attention() if made == "function" else Logits(MADE[made]())
    try:
        TRACED[traced](model, torch.randint(3, VOCAB, (2, 20)))
    except (NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("made", "traced"),
    [("unpatched", "strict export"), ("patched", "trace"), ("function", "export")],
)
def test_tracing_is_refused_by_name(made, traced):
    (text,) = run_ranks(said, 1, made, traced)
    assert "which no graph can hold: export a model with attn_implementation='sdpa'" in text
    if traced in ("export", "trace"):
        assert text.startswith("NotImplementedError: torch.export or torch.jit.trace was asked for")
