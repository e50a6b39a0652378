"""Documents that follow each other in whole rows, in one call on the rows in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.tiles import Shape
from .kernel import Gradients, KernelCall, Results, Saved, TileKernel, added, merged


@dataclass(frozen=True)
class PackedRow:
    """A `Work` of documents, each a sequence of tokens that attends to itself; so does padding, whose results are dropped."""

    sequences: tuple[Tensor, int]  # as of a `KernelCall`
    shape: Shape
    padding: Tensor | None  # [B, 1, n, 1]: which tokens are in no document; None if all are in one
    takes_views: bool = True

    @classmethod
    def of(cls, ends: list[int], are_padding: list[bool], shape: Shape, batch: int, device: torch.device) -> PackedRow:
        """Binds the results of `sequences_in_place` to a device."""
        stops, padding = torch.tensor(ends, dtype=torch.int32), None
        if any(are_padding):
            padding = torch.tensor(are_padding).repeat_interleave(stops.diff()).view(batch, 1, -1, 1).to(device)
        return cls((stops.to(device), int(stops.diff().max())), shape, padding)

    def forward(
        self, kernel: TileKernel, q: Tensor, k: Tensor, v: Tensor, scale: float, totals: Results | None = None
    ) -> Results:
        call = KernelCall(self.shape, scale, sequences=self.sequences)
        out, lse = kernel.forward(q, k, v, call)
        if self.padding is not None:
            out, lse = out.masked_fill_(self.padding, 0), lse.masked_fill_(self.padding[..., 0], -torch.inf)
        return merged((out, lse), totals)

    def backward(
        self, kernel: TileKernel, dout: Tensor, saved: Saved, scale: float, sums: Gradients | None = None
    ) -> Gradients:
        call = KernelCall(self.shape, scale, sequences=self.sequences)
        dq, dk, dv = kernel.backward(dout, saved, call)
        if self.padding is not None:
            dq, dk, dv = (x.masked_fill_(self.padding, 0) for x in (dq, dk, dv))
        return added((dq, dk, dv), sums)
