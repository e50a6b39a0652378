"""Whether the fused kernels can run on a device, and their block sizes there."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from .lists import Blocks
from .tiles import Fused, padded_width

#: Blocks for 16 bit numbers, by the shared memory of a device and by the widest head. Compiled by Triton 3.9 for sm_90
#: ("large"), sm_80 ("medium") and gfx942 ("amd"), none of them spills registers, and for sm_86 ("small") at most 32 bytes.
_BLOCKS = {
    ("large", 64): Blocks(128, 64, 8, 3, 32, 128, 8, 3),
    ("large", 128): Blocks(128, 64, 8, 3, 32, 128, 8, 3),
    ("large", 256): Blocks(128, 32, 8, 1, 32, 32, 8, 1),
    ("medium", 64): Blocks(128, 64, 8, 3, 32, 128, 8, 2),
    ("medium", 128): Blocks(128, 64, 8, 3, 32, 64, 8, 2),
    ("medium", 256): Blocks(64, 32, 8, 2, 32, 32, 8, 1),
    ("small", 64): Blocks(128, 64, 8, 3, 32, 128, 8, 2),
    ("small", 128): Blocks(128, 32, 8, 2, 32, 64, 8, 2),
    ("small", 256): Blocks(64, 32, 8, 1, 32, 32, 8, 1),
    ("amd", 64): Blocks(128, 64, 4, 1, 32, 64, 4, 1),
    ("amd", 128): Blocks(64, 64, 4, 1, 32, 32, 4, 1),
    ("amd", 256): Blocks(32, 32, 4, 1, 16, 32, 4, 1),
}
#: The same for float32, whose products take no tensor cores, for all devices.
_SINGLE_BLOCKS = {
    64: Blocks(32, 16, 4, 1, 16, 32, 4, 1),
    128: Blocks(16, 16, 4, 1, 16, 32, 4, 1),
    256: Blocks(16, 16, 8, 1, 16, 16, 8, 1),
}


def blocks_for(dtype: torch.dtype, width: int, capability: tuple[int, int] | None) -> Blocks:
    """Returns the blocks for heads of `width` numbers, by the compute capability of a device; None for AMD's devices."""
    wide = next(most for most in (64, 128, 256) if width <= most)
    if dtype == torch.float32:
        return _SINGLE_BLOCKS[wide]
    if capability is None:
        return _BLOCKS["amd", wide]
    if (9, 0) <= capability < (12, 0):
        return _BLOCKS["large", wide]
    return _BLOCKS["medium" if capability in ((8, 0), (8, 7)) else "small", wide]


def is_interpreted() -> bool:
    """Returns whether Triton's interpreter runs kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def _why_no_triton() -> str | None:
    try:
        import triton  # noqa: F401
    except (ImportError, AttributeError, OSError) as error:  # as of a broken installation
        return f"Triton cannot be imported ({error}): pip install 'hf-ring-attention[triton]'"
    return None


def why_not_fused(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Returns why the fused kernels cannot compute this here; None if they can."""
    widest = max(head_dim, value_dim)
    if _why_no_triton() is not None:
        return _why_no_triton()
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        return f"it needs a GPU, and the tensors are on {device.type}"
    if dtype == torch.float64:
        return "Triton has no products of float64"
    if dtype == torch.bfloat16 and device.type == "cpu":
        return "Triton's interpreter computes wrong products of bfloat16"
    if padded_width(widest) > 256:
        return f"its heads have at most 256 numbers, and these have {widest}"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):  # Triton multiplies without tensor cores there, and its programs need too much memory.
            return f"Triton needs compute capability 8.0, and the device has {capability[0]}.{capability[1]}"
    return None


def fused_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None = None
) -> Fused:
    """Makes the kernels for a device that can run them."""
    capability: tuple[int, int] | None = (9, 0)  # The interpreter takes any blocks.
    if device.type == "cuda":
        capability = None if torch.version.hip is not None else torch.cuda.get_device_capability(device)
    return Fused(blocks_for(dtype, max(head_dim, value_dim), capability), softcap)
