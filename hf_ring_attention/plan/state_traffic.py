"""The bytes that the mixers of hybrid models move over a ring: a few numbers for each run, or the rows of hidden states."""

from __future__ import annotations

from typing import NamedTuple

from .layouts import SequenceLayout
from .problem import Documents
from .state_runs import linked_runs, runs_of
from .traffic import Bytes, RankTraffic


class StateNumbers(NamedTuple):
    """The numbers that a mixer gathers for one run."""

    channels: int  # of its convolution; 0 without a convolution
    kernel: int  # the tokens that an output of the convolution sees
    sums: int  # the numbers of its state, and of the factor of the state before the run; 0 without a state

    def of_run(self, itemsize: int, accumulated: int, kept: bool = False) -> int:
        """Returns the bytes that one run adds: numbers of the model have `itemsize` bytes, and numbers of sums `accumulated`.

        If a cache takes the states behind the rows (`kept`), it needs one more input of the convolution.
        """
        return self.channels * (self.kernel - (not kept)) * itemsize + self.sums * accumulated


def delta_rule_sums(heads: int, key_dim: int, value_dim: int) -> int:
    """Returns the numbers of a delta rule: a state [heads, Dk, Dv], and its factor [Dk, Dk] for each head."""
    return heads * key_dim * (value_dim + key_dim)


def state_space_sums(heads: int, head_dim: int, state_size: int) -> int:
    """Returns the numbers of Mamba 2: a state [heads, P, N], and a decay of each head."""
    return heads * (head_dim * state_size + 1)


def selective_sums(channels: int, state_size: int) -> int:
    """Returns the numbers of Mamba: a state [channels, N], and a decay for each entry."""
    return 2 * channels * state_size


def gathered_traffic(own_bytes: int, world_size: int, without_gradients: int = 0) -> RankTraffic:
    """Returns the bytes that a rank moves and holds to gather equal parts of all ranks, and to send home their gradients.

    The bytes `without_gradients` come along in forward alone.
    """
    peers = world_size - 1
    forward, backward = peers * (own_bytes + without_gradients), peers * own_bytes
    return RankTraffic(
        forward=Bytes(forward, forward),
        backward=Bytes(backward, backward),
        buffers=(peers and world_size) * (own_bytes + max(own_bytes, without_gradients)),
    )


def states_traffic(
    numbers: StateNumbers,
    documents: Documents,
    layout: SequenceLayout,
    itemsize: int,
    accumulated: int,
    kept: bool = False,
) -> RankTraffic:
    """Returns the bytes that every rank moves and holds in one layer whose mixer passes states, whatever the lengths of runs.

    `StateNumbers.of_run` explains `itemsize`, `accumulated` and `kept`.
    """
    _, most = linked_runs(runs_of(documents, layout), kept)
    return gathered_traffic(most * numbers.of_run(itemsize, accumulated, kept), layout.world_size)


def rows_traffic(
    width: int, batch_size: int, layout: SequenceLayout, itemsize: int, with_positions: bool = False
) -> RankTraffic:
    """Returns the bytes that every rank moves and holds in one layer whose mixer gathers rows, some with their positions."""
    tokens = batch_size * layout.local_len
    return gathered_traffic(tokens * width * itemsize, layout.world_size, 8 * tokens * with_positions)
