"""The mixers of hybrid models: recurrent, linear-attention and convolutional modules, which pass a state from token to token.

A state must end with its document, and padding must not enter it. So a mixer of a patched model runs on each document
separately. Documents of about the same length run together, padded behind, because no mixer looks ahead. Over a ring, each rank
runs its tokens, and states pass from rank to rank (`states.py`). Two mixers (MiniMax, RecurrentGemma) cannot pass their
state: every rank gathers the rows, and runs the documents of its tokens up to its last token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..hf.forward_pass import ForwardPass, forward_pass_of, number_of, running, running_with
from ..hf.layer.masks import tokens_of
from ..hf.model.config import warn_once
from ..hf.model.types import STATES_INSIDE
from ..hf.model.wrappers import attachment_of, cache_in, cache_names, class_of_transformers
from ..hf.rows.documents import documents_from_mask
from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents
from ..plan.state_runs import runs_of
from ..ring.operator import UNTRACEABLE
from ..ring.ring import Ring
from .states import StatesBehind, chain_of, passing_forward

#: Documents run together if the shortest has at least this share of the longest one's tokens.
_ALIKE = 0.8

#: The most bytes of hidden states that a rank gathers for a mixer that cannot pass its state.
MOST_GATHERED = 2 << 30

#: Arguments that describe padding and documents; mixers get documents one by one, without these arguments.
_BORDERS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_NOT_TO_MIXERS = ("attention_mask", "conv_mask", "position_ids", "position_embeddings", *_BORDERS)

#: Arguments beside hidden states that have a value for each token.
_BY_TOKEN = "input_ids", "position_ids"

#: Mixers whose layers expect a tuple, and use its first entry.
_RETURN_TUPLES = ("RecurrentGemmaRecurrentBlock", "MiniMaxLightningAttention")

#: Mixers that begin with an empty state if they get more than one token at once, whatever their cache holds.
_FORGETFUL = ("JambaMambaMixer", "ZambaMambaMixer")

#: The attribute of a mixer that holds its `_ByDocuments`.
_BY_DOCUMENTS = "_ring_dilated_by_documents"

#: A document of a batch row, or its beginning: (batch row, first token, token behind the last one).
_Piece = tuple[int, int, int]

#: A token whose output nobody reads: a rank without documents computes it, so that its weights get gradients.
_UNREAD: _Piece = (0, 0, 1)


def attach(module: nn.Module, config: Any) -> None:
    """Makes a mixer keep documents apart, and pass its states over the ring of the model with this config."""
    attached = getattr(module, _BY_DOCUMENTS, None)
    if attached is None:
        # The forward of a mixer may be a wrapper, such as Accelerate's hooks, which must still run.
        attached = _ByDocuments(module, vars(module).get("forward"))
        setattr(module, _BY_DOCUMENTS, attached)
        module.forward = attached
    attached.config = config


def leave_out(module: nn.Module) -> None:
    """Makes a mixer return its input."""
    name = next(iter(_parameters(type(module).forward)))

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs[name]
        return (hidden, None) if type(module).__name__ in _RETURN_TUPLES else hidden

    module.forward = forward


def check_parameters(path: str, mixer: nn.Module) -> None:
    """Refuses a mixer with an unknown parameter, such as one that a later release of Transformers adds."""
    parameters = [*_parameters(type(mixer).forward).values()][1:]  # behind the hidden states
    known = (*_NOT_TO_MIXERS, *_BY_TOKEN, *cache_names(type(mixer).forward), "use_cache")
    unknown = [x.name for x in parameters if x.name not in known and x.kind is not inspect.Parameter.VAR_KEYWORD]
    if unknown:
        raise NotImplementedError(
            f"{path} ({type(mixer).__name__}) takes {', '.join(unknown)}, which ring_dilated does not know: use 'sdpa' or "
            f"'eager', or a release of Transformers that was tested"
        )


@functools.cache
def _parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a mixer's forward; the first one takes the hidden states."""
    _, *parameters = inspect.signature(forward).parameters.items()
    return dict(parameters)


