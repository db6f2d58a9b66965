"""What a series says: hand-made lines with and without noise."""

import math

import numpy as np
import pytest

from adapters.tracking.report.series import change_of, longest_streak, share_of, thinned


def test_the_change_is_the_difference_of_the_means_of_both_tenths() -> None:
    """1 ... 100: the first ten have the mean 5.5, the last ten 95.5."""
    change = change_of(np.arange(1.0, 101.0))
    assert change is not None
    assert (change.first, change.last, change.window, change.difference) == (5.5, 95.5, 10, 90.0)
    assert change.is_clear


def test_iterations_without_the_metric_do_not_count() -> None:
    values = np.full(200, math.nan)
    values[::2] = np.arange(1.0, 101.0)
    change = change_of(values)
    assert change is not None
    assert (change.first, change.last, change.window) == (5.5, 95.5, 10)


def test_noise_is_no_change_and_a_trend_is(subtests: pytest.Subtests) -> None:
    generator = np.random.default_rng(0)
    clear = [change_of(generator.normal(size=100)) for _ in range(200)]
    assert sum(change is not None and change.is_clear for change in clear) <= 10  # three standard errors
    for slope, is_clear in [(0.05, True), (-0.05, True), (0.001, False)]:
        with subtests.test(slope=slope):
            change = change_of(generator.normal(size=100) * 0.5 + slope * np.arange(100))
            assert change is not None
            assert change.is_clear == is_clear


def test_a_constant_is_no_change() -> None:
    change = change_of(np.full(50, 0.1))
    assert change is not None
    assert not change.is_clear


def test_few_iterations_are_compared_by_halves_of_at_most_five(subtests: pytest.Subtests) -> None:
    for num_iterations, window in [(2, 1), (3, 1), (8, 4), (12, 5), (60, 6)]:
        with subtests.test(num_iterations=num_iterations):
            change = change_of(np.arange(float(num_iterations)))
            assert change is not None
            assert change.window == window
            assert change.is_clear == (window > 1)  # one number has no noise to compare with
    assert change_of(np.array([1.0, math.nan])) is None


def test_a_short_series_is_not_thinned() -> None:
    x, (y,), per_point = thinned(np.array([1.0, 2.0, 3.0]), [np.array([5.0, math.nan, 7.0])], 3)
    assert (x.tolist(), y.tolist(), per_point) == ([1.0, 3.0], [5.0, 7.0], 1)


def test_a_long_series_becomes_means_of_neighbours() -> None:
    x, (y, z), per_point = thinned(np.arange(1.0, 8.0), [np.arange(0.0, 70.0, 10.0), np.ones(7)], 3)
    assert x.tolist() == [1.5, 3.5, 6.0]  # 1 2 | 3 4 | 5 6 7
    assert y.tolist() == [5.0, 25.0, 50.0]
    assert z.tolist() == [1.0, 1.0, 1.0]
    assert per_point == 3
    assert len(thinned(np.arange(100_000.0), [np.arange(100_000.0)])[0]) == 160


def test_the_late_mean_is_over_the_last_measured_iterations() -> None:
    values = np.array([0.0] * 18 + [1.0, math.nan, 3.0])
    assert share_of(values, 0.1) == 2.0  # of 20 measured numbers the last two
    assert share_of(values) == 0.2
    assert math.isnan(share_of(np.full(3, math.nan)))


def test_the_longest_streak_is_counted_between_interruptions() -> None:
    assert longest_streak(np.array([True, False, True, True, False, True])) == 2
    assert longest_streak(np.array([False])) == 0
