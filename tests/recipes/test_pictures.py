"""The pictures of the recipes show the figures of a run."""

import pictures
import pytest


def test_the_losses_and_their_mean_are_those_of_the_run(tmp_path, saved_figures):
    losses = [5.0 - 0.1 * step + 0.3 * (step % 2) for step in range(30)]
    pictures.plot_training(losses, tmp_path / "loss.png", held_out={30: 2.5, 0: 5.5, 10: 4.0})
    assert (tmp_path / "loss.png").stat().st_size > 5000
    lines = [
        (list(line.get_xdata()), list(line.get_ydata())) for axis in saved_figures[0].axes for line in axis.get_lines()
    ]
    assert (list(range(1, 31)), losses) in lines
    assert ([0, 10, 30], [5.5, 4.0, 2.5]) in lines
    # The mean trails: at a step it knows nothing of later ones.
    (mean,) = [y for x, y in lines if len(x) == 30 and y != losses]
    assert mean[0] == losses[0] and mean[1] == pytest.approx((losses[0] + losses[1]) / 2)
    assert mean[-1] == pytest.approx(sum(losses[-3:]) / 3)


def test_losses_are_trailing_means_with_the_legend_outside(tmp_path, saved_figures):
    losses = {"exact": [float("nan"), *map(float, range(9))], "window:4": [float("nan"), *[1.0] * 9]}
    pictures.plot_losses(losses, tmp_path / "a.png", window=3)
    top, bottom = saved_figures[0].axes
    exact, window = top.get_lines()
    assert list(exact.get_xdata()) == list(range(3, 10)), "a mean stands at the last of its tokens"
    assert list(exact.get_ydata()) == [1, 2, 3, 4, 5, 6, 7]
    assert list(window.get_ydata()) == [1] * 7
    assert list(bottom.get_lines()[1].get_ydata()) == [0, -1, -2, -3, -4, -5, -6]
    assert len(saved_figures[0].legends) == 1 and top.get_legend() is None


def test_each_pattern_has_its_cost_and_its_perplexity(tmp_path, saved_figures):
    rows = [("exact", 10.8, 1.0), ("window:512+4", 11.9, 0.23)]
    rows = [dict(zip(("pattern", "perplexity", "flop_share"), row)) for row in rows]
    pictures.plot_quality(rows, tmp_path / "quality.png")
    (axis,) = saved_figures[0].axes
    points = [tuple(map(float, points.get_offsets()[0])) for points in axis.collections]
    assert points == [(row["flop_share"], row["perplexity"]) for row in rows]
    assert [text.get_text() for text in axis.texts] == ["exact", "window:512+4"]
