"""Plots show the counted values with readable labels."""

from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import image, pyplot

from adapters.tools.learning.evaluation import Accuracy, ToolReport
from examples.tool_workbench.plots import plot_accuracy, plot_confusion

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def no_window() -> Iterator[None]:
    mpl.use("Agg")
    yield
    pyplot.close("all")


def report(confusion: list[list[int]], right_tool: float) -> ToolReport:
    """Tools a and b of one category, c and d of another."""
    overall = Accuracy(num_tasks=10, right_tool=right_tool, right_call=0.0)
    tools, category_of = ("a", "b", "c", "d", "?"), ("first", "first", "second", "second", "?")
    counted: Any = {"tools": tools, "category_of": category_of, "confusion": tuple(tuple(row) for row in confusion)}
    return ToolReport(overall=overall, by_label={}, abstention=None, errors={}, **counted)


BEFORE = report([[1, 1, 2, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], 0.5)
AFTER = report([[4, 0, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 4, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], 0.9)


def labels(ticks: list) -> list[str]:
    return [tick.get_text() for tick in ticks]


def test_plot_confusion_draws_a_panel_per_report_with_row_shares(tmp_path) -> None:
    path = tmp_path / "new" / "confusion.png"
    figure = plot_confusion({"before": BEFORE, "after": AFTER}, path)
    assert path.read_bytes().startswith(PNG)
    assert len(np.unique(image.imread(path)[..., :3].reshape(-1, 3), axis=0)) > 50, "an empty canvas has one colour"
    left, right, scale = figure.axes
    assert [left.get_title(), right.get_title()] == ["before: 50% right", "after: 90% right"]
    assert [left.get_xlabel(), right.get_xlabel(), left.get_ylabel()] == ["called", "called", "right"]
    assert scale.get_ylabel() == "share of the tasks of a row"
    # d was neither right nor called; ? was called once
    for axis in (left, right):
        assert labels(axis.get_xticklabels()) == ["a", "b", "c", "?"]
    assert labels(left.get_yticklabels()) == ["a", "b", "c", "?"]
    drawn = [np.asarray(axis.images[0].get_array()) for axis in (left, right)]
    np.testing.assert_allclose(drawn[0], [[0.25, 0.25, 0.5, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(drawn[1], [[1, 0, 0, 0], [0, 0.5, 0, 0.5], [0, 0, 1, 0], [0, 0, 0, 0]])


def test_plot_confusion_of_categories_draws_the_share_of_each_category() -> None:
    figure = plot_confusion({"after": AFTER}, None, of="category")
    axis = figure.axes[0]
    assert labels(axis.get_xticklabels()) == ["first", "second", "?"]
    np.testing.assert_allclose(np.asarray(axis.images[0].get_array()), [[5 / 6, 0, 1 / 6], [0, 1, 0], [0, 0, 0]])


def test_plot_accuracy_draws_a_named_line_per_curve(tmp_path) -> None:
    path = tmp_path / "new" / "accuracy.png"
    curves = {"GRPO": ([0, 100, 200], [0.03, 0.5, 0.98]), "another": ([0, 200], [0.03, 0.4])}
    figure = plot_accuracy(curves, str(path))
    assert path.read_bytes().startswith(PNG)
    (axis,) = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("calls of tools", "share of held-out tasks")
    assert labels(axis.get_legend().get_texts()) == ["GRPO", "another"]
    assert {line.get_label(): line.get_xydata().T.tolist() for line in axis.lines} == {
        name: [list(calls), list(shares)] for name, (calls, shares) in curves.items()
    }
    low, high = axis.get_ylim()
    assert low == 0
    assert high >= 1


def test_a_written_figure_does_not_touch_pyplot_or_its_backend(tmp_path) -> None:
    pyplot.close("all")  # figures that another test has left open
    mpl.use("svg")
    plot_accuracy({"GRPO": ([0, 1], [0.0, 1.0])}, tmp_path / "accuracy.png")
    plot_confusion({"before": BEFORE, "after": AFTER}, tmp_path / "confusion.png")
    assert mpl.get_backend() == "svg"
    assert pyplot.get_fignums() == []


def test_without_a_path_a_figure_belongs_to_pyplot_and_nothing_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [plot_accuracy({"GRPO": ([0, 1], [0.0, 1.0])}, None), plot_confusion({"after": AFTER}, None)]
    assert [pyplot.figure(number) for number in pyplot.get_fignums()] == shown
    assert list(tmp_path.iterdir()) == []
