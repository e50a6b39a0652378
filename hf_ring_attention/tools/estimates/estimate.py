"""`ra.estimate`: what a training step would hold on each device, by part, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...plan.choices import check_choices
from ...plan.layouts import LayoutKind
from ...plan.patterns import Pattern, as_pattern
from .activations import CHECKPOINTED, MEASURED_ON_META, SAVED_BY_AUTOGRAD, LayerMemory, layer_memory, logits_bytes
from .exchange import (
    FROM_THE_RUNS,
    ChosenBuffers,
    LayerExchange,
    bound_of_buffers,
    exchange_of_pattern,
    refusal_of_gathered_rows,
    traffic_of_mixer,
)
from .model_shape import ModelShape, shape_of_model
from .parts import NUMBER_BYTES, PARALLELS, MemoryPart, Parallel, TrainingSetting, total_bytes
from .states import gradient_bytes_at, optimizer_working_bytes, state_parts


@dataclass(frozen=True)
class Estimate:
    """The answer of `estimate`; it prints as a table.

    Attributes:
        parts: what a device holds at the peak of a step, and what its host memory holds when that is the most.
        phases: the bytes of a device in each phase of a step, of which the largest is the peak.
        phases_with_host: the same with what waits in host memory, which is all there is on a CPU.
        exchanges: what layers exchange, by pattern.
        memory: the bytes that a device has; None where nobody said.

    Example:
        >>> config = dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        ...               num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
        >>> answer = ra.estimate(config, 1 << 20, devices=8, offload=True, memory=80 * 10**9)
        >>> answer.fits, round(answer.peak / 2**30, 1), answer.peak_phase
        (True, 52.4, 'backward of layer 0')
    """

    shape: ModelShape
    setting: TrainingSetting
    parts: tuple[MemoryPart, ...]
    phases: dict[str, int]
    phases_with_host: dict[str, int]
    exchanges: dict[str, LayerExchange]
    memory: int | None

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return total_bytes(self.parts)

    @property
    def host(self) -> int:
        """The bytes that wait in host memory for each device."""
        return total_bytes(self.parts, host=True)

    @property
    def peak_phase(self) -> str:
        """The phase of a step that holds the most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def fits(self) -> bool | None:
        """Whether the peak is at most `memory`; None where nobody said what a device has."""
        return None if self.memory is None else self.peak <= self.memory

    def __str__(self) -> str:
        lines = ["| part | GiB | formula |", "|---|---:|---|"]
        for part in self.parts:
            where = " (host)" if part.host else ""
            lines.append(f"| {part.name}{where} | {part.bytes / 2**30:.2f} | {part.formula} |")
        lines.append(f"| peak of a device | {self.peak / 2**30:.2f} | in the {self.peak_phase} |")
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
    offload: bool = False,
    offload_optimizer: bool = False,
    accumulate: bool = False,
    batch_size: int = 1,
    dtype: Any = "bfloat16",
    master_dtype: Any = "float32",
    mlp_tokens_at_once: int = 0,
    layout: LayoutKind | Literal["auto"] = "auto",
    transport: str = "auto",
    heads: int | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    overhead: int = 0,
) -> Estimate:
    """Returns what a training step of a model with AdamW would hold on each device, in bytes; nothing runs.

    Args:
        model_or_config: a Transformers model or config, the dict of a config, a folder with a config.json, or a hub id.
        seq_len: tokens of a sequence.
        devices: all devices; `ring_size` of them share a sequence, None for all.
        memory: the bytes of a device, for `Estimate.fits`.
        pattern: that of layers without a window of their own; None for what the config has saved, else exact.
        parallel: "ddp", "fsdp2", "zero1", "zero2" or "zero3": what is divided among all devices.
        checkpointing, offload: Transformers' gradient checkpointing, and `offload_activations`.
        offload_optimizer: whether the optimizer's state and step are in host memory.
        accumulate: whether gradients stay from batch to batch of an optimizer step.
        batch_size: the sequences that a ring reads at once.
        dtype: that of activations and of weights as layers compute with them; a torch.dtype, or its name.
        master_dtype: that of the weights, gradients and moments that are kept; ZeRO keeps float32 beside `dtype`.
        mlp_tokens_at_once: where another library computes MLPs in slices of tokens; 0 for models as they are.
        layout, transport, heads: as for `Ring`.
        device: "cpu" counts an optimizer that works through one tensor after another.
        overhead: bytes that a process holds on its device before the model is made, as measured: CUDA's context, libraries.

    Raises:
        ValueError: numbers that do not go together, or a model that the package does not compute.

    Example:
        >>> config = dict(model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128,
        ...               num_attention_heads=16, num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=True)
        >>> print(ra.estimate(config, 131072, devices=4))
        | part | GiB | formula |
        |---|---:|---|
        | parameters | 0.56 | 596,049,920 parameters x 4 bytes / 4 devices |
        ...
    """
    setting = TrainingSetting(
        seq_len=seq_len,
        devices=devices,
        ring_size=devices if ring_size is None else ring_size,
        batch_size=batch_size,
        dtype=str(dtype).removeprefix("torch."),
        master_dtype=str(master_dtype).removeprefix("torch."),
        parallel=parallel,
        checkpointing=checkpointing,
        offload=offload,
        offload_optimizer=offload_optimizer,
        accumulate=accumulate,
        mlp_tokens_at_once=mlp_tokens_at_once,
        layout=layout,
        transport=transport,
        heads=heads,
        device=device,
        overhead=overhead,
    )
    _check_setting(setting)
    wanted = None if pattern is None else as_pattern(pattern, "estimate")
    return estimate_of_shape(shape_of_model(model_or_config, wanted), setting, memory)


