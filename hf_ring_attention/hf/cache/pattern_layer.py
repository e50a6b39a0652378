"""A layer of a `PatternCache`: its rows of keys and values, and the attention of later tokens to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ...compute.bands import Masked
from ...compute.kernel import KernelCall
from ...compute.kernels import choose_kernel
from ...compute.merge import add_sinks
from ...plan.kept import heads_of_patterns
from ...plan.kernel_choice import FEW_QUERIES, TileKinds
from ...plan.patterns import Pattern
from ...plan.problem import Documents, HeldKeys
from ...ring.planned import FORWARD, merged_over
from ...ring.ring import Ring
from .kept_rows import Arrival, KeptRows, Shared

#: The kernels that take a bias for each pair of a query and a key.
_BIASED = ("auto", "cpu_flash", "efficient", "math")


@dataclass(frozen=True)
class LayerCall:
    """What a layer computes, apart from its tensors."""

    pattern: Pattern
    scale: float
    softcap: float | None
    head_shard: tuple[int, int]
    kernel: str
    heads: int
    kv_heads: int

    @cached_property
    def group(self) -> int:
        """The query heads that share a key/value head."""
        return self.heads // self.kv_heads

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `planned_call` for the layer."""
        names = "pattern", "scale", "softcap", "head_shard"
        return {name: getattr(self, name) for name in names}


def layer_call(query: Tensor, key: Tensor, checked: Mapping[str, Any], kernel: str) -> LayerCall:
    """Returns the call of a layer from its arguments of `planned_call`."""
    scale = query.shape[3] ** -0.5 if checked["scale"] is None else checked["scale"]
    softcap, head_shard = checked["softcap"], checked["head_shard"]
    return LayerCall(checked["pattern"], scale, softcap, head_shard, kernel, query.shape[1], key.shape[1])


