"""The fields of TRL's fused head: values of single tokens, which each rank computes for its part of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ring.ring import Ring
from .forward_pass import WholeRows
from .join import whole_rows
from .lm_loss import IGNORED, shifted

#: The fields that have a value for each token, but for the loss.
_LOG_PROBS, _LOSS = "log_probs", "loss"


@dataclass(frozen=True)
class Fields:
    """A call with `fused_lm_head=True`, whose head gets labels that are shifted and cut.

    Attributes:
        items: the number by which the head divides the sum of its losses.
        shifted: whether the caller's labels were shifted already, so that fields have a value for the last token too.
    """

    items: Tensor | int
    shifted: bool
    rows: WholeRows
    ring: Ring

    def joined_result(self, output: Any) -> Any:
        """Returns the output with the fields [B, n - 1] of whole rows, or [B, n] for shifted labels, and their loss."""
        rows, layout = self.rows, self.rows.layout
        assert layout is not None
        part = (rows.batch, layout.local_len)
        # What a head adds to the loss, such as the loss of routers, was computed from whole rows.
        added = output[_LOSS] + output[_LOG_PROBS].sum() / self.items
        stop = rows.length if self.shifted else rows.length - 1
        for name, x in output.items():
            if isinstance(x, Tensor) and tuple(x.shape) == part:
                output[name] = whole_rows(x, rows, self.ring)[:, :stop]
        output[_LOSS] = added - output[_LOG_PROBS].sum() / self.items
        return output


def fields_of(rows: WholeRows, ring: Ring, kwargs: dict[str, Any]) -> Fields:
    """Replaces the labels of a call by the labels of this rank's tokens, and returns what its fields are joined by.

    Args:
        kwargs: the arguments of the call, with labels.
    """
    labels, given = kwargs["labels"], kwargs.get("shift_labels")
    whole = shifted(labels) if given is None else given
    items = kwargs.get("num_items_in_batch")
    items = (whole != IGNORED).sum().clamp(min=1) if items is None else items
    assert rows.layout is not None
    kwargs["shift_labels"] = ring.shard(whole, rows.layout, fill=IGNORED)
    kwargs["num_items_in_batch"] = items
    return Fields(items, given is not None, rows, ring)
