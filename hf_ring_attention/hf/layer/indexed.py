"""Layers that choose their keys at run time (DeepSeek sparse attention, arXiv 2512.02556), for slices of queries.

An indexer scores all keys for each query, and keeps the best. Its own forward runs here on slices of queries of one document,
beside the index keys of this document only: neither scores nor masks of all queries exist, and a document of a packed or padded
row chooses what it would choose alone. Over a ring, the index keys, and the keys that are attended to, are those of whole rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compute.chosen import attend_to_chosen
from ...compute.private import implementation_of, tree_map
from ...ring.operator import UNTRACEABLE
from ...ring.shards import whole_of
from ..forward_pass import ForwardPass, forward_pass_of
from ..model.support import chosen_keys
from ..model.wrappers import by_name, cache_in, cache_names, modules_with_choices
from ..names import IMPLEMENTATION
from ..rows.documents import documents_from_mask
from .checks import LayerSettings, check_call
from .masks import Tokens, tokens_of

#: The arguments of a layer that bring its choice.
CHOICES = frozenset(("indices", "block_indices"))

_ROPE = "position_embeddings"

#: The bytes of a slice's scores, of all index heads.
SCORES_BYTES = 64 << 20


class _Stretch(NamedTuple):
    """Queries that follow each other in the documents of some batch rows."""

    rows: list[int]
    start: int  # of the document
    stop: int
    place: int  # of the first query among those of this rank
    position: int  # of the first query in the row
    length: int


class _Seen(Exception):
    """An indexer has given its keys."""


class _IndexKeys:
    """Stands for the cache of an indexer: notes its new keys [B, n, D] and ends it, or answers with those of a document."""

    def __init__(self, keys: Tensor | None = None, seen: int = 0) -> None:
        self.keys, self.seen = keys, seen

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        if self.keys is None:
            self.keys = keys
            raise _Seen
        return self.keys

    @property
    def layers(self) -> _IndexKeys:
        return self

    def __getitem__(self, layer_idx: int) -> _IndexKeys:
        return self

    def get_seq_length(self) -> int:
        """Returns the number of tokens of the document up to the last query."""
        return self.seen

    def update_index(self, keys: Tensor) -> Tensor:
        return self.update_indexer(keys[:, 0], 0)[:, None]


def attach_indexers(model: nn.Module) -> None:
    """Makes the indexers of a model choose for slices of queries; those of layers that share a choice have none."""
    for module in modules_with_choices(model):
        if hasattr(type(module), "build_attention_mask_from_topk"):
            module.build_attention_mask_from_topk = partial(_choice_as_mask, module)
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module) and not isinstance(vars(indexer).get("forward"), IndexerInSlices):
            kind = next((kind for size, kind in _INDEXERS.items() if hasattr(indexer, size)), IndexerInSlices)
            indexer.forward = kind(indexer, module)
            module.register_forward_pre_hook(_note_mask, with_kwargs=True)


def _choice_as_mask(module: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """Gives attention the choice of a layer of GLM 5.3 in place of a mask [B, 1, m, n]: other layers give both."""
    if topk_indices.is_meta or implementation_of(module.config) == IMPLEMENTATION:
        return topk_indices
    return cast(Tensor, type(module).build_attention_mask_from_topk(module, topk_indices, query_states, kv_length))


def _note_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hands the mask of an attention module to its indexer, since some indexers are not given it."""
    kwargs = by_name(module, args, kwargs)
    hidden = kwargs["hidden_states"]
    ours = hidden.is_meta or implementation_of(module.config) == IMPLEMENTATION
    module.indexer.forward.mask = kwargs["attention_mask"] if ours else None
    if ours and isinstance(module.indexer.forward, _ByFormulas):
        # `_InPlaceOfMask` takes its place.
        kwargs["attention_mask"] = torch.ones(1, dtype=torch.bool, device=hidden.device)
    return (), kwargs


