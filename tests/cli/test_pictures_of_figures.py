"""Pictures of measured figures show all of them: of a training run, and of what patterns cost and save."""

import pytest

from hf_ring_attention.cli.plots import plot_patterns, plot_quality, plot_training, unbeaten
from hf_ring_attention.plan.patterns import Pattern


@pytest.fixture
def saved(monkeypatch):
    """The figures that were saved."""
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    figures, save = [], figure_class.savefig

    def remember(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(figure_class, "savefig", remember)
    return figures


def test_each_pattern_has_its_cost_and_its_perplexity(tmp_path, saved):
    figures = [
        {"pattern": "exact", "perplexity": 10.8, "flop_share": 1.0},
        {"pattern": "window:512", "perplexity": 19.3, "flop_share": 0.23},
        {"pattern": "window:512+4", "perplexity": 11.9, "flop_share": 0.23},
        {"pattern": "pyramid:512,3", "perplexity": 11.6, "flop_share": 0.38},
        {"pattern": "longnet:512/1,all/8", "perplexity": 15.7, "flop_share": 0.002},
    ]
    plot_quality(figures, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").stat().st_size > 5000
    (axis,) = saved[0].axes
    points = [tuple(map(float, points.get_offsets()[0])) for points in axis.collections]
    assert points == [(row["flop_share"], row["perplexity"]) for row in figures]
    assert [text.get_text() for text in axis.texts] == [row["pattern"] for row in figures]
    (line,) = axis.get_lines()
    assert list(line.get_xdata()) == [0.002, 0.23, 0.38, 1.0], "windows without sinks are beaten"


def test_names_of_patterns_stay_inside_the_frame(tmp_path, saved):
    figures = [
        {"pattern": "exact", "perplexity": 10.8, "flop_share": 1.0},
        {"pattern": "longnet:512/1,2048/4,all/8", "perplexity": 15.7, "flop_share": 0.2},
        {"pattern": "longnet:256/1,1024/4,all/8", "perplexity": 17.7, "flop_share": 0.9},
    ]
    plot_quality(figures, tmp_path / "quality.png")
    (axis,) = saved[0].axes
    frame = axis.get_window_extent()
    for name in (text.get_window_extent() for text in axis.texts):
        assert frame.x0 < name.x0 < name.x1 < frame.x1


@pytest.mark.parametrize("panels", [1, 2])
def test_the_legend_of_patterns_is_in_the_picture(panels, tmp_path, saved):
    patterns = dict.fromkeys(["window:512+4", "other"][:panels], Pattern.parse("window:512+4"))
    plot_patterns(patterns, 4096, tmp_path / "patterns.png")
    (legend,) = saved[0].legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= saved[0].bbox.width


def test_what_no_other_beats():
    assert unbeaten([(1, 1), (2, 1), (1, 3), (0.5, 2), (2, 0.5), (1, 1)]) == [(0.5, 2), (1, 1), (2, 0.5)]


def test_the_losses_and_their_mean_are_those_of_the_run(tmp_path, saved):
    losses = [5.0 - 0.1 * step + 0.3 * (step % 2) for step in range(30)]
    plot_training(losses, tmp_path / "loss.png", held_out={30: 2.5, 0: 5.5, 10: 4.0})
    assert (tmp_path / "loss.png").stat().st_size > 5000
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for axis in saved[0].axes for line in axis.get_lines()]
    assert (list(range(1, 31)), losses) in lines
    assert ([0, 10, 30], [5.5, 4.0, 2.5]) in lines
    # The mean trails: at a step it knows nothing of later ones.
    (mean,) = [y for x, y in lines if len(x) == 30 and y != losses]
    assert mean[0] == losses[0] and mean[1] == pytest.approx((losses[0] + losses[1]) / 2)
    assert mean[-1] == pytest.approx(sum(losses[-3:]) / 3)