class _ByDocuments:
    """The forward of a mixer of a patched model, which calls the mixer's own forward on documents."""

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.module = module
        self.own = own  # the forward that it had before; None for the forward of its class
        self.config: Any = None  # of the model, which leads to the running forward pass

    @property
    def name(self) -> str:
        return class_of_transformers(self.module).__name__

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return _parameters(type(self.module).forward)

    @torch.compiler.disable(reason=UNTRACEABLE)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs |= zip(self.parameters, args)
        inside = self.name in STATES_INSIDE
        if inside and self.module.training and torch.is_grad_enabled():
            kwargs = _without_cache(kwargs)  # Training needs no states behind a row, and padding would enter them.
        out = self.output(kwargs.pop(next(iter(self.parameters))), kwargs)
        if inside and not kwargs.get("use_cache"):
            # It would keep its last state, with its graph, until it runs again.
            self.module.rg_lru.recurrent_states = None  # type: ignore[union-attr]
        return (out, None) if self.name in _RETURN_TUPLES and isinstance(out, Tensor) else out

    def output(self, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        """Returns the output of the mixer, as a tensor or as the mixer's forward returns it."""
        ring, now = attachment_of(self.module).ring, forward_pass_of(self.config, self.module)
        if ring is not None and ring.world_size > 1 and not (now is not None and now.whole):
            if now is None:
                raise RuntimeError(
                    f"{self.name} of a sharded model was called outside of its model's forward pass, so the documents of the "
                    f"whole sequence are unknown: call the model, and checkpoint by model.activation_checkpointing_enable()"
                )
            if now.rows is not None:
                return self.over_ring(ring, now, hidden, kwargs)
        # In a step of generation, all ranks have the same tokens.
        mask, length = kwargs.get("conv_mask", kwargs.get("attention_mask")), hidden.shape[1]
        documents = _documents_of(now, mask, length)
        cache, layer = _cache_of(kwargs), getattr(self.module, "layer_idx", None)
        continued = isinstance(cache, Cache) and isinstance(layer, int) and cache.has_previous_state(layer)
        if continued and length > 1 and self.name in _FORGETFUL:
            masks = [None] * length if mask is None else mask.split(1, 1)
            tokens = zip(hidden.split(1, 1), masks, strict=True)
            return torch.cat([self.run(token, **{**kwargs, "attention_mask": valid}) for token, valid in tokens], 1)
        if documents is None or continued or documents == (((0, length),),) * len(hidden):
            # Without a kernel for documents, some mixers refuse any description of them, even of a single one.
            return self.run(hidden, **{name: value for name, value in kwargs.items() if name not in _BORDERS})
        return self.apart(hidden, _all(documents), kwargs, cache is not None)

    def run(self, hidden: Tensor, **kwargs: Any) -> Any:
        """Runs the forward that the mixer had when its model was patched; while states pass, a clone of it."""
        kwargs[next(iter(self.parameters))] = hidden
        if running().chain is not None:
            clone = passing_forward(class_of_transformers(self.module))
            assert clone is not None
            return clone(self.module, **kwargs)
        return type(self.module).forward(self.module, **kwargs) if self.own is None else self.own(**kwargs)

    def over_ring(self, ring: Ring, now: ForwardPass, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Returns the outputs of this rank's tokens, from passed states or from gathered rows.

        Of gathered rows, a rank runs only the tokens that its tokens depend on. With a sharded cache it runs all of them,
        because generation continues from the state behind the last token. Other caches are the model's own, and no later call
        may use them.
        """
        layout, documents, cache = now.layout, now.documents, _cache_of(kwargs)
        assert layout is not None and documents is not None
        sharded = cache if getattr(cache, "layout", None) is not None else None
        if self.own is None and passing_forward(class_of_transformers(self.module)) is not None:
            return self.by_states(ring, now, hidden, kwargs, sharded)
        gathered = len(hidden) * layout.seq_len * hidden.shape[2] * hidden.element_size()
        if gathered > MOST_GATHERED:
            raise NotImplementedError(
                f"{self.name} cannot pass its state between ranks, and gathering {len(hidden)} x {layout.seq_len} tokens would "
                f"take {gathered} bytes, above {MOST_GATHERED}: take shorter or fewer rows"
            )
        if ring.rank == 0:
            warn_once(
                f"{self.name} passes no state from rank to rank: its rows are gathered, and each rank computes them up to its "
                f"last token"
            )
        for name in {*_BY_TOKEN} & self.parameters.keys():
            kwargs = {**kwargs, name: ring.unshard(kwargs[name].expand(len(hidden), -1), layout)}
        pieces = _all(documents) if sharded is not None else list(_needed(documents, layout, ring.rank))
        return ring.shard(self.apart(ring.unshard(hidden, layout), pieces, kwargs, sharded is not None), layout)

    def by_states(self, ring: Ring, now: ForwardPass, hidden: Tensor, kwargs: dict[str, Any], cache: Any) -> Tensor:
        """Returns the outputs of this rank's tokens from these tokens and from the states before them.

        A sharded cache gets the states behind all tokens; then each row is one document.
        """
        layout, documents, kwargs, behind = now.layout, now.documents, _without_cache(kwargs), None
        assert layout is not None and documents is not None
        if cache is not None:
            behind = StatesBehind()
            kwargs |= dict.fromkeys(cache_names(type(self.module).forward), behind)
        runs = runs_of(documents, layout)
        own = [run for run in runs if run.rank == ring.rank]
        chain = chain_of(ring, runs, len(documents), behind)
        whole = [run.held for run in own if behind is None and run.alone]
        linked = [] if chain is None else [chain.runs[number].held for number in chain.own]
        outputs = self.in_groups(hidden, whole if own or chain is not None else [_UNREAD], kwargs)
        if chain is not None:
            # All ranks exchange states, even ranks without such runs.
            group = linked + [(0, 0, 0)] * (chain.most - len(linked))
            with running_with(chain=chain):
                outputs |= self.together(hidden, group, kwargs, behind=False, longest=chain.longest)
        if behind is not None:
            behind.store_in(cache)
        return _assembled(hidden, whole + linked, outputs)

    def apart(self, hidden: Tensor, pieces: list[_Piece], kwargs: dict[str, Any], caching: bool) -> Tensor:
        """Returns the output [B, n, width] for pieces of documents, each run separately, and zeros elsewhere.

        If `caching`, the cache in `kwargs` gets the state behind the last piece of each batch row.
        """
        last = [max((piece for piece in pieces if piece[0] == row), default=(row, 0, 0)) for row in range(len(hidden))]
        others = [piece for piece in pieces if not caching or piece not in last]
        outputs = self.in_groups(hidden, others if pieces else [_UNREAD], _without_cache(kwargs))
        if caching:
            outputs |= self.together(hidden, last, kwargs, behind=False)
        return _assembled(hidden, pieces, outputs)

    def in_groups(self, hidden: Tensor, pieces: list[_Piece], kwargs: dict[str, Any]) -> dict[_Piece, Tensor]:
        """Runs the mixer on pieces, those of about the same length together, the longest one of each group first."""
        outputs: dict[_Piece, Tensor] = {}
        pieces = sorted(pieces, key=_num_tokens, reverse=True)
        while pieces:
            count = sum(_num_tokens(piece) >= _ALIKE * _num_tokens(pieces[0]) for piece in pieces)
            outputs |= self.together(hidden, pieces[:count], kwargs, behind=True)
            pieces = pieces[count:]
        return outputs

    def together(
        self, hidden: Tensor, group: list[_Piece], kwargs: dict[str, Any], behind: bool, longest: int = 1
    ) -> dict[_Piece, Tensor]:
        """Runs the mixer on pieces in one batch, padded to `longest` at least: behind them, or before them with a mask."""
        by_token = {name: kwargs[name] for name in _BY_TOKEN if name in self.parameters}
        required = [x for x in [*self.parameters.values()][1:] if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
        needed = {x.name: None for x in required}
        kwargs = {**needed, **{name: value for name, value in kwargs.items() if name not in _NOT_TO_MIXERS}}
        lengths = [*map(_num_tokens, group)]
        longest = max(longest, *lengths)

        def batch_of(rows: Tensor, fill: Any = 0) -> Tensor:
            pieces = [rows[row, start:stop] for row, start, stop in group]
            lacking = [x.new_full((longest - len(x), *x.shape[1:]), fill) for x in pieces]
            return torch.stack([torch.cat([x, y] if behind else [y, x]) for x, y in zip(pieces, lacking)])

        if not behind and min(lengths) < longest:
            if self.name in STATES_INSIDE:
                raise ValueError(
                    f"{self.name} would take padding into its state: the last documents of the batch rows have {lengths} "
                    f"tokens: pass use_cache=False, or generate from rows of one length"
                )
            mask = "conv_mask" if "conv_mask" in self.parameters else "attention_mask"
            kwargs[mask] = batch_of(torch.ones_like(hidden[..., 0], dtype=torch.int64))
        # RecurrentGemma resets its state at position 0, which a document may not begin with; n-grams begin behind eos.
        end = getattr(self.config, "eos_token_id", None)
        for name, values in by_token.items():
            fill = 1 if name == "position_ids" else end[0] if isinstance(end, list) else end
            kwargs[name] = batch_of(values.expand(len(hidden), -1), fill)
        out = self.run(batch_of(hidden), **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        return {
            piece: out[number, :length] if behind else out[number, longest - length :]
            for number, (piece, length) in enumerate(zip(group, lengths))
        }


def _cache_of(kwargs: dict[str, Any]) -> Any:
    """Returns the cache of a call; True if the mixer must keep its state in itself; None without either."""
    cache = cache_in(kwargs)
    return (True if kwargs.get("use_cache") else None) if cache is None else cache


def _documents_of(now: ForwardPass | None, mask: Tensor | None, length: int) -> Documents | None:
    """Returns the documents of whole rows of `length` tokens; None if each row is one document."""
    if now is not None and now.documents is not None:
        return now.documents
    # A mask of another length covers all keys, in a step of generation.
    if number_of(mask) is not None:
        tokens = tokens_of(mask)
        return tokens.documents if tokens.length == length else None
    return documents_from_mask(mask > 0) if isinstance(mask, Tensor) and mask.shape[1:] == (length,) else None


def _all(documents: Documents) -> list[_Piece]:
    return [(row, start, stop) for row, spans in enumerate(documents) for start, stop in spans]


def _num_tokens(piece: _Piece) -> int:
    return piece[2] - piece[1]


def _needed(documents: Documents, layout: SequenceLayout, rank: int) -> Iterator[_Piece]:
    """Yields the documents with tokens of this rank, each up to the last of these tokens."""
    for row, spans in enumerate(documents):
        pieces = layout.rows[row][rank] if layout.rows else layout.pieces(rank)
        for start, stop in spans:
            ends = [min(piece.stop, stop) for piece in pieces if piece.start < stop and piece.stop > start]
            if ends:
                yield row, start, max(ends)


def _assembled(hidden: Tensor, pieces: list[_Piece], outputs: dict[_Piece, Tensor]) -> Tensor:
    """Returns rows [B, n, width] with the outputs of pieces, and zeros elsewhere."""
    # Zero, made of the hidden states and of all outputs: a rank without tokens must take part in backward, too.
    nothing = hidden[:, :0].sum() + sum(out[:0].sum() for out in outputs.values())
    rows = []
    for row in range(len(hidden)):
        parts, end = [], 0
        for piece in sorted(piece for piece in pieces if piece[0] == row):
            parts += [hidden.new_zeros(piece[1] - end, hidden.shape[2]) + nothing, outputs[piece].to(hidden.dtype)]
            end = piece[2]
        rows.append(torch.cat([*parts, hidden.new_zeros(hidden.shape[1] - end, hidden.shape[2]) + nothing]))
    return torch.stack(rows)


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in kwargs.items() if not isinstance(value, Cache)}
    return kept | ({"use_cache": False} if "use_cache" in kept else {})
