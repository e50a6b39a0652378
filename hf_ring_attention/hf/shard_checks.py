"""Checks what a forward pass over shards is given: all ranks compare it before anything is computed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents
from ..ring.ring import Ring
from ..transport.agreement import digest
from .cache import ShardedCache
from .config import model_layout
from .documents import (
    documents_from_mask,
    packed_documents,
)
from .forward_pass import ForwardPass
from .numbered_documents import layout_of_runs, numbered_runs, tells_its_layout
from .positions import first_position, remembered_places
from .routers import asks_for_routers
from .shard_documents import ShardRun, check_not_local, documents_of_row, runs_of_shard
from .support import takes_shift_labels

#: The attribute of a model's runner that holds a weak reference to the cache that `prefill` filled last.
_PREFILLED = "_ring_dilated_prefilled"

#: The error of the loss that the running call of a head asked for; None if the loss is right.
WRONG_LOSS: ContextVar[ValueError | None] = ContextVar("ring_dilated_wrong_loss", default=None)


def remember_prefill(runner: nn.Module, cache: ShardedCache | None) -> None:
    """Keeps a weak reference to a cache, for the error of a model that gives it up while it generates; None forgets it."""
    setattr(runner, _PREFILLED, None if cache is None else weakref.ref(cache))


def switching_length(config: Any) -> int | None:
    """Returns the row length beyond which a model rotates all keys differently, so that no cache serves; None if none."""
    length = getattr(config, "original_max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return length if isinstance(length, int) and rope.get("rope_type") == "longrope" else None


def _given_up_cache(module: nn.Module, tokens: Tensor, kwargs: Mapping[str, Any]) -> ValueError | None:
    """Returns the error of a forward pass in place of a step, where Transformers' generate gave up its cache; else None.

    Transformers 5.24 passes the whole sequence, and 5.17 the last token alone, under a mask of the whole sequence.
    """
    mask = kwargs.get("attention_mask")
    row = max(tokens.shape[1], mask.shape[-1] if isinstance(mask, Tensor) else 0)
    length, reference = switching_length(module.config), getattr(module, _PREFILLED, None)
    cache = None if reference is None else reference()
    if length is None or cache is None or kwargs.get("use_cache") is not True:
        return None
    if not cache.get_seq_length() <= length < row:
        return None
    return ValueError(
        f"{type(module).__name__} rotates keys differently once a row is longer than original_max_position_embeddings = "
        f"{length} tokens, and generate gives up the sharded cache there to compute the whole sequence of "
        f"{row} tokens again: fill another cache with cache = ra.prefill(model, row), where row has all tokens so "
        f"far, {length + 1} at least, and go on from it"
    )


def _label_names(kwargs: Mapping[str, Any]) -> str:
    return " and ".join(n for n in ("labels", "start_positions", "end_positions") if kwargs.get(n) is not None)


def ignored_labels(module: PreTrainedModel, kwargs: Mapping[str, Any]) -> ValueError | None:
    """Returns the error of a model that would ignore its shift_labels; else None."""
    labels = _label_names(kwargs)
    if not labels or kwargs.get("shift_labels") is None or takes_shift_labels(module):
        return None
    return ValueError(
        f"{type(module).__name__} was given shift_labels, and computes a loss of its own from {labels} alone, neither shifted "
        f"nor divided by num_items_in_batch: call it without labels, and compute the loss from its logits: the sum of their "
        f"cross entropy with shift_labels, divided by the number of labels of all processes (ra.count_tokens) and multiplied "
        f"by the number of processes"
    )


def loss_of_shard(module: nn.Module, kwargs: Mapping[str, Any]) -> ValueError | None:
    """Returns the error of a loss that the model would compute from its shard alone; None if it would not."""
    name, labels = type(module).__name__, _label_names(kwargs)
    if labels and kwargs.get("shift_labels") is None:
        return ValueError(
            f"{name} was given {labels} for a shard of each row, and would shift and average "
            f"them in the shard alone: cut batches with ring.prepare_data_loader or ra.shard_batch, which shift labels before "
            f"they cut, and compute the loss with ra.next_token_loss; or shift labels first and pass them as shift_labels too"
        )
    # fused_lm_head asks for TRL's forward, which leaves the loss to its caller.
    if labels and kwargs.get("num_items_in_batch") is None and not kwargs.get("fused_lm_head"):
        return ValueError(
            f"{name} was given labels of a shard without num_items_in_batch, and would average the shard "
            f"alone: compute the loss with ra.next_token_loss, or pass the number of labels of all processes "
            f"(ra.count_tokens) as num_items_in_batch, and multiply the loss by the number of processes"
        )
    return None


def checked_step(
    module: nn.Module, ring: Ring, cache: ShardedCache, tokens: Tensor | None, kwargs: Mapping[str, Any]
) -> ForwardPass:
    """Checks a step after a sharded prefill: all ranks must have the same tokens, positions and mask."""
    mask, length = kwargs.get("attention_mask"), 0
    with ring.agreement("a step of generation", by_digest=True) as call:
        if tokens is None:
            raise ValueError("a forward pass needs input_ids or inputs_embeds")
        length, held = tokens.shape[1], cache.get_seq_length()
        call.same("the tokens of a step", digest(tokens))
        if tokens.shape[0] != cache.num_rows:
            raise ValueError(
                f"the cache holds {cache.num_rows} batch rows, and {tokens.shape[0]} came: for beams or several answers, call "
                f"cache.batch_repeat_interleave(beams) before generate"
            )
        call.same("position_ids of a step", digest(kwargs.get("position_ids")))
        call.same("attention_mask of a step", digest(mask))
        mask_len = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else held + length
        if length == 0 or mask_len != held + length:
            raise ValueError(
                f"the cache holds {held} tokens, and {length} new ones came, so an attention_mask has {held} + {length} = "
                f"{held + length}, not {mask_len}, and there must be new ones: generate takes the whole sequence, the tokens "
                f"of the cache and those after it: model.generate(torch.cat([document, question], 1), cache=cache)"
            )
        if isinstance(mask, Tensor):
            documents_from_mask(mask != 0)
    return ForwardPass(module.config, held=cache.held(ring.rank, length))


def checked_shard(
    module: nn.Module, ring: Ring, tokens: Tensor | None, cache: Any, kwargs: Mapping[str, Any]
) -> ForwardPass:
    """Checks the shards of whole sequences, and finds their documents by their positions."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    wrong_loss = WRONG_LOSS.get()
    WRONG_LOSS.set(None)
    # Transformers' generate, which goes on from a sharded cache, numbers the tokens of all models from 0.
    first = first_position(module) if cache is None else 0
    ends: Tensor | None = kwargs.get("cu_seq_lens_q")
    with ring.agreement("a forward pass of a model") as call:
        if wrong_loss is not None:
            raise wrong_loss
        if tokens is None:
            raise ValueError("a sharded forward pass needs input_ids or inputs_embeds")
        cache_error = None if cache is not None else _given_up_cache(module, tokens, kwargs)
        if cache_error is not None:
            raise cache_error
        if cache is not None and not isinstance(cache, ShardedCache):
            raise ValueError(
                f"a sharded forward pass takes no {type(cache).__name__}: to generate, fill a sharded cache with "
                f"cache = ra.prefill(model, input_ids), then call model.generate(longer_input_ids, cache=cache)"
            )
        numbers = kwargs.get("seq_idx") if cache is None else None
        by_numbers = numbers is not None and tells_its_layout(ring)
        layout = model_layout(module.config, ring, tokens.shape[1] * ring.world_size) if cache is None else cache.layout
        call.same("the shape of the input", tuple(tokens.shape[:2]))
        call.same("layout", layout)
        call.same("whether seq_idx tells the layout", by_numbers)
        call.same("whether attention_mask is given", mask is not None)
        call.same("whether the model trains", module.training)
        call.same("output_router_logits", asks_for_routers())
        call.same("output_attentions", bool(kwargs.get("output_attentions")))
        if 0 in tokens.shape[:2]:
            raise ValueError(f"a sharded forward pass needs tokens, got {tuple(tokens.shape)}")
        if ends is not None:
            packed_documents(1, int(ends[-1]), ends, None)
            call.same("cu_seq_lens_q", tuple(ends.tolist()))
        if by_numbers:
            assert numbers is not None
            runs = numbered_runs(positions, mask, numbers, first)
            if tuple(numbers.shape) != tuple(tokens.shape[:2]):
                raise ValueError(
                    f"seq_idx of a shard must have the shape of its tokens, {tuple(tokens.shape[:2])}, got "
                    f"{tuple(numbers.shape)}: shard them alike"
                )
            call.message = runs, int(positions.max())  # type: ignore[union-attr]
        else:
            call.message = runs_of_shard(
                positions, mask, kwargs.get("seq_idx"), layout, ring.rank, tokens.shape[0], first
            )
    by_rank: list[tuple[Any, int]] = call.answers
    if by_numbers:
        layout, documents = layout_of_runs([runs for runs, _ in by_rank])
    else:
        documents = _documents_of_shards([runs for runs, _ in by_rank], mask is not None, layout, first)
    if ends is not None:
        _check_ends(ends, documents, layout)
        length = int(ends[-1])  # The row ends here; the rest fills it up to its layout.
        documents = tuple(tuple((start, stop) for start, stop in row if start < length) for row in documents)
    elif numbers is None:
        check_not_local(documents, layout)
    last_position, places = max(last for _, last in by_rank), remembered_places(module)
    if places is not None and last_position - first >= places:
        raise ValueError(
            f"{type(module).__name__} has learned positions for {places} tokens, and a row has a token at position "
            f"{last_position}, where the first one is at {first}: cut rows to {places} tokens, or take a model with rotary "
            f"positions"
        )
    return ForwardPass(module.config, documents=documents, layout=layout, last_position=last_position)


