"""`ra.estimate`: the memory of each device in a training step, by part, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..hf.loss.loss_bytes import tokens_at_once
from ..hybrids.mixers import MOST_GATHERED
from ..plan.choices import COLLECTIVE_BYTES
from ..plan.layouts import LayoutKind
from ..plan.patterns import Pattern, as_pattern
from .activations import activations
from .cache import CacheBytes, sum_of_caches
from .explain import Explanation
from .layers import ModelAttention, explain_calls
from .memory import (
    MemoryPart,
    Parallel,
    TrainingSetting,
    gradients_part,
    optimizer_part,
    pieces_part,
    state_parts,
    sums_part,
    total_bytes,
    workspace_part,
)
from .models import UNREADABLE
from .shape import ModelShape, shape_of_model

_MEASURED = "measured: the model's layers on torch's meta device (cost/activations.py)"


@dataclass(frozen=True)
class Estimate:
    """The answer of `estimate`; it prints as a table.

    Attributes:
        parts: the memory of a device at the peak of a step, and of its host at the host's own peak.
        phases: the bytes of a device in each phase of a step; the largest is the peak.
        phases_with_host: the same plus host memory; on a CPU both are the same memory.
        exchanges: the attention call of each kind of layer, by `Explanation.name`.
        memory: the bytes of a device; None if unknown.

    Example:
        >>> config = dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
        >>> config |= dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
        >>> answer = ra.estimate(config, 1 << 20, devices=8, offload=True, memory=80 * 10**9)
        >>> answer.fits, round(answer.peak / 2**30, 1), answer.peak_phase
        (True, 51.5, 'backward of layer 0')
    """

    shape: ModelShape
    setting: TrainingSetting
    parts: tuple[MemoryPart, ...]
    phases: dict[str, int]
    phases_with_host: dict[str, int]
    exchanges: dict[str, Explanation]
    memory: int | None

    @property
    def caches(self) -> dict[str, tuple[list[int], CacheBytes]]:
        """For each pattern, the layers that have keys, and the bytes of their cache for `generate` on one device in `dtype`.

        A hybrid's states are not counted, nor the room for 1 row in 32 that growing rows have.
        """
        setting = self.setting
        found = self.shape.attention.caches(setting.seq_len, setting.batch_size, setting.number_bytes)
        return {str(pattern): cache for pattern, cache in found.items()}

    @property
    def cache(self) -> CacheBytes:
        """The bytes of the cache in all layers: `whole` with every row, `kept` in `ra.PatternCache`."""
        return sum_of_caches(size for _, size in self.caches.values())

    @property
    def peak(self) -> int:
        """The most bytes of a device."""
        return total_bytes(self.parts)

    @property
    def host(self) -> int:
        """The bytes that wait in host memory for each device."""
        return total_bytes(self.parts, host=True)

    @property
    def peak_phase(self) -> str:
        """The phase of a step with the most bytes."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def fits(self) -> bool | None:
        """Whether the peak is at most `memory`; None if `memory` is unknown, or if uncounted memory decides it."""
        return self.fits_with(self.peak)

    def fits_with(self, peak: float) -> bool | None:
        if self.memory is None or (self.not_counted is not None and peak <= self.memory):
            return None
        return peak <= self.memory

    @property
    def not_counted(self) -> str | None:
        """The memory that the peak does not contain: the mixers of a hybrid, and what sees or hears; None for other models."""
        mixers, whole, parts = self.shape.attention.mixers, self.shape.whole, []
        if mixers:
            count = len({number for kind in mixers for number in kind.layers})
            parts.append(f"the states and activations of the mixers in {count} layers")
        if whole is not None:
            parts.append(f"the parts of {whole} beside its text model")
        return f"{' and '.join(parts)}, so the peak may be higher" if parts else None

    def __str__(self) -> str:
        lines = ["| part | GiB | formula |", "|---|---:|---|"]
        lines += [f"| {x.name}{' (host)' * x.host} | {x.bytes / 2**30:.2f} | {x.formula} |" for x in self.parts]
        least = ", at least" if self.not_counted else ""
        lines.append(f"| peak of a device{least} | {self.peak / 2**30:.2f} | in the {self.peak_phase} |")
        lines += [f"not counted: {self.not_counted}"] if self.not_counted else []
        return "\n".join(lines)


