"""Draws the patterns of a calibration: layers by key/value heads, in the colour of what each pattern costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..evaluation.calibration.result import Calibration
from .output import short_count
from .plots import new_figure, save_figure

#: Cheap patterns are light and dear ones dark, so that a print in grey tells them apart too.
_COLOURS = "YlGnBu"
#: Layers in a panel; further ones stand beside them.
_LAYERS_IN_A_PANEL = 40
#: From so many key/value heads on, squares have no text.
_MOST_HEADS_WITH_TEXT = 12


def plot_calibration(calibration: Calibration, path: Path) -> None:
    """Draws the pattern of each layer and key/value head to a file."""
    heads = calibration.of_heads()
    layers = sorted(heads)
    most = max(len(patterns) for patterns in heads.values())
    panels = [layers[i : i + _LAYERS_IN_A_PANEL] for i in range(0, len(layers), _LAYERS_IN_A_PANEL)]
    with_text = most <= _MOST_HEADS_WITH_TEXT
    texts = sorted({str(pattern) for patterns in heads.values() for pattern in patterns})
    square = max(0.36, 0.085 * max(map(len, texts)) if with_text else 0.36)
    tallest = max(map(len, panels))
    figure = new_figure(max(4.8, 1.0 + len(panels) * (most * square + 0.9)), 2.4 + 0.24 * tallest)
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch

    shares = {str(pattern): calibration.share_of(pattern) for pattern in calibration.menu}
    norm = LogNorm(min(shares.values()), 1)
    colours = colormaps[_COLOURS]
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels):
        values = np.full((len(panel), most), np.nan)
        for row, layer in enumerate(panel):
            values[row, : len(heads[layer])] = [shares[str(pattern)] for pattern in heads[layer]]
        axis.imshow(values, norm=norm, cmap=colours, aspect="auto", interpolation="nearest")
        axis.set_xticks(range(most), [str(head) for head in range(most)])
        axis.set_yticks(range(len(panel)), [str(layer) for layer in panel])
        axis.tick_params(length=0, labelsize=8)
        for edge in np.arange(-0.5, len(panel)):
            axis.axhline(edge, color="white", linewidth=0.8)
        for edge in np.arange(-0.5, most):
            axis.axvline(edge, color="white", linewidth=0.8)
        axis.set_xlabel("key/value head")
        for row, layer in enumerate(panel if with_text else ()):
            for head, pattern in enumerate(heads[layer]):
                dark = norm(shares[str(pattern)]) > 0.55
                axis.text(
                    head, row, str(pattern), ha="center", va="center", fontsize=7, color="white" if dark else "black"
                )
    axes[0].set_ylabel("layer")
    counts = {text: sum(str(p) == text for patterns in heads.values() for p in patterns) for text in shares}
    handles = [
        Patch(color=colours(norm(share)), label=f"{text}: {share:.1%}, {counts[text]} times")
        for text, share in sorted(shares.items(), key=lambda item: item[1])
        if counts[text]
    ]
    columns = max(1, int(figure.get_figwidth() / 2.4))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
        frameon=False,
        title="pattern: share of exact attention's FLOPs, and how many groups of heads have it",
        title_fontsize=8,
    )
    figure.suptitle(
        f"{calibration.flop_share:.1%} of exact attention's FLOPs at {short_count(calibration.seq_len)} tokens",
        fontsize=10,
    )
    save_figure(figure, path)
