"""The parts of tensors that ranks hold by a layout, and whole tensors again."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..plan.layouts import SequenceLayout
from ..transport.agreement import Calls
from ..transport.communicators import Communicator
from ..transport.transports import Traffic
from .operator import Numbered, check_first_derivative, define


def shard_of(tensor: Tensor, layout: SequenceLayout, rank: int, dim: int, fill: float) -> Tensor:
    """Returns the tokens along `dim` that `rank` holds, padded with `fill`."""
    if tensor.shape[dim] != layout.seq_len:
        raise ValueError(
            f"shard: expected {layout.seq_len} tokens along dim {dim}, got {tensor.shape[dim]} in {tuple(tensor.shape)}"
        )
    _check_batch_rows("shard", tensor, layout, dim)
    padding = layout.padded_len - layout.seq_len
    if padding:
        shape = list(tensor.shape)
        shape[dim] = padding
        tensor = torch.cat([tensor, tensor.new_full(shape, fill)], dim)
    if not layout.rows:
        return torch.cat([tensor.narrow(dim, p.start, len(p)) for p in layout.pieces(rank)], dim)
    positions = [layout.positions(rank, row) for row in range(len(layout.rows))]
    return _rows_at(tensor, torch.tensor(positions, device=tensor.device), dim)


def whole_of(shards: Tensor, layout: SequenceLayout, dim: int) -> Tensor:
    """Returns whole sequences, without padding, from the shards of all ranks, which follow each other along `dim`."""
    if layout.rows:
        ranks = range(layout.world_size)
        orders = [[token for rank in ranks for token in layout.positions(rank, row)] for row in range(len(layout.rows))]
        places = torch.tensor(orders, device=shards.device).argsort(-1)[:, : layout.seq_len]
        return _rows_at(shards, places, dim)
    parts = {}
    for rank in range(layout.world_size):
        for place, piece in layout.placed_pieces(rank):
            parts[piece.start] = shards.narrow(dim, rank * layout.local_len + place, len(piece))
    return torch.cat([parts[start] for start in sorted(parts)], dim).narrow(dim, 0, layout.seq_len)


def check_shard(local: Tensor, layout: SequenceLayout, dim: int) -> None:
    """Refuses a tensor that is not a shard of this layout."""
    if local.shape[dim] != layout.local_len:
        raise ValueError(
            f"unshard: expected {layout.local_len} tokens along dim {dim}, got {local.shape[dim]} in {tuple(local.shape)}"
        )
    _check_batch_rows("unshard", local, layout, dim)


def _check_batch_rows(name: str, tensor: Tensor, layout: SequenceLayout, dim: int) -> None:
    if layout.rows and (dim % tensor.dim() == 0 or tensor.shape[0] != len(layout.rows)):
        raise ValueError(
            f"{name}: the layout was made for the documents of {len(layout.rows)} batch rows, expected along dim 0, got "
            f"{tuple(tensor.shape)} with tokens along dim {dim}"
        )


def _rows_at(x: Tensor, places: Tensor, dim: int) -> Tensor:
    """Returns the tokens of x [B, ...] at places [B, n] along `dim`."""
    rows = torch.arange(len(places), device=x.device)[:, None]
    return x.movedim(dim, 1)[rows, places].movedim(1, dim)


# ---- operators, for graphs too: tensors of all ranks, one after the other along a dimension


class Exchange(Protocol):
    """The part of a ring that the operators need."""

    rank: int
    world_size: int
    communicator: Communicator | None
    calls: Calls
    counters: Traffic


#: The rings that operators name by their numbers.
RINGS: Numbered[Exchange] = Numbered("the ring of this graph is gone: compile the model again")


def _side_by_side(local: Tensor, ring: int, dim: int, number: int = 0) -> Tensor:
    communicator = RINGS[ring].communicator
    assert communicator is not None
    with RINGS[ring].counters.exchange(*[(communicator.world_size - 1) * local.nbytes] * 2):
        parts = communicator.gather(local.contiguous())
    return torch.cat(parts, dim)


def _to_owners(local: Tensor, ring: int, dim: int, number: int = 0) -> Tensor:
    """Sends gradients to their owners; each rank adds the gradients of its part in the order of the ranks."""
    communicator, size = RINGS[ring].communicator, RINGS[ring].world_size
    assert communicator is not None
    RINGS[ring].calls.compare_backward(number)
    parts = local.movedim(dim, 0).contiguous()
    counts = [len(parts) // size] * size
    received = torch.empty_like(parts)
    with RINGS[ring].counters.exchange(*[parts.nbytes - parts.nbytes // size] * 2):
        communicator.all_to_all(received, parts, counts, counts)()
    own = received.unflatten(0, (size, counts[0])).sum(0)
    return own.movedim(0, dim).contiguous()


def _fake_side_by_side(local: Tensor, ring: int, dim: int, number: int = 0) -> Tensor:
    return local.new_empty([x * (RINGS[ring].world_size if d == dim else 1) for d, x in enumerate(local.shape)])


def _fake_to_owners(local: Tensor, ring: int, dim: int, number: int = 0) -> Tensor:
    return local.new_empty([x // (RINGS[ring].world_size if d == dim else 1) for d, x in enumerate(local.shape)])


def _save_constants(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.constants = inputs


def _send_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    check_first_derivative()
    return torch.ops.hf_ring_attention.to_owners(grad, *ctx.constants), None, None, None


_LOCAL = "(Tensor local, int ring, int dim, int number=0) -> Tensor"
define(f"side_by_side{_LOCAL}", _side_by_side, _fake_side_by_side, _send_gradients, _save_constants)
define(f"to_owners{_LOCAL}", _to_owners, _fake_to_owners)
