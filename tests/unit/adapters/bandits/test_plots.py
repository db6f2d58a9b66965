"""Pictures of bandits say what the expected rewards say, for any number of arms."""

from collections.abc import Iterator

import numpy as np
import pytest

from adapters.bandits.plots import Run, arm_colours, mark_regimes, plot_arm_probabilities, plot_dynamic_runs
from adapters.bandits.testbeds import dynamic_testbed
from adapters.plots import pyplot

# Ten steps each: two arms are the best, then all are alike, then arm 2 is the best; its lead grows in the last steps.
MEANS = np.repeat([[0.5, 0.5, 0.1], [0.2, 0.2, 0.2], [0.1, 0.2, 0.3], [0.1, 0.2, 0.9]], 10, axis=0)


@pytest.fixture
def axis(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    yield pyplot().figure().subplots()
    pyplot().close("all")


def texts(axis: object) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_regimes_are_named_by_the_arms_that_are_the_best(axis: object) -> None:
    mark_regimes(axis, MEANS)
    assert texts(axis) == ["arm 0, arm 1 best", "all alike", "arm 2 best"]
    assert [patch.get_x() for patch in axis.patches] == [0, 20]  # where some arms are better
    assert [line.get_xdata()[0] for line in axis.lines] == [10, 20]


def test_short_regimes_have_no_name_and_none_has_one_if_names_are_not_wanted(axis: object) -> None:
    mark_regimes(axis, np.eye(2)[[0] * 40 + [1, 0, 1, 0] + [1] * 56])
    assert texts(axis) == ["arm 0 best", "arm 1 best"]
    assert len(axis.lines) == 5
    mark_regimes(axis, MEANS, named=False)
    assert len(axis.texts) == 2


@pytest.mark.parametrize("num_arms", [3, 5, 6, 12])
def test_each_arm_has_its_own_colour_and_name(axis: object, num_arms: int) -> None:
    plot_arm_probabilities(axis, np.full((10, num_arms), 1 / num_arms), np.zeros((10, num_arms)), title="")
    assert len({str(line.get_color()) for line in axis.lines}) == num_arms
    assert texts(axis) == [*(f"arm {arm}" for arm in range(num_arms)), "all alike"]
    assert len(arm_colours(num_arms)) == num_arms


def test_the_dynamic_bandit_is_shaded_where_an_arm_is_the_best(axis: object) -> None:
    run = Run(name="a", rewards=np.zeros(100), probabilities=np.full((101, 5), 0.2))
    figure = plot_dynamic_runs([run, run], None, dynamic_testbed().means[0])
    first = figure.axes[0]
    assert [text for text in texts(first) if not text.startswith("arm ") or "best" in text] == [
        "all alike", "arm 3 best", "all alike", "arm 0 best", "all alike",
    ]  # fmt: skip
    best = next(axis for axis in figure.axes if axis.get_title(loc="left") == "Probability of the best arm").lines[0]
    assert np.flatnonzero(np.isfinite(best.get_ydata())).tolist() == [*range(20, 40), *range(60, 80)]
