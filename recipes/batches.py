"""The batches of a loop with Accelerate, which can resume from a checkpoint in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


class Batches:
    """The batches of a prepared loader, epoch after epoch. A checkpoint holds how far all rings have read.

    Args:
        loader: the loader that `accelerator.prepare` returned; its sampler or its stream has an order for each epoch.
    """

    def __init__(self, accelerator: Accelerator, loader: DataLoader) -> None:
        self.accelerator, self.loader = accelerator, loader
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
        """Returns the epoch, and the number of its batches that were read."""
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.batches = state["epoch"], state["batches"]
