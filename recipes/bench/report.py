"""The report of `make gpu`: the figures so far, what was left out, what is wrong, and the device."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import Shape

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", "bfloat16") if CUDA else ("cpu", "float32")
#: Words for calls that a kernel does not take: of sdpa, of implementations in the place of FlashAttention-2, and of Triton.
REFUSED = ("No available kernel", " unsupported: ", "out of resource: ")


class Report:
    """The figures so far, the parts that were left out, and those that are wrong."""

    def __init__(self, seconds: float, small: bool, file: Path) -> None:
        self.end, self.small, self.file = time.monotonic() + seconds, small, file
        self.figures: dict[str, Any] = {"left out": {}, "wrong": {}}
        self.figures |= {kind: [] for kind in ("speed", "steps", "decoding", "ring", "flash", "long rows")}
        self.shape = Shape(4, 2, 16, DTYPE, DEVICE) if small else Shape(32, 8, 128, DTYPE, DEVICE)

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self.end - time.monotonic())

    def note(self, kind: str, name: str, reason: str) -> None:
        """Names a part that is "left out" or "wrong", with the reason."""
        self.figures[kind][name] = reason
        print(f"{kind}: {name}: {reason}", flush=True)

    def run(self, name: str, seconds: float, part: Callable[..., Any], *args: Any) -> Any:
        """Returns the answer of a part, None if it takes longer than is left or fails; writes all figures."""
        try:
            if seconds < self.left:
                return part(*args)
            self.note("left out", name, f"it takes about {seconds:.0f} s, and {self.left:.0f} s are left")
        except torch.OutOfMemoryError:
            self.note("left out", name, "the device has too little memory")
        except Exception as error:  # Other parts still have figures.
            refused = name.startswith("kernel ") and isinstance(error, (ValueError, NotImplementedError))
            refused = refused or any(words in str(error) for words in REFUSED)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.note("left out" if refused else "wrong", name, reason)
        finally:
            self.file.write_text(re.sub(r"\bNaN\b", "null", json.dumps(self.figures, indent=1)) + "\n", "utf-8")
        return None
