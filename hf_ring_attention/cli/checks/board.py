"""Small messages between the processes of a launch, over the store by which they found each other.

They take no part in the communication that is checked, so a process whose communication fails or hangs is still heard.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

#: The variables that a launcher sets for each process.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
            ValueError: an environment without the variables of launchers.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        missing = [name for name in _OF_LAUNCHERS if name not in os.environ]
        if missing:
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} announces several processes, but the launcher did not set "
                f"{', '.join(missing)}"
            )
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return cls(rank, world_size, store)

    def post(self, key: str, message: Any) -> None:
        """Leaves a message that JSON can hold under a key that was not used before; tuples arrive as lists."""
        if self.store is None:
            self._messages[key] = message
        else:
            self._messages.set(key, json.dumps(message))

    def has(self, key: str) -> bool:
        """Returns whether there is a message under this key; it does not wait."""
        return key in self._messages if self.store is None else bool(self._messages.check([key]))

    def read(self, key: str) -> Any:
        """Returns the message under a key that has one."""
        if self.store is None:
            return self._messages[key]
        return json.loads(self._messages.get(key))
