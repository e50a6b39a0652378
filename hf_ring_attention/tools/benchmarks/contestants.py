"""The implementations that the benchmark of peers compares: this package, flex_attention, local-attention, dense attention."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._version import __version__
from ...plan.branches import Window
from ...plan.patterns import Pattern
from .block_masks import block_mask
from .harness import CallShape
from .speed import SDPA, attention_named

_TORCH = f"of torch {torch.__version__.partition('+')[0]}"
OURS = f"hf-ring-attention {__version__}"
FLEX = f"flex_attention {_TORCH}"
DENSE = f"{SDPA} {_TORCH}"
LOCAL = "local-attention"


@dataclass(frozen=True)
class Contestant:
    """An implementation of attention under a pattern.

    Attributes:
        name: with its version.
        pattern: the text of the pattern that it computes.
        attend: its function of q, k and v.
        has_backward: whether autograd can differentiate it here.
    """

    name: str
    pattern: str
    attend: Callable[[Tensor, Tensor, Tensor], Any]
    has_backward: bool = True


def buckets_of(window: int) -> tuple[int, int]:
    """Returns `window_size` and `look_backward` with which local-attention shows a query itself and window - 1 keys.

    With `exact_windowsize` its queries see window_size * look_backward keys before them. It computes whole buckets of
    window_size keys: small ones waste less, and many tiny ones are slow. These are the smallest ones from 64 keys on.

    Example:
        >>> buckets_of(512)
        (73, 7)
    """
    before = window - 1
    if before == 0:
        return 1, 0
    size = next(size for size in range(min(64, before), before + 1) if before % size == 0)
    return size, before // size


def _local_attention(window: int) -> Callable[[Tensor, Tensor, Tensor], Any]:
    from local_attention import LocalAttention

    size, back = buckets_of(window)
    module = LocalAttention(
        window_size=size, look_backward=back, causal=True, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        # The package has no groups of query heads that share a key/value head.
        k, v = (x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return module(q, k, v)

    return attend


def _flex_attention(pattern: Pattern, tokens: int, shape: CallShape) -> Callable[[Tensor, Tensor, Tensor], Any]:
    from torch.nn.attention.flex_attention import flex_attention

    mask = block_mask(pattern, tokens, shape.heads, shape.kv_heads, shape.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    # torch.compile keeps few results for one code object, and each pattern and gradient mode is one.
    attend.__code__ = attend.__code__.replace(co_name=f"attend_{id(mask)}")
    # Without the whole graph, torch falls back to dense matrices where it cannot compile.
    return torch.compile(attend, dynamic=False, fullgraph=True)


def contestants_of(pattern: str, tokens: int, shape: CallShape) -> tuple[list[Contestant], dict[str, str]]:
    """Returns this package and its peers that can compute a pattern, and why others are missing, by their names."""
    found = [Contestant(OURS, pattern, attention_named(pattern))]
    missing = {}
    parsed = Pattern.parse(pattern)
    try:
        attend = _flex_attention(parsed, tokens, shape)
        found.append(Contestant(FLEX, pattern, attend, has_backward=shape.device != "cpu"))
    except (ImportError, ValueError) as error:
        missing[FLEX] = first_line(error)
    window = parsed.branches[0]
    if len(parsed.branches) == 1 and isinstance(window, Window) and window.dilation == 1:
        try:
            attend = _local_attention(window.length)
            found.append(Contestant(f"{LOCAL} {importlib.metadata.version(LOCAL)}", pattern, attend))
        except ImportError as error:
            missing[LOCAL] = f"{first_line(error)}: pip install {LOCAL}"
    return found, missing


def dense_attention() -> Contestant:
    """Returns torch's dense attention, which has no pattern."""
    return Contestant(DENSE, "exact", attention_named(SDPA))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
