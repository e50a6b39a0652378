"""`hf-ring-attention estimate`: what a training step would hold on each device, and what fits."""

from __future__ import annotations

import gc
import textwrap
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from typing import TYPE_CHECKING, Any

from ..cost.memory import NUMBER_BYTES, PARALLELS
from ..plan.traffic import short_bytes
from .options import Parser, at_least, checked, memory_size, token_count
from .output import MOST_SHOWN, plural, print_table, short_count, wrote_json

if TYPE_CHECKING:
    from ..cost.estimate import Estimate


def add_estimate(parser: Parser) -> None:
    add, dtypes = parser.add_argument, tuple(NUMBER_BYTES)
    add("--tokens", metavar="N", type=token_count(), required=True, help="Tokens in a row: 128k, 1M.")
    # --ranks is one ring, as in all commands; --devices counts the devices of all rings, which divide parameters.
    add("--ranks", metavar="N", type=at_least(1), help="Ranks in a ring (default: all devices).")
    add("--devices", metavar="N", type=at_least(1, 2**20), help="Devices in all rings (default: --ranks, else 1).")
    add("--memory", metavar="SIZE", type=memory_size, help="Memory of a device, such as 80GB.")
    parser.add_model("A folder with a config.json, or a hub id.", required=True)
    parser.add_pattern("A pattern or calibration.json (default: the model's, else exact).", file=True)
    parser.add_choice("--parallel", PARALLELS, "How parameters are divided", "fsdp2")
    add("--checkpointing", action=BooleanOptionalAction, default=True, help="Backward recomputes layers (default yes).")
    text = "When checkpointing, keep the results of attention (default yes)."
    add("--keep-attention", action=BooleanOptionalAction, default=True, help=text)
    text = "Tokens per slice of sliced_layers (default all)."
    add("--layer-tokens-at-once", metavar="N", type=token_count(), default=0, help=text)
    add("--offload", action="store_true", help="Keep saved activations in host memory.")
    add("--offload-optimizer", action="store_true", help="Keep the optimizer in host memory (DeepSpeed).")
    add("--accumulate", action="store_true", help="Accumulate gradients over several batches.")
    add("--batch-size", metavar="N", type=at_least(1), default=1, help="Rows that a ring reads at once (default 1).")
    parser.add_choice("--dtype", dtypes, "Activations", "bfloat16")
    parser.add_choice("--master-dtype", dtypes, "Weights, gradients, moments", "float32")
    parser.add_layout()
    parser.add_transport()
    parser.add_picture("--plot", "Draw memory against the length of a row.")
    parser.add_json()


def estimate_command(args: Namespace) -> None:
    """Show the memory that a training step needs on each device, by part, and what fits.

    It trains nothing and loads no weights. Each line comes with its formula; --json adds its source.

    Examples:
      hf-ring-attention estimate --tokens 1M --ranks 8 --model ./folder \\
          --memory 80GB --offload
      hf-ring-attention estimate --tokens 1M --ranks 16 --devices 64 --model ID \\
          --memory 80GB --plot estimate.png
    """
    from ..cost.estimate import estimate  # It loads Transformers, which takes seconds.
    from ..cost.models import load_config

    accepted = signature(estimate).parameters
    setting = {name: value for name, value in vars(args).items() if name in accepted} | {"heads": args.ring_heads}
    setting |= {"seq_len": args.tokens, "ring_size": args.ranks, "devices": args.devices or args.ranks or 1}
    config = checked(None, load_config, args.model, trust=args.trust_remote_code)
    gc.disable()  # Plans of many ranks are some hundred thousand objects without circles.
    try:
        answer = checked(None, estimate, config, **setting)
        figures = _figures_of(answer)
    finally:
        gc.enable()
    if args.plot is not None:
        from .plots import plot_estimate

        plot_estimate(answer, args.plot)
    if wrote_json(figures, args.json):
        return
    _print_estimate(answer, figures, args.model)
    _print_launch_line(args, answer.setting)
    if args.plot is not None:
        print(f"wrote {args.plot}")


