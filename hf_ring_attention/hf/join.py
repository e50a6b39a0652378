"""Joins what a decoder returns for each rank's part of the rows into what one device would return."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..ring.ring import Ring
from ..ring.shards import whole_of
from .forward_pass import WholeRows

#: A function that makes a value of whole rows from this rank's part of it.
Join = Callable[[Tensor], Tensor]


def whole_rows(local: Tensor, rows: WholeRows, ring: Ring, dim: int = 1) -> Tensor:
    """Returns whole rows on every rank; the ranks have agreed on the call already. It is differentiable.

    The gradient of a rank's part is the sum of the gradients that all ranks have for it. So if all ranks compute the same
    loss from whole rows, the mean of their gradients is the gradient of that loss.
    """
    layout = rows.layout
    assert layout is not None
    return whole_of(ring.side_by_side(local, dim), layout, dim)


def kept(local: Tensor, rows: WholeRows, ring: Ring, tokens: Tensor) -> Tensor:
    """Returns the values [B, k, ...] of some tokens of whole rows on every rank, and moves only these.

    Args:
        local: [B, n local, ...] this rank's part.
        tokens: [k] the numbers of the tokens in the whole row.
    """
    layout = rows.layout
    assert layout is not None
    batch_rows = range(len(layout.rows) or 1)
    places = torch.tensor([layout.positions(ring.rank, row) for row in batch_rows], device=local.device)  # [B or 1, n]
    found = places[:, None, :] == tokens.to(local.device)[None, :, None]  # [B or 1, k, n]
    own = found.any(-1).expand(rows.batch, -1)
    index = found.int().argmax(-1).expand(rows.batch, -1)
    picked = local[torch.arange(rows.batch, device=local.device)[:, None], index]
    picked = torch.where(own.reshape(*own.shape, *[1] * (local.dim() - 2)), picked, 0)
    return ring.side_by_side(picked[None], 0).sum(0)


def joined_output(output: Any, join_hidden: Join, rows: WholeRows, ring: Ring) -> Any:
    """Returns the output of a decoder with whole rows in place of parts.

    Args:
        join_hidden: joins the last hidden states.
    """
    layout = rows.layout
    assert layout is not None
    part = (rows.batch, layout.local_len)

    def whole(x: Any, join: Join) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(whole(entry, join) for entry in x)
        if isinstance(x, Tensor) and tuple(x.shape[:2]) == part:
            return join(x)
        return x

    def join_rows(x: Tensor) -> Tensor:
        return whole_rows(x, rows, ring)

    if not isinstance(output, MutableMapping):
        return (whole(output[0], join_hidden), *(whole(x, join_rows) for x in output[1:]))
    for name, x in output.items():
        if "router" in name:
            output[name] = _whole_routers(x, part, join_rows)
        else:
            output[name] = whole(x, join_hidden if name == "last_hidden_state" else join_rows)
    return output


def _whole_routers(x: Any, part: tuple[int, int], join: Join) -> Any:
    """Returns the logits of routers, which models form for the tokens of all rows, one row after the other."""
    if isinstance(x, (tuple, list)):
        return type(x)(_whole_routers(entry, part, join) for entry in x)
    if isinstance(x, Tensor) and x.dim() > 1 and tuple(x.shape[:2]) == part:
        return join(x)
    if isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] == part[0] * part[1]:
        return join(x.unflatten(0, part)).flatten(0, 1)
    return x