def estimate(
    model_or_config: Any,
    seq_len: int,
    *,
    devices: int = 1,
    ring_size: int | None = None,
    memory: int | None = None,
    pattern: Pattern | str | None = None,
    parallel: Parallel = "fsdp2",
    checkpointing: bool = True,
    keep_attention: bool = True,
    offload: bool = False,
    offload_optimizer: bool = False,
    accumulate: bool = False,
    batch_size: int = 1,
    dtype: Any = "bfloat16",
    master_dtype: Any = "float32",
    layer_tokens_at_once: int = 0,
    layout: LayoutKind | Literal["auto"] = "auto",
    transport: str = "auto",
    heads: int | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
) -> Estimate:
    """Estimates the memory of each device in a training step of a model with AdamW, in bytes, without weights or a GPU.

    Activations are measured: a few layers of the model run a step of short rows on torch's meta device, in seconds. The states
    and activations of a hybrid's mixers are not counted (`Estimate.not_counted`).

    Args:
        model_or_config: a Transformers model or config, the dict of a config, a folder with a config.json, or a hub id.
        seq_len: tokens of a sequence.
        devices: all devices; `ring_size` of them share a sequence, None for all.
        memory: the bytes of a device, for `Estimate.fits`.
        pattern: of layers without their own window, or the name of a calibration's .json file; None for the pattern in the
            config, else exact.
        parallel: "ddp", "fsdp2", "zero1", "zero2" or "zero3": how all devices divide parameters and their state.
        checkpointing, offload: Transformers' gradient checkpointing, and tensors saved for backward that wait in host memory.
        keep_attention: whether checkpointing keeps the results of attention (`ra.keep_attention`).
        offload_optimizer: whether the optimizer's state and step are in host memory.
        accumulate: whether gradients stay from batch to batch of an optimizer step.
        batch_size: the sequences that a ring reads at once.
        dtype: of activations, and of weights as layers compute with them; a torch.dtype, or its name.
        master_dtype: of the weights, gradients and moments that are kept; ZeRO keeps float32 beside `dtype`.
        layer_tokens_at_once: the tokens of a slice, as for `sliced_layers`; 0 for whole rows.
        layout, transport, heads: as for `Ring`.
        device: "cuda" assumes the fused kernel, and cuDNN or FlashAttention-2 for exact attention; ZeRO needs it. "cpu" counts
            an optimizer that updates one tensor after another; host memory is then the same memory.

    Raises:
        ValueError: numbers that do not fit together, a model that the package does not compute or that has no such
            checkpointing or slices, or a hybrid without checkpointing, whose mixers decide the peak.

    Example:
        >>> config = dict(model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128)
        >>> config |= dict(num_attention_heads=16, num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=True)
        >>> print(ra.estimate(config, 131072, devices=4))
        | part | GiB | formula |
        |---|---:|---|
        | parameters | 0.56 | 596,049,920 parameters x 4 bytes / 4 devices |
        ...
    """
    given = dict(locals()) | {"ring_size": devices if ring_size is None else ring_size}
    given |= {name: str(given[name]).removeprefix("torch.") for name in ("dtype", "master_dtype")}
    setting = TrainingSetting(**{field.name: given[field.name] for field in fields(TrainingSetting)})
    setting.check()
    if isinstance(pattern, str) and not pattern.endswith(".json"):
        pattern = as_pattern(pattern, "estimate")
    try:
        shape = shape_of_model(model_or_config, pattern)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"estimate: {error}") from None
    if shape.attention.is_own(setting.ring_size):
        raise ValueError(
            f"estimate: models of type {shape.model_type!r} keep the attention of Transformers, whose scores grow with the "
            f"square of the row: measure a step"
        )
    if shape.attention.mixers and not checkpointing:
        raise ValueError("estimate: a hybrid's uncounted mixers decide the peak without checkpointing: set it")
    size = gathered_bytes(shape, setting)
    if size > MOST_GATHERED:
        raise ValueError(f"estimate: mixers gather rows of {size} bytes, of {MOST_GATHERED} at most: shorten the rows")
    call = {name: given[name] for name in ("seq_len", "layout", "dtype", "batch_size", "transport", "heads")}
    _, exchanges = explain_calls(shape.attention, ring_size=setting.ring_size, **call)
    source = "exact, from the plans of all ranks (plan/traffic.py)"
    buffers: dict[int, MemoryPart] = {}
    for numbers, of_kind in exchanges:
        part = buffers_part(of_kind.decision.choice, of_kind.busiest().buffers, source)
        buffers |= dict.fromkeys(numbers, part)
    try:
        phases = _phases(shape, setting, buffers)
    except (*UNREADABLE, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()[:18])
        raise ValueError(f"estimate: a step of {shape.model_type!r} cannot be measured: {reason}") from error
    peak = max(phases.values(), key=total_bytes)
    waiting = max(phases.values(), key=lambda parts: total_bytes(parts, host=True))
    return Estimate(
        shape=shape,
        setting=setting,
        parts=tuple(x for parts, host in ((peak, False), (waiting, True)) for x in parts if x.bytes and x.host == host),
        phases={name: total_bytes(parts) for name, parts in phases.items()},
        phases_with_host={name: sum(part.bytes for part in parts) for name, parts in phases.items()},
        exchanges={call.name: call for _, call in reversed(exchanges)},
        memory=memory,
    )