def _figures_of(answer: Estimate) -> dict[str, Any]:
    """Returns all figures, as JSON has them; sizes are bytes."""
    from ..cost.questions import longest_sequence, most_cached_tokens, next_switches, smallest_ring

    names = ("phases", "peak", "peak_phase", "host", "memory", "fits", "not_counted")
    figures: dict[str, Any] = {name: getattr(answer.shape, name) for name in ("model_type", "parameters")}
    figures |= {"setting": asdict(answer.setting), "parts": [asdict(part) for part in answer.parts]}
    figures |= {name: getattr(answer, name) for name in names} | {"exchanges": {}}
    for pattern, call in answer.exchanges.items():
        buffers = {name: call.busiest(name).buffers for name in call.balance}
        chosen = {"transport": call.decision.choice, "reason": call.decision.reason, "layout": call.layout.kind}
        figures["exchanges"][pattern] = chosen | {"buffers": buffers}
    figures["cache"] = asdict(answer.cache) | {
        "patterns": {pattern: {"layers": layers, **asdict(size)} for pattern, (layers, size) in answer.caches.items()}
    }
    figures["next_switches"] = [{"name": x.name, "gain": x.gain, "fits": x.fits} for x in next_switches(answer)]
    if answer.memory is not None:
        ring = smallest_ring(answer)
        figures["cache"]["most_tokens"] = most_cached_tokens(answer)
        figures["longest_sequence"] = longest_sequence(answer)
        figures["smallest_ring"] = None if ring is None else dict(zip(("ring_size", "devices"), ring))
    return figures


def _print_estimate(answer: Estimate, figures: dict[str, Any], model: str) -> None:
    setting = answer.setting
    rows = [(part.name + " (host)" * part.host, short_bytes(part.bytes), part.formula) for part in answer.parts]
    least = ", at least" if answer.not_counted else ""
    rows.append((f"peak of a device{least}", short_bytes(answer.peak), f"in the {answer.peak_phase}"))
    rings = f"over {plural(setting.ring_size, 'rank')}, of {plural(setting.devices, 'device')}, {setting.parallel}"
    how = f"{', checkpointing' * setting.checkpointing}, {setting.dtype}"
    title = f"{model}: {short_count(setting.seq_len)} tokens {rings}{how}"
    print_table(title, ("memory of a device", "bytes", "formula"), rows, _answers(answer, figures), left=3)
    calls, exchanged = figures["exchanges"], []
    if len(calls) > MOST_SHOWN:
        names = {name for call in calls.values() for name in call["buffers"]}
        most = {name: max(call["buffers"].get(name, 0) for call in calls.values()) for name in sorted(names)}
        chosen = ", ".join(sorted({call["transport"] for call in calls.values()}))
        calls = {f"the largest of {len(calls)}": {"transport": chosen, "buffers": most}}
    for pattern, call in calls.items():
        buffers = ", ".join(f"{name} {short_bytes(size)}" for name, size in call["buffers"].items())
        exchanged.append((pattern, call["transport"], buffers))
    if setting.ring_size > 1 and exchanged:
        print_table("", ("pattern", "chosen", "buffers of a rank, by transport"), exchanged, left=3)
    _print_cache(answer, figures["cache"])


def _print_cache(answer: Estimate, cache: dict[str, Any]) -> None:
    def kept(size: dict[str, int]) -> str:
        return short_bytes(size["kept"]) if answer.shape.attention.takes_pattern_cache else "refused"

    rows: list[tuple[Any, ...]] = [
        (pattern, len(size["layers"]), kept(size), short_bytes(size["whole"]))
        for pattern, size in cache["patterns"].items()
    ]
    if len(rows) > 1:
        layers = sum(row[1] for row in rows)
        rows = rows if len(rows) <= MOST_SHOWN else []
        rows.append(("all", layers, kept(cache), short_bytes(cache["whole"])))
    notes = []
    if "most_tokens" in cache:
        most = {kind: "any number" if count is None else f"{count:,}" for kind, count in cache["most_tokens"].items()}
        notes.append(f"tokens that fit beside the weights: {most['kept']} by pattern, {most['whole']} whole")
    if answer.shape.attention.mixers:
        notes.append("not counted: the states of mixers")
    title = f"Cache of generate on one device, {short_count(answer.setting.seq_len)} tokens, {answer.setting.dtype}"
    print_table(title, ("pattern", "layers", "ra.PatternCache", "whole"), rows, notes)


