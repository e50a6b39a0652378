"""The mixers of hybrid models: recurrent, linear-attention and convolutional modules, which pass a state from token to token.

A state must end with its document, and padding must not enter it. So a mixer of a patched model runs on each document
separately. Documents of about the same length run together, padded behind, because no mixer looks ahead. Over a ring, each rank
runs its own tokens, and states pass from rank to rank (`states.py`). Two mixers (MiniMax, RecurrentGemma) cannot pass their
state: every rank gathers the rows, and runs the documents of its own tokens up to its last token.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..hf.cache import ShardedCache, cache_in, cache_names
from ..hf.documents import documents_from_mask
from ..hf.forward_pass import ForwardPass, forward_pass_of, number_of, running, running_with
from ..hf.masks import tokens_of
from ..hf.rings import attached_ring
from ..hf.wrappers import class_of_transformers
from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents
from ..plan.state_runs import runs_of
from ..ring.attention import UNTRACEABLE
from ..ring.ring import Ring
from .states import StatesBehind, can_pass, chain_of, passing_forward

logger = logging.getLogger(__name__)

#: Documents run together if the shortest has at least this share of the longest one's tokens.
_ALIKE = 0.8

#: The most bytes of hidden states that a rank gathers for a mixer that cannot pass its state.
MOST_GATHERED = 2 << 30

#: Arguments that describe padding and documents; mixers get documents one by one, without these arguments.
_BORDERS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_NOT_TO_MIXERS = ("attention_mask", "position_ids", "position_embeddings", *_BORDERS)

#: Mixers that keep their state in themselves, and let padding into it.
STATES_INSIDE = ("RecurrentGemmaRecurrentBlock",)

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


def check_parameters(path: str, mixer: nn.Module) -> None:
    """Refuses a mixer with an unknown parameter, such as one that a later release of Transformers adds.

    Raises:
        NotImplementedError: a mixer has one.
    """
    forward = type(mixer).forward
    parameters = list(inspect.signature(forward).parameters.values())[2:]  # behind the module and the hidden states
    known = (*_NOT_TO_MIXERS, *cache_names(forward), "use_cache")
    unknown = [x.name for x in parameters if x.name not in known and x.kind is not inspect.Parameter.VAR_KEYWORD]
    if unknown:
        raise NotImplementedError(
            f"{path} ({type(mixer).__name__}) takes {', '.join(unknown)}, which ring_dilated does not know: use 'sdpa' or "
            f"'eager', or a release of Transformers that was tested"
        )


class _ByDocuments:
    """The forward of a mixer of a patched model, which calls the mixer's own forward on documents.

    Attributes:
        module: the mixer.
        own: the forward that it had before; None for the forward of its class.
        config: the config of the model; it leads to the running forward pass.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.module, self.own = module, own
        self.config: Any = None

    @torch.compiler.disable(reason=UNTRACEABLE)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        kwargs |= zip(list(inspect.signature(type(module).forward).parameters)[1:], args)
        if type(module).__name__ in STATES_INSIDE and module.training:
            kwargs = _without_cache(kwargs)  # Training needs no states behind a row, and padding would enter them.
        out = _output(module, self.config, kwargs)
        if type(module).__name__ in STATES_INSIDE and not kwargs.get("use_cache"):
            # It would keep its last state, with its graph, until it runs again.
            module.rg_lru.recurrent_states = None  # type: ignore[union-attr]
        return out


def _own_forward(module: nn.Module, **kwargs: Any) -> Any:
    """Runs the forward that a mixer had when its model was patched; while states pass, a clone of it."""
    own = getattr(module, _BY_DOCUMENTS).own
    if running().chain is not None:
        clone = passing_forward(class_of_transformers(module))
        assert clone is not None
        return clone(module, **kwargs)
    return type(module).forward(module, **kwargs) if own is None else own(**kwargs)


