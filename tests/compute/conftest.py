"""Tests of one device draw tensors, and cut bands into short stretches."""

import pytest
import torch

from hf_ring_attention.compute import bands


@pytest.fixture
def generator(rng):
    return torch.Generator().manual_seed(rng.randrange(2**32))


@pytest.fixture
def short_stretches(monkeypatch, rng):
    """Has bands from this width on cut into triangles and rectangles, and others masked, in stretches of a few rows."""

    def cut(cut_from, largest_mask=10**6):
        monkeypatch.setattr(bands, "CUT_FROM", cut_from)
        monkeypatch.setattr(bands, "CUT_ROWS", rng.randint(1, 5))
        monkeypatch.setattr(bands, "FEWEST_ROWS", rng.randint(1, 5))
        monkeypatch.setattr(bands, "MOST_ROWS", rng.randint(5, 9))
        monkeypatch.setattr(bands, "ROWS_OF_A_BLOCK", rng.randint(1, 3))
        monkeypatch.setattr(bands, "LARGEST_MASK", largest_mask)
        monkeypatch.setattr(bands, "RESULTS_AT_ONCE", rng.choice([1, 40, 200]))
        monkeypatch.setattr(bands, "GRADIENTS_AT_ONCE", rng.choice([1, 40, 200]))

    return cut
