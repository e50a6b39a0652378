"""Documents that follow each other in whole rows, in one call on the rows in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.joins import Sequences
from .kernel import Ends, Gradients, Kernel, KernelCall, Results, Saved, added, merged


@dataclass(frozen=True)
class PackedRow:
    """A `Work` of documents, each a sequence of tokens that attends to itself. `padding` [B, 1, n] are the other tokens."""

    ends: Tensor
    longest: int
    causal: bool
    padding: Tensor | None
    takes_views: bool = True

    @classmethod
    def of(cls, sequences: Sequences, batch: int, device: torch.device) -> PackedRow:
        """Binds sequences to a device."""
        ends = torch.tensor(sequences.ends, dtype=torch.int32)
        lengths, padding = ends.diff(), None
        if any(sequences.are_padding):
            are_padding = torch.tensor(sequences.are_padding).repeat_interleave(lengths)
            padding = are_padding.view(batch, 1, -1).to(device)
        return cls(ends.to(device), int(lengths.max()), sequences.causal, padding)

    def _call(self, scale: float) -> KernelCall:
        return KernelCall("causal" if self.causal else "full", scale, sequences=Ends(self.ends, self.longest))

    def forward(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, totals: Results | None = None
    ) -> Results:
        call = self._call(scale)
        out, lse = kernel.forward(q, k, v, call)
        if self.padding is not None:
            out, lse = out.masked_fill(self.padding[..., None], 0), lse.masked_fill(self.padding, -torch.inf)
        return merged((out, lse), totals, call)

    def backward(
        self, kernel: Kernel, dout: Tensor, saved: Saved, scale: float, sums: Gradients | None = None
    ) -> Gradients:
        call = self._call(scale)
        dq, dk, dv = kernel.backward(dout, saved, call)
        if self.padding is not None:
            dq, dk, dv = (x.masked_fill(self.padding[..., None], 0) for x in (dq, dk, dv))
        return added((dq, dk, dv), sums, call)
