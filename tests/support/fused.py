"""Attention by the fused kernels in Triton's interpreter, in blocks of any sizes."""

import importlib.util
from contextlib import contextmanager
from unittest import mock

import pytest

from hf_ring_attention.compute.fused.choice import is_interpreted
from hf_ring_attention.compute.fused.settings import Setting, Settings
from hf_ring_attention.compute.fused.tiles import Fused
from hf_ring_attention.ring import planned

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'hf-ring-attention[triton]'"
)
#: Triton reads TRITON_INTERPRET when it is imported (tests/conftest.py). With a GPU, kernels run there: tests marked cuda.
needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not is_interpreted(), reason="needs Triton's interpreter, on a CPU"
)


def small_settings(forward=16, keys=16, loops="split", small=False, few_keys=False):
    """Settings of small blocks for both kinds of launches."""
    setting = Setting(forward, keys, 4, 1, loops, small)
    few = Setting(16, 16, 4, 1, loops) if few_keys else None
    return Settings((setting, setting), (setting, setting), (setting, setting), few)


SMALL_BLOCKS = small_settings()


def random_settings_of_kernels(rng):
    """Settings of any loops, with blocks that are smaller than most tiles, and larger ones."""

    def setting(small=False):
        loops = rng.choice(["one", "edges", "split", "staged"])
        rows, keys = rng.choice([16, 32, 64, 64]), rng.choice([16, 32, 64])
        return Setting(rows, keys, 4, 1, loops, small and rng.random() < 0.5)

    pairs = [(setting(small), setting(small)) for small in (True, True, False)]
    return Settings(*pairs, rng.choice([None, setting()._replace(keys=16)]), rng.choice([10, 2048]))


@contextmanager
def computed_by_fused(settings):
    """Has every call computed by the fused kernels."""
    with mock.patch.object(planned, "choose_kernel", lambda *call: Fused(settings, call[4])):
        yield