def _check_setting(setting: TrainingSetting) -> None:
    for name, least in (
        ("seq_len", 1),
        ("devices", 1),
        ("ring_size", 1),
        ("batch_size", 1),
        ("mlp_tokens_at_once", 0),
        ("overhead", 0),
    ):
        number = getattr(setting, name)
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"estimate: {name} must be an integer of at least {least}, got {number!r}")
    if setting.devices % setting.ring_size:
        raise ValueError(
            f"estimate: {setting.devices} devices do not divide into rings of {setting.ring_size}: {setting.devices} = "
            f"{setting.devices // setting.ring_size} * {setting.ring_size} + {setting.devices % setting.ring_size}"
        )
    for name, known in (
        ("dtype", tuple(NUMBER_BYTES)),
        ("master_dtype", tuple(NUMBER_BYTES)),
        ("parallel", PARALLELS),
        ("device", ("cuda", "cpu")),
    ):
        if getattr(setting, name) not in known:
            raise ValueError(f"estimate: {name} must be one of {', '.join(known)}, got {getattr(setting, name)!r}")
    check_choices(setting.layout, setting.transport, setting.ring_size, setting.heads)


def estimate_of_shape(shape: ModelShape, setting: TrainingSetting, memory: int | None = None) -> Estimate:
    """Returns the estimate of a model whose sizes are known.

    Raises:
        ValueError: what `Ring`, `ring_attention` or a mixer would refuse.
    """
    refusal = refusal_of_gathered_rows(shape, setting)
    if refusal is not None:
        raise ValueError(f"estimate: {refusal}")
    patterns = dict.fromkeys(shape.attention.layers)
    exchanges = {pattern: exchange_of_pattern(shape, setting, pattern) for pattern in patterns}
    phases = _phases(shape, setting, {pattern: one.chosen() for pattern, one in exchanges.items()})
    totals = {name: total_bytes(parts) for name, parts in phases.items()}
    peak = max(totals, key=lambda name: totals[name])
    waiting = max(phases.values(), key=lambda parts: total_bytes(parts, host=True))
    parts = tuple(part for part in phases[peak] if part.bytes and not part.host)
    parts += tuple(part for part in waiting if part.bytes and part.host)
    together = {name: total + total_bytes(phases[name], host=True) for name, total in totals.items()}
    return Estimate(shape, setting, parts, totals, together, {str(p): e for p, e in exchanges.items()}, memory)


