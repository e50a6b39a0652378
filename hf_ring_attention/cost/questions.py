"""The inverse questions: the longest sequence that fits, the smallest ring for a sequence, and what to switch on next.

Searches try many lengths and rings, so they make no plans: the buffers of exact attention grow with the sequence, and others
are bounded (`parts_by_bound`). The answers fit, and a little more may fit too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..hybrids.mixers import MOST_GATHERED
from ..plan.patterns import Pattern
from .cache import sum_of_caches
from .estimate import Estimate, buffers_part, gathered_bytes, parts_by_bound
from .memory import MemoryPart, TrainingSetting, total_bytes
from .shape import ModelShape

#: The largest ring that is tried, in multiples of the devices.
MOST_TIMES_THE_DEVICES = 1024
#: Treat a cache that fits this many tokens as unbounded.
ENDLESS = 1 << 50


@dataclass(frozen=True)
class SwitchGain:
    """Settings to change, and the bytes by which that lowers a device's peak; `fits` is None if that is unknown."""

    name: str
    gain: int
    fits: bool | None
    changes: dict[str, Any]


def bound_of_peak(shape: ModelShape, setting: TrainingSetting, buffers: MemoryPart | None = None) -> float:
    """Returns the peak of a device in bytes without a plan (`parts_by_bound`); infinite if the model refuses the setting.

    A mixer refuses rows that are too long, and a model slices or checkpointing that it does not have.
    """
    if gathered_bytes(shape, setting) > MOST_GATHERED or shape.attention.is_own(setting.ring_size):
        return float("inf")
    try:
        return total_bytes(parts_by_bound(shape, setting, buffers))
    except (ValueError, RuntimeError):
        return float("inf")


def longest_sequence(answer: Estimate) -> int | None:
    """Returns the most tokens, a multiple of twice the ring, whose step fits a device; None if no length fits."""
    unit, high = 2 * answer.setting.ring_size, 1

    def exceeds(count: int) -> bool:
        setting = replace(answer.setting, seq_len=count * unit)
        return not _fits(answer, setting, _scaled_buffers(answer, setting))

    while not exceeds(high):
        high *= 2
    return unit * bisect_left(range(1, high), True, key=exceeds) or None


def _scaled_buffers(answer: Estimate, setting: TrainingSetting) -> MemoryPart | None:
    """Returns the buffers of exact attention at another length, in proportion to the tokens; None for other patterns."""
    call = next(iter(answer.exchanges.values()))
    short = setting.seq_len < answer.setting.ring_size << 12
    if len(answer.exchanges) > 1 or call.pattern != Pattern.exact() or short:
        return None
    size = -(-call.busiest().buffers * setting.local_tokens // answer.setting.local_tokens)
    return buffers_part(call.decision.choice, size, "in proportion to the tokens")


def most_cached_tokens(answer: Estimate) -> dict[str, int | None]:
    """Returns the most tokens of a row whose cache fits one device beside the weights in `dtype`, "whole" and "kept".

    None means any number of tokens, and 0 that the weights leave no room.
    """
    assert answer.memory is not None
    setting, attention = answer.setting, answer.shape.attention
    room = answer.memory - answer.shape.parameters * setting.number_bytes

    def most(kind: str) -> int | None:
        def exceeds(tokens: int) -> bool:
            caches = attention.caches(tokens, setting.batch_size, setting.number_bytes).values()
            return bool(getattr(sum_of_caches(size for _, size in caches), kind) > room)

        if room <= 0 or exceeds(1):
            return 0
        return bisect_left(range(ENDLESS), True, key=exceeds) - 1 if exceeds(ENDLESS) else None

    return {kind: most(kind) for kind in ("whole", "kept")}


def smallest_ring(answer: Estimate) -> tuple[int, int] | None:
    """Returns the size of the smallest ring whose ranks hold the sequence, and its devices; None if no ring does."""
    devices = answer.setting.devices
    within = [(size, devices) for size in range(1, devices + 1) if devices % size == 0]
    beyond = [(devices << power, devices << power) for power in range(1, MOST_TIMES_THE_DEVICES.bit_length())]
    for size, count in within + beyond:
        if _fits(answer, replace(answer.setting, ring_size=size, devices=count)):
            return size, count
    return None


def next_switches(answer: Estimate) -> list[SwitchGain]:
    """Returns the options that would lower the peak, the largest gain first."""
    peak = total_bytes(parts_by_bound(answer.shape, answer.setting))
    gains = []
    for name, changes in _switches(answer.shape, answer.setting):
        after = bound_of_peak(answer.shape, replace(answer.setting, **changes))
        if after < peak:
            gains.append(SwitchGain(name, peak - int(after), answer.fits_with(after), changes))
    return sorted(gains, key=lambda switch: -switch.gain)


def together(answer: Estimate, switches: Sequence[SwitchGain]) -> dict[str, Any] | None:
    """Returns the fewest of these changes with which the step fits together; None if it never does."""
    for count in range(2, len(switches) + 1):
        for chosen in itertools.combinations(switches, count):
            changes = {name: value for switch in chosen for name, value in switch.changes.items()}
            if _fits(answer, replace(answer.setting, **changes)):
                return changes
    return None


def _switches(shape: ModelShape, setting: TrainingSetting) -> Iterator[tuple[str, dict[str, Any]]]:
    if not setting.checkpointing:
        yield "checkpointing", {"checkpointing": True}
        yield "checkpointing and offload", {"checkpointing": True, "offload": True}
    elif setting.keep_attention:
        yield "keep_attention=False", {"keep_attention": False}
    if not setting.offload:
        yield "offload", {"offload": True}
    if setting.devices > 1 and setting.parallel not in ("fsdp2", "zero3"):
        yield "parallel=fsdp2", {"parallel": "fsdp2"}
    if setting.ring_size < setting.devices:
        yield f"ring_size={setting.devices}", {"ring_size": setting.devices}
    if not setting.offload_optimizer:
        yield "offload_optimizer (DeepSpeed)", {"offload_optimizer": True}
    if not setting.layer_tokens_at_once and setting.local_tokens > shape.width:
        yield f"sliced_layers(model, {shape.width})", {"layer_tokens_at_once": shape.width}
    if setting.dtype == "float32":
        yield "dtype=bfloat16", {"dtype": "bfloat16"}


def _fits(answer: Estimate, setting: TrainingSetting, buffers: MemoryPart | None = None) -> bool:
    assert answer.memory is not None  # The questions need it.
    return bound_of_peak(answer.shape, setting, buffers) <= answer.memory
