"""The pictures of the recipes show the figures of a run."""

import pictures


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
    assert axis.get_xscale() == "log" and "log scale" in axis.get_xlabel()
    assert max(axis.get_xticks()) == 1 and len(axis.get_xticks()) >= 3
