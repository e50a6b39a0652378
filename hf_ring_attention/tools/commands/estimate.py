"""`hf-ring-attention estimate`: what a training step would hold on each device, what fits, and how long a step takes."""

from __future__ import annotations

import gc
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import MOST_TOKENS
from ..estimates.estimate import Estimate, estimate
from ..estimates.parts import NUMBER_BYTES, PARALLELS
from ..estimates.questions import longest_sequence, next_switches, smallest_ring
from ..estimates.step_time import MOST_RANKS_OF_SCHEDULE, TimePart, schedule_of_ring, step_times
from ..options import (
    AsJson,
    LayoutName,
    RingHeads,
    TransportName,
    choice_option,
    memory_option,
    model_option,
    number_option,
    pattern_option,
    picture_option,
    positive_option,
    refuse,
    tokens_option,
)
from ..output import Sheet, print_json, print_sheet, short_bytes, short_count, short_seconds, spinner, terminal

EXAMPLES_OF_ESTIMATE = """\b
Examples:
  hf-ring-attention estimate --model ./folder --seq-len 1M --devices 8 \\
      --memory 80GB --offload
  hf-ring-attention estimate --model ID --seq-len 1M --devices 64 --memory 80GB \\
      --ring-size 16 --tflops 400 --gbps 400 --plot estimate.png
"""


