"""The sequence-sharded loader: Accelerate's prepared loader, whose workers cut rows as the model would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ..compute.private import is_prepared, mark_prepared
from ..hf.forward_pass import CALL, RingCall
from ..hf.model.wrappers import models_of, runner_of, tokens_in
from ..hf.rows.cut import cut, rows_to_cut
from ..plan.patterns import Pattern, as_pattern
from ..ring.ring import Ring
from ..transport.agreement import digest

#: Labels stay whole: the model shifts and cuts them, and whoever counts them counts whole rows.
_WHOLE = ("labels", "shift_labels")


def prepare_data_loader(loader: Any, ring: Ring, pattern: Pattern | str | None) -> Any:
    """Does what `Ring.prepare_data_loader` describes."""
    accelerator, models = ring.accelerator, models_of(ring)
    if accelerator is None:
        raise ValueError("prepare_data_loader: the ring has no accelerator: make it by ra.Ring.from_accelerator")
    if not isinstance(loader, DataLoader) or is_prepared(loader):
        raise ValueError(f"prepare_data_loader: expected an unprepared torch DataLoader, got {type(loader).__name__}")
    if not models:
        raise ValueError("prepare_data_loader: no model has this ring: call ra.patch_model(model, ring=ring)")
    if ring.world_size == 1:
        prepared = accelerator.prepare_data_loader(loader)
        mark_prepared(prepared)
        return prepared
    if accelerator.dispatch_batches:
        raise ValueError(
            "prepare_data_loader: dispatch_batches=True has one process read for all, and here each cuts what it reads: leave "
            "it out, or use accelerator.prepare"
        )
    chosen = None if pattern is None else as_pattern(pattern, "prepare_data_loader")
    loader.collate_fn = partial(_collate_and_cut, loader.collate_fn, ring, runner_of(models[0]), chosen)
    prepared = accelerator.prepare_data_loader(loader, device_placement=False)  # else one process would read a stream
    mark_prepared(prepared)
    prepared.device = accelerator.device if accelerator.device_placement else None
    return prepared


def _collate_and_cut(collate: Any, ring: Ring, runner: Any, pattern: Pattern | None, rows: Any) -> Any:
    """Returns this rank's part of a batch of rows, with the entry for the model; batches of more than text stay whole."""
    batch = collate(rows)
    tokens = tokens_in(batch) if isinstance(batch, Mapping) else None
    if tokens is None or any(
        isinstance(x, Tensor) and x.is_floating_point() for x in batch.values() if x is not tokens
    ):
        return batch
    whole = rows_to_cut(runner, ring, batch, pattern)
    labels = {name: batch[name] for name in _WHOLE if name in batch}
    parts, whole = cut(runner, {k: x for k, x in batch.items() if k not in labels}, whole, ring)
    return {**parts, **labels, CALL: RingCall(rows=replace(whole, checksum=digest(tokens)))}
