"""Pictures of measured figures show all of them: of a training run, of what patterns cost and save, and of the benchmark."""

import pytest

from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.tools.bench_plots import extension_text, length_that_fills, plot_scaling, plot_step_memory
from hf_ring_attention.tools.plots import plot_patterns, plot_quality, plot_training, unbeaten


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


@pytest.mark.parametrize(
    ("totals", "tokens"),
    [
        ({1000: 300.0, 2000: 400.0}, 8000),
        ({2000: 400.0, 1000: 300.0, 500: 299.0}, 8000),  # The last two lengths count, in whichever order they come.
        ({1000: 300.0, 2000: 300.0}, None),
        ({1000: 300.0, 2000: 200.0}, None),
        ({2000: 300.0}, None),
        ({1000: 300.0, 2000: 1000.0}, None),
        ({1000: 300.0, 2000: 1200.0}, None),
    ],
)
def test_where_the_extended_line_meets_the_memory(totals, tokens):
    assert length_that_fills(totals, 1000) == (None if tokens is None else pytest.approx(tokens))


def step_figures(*totals):
    """Steps of 4k tokens, 8k and so on, whose totals are in MiB, on a rank of 8 GiB."""
    rows = [
        {
            "tokens": 4096 << i,
            "ranks": 2,
            "peak": total << 20,
            "parts": {"weights": 100 << 20, "kept": total - 100 << 20},
        }
        for i, total in enumerate(totals)
    ]
    return {"pattern": "exact", "ranks": 2, "rank_memory": 8 << 30, "rows": rows}


def test_the_memory_of_a_step_is_extended_to_that_of_the_rank(tmp_path, saved):
    figures = step_figures(512, 768, 1280)
    plot_step_memory(figures, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 5000
    (axis,) = saved[0].axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()}
    lengths = [4096, 8192, 16384]
    assert lines["weights"] == (lengths, [100 << 20] * 3)
    assert lines["kept"] == (lengths, [412 << 20, 668 << 20, 1180 << 20])
    assert lines["total"] == (lengths, [512 << 20, 768 << 20, 1280 << 20])
    (dashed,) = [line for line in axis.get_lines() if line.get_linestyle() == "--"]
    tokens, total = dashed.get_data()
    # 512 MiB for 8k tokens more: 6912 MiB for 110592 tokens more than 16384.
    assert (tokens[0], total[0]) == (pytest.approx(16384), pytest.approx(1280 << 20))
    assert (tokens[-1], total[-1]) == (pytest.approx(126976), pytest.approx(8 << 30))
    assert all(y == pytest.approx((1280 << 20) + (x - 16384) * 65536) for x, y in zip(tokens, total))
    text = "measured up to 16k tokens; the dashed part is extended by a straight line, and meets 8.0 GiB at about 124k tokens"
    assert extension_text(figures) == text
    assert axis.get_title().replace("\n", " ").endswith(text)
    assert [text.get_text() for text in axis.texts] == ["8.0 GiB: memory of a rank"]


@pytest.mark.parametrize("totals", [(768, 768), (768,), (768, 512), (768, 9000)])
def test_what_does_not_grow_or_is_full_already_is_not_extended(totals, tmp_path, saved):
    figures = step_figures(*totals)
    plot_step_memory(figures, tmp_path / "step.png")
    (axis,) = saved[0].axes
    assert not [line for line in axis.get_lines() if line.get_linestyle() == "--"]
    assert axis.get_title().endswith(f"measured up to {4 * len(totals)}k tokens")


@pytest.mark.parametrize(("devices", "band"), [(2, (8**0.5, 4.4)), (1, (2**0.5, 4.4)), (4, None)])
def test_the_rates_of_a_ring_stand_beside_the_ideal(devices, band, tmp_path, saved):
    rows = [{"pattern": "exact", "rates": {1: 900.0, 2: 1700.0, 4: 1800.0}}]
    rows.append({"pattern": "window:64", "rates": {1: 9000.0, 2: 11000.0, 4: 12000.0}})
    plot_scaling({"tokens": 1024, "devices": devices, "rows": rows}, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 5000
    (axis,) = saved[0].axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]
    sizes = [1, 2, 4]
    measured = [(sizes, list(row["rates"].values())) for row in rows]
    assert lines == [*measured, (sizes, [900, 1800, 3600]), (sizes, [9000, 18000, 36000])]
    assert len(axis.get_legend_handles_labels()[1]) == 3, "two patterns, and one entry for the ideal of both"
    spans = [patch.get_extents().transformed(axis.transData.inverted()) for patch in axis.patches]
    assert [(span.x0, span.x1) for span in spans] == ([pytest.approx(band)] if band else [])
    assert [text.get_text() for text in axis.texts] == ([f"more ranks than cores ({devices})"] if band else [])


def test_without_one_rank_there_is_no_ideal(tmp_path, saved):
    rows = [{"pattern": "exact", "rates": {2: 1700.0, 4: 1800.0}}]
    plot_scaling({"tokens": 1024, "devices": 8, "rows": rows}, tmp_path / "scaling.png")
    assert len(saved[0].axes[0].get_lines()) == 1
