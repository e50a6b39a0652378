"""`PatternCache`: a cache of the rows that some later query can still see, and its use by `generate`."""

from __future__ import annotations

import functools
import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from ...compute.private import implementation_of
from ...plan.kept import keeps_all
from ...plan.layouts import SequenceLayout
from ...ring.operator import UNTRACEABLE
from ..forward_pass import ForwardPass, running
from ..model.config import patterns_of, warn_once
from ..model.support import why_no_pattern
from ..model.types import OTHER_CACHES
from ..model.wrappers import attachment_of, whole_model
from ..names import IMPLEMENTATION
from .every_row import why_every_row
from .kept_rows import Arrival, Shared
from .pattern_layer import PatternLayer
from .state_layers import pattern_layers, state_inside


class PatternCache(Cache):
    """A cache that keeps only the rows that the model's patterns can still see, for `generate` and for calls of the model.

    For each layer and its key/value heads these are the sinks and a window, the rows of a head's phase within reach, the
    current segment, or all rows of an exact head; a model's own windows and chunks likewise. Its tokens equal those of a cache
    that keeps all rows. `generate` makes one by itself for a patched model, unless it is given a `cache`, a
    `cache_implementation` or `use_cache=False`. A step of generation then reads rows as they lie, without a plan.

    `crop` goes back to a length whose rows are all there: by the tokens of the last call, or further after
    `activate_past_recording()`, which keeps all later rows until the call behind the next `crop`. Recurrent layers go back to
    the length at which recording began, and to no other. `prefill` makes caches that the ranks of a ring share; these also go
    back to the end of the prefilled tokens. A filled cache can be copied and pickled.

    Some models make other keys of those in their cache (DiffLlama) or share them among layers with several patterns
    (Gemma 4): of these every row is kept, and this is logged once.

    Args:
        model: a model after `ra.patch_model`; this cache then serves this pattern only.
        offloading: whether rows of layers that are not computing wait in the host's memory; for models on a GPU.
        every_row: whether all rows stay, as the model gives them; latent keys then take one row for all heads.

    Raises:
        ValueError: a model that does not compute with "ring_dilated".
        NotImplementedError: a model that keeps states of its layers in itself, and Dory, whose layers run several times.

    Example:
        >>> model, ids = ra.patch_model(tiny_llama(), "window:4+2"), torch.arange(1, 33)[None]
        >>> cache = ra.PatternCache(model)
        >>> small = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
        >>> torch.equal(small, model.generate(ids, cache_implementation="dynamic", max_new_tokens=8, do_sample=False))
        True
        >>> cache.get_seq_length(), cache.num_rows  # tokens, and the rows of a key/value head in the first layer
        (39, 6)
    """

    def __init__(self, model: nn.Module, offloading: bool = False, every_row: bool = False) -> None:
        inner = whole_model(model, "PatternCache")
        config = inner.config.get_text_config(decoder=True)
        refused, reason = why_refused(inner), why_every_row(config)
        if refused is not None:
            raise NotImplementedError(
                f"PatternCache: {type(inner).__name__}: {refused}: pass cache_implementation='dynamic'"
            )
        if implementation_of(config) != IMPLEMENTATION:
            raise ValueError(
                f"PatternCache: {type(inner).__name__} computes attention by {implementation_of(config)!r}: call "
                f"ra.patch_model(model, pattern) first"
            )
        if reason is not None and not every_row and not all(map(keeps_all, patterns_of(config).values())):
            warn_once(f"PatternCache keeps every row of {type(inner).__name__}: {reason}", logging.INFO)
        shares_keys = getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None)
        if config.model_type == "minimax":
            self.__class__ = _of_minimax()
        self.shared = Shared(bool(shares_keys), every_row or reason is not None)
        self.arrival = self.shared.arrival  # the new tokens of the running call
        layers = pattern_layers(DynamicCache(config=config).layers, self.shared)
        Cache.__init__(self, layers=layers, offloading=offloading, offload_only_non_sliding=False)
        self._valid: Tensor | None = None  # [B, tokens], False for padding; None without padding
        self.layout: SequenceLayout | None = None  # of the row that the ranks of a ring share; None for whole rows
        self.document: int | None = None  # the tokens of `prefill`, which `crop` may always go back to
        self._floor = 0  # while recording, the shortest length that `crop` may go back to
        self._calls = self._batch = 0
        self._last_recorded: int | None = None  # the call after a `crop`, which is the last one that is recorded
        self.half_done = False  # whether a call has given keys and has not ended

    @property
    def _pattern_layers(self) -> list[PatternLayer]:  # A model may append layers.
        return [layer for layer in self.layers if isinstance(layer, PatternLayer)]

    @property
    def _state_layers(self) -> list[Any]:
        return [layer for layer in self.layers if hasattr(layer, "go_back")]

    @property
    def _seen(self) -> int:
        """The tokens in the cache, with padding."""
        return next((x.seen for x in self.layers if isinstance(x, PatternLayer) and x.seen), 0)

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values that the cache has allocated."""
        return sum(x.numel() * x.element_size() for layer in self._pattern_layers for x in layer.tensors)

    @property
    def num_rows(self) -> int:
        """The most rows of a key/value head in the first layer that attends; 0 for an empty cache."""
        return max((rows.table.num_slots for rows in self._pattern_layers[0].rows), default=0)

    # ---- calls

    def begin_call(self, now: ForwardPass, tokens: Tensor | None, mask: Any) -> None:
        """Begins a call of a model with new tokens [B, n] and the mask of all tokens, or None; checks both.

        Raises:
            ValueError: tokens or a mask that do not continue the rows, packed rows, a cache that an error has left behind or
                that another ring has filled, another implementation, or `exact_attention`, which needs rows that were dropped.
        """
        seen, recording = self._seen, self.recording
        self._valid = self._checked(now, tokens, mask, seen)
        ends = recording and self._last_recorded is not None and self._calls >= self._last_recorded
        if ends:
            self._end_recording()
        assert tokens is not None
        self._calls, self._batch = self._calls + 1, len(tokens)
        self.arrival = self.shared.arrival = self._counted(now, seen, tokens.shape[1], recording and not ends, ends)

    def end_call(self) -> None:
        """Ends a call in which all layers have attended."""
        self.half_done = False

    def _checked(self, now: ForwardPass, tokens: Tensor | None, mask: Any, seen: int) -> Tensor | None:
        """Returns the mask of all tokens, as `_checked_mask` does; refuses calls that this cache cannot serve."""
        name, ranks, held = type(now.module).__name__, now.ring.world_size, self._batch if seen else 0
        implementation = implementation_of(now.runner.config)
        if implementation != IMPLEMENTATION:
            raise ValueError(
                f"{name} computes attention by {implementation!r}, and a PatternCache lacks rows that it needs: call "
                f"ra.patch_model, or pass cache=DynamicCache()"
            )
        if self.layout is not None and self.layout.world_size != ranks:
            shared = f"{self.layout.world_size} ranks share the PatternCache"
            raise ValueError(f"{name}: {shared}, and the model's ring has {ranks}: call ra.prefill")
        if self.half_done:
            raise ValueError(f"{name}: an earlier call with this PatternCache has failed halfway: make another one")
        if now.exact and not self.shared.every:
            raise ValueError(f"{name}: a PatternCache lacks keys that exact_attention needs: pass cache=DynamicCache()")
        if tokens is None or tokens.dim() < 2 or 0 in tokens.shape[:2]:
            raise ValueError(f"{name}: input_ids or inputs_embeds of new tokens were expected beside a PatternCache")
        batch, n = tokens.shape[:2]
        if held not in (0, batch):
            raise ValueError(
                f"{name}: the PatternCache holds {held} batch rows, and {batch} came: for beams, call "
                f"cache.batch_repeat_interleave(beams)"
            )
        return self._checked_mask(name, mask, batch, seen, n)

    def _counted(self, now: ForwardPass, seen: int, n: int, recording: bool, compact: bool) -> Arrival:
        """Returns the positions of n new tokens behind `seen` ones."""
        layout, valid = self.layout, self._valid
        rank, ranks = now.ring.rank, now.ring.world_size
        before, floors = self._positions_at(seen), self._positions_at(self._floor if recording else seen)
        document = None if self.document is None else self._positions_at(self.document)
        positions, inside = torch.arange(seen, seen + n)[None], None
        if valid is not None:
            new = valid[:, seen:]
            positions = (before[:, None] + new.cumsum(1) - 1).masked_fill(~new, -1)
            behind = valid.flip(1).cumsum(1).flip(1) > 0
            inside = valid if (~valid & behind & (valid.cumsum(1) > 0)).any() else None
        rows, pieces = positions, tuple[int, ...]()
        if layout is not None:
            if inside is not None:
                name = type(now.module).__name__
                raise ValueError(f"{name}: got padding inside a document: over a ring, pad before or after it")
            rows = positions[:, : n if rank == ranks - 1 else 0] if seen else now.ring.shard(positions, layout, fill=-1)
            pieces = tuple(sorted({x for piece in layout.pieces(rank) for x in (piece.start, piece.stop)}))
        return Arrival(self._calls, seen, positions, rows, pieces, before, floors, document, recording, compact, inside)

    def _positions_at(self, length: int) -> Tensor:
        """Returns the positions [B or 1] behind this number of tokens."""
        return torch.tensor([length]) if self._valid is None else self._valid[:, :length].sum(1)

    @property
    def recording(self) -> bool:
        """Whether all later rows are kept, until the call behind the next `crop`."""
        return bool([layer for layer in self._pattern_layers if layer.record_past])

    def _checked_mask(self, name: str, mask: Any, batch: int, seen: int, n: int) -> Tensor | None:
        """Returns the mask of all tokens [B, seen + n], False for padding; None if there is no padding."""
        known = None if self._valid is None else self._valid[:, :seen]
        if mask is None:
            if known is not None and not known.all():
                raise ValueError(
                    f"{name}: the PatternCache holds padding, and no attention_mask of all tokens came: pass it"
                )
            return None
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, seen + n):
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"{name}: the PatternCache holds {seen} tokens, and {n} came: expected an attention_mask {[batch, seen + n]}, "
                f"got {got}; to generate, pass torch.cat([document, question], 1)"
            )
        if not mask.is_floating_point() and mask.dtype != torch.bool and int(mask.max()) > 1:
            raise ValueError(f"{name}: the mask numbers packed documents, which have no cache: pass use_cache=False")
        valid = (mask != 0).cpu()
        same = valid[:, :seen].all() if known is None else torch.equal(valid[:, :seen], known)
        if not same:
            raise ValueError(
                f"{name}: the attention_mask hides other tokens than before: pass one mask that only grows"
            )
        if n == 1 and self._state_layers and not valid.any(1).all():
            raise ValueError(
                f"{name}: rows that begin with padding came one token at a time, which recurrent layers do not mask: pass more "
                f"tokens at once"
            )
        return None if valid.all() else valid

    def layer_of(self, module: nn.Module, key: Tensor, value: Tensor) -> PatternLayer:
        """Returns the layer that took the keys and values of a module; other modules may read them too.

        Raises:
            NotImplementedError: other keys or values than a layer gave.
        """
        number = getattr(module, "layer_idx", None)
        layer = self.layers[number] if isinstance(number, int) and number < len(self.layers) else None
        if isinstance(layer, PatternLayer) and (layer.pending or (layer.shared.every and layer.keys is not None)):
            return layer  # Its keys may have been cast, or others may have been made of them.
        shared = next((x for x in self._pattern_layers if x.gave(key, value)), None)
        if shared is None:
            raise NotImplementedError(
                f"{type(module).__name__}: layer {number} attends to other keys or values than it gave to its cache: pass "
                f"cache_implementation='dynamic'"
            )
        return shared

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        update = _update_at_a_break if torch.compiler.is_dynamo_compiling() else _update
        return update(self, key_states, value_states, layer_idx)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Leaves the rows of a layer where they are until it has attended (`end_layer`)."""

    def end_layer(self, layer: PatternLayer) -> None:
        """Moves the rows of a layer that has attended to the host's memory."""
        layer.offload()

    # ---- batch rows and lengths

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: a positive number; rows that the remaining tokens see have been dropped; or no state of recurrent
                layers is kept for them.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"PatternCache: crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        seen, count = self._seen, -tokens_to_remove
        length = max(0, seen - count)
        reason = self._why_no_crop(length) if count or self.half_done else None
        if reason is not None:
            raise ValueError(
                f"PatternCache: {reason}, of {seen} tokens: call cache.activate_past_recording() before the tokens that you "
                f"crop"
            )
        if count:
            lengths = self._positions_at(length)
            for table in self.shared.tables.values():
                table.crop(lengths)
            self._valid = None if self._valid is None else self._valid[:, :length]
            self.document = None if self.document is None else min(self.document, length)
        for layer in self._pattern_layers:
            if layer.seen:
                layer.crop(length - seen)
        for layer in self._state_layers:
            layer.go_back(length, count)
            if layer.record_past:
                layer.forget(self.document)
                layer.keep(length)
        self._floor, self._last_recorded = length, self._calls + 1

    def _why_no_crop(self, length: int) -> str | None:
        """Returns why the cache cannot go back to this many tokens; None if it can."""
        if self.half_done:
            return "a call has failed halfway"
        if not all(layer.goes_back(length, self._floor) for layer in self._state_layers):
            return f"no state behind {length} tokens is kept"
        ends = self._positions_at(length), None if self.document is None else self._positions_at(self.document)
        has_rows = all(table.has(*ends) for table in self.shared.tables.values())
        return None if has_rows else f"rows that {length} tokens see were dropped"

    def activate_past_recording(self) -> None:
        """Keeps all later rows until the call behind the next `crop`, which may remove any of them."""
        if self._last_recorded is not None or not self.recording:
            self._end_recording()
            self._floor = self._seen
            Cache.activate_past_recording(self)
            self.keep_states()

    def _end_recording(self) -> None:
        self._last_recorded = None
        for layer in cast(list[Any], self.layers):
            if getattr(layer, "record_past", False):
                layer.end_recording()
        for layer in self._state_layers:
            layer.forget(self.document)

    def keep_states(self) -> None:
        """Keeps copies of the states of recurrent layers, which `crop` can go back to."""
        for layer in self._state_layers:
            layer.keep(self._seen)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the batch rows of these numbers [rows]."""
        Cache.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        rows = beam_idx.cpu()
        for table in self.shared.tables.values():
            table.select(lambda x: x.index_select(0, rows))
        self._valid = None if self._valid is None else self._valid[rows]
        self._batch = len(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each batch row, as beams of `generate` need it."""
        self.reorder_cache(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the batch rows of these numbers."""
        self.reorder_cache(torch.arange(self._batch)[indices.cpu()])

    def reset(self) -> None:
        """Empties the cache."""
        if self.layout is not None:
            raise ValueError("a sharded cache cannot be filled again: make another one with ra.prefill")
        self._end_recording()
        Cache.reset(self)
        self.shared.tables.clear()
        self._valid, self._floor, self.document, self.half_done = None, 0, None, False


def _update(cache: PatternCache, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    now, of_layer = running().forward_pass, cast(Any, cache.layers[layer])
    if now is None or now.kept is not cache:
        raise ValueError("PatternCache: it serves calls of a patched model: call the model, not its layers")
    cache.half_done, of_layer.shared = True, cache.shared  # A model may have copied the layer alone.
    if not cache.offloading:
        return of_layer.update(key, value)
    rows = Cache.update(cache, key, value, layer)
    of_layer.prefetch()  # if the stream beside has not brought its rows yet
    return rows


_update_at_a_break = torch.compiler.disable(_update, reason=UNTRACEABLE)


def why_refused(model: Any) -> str | None:
    """Returns why no `PatternCache` serves a model; None if one does."""
    if refused := why_no_pattern(model.config.get_text_config(), attachment_of(model).own_attention):
        return refused
    inside = state_inside(model)
    return f"{inside} keeps its state in the model" if inside else OTHER_CACHES.get(model.config.model_type)


class _LinearStates(PatternCache):
    """MiniMax names its states differently and expects its own cache class."""

    __len__ = Cache.__len__  # That class keeps states in a list.

    def __reduce__(self) -> Any:
        return _empty_of_minimax, (), vars(self)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Returns the state of a layer; None for an empty one."""
        state: Tensor | None = cast(Any, self.layers[layer_idx]).recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keeps the state of a layer."""
        Cache.update_recurrent_state(self, linear_cache, layer_idx)
        cast(Any, self.layers[layer_idx]).has_previous_state[0] = True  # Only convolutions set it.


@functools.cache
def _of_minimax() -> type[PatternCache]:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return type("PatternMiniMaxCache", (_LinearStates, MiniMaxCache), {})


def _empty_of_minimax() -> PatternCache:
    """Returns a cache to be filled with the attributes of one that was copied or pickled."""
    return object.__new__(_of_minimax())
