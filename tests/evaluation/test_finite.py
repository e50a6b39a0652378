"""Models whose predictions are no numbers are refused by name, on every rank, and never get a good figure."""

import math

import numpy as np
import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.evaluation.calibration.choice import choose
from tests.support.calibrations import calibrated, model_of, random_texts
from tests.support.ranks import run_simulated
from tests.support.tiny_models import VOCAB

MESSAGE = r"\d+ of \d+ losses of LlamaForCausalLM in torch\.float\d\d are infinite or NaN.*: take another dtype"


def broken(model, token, value=math.nan):
    """The model, in which a token has an embedding that is no number; so have all tokens that see it."""
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = value
    return model


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_perplexity_leaves_nothing_out(rng, value, ranks):
    """Where some of the tokens alone have no number, too."""
    ids = torch.tensor([rng.randrange(3, VOCAB - 1) for _ in range(60)])
    ids[40] = VOCAB - 1
    models = [broken(model_of(), VOCAB - 1, value) for _ in range(ranks)]
    assert ra.perplexity(models[0], ids[:40]).tokens == 39

    def measure(ring):
        with pytest.raises(ValueError, match=f"perplexity: {MESSAGE}"):
            ra.perplexity(models[ring.rank], ids, ring=ring)

    run_simulated(measure, ranks)


@pytest.mark.parametrize("retrieval", [0, 0.1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_calibration_measures_nothing_of_it(rng, tmp_path, ranks, retrieval):
    texts = random_texts(rng)
    texts[0][30] = VOCAB - 1
    models = [broken(model_of(), VOCAB - 1) for _ in range(ranks)]

    def measure(ring):
        with pytest.raises(ValueError, match=f"calibrate: {MESSAGE}"):
            calibrated(models[ring.rank], texts, ring=ring, retrieval=retrieval, folder=tmp_path / "measured")

    run_simulated(measure, ranks)
    assert not list((tmp_path / "measured").glob("changes-*"))


def test_a_choice_by_scores_that_are_no_numbers_ends():
    products = np.full((2, 2, 2, 2), np.nan)
    products[:, 1, :, 1] = 0
    costs = np.array([[1, 4], [1, 4]])
    with pytest.raises(ValueError, match="must be finite"):
        choose(np.zeros((2, 2)), costs, 4.0, products)
    with pytest.raises(ValueError, match="must be finite"):
        choose(np.array([[0, np.inf], [0, 1]]), costs, 4.0)