def _documents_of_shards(
    by_rank: list[list[list[ShardRun]]], masked: bool, layout: SequenceLayout, first: int
) -> Documents:
    """Returns the documents of whole rows, of the runs of each rank in each row."""
    rows = (sorted(run for shard in by_rank for run in shard[row]) for row in range(len(by_rank[0])))
    return tuple(documents_of_row(row, runs, masked, layout, first) for row, runs in enumerate(rows))


def _check_ends(ends: Tensor, documents: Documents, layout: SequenceLayout) -> None:
    """Raises ValueError if cu_seq_lens_q is not that of the whole sequence, as its positions describe it."""
    length = int(ends[-1])
    within = tuple(tuple((start, stop) for start, stop in row if start < length) for row in documents)
    if (
        length <= layout.padded_len - layout.num_pieces
        or length > layout.padded_len
        or packed_documents(len(documents), length, ends, None) != within
    ):
        raise ValueError(
            f"cu_seq_lens_q is {ends.tolist()}, and position_ids describe documents {documents} of the whole sequence of "
            f"{layout.padded_len} tokens: pass the cu_seq_lens of the whole sequence, not of the shard, or none"
        )


def sharded_without_documents(module: nn.Module) -> str:
    """Returns the error text for a layer that was not given the mask of a sharded forward pass."""
    return (
        f"{type(module).__name__} of a sharded model was called without the mask that ring_dilated made for it, so the "
        f"documents of the whole sequence are unknown: call the model, not its layers; a model that makes its masks itself "
        f"cannot be sharded; if Accelerate has a cp_size, make the ring by Ring.from_accelerator before accelerator.prepare, "
        f"which would otherwise drop the masks"
    )
