"""What layers exchange over a ring: bytes and buffers of every transport, in exact integers from the plans of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ...plan.choices import Decision, check_choices, decide_call, decide_layout
from ...plan.heads import group_size, heads_fit, heads_pairs, heads_traffic
from ...plan.layouts import SequenceLayout
from ...plan.patterns import Pattern
from ...plan.plans import pairs_by_tokens
from ...plan.problem import Problem, RingSettings
from ...plan.state_runs import linked_runs, runs_of
from ...plan.state_traffic import rows_traffic, states_traffic
from ...plan.traffic import RankTraffic, RowBytes, collective_traffic, ring_traffic
from ..hybrid_config import ModelMixers
from .model_shape import ModelShape
from .parts import TrainingSetting

#: The plan that a line's integers come from.
FROM_THE_PLAN = "exact, from the plans of all ranks (plan/traffic.py)"
FROM_THE_RUNS = "exact, from the runs of all ranks (plan/state_traffic.py)"


class ChosenBuffers(NamedTuple):
    """The bytes that a rank holds of others by one transport, and where the number comes from."""

    transport: str
    bytes: int
    source: str


class RunsOfRing(NamedTuple):
    """The runs along which states pass in a ring: the most on a rank, the tokens of the longest one, and how many are linked.

    A rank computes its runs in one batch, whose rows are as long as its longest run.
    """

    most: int
    longest: int
    linked: int


@dataclass(frozen=True)
class LayerExchange:
    """The exchange of the attention of one layer.

    Attributes:
        decision: the transport, with its reason.
        buffers: by transport, the most bytes that a rank holds of others.
        received: by transport, the bytes that the busiest rank receives in forward and in backward.
        pairs: the query-key pairs of the busiest rank, over all heads and rows.
        pairs_of_all: those of all ranks.
    """

    problem: Problem
    layout_decision: Decision
    decision: Decision
    buffers: dict[str, int]
    received: dict[str, tuple[int, int]]
    pairs: int
    pairs_of_all: int

    def chosen(self) -> ChosenBuffers:
        """Returns the buffers of the transport that the call takes."""
        choice = self.decision.choice
        return ChosenBuffers(choice, self.buffers.get(choice, 0), FROM_THE_PLAN)


def exchange_of_pattern(
    shape: ModelShape, setting: TrainingSetting, pattern: Pattern, transports: tuple[str, ...] | None = None
) -> LayerExchange:
    """Returns the exchange of a layer with this pattern.

    Args:
        transports: those whose buffers are counted beside the chosen one's; None for all.

    Raises:
        ValueError: what `Ring` and `ring_attention` would refuse.
    """
    attention = shape.attention
    return _exchange_of_heads(
        (attention.num_heads, attention.num_kv_heads, attention.head_dim + attention.value_dim),
        attention.base,
        pattern,
        setting,
        transports,
    )


@lru_cache(maxsize=64)
def _exchange_of_heads(
    sizes_of_heads: tuple[int, int, int],
    base: Pattern,
    pattern: Pattern,
    setting: TrainingSetting,
    transports: tuple[str, ...] | None,
) -> LayerExchange:
    num_heads, num_kv_heads, widths = sizes_of_heads
    ring_size, seq_len = setting.ring_size, setting.seq_len
    check_choices(setting.layout, setting.transport, ring_size, setting.heads)
    rows = (((0, seq_len),),) * setting.batch_size
    # All layers have the layout of the layers without a window of their own.
    layout, layout_decision = decide_layout(
        setting.layout, seq_len, ring_size, base, None, setting.transport, setting.heads
    )
    problem = Problem(
        pattern=pattern,
        layout=layout,
        documents=rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        settings=RingSettings(heads=setting.heads),
    )
    sizes = RowBytes(widths * setting.number_bytes, widths * 4)
    problem, decision = decide_call(setting.transport, problem, sizes)
    ranks = range(ring_size)
    ways: dict[str, Callable[[Problem, int, RowBytes], RankTraffic]] = {
        "ring": ring_traffic,
        "collective": collective_traffic,
    }
    if heads_fit(num_heads, num_kv_heads, group_size(problem)):
        ways["heads"] = heads_traffic
    wanted = {decision.choice, *(ways if transports is None else transports)}
    buffers, received = {"local": 0}, {"local": (0, 0)}
    for name, traffic_of in ways.items():
        if name in wanted and ring_size > 1:
            traffic = [traffic_of(problem, rank, sizes) for rank in ranks]
            buffers[name] = max(one.buffers for one in traffic)
            received[name] = (max(x.forward.received for x in traffic), max(x.backward.received for x in traffic))
    pairs_of_rank = heads_pairs if decision.choice == "heads" else pairs_by_tokens
    pairs = [pairs_of_rank(problem, rank) for rank in ranks]
    return LayerExchange(problem, layout_decision, decision, buffers, received, max(pairs), sum(pairs))


def bound_of_buffers(shape: ModelShape, setting: TrainingSetting) -> ChosenBuffers:
    """Returns a bound of the buffers of any transport that "auto" takes, without a plan, for searches over many lengths.

    The ring holds at most three payloads and three sets of float32 gradients of no more rows than a rank has
    (`plan.traffic.ring_traffic`); an exchange of heads holds two pieces, sent and received, of queries, keys and values.
    """
    if setting.ring_size == 1:
        return ChosenBuffers("local", 0, "one rank")
    attention, size = shape.attention, setting.number_bytes
    widths = attention.head_dim + attention.value_dim
    tokens, kv_heads = setting.local_tokens, attention.num_kv_heads
    ring = 3 * tokens * kv_heads * widths * (size + 4)
    if setting.transport != "heads":
        return ChosenBuffers("any", ring, "a bound: three payloads with their gradients")
    group = setting.heads or setting.ring_size
    by_heads = 2 * tokens * (attention.num_heads + max(kv_heads, group)) * widths * size * (group - 1) // group
    rings = ring if group < setting.ring_size else 0
    return ChosenBuffers("heads", by_heads + rings, "a bound: pieces of all heads, sent and received")


@lru_cache(maxsize=64)
def runs_of_ring(base: Pattern, setting: TrainingSetting) -> RunsOfRing:
    """Returns the runs of a setting, in the layout that layers with the base pattern have; none on one rank."""
    layout = _layout_of(base, setting)
    linked, most = linked_runs(runs_of((((0, setting.seq_len),),) * setting.batch_size, layout))
    return RunsOfRing(most, max((run.stop - run.start for run in linked), default=0), len(linked))


def refusal_of_gathered_rows(shape: ModelShape, setting: TrainingSetting) -> str | None:
    """Returns why a mixer would refuse to gather rows; None where it gathers none, or no more than it may."""
    mixers = shape.attention.mixers
    if mixers is None or mixers.numbers is not None or setting.ring_size == 1:
        return None
    from ...hybrids.mixers import MOST_GATHERED  # It loads torch, which the estimate of other models needs not.

    size = setting.batch_size * setting.seq_len * mixers.width * setting.number_bytes
    if size <= MOST_GATHERED:
        return None
    return (
        f"the mixers of {shape.attention.name!r} pass no state from rank to rank, so each rank would hold whole rows: "
        f"{setting.batch_size} x {setting.seq_len} tokens x {mixers.width} x {setting.number_bytes} bytes = {size}, and at "
        f"most {MOST_GATHERED} are allowed: take shorter or fewer rows"
    )


def traffic_of_mixer(shape: ModelShape, setting: TrainingSetting) -> RankTraffic | None:
    """Returns what a rank moves and holds for one mixer of a hybrid; None for other models, and on one rank."""
    mixers = shape.attention.mixers
    return (
        None if mixers is None or setting.ring_size == 1 else _traffic_of_mixers(mixers, shape.attention.base, setting)
    )


@lru_cache(maxsize=64)
def _traffic_of_mixers(mixers: ModelMixers, base: Pattern, setting: TrainingSetting) -> RankTraffic:
    layout, size = _layout_of(base, setting), setting.number_bytes
    if mixers.numbers is None:
        return rows_traffic(mixers.width, setting.batch_size, layout, size, mixers.with_positions)
    return states_traffic(mixers.numbers, (((0, setting.seq_len),),) * setting.batch_size, layout, size, 4)


def _layout_of(base: Pattern, setting: TrainingSetting) -> SequenceLayout:
    layout, _ = decide_layout(
        setting.layout, setting.seq_len, setting.ring_size, base, None, setting.transport, setting.heads
    )
    return layout
