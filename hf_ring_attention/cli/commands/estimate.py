"""`hf-ring-attention estimate`: what a training step would hold on each device, and what fits."""

from __future__ import annotations

import gc
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...cost.parts import NUMBER_BYTES, PARALLELS
from ..arguments import MOST_TOKENS
from ..options import (
    AsJson,
    LayoutName,
    RingHeads,
    TransportName,
    TrustRemoteCode,
    choice_option,
    memory_option,
    model_option,
    number_option,
    pattern_option,
    picture_option,
    refuse,
    tokens_option,
)
from ..output import Sheet, print_json, print_sheet, short_bytes, short_count, spinner, terminal

if TYPE_CHECKING:
    from ...cost.estimate import Estimate

EXAMPLES_OF_ESTIMATE = """\b
Examples:
  hf-ring-attention estimate --model ./folder --seq-len 1M --devices 8 \\
      --memory 80GB --offload
  hf-ring-attention estimate --model ID --seq-len 1M --devices 64 --memory 80GB \\
      --ring-size 16 --plot estimate.png
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
    plot: Annotated[Path | None, picture_option("--plot", "Draw memory by length.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Show what a training step would hold on each device, by part, and what fits.

    Nothing runs and no weights are loaded. Each line has its formula; with --json also its source.
    """
    from ...cost.estimate import estimate  # It loads Transformers, which takes seconds.
    from ...cost.models import load_config

    # Plans of many ranks are some hundred thousand objects without circles, and searching them for circles takes a while.
    gc.disable()
    with spinner(f"planning {seq_len} tokens over {ring_size or devices} ranks"):
        try:
            answer = estimate(
                load_config(model, trust=trust_remote_code),
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
        if plot is not None:
            from ..estimate_plots import plot_estimate

            plot_estimate(answer, plot)
        figures = _figures(answer)
    gc.enable()
    if as_json:
        print_json(figures)
    else:
        _print_estimate(answer, figures, model)
        if plot is not None:
            print(f"wrote {plot}")


def _figures(answer: Estimate) -> dict[str, Any]:
    """Returns all figures, as JSON has them; sizes are bytes."""
    from ...cost.questions import longest_sequence, next_switches, smallest_ring

    figures: dict[str, Any] = {
        "model_type": answer.shape.model_type,
        "parameters": answer.shape.parameters,
        "setting": asdict(answer.setting),
        "parts": [asdict(part) for part in answer.parts],
        "phases": answer.phases,
        "peak": answer.peak,
        "peak_phase": answer.peak_phase,
        "host": answer.host,
        "memory": answer.memory,
        "fits": answer.fits,
        "not_counted": answer.not_counted,
        "exchanges": {
            pattern: {
                "transport": call.decision.choice,
                "reason": call.decision.reason,
                "layout": call.layout.kind,
                "buffers": {name: call.busiest(name).buffers for name in call.row_numbers},
                "received": {
                    name: [call.busiest(name).forward.received, call.busiest(name).backward.received]
                    for name in call.row_numbers
                },
            }
            for pattern, call in answer.exchanges.items()
        },
        "next_switches": [asdict(one) for one in next_switches(answer)],
    }
    if answer.memory is not None:
        ring = smallest_ring(answer)
        figures["longest_sequence"] = longest_sequence(answer)
        figures["smallest_ring"] = None if ring is None else {"ring_size": ring[0], "devices": ring[1]}
    return figures


def _print_estimate(answer: Estimate, figures: dict[str, Any], model: str) -> None:
    setting, console = answer.setting, terminal()
    rows = [
        (part.name + (" (host)" if part.host else ""), short_bytes(part.bytes), part.formula) for part in answer.parts
    ]
    least = ", at least" if answer.not_counted else ""
    rows.append((f"peak of a device{least}", short_bytes(answer.peak), f"in the {answer.peak_phase}"))
    title = (
        f"{model}: {short_count(setting.seq_len)} tokens, rings of {setting.ring_size} of {setting.devices} devices, "
        f"{setting.parallel}"
    )
    print_sheet(
        Sheet(title, ("memory of a device", "bytes", "formula"), rows, _answers(answer, figures), left=3), console
    )
    exchanged = [
        (pattern, one["transport"], ", ".join(f"{name} {size:,}" for name, size in one["buffers"].items()))
        for pattern, one in figures["exchanges"].items()
        if setting.ring_size > 1
    ]
    if exchanged:
        headings = ("pattern", "chosen", "bytes that a rank holds of others, by transport")
        print_sheet(Sheet("", headings, exchanged, left=3), console)


def _answers(answer: Estimate, figures: dict[str, Any]) -> list[str]:
    """Returns what fits, and what to set next, a line each."""
    lines, may = [], "may fit" if answer.not_counted else "fits"
    if answer.memory is not None:
        verdict = "does not fit" if answer.fits is False else may
        lines.append(f"{verdict}: {short_bytes(answer.peak)} of {short_bytes(answer.memory)}")
        longest, ring = figures["longest_sequence"], figures["smallest_ring"]
        lines.append("no sequence fits" if longest is None else f"longest sequence that {may}: {longest:,} tokens")
        if ring is None:
            lines.append("no ring holds this sequence")
        else:
            lines.append(f"smallest ring where this sequence {may}: {ring['ring_size']}, of {ring['devices']} devices")
    for one in figures["next_switches"][:4]:
        fits = "" if one["fits"] is None else ", and it fits" if one["fits"] else ", which is not enough"
        lines.append(f"set {one['name']}: {short_bytes(one['gain'])} less{fits}")
    if answer.not_counted:
        lines.append(f"not counted: {answer.not_counted}")
    if not answer.setting.overhead:
        lines.append("not counted: what the process holds before the model is made (--overhead), and fragmentation")
    return lines
