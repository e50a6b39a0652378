"""The parts of tensors that ranks hold by a layout, and whole tensors again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..plan.layouts import SequenceLayout
from ..transport.communicators import Communicator
from ..transport.transports import Traffic


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


class SideBySide(torch.autograd.Function):
    """Tensors of all ranks, one after the other along `dim`; gradients are summed over ranks and sent to their owners."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, communicator: Communicator, traffic: Traffic, dim: int, before_backward: Any
    ) -> Tensor:
        ctx.call = (communicator, traffic, dim, before_backward)
        with traffic.exchange(*[(communicator.world_size - 1) * local.nbytes] * 2):
            parts = communicator.gather(local.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        communicator, traffic, dim, before_backward = ctx.call
        if before_backward is not None:
            before_backward()
        # Each rank gets the gradients of its own part only, and adds them in the order of the ranks.
        parts = grad.movedim(dim, 0).contiguous()
        counts = [len(parts) // communicator.world_size] * communicator.world_size
        received = torch.empty_like(parts)
        with traffic.exchange(*[parts.nbytes - parts.nbytes // communicator.world_size] * 2):
            communicator.all_to_all(received, parts, counts, counts)()
        own = received.unflatten(0, (communicator.world_size, counts[0])).sum(0)
        return own.movedim(0, dim).contiguous(), None, None, None, None
