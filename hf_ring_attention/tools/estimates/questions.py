"""The inverse questions: the longest sequence that fits, the smallest ring for a sequence, and what to switch on next.

Searches ask for many lengths and rings, so the buffers of an exchange are not planned there: those of exact attention grow with
the sequence, and others are bounded (`exchange.bound_of_buffers`). What is found fits, and a little more may.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...plan.patterns import Pattern
from .estimate import Estimate, bound_of_peak
from .exchange import ChosenBuffers, refusal_of_gathered_rows
from .model_shape import ModelShape
from .parts import TrainingSetting

#: Rings of more ranks than so many times the devices are not looked for.
MOST_TIMES_THE_DEVICES = 1024


@dataclass(frozen=True)
class SwitchGain:
    """A change of the setting, and the bytes that it takes from the peak of a device.

    Attributes:
        name: what to set.
        fits: whether the step then fits; None where nobody said what a device has.
    """

    name: str
    gain: int
    fits: bool | None


def longest_sequence(answer: Estimate) -> int | None:
    """Returns the most tokens, a multiple of twice the ring, whose step fits a device; None where none does.

    Raises:
        ValueError: an estimate without the memory of a device.
    """
    memory = _memory_of(answer)
    unit = 2 * answer.setting.ring_size

    def fits(units: int) -> bool:
        setting = replace(answer.setting, seq_len=units * unit)
        if refusal_of_gathered_rows(answer.shape, setting) is not None:
            return False
        return bound_of_peak(answer.shape, setting, _scaled_buffers(answer, setting)) <= memory

    if not fits(1):
        return None
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def _scaled_buffers(answer: Estimate, setting: TrainingSetting) -> ChosenBuffers | None:
    """Returns the buffers at another length: those of exact attention are as much larger as the sequence; None for others."""
    exchanges = list(answer.exchanges.values())
    if (
        len(exchanges) > 1
        or exchanges[0].problem.pattern != Pattern.exact()
        or setting.seq_len < answer.setting.ring_size << 12
    ):
        return None
    known = exchanges[0].chosen()
    scaled = -(-known.bytes * setting.local_tokens // answer.setting.local_tokens)
    return ChosenBuffers(known.transport, scaled, known.source)


def smallest_ring(answer: Estimate) -> tuple[int, int] | None:
    """Returns the size of the smallest ring whose ranks hold the sequence, and the devices: those asked for, or more if needed.

    None where no ring of up to `MOST_TIMES_THE_DEVICES` times the devices does.

    Raises:
        ValueError: an estimate without the memory of a device.
    """
    memory, devices = _memory_of(answer), answer.setting.devices
    within = [(size, devices) for size in range(1, devices + 1) if devices % size == 0]
    beyond = [(devices << power, devices << power) for power in range(1, MOST_TIMES_THE_DEVICES.bit_length())]
    for size, count in within + beyond:
        setting = replace(answer.setting, ring_size=size, devices=count)
        if refusal_of_gathered_rows(answer.shape, setting) is None and bound_of_peak(answer.shape, setting) <= memory:
            return size, count
    return None


def next_switches(answer: Estimate) -> list[SwitchGain]:
    """Returns what could be switched on, by what it gains, the most first; what gains nothing is left out."""
    peak = bound_of_peak(answer.shape, answer.setting)
    found = []
    for name, changes in _switches(answer.shape, answer.setting):
        switched = replace(answer.setting, **changes)
        if refusal_of_gathered_rows(answer.shape, switched) is not None:
            continue
        after = bound_of_peak(answer.shape, switched)
        if after < peak:
            found.append(SwitchGain(name, peak - after, None if answer.memory is None else after <= answer.memory))
    return sorted(found, key=lambda one: -one.gain)


def _switches(shape: ModelShape, setting: TrainingSetting) -> Iterator[tuple[str, dict[str, Any]]]:
    if not setting.checkpointing:
        yield "checkpointing", {"checkpointing": True}
        yield "checkpointing and offload", {"checkpointing": True, "offload": True}
    if not setting.offload:
        yield "offload", {"offload": True}
    if setting.devices > 1 and setting.parallel not in ("fsdp2", "zero3"):
        yield "parallel=fsdp2", {"parallel": "fsdp2"}
    if setting.ring_size < setting.devices:
        yield f"ring_size={setting.devices}", {"ring_size": setting.devices}
    if not setting.offload_optimizer:
        yield "offload_optimizer (DeepSpeed)", {"offload_optimizer": True}
    if not setting.mlp_tokens_at_once and setting.local_tokens > shape.width:
        yield f"mlp_tokens_at_once={shape.width} (by another library)", {"mlp_tokens_at_once": shape.width}
    if setting.dtype == "float32":
        yield "dtype=bfloat16", {"dtype": "bfloat16"}


def _memory_of(answer: Estimate) -> int:
    if answer.memory is None:
        raise ValueError("estimate: the memory of a device was not said: pass memory=, such as 80 * 10**9 bytes")
    return answer.memory
