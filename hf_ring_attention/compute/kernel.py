"""The interfaces of kernels and of the tiles that they compute: attention with the log-sum-exp of each row.

Every kernel takes q [T, H, Lq, D], k [T, Hkv, Lk, D], v [T, Hkv, Lk, Dv] (query head h reads key/value head
h // (H / Hkv)) and a `KernelCall`, which names the shape of the tiles: query i sees all keys ("full"), keys 0 to i
("causal", Lq = Lk), or keys i to i + Lk - Lq ("band"). If a band has folds (`plan/tiles.py`), each of these Lq queries stands
for the `fold_size` rows of a fold, which follow one another in q and see the same keys.
`backward` takes the out and lse of the *whole* softmax: with those, a tile's gradients are its exact share
(FlashAttention, arXiv 2205.14135, appendix B).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from ..plan.tiles import Shape
from .merge import merge_

#: The output and the log-sum-exp.
Results = tuple[Tensor, Tensor]
#: The gradients of queries, keys and values.
Gradients = tuple[Tensor, Tensor, Tensor]


class KernelCall(NamedTuple):
    """The attention that a kernel computes for a batch of tiles.

    Padding of queries has an lse of +inf in backward, so that its gradients are 0.
    """

    shape: Shape  # the keys that the queries of a tile see
    scale: float  # the factor of the scores
    fold_size: int = 1  # the rows of a fold, in bands
    lengths: Tensor | None = None  # the number of keys of each tile, [T], if the keys of some tiles are padded
    #: If the tokens of q [B, H, n, D] are sequences (`InPlace`): 0 and their ends, int32, and the longest length.
    sequences: tuple[Tensor, int] | None = None


class Saved(NamedTuple):
    """The inputs and results of a forward pass that its backward pass needs."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """An implementation of attention; works compute their tiles with it."""

    name: str
    joining: (
        Hashable  # how it takes tiles: None for tiles of one shape a call, a record of `plan/joins.py`, or `Settings`
    )


class TileKernel(Kernel, Protocol):
    """An implementation of attention for a batch of tiles."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None = None) -> Results:
        """Returns out [T, H, Lq, Dv] in q's dtype and lse [T, H, Lq] in the accumulation dtype.

        If there are `totals`, results are merged into them (`merge_`), and they are returned.
        """

    def backward(self, dout: Tensor, saved: Saved, call: KernelCall, sums: Gradients | None = None) -> Gradients:
        """Returns dq, dk and dv, in the shapes of q, k and v.

        If there are `sums` of these shapes, gradients are added to them, and they are returned.
        """


class Work(Protocol):
    """The tiles of one step, bound to rows of tensors for `Kernel.joining`; frozen data classes, for `ring/bindings.py`.

    q is [B, H, n, D]. k and v are this rank's [B, Hkv, n, D], or rows of a payload [R, D] in later steps.
    """

    @property
    def takes_views(self) -> bool:
        """Whether q, k and v may be strided; else they are contiguous."""

    def forward(
        self, kernel: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, totals: Results | None = None
    ) -> Results:
        """Returns out in q's dtype and lse in the accumulation dtype; rows without a key have out = 0 and lse = -inf.

        With `totals`, in the accumulation dtype, results are merged into them. Without, the work is all work of the rank.
        """

    def backward(
        self, kernel: Any, dout: Tensor, saved: Saved, scale: float, sums: Gradients | None = None
    ) -> Gradients:
        """Returns dq, dk and dv in q's dtype or the accumulation dtype; with `sums` in the latter, adds to these."""


def merged(results: Results, totals: Results | None) -> Results:
    """Merges results into totals and returns these; without totals returns the results."""
    if totals is not None:
        merge_(*totals, *results)
    return totals or results


def added(gradients: Gradients, sums: Gradients | None) -> Gradients:
    """Adds gradients to sums and returns these; without sums returns the gradients."""
    for total, gradient in zip(sums or (), gradients):
        total.add_(gradient)
    return sums or gradients


def widened(x: Tensor, width: int) -> Tensor:
    """Returns x with zero columns up to `width`: they change no score, and outputs there are dropped."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def narrowed(x: Tensor, width: int) -> Tensor:
    """Returns the first `width` columns of x."""
    return x if x.shape[-1] == width else x[..., :width]