def bound_of_peak(shape: ModelShape, setting: TrainingSetting, buffers: ChosenBuffers | None = None) -> int:
    """Returns the peak of a device in bytes without a plan: buffers of the exchange are bounded, all else is as estimated.

    Args:
        buffers: those of every layer, where they are known; None for their bound.
    """
    return total_bytes(_parts_of_bound(shape, setting, buffers))


def parts_by_bound(answer: Estimate, seq_len: int) -> list[MemoryPart]:
    """Returns what a device holds at the peak of a step with sequences of another length, by `bound_of_peak`."""
    return _parts_of_bound(answer.shape, replace(answer.setting, seq_len=seq_len), None)


def _parts_of_bound(shape: ModelShape, setting: TrainingSetting, buffers: ChosenBuffers | None) -> list[MemoryPart]:
    known = buffers or bound_of_buffers(shape, setting)
    phases = _phases(shape, setting, dict.fromkeys(shape.attention.layers, known))
    return max(phases.values(), key=total_bytes)


def _phases(
    shape: ModelShape, setting: TrainingSetting, buffers: Mapping[Pattern, ChosenBuffers]
) -> dict[str, list[MemoryPart]]:
    """Returns the phases of a step with all that each holds, from the loss to the optimizer."""
    states = state_parts(shape, setting)
    if setting.overhead:
        measured = f"{setting.overhead:,} bytes"
        states.append(MemoryPart("framework", setting.overhead, measured, "measured before the model is made"))
    whole = setting.ring_size == 1
    # Layers that do not attend have no pattern.
    patterns = dict(zip(shape.attention.numbers, shape.attention.layers))
    memories = [
        layer_memory(shape, layer, setting, whole and patterns.get(number) == Pattern.exact())
        for number, layer in enumerate(shape.layers)
    ]
    traffic = traffic_of_mixer(shape, setting)
    states_of_mixer = ChosenBuffers("states", 0 if traffic is None else traffic.buffers, FROM_THE_RUNS)
    all_gradients = gradient_bytes_at(setting, shape.parameters)
    done = shape.embedding
    phases = {"loss": [*states, *_in_loss(shape, setting, memories, all_gradients)]}
    last = len(memories) - 1
    for number in range(last, -1, -1):
        pattern = patterns.get(number)
        done += shape.layers[number].parameters - shape.layers[number].shared
        # Between the ends, what is held goes up or down with the layers: a kind of layer has its peak where it begins or ends.
        if (
            number in (0, last)
            or pattern != patterns.get(number + 1)
            or (shape.attention.mixers and memories[number] != memories[number + 1])
        ):
            gradients = all_gradients if setting.accumulate else gradient_bytes_at(setting, done)
            saved = _kept(shape, setting, memories[: number + 1])
            of_attention = None if pattern is None else buffers[pattern]
            working = _working(setting, memories[number], of_attention, states_of_mixer)
            phases[f"backward of layer {number}"] = [*states, _gradients(setting, gradients), saved, *working]
    size, formula = optimizer_working_bytes(shape, setting)
    optimizer = MemoryPart("optimizer step", size, formula, "torch.optim.AdamW")
    # The buckets of ZeRO 2 are gone then.
    kept = gradient_bytes_at(replace(setting, device="cuda"), shape.parameters)
    phases["optimizer step"] = [*states, _gradients(setting, kept), optimizer]
    return phases


def _gradients(setting: TrainingSetting, size: int) -> MemoryPart:
    number = setting.number_bytes if setting.parallel.startswith("zero") else setting.master_bytes
    divided = setting.devices > 1 and setting.parallel in ("fsdp2", "zero2", "zero3")
    share = f" / {setting.devices} devices" if divided else ""
    formula = f"{number} bytes x the parameters that have theirs{share}"
    return MemoryPart("gradients", size, formula, "layers get theirs one after another in backward")


