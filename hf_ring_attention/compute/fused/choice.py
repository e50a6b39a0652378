"""Whether the fused kernels can run on a device, and their settings there."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from .settings import Setting, Settings
from .tiles import Fused, padded_width


def _untuned(
    rows: int, keys: int, warps: int, stages: int, query_rows: int, key_rows: int, key_warps: int, key_stages: int
) -> Settings:
    """Returns settings that compile for a device, and that nobody has compared there with others."""
    forward, dq = (Setting(rows, keys, warps, stages, loops) for loops in ("split", "one"))
    dkdv = Setting(query_rows, key_rows, key_warps, key_stages)
    return Settings((forward, forward), (dq, dq), (dkdv, dkdv))


#: Settings for 16 bit numbers, by device and the widest head, of launches whose queries see few keys, and many: the fastest in
#: a sweep on an H100 with Triton 3.6. For another device, `make gpu GPU_ARGS=--tune` prints the row that belongs here.
_TUNED = {
    ("sm_90", 64): Settings(
        forward=2 * (Setting(128, 64, 4, 3, "split"),),
        dq=2 * (Setting(128, 32, 8, 3),),
        dkdv=2 * (Setting(32, 64, 4, 3),),
    ),
    ("sm_90", 128): Settings(
        forward=(Setting(64, 64, 4, 3, "one", small=True), Setting(128, 64, 8, 3, "split", small=True)),
        dq=(Setting(64, 32, 4, 3, "staged", small=True), Setting(128, 64, 8, 3, "staged")),
        dkdv=2 * (Setting(32, 64, 4, 3, "staged"),),
        few_keys=Setting(64, 16, 4, 2, "staged"),
    ),
}
#: The same for other devices, by their shared memory. Compiled by Triton 3.9 for sm_80 ("medium") and gfx942 ("amd"), no
#: setting spills registers, and for sm_86 ("small") at most 32 bytes.
_BY_MEMORY = {
    ("large", 256): _untuned(128, 32, 8, 1, 32, 32, 8, 1),
    ("medium", 64): _untuned(128, 64, 8, 3, 32, 128, 8, 2),
    ("medium", 128): _untuned(128, 64, 8, 3, 32, 64, 8, 2),
    ("medium", 256): _untuned(64, 32, 8, 2, 32, 32, 8, 1),
    ("small", 64): _untuned(128, 64, 8, 3, 32, 128, 8, 2),
    ("small", 128): _untuned(128, 32, 8, 2, 32, 64, 8, 2),
    ("small", 256): _untuned(64, 32, 8, 1, 32, 32, 8, 1),
    ("amd", 64): _untuned(128, 64, 4, 1, 32, 64, 4, 1),
    ("amd", 128): _untuned(64, 64, 4, 1, 32, 32, 4, 1),
    ("amd", 256): _untuned(32, 32, 4, 1, 16, 32, 4, 1),
}
#: The same for float32, whose products take no tensor cores, for all devices.
_SINGLE = {
    64: _untuned(32, 16, 4, 1, 16, 32, 4, 1),
    128: _untuned(16, 16, 4, 1, 16, 32, 4, 1),
    256: _untuned(16, 16, 8, 1, 16, 16, 8, 1),
}


def device_kind(device: torch.device) -> str:
    """Returns the kind of GPU that programs are compiled for, such as "sm_90" or "gfx942"; the interpreter takes any."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def settings_for(dtype: torch.dtype, width: int, kind: str) -> Settings:
    """Returns the settings for heads of `width` numbers on a kind of GPU."""
    wide = next(most for most in (64, 128, 256) if width <= most)
    if dtype == torch.float32:
        return _SINGLE[wide]
    if (kind, wide) in _TUNED:
        return _TUNED[kind, wide]
    if kind.startswith("gfx"):
        return _BY_MEMORY["amd", wide]
    number = int(kind.removeprefix("sm_"))
    if 90 <= number < 120:  # They have the shared memory of an H100.
        return _TUNED.get(("sm_90", wide)) or _BY_MEMORY["large", wide]
    return _BY_MEMORY["medium" if number in (80, 87) else "small", wide]


def is_interpreted() -> bool:
    """Returns whether Triton's interpreter runs kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def _why_no_triton() -> str | None:
    try:
        import triton  # noqa: F401
    except (ImportError, AttributeError, OSError) as error:  # as of a broken installation
        return f"Triton cannot be imported ({error}): pip install triton, which needs a GPU"
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
    return Fused(settings_for(dtype, max(head_dim, value_dim), device_kind(device)), softcap)
