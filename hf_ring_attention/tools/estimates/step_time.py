"""About how long a training step takes a device, by part, from the operations a second of a device and the bytes of a link."""

from __future__ import annotations

from dataclasses import dataclass

from ..timeline import Timeline, ring_timeline
from .estimate import Estimate
from .exchange import LayerExchange, traffic_of_mixer

#: Forward and backward passes of matrix products: backward has two for each of forward (arXiv 2001.08361, section 2.1).
FORWARD_AND_BACKWARD = 3
#: Backward of attention has five products of matrices against forward's two (arXiv 2205.14135, appendix B).
ATTENTION_BACKWARD = 2.5

#: The schedule of a ring of more ranks takes long to compute; there a pass takes as long as its computing or its bytes.
MOST_RANKS_OF_SCHEDULE = 16


@dataclass(frozen=True)
class TimePart:
    """A line of a step's time: seconds, and how they were computed."""

    name: str
    seconds: float
    formula: str


def step_times(answer: Estimate, flops: float, bandwidth: float) -> list[TimePart]:
    """Returns the time of a training step of the busiest rank, by part.

    Args:
        flops: the operations that a device does in a second.
        bandwidth: the bytes that a device receives in a second, while the others do the same.
    """
    shape, setting = answer.shape, answer.setting
    passes = FORWARD_AND_BACKWARD + setting.checkpointing
    active = sum(layer.active_parameters(shape.width) for layer in shape.layers)
    products = 2 * setting.local_tokens * (active * passes + shape.embedding * FORWARD_AND_BACKWARD)
    parts = [
        TimePart(
            "products with weights",
            products / flops,
            f"2 x {setting.local_tokens:,} tokens x ({active:,} parameters x {passes} passes + {shape.embedding:,} of the head "
            f"x {FORWARD_AND_BACKWARD}) / {flops:.3g} a second"
            + (
                "; the operations of recurrences, which have no weights, are left out" if shape.attention.mixers else ""
            ),
        )
    ]
    attention, waiting, work, moved = 0.0, 0.0, 0, 0
    widths = shape.attention.head_dim + shape.attention.value_dim
    timelines: dict[int, float] = {}
    for pattern in shape.attention.layers:
        exchange = answer.exchanges[str(pattern)]
        forward = exchange.pairs * 2 * widths
        work += int(forward * (1 + setting.checkpointing + ATTENTION_BACKWARD))
        choice = exchange.decision.choice
        received = exchange.received.get(choice, (0, 0))
        if choice == "ring":
            late_forward = received[0] / bandwidth - forward / flops
            if setting.ring_size <= MOST_RANKS_OF_SCHEDULE:
                if id(exchange) not in timelines:
                    timelines[id(exchange)] = schedule_of_ring(answer, exchange, flops, bandwidth).seconds
                late_forward = timelines[id(exchange)] - forward / flops
            late_backward = received[1] / bandwidth - ATTENTION_BACKWARD * forward / flops
        else:  # one exchange, and nothing is computed meanwhile
            late_forward, late_backward = received[0] / bandwidth, received[1] / bandwidth
        # A difference that is a rounding of the sum is none.
        late = [one if one > 1e-9 * forward / flops else 0.0 for one in (late_forward, late_backward)]
        waiting += late[0] * (1 + setting.checkpointing) + late[1]
        moved += received[0] * (1 + setting.checkpointing) + received[1]
    attention = work / flops
    parts.append(TimePart("attention", attention, f"{work:.4g} operations of the busiest rank / {flops:.3g} a second"))
    parts.append(
        TimePart(
            "waiting for keys", waiting, f"what computing does not hide of {moved:,} bytes / {bandwidth:.3g} a second"
        )
    )
    states = traffic_of_mixer(shape, setting)
    if states is not None and shape.attention.mixers is not None:
        count = len(shape.attention.mixers.layers)
        moved = count * (states.forward.received * (1 + setting.checkpointing) + states.backward.received)
        formula = f"{moved:,} bytes of {count} mixers / {bandwidth:.3g} a second: nothing is computed meanwhile"
        parts.append(TimePart("waiting for states", moved / bandwidth, formula))
    travelling, formula = _bytes_of_parameters(answer)
    unhidden = max(0.0, travelling / bandwidth - products / flops - attention)
    parts.append(
        TimePart(
            "waiting for parameters", unhidden, f"what computing does not hide of {formula} / {bandwidth:.3g} a second"
        )
    )
    return parts


def _bytes_of_parameters(answer: Estimate) -> tuple[float, str]:
    """Returns the bytes of parameters and gradients that a device receives in a step, and the formula."""
    shape, setting = answer.shape, answer.setting
    devices, computing, master = setting.devices, setting.number_bytes, setting.master_bytes
    others = (devices - 1) / devices
    if setting.parallel in ("fsdp2", "zero3"):
        each = 2 * computing + (master if setting.parallel == "fsdp2" else computing)
        return (
            shape.parameters * each * others,
            f"{shape.parameters:,} parameters x (2 gathers and a reduction: {each} bytes)",
        )
    each = 2 * (computing if setting.parallel.startswith("zero") else master)
    return shape.parameters * each * others, f"{shape.parameters:,} gradients x (reduced and gathered: {each} bytes)"


def schedule_of_ring(answer: Estimate, exchange: LayerExchange, flops: float, bandwidth: float) -> Timeline:
    """Returns when each rank of the ring computes, sends and waits in the forward pass of one layer's attention."""
    widths = answer.shape.attention.head_dim + answer.shape.attention.value_dim
    return ring_timeline(
        exchange.problem,
        pair_flops=2 * widths,
        row_bytes=widths * answer.setting.number_bytes,
        flops=flops,
        bandwidth=bandwidth,
    )
