"""Draws an estimate: the memory of a device by part as sequences get longer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..cost.estimate import Estimate, parts_by_bound
from .output import short_bytes, short_count
from .plots import new_figure, save_figure


def plot_estimate(answer: Estimate, path: Path) -> None:
    """Draws bars of the parts of a device's peak for lengths around the estimated one."""
    figure = new_figure(10, 4.6)
    axis, setting = figure.subplots(), answer.setting
    unit = 2 * setting.ring_size
    lengths = [max(unit, round(setting.seq_len * 2.0**power / unit) * unit) for power in range(-3, 3)]
    parts = [parts_by_bound(answer.shape, replace(setting, seq_len=length)) for length in lengths]
    bars = [{part.name: part.bytes for part in of_length if not part.host} for of_length in parts]
    names = list(dict.fromkeys(name for bar in bars for name in bar))
    floors = [0.0] * len(bars)
    for number, name in enumerate(names):
        heights = [bar.get(name, 0) / 2**30 for bar in bars]
        axis.bar(range(len(bars)), heights, bottom=floors, label=name, color=f"C{number % 10}", width=0.7)
        floors = [floor + height for floor, height in zip(floors, heights)]
    if answer.memory is not None:
        axis.axhline(answer.memory / 2**30, color="black", linestyle="--", linewidth=1)
        axis.annotate(
            f"{short_bytes(answer.memory)} of a device",
            (0.01, answer.memory / 2**30),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=9,
        )
    axis.set_xticks(range(len(lengths)), [short_count(length) for length in lengths])
    axis.set_xlabel("tokens of a sequence")
    axis.set_ylabel("GiB of a device at the peak")
    axis.set_title(
        f"{answer.shape.model_type}, {answer.shape.parameters / 1e9:.2f} billion parameters, ring of {setting.ring_size} of "
        f"{setting.devices} devices, {setting.parallel}",
        fontsize=10,
    )
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)