def _answers(answer: Estimate, figures: dict[str, Any]) -> list[str]:
    """Returns what fits and, if the step does not fit, what each option by itself would save, a line each."""
    from ..cost.questions import next_switches, together

    lines, may = [], "may fit" if answer.not_counted else "fits"
    positions = answer.shape.attention.positions
    if positions is not None and answer.setting.seq_len > positions:
        lines.append(f"{answer.setting.seq_len} tokens are more than the model's {positions} positions")
    if answer.memory is not None:
        verdict = "does not fit" if answer.fits is False else may
        lines.append(f"{verdict}: {short_bytes(answer.peak)} of {short_bytes(answer.memory)}")
        longest, ring = figures["longest_sequence"], figures["smallest_ring"]
        lines.append("no sequence fits" if longest is None else f"longest sequence that {may}: {longest:,} tokens")
        smallest = "none" if ring is None else f"{ring['ring_size']}, of {ring['devices']} devices"
        lines.append(f"smallest ring for this sequence: {smallest}")
    switches = [] if answer.fits else [x for x in next_switches(answer) if len(x.changes) == 1][:4]
    for switch in switches:
        fits = {None: "", True: ", and it fits", False: ", which is not enough"}[switch.fits]
        lines.append(f"with {_options(switch.changes)}: {short_bytes(switch.gain)} less{fits}")
    if switches and not any(switch.fits is not False for switch in switches):
        changes = together(answer, switches)
        lines.append("together they are not enough" if changes is None else f"with {_options(changes)} it fits")
    lines += [f"not counted: {answer.not_counted}"] if answer.not_counted else []
    return [*lines, "not counted: what the process holds before the model is made, and fragmentation"]


def _print_launch_line(args: Namespace, setting: Any) -> None:
    """Prints the command that trains in this setting, if finetune.py and a launch file, which divides parameters, take it."""
    file = {"ddp": "one-node-8", "fsdp2": "fsdp2", "zero3": "zero3"}.get(args.parallel)
    others = args.checkpointing and not args.keep_attention, args.offload_optimizer, args.accumulate
    if file is None or any(others) or args.master_dtype != "float32":
        return
    words = ["accelerate launch --config_file", f"recipes/accelerate/{file}.yaml", f"--num_processes {setting.devices}"]
    words += ["recipes/finetune.py", f"--model {args.model}", f"--tokens {args.tokens}", f"--ranks {setting.ring_size}"]
    given = ("pattern", None), ("layout", "auto"), ("transport", "auto"), ("batch_size", 1), ("layer_tokens_at_once", 0)
    values = {name: value for name, usual in given if (value := getattr(args, name)) not in (usual, None)}
    values |= {name: True for name in ("checkpointing", "offload") if getattr(args, name)}
    values |= {} if args.dtype == "bfloat16" else {"dtype": {"float32": "no", "float16": "fp16"}[args.dtype]}
    lines = textwrap.wrap(f"{' '.join(words)} {_options(values)}", 72, break_long_words=False, break_on_hyphens=False)
    print("To train:\n  " + " \\\n      ".join(lines))


def _options(changes: Mapping[str, Any]) -> str:
    """Returns changes of a setting as options."""
    options = []
    for name, value in changes.items():
        option = "ranks" if name == "ring_size" else name.replace("_", "-")
        options.append(
            f"--no-{option}" if value is False else f"--{option}" if value is True else f"--{option} {value}"
        )
    return " ".join(options)