def _kept(shape: ModelShape, setting: TrainingSetting, layers: Sequence[LayerMemory]) -> MemoryPart:
    """Returns what these layers have saved."""
    tokens, offloaded = setting.local_tokens, setting.offload
    if setting.checkpointing:
        size = shape.width * setting.number_bytes
        formula = f"{tokens:,} tokens x {len(layers)} layers x {shape.width} numbers x {setting.number_bytes} bytes"
        return MemoryPart("saved activations", tokens * len(layers) * size, formula, CHECKPOINTED, host=offloaded)
    saved, mixers = sum(one.saved for one in layers), sum(one.mixer_saved for one in layers)
    formula = f"{tokens:,} tokens x {saved:,} bytes in {len(layers)} layers"
    formula += f" + {mixers:,} bytes of mixers" if mixers else ""
    source = f"{SAVED_BY_AUTOGRAD}; {MEASURED_ON_META}" if mixers else SAVED_BY_AUTOGRAD
    return MemoryPart("saved activations", tokens * saved + mixers, formula, source, host=offloaded)


def _working(
    setting: TrainingSetting, layer: LayerMemory, buffers: ChosenBuffers | None, states: ChosenBuffers
) -> list[MemoryPart]:
    """Returns what backward of one layer works with: its MLP, its attention, or its mixer, with the buffers of an exchange.

    Args:
        buffers: those of attention; None in a layer without.
        states: those of a mixer.
    """
    tokens = setting.local_tokens
    # Without checkpointing, what the layer has saved is counted already; in host memory it must come back first.
    counted = not (setting.checkpointing or setting.offload)
    choices: list[list[MemoryPart]] = []
    for name, by_token, beside, exchanged in (
        ("an MLP", layer.backward_of_mlp, layer.mixer_saved, None),
        ("attention", layer.backward_of_attention, layer.mixer_saved, buffers),
        ("a mixer", layer.backward_of_mixer, layer.mixer_peak, states),
    ):
        if not by_token:
            continue
        if beside:
            held = tokens * by_token + beside
            size = max(0, held - (tokens * layer.saved + layer.mixer_saved) * counted)
            formula = f"{tokens:,} tokens x {by_token:,} bytes + {beside:,} bytes of the mixer"
            formula += ", less what is counted as saved" if counted else ""
        else:
            more = max(0, by_token - layer.saved * counted)
            size, formula = tokens * more, f"{tokens:,} tokens x {more:,} bytes"
        source = f"{SAVED_BY_AUTOGRAD}; {MEASURED_ON_META}" if beside else SAVED_BY_AUTOGRAD
        parts = [MemoryPart(f"working set of {name}", size, formula, source)]
        if exchanged is not None:
            formula = f"{exchanged.transport}: {exchanged.bytes:,} bytes"
            parts.append(MemoryPart("exchange buffers", exchanged.bytes, formula, exchanged.source))
        choices.append(parts)
    return max(choices, key=total_bytes)


def _in_loss(
    shape: ModelShape, setting: TrainingSetting, layers: Sequence[LayerMemory], all_gradients: int
) -> list[MemoryPart]:
    """Returns what the loss holds, which computes its gradients with each slice."""
    tokens, size = setting.local_tokens, setting.number_bytes
    logits, formula = logits_bytes(shape, setting)
    # The last norm, its output, and the gradient of this.
    norm = tokens * shape.width * (4 + 3 * size)
    of_slice = shape.embedding * (4 + setting.master_bytes)
    return [
        _gradients(setting, all_gradients if setting.accumulate else 0),
        _kept(shape, setting, layers),
        MemoryPart(
            "hidden states of the loss",
            norm,
            f"{tokens:,} tokens x {shape.width} x {4 + 3 * size} bytes",
            SAVED_BY_AUTOGRAD,
        ),
        MemoryPart("logits", logits, formula, "a slice of the loss (hf/lm_loss.py)"),
        MemoryPart(
            "gradient of the head",
            of_slice,
            f"{shape.embedding:,} x (4 bytes of all slices + {setting.master_bytes} of one)",
            "the loss adds the gradients of slices in float32",
        ),
    ]