class HeadRows:
    """The rows of a layer's heads that have one pattern: keys [B, heads, capacity, D] and values [B, heads, capacity, Dv]."""

    def __init__(self, heads: tuple[int, ...] | None, table: KeptRows) -> None:
        self.heads, self.table = heads, table  # None for all heads
        self.tensors: list[Tensor] = []
        self.views: list[Tensor] = []  # of the slots in use

    def __getstate__(self) -> dict[str, Any]:
        """Views would not be views of the tensors in a file."""
        return vars(self) | {"views": [x.shape[2] for x in self.views]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.views = [x.narrow(2, 0, slots) for x, slots in zip(self.tensors, state["views"])]

    def insert(self, new: Arrival, group: int, key: Tensor, value: Tensor) -> None:
        """Writes the new rows [B, key/value heads, n, D] of few queries into slots; rows that nobody sees lose theirs."""
        table = self.table
        table.insert(new, group)
        in_use = table.positions.shape[2]
        if self.views[0].shape[2] != in_use:
            if self.tensors[0].shape[2] < in_use:
                self._replace(self.views)
            else:
                self.view()
        (keys, values), slots = self.tensors, table.slots_on(key.device)
        if not slots.numel():  # Another rank keeps the new rows.
            return
        if self.heads is not None:
            key, value = key[:, self.heads], value[:, self.heads]
        if slots.dim() == 1:
            keys.index_copy_(2, slots, key)
            values.index_copy_(2, slots, value)
        else:
            keys.scatter_(2, slots[..., None].expand_as(key), key)
            values.scatter_(2, slots[..., None].expand_as(value), value)

    def rebuild(self, new: Arrival, *rows: Tensor) -> None:
        """Keeps, of the rows that are there and the new ones [B, key/value heads, n, D], those that later calls need."""
        self.table.rebuild(new)
        rows = tuple((x if self.heads is None else x[:, self.heads])[:, :, : new.rows.shape[1]] for x in rows)
        found = [torch.cat([x, y], 2) for x, y in zip(self.views, rows)] or rows
        self._replace([_chosen(x, self.table.order) for x in found])

    def _replace(self, found: Sequence[Tensor]) -> None:
        """Makes copies of these rows the tensors, with room for more."""
        # Tensors of inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.tensors = []
            capacity = self.table.capacity
            for x in found:  # Empty slots have a weight of 0, which NaN would ignore.
                self.tensors.append(x.new_zeros(*x.shape[:2], capacity, x.shape[3]))
                self.tensors[-1][:, :, : x.shape[2]] = x
        self.view()

    def view(self) -> None:
        """Looks at the slots in use."""
        self.views = [x.narrow(2, 0, self.table.positions.shape[2]) for x in self.tensors]

    def of_heads(self, given: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Returns keys and values [B, heads, n, D] of these heads."""
        return [x if self.heads is None else x[:, self.heads] for x in given]

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Puts the results of a function in place of keys and values."""
        self.tensors = [function(x) for x in self.tensors]
        self.view()


def _chosen(x: Tensor, order: Tensor | None) -> Tensor:
    """Returns the rows of x [B, heads, n, D] with the numbers [B or 1, heads or 1, rows]; None for all."""
    if order is None:
        return x
    order = order.to(x.device)
    if order.shape[:2] == (1, 1):
        return x.index_select(2, order[0, 0])
    return x.gather(2, order[..., None].expand(*x.shape[:2], -1, x.shape[3]))


class PatternLayer(CacheLayerMixin):
    """One layer's rows. `update` takes the new ones, and the layer's attention stores them."""

    is_sliding = False
    is_croppable = True
    kind: type[HeadRows] = HeadRows

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.seen = 0  # tokens, with padding
        self.record_past = False
        self.rows: list[HeadRows] = []
        self.call: LayerCall | None = None  # that of the layer whose keys these are
        self.pending = False  # whether the layer has not attended yet to the keys that it gave
        self._newest: Any = None  # weak references to these keys and values
        self.checked: dict[nn.Module, Any] = {}  # the last call of each module, and all that decided its checks
        self._kernels: dict[bool, Any] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError("PatternCache: its keys have no gradient: use torch.no_grad(), or pass use_cache=False")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.seen != self.shared.arrival.seen:
            raise ValueError(
                f"PatternCache: a layer holds {self.seen} tokens, and its cache {self.shared.arrival.seen}: make another, and "
                f"run all layers in every call"
            )
        self.seen = self.shared.arrival.total
        self.pending, self._newest = True, (weakref.ref(key_states), weakref.ref(value_states))
        return key_states, value_states

    def gave(self, key: Tensor, value: Tensor) -> bool:
        """Returns whether these are the keys and values of the last `update`, which other layers may read too."""
        return self._newest is not None and self._newest[0]() is key and self._newest[1]() is value

    @property
    def keys(self) -> Tensor | None:
        """The keys of the first heads with one pattern, which some models look at."""
        return self.rows[0].views[0] if self.rows and self.rows[0].views else None

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        """Leaves the rows as they are: Transformers sets None for an empty layer."""

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out of copies and files what leads to modules and to other tensors."""
        return vars(self) | {"_newest": None, "checked": {}, "_kernels": {}}

    def get_seq_length(self) -> int:
        """Returns the number of tokens of the whole sequence, whatever is kept of them."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda x: x.to(self.device, non_blocking=True))

    def reset(self) -> None:
        self.__init__(self.shared)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        self.seen += tokens_to_remove
        for rows in self.rows:  # PatternCache has cropped the tables.
            rows.view()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def activate_past_recording(self) -> None:
        self.record_past = True

    def end_recording(self) -> None:
        self.record_past = False

    def _map(self, function: Any) -> None:
        for rows in self.rows:
            rows.map(function)

    @property
    def tensors(self) -> list[Tensor]:
        """All rows that there is room for."""
        return [x for rows in self.rows for x in rows.tensors]

    # ---- attention

    def begin(self, call: LayerCall, key: Tensor) -> None:
        """Checks that the layer has the pattern, the heads, the dtype and the device of earlier calls."""
        self.check_alike(next(iter(self.tensors), key), key)
        before = self.call
        if before is None:
            self._set_call(call)
        elif before != call:
            same = before.pattern == call.pattern
            what = "other heads or another kernel" if same else f"the pattern {call.pattern}"
            raise ValueError(
                f"PatternCache: it was filled under {before.pattern}, and a layer came with {what}: make another PatternCache "
                f"for each pattern and model"
            )
        self.call = call  # A module hands over the same object until something changes.

    def check_alike(self, held: Tensor, key: Tensor) -> None:
        """Refuses keys of another dtype or device than those that are held."""
        if (key.dtype, key.device) != (held.dtype, held.device):
            raise ValueError(
                f"PatternCache: it holds {held.dtype} on {held.device}, and keys came in {key.dtype} on {key.device}: use one "
                f"dtype and one device, autocast included"
            )

    def _set_call(self, call: LayerCall) -> None:
        self.call = call
        found = [*heads_of_patterns(call.pattern, call.kv_heads, call.head_shard[0] * call.kv_heads)]
        self.rows = [
            self.kind(None if len(found) == 1 else heads, self.shared.table(own, phases))
            for own, heads, phases in found
        ]

    def rebuild(self, key: Tensor, value: Tensor) -> None:
        """Stores the rows of a prompt, or of one of its pieces, that later calls need."""
        for rows in self.rows:
            rows.rebuild(self.shared.arrival, key, value)
        self.pending = False

    def few(self, count: int) -> bool:
        """Returns whether `count` queries attend to the rows as they are, each pair with a bias if need be."""
        assert self.call is not None
        few = count < FEW_QUERIES and not self.shared.arrival.compact
        if few and self.call.kernel not in _BIASED:
            few = not self.shared.every and all(rows.table.sees_every_slot(self.shared.arrival) for rows in self.rows)
        return few or self.shared.keys

    def attend_few(self, ring: Ring, q: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Returns out [B, H, n, Dv] of few queries, by a kernel call for each pattern of the layer's heads."""
        call, (batch, heads, n, width) = self.call, q.shape
        assert call is not None
        is_ring = ring.world_size > 1
        with ring.agreement(FORWARD, by_digest=True) if is_ring else nullcontext():
            if self.pending or self.shared.every:
                for rows in self.rows:
                    rows.insert(self.shared.arrival, call.group, key, value)
                self.pending = False
            queries = q.reshape(batch, call.kv_heads, call.group * n, width)
            if len(self.rows) == 1:
                out, lse = self._of_rows(self.rows[0], queries, (key, value), ring)
            else:
                parts = [self._of_rows(rows, queries[:, rows.heads], (key, value), ring) for rows in self.rows]
                order = torch.tensor([x for rows in self.rows for x in rows.heads or ()], device=q.device).argsort()
                out, lse = (torch.cat(x, 1)[:, order] for x in zip(*parts))
            out, lse = out.reshape(batch, heads, n, -1), lse.reshape(batch, heads, n)
        if is_ring:
            out, lse = merged_over(ring, out, lse)
        return (out if sinks is None else add_sinks(out, lse, sinks)[0]).to(q.dtype)

    def _of_rows(
        self, rows: HeadRows, queries: Tensor, given: tuple[Tensor, Tensor], ring: Ring
    ) -> tuple[Tensor, Tensor]:
        """Returns out and lse of queries [B, heads, group * n, D]."""
        call, table = self.call, rows.table
        views = rows.views or rows.of_heads(given)
        assert call is not None
        bias = None if table.bias is None else table.bias_for(queries.dtype, queries.device)
        kernel = self._kernels.get(bias is None)
        if kernel is None:
            kernel = self._kernels[bias is None] = _kernel_of_rows(call, views, bias, ring)
        results: tuple[Tensor, Tensor]
        if hasattr(kernel, "forward_masked"):
            results = kernel.forward_masked(queries, *views, Masked(False, call.scale, bias))
        else:
            results = kernel.forward(queries, *views, KernelCall("full", call.scale))
        if table.blind is not None:
            out, lse = results
            blind = table.blind.to(out.device)
            results = out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)
        return results

    def expanded(
        self, key: Tensor, value: Tensor, given: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, HeldKeys, Documents]:
        """Returns the rows in their places, for many queries: keys, values, what they hold, and the documents.

        `given` are the keys and values that the module attends to; `key` and `value` belong to the new tokens.
        The rows of a document end at the last row but one, which stands for empty slots; keys that no query sees are 0 or left
        out. A run never reaches into the pieces of another rank.
        """
        new, call = self.shared.arrival, self.call
        assert call is not None
        n, added = key.shape[2], new.rows.shape[1]
        row_len = max(int(new.after.max()), n)
        if len(self.rows) == 1 and not new.pieces and self.rows[0].table.is_filled(new):
            keys, values = [torch.cat(x, 2) for x in zip(self.rows[0].views, (key, value))] or given
            return keys, values, HeldKeys.whole(row_len, n, row_len), (((0, row_len),),) * len(key)
        shift = (row_len - new.after)[:, None, None]
        for rows in self.rows:
            rows.table.begin(new)
        places = [
            (rows.table.old + shift).masked_fill(rows.table.old < 0, row_len) if rows.table.old.numel() else None
            for rows in self.rows
        ]
        views = [rows.views or rows.of_heads(given) for rows in self.rows]
        used = [torch.arange(row_len - added, row_len), *(x.flatten() for x in places if x is not None)]
        used = (used := torch.cat(used).unique())[used < row_len]
        widest = max(branch.dilation for own in call.pattern.kv_heads or (call.pattern,) for branch in own.branches)
        firsts, starts, stops = _runs_of_places(used, widest, new.pieces, new.total - row_len)
        num_rows = int((stops - starts).sum())
        runs = tuple(zip(firsts.tolist(), starts.tolist(), stops.tolist()))
        every = []
        for number, rows_of_call in enumerate((key, value)):
            x = rows_of_call.new_zeros(*key.shape[:2], num_rows + 1, rows_of_call.shape[3])
            x[:, :, num_rows - added : num_rows] = rows_of_call[:, :, :added]
            for rows, of_heads, place in zip(self.rows, views, places):
                if place is not None and runs:
                    run = torch.bucketize(place, starts, right=True) - 1
                    row = torch.where(place < row_len, place - starts[run] + firsts[run], num_rows)
                    _scatter(x, rows.heads, row, of_heads[number][:, :, : place.shape[2]])
            every.append(x)
        ends = new.after.expand(key.shape[0]).tolist()
        documents: Documents = tuple(((row_len - end, row_len),) if end else () for end in ends)
        return every[0], every[1], HeldKeys(row_len, n, num_rows + 1, runs), documents


def _runs_of_places(used: Tensor, widest: int, pieces: tuple[int, ...], shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the runs of places [m], which rise: the first row of each, its first place, and the place behind its last one.

    A gap of more than `widest` begins another run, and so does the beginning of a piece, which are `shift` places further.
    """
    number = torch.bucketize(used + shift, torch.tensor(pieces), right=True)
    begins = F.pad((used.diff() > widest) | (number.diff() != 0), (1, 0), value=True)[: len(used)]
    starts, stops = used[begins], used[begins.roll(-1)] + 1
    return (stops - starts).cumsum(0) - (stops - starts), starts, stops


def _scatter(x: Tensor, heads: tuple[int, ...] | None, rows: Tensor, values: Tensor) -> None:
    """Writes values [B, heads, m, D] of some heads, None for all, into rows [B or 1, heads or 1, m] of x [B, H, n, D]."""
    into = x if heads is None else x[:, heads]
    into.scatter_(2, rows.to(x.device)[..., None].expand_as(values), values)
    if heads is not None:
        x[:, heads] = into


def _kernel_of_rows(call: LayerCall, rows: Sequence[Tensor], bias: Tensor | None, ring: Ring) -> Any:
    (k, v), setting = rows, call.kernel
    if bias is not None and setting == "auto" and k.is_cuda and call.softcap is None:
        setting = "math" if k.dtype == torch.float64 else "efficient"
    widths, tiles = (k.shape[3], v.shape[3]), TileKinds(few_queries=True)
    return choose_kernel(k.device, k.dtype, *widths, call.softcap, setting, tiles, ring.note_kernel)
