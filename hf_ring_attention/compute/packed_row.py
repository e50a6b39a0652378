"""Documents that follow each other in whole rows, in one call on the rows in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.joins import Sequences
from ..plan.tiles import Shape
from .kernel import Ends, Gradients, Kernel, KernelCall, Results, Saved, added, merged


@dataclass(frozen=True)
class PackedRow:
    """A `Work` of documents, each a sequence of tokens that attends to itself; so does padding, whose results are dropped."""

    sequences: Ends
    shape: Shape
    padding: Tensor | None  # [B, 1, n, 1]: which tokens are in no document; None if all are in one
    takes_views: bool = True

    @classmethod
    def of(cls, sequences: Sequences, batch: int, device: torch.device) -> PackedRow:
        """Binds sequences to a device."""
        ends, padding = torch.tensor(sequences.ends, dtype=torch.int32), None
        if any(sequences.are_padding):
            padding = (
                torch.tensor(sequences.are_padding).repeat_interleave(ends.diff()).view(batch, 1, -1, 1).to(device)
            )
        return cls(Ends(ends.to(device), int(ends.diff().max())), sequences.shape, padding)

    def forward(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, totals: Results | None = None
    ) -> Results:
        call = KernelCall(self.shape, scale, sequences=self.sequences)
        out, lse = kernel.forward(q, k, v, call)
        if self.padding is not None:
            out, lse = out.masked_fill_(self.padding, 0), lse.masked_fill_(self.padding[..., 0], -torch.inf)
        return merged((out, lse), totals, call)

    def backward(
        self, kernel: Kernel, dout: Tensor, saved: Saved, scale: float, sums: Gradients | None = None
    ) -> Gradients:
        call = KernelCall(self.shape, scale, sequences=self.sequences)
        grads = kernel.backward(dout, saved, call)
        for x in () if self.padding is None else grads:
            x.masked_fill_(self.padding, 0)
        return added(grads, sums, call)
