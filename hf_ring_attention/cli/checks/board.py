"""Small messages between the processes of a launch, over the store by which they found each other.

They take no part in the communication that is checked, so a process whose communication fails or hangs is still heard.
"""

from __future__ import annotations

import io
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

#: What a launcher tells each process that it starts.
_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Board:
    """The place where each process leaves messages for the others.

    Attributes:
        store: the store itself, for a process group; None for a process alone.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, store: Any = None) -> None:
        self.rank, self.world_size, self.store = rank, world_size, store
        # The messages have a connection of their own: a process group that waits for another one blocks the first.
        self._messages: Any = {} if store is None else dist.PrefixStore("hf_ring_attention/check", store.clone())

    @classmethod
    def join(cls, timeout: float) -> Board:
        """Meets the processes that the launcher announces in the environment; without a launcher, this process is alone.

        Raises:
            RuntimeError: processes that do not come within `timeout` seconds.
            ValueError: an environment that lacks what launchers tell.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        missing = [name for name in _TOLD if name not in os.environ]
        if missing:
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that a launcher started several processes, and it did not set "
                f"{', '.join(missing)}"
            )
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return cls(rank, world_size, store)

    def post(self, key: str, message: Any) -> None:
        """Leaves a message of numbers, texts, tuples, lists, sets and dicts under a key that was not used before."""
        if self.store is None:
            self._messages[key] = message
        else:
            buffer = io.BytesIO()
            torch.save(message, buffer)
            self._messages.set(key, buffer.getvalue())

    def has(self, key: str) -> bool:
        """Returns whether there is a message under this key; it does not wait."""
        return key in self._messages if self.store is None else bool(self._messages.check([key]))

    def read(self, key: str) -> Any:
        """Returns the message under a key that has one."""
        if self.store is None:
            return self._messages[key]
        # Whoever reaches the store's port can write to it, so what is read there must not be able to run code.
        return torch.load(io.BytesIO(self._messages.get(key)), weights_only=True)
