"""Joins the results of a decoder for each rank's part into the results of one device; a missing result raises an error."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...plan.layouts import SequenceLayout
from ...ring.ring import Ring
from ...ring.shards import whole_of
from ..forward_pass import ForwardPass, WholeRows
from ..model.wrappers import cache_names


class NotFormedError(RuntimeError, AttributeError):
    """A result was used that its call did not form.

    It is an AttributeError too, so that libraries which look for the methods of a tensor find none.
    """


class NotFormed:
    """A stand-in for a result that was not formed: any use raises an error with the reason.

    It is not a tensor, so that libraries that cast, gather or copy the tensors of an output leave it as it is.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self._what, self._remedy = what, remedy

    def __repr__(self) -> str:
        return f"NotFormed({self._what}: {self._remedy})"

    def __reduce__(self) -> Any:
        return NotFormed, (self._what, self._remedy)

    def __getattr__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotFormedError(f"this output has no {self._what}: {self._remedy}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, NotFormed)).__getattr__()


#: Python looks these up in the class, and not by `__getattr__`.
_OPERATORS = (
    "eq ne lt le gt ge neg pos abs invert bool int float complex index len iter getitem setitem delitem contains array "
    "array_ufunc array_function and or xor rand ror rxor add sub mul truediv floordiv mod pow matmul radd rsub rmul "
    "rtruediv rfloordiv rmod rpow rmatmul iadd isub imul itruediv"
)
for _operator in _OPERATORS.split():
    setattr(NotFormed, f"__{_operator}__", NotFormed.__getattr__)

#: The logits of a call whose loss was computed in slices.
LOGITS_NOT_FORMED = NotFormed(
    "logits",
    "its loss was computed in slices of tokens, so the logits of all tokens never existed at once: call the model without "
    "labels, which returns logits, and compute the loss from them",
)

#: The cache of a call over a ring.
CACHE_NOT_FORMED = NotFormed(
    "cache",
    "each rank of a ring computed a part of its rows: pass use_cache=True for whole rows on every rank, or call ra.prefill",
)


def whole_rows(local: Tensor, rows: WholeRows, ring: Ring) -> Tensor:
    """Returns whole rows on every rank; the ranks have agreed on the call already. It is differentiable.

    The gradient of a rank's part is the sum of the gradients that all ranks have for it. So if all ranks compute the same
    loss from whole rows, the mean of their gradients is the gradient of that loss.
    """
    return local if rows.layout is None else whole_of(ring.side_by_side(local, 1), rows.layout, 1)


class PartOfRows(torch.autograd.Function):
    """`Ring.shard`, with the gradient of whole rows on every rank if all ranks compute the same loss."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, x: Tensor, layout: SequenceLayout) -> Tensor:
        ctx.ring, ctx.layout = ring, layout
        return ring.shard(x, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, whole_of(ctx.ring.side_by_side(grad, 1), ctx.layout, 1) / ctx.ring.world_size, None


def kept(local: Tensor, rows: WholeRows, ring: Ring, numbers: Tensor) -> Tensor:
    """Returns the values [..., width] of tokens with these numbers [...] among all rows, on every rank; only these move."""
    assert rows.layout is not None
    count = rows.batch * rows.length
    own = ring.shard(torch.arange(count, device=local.device).view(rows.batch, -1), rows.layout, fill=count).flatten()
    places = own.new_full((count + 1,), -1).index_copy(0, own, torch.arange(len(own), device=local.device))[numbers]
    picked = torch.where(places[..., None] >= 0, local.flatten(0, 1)[places], 0)  # Place -1 has some token's values.
    return ring.side_by_side(picked[None], 0).sum(0)


def _with_rows_joined(x: Any, join: Callable[[Tensor], Tensor], part: tuple[int, int], flat: bool = False) -> Any:
    """Returns x with `join` of each tensor in it that has a value for each token of a part [B, n], or, `flat`, [B * n]."""
    if isinstance(x, (tuple, list)):
        return type(x)(_with_rows_joined(entry, join, part, flat) for entry in x)
    if isinstance(x, Tensor) and tuple(x.shape[:2]) == part:
        return join(x)
    if isinstance(x, Tensor) and x.dim() > 1 and flat and x.shape[0] == part[0] * part[1]:
        return join(x.unflatten(0, part)).flatten(0, 1)
    return x


def joined_output(now: ForwardPass, output: Any) -> Any:
    """Returns the output of a decoder with whole rows in place of parts, and last hidden states as the head takes them."""
    rows, ring, layout = now.rows, now.ring, now.layout
    assert rows is not None
    if now.ring_cache is not None:  # No later call may go on with it.
        if isinstance(output, MutableMapping):
            output = type(output)(**{str(name): x for name, x in output.items() if x is not now.ring_cache})
        else:
            output = tuple(x for x in output if x is not now.ring_cache)
    if layout is None and now.join_last is None:
        return output
    whole = partial(_with_rows_joined, part=(rows.batch, rows.length if layout is None else layout.local_len))
    join_rows = partial(whole_rows, rows=rows, ring=ring)
    join_last = now.join_last or join_rows
    if not isinstance(output, MutableMapping):
        return (whole(output[0], join_last), *(whole(x, join_rows) for x in output[1:]))
    for name, x in output.items():
        # Models form the logits of routers for the tokens of all rows, one row after the other.
        output[name] = whole(x, join_last if name == "last_hidden_state" else join_rows, flat="router" in name)
    if layout is not None and not now.cacheless and getattr(now.runner.config, "use_cache", False):
        for name in cache_names(type(now.runner).forward):
            if name in getattr(type(output), "__dataclass_fields__", ()) and output.get(name) is None:
                output[name] = CACHE_NOT_FORMED
    return output
