"""The bytes that the mixers of hybrid models move over a ring, from integers alone.

A mixer that passes states gathers a few numbers for each run (`state_runs.py`), however long the run is; other mixers gather
the rows of their hidden states.
"""

from __future__ import annotations

from typing import NamedTuple

from .layouts import SequenceLayout
from .problem import Documents
from .state_runs import linked_runs, runs_of
from .traffic import Bytes, RankTraffic


class StateNumbers(NamedTuple):
    """The numbers that a mixer gathers for one run.

    Attributes:
        channels: the channels of its convolution; 0 without a convolution.
        kernel: the tokens that an output of the convolution sees.
        sums: the numbers of its state, and of the factor of the state before the run; 0 without a state.
    """

    channels: int
    kernel: int
    sums: int

    def of_run(self, itemsize: int, accumulated: int, kept: bool = False) -> int:
        """Returns the bytes that one run adds to the gathered states.

        Args:
            itemsize: the bytes of a number of the model.
            accumulated: the bytes of a number of its sums, which are float32 or wider.
            kept: whether a cache takes the states behind the rows, which needs one more input of the convolution.
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
    """Returns the bytes that a rank moves and holds to gather equal parts of all ranks.

    In forward each rank sends its part to all other ranks. In backward it sends each rank the gradient of that rank's part.

    Args:
        own_bytes: the bytes of a rank's part, and of its gradient.
        without_gradients: bytes that come along in forward alone.

    Example:
        >>> gathered_traffic(100, world_size=4).forward
        Bytes(sent=300, received=300)
    """
    peers = world_size - 1
    forward, backward = ([peers * size] * 2 for size in (own_bytes + without_gradients, own_bytes))
    return RankTraffic(
        forward=Bytes(*forward),
        backward=Bytes(*backward),
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
    """Returns the bytes that every rank moves and holds in one layer whose mixer passes states.

    They depend on the number of runs, not on their lengths. Whole documents on one rank need nothing of other ranks.

    Args:
        documents: the documents of each batch row.
        itemsize, accumulated, kept: as for `StateNumbers.of_run`.

    Example:
        >>> layout = SequenceLayout("zigzag", 4096, 4)
        >>> mixer = StateNumbers(channels=8192, kernel=4, sums=delta_rule_sums(32, 128, 128))  # of Qwen3-Next
        >>> states_traffic(mixer, (((0, 4096),),), layout, 2, 4).forward  # bytes
        Bytes(sent=25460736, received=25460736)
    """
    _, most = linked_runs(runs_of(documents, layout), kept)
    return gathered_traffic(most * numbers.of_run(itemsize, accumulated, kept), layout.world_size)


def rows_traffic(
    width: int, batch_size: int, layout: SequenceLayout, itemsize: int, with_positions: bool = False
) -> RankTraffic:
    """Returns the bytes that every rank moves and holds in one layer whose mixer gathers rows.

    Args:
        width: the features of a row.
        itemsize: the bytes of a number.
        with_positions: whether each row has its position beside it, of 8 bytes.
    """
    tokens = batch_size * layout.local_len
    return gathered_traffic(tokens * width * itemsize, layout.world_size, 8 * tokens * with_positions)
