"""Tests of one device draw tensors."""

import pytest
import torch


@pytest.fixture
def generator(rng):
    return torch.Generator().manual_seed(rng.randrange(2**32))
