"""Attention by the fused kernels in Triton's interpreter, in blocks of any sizes."""

import importlib.util
import random
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from hf_ring_attention.compute.fused.choice import is_interpreted
from hf_ring_attention.compute.fused.settings import Setting, Settings
from hf_ring_attention.compute.fused.tiles import Fused
from hf_ring_attention.ring import planned

from .cases import random_case, with_heads
from .ring_cases import RingCase, random_settings

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
#: The interpreter rounds products of bfloat16 wrongly, so that they are garbage.
DTYPES = (torch.float32, torch.float32, torch.float16)


def random_settings_of_kernels(rng):
    """Settings of any loops, with blocks that are smaller than most tiles, and larger ones."""

    def setting(small=False):
        loops = rng.choice(["one", "edges", "split", "staged"])
        return Setting(
            rng.choice([16, 32, 64, 64]), rng.choice([16, 32, 64]), 4, 1, loops, small and rng.random() < 0.5
        )

    pairs = [(setting(small), setting(small)) for small in (True, True, False)]
    return Settings(*pairs, rng.choice([None, setting()._replace(keys=16)]), rng.choice([10, 2048]))


@contextmanager
def computed_by_fused(settings):
    """Has every call computed by the fused kernels."""
    with mock.patch.object(planned, "choose_kernel", lambda *call: Fused(settings, call[4])):
        yield


@dataclass(frozen=True)
class FusedCase:
    """Calls of a simulated ring, and the settings of the kernels that compute them."""

    settings: Settings
    case: RingCase

    def run(self):
        with computed_by_fused(self.settings):
            self.case.run()


def draw_fused_case(seed, world_sizes=(1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 8)):
    """The case of a number: small, since the interpreter takes about a millisecond for each block of keys."""
    rng = random.Random(seed)
    world_size, num_kv_heads = rng.choice(world_sizes), rng.choice([1, 1, 2, 3])
    case = with_heads(
        rng,
        random_case(rng, rng.choice(DTYPES), 32 if world_size == 1 else 20),
        num_kv_heads * rng.choice([1, 2, 3, 4]),
        num_kv_heads,
    )
    case = replace(case, batch=min(case.batch, 2), documents=case.documents and case.documents[:2])
    ring = {
        "layout": rng.choice(["auto", "contiguous", "zigzag", "documents"]),
        "transport": rng.choice(["local"] if world_size == 1 else ["auto", "ring", "ring", "collective"]),
    }
    ring_case = RingCase((case,), world_size, ring, random_settings(rng), None, checkpointing=False)
    return FusedCase(random_settings_of_kernels(rng), ring_case)
