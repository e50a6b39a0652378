"""Attention by the fused kernels in Triton's interpreter, in blocks of any sizes."""

import importlib.util
import random
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from hf_ring_attention.compute.fused.choice import is_interpreted
from hf_ring_attention.compute.fused.lists import Blocks
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

SMALL_BLOCKS = Blocks(rows=16, keys=16, warps=4, stages=1, query_rows=16, key_rows=16, key_warps=4, key_stages=1)
#: The interpreter rounds products of bfloat16 wrongly, so that they are garbage.
DTYPES = (torch.float32, torch.float32, torch.float16)


def random_blocks(rng):
    """Blocks that are smaller than most tiles, and larger ones."""
    rows, keys = [16, 32, 64, 64], [16, 32]
    return SMALL_BLOCKS._replace(
        rows=rng.choice(rows), keys=rng.choice(keys), query_rows=rng.choice(rows), key_rows=rng.choice(keys)
    )


@contextmanager
def computed_by_fused(blocks):
    """Has every call computed by the fused kernels."""
    with mock.patch.object(planned, "choose_kernel", lambda *call: Fused(blocks, call[4])):
        yield


@dataclass(frozen=True)
class FusedCase:
    """Calls of a simulated ring, and the blocks that compute them."""

    blocks: Blocks
    case: RingCase

    def run(self):
        with computed_by_fused(self.blocks):
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
    return FusedCase(random_blocks(rng), ring_case)
