"""The picture of a training run shows its steps, their running mean and the losses of held-out data."""

import pytest

from hf_ring_attention.tools.plots import plot_training


def test_the_losses_and_their_mean_are_those_of_the_run(tmp_path, monkeypatch):
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    saved, save = [], figure_class.savefig

    def remember(figure, *args, **kwargs):
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(figure_class, "savefig", remember)
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