class IndexerInSlices:
    """The forward of an indexer of a patched model, which runs the indexer's own forward on slices of queries.

    It returns the numbers of keys in whole rows that each query has chosen, -1 for none: [B, m, chosen] int32, or
    [B, index heads, m, chosen] for an indexer that chooses for each key/value head.
    """

    heads_name = "n_heads"
    by_head = False  # whether it chooses for each key/value head
    marks_padding = False  # whether its keys mark padding, since its layer gets no mask

    def __init__(self, module: nn.Module, attention: nn.Module) -> None:
        self.module, self.attention = cast(Any, module), attention
        self.mask: Tensor | None = None

    @property
    def heads(self) -> int:
        """The number of index heads, whose scores exist at once."""
        return int(getattr(self.module, self.heads_name))

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexerInSlices:
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.module, copied.attention = copy.deepcopy((self.module, self.attention), memo)
        return copied

    @torch.no_grad()
    @torch.compiler.disable(reason=UNTRACEABLE)
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given, config = by_name(self.module, args, kwargs), getattr(self.attention, "config", None)
        hidden = given["hidden_states"]
        if hidden.is_meta:  # An estimate measures the model.
            return self._with_choices(hidden, [], chosen_keys(config)[0])
        if implementation_of(config) != IMPLEMENTATION:
            return self._run(given, cache_in(given))
        now = forward_pass_of(config, self.attention)
        tokens = Tokens() if self.marks_padding else tokens_of(self.mask)
        if now is None or tokens.valid is not None:
            wrong = "was called outside of its model" if now is None else "got rows with padding inside a document"
            raise ValueError(
                f"{type(self.attention).__name__} chooses its keys among those of a document, and {wrong}: call the model with "
                f"rows of one length, or use 'sdpa'"
            )
        parts = [] if now.probes else list(self._choices(given, tokens, now))
        return self._with_choices(hidden, parts, max((part.shape[3] for *_, part in parts), default=1))

    def _with_choices(self, hidden: Tensor, parts: list[tuple[Tensor, Tensor, Tensor]], width: int) -> Tensor:
        shape = len(hidden), self.heads if self.by_head else 1, hidden.shape[1], width
        found = hidden.new_full(shape, -1, dtype=torch.int32)
        for rows, places, part in parts:
            found[rows[:, None], :, places, : part.shape[3]] = part.transpose(1, 2)
        return found if self.by_head else found[:, 0]

    def _choices(
        self, given: dict[str, Any], tokens: Tokens, now: ForwardPass
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields the batch rows, the places of the queries and their choice [rows, heads or 1, s, chosen] of each slice."""
        keys, hidden = self._keys(given, now), given["hidden_states"]
        if self.marks_padding:
            cache = cache_in(given) if now.layout is None else None
            written = None if cache is None else cache.layers[self.module.layer_idx].get_seq_length()
            tokens = Tokens(now.documents or documents_from_mask(keys[..., -1] != 0), written=written)
        device = keys.device
        for numbers, start, stop, place, position, length in _stretches(tokens, hidden, keys.shape[1], now):
            rows, of_document = torch.tensor(numbers, device=device), keys[numbers, start:stop]
            step = max(1, SCORES_BYTES // (4 * len(rows) * self.heads * (stop - start)))
            for first in range(0, length, step):
                places = torch.arange(first, min(length, first + step), device=device)
                of_slice = _at_places(given, rows, place + places, hidden.shape)
                positions = position - start + places
                chosen = self._chosen(of_slice, of_document, positions)
                visible = (chosen >= 0) & (chosen <= positions[:, None])
                yield rows, place + places, torch.where(visible, chosen + start, -1).int()

    def _chosen(self, given: dict[str, Any], keys: Tensor, positions: Tensor) -> Tensor:
        """Returns the keys [rows, heads or 1, s, chosen] that queries at positions [s] choose, of keys [rows, n, D]."""
        visible = torch.arange(keys.shape[1], device=positions.device) <= positions[:, None]
        return self._run({**given, "attention_mask": visible[None]}, _IndexKeys(keys))[:, None].long()

    def _keys(self, given: dict[str, Any], now: ForwardPass) -> Tensor:
        """Returns the index keys [B, n, D] of whole rows, with those in the cache."""
        hidden, cache, noted = given["hidden_states"], cache_in(given), []
        step = max(1, SCORES_BYTES // (4 * len(hidden) * self.heads * self.module.head_dim))
        rows = torch.arange(len(hidden), device=hidden.device)
        for first in range(0, hidden.shape[1], step):
            places, of_slice = (
                torch.arange(first, min(hidden.shape[1], first + step), device=hidden.device),
                _IndexKeys(),
            )
            try:
                self._run(_at_places(given, rows, places, hidden.shape), of_slice)
            except _Seen:
                noted.append(cast(Tensor, of_slice.keys))
        keys = torch.cat(noted, 1)
        if now.layout is not None:
            return whole_of(now.ring.side_by_side(keys, 1), now.layout, 1)
        if cache is None:
            return keys
        layer: Any = cache.layers[self.module.layer_idx]
        return cast(Tensor, layer.update_index(keys[:, None])[:, 0] if self.by_head else layer.update_indexer(keys))

    def _run(self, given: dict[str, Any], keys: Any) -> Tensor:
        own = type(self.module).forward
        return cast(Tensor, own(self.module, **{**given, cache_names(own)[0]: keys}))


class _BlockIndexer(IndexerInSlices):
    """The indexer of MiniMax-M3, which chooses blocks of keys for each key/value head."""

    heads_name, by_head = "num_heads", True

    def _chosen(self, given: dict[str, Any], keys: Tensor, positions: Tensor) -> Tensor:
        size = self.module.block_size
        blocks = self._run({**given, "position_ids": positions.expand(len(keys), -1)}, _IndexKeys(keys))[..., None]
        inside = torch.arange(size, device=blocks.device)
        return torch.where(blocks < 0, -1, blocks * size + inside).flatten(3)


class _PoolIndexer(IndexerInSlices):
    """The indexer of GLM-5.3, which chooses pools of keys, and counts queries by the tokens in its cache."""

    marks_padding = True

    def _chosen(self, given: dict[str, Any], keys: Tensor, positions: Tensor) -> Tensor:
        return self._run(given, _IndexKeys(keys, int(positions[-1]) + 1))[:, None].long()


class _ByFormulas(IndexerInSlices):
    """The indexer of Qwen4-Exp, whose own forward chooses for one query after another: here by its formulas, for many."""

    heads_name = "index_n_heads"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        found = super().__call__(*args, **kwargs)
        return found if found.dtype == torch.bool else found.as_subclass(_InPlaceOfMask)

    def _keys(self, given: dict[str, Any], now: ForwardPass) -> Tensor:
        """Returns the index keys of whole rows beside the cosines and sines of their positions, [B, n, D + 2 R]."""
        cache, indexer = cache_in(given), self.module
        keys = indexer.index_qk_proj(given["hidden_states"])[..., self.heads * indexer.index_head_dim :]
        if cache is not None and now.layout is None:
            keys = cache.update_indexer(keys, indexer.layer_idx)
        ropes = [F.pad(x.expand(len(keys), -1, -1), (0, 0, 0, keys.shape[1] - x.shape[1])) for x in given[_ROPE]]
        keys = torch.cat([keys, *ropes], -1)
        return keys if now.layout is None else whole_of(now.ring.side_by_side(keys, 1), now.layout, 1)

    def _chosen(self, given: dict[str, Any], keys: Tensor, positions: Tensor) -> Tensor:
        indexer, width = self.module, self.module.index_head_dim
        ratio, rope = indexer.compress_ratio, inspect.unwrap(type(indexer).forward).__globals__["apply_rotary_pos_emb"]
        blocks = keys[:, : keys.shape[1] // ratio * ratio].unflatten(1, (-1, ratio))
        pooled = indexer.k_layernorm(blocks[..., :width].float().mean(2).to(keys.dtype))
        pooled = rope(pooled[:, :, None], None, *blocks[:, :, 0, width:].chunk(2, -1), unsqueeze_dim=2)[:, :, 0]
        queries = indexer.index_qk_proj(given["hidden_states"])[..., : self.heads * width].unflatten(-1, (-1, width))
        queries = rope(indexer.q_layernorm(queries), None, *keys[:, positions, width:].chunk(2, -1), unsqueeze_dim=2)
        scores = torch.einsum("bshd,bkd->bshk", queries.float(), pooled.float()).relu_().sum(2).div_(width**0.5)
        # A query sees the blocks that end before it, and the tokens behind them.
        behind = (positions + 1) // ratio
        rest = behind[:, None] * ratio + torch.arange(ratio - 1, device=keys.device)
        found = keys.new_full((*scores.shape[:2], indexer.block_topk * ratio), -1, dtype=torch.int64)
        for number in behind.unique().tolist():  # Of equal scores, Transformers takes others if there are more blocks.
            best = scores[:, behind == number, :number].topk(min(indexer.block_topk, number), -1).indices[..., None]
            chosen = (best * ratio + torch.arange(ratio, device=keys.device)).flatten(2)
            found[:, behind == number, : chosen.shape[2]] = chosen
        return torch.cat([found, rest.expand(len(keys), -1, -1)], -1)[:, None]


#: The classes of other indexers, by a size that only they have.
_INDEXERS = {"block_size": _BlockIndexer, "index_kpool": _PoolIndexer, "compress_ratio": _ByFormulas}


class _InPlaceOfMask(Tensor):
    """A choice that a layer combines with its mask: the result is the choice."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__and__:
            return args[1].as_subclass(Tensor)
        return super().__torch_function__(func, types, args, kwargs)


def _at_places(given: dict[str, Any], rows: Tensor, places: Tensor, shape: torch.Size) -> dict[str, Any]:
    """Returns the arguments of an indexer for the tokens at these places of these batch rows."""

    def part(x: Any) -> Any:
        by_token = isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == shape[1] and x.shape[0] in (1, shape[0])
        return x.expand(shape[0], *x.shape[1:])[rows[:, None], places] if by_token else x

    return {name: tree_map(part, x) for name, x in given.items()}


def _stretches(tokens: Tokens, hidden: Tensor, n: int, now: ForwardPass) -> Iterator[_Stretch]:
    """Yields the stretches of this rank's queries, of hidden states [B, m, width], in rows of n keys."""
    batch, m = hidden.shape[:2]
    if now.layout is None and tokens.written is not None:
        n = tokens.written  # A static cache has more rows.
    documents = tokens.documents if tokens.documents is not None else (((0, n),),) * batch
    found: dict[tuple[Any, ...], list[int]] = {}
    for row, spans in enumerate(documents):
        pieces = [(0, range(n - m, n))] if now.layout is None else now.layout.placed_pieces(now.ring.rank, row)
        for place, piece in pieces:
            for start, stop in spans:
                first, last = max(start, piece.start), min(stop, piece.stop)
                if first < last:
                    found.setdefault((start, stop, place + first - piece.start, first, last - first), []).append(row)
    for stretch, rows in found.items():
        yield _Stretch(rows, *stretch)


def choice_of(mask: Tensor | None, given: Mapping[str, Any]) -> Tensor | None:
    """Returns the keys [B, Hkv or 1, m, chosen] that the queries of a layer have chosen; None in a layer without a choice."""
    chosen = given.get("indices")
    if chosen is None and mask is not None and mask.dim() == 3 and mask.dtype == torch.int32:
        chosen = mask
    return given.get("block_indices") if chosen is None else chosen[:, None]


def attention_by_choice(
    module: nn.Module, tensors: Any, chosen: Tensor, settings: LayerSettings, now: ForwardPass
) -> Tensor:
    """Returns out [B, m, H, Dv] of a layer whose queries have chosen their keys."""
    (query, key, value, sinks), (dropout, scaling, window, softcap, given) = tensors, settings
    others = {name: x for name, x in given.items() if name not in CHOICES}
    check_call(module, (dropout, scaling, window, softcap, others), now)
    assert window is None and softcap is None
    now.attended = True
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_to_chosen(query, key, value, chosen, scale, sinks).transpose(1, 2).contiguous()
