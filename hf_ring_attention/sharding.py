"""The forward passes of a patched model: what they must be given, above all where rows are sharded over a ring.

Hooks tell the masks where documents begin and end in the whole row. On a ring they compare the calls of all ranks before
anything is computed, and correct the few modules that would take a shard for a row.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from .caches import ShardedCache
from .configuration import NAME, model_layout
from .gate import decoder_of, runner_of
from .layouts import SequenceLayout
from .masks import FORWARD_PASS, ForwardPass, documents_from_mask, packed_documents
from .plans import Documents
from .ring import Ring

#: Attribute of a model's modules that holds their ring.
_RING = "_ring_dilated_ring"
#: What is wrong with the losses that the running call of a head asked for.
_WRONG_LOSS: ContextVar[ValueError | None] = ContextVar("ring_dilated_wrong_loss", default=None)
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def attached_ring(module: nn.Module) -> Ring | None:
    """The ring that `patch_model` gave to a model, or to one of its modules."""
    return getattr(module, _RING, None)


def attach_ring(model: PreTrainedModel, ring: Ring | None) -> None:
    """Makes this the ring of the model's attention layers; None makes its rows whole ones again."""
    runner = runner_of(model)
    for module in model.modules():
        for hooks, marks in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        ):
            for number in [number for number, hook in hooks.items() if getattr(hook, "__module__", None) == __name__]:
                del hooks[number]
                for marked in marks:
                    marked.pop(number, None)
        setattr(module, _RING, None)
    for module in decoder_of(model).modules():
        setattr(module, _RING, ring)
    setattr(model, _RING, ring)
    runner.register_forward_pre_hook(_before_forward, with_kwargs=True)
    runner.register_forward_hook(_after_forward, always_call=True)
    if ring is None or ring.world_size == 1:
        return
    if model is not runner:
        model.register_forward_pre_hook(_before_head, with_kwargs=True)
    for name, module in model.base_model.named_modules():
        if _depends_on_length(module):
            module.register_forward_pre_hook(_with_last_position, with_kwargs=True)
            module.register_forward_hook(_without_last_position)
        if name == "pooler":
            module.register_forward_pre_hook(_with_first_token)


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any(kind in _LENGTH_DEPENDENT_ROPE for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


# ---- before and after a forward pass


class _Run(NamedTuple):
    """Tokens [start, stop) of a row that are neighbours in position too; `origin`: index of their position 0."""

    start: int
    stop: int
    origin: int


@torch.compiler.disable(reason="it compares the calls of all ranks")
def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Says what the masks of a forward pass need, and checks a sharded one.

    Raises:
        ValueError: on every rank, where any rank's call contradicts its layout, or the ranks' calls each other.
    """
    FORWARD_PASS.set(None)
    if args:
        kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    ring, cache = attached_ring(module), kwargs.get("past_key_values")
    if ring is None or ring.world_size == 1:
        FORWARD_PASS.set(_packed_rows(module, tokens, kwargs) or ForwardPass())
        return
    if isinstance(cache, ShardedCache) and cache.get_seq_length() > 0:
        FORWARD_PASS.set(_checked_step(ring, cache, tokens))
    else:
        FORWARD_PASS.set(_checked_shard(module, ring, tokens, cache, kwargs))


@torch.compiler.disable(reason="it belongs to _before_forward")
def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Ends what `_before_forward` began.

    Raises:
        RuntimeError: a model whose layers never attended by ring_dilated, so that each rank saw its shard alone.
    """
    forward_pass = FORWARD_PASS.get()
    FORWARD_PASS.set(None)
    ring = attached_ring(module)
    if forward_pass is None or output is None:  # no output: an error is on its way
        return
    sharded = ring is not None and ring.world_size > 1
    name, implementation = type(module).__name__, getattr(module.config, "_attn_implementation", None)
    if not forward_pass.attended and sharded:
        raise RuntimeError(
            f"no layer of {name} attended by ring_dilated ({implementation!r} is set), so each rank saw nothing but its "
            f"shard: call ra.patch_model; if that was done, {name} cannot be sharded: use one process (ring=None)"
        )
    if not forward_pass.attended and implementation == NAME:
        raise RuntimeError(
            f"no layer of {name} attended by ring_dilated: it computes attention of its own, and would ignore the pattern: "
            f"use 'eager'"
        )
    if sharded and getattr(output, "pooler_output", None) is not None and not hasattr(module, "pooler"):
        raise NotImplementedError(
            f"{name} makes its pooler_output from a token that it looks for in the row, of which each rank "
            f"has a shard: use one process (ring=None)"
        )


def _before_head(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Finds losses of a shard alone. `_before_forward` raises what is found, on every rank."""
    if args:
        kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    given = [name for name in ("labels", "start_positions", "end_positions") if kwargs.get(name) is not None]
    error = None
    if given and kwargs.get("shift_labels") is None:
        error = ValueError(
            f"{type(module).__name__} was given {' and '.join(given)} for a shard of each row, and would shift and average "
            f"them in the shard alone: cut batches with ra.shard_batch, which shifts labels before it cuts, and compute "
            f"ra.next_token_loss from the logits; or shift labels first and pass them as shift_labels too"
        )
    _WRONG_LOSS.set(error)


def _packed_rows(module: nn.Module, tokens: Tensor | None, kwargs: Mapping[str, Any]) -> ForwardPass | None:
    """Whole rows whose positions restart: not every model looks for packing itself, as Transformers defines it.

    Raises:
        ValueError: packed rows for a model that numbers its tokens itself.
    """
    positions = kwargs.get("position_ids")
    others = (kwargs.get("attention_mask"), kwargs.get("past_key_values"))
    if tokens is None or positions is None or positions.dim() != 2 or any(other is not None for other in others):
        return None
    numbers = find_packed_sequence_indices(positions)
    if numbers is not None and "position_ids" not in inspect.signature(module.forward).parameters:
        raise ValueError(
            f"{type(module).__name__} was given packed rows by position_ids, which it does not take: it numbers the tokens "
            f"of a row itself, so it would number documents wrongly: pass one document a row, padded"
        )
    return None if numbers is None else ForwardPass(documents_from_mask((numbers + 1).expand(len(tokens), -1)))


def _checked_step(ring: Ring, cache: ShardedCache, tokens: Tensor | None) -> ForwardPass:
    """A step after a sharded prefill: every rank comes with the same tokens."""
    said: dict[str, Any] = {}
    error: Exception | None = None
    length = 0
    if tokens is None:
        error = ValueError("a forward pass needs input_ids or inputs_embeds")
    else:
        length = tokens.shape[1]
        content = tokens.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        said["the tokens of a step"] = (tuple(tokens.shape), hashlib.sha256(content).hexdigest())
    ring.agree_cheaply(said, error, torch.device("cpu"))
    return ForwardPass(held=cache.held(ring.rank, length))


def _checked_shard(
    module: nn.Module, ring: Ring, tokens: Tensor | None, cache: Any, kwargs: Mapping[str, Any]
) -> ForwardPass:
    """Shards of whole rows: their positions say which documents there are."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    error = _WRONG_LOSS.get()
    _WRONG_LOSS.set(None)
    agreed: dict[str, Any] = {}
    told: tuple[list[list[_Run]], int] | None = None
    try:
        if error is not None:
            raise error
        if tokens is None:
            raise ValueError("a sharded forward pass needs input_ids or inputs_embeds")
        if cache is not None and not isinstance(cache, ShardedCache):
            raise ValueError(
                f"a sharded forward pass takes no {type(cache).__name__}: to generate, fill a sharded cache with "
                f"cache = ra.prefill(model, input_ids), then call model.generate(longer_input_ids, past_key_values=cache)"
            )
        layout = model_layout(module.config, ring, tokens.shape[1] * ring.world_size) if cache is None else cache.layout
        agreed = {
            "the shape of the input": tuple(tokens.shape[:2]),
            "layout": layout,
            "whether attention_mask is given": mask is not None,
            "whether the model trains": module.training,
            "output_attentions": bool(kwargs.get("output_attentions")),
        }
        ends = kwargs.get("cu_seq_lens_q")
        if ends is not None:
            agreed["cu_seq_lens_q"] = tuple(ends.tolist())
        told = _runs_of_shard(
            positions, mask, kwargs.get("seq_idx"), layout, ring.rank, tokens.shape[0], first_position(module)
        )
    except ValueError as refused:
        error = refused
    by_rank = ring.agree(agreed, error, tell=told)
    batch = len(by_rank[0][0])
    rows = [sorted(run for runs, _ in by_rank for run in runs[row]) for row in range(batch)]
    first = first_position(module)
    documents = tuple(_documents_of_row(row, runs, mask is not None, layout, first) for row, runs in enumerate(rows))
    if ends is None and kwargs.get("seq_idx") is None:
        _check_not_local(documents, layout)
    if ends is not None:  # it also tells where the row ends that was padded to its layout
        length = int(ends[-1])
        documents = tuple(tuple((start, stop) for start, stop in row if start < length) for row in documents)
    if ends is not None and packed_documents(len(documents), length, ends, None) != documents:
        raise ValueError(
            f"cu_seq_lens_q is {ends.tolist()}, and position_ids describe documents {documents} of the whole row: pass "
            f"the cu_seq_lens of the whole row, or none"
        )
    return ForwardPass(documents, layout, last_position=max(last for _, last in by_rank))


def first_position(module: nn.Module) -> int:
    """The position id of a row's first token: 0, but behind the padding's id where embeddings number them so."""
    for embeddings in (getattr(module, "embeddings", None), module):
        padding = getattr(embeddings, "padding_idx", None)
        if isinstance(padding, int) and hasattr(embeddings, "create_position_ids_from_input_ids"):
            return padding + 1
    return 0


def _remedy(layout: SequenceLayout) -> str:
    return (
        f"pass position_ids=ring.shard(positions, layout), where positions [batch, seq_len] count each document from 0, "
        f"and input_ids sharded likewise, with the layout of ring.layout_for(seq_len, pattern) for the model's pattern "
        f"({layout.kind} here)"
    )


def _runs_of_shard(
    positions: Tensor | None,
    mask: Tensor | None,
    seq_idx: Tensor | None,
    layout: SequenceLayout,
    rank: int,
    batch: int,
    first: int,
) -> tuple[list[list[_Run]], int]:
    """Per batch row the runs of a shard's tokens, without padding; and the shard's last position.

    Raises:
        ValueError: positions that are missing or of another shape, a mask that is not [batch, tokens], or seq_idx that
            changes where positions go on.
    """
    if positions is None:
        raise ValueError(
            f"position_ids are missing, and a model would number the tokens of every shard from 0: {_remedy(layout)}"
        )
    if positions.dim() > 2 or positions.shape[-1] != layout.local_len:
        raise ValueError(
            f"position_ids must be [batch, {layout.local_len}], as many as the shard has tokens, got "
            f"{tuple(positions.shape)}: {_remedy(layout)}"
        )
    if mask is not None and tuple(mask.shape) != (batch, layout.local_len):
        raise ValueError(
            f"a sharded forward pass takes a mask [{batch}, {layout.local_len}], sharded as input_ids, got "
            f"{tuple(mask.shape)}"
        )
    index = torch.tensor(layout.positions(rank))
    positions = positions.cpu().reshape(-1, layout.local_len).expand(batch, -1) - first
    origin = index - positions
    valid = (index < layout.seq_len).expand(batch, -1)
    if mask is not None:
        valid = valid & (mask != 0).cpu()
    cut = (origin[:, 1:] != origin[:, :-1]) | (valid[:, 1:] != valid[:, :-1]) | (index[1:] != index[:-1] + 1)
    if seq_idx is not None:
        changed = ((seq_idx[:, 1:] != seq_idx[:, :-1]).cpu() & ~cut).nonzero()
        if len(changed):
            row, token = changed[0].tolist()
            raise ValueError(
                f"seq_idx says that a document begins at token {token + 1} of rank {rank}, where position_ids go on from "
                f"{int(positions[row, token])} to {int(positions[row, token + 1])} (batch row {row})"
            )
    rows = []
    for row in range(batch):
        starts = [0, *(torch.nonzero(cut[row]).flatten() + 1).tolist()]
        rows.append(
            [
                _Run(int(index[start]), int(index[stop - 1]) + 1, int(origin[row, start]))
                for start, stop in zip(starts, [*starts[1:], layout.local_len])
                if valid[row, start]
            ]
        )
    return rows, int(positions.max()) + first


def _documents_of_row(
    row: int, runs: Iterable[_Run], masked: bool, layout: SequenceLayout, first: int
) -> tuple[tuple[int, int], ...]:
    """The documents of a whole row, from the runs of all ranks.

    Raises:
        ValueError: positions that do not count each document from its first token.
    """
    merged: list[_Run] = []
    for run in runs:
        if merged and merged[-1].stop == run.start and merged[-1].origin == run.origin:
            merged[-1] = _Run(merged[-1].start, run.stop, run.origin)
        else:
            merged.append(run)
    begins = f", where the first token of a row has position {first}" if first else ""
    for number, run in enumerate(merged):
        if masked and number and run.start > merged[number - 1].stop and run.origin != run.start:
            raise ValueError(
                f"batch row {row} of the attention mask has padding inside a document: tokens {merged[number - 1].stop} to "
                f"{run.start - 1} of the whole row; ring_dilated takes padding before and after a document"
            )
        # Padding on the left of a row may have been counted.
        counts_padding = masked and number == 0 and 0 <= run.origin <= run.start
        # A row that was padded to its layout ends in fewer tokens than it has pieces, numbered below its first one. (Those
        # that have its number are documents of one token, which nobody else sees.)
        if not masked and run.start > layout.padded_len - layout.num_pieces and run.origin > run.start:
            merged = merged[:number]
            break
        if run.origin != run.start and not counts_padding:
            raise ValueError(
                f"position_ids contradict the layout: in batch row {row}, tokens {run.start} to {run.stop - 1} of the "
                f"whole row have positions {first + run.start - run.origin} to {first + run.stop - 1 - run.origin}, but "
                f"nothing before them ends at position {first + run.start - run.origin - 1}{begins}: {_remedy(layout)}"
            )
    return tuple((run.start, run.stop) for run in merged)


def _check_not_local(documents: Documents, layout: SequenceLayout) -> None:
    """Refuses rows in which every rank has one document: they look the same as positions that every rank counts from 0.

    Raises:
        ValueError: a row like that.
    """
    for row, runs in enumerate(documents):
        shards = [start // layout.local_len for start, _ in runs]
        within = all(start // layout.local_len == (stop - 1) // layout.local_len for start, stop in runs)
        if layout.kind == "contiguous" and within and len(runs) > 1 and len(set(shards)) == len(shards):
            raise ValueError(
                f"position_ids contradict the layout, or every rank happens to have one packed document of its own: in "
                f"batch row {row} every shard of {layout.local_len} tokens counts from 0: {_remedy(layout)}; if they are "
                f"packed documents, say so by cu_seq_lens_q or seq_idx, as Transformers' collators do"
            )


# ---- modules that take a shard for a row


@torch.compiler.disable(reason="it reads what _before_forward found")
def _with_last_position(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives RoPE that depends on the row's length one more column, with the row's last position."""
    sharded = FORWARD_PASS.get()
    if sharded is None:
        raise RuntimeError(
            f"{type(module).__name__} depends on the length of the whole row, and was called outside the forward pass of "
            f"the sharded model"
        )
    if sharded.last_position is None:
        return None  # a step, whose positions all ranks have
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    column = torch.full_like(positions[..., :1], sharded.last_position)
    positions = torch.cat([positions, column], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


@torch.compiler.disable(reason="it belongs to _with_last_position")
def _without_last_position(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    sharded = FORWARD_PASS.get()
    if sharded is None or sharded.last_position is None:
        return output
    return tuple(x[:, :-1] for x in output) if isinstance(output, tuple) else output[:, :-1]


@torch.compiler.disable(reason="it asks another rank")
def _with_first_token(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gives a pooler, which reads the first token [B, D] of [B, n, D], that of the whole row: the first one of rank 0."""
    ring: Ring = getattr(module, _RING)
    states: Tensor = args[0]
    taken = states.dim() == 2
    first = ring.first_token(states.unsqueeze(1) if taken else states)
    return (first.squeeze(1) if taken else first, *args[1:])


def sharded_without_documents(module: nn.Module) -> str:
    """What to say of a layer that was not given a mask of a sharded forward pass."""
    return (
        f"{type(module).__name__} of a sharded model was called without the mask that ring_dilated made for it, so the "
        f"documents of the whole row are unknown: call the model, not its layers; a model that makes its masks itself "
        f"cannot be sharded"
    )
