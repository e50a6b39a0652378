"""The batches of a loop by Accelerate, which goes on from a checkpoint in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader

import hf_ring_attention as ra


class Batches:
    """The batches of a prepared loader, epoch after epoch. A checkpoint holds how far each ring has read.

    Args:
        loader: the loader that `accelerator.prepare` returned; its sampler or its stream has an order for each epoch.
    """

    def __init__(self, accelerator: Accelerator, loader: DataLoader, ring: ra.Ring) -> None:
        self.accelerator, self.loader, self.ring = accelerator, loader, ring
        self.epoch = self.batches = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            self.loader.set_epoch(self.epoch)
            rest = self.accelerator.skip_first_batches(self.loader, self.batches) if self.batches else self.loader
            rest.set_epoch(self.epoch)
            for batch in rest:
                self.batches += 1
                yield batch
            if self.batches == 0:
                raise SystemExit("the data do not fill one batch: take more of them, or smaller batches or rows")
            self.epoch, self.batches = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and batch of each ring, on every process; a stream may give rings epochs of different lengths."""
        return {"places": gather_object([[self.epoch, self.batches]])[:: self.ring.world_size]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.batches = state["places"][self.ring.dp_rank]
