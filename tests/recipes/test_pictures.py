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


def test_decoding_has_a_line_of_times_and_of_bytes_for_each_attention(tmp_path, saved_figures):
    rows = [("sdpa", 2048, 40.0, 90), ("a/b/chosen.json", 2048, 35.0, 25), ("sdpa", 8192, 100.0, 360)]
    rows = [dict(zip(("attention", "tokens", "ms", "bytes"), (*row[:3], row[3] * 2**20))) for row in rows]
    pictures.plot_decoding(rows, tmp_path / "a.png")
    (left, right), (legend,) = saved_figures[0].axes, saved_figures[0].legends
    assert [list(line.get_ydata()) for line in left.get_lines()] == [[40, 100], [35]]
    assert [list(line.get_ydata()) for line in right.get_lines()] == [[90, 360], [25]]
    assert list(left.get_lines()[0].get_xdata()) == [2048, 8192]
    assert [text.get_text() for text in legend.get_texts()] == ["sdpa", "chosen"]
