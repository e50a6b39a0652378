"""Pictures of measured figures show all of them."""

import pytest

from hf_ring_attention.cli.plots import plot_patterns, plot_quality
from hf_ring_attention.plan.patterns import Pattern


def test_each_pattern_has_its_cost_and_its_perplexity(tmp_path, saved_figures):
    rows = [
        {"pattern": "exact", "perplexity": 10.8, "share_of_exact_flops": 1.0},
        {"pattern": "longnet:512/1,2048/4,all/8", "perplexity": 15.7, "share_of_exact_flops": 0.2},
        {"pattern": "longnet:256/1,1024/4,all/8", "perplexity": 17.7, "share_of_exact_flops": 0.9},
        {"pattern": "pyramid:512,3", "perplexity": 11.6, "share_of_exact_flops": 0.002},
    ]
    plot_quality(rows, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").stat().st_size > 5000
    (axis,) = saved_figures[0].axes
    points = [tuple(map(float, points.get_offsets()[0])) for points in axis.collections]
    assert points == [(row["share_of_exact_flops"], row["perplexity"]) for row in rows]
    assert [text.get_text() for text in axis.texts] == [row["pattern"] for row in rows]
    frame = axis.get_window_extent()
    for name in (text.get_window_extent() for text in axis.texts):
        assert frame.x0 < name.x0 < name.x1 < frame.x1, "names stay inside the frame"


@pytest.mark.parametrize("panels", [1, 2])
def test_the_legend_of_patterns_is_in_the_picture(panels, tmp_path, saved_figures):
    patterns = dict.fromkeys(["window:512+4", "other"][:panels], Pattern.parse("window:512+4"))
    plot_patterns(patterns, 4096, tmp_path / "patterns.png")
    (legend,) = saved_figures[0].legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= saved_figures[0].bbox.width
