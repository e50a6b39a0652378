"""A call of attention as one value: all that decides its plan and its result, except the numbers in its tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from .layouts import SequenceLayout
from .patterns import Pattern
from .problem import Documents, HeldKeys, RingSettings


class TensorFacts(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any


class Outside(NamedTuple):
    """The settings beside a call that decide its transport or its kernel."""

    transport: str
    kernel: str
    ring: RingSettings
    deterministic: bool  # whether torch must use deterministic algorithms
    flash: str | None  # the implementation that torch uses in place of FlashAttention-2; None for none


class Call(NamedTuple):
    """A call of attention on one rank. Equal calls share their checks and their plan.

    Attributes:
        q, k, v, sinks: [B, H, m, D], [B, Hkv, n, D], [B, Hkv, n, Dv] of this rank, and [H] or None.
        layout: the division of the sequences; None for n tokens on each rank, without padding.
        documents: of each batch row; None for one document of all tokens.
        head_shard: (i, t) for the i-th of t equal parts of the heads.
        held: the tokens whose keys a cache holds, for the last m tokens; `documents` then divide `held.row_len` tokens.
        recorded: whether a backward pass will come.
        with_lse: whether the caller needs the log-sum-exp, which the heads transport moves for it.
        in_graph: whether a graph of torch.compile holds the call.
    """

    q: TensorFacts
    k: TensorFacts
    v: TensorFacts
    sinks: TensorFacts | None
    pattern: Pattern
    layout: SequenceLayout | None
    documents: Documents | None
    causal: bool
    scale: float | None
    softcap: float | None
    head_shard: tuple[int, int]
    held: HeldKeys | None
    recorded: bool
    with_lse: bool
    in_graph: bool
    outside: Outside
