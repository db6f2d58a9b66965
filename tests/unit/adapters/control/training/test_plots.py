"""Plots of learning curves: what is drawn, and what stays untouched."""

from pathlib import Path

import pytest

from adapters.control import LearningCurve, plot_learning_curves


def test_plotted_curves_are_medians_and_quartiles(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    runs = [
        LearningCurve(iterations=[0, 1], steps=[0, 100], returns=[low, low + 10.0], seconds=[1.0, 2.0])
        for low in (0.0, 2.0, 8.0)
    ]
    path = tmp_path / "new" / "curves.png"
    figure = plot_learning_curves({"GRPO": runs, "one": runs[:1]}, path, title="CartPole", threshold=9.0)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    median, single, threshold = figure.axes[0].get_lines()
    assert median.get_ydata().tolist() == [2.0, 12.0]
    assert single.get_ydata().tolist() == [0.0, 10.0]
    assert list(threshold.get_ydata()) == [9.0, 9.0]
    (quartiles,) = figure.axes[
        0
    ].collections  # only for the name with several runs: from 1 to 5 at first, and from 11 to 15 at the end
    assert sorted(set(quartiles.get_paths()[0].vertices[:, 1])) == [1.0, 5.0, 11.0, 15.0]


def test_a_written_plot_leaves_no_figure_open(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib import pyplot

    run = LearningCurve(iterations=[0, 1], steps=[0, 100], returns=[0.0, 1.0], seconds=[1.0, 2.0])
    pyplot.close("all")  # figures that another test has left open
    matplotlib.use("svg")
    plot_learning_curves({"GRPO": [run]}, tmp_path / "curves.png", title="CartPole")
    assert matplotlib.get_backend() == "svg"
    assert pyplot.get_fignums() == []
    shown = plot_learning_curves({"GRPO": [run]}, None, title="CartPole")
    assert [pyplot.figure(number) for number in pyplot.get_fignums()] == [shown]
    pyplot.close(shown)