def estimate_command(
    model: Annotated[str, model_option("A folder with a config.json, or a hub id.")],
    seq_len: Annotated[int, tokens_option("--seq-len", "Tokens of a sequence: 4096, 128k, 1M.")],
    devices: Annotated[int, number_option("--devices", "All devices.", most=2**20)] = 1,
    memory: Annotated[int | None, memory_option("--memory", "What a device has, such as 80GB.")] = None,
    ring_size: Annotated[
        int | None, number_option("--ring-size", "Devices that share a sequence; default: all.")
    ] = None,
    pattern: Annotated[
        str | None,
        pattern_option("Default: the model's, else exact."),
    ] = None,
    parallel: Annotated[str, choice_option("--parallel", PARALLELS, "How parameters are divided")] = "fsdp2",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Compute activations again in backward.")
    ] = True,
    offload: Annotated[bool, typer.Option("--offload", help="Saved activations wait in host memory.")] = False,
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="The optimizer is in host memory, as DeepSpeed can have it.")
    ] = False,
    accumulate: Annotated[
        bool, typer.Option("--accumulate", help="Gradients stay from batch to batch of a step.")
    ] = False,
    batch_size: Annotated[int, number_option("--batch-size", "Sequences that a ring reads at once.")] = 1,
    dtype: Annotated[str, choice_option("--dtype", tuple(NUMBER_BYTES), "Activations")] = "bfloat16",
    master_dtype: Annotated[
        str, choice_option("--master-dtype", tuple(NUMBER_BYTES), "Weights, gradients, moments")
    ] = "float32",
    mlp_tokens: Annotated[
        int,
        number_option(
            "--mlp-tokens", "Tokens of an MLP in slices, where another library has it; 0: all.", 0, MOST_TOKENS
        ),
    ] = 0,
    layout: LayoutName = "auto",
    transport: TransportName = "auto",
    ring_heads: RingHeads = None,
    device: Annotated[str, choice_option("--device", ("cuda", "cpu"), "Kind of device")] = "cuda",
    overhead: Annotated[
        int | None,
        memory_option(
            "--overhead",
            "What a process holds before the model is made, as you measured it: 500MB; default: not counted.",
        ),
    ] = None,
    tflops: Annotated[float | None, positive_option("--tflops", "10^12 operations a second of a device.")] = None,
    gbps: Annotated[float | None, positive_option("--gbps", "Gigabits a second of a device's link.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's operations a second in place of --tflops.")
    ] = False,
    plot: Annotated[Path | None, picture_option("--plot", "Draw memory by length, and the ring's schedule.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a training step would hold on each device, by part, what fits, and how long it takes.

    Nothing runs and no weights are loaded. Each line has its formula; with --json also its source.
    """
    if measure and tflops is not None:
        raise refuse("--measure measures them: leave one of both out", "--tflops")
    if (tflops is not None or measure) != (gbps is not None):
        raise refuse("times need both: --gbps, and --tflops or --measure")
    # Plans of many ranks are some hundred thousand objects without circles, and searching them for circles takes a while.
    gc.disable()
    with spinner(f"planning {seq_len} tokens over {ring_size or devices} ranks"):
        try:
            answer = estimate(
                model,
                seq_len,
                devices=devices,
                ring_size=ring_size,
                memory=memory,
                pattern=pattern,
                parallel=parallel,  # type: ignore[arg-type]
                checkpointing=checkpointing,
                offload=offload,
                offload_optimizer=offload_optimizer,
                accumulate=accumulate,
                batch_size=batch_size,
                dtype=dtype,
                master_dtype=master_dtype,
                mlp_tokens_at_once=mlp_tokens,
                layout=layout,  # type: ignore[arg-type]
                transport=transport,
                heads=ring_heads,
                device=device,  # type: ignore[arg-type]
                overhead=overhead or 0,
            )
        except ValueError as error:
            raise refuse(str(error)) from None
        times: list[TimePart] = []
        flops = 0.0
        if gbps is not None:
            flops = _measured_flops(dtype) if measure else (tflops or 0.0) * 1e12
            times = step_times(answer, flops, gbps * 1e9 / 8)
        if plot is not None:
            _draw_estimate(answer, plot, flops, (gbps or 0.0) * 1e9 / 8)
        figures = _figures(answer, times)
    gc.enable()
    if as_json:
        print_json(figures)
    else:
        _print_estimate(answer, figures, times, model)
        if plot is not None:
            print(f"wrote {plot}")


def _measured_flops(dtype: str) -> float:
    from ..estimates.device_flops import measured_flops

    return measured_flops(dtype)


def _draw_estimate(answer: Estimate, path: Path, flops: float, bandwidth: float) -> None:
    from ..estimate_plots import plot_estimate

    timeline, title, ring = None, "", answer.setting.ring_size
    rings = [one for one in answer.exchanges.values() if one.decision.choice == "ring"]
    if rings and flops and ring <= MOST_RANKS_OF_SCHEDULE:
        timeline = schedule_of_ring(answer, rings[0], flops, bandwidth)
        title = f"{rings[0].problem.pattern}, {rings[0].problem.layout.kind}: one layer forward"
    plot_estimate(answer, path, timeline, title)


def _figures(answer: Estimate, times: list[TimePart]) -> dict[str, Any]:
    """Returns all figures, as JSON has them; sizes are bytes."""
    figures: dict[str, Any] = {
        "model_type": answer.shape.model_type,
        "parameters": answer.shape.parameters,
        "counted_by": answer.shape.counted_by,
        "setting": asdict(answer.setting),
        "parts": [asdict(part) for part in answer.parts],
        "phases": answer.phases,
        "peak": answer.peak,
        "peak_phase": answer.peak_phase,
        "host": answer.host,
        "memory": answer.memory,
        "fits": answer.fits,
        "exchanges": {
            pattern: {
                "transport": one.decision.choice,
                "reason": one.decision.reason,
                "layout": one.problem.layout.kind,
                "buffers": one.buffers,
                "received": {name: list(both) for name, both in one.received.items()},
            }
            for pattern, one in answer.exchanges.items()
        },
        "next_switches": [asdict(one) for one in next_switches(answer)],
        "seconds": {part.name: part.seconds for part in times} or None,
    }
    if answer.memory is not None:
        ring = smallest_ring(answer)
        figures["longest_sequence"] = longest_sequence(answer)
        figures["smallest_ring"] = None if ring is None else {"ring_size": ring[0], "devices": ring[1]}
    return figures


def _print_estimate(answer: Estimate, figures: dict[str, Any], times: list[TimePart], model: str) -> None:
    setting, console = answer.setting, terminal()
    rows = [
        (part.name + (" (host)" if part.host else ""), short_bytes(part.bytes), part.formula) for part in answer.parts
    ]
    rows.append(("peak of a device", short_bytes(answer.peak), f"in the {answer.peak_phase}"))
    title = (
        f"{model}: {short_count(setting.seq_len)} tokens, rings of {setting.ring_size} of {setting.devices} devices, "
        f"{setting.parallel}"
    )
    print_sheet(
        Sheet(title, ("memory of a device", "bytes", "formula"), rows, _answers(answer, figures), left=3), console
    )
    exchanged = [
        (
            pattern,
            one.decision.choice,
            ", ".join(f"{name} {size:,}" for name, size in one.buffers.items() if name != "local"),
        )
        for pattern, one in answer.exchanges.items()
        if setting.ring_size > 1
    ]
    if exchanged:
        headings = ("pattern", "chosen", "bytes that a rank holds of others, by transport")
        print_sheet(Sheet("", headings, exchanged, left=3), console)
    if times:
        rows = [(part.name, short_seconds(part.seconds), part.formula) for part in times]
        rows.append(
            (
                "a step",
                short_seconds(sum(part.seconds for part in times)),
                "without the optimizer, norms and activations",
            )
        )
        print_sheet(Sheet("", ("time of a step", "seconds", "formula"), rows, left=3), console)


def _answers(answer: Estimate, figures: dict[str, Any]) -> list[str]:
    """Returns what fits, and what to set next, a line each."""
    lines = []
    if answer.memory is not None:
        verdict = "fits" if answer.fits else "does not fit"
        lines.append(f"{verdict}: {short_bytes(answer.peak)} of {short_bytes(answer.memory)}")
        longest, ring = figures["longest_sequence"], figures["smallest_ring"]
        lines.append("no sequence fits" if longest is None else f"longest sequence that fits: {longest:,} tokens")
        if ring is None:
            lines.append("no ring holds this sequence")
        else:
            lines.append(f"smallest ring for this sequence: {ring['ring_size']}, of {ring['devices']} devices")
    for one in figures["next_switches"][:4]:
        fits = "" if one["fits"] is None else ", and it fits" if one["fits"] else ", which is not enough"
        lines.append(f"set {one['name']}: {short_bytes(one['gain'])} less{fits}")
    if not answer.setting.overhead:
        lines.append("not counted: what the process holds before the model is made (--overhead), and fragmentation")
    return lines
