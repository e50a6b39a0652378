"""A rank's plan bound to tensors: row numbers on a device, made once per problem and kept."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .plans import Item, Problem, RankPlan, TileBatch, plan_rank
from .rows import IndexRows, Rows, ViewRows


@dataclass(frozen=True)
class BoundBatch:
    """One kernel call's rows."""

    queries: Rows
    keys: Rows
    causal: bool

    def parts(self, max_rows: int) -> list[BoundBatch]:
        """The batch in parts of about `max_rows` query and key rows, so that what a call holds stays small."""
        size = max(1, max_rows // (self.queries.rows_per_unit + self.keys.rows_per_unit))
        if size >= self.queries.units:
            return [self]
        parts = zip(self.queries.split(size), self.keys.split(size))
        return [BoundBatch(queries, keys, self.causal) for queries, keys in parts]


@dataclass(frozen=True)
class Exchange:
    """What the collective transport moves: this rank's rows to send, in the order of the ranks that need them."""

    used: bool
    send_rows: Tensor
    send_counts: list[int]
    receive_counts: list[int]


@dataclass(frozen=True)
class Binding:
    """A rank's plan with row numbers on a device."""

    plan: RankPlan
    own: tuple[BoundBatch, ...]
    remote: tuple[BoundBatch, ...]
    exchange: Exchange

    @property
    def is_one_tile(self) -> bool:
        """Whether one tile is the whole of the work: every query once, every key."""
        return self._one_tile

    _one_tile: bool = False


class _Binder:
    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem = problem
        self.device = device
        self.batch = len(problem.documents)
        self.group = problem.num_heads // problem.num_kv_heads
        self.local_len = problem.layout.local_len

    def batch_rows(self, batch: TileBatch) -> BoundBatch:
        view = self._view(batch)
        if view is not None:
            return view
        first = self._first_rows(batch, self.local_len, "queries"), self._first_rows(batch, self.local_len, "keys")
        return BoundBatch(
            IndexRows(first[0], batch.query_stride, batch.num_queries),
            IndexRows(first[1], batch.key_stride, batch.num_keys),
            batch.causal,
        )

    def _view(self, batch: TileBatch) -> BoundBatch | None:
        """Rows as views, where the tiles take all batch rows and heads and lie at equal distances."""
        problem, items = self.problem, batch.items
        everything = (tuple(range(self.batch)), tuple(range(problem.num_kv_heads)))
        if batch.per_query_head or any((item.batch_rows, item.heads) != everything for item in items):
            return None
        if (batch.query_stride != 1 and batch.num_queries > 1) or (batch.key_stride != 1 and batch.num_keys > 1):
            return None
        starts = [
            (item.query_row + copy * item.advance, item.key_row + copy * item.advance)
            for item in items
            for copy in range(item.copies)
        ]
        advance = starts[1][0] - starts[0][0] if len(starts) > 1 else 0
        for (query, key), (next_query, next_key) in itertools.pairwise(starts):
            if next_query - query != advance or next_key - key != advance:
                return None
        if len(starts) > 1 and advance < batch.num_queries:
            return None
        (query, key), copies = starts[0], len(starts)
        return BoundBatch(
            ViewRows(self.batch, problem.num_heads, query, batch.num_queries, copies, advance),
            ViewRows(self.batch, problem.num_kv_heads, key, batch.num_keys, copies, advance),
            batch.causal,
        )

    def _units(self, batch: TileBatch, item: Item) -> tuple[Tensor, Tensor, Tensor]:
        """(batch row, head, copy) of every tile of an item."""
        tensors = (torch.tensor(item.batch_rows), torch.tensor(item.heads), torch.arange(item.copies))
        grid = torch.meshgrid(*tensors, indexing="ij")
        return grid[0].flatten(), grid[1].flatten(), grid[2].flatten()

    def _first_rows(self, batch: TileBatch, length: int, side: str) -> Tensor:
        """[tiles, heads of a tile] number of the first row in a [B, H, length] tensor of queries or of keys."""
        problem, first = self.problem, []
        for item in batch.items:
            row, head, copy = self._units(batch, item)
            moved = copy * item.advance
            if side == "queries":
                heads = head[:, None] if batch.per_query_head else head[:, None] * self.group + torch.arange(self.group)
                number, count, start = heads, problem.num_heads, item.query_row
            else:
                kv_head = head // self.group if batch.per_query_head else head
                number, count, start = kv_head[:, None], problem.num_kv_heads, item.key_row
            first.append((row[:, None] * count + number) * length + (start + moved)[:, None])
        return torch.cat(first).to(self.device)

    def remote_keys(self, batch: TileBatch) -> Tensor:
        """[tiles, 1, L] key rows, numbered in a [B, Hkv, padded_len] tensor of whole rows."""
        first = self._first_rows(batch, self.problem.layout.padded_len, "keys")
        return first.unsqueeze(-1) + torch.arange(batch.num_keys, device=self.device) * batch.key_stride


@lru_cache(maxsize=64)
def bind(problem: Problem, rank: int, device: torch.device) -> Binding:
    """The plan of `rank` with its row numbers on `device`; cached by value."""
    binder, plan = _Binder(problem, device), plan_rank(problem, rank)
    own = tuple(binder.batch_rows(batch) for batch in plan.own)
    layout, world_size = problem.layout, problem.layout.world_size

    # Row numbers, in whole rows, of the keys that each rank needs of the others; sorted, each once.
    owner_of = torch.empty(layout.padded_len, dtype=torch.int64)
    local_of = torch.empty(layout.padded_len, dtype=torch.int64)
    for other in range(world_size):
        positions = torch.tensor(layout.positions(other))
        owner_of[positions] = other
        local_of[positions] = torch.arange(len(positions))
    owner_of, local_of = owner_of.to(device), local_of.to(device)

    def needed(other: int) -> Tensor:
        batches = plan_rank(problem, other).remote
        if not batches:
            return torch.empty(0, dtype=torch.int64, device=device)
        return torch.cat([binder.remote_keys(batch).flatten() for batch in batches]).unique()

    needed_by = [needed(other) if world_size > 1 else owner_of[:0] for other in range(world_size)]
    owners_by = [owner_of[rows % layout.padded_len] for rows in needed_by]
    send = [rows[owners == rank] for rows, owners in zip(needed_by, owners_by)]
    send_rows = torch.cat(send)
    exchange = Exchange(
        used=any(len(rows) for rows in needed_by),
        send_rows=send_rows // layout.padded_len * layout.local_len + local_of[send_rows % layout.padded_len],
        send_counts=[len(rows) for rows in send],
        receive_counts=torch.bincount(owners_by[rank], minlength=world_size).tolist(),
    )
    # The received rows lie by owner, then by number.
    order = torch.argsort(owners_by[rank], stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=device)
    remote = tuple(
        BoundBatch(
            IndexRows(binder._first_rows(batch, layout.local_len, "queries"), batch.query_stride, batch.num_queries),
            IndexRows(
                None,
                0,
                batch.num_keys,
                place[torch.searchsorted(needed_by[rank], binder.remote_keys(batch))],
            ),
            batch.causal,
        )
        for batch in plan.remote
    )
    whole = len(own) == 1 and not exchange.used and isinstance(own[0].queries, ViewRows)
    whole = whole and own[0].queries.rows_per_unit == binder.batch * problem.num_heads * layout.local_len
    return Binding(plan, own, remote, exchange, whole)
