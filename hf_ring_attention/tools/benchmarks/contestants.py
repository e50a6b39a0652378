"""The implementations on one device that the benchmark of peers compares: this package and others that compute a pattern."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..._version import __version__
from ...compute.kernels import choose_kernel
from ...plan.branches import Segment, Window
from ...plan.patterns import Pattern
from .block_masks import block_mask
from .harness import CallShape
from .speed import SDPA, attention_named

_TORCH = f"of torch {torch.__version__.partition('+')[0]}"
OURS = f"hf-ring-attention {__version__}"
FLEX = f"flex_attention {_TORCH}"
DENSE = f"{SDPA} {_TORCH}"
LOCAL = "local-attention"
TORCHSCALE = "torchscale"
#: Why flex_attention has no backward here.
NO_BACKWARD_OF_FLEX = "no backward on CPU"
#: Why the backward of torchscale's dilated attention is not compared.
WRONG_BACKWARD_OF_TORCHSCALE = "backward leaves out its weights"


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Contestant:
    """An implementation of attention under a pattern.

    Attributes:
        name: with its version.
        pattern: the text of the pattern that it computes.
        attend: its function of q, k and v.
        no_backward: why its gradients are not those of its outputs here; "" where they are.
        lay_out: lays q, k, v or the gradient of the output out as the implementation takes them, which is not timed.
        lay_back: lays its output out as [B, H, n, Dv].
    """

    name: str
    pattern: str
    attend: Callable[[Tensor, Tensor, Tensor], Any]
    no_backward: str = ""
    lay_out: Callable[[Tensor], Tensor] = _as_it_is
    lay_back: Callable[[Tensor], Tensor] = _as_it_is

    def part(self, x: Tensor) -> Tensor:
        """Returns the part of whole tensors [B, H, n, D] that this process computes: all of them on one device."""
        return x


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


def dilated_segments(pattern: Pattern, heads: int, kv_heads: int) -> list[tuple[int | None, int]] | None:
    """Returns the segment lengths and dilations of a pattern that torchscale's dilated attention can compute, or None.

    In a branch of dilation r its head j looks at phase j // (H / r), and here it is h % r: for one r, that is another order
    of the heads, and for several there is none. It has no groups of heads.

    Example:
        >>> dilated_segments(Pattern.parse("longnet:512/1,2048/4"), 8, 8)
        [(512, 1), (2048, 4)]
    """
    branches = [branch for branch in pattern.branches if isinstance(branch, Segment)]
    rates = {branch.dilation for branch in branches} - {1}
    if len(branches) < len(pattern.branches) or pattern.overlap != "count" or heads != kv_heads or len(rates) > 1:
        return None
    if any(heads % rate for rate in rates) or any(b.dilation > 1 and b.queries != "dilated" for b in branches):
        return None
    return [(branch.length, branch.dilation) for branch in branches]


def _torchscale(pattern: str, segments: list[tuple[int | None, int]], tokens: int, shape: CallShape) -> Contestant:
    from torchscale.component.dilated_attention import DilatedAttention

    heads, rate = shape.heads, max(rate for _, rate in segments)
    dtype, device = getattr(torch, shape.dtype), torch.device(shape.device)
    kernel = choose_kernel(device, dtype, shape.head_dim, shape.head_dim).kernel

    class OnCpu(DilatedAttention):
        """torchscale's dilated attention with torch's flash attention, since what it calls itself runs on GPUs alone."""

        def attention_ops(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_: Any) -> Any:
            q, k, v = (x.unflatten(0, (-1, heads)) for x in (q, k, v))
            call = KernelCall("causal" if is_causal else "full", shape.head_dim**-0.5)
            out, lse = kernel.forward(q, k, v, call)
            return out.transpose(1, 2).flatten(2), lse

    settings = SimpleNamespace(
        flash_attention=True,
        xpos_rel_pos=False,
        multiway=False,
        seq_parallel=False,
        layernorm_eps=1e-5,
        segment_length=[length or tokens for length, _ in segments],
        dilated_ratio=[rate for _, rate in segments],
    )
    attention = OnCpu if shape.device == "cpu" else DilatedAttention
    module = attention(settings, heads * shape.head_dim, heads, self_attention=True)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):  # attention alone is compared
        setattr(module, name, torch.nn.Identity())
    # Head h % rate = phase of ours is at place phase * (H / rate) + h // rate of its heads.
    order = torch.arange(heads).view(-1, rate).T.flatten()
    return Contestant(
        f"{TORCHSCALE} DilatedAttention",
        pattern,
        lambda q, k, v: module(q, k, v, is_causal=True)[0],
        WRONG_BACKWARD_OF_TORCHSCALE,
        lambda x: x[:, order].transpose(1, 2).flatten(2),
        lambda out: out.unflatten(2, (heads, -1)).transpose(1, 2)[:, order.argsort()],
    )


def contestants_of(pattern: str, tokens: int, shape: CallShape) -> tuple[list[Contestant], dict[str, str]]:
    """Returns this package and its peers that can compute a pattern, and why others are missing, by their names."""
    found = [Contestant(OURS, pattern, attention_named(pattern))]
    missing = {}
    parsed = Pattern.parse(pattern)
    try:
        attend = _flex_attention(parsed, tokens, shape)
        found.append(Contestant(FLEX, pattern, attend, NO_BACKWARD_OF_FLEX if shape.device == "cpu" else ""))
    except (ImportError, ValueError) as error:
        missing[FLEX] = first_line(error)
    window = parsed.branches[0] if len(parsed.branches) == 1 else None
    if isinstance(window, Window) and window.dilation == 1:
        try:
            attend = _local_attention(window.length)
            found.append(Contestant(f"{LOCAL} {importlib.metadata.version(LOCAL)}", pattern, attend))
        except ImportError as error:
            missing[LOCAL] = f"{first_line(error)}: pip install {LOCAL}"
    segments = dilated_segments(parsed, shape.heads, shape.kv_heads)
    if segments is not None and len(segments) > 1:
        try:
            found.append(_torchscale(pattern, segments, tokens, shape))
        except ImportError as error:
            # Its last release has no dilated attention.
            missing[TORCHSCALE] = f"{first_line(error)}: pip install git+https://github.com/microsoft/torchscale"
    return found, missing


def dense_attention() -> Contestant:
    """Returns torch's dense attention, which has no pattern."""
    return Contestant(DENSE, "exact", attention_named(SDPA))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