def _output(module: nn.Module, config: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the output of a mixer.

    Raises:
        RuntimeError: a shard outside of a forward pass of its model, so its documents are unknown.
        ValueError: rows whose last documents differ in length, for a mixer whose state would take in their padding.
        NotImplementedError: a sharded cache, for a mixer that keeps its state in itself; or gathered rows that are too long.
    """
    first = list(inspect.signature(type(module).forward).parameters)[1]
    kwargs = dict(kwargs)
    hidden: Tensor = kwargs.pop(first)
    ring, now = attached_ring(module), forward_pass_of(config)
    if ring is not None and ring.world_size > 1 and not (now is not None and now.whole):
        if now is None:
            raise RuntimeError(
                f"{type(module).__name__} of a sharded model was called outside of its model's forward pass, so the documents "
                f"of the whole sequence are unknown: call the model, and checkpoint by model.activation_checkpointing_enable()"
            )
        if now.held is None:
            return _over_ring(module, ring, now, hidden, kwargs)
    # In a step of generation, all ranks have the same tokens.
    documents = _documents_of(now, kwargs.get("attention_mask"), hidden.shape[1])
    cache, layer = _cache_of(kwargs), getattr(module, "layer_idx", None)
    continued = isinstance(cache, Cache) and isinstance(layer, int) and cache.has_previous_state(layer)
    if continued and hidden.shape[1] > 1 and type(module).__name__ in _FORGETFUL:
        mask = kwargs.pop("attention_mask", None)
        masks = [None] * hidden.shape[1] if mask is None else mask.split(1, 1)
        steps = (
            _own_forward(module, **{first: token, **kwargs, "attention_mask": valid})
            for token, valid in zip(hidden.split(1, 1), masks, strict=True)
        )
        return torch.cat(list(steps), 1)
    if documents is None or continued or documents == (((0, hidden.shape[1]),),) * len(hidden):
        # Without a kernel for documents, some mixers refuse any description of them, even of a single one.
        return _own_forward(module, **{first: hidden, **_without_borders(kwargs)})
    return _as_returned(module, _apart(module, hidden, _all(documents), kwargs, cache is not None))


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


def _over_ring(module: nn.Module, ring: Ring, now: ForwardPass, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
    """Returns the outputs of this rank's tokens, from passed states or from gathered rows.

    Of gathered rows, a rank runs only the tokens that its own tokens depend on. With a sharded cache it runs all of them,
    because generation continues from the state behind the last token. Other caches are the model's own, and no later call may
    use them.
    """
    layout, documents, cache = now.layout, now.documents, _cache_of(kwargs)
    assert layout is not None and documents is not None
    caching = isinstance(cache, ShardedCache)
    if getattr(module, _BY_DOCUMENTS).own is None and can_pass(module):
        return _as_returned(
            module, _by_states(module, ring, documents, layout, hidden, kwargs, cache if caching else None)
        )
    gathered = len(hidden) * layout.seq_len * hidden.shape[2] * hidden.element_size()
    if gathered > MOST_GATHERED:
        raise NotImplementedError(
            f"{type(module).__name__} passes no state, so each rank would hold whole rows: {len(hidden)} x {layout.seq_len} "
            f"tokens x {hidden.shape[2]} x {hidden.element_size()} bytes = {gathered}, above {MOST_GATHERED}: take shorter or "
            f"fewer rows"
        )
    if ring.rank == 0:
        _log_gathered(type(module).__name__)
    whole = ring.unshard(hidden, layout)
    if "position_ids" in inspect.signature(type(module).forward).parameters:
        kwargs = {**kwargs, "position_ids": ring.unshard(kwargs["position_ids"].expand(len(hidden), -1), layout)}
    pieces = _all(documents) if caching else list(_needed(documents, layout, ring.rank))
    return _as_returned(module, ring.shard(_apart(module, whole, pieces, kwargs, caching), layout))


@functools.cache
def _log_gathered(name: str) -> None:
    logger.warning(
        "%s passes no state from rank to rank: its rows are gathered, and each rank computes them up to its last token",
        name,
    )


def _by_states(
    module: nn.Module,
    ring: Ring,
    documents: Documents,
    layout: SequenceLayout,
    hidden: Tensor,
    kwargs: dict[str, Any],
    cache: ShardedCache | None,
) -> Tensor:
    """Returns the outputs of this rank's tokens from its own tokens and from the states before them.

    Args:
        cache: gets the states behind all tokens; then each row is one document.
    """
    kwargs, behind = _without_cache(kwargs), None
    if cache is not None:
        behind = StatesBehind()
        kwargs |= dict.fromkeys(cache_names(type(module).forward), behind)
    runs = runs_of(documents, layout)
    own = [run for run in runs if run.rank == ring.rank]
    outputs: dict[_Piece, Tensor] = {}
    chain = chain_of(ring, runs, len(documents), behind)
    whole = [run.held for run in own if behind is None and run.alone]
    linked = [] if chain is None else [chain.runs[number].held for number in chain.own]
    for group in _of_one_length(whole if own or chain is not None else [_UNREAD]):
        outputs |= _together(module, hidden, group, kwargs, behind=True)
    if chain is not None:
        # All ranks exchange states, even ranks without such runs.
        group = linked + [(0, 0, 0)] * (chain.most - len(linked))
        with running_with(chain=chain):
            outputs |= _together(module, hidden, group, kwargs, behind=False, longest=chain.longest)
    if behind is not None:
        behind.store_in(cache)
    return _assembled(hidden, whole + linked, outputs)


def _all(documents: Documents) -> list[_Piece]:
    return [(row, start, stop) for row, spans in enumerate(documents) for start, stop in spans]


def _needed(documents: Documents, layout: SequenceLayout, rank: int) -> Iterator[_Piece]:
    """Yields the documents with tokens of this rank, each up to the last of these tokens."""
    for row, spans in enumerate(documents):
        pieces = layout.rows[row][rank] if layout.rows else layout.pieces(rank)
        for start, stop in spans:
            last = max(
                (min(piece.stop, stop) for piece in pieces if piece.start < stop and piece.stop > start), default=0
            )
            if last:
                yield row, start, last


def _apart(module: nn.Module, hidden: Tensor, pieces: list[_Piece], kwargs: dict[str, Any], caching: bool) -> Tensor:
    """Returns a mixer's output for pieces of documents, each run separately, and zeros elsewhere.

    Args:
        hidden: [B, n, width].
        caching: whether the cache in `kwargs` gets the state behind the last piece of each batch row.

    Returns:
        [B, n, width]
    """
    last = [max((piece for piece in pieces if piece[0] == row), default=(row, 0, 0)) for row in range(len(hidden))]
    others = [piece for piece in pieces if not caching or piece not in last]
    outputs: dict[_Piece, Tensor] = {}
    for group in _of_one_length(others if pieces else [_UNREAD]):
        outputs |= _together(module, hidden, group, _without_cache(kwargs), behind=True)
    if caching:
        outputs |= _together(module, hidden, last, kwargs, behind=False)
    return _assembled(hidden, pieces, outputs)


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


def _without_borders(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _BORDERS}


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in kwargs.items() if not isinstance(value, Cache)}
    return kept | ({"use_cache": False} if "use_cache" in kept else {})


def _together(
    module: nn.Module, hidden: Tensor, group: list[_Piece], kwargs: dict[str, Any], behind: bool, longest: int = 0
) -> dict[_Piece, Tensor]:
    """Runs a mixer on pieces in one batch, padded to the longest, or to `longest`: behind them, or before them with a mask."""
    parameters = inspect.signature(type(module).forward).parameters
    first = list(parameters)[1]
    positions = kwargs.get("position_ids")
    kwargs = {name: value for name, value in kwargs.items() if name not in _NOT_TO_MIXERS}
    kwargs |= {
        name: None
        for name in _NOT_TO_MIXERS
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    }
    lengths = [stop - start for _, start, stop in group]
    longest = max(longest, *lengths)
    if not behind and min(lengths) < longest:
        if type(module).__name__ in STATES_INSIDE:
            raise ValueError(
                f"{type(module).__name__} would take padding into its state: the last documents of the batch rows have "
                f"{lengths} tokens: pass use_cache=False, or generate from rows of one length"
            )
        ones = [torch.ones(length, dtype=torch.int64, device=hidden.device) for length in lengths]
        kwargs["attention_mask"] = torch.stack([nn.functional.pad(x, (longest - len(x), 0)) for x in ones])
    batch = []
    for (row, start, stop), length in zip(group, lengths):
        padding = (0, longest - length) if behind else (longest - length, 0)
        batch.append(nn.functional.pad(hidden[row, start:stop], (0, 0, *padding)))
    if "position_ids" in parameters:
        # RecurrentGemma resets its state at position 0, and a document may begin elsewhere.
        assert isinstance(positions, Tensor)
        rows = positions.expand(len(hidden), -1)
        own = [rows[row, start:stop] for row, start, stop in group]
        lacking = [longest - length for length in lengths]
        kwargs["position_ids"] = torch.stack(
            [nn.functional.pad(x, (0, n) if behind else (n, 0), value=1) for x, n in zip(own, lacking)]
        )
    out = _own_forward(module, **{first: torch.stack(batch), **kwargs})
    out = out[0] if isinstance(out, tuple) else out
    return {
        piece: out[number, :length] if behind else out[number, longest - length :]
        for number, (piece, length) in enumerate(zip(group, lengths))
    }


def _of_one_length(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Yields pieces of about the same length together, the longest one of each group first."""
    group: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        if group and piece[2] - piece[1] < _ALIKE * (group[0][2] - group[0][1]):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _as_returned(module: nn.Module, out: Tensor) -> Any:
    """Returns an output as the layer of this mixer expects it."""
    return (out, None) if type(module).__name__ in _RETURN_TUPLES else out