def gathered_bytes(shape: ModelShape, setting: TrainingSetting) -> int:
    """Returns the most bytes of the rows that a mixer gathers over a ring; 0 for other mixers and models."""
    widths = [kind.width for kind in shape.attention.mixers if kind.numbers is None and setting.ring_size > 1]
    return setting.batch_size * setting.seq_len * max(widths, default=0) * setting.number_bytes


def parts_by_bound(shape: ModelShape, setting: TrainingSetting, buffers: MemoryPart | None = None) -> list[MemoryPart]:
    """Returns the parts of the peak without a plan: as estimated, but with these buffers of every layer, or their bound."""
    of_layers = dict.fromkeys(shape.attention.numbers, buffers or _bound_of_buffers(shape.attention, setting))
    return max(_phases(shape, setting, of_layers).values(), key=total_bytes)


def _phases(
    shape: ModelShape, setting: TrainingSetting, buffers: Mapping[int, MemoryPart]
) -> dict[str, list[MemoryPart]]:
    """Returns the parts of each phase of a step, from the loss to the optimizer."""
    states, measured, count = state_parts(shape, setting), activations(shape, setting), len(shape.layers)
    patterns = dict(zip(shape.attention.numbers, shape.attention.layers))  # Layers that do not attend have no pattern.
    beside = {
        number: [
            *(buffers[number], sums_part(shape.attention, setting, x)),
            workspace_part(shape.attention, setting, x == Pattern.exact()),
        ]
        for number, x in patterns.items()
        if number not in shape.attention.gathering
    }

    def held(parameters: int, layers: int, saved: int, host: int) -> list[MemoryPart]:
        """Returns the states, the gradients of parameters, and what the first layers have saved."""
        gradients = gradients_part(setting, shape.parameters if setting.accumulate else parameters)
        attending = sum(number < layers for number in patterns)
        where = f"in {layers} of {count} layers"
        activations = [_activations("saved activations", setting, *x, where) for x in ((saved, False), (host, True))]
        return [*states, gradients, *activations, pieces_part(shape.attention, setting, attending)]

    def working(name: str, size: int) -> MemoryPart:
        return _activations(f"working set of {name}", setting, size, False, "beside them")

    done = shape.embedding
    phases = {"loss": held(0, count, measured.loss, measured.host_of_loss) + _in_loss(shape, setting)}
    phases["backward of the last norm"] = held(done, count, measured.last_norm, measured.host_of_loss)
    for number in reversed(range(count)):
        done += shape.layers[number].parameters - shape.layers[number].shared
        of_layer = [working("a layer", measured.layers[number])]
        of_attention = [working("attention", measured.attention[number]), *beside.get(number, [])]
        saved = held(done, number + 1, measured.saved[number], measured.host[number])
        phases[f"backward of layer {number}"] = saved + max(of_layer, of_attention, key=total_bytes)
    all_gradients = gradients_part(setting, shape.parameters)
    phases["optimizer step"] = [*states, all_gradients, optimizer_part(shape, setting)]
    return phases


