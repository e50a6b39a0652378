"""What tests of models share: logits of a call, results that must be alike, also on each rank, and calls that are refused."""

import pytest
import torch

from tests.support.ranks import on_ranks
from tests.support.tolerance import EXACT, distance, gradients_distance


@torch.no_grad()
def logits(model, ids=None, **inputs):
    """All logits of a call without a cache; the ranks of a ring form them together."""
    return torch.stack([model(ids, **{"use_cache": False, **inputs}).logits])[0]


def assert_alike(found, expected, valid=...):
    """Compares tokens bit by bit, and numbers by `EXACT`; of tuples, each entry; a dict has gradients by name.

    Args:
        valid: an index of the entries that count.
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        assert gradients_distance(found, expected) <= EXACT
    elif isinstance(expected, (tuple, list)):
        for x, y in zip(found, expected, strict=True):
            assert_alike(x, y, valid)
    elif torch.is_tensor(expected) and expected.is_floating_point():
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert distance(found[valid], expected[valid]) <= EXACT
    elif torch.is_tensor(expected):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def assert_on_ranks(work, make, expected, world_size=2, valid=..., **settings):
    """Compares work(ring, model) of each simulated rank with what is expected; see `on_ranks`."""
    for found in on_ranks(work, make, world_size, **settings):
        assert_alike(found, expected, valid)


def refused(message, call, *args, error=ValueError, **kwargs):
    """Checks that a call is refused, and that the error matches the message."""
    with pytest.raises(error, match=message):
        call(*args, **kwargs)
