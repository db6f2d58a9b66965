"""Groups of rows and their statistics, and the one place that says which rows there is something to learn from."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo._advantages.groups import Groups, batch_std, has_advantage, live_rows, mean_and_std, run_bounds
from tests.support.objective_inputs import double


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


INTERLEAVED = ids(4, -1, 4, 7, -1, 4)
"""In group order: rows 1 4 | 0 2 5 | 3."""


def test_rows_go_to_group_order_and_back():
    groups = Groups.of(INTERLEAVED)
    values = np.array([10, 11, 12, 13, 14, 15])
    assert groups.to_group_order(values).tolist() == [11, 14, 10, 12, 15, 13]
    assert groups.to_row_order(groups.to_group_order(values)).tolist() == values.tolist()
    assert groups.repeat(np.array([1, 2, 3])).tolist() == [1, 1, 2, 2, 2, 3]


def test_rows_already_in_group_order_are_not_moved():
    groups = Groups.of(ids(-5, 2, 2, 9))
    values = np.array([10, 11, 12, 13])
    assert groups.to_group_order(values).tolist() == groups.to_row_order(values).tolist() == values.tolist()
    assert groups.counts.tolist() == [1, 2, 1]


def test_equal_ids_that_are_not_adjacent_are_one_group():
    # ascending but for the last
    assert Groups.of(ids(1, 1, 2, 1)).counts.tolist() == [3, 1]


def test_group_statistics_equal_hand_worked_values():
    # group order 1 5 | 2 4 9 | 3: means 3, 5; medians 3, 4; squares 4 + 4 = 8 and 9 + 1 + 16 = 26
    groups = Groups.of(INTERLEAVED)
    values, tolerance = groups.rewards(double([2, 1, 4, 3, 5, 9]))
    assert groups.means(values).tolist() == [3, 5, 3]
    assert groups.medians(values).tolist() == [3, 4, 3]
    assert groups.stds(values, 1, tolerance).tolist() == pytest.approx([math.sqrt(8), math.sqrt(13), math.inf])
    assert groups.stds(values, 0, tolerance).tolist() == pytest.approx([2, math.sqrt(26 / 3), math.inf])
    assert groups.are_constant(values, tolerance).tolist() == [False, False, True]


def test_run_bounds_are_the_first_and_last_places_of_equal_values():
    assert run_bounds(np.array([4, 4, 7, 4])).tolist() == [0, 2, 3, 4]
    assert run_bounds(np.array([4])).tolist() == [0, 1]


def test_mean_and_std_equal_hand_worked_values(subtests):
    for values, ddof, expected in [([3, 1, 2], 1, 1.0), ([3, 1], 0, 1.0), ([5], 1, 0.0)]:
        with subtests.test(values=values, ddof=ddof, expected=expected):
            assert mean_and_std(np.array(values, dtype=float), ddof) == (sum(values) / len(values), expected)


def test_a_standard_deviation_over_equal_values_is_infinite():
    assert batch_std(np.array([1.0, 1.0]), 1, 0.0) == math.inf
    assert batch_std(np.array([1.0, 1.5]), 1, 0.5) == math.inf
    # deviations -1/4, 1/4: squares 1/8 over 1
    assert batch_std(np.array([1.0, 1.5]), 1, 0.4) == pytest.approx(math.sqrt(1 / 8), rel=1e-15)


def test_a_standard_deviation_of_huge_values_does_not_overflow(subtests):
    for ddof in [0, 1]:
        with subtests.test(ddof=ddof):
            # 1e200 squared is more than float64 holds
            assert batch_std(np.array([1e200, 3e200]), ddof, 0.0) == pytest.approx(1e200 * math.sqrt(2 / (2 - ddof)))
            stds = Groups.of(ids(0, 0)).stds(np.array([1e200, 3e200]), ddof, 0.0)
            assert stds.tolist() == pytest.approx([1e200 * math.sqrt(2 / (2 - ddof))])


def test_groups_of_very_different_sizes_keep_their_own_standard_deviations(subtests):
    # of (0, 2x), the deviations are x: std x with divisor n
    for sizes in [(1e200, 1e-9), (1e-300, 1e300), (1.0, 0.0)]:
        with subtests.test(sizes=sizes):
            values = np.array([0.0, 2 * sizes[0], 0.0, 2 * sizes[1]])
            expected = [size or math.inf for size in sizes]
            assert Groups.of(ids(0, 0, 1, 1)).stds(values, 0, 0.0).tolist() == pytest.approx(expected, rel=1e-15)


def test_a_standard_deviation_of_huge_values_is_reported():
    assert mean_and_std(np.array([1e200, 3e200]), 0) == pytest.approx((2e200, 1e200))


def test_rows_are_live_where_the_rewards_of_their_group_differ_beyond_rounding():
    # group 1: .3 and its neighbour, a rounding error; group 0: 1, 2; group 5: alone
    rewards = torch.tensor([0.3, 1.0, 0.3, 2.0, 7.0, 1.0])
    rewards[2] = rewards[2].nextafter(torch.tensor(1.0))
    assert live_rows(rewards, ids(1, 0, 1, 0, 5, 0)).tolist() == [False, True, False, True, False, True]


def test_rows_with_rewards_per_step_are_live_where_any_step_differs():
    rewards = double([[1, 0], [1, 2], [1, 0], [3, 3]])
    assert live_rows(rewards, ids(0, 1, 0, 1)).tolist() == [False, True, False, True]


def test_a_row_has_an_advantage_where_any_step_has_one():
    assert has_advantage(double([0, -2, 0.5])).tolist() == [False, True, True]
    assert has_advantage(double([[0, 0], [0, -1], [2, 0]])).tolist() == [False, True, True]
    assert has_advantage(torch.zeros(2, 0)).tolist() == [False, False]


def test_one_nonzero_advantage_makes_all_rows_of_its_group_live():
    groups = Groups.of(INTERLEAVED)
    assert groups.num_live_rows(double([0, 0, 1, 0, 0, 0])) == 3
    assert groups.num_live_rows(double([[0, 0], [0, 0], [0, 0], [0, 1], [1, 0], [0, 0]])) == 3
    assert groups.num_live_rows(torch.zeros(6)) == 0