def _activations(name: str, setting: TrainingSetting, size: int, host: bool, where: str) -> MemoryPart:
    formula = f"{setting.local_tokens:,} tokens x {size / setting.local_tokens:,.0f} bytes {where}"
    return MemoryPart(name, size, formula, _MEASURED, host)


def _in_loss(shape: ModelShape, setting: TrainingSetting) -> list[MemoryPart]:
    """Returns the parts of the loss beside hidden states; it computes its gradients slice by slice."""
    # Backward of a slice holds the logarithms of probabilities and two gradients, in float32; and a cap saves its result.
    tokens, size = setting.local_tokens, 12 + setting.number_bytes * shape.caps_logits
    at_once = min(tokens, tokens_at_once(tokens, shape.width, shape.vocabulary))
    logits = f"{at_once:,} tokens x {shape.vocabulary:,} words x {size} bytes"
    head = f"{shape.embedding:,} x (4 bytes of all slices + {setting.master_bytes} of one)"
    adding = "the loss adds the gradients of slices in float32"
    return [
        MemoryPart("logits", at_once * shape.vocabulary * size, logits, "a slice of the loss (hf/loss/lm_loss.py)"),
        MemoryPart("gradient of the head", shape.embedding * (4 + setting.master_bytes), head, adding),
    ]


def buffers_part(transport: str, size: int, source: str) -> MemoryPart:
    """Returns the bytes of other ranks that a rank holds by a transport, as a part of an estimate."""
    return MemoryPart("exchange buffers", size, f"{transport}: {size:,} bytes", source)


def _bound_of_buffers(attention: ModelAttention, setting: TrainingSetting) -> MemoryPart:
    """Returns a bound of the buffers of any transport that "auto" takes, without a plan, for searches over many lengths.

    The ring holds at most three payloads of at most the rows of a rank, and three messages with their float32 gradients, beside
    as many gradients that are done (`plan.traffic.ring_traffic`). Under exact attention in a zigzag, no gradient is done before
    the last hop. A collective sends about as many rows as it receives (`plan.traffic.collective_traffic`), and "auto" takes it
    for few bytes. An exchange of heads holds two pieces, sent and received, of queries, keys and values.
    """
    if setting.ring_size == 1:
        return buffers_part("local", 0, "one rank")
    size, tokens, kv_heads = setting.number_bytes, setting.local_tokens, attention.num_kv_heads
    widths, others = attention.head_dim + attention.value_dim, (setting.ring_size - 1) * tokens
    in_zigzag = {attention.base, *attention.layers} == {Pattern.exact()} and setting.layout in ("auto", "zigzag")
    row, ring = kv_heads * widths, 3 * tokens * kv_heads * widths * (size + (4 if in_zigzag else 8))
    if setting.transport == "collective" and Pattern.exact() in attention.layers:
        return buffers_part("collective", others * row * (size + 8), "a bound: the rows of all other ranks")
    if setting.transport != "heads":
        few = min(others, COLLECTIVE_BYTES // (row * size)) * row * (size + 8)
        return buffers_part("any", max(ring, few), "a bound: three payloads with their gradients")
    group = setting.heads or setting.ring_size
    by_heads = 2 * tokens * (attention.num_heads + max(kv_heads, group)) * widths * size * (group - 1) // group
    rings = ring if group < setting.ring_size else 0
    return buffers_part("heads", by_heads + rings, "a bound: pieces of all heads, sent and received")
