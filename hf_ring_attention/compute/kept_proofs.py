"""Proofs that kernels passed, kept on disk: the next process on the same kind of machine starts at once.

A kept proof is a text file of all that the proof depends on, and its name is the digest of this text: another card, driver,
torch, Triton or implementation, or changed source files, ask for another file. Only proofs that were passed are kept, since a
fault may be gone in the next process, such as a missing compiler. Files appear whole, so processes may write at the same time.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import torch

#: The version of the driver, as Linux shows it.
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
#: The packages whose versions decide the programs of an implementation in the place of FlashAttention-2.
_MADE_OF = {"FA3": ("flash-attn-3",), "FA4": ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")}

logger = logging.getLogger(__name__)


class KeptProof:
    """The place of a proof on disk.

    Args:
        facts: all that the proof depends on; None if some of it is unknown, and then the proof is not kept.
    """

    def __init__(self, facts: dict[str, Any] | None) -> None:
        self._text = None if facts is None else json.dumps(facts, indent=1, sort_keys=True) + "\n"

    def _path(self, text: str) -> Path:
        return folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def found(self) -> bool:
        """Returns whether a process has kept the proof; a broken file is ignored with a warning."""
        if self._text is None:
            return False
        try:
            path = self._path(self._text)
            if path.read_bytes() == self._text.encode():
                logger.info("the kernel's proof is kept in %s", path)
                return True
            logger.warning("%s is broken: the kernel computes its proof again", path)
        except FileNotFoundError:
            pass
        except (OSError, RuntimeError) as error:  # no right to read, or no home
            _warn(f"the kept proofs of kernels cannot be read ({error}): each process computes them")
        return False

    def keep(self) -> str:
        """Writes the proof, and returns where it is kept, or why it is not."""
        if self._text is None:
            return "not kept, since the driver or the implementation has no known version"
        try:
            path = self._path(self._text)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
                try:
                    file.write(self._text)
                    file.flush()
                    os.replace(file.name, path)
                except OSError:
                    with suppress(OSError):
                        os.unlink(file.name)
                    raise
        except (OSError, RuntimeError) as error:
            _warn(f"proofs of kernels cannot be kept ({error}): name another folder with HF_RING_ATTENTION_CACHE")
            return "not kept"
        return f"kept in {path.parent}"


def folder() -> Path:
    """Returns the folder of proofs: in $HF_RING_ATTENTION_CACHE, or in hf_ring_attention of the user's cache.

    Raises:
        RuntimeError: the user has no home.
    """
    base = os.environ.get("HF_RING_ATTENTION_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hf_ring_attention")
    return Path(base) / "proofs"


def kept_proof(device: torch.device, call: dict[str, Any]) -> KeptProof:
    """Returns the place of the proof of a call, whose "kernel" and "implementation" have versions."""
    machine, versions = machine_facts(device), _versions(call["kernel"], call["implementation"])
    return KeptProof(None if machine is None or versions is None else {**call, **machine, **versions})


def machine_facts(device: torch.device) -> dict[str, Any] | None:
    """Returns the facts of a device, its driver, torch and this package that proofs depend on; None if some are unknown."""
    driver = _driver() if device.type == "cuda" else None
    if driver is None:
        return None
    return {
        "device": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "driver": driver,
        "torch": [torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip],
        "cudnn": torch.backends.cudnn.version(),
        "sources": _digest(Path(__file__).parent),
    }


@lru_cache
def _driver() -> str | None:
    """Returns the version of the driver; None if neither Linux nor NVIDIA's library shows it."""
    for path in _DRIVERS:
        with suppress(OSError):
            return Path(path).read_text(encoding="utf-8").strip()
    with suppress(OSError, AttributeError):
        library, text = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() == 0 and library.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode()
    return None


@lru_cache
def _digest(sources: Path) -> str:
    """Returns the digest of all modules in a folder, with their names."""
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(f"{path.relative_to(sources)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def _versions(kernel: str, implementation: str | None) -> dict[str, str] | None:
    """Returns the versions of the packages beside torch that a kernel is made of; None if some are unknown."""
    if kernel == "fused":
        import triton

        return {"triton": triton.__version__}
    if implementation is None:
        return {}
    try:
        return {name: installed_version(name) for name in _MADE_OF[implementation]}
    except (KeyError, PackageNotFoundError):  # another implementation, or files without a package
        return None


@lru_cache
def _warn(message: str) -> None:
    """Logs each warning once."""
    logger.warning(message)
