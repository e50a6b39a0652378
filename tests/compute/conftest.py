"""Tests of one device draw tensors, and cut bands into short stretches."""

import pytest
import torch

from hf_ring_attention.compute import bands
from tests.support.patches import replaced


@pytest.fixture
def generator(rng):
    return torch.Generator().manual_seed(rng.randrange(2**32))


@pytest.fixture
def short_stretches(monkeypatch, rng):
    """Has bands from this width on cut into triangles and rectangles, and others masked, in stretches of a few rows."""

    def cut(cut_from, largest_mask=10**6):
        rows = {"CUT_ROWS": (1, 5), "FEWEST_ROWS": (1, 5), "MOST_ROWS": (5, 9), "ROWS_OF_A_BLOCK": (1, 3)}
        limits = {name: rng.choice([1, 40, 200]) for name in ("RESULTS_AT_ONCE", "GRADIENTS_AT_ONCE")}
        limits |= {name: rng.randint(*bounds) for name, bounds in rows.items()}
        replaced(monkeypatch, bands, CUT_FROM=cut_from, LARGEST_MASK=largest_mask, **limits)

    return cut
