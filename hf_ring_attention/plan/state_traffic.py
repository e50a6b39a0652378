"""The bytes that the mixers of hybrid models move over a ring, from integers alone.

A mixer that passes states gathers a few numbers for each run (`state_runs.py`), however long the run is; one that does not
gathers the rows of its hidden states.
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
        channels: those of its convolution; 0 without one.
        kernel: the tokens that an output of the convolution sees.
        sums: the numbers of its state, and of what multiplies the state before the run; 0 without a state.
    """

    channels: int
    kernel: int
    sums: int

    def of_run(self, itemsize: int, accumulated: int, kept: bool = False) -> int:
        """Returns the bytes that one run adds to what all ranks gather.

        Args:
            itemsize: the bytes of a number of the model.
            accumulated: the bytes of a number of its sums, which are in float32 at least.
            kept: whether a cache takes the states behind the rows; it has one more input than a convolution looks back.
        """
        return self.channels * (self.kernel - (not kept)) * itemsize + self.sums * accumulated


def delta_rule_sums(heads: int, key_dim: int, value_dim: int) -> int:
    """Returns the numbers of a delta rule: a state [heads, Dk, Dv], and the [Dk, Dk] of each head that multiplies it."""
    return heads * key_dim * (value_dim + key_dim)


def state_space_sums(heads: int, head_dim: int, state_size: int) -> int:
    """Returns the numbers of Mamba 2: a state [heads, P, N], and a decay of each head."""
    return heads * (head_dim * state_size + 1)


def selective_sums(channels: int, state_size: int) -> int:
    """Returns the numbers of Mamba: a state [channels, N], each of whose entries decays by itself."""
    return 2 * channels * state_size


def gathered_traffic(own_bytes: int, world_size: int, without_gradients: int = 0) -> RankTraffic:
    """Returns what a rank moves and holds to gather as many bytes of every rank.

    In forward each rank sends its part to all others. In backward it sends each of them the gradient of that one's part.

    Args:
        own_bytes: the bytes of a rank's part, and of its gradient.
        without_gradients: bytes that come along in forward alone.

    Example:
        >>> gathered_traffic(100, world_size=4).forward
        Bytes(sent=300, received=300)
    """
    others = world_size - 1
    forward, backward = ([others * size] * 2 for size in (own_bytes + without_gradients, own_bytes))
    return RankTraffic(
        forward=Bytes(*forward),
        backward=Bytes(*backward),
        buffers=(others and world_size) * (own_bytes + max(own_bytes, without_gradients)),
    )


def states_traffic(
    numbers: StateNumbers,
    documents: Documents,
    layout: SequenceLayout,
    itemsize: int,
    accumulated: int,
    kept: bool = False,
) -> RankTraffic:
    """Returns what every rank moves and holds in one layer whose mixer passes states.

    It depends on how many runs the ranks have, not on their lengths. Whole documents on one rank need nothing of others.

    Args:
        documents: those of each batch row.
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
    """Returns what every rank moves and holds in one layer whose mixer gathers rows.

    Args:
        width: the features of a row.
        itemsize: the bytes of a number.
        with_positions: whether each row has its position beside it, of 8 bytes.
    """
    tokens = batch_size * layout.local_len
    return gathered_traffic(tokens * width * itemsize, layout.world_size, 8 * tokens * with_positions)
