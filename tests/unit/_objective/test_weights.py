"""Step weights: every normaliser by hand, for rows and groups without steps, and for several ranks."""

from typing import get_args
from unittest.mock import Mock

import pytest
import torch

from grpo import ConfigError, step_weights
from grpo._objective.weights import Aggregation

# Three rows of 3, 1 and 0 steps; the first two are one group.
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
GROUPS = torch.tensor([7, 7, -2])
WEIGHTS = {
    "row_mean": ([1 / 9, 1 / 9, 1 / 9], [1 / 3, 0, 0]),  # 1/(3 * 3), 1/(1 * 3)
    "step_mean": ([1 / 4, 1 / 4, 1 / 4], [1 / 4, 0, 0]),
    "fixed_length": ([1 / 15, 1 / 15, 1 / 15], [1 / 15, 0, 0]),  # 1/(3 * 5)
    "row_sum": ([1 / 3, 1 / 3, 1 / 3], [1 / 3, 0, 0]),
    "group_mean": ([1 / 8, 1 / 8, 1 / 8], [1 / 8, 0, 0]),  # 4 steps in the group, 2 groups
}
# the row (or group) without a step stays in the denominator: 2/3 of the rows, half of the groups
SUMS = {"row_mean": 2 / 3, "step_mean": 1, "fixed_length": 4 / 15, "row_sum": 4 / 3, "group_mean": 1 / 2}


def test_the_allowed_aggregations_are_the_tested_ones():
    assert get_args(Aggregation) == tuple(WEIGHTS)


def options(aggregation: str, groups: torch.Tensor = GROUPS) -> dict:
    return {"fixed_length": {"fixed_length": 5}, "group_mean": {"group_ids": groups}}.get(aggregation, {})


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_step_weights_of_each_aggregation_equal_hand_worked_values(aggregation):
    weights = step_weights(MASK, aggregation, **options(aggregation))
    assert weights.dtype == torch.float64
    for row, expected in zip(weights.tolist(), [*WEIGHTS[aggregation], [0, 0, 0]], strict=True):
        assert row == pytest.approx(expected, rel=1e-15)
    assert weights.sum().item() == pytest.approx(SUMS[aggregation])


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_step_weights_without_any_step_are_zero(aggregation):
    weights = step_weights(torch.zeros(3, 2, dtype=torch.bool), aggregation, **options(aggregation))
    assert weights.tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_step_weights_of_no_rows_are_empty_and_still_reduced_over_ranks(aggregation):
    # a rank may have none, and still has to join the sum of the counts
    reduce = Mock(side_effect=lambda count: count + 4)
    no_groups = torch.zeros(0, dtype=torch.int64)
    no_rows = torch.zeros(0, 3, dtype=torch.bool)
    weights = step_weights(no_rows, aggregation, **options(aggregation, no_groups), reduce=reduce)
    assert (weights.shape, reduce.call_count) == ((0, 3), 1)


# what the other of two ranks adds: rows, steps or groups
OF_OTHER_RANK = {
    "row_mean": (2, 3), "fixed_length": (2, 3), "row_sum": (2, 3), "step_mean": (3, 3), "group_mean": (2, 1)
}  # fmt: skip


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_step_weights_of_two_ranks_equal_those_of_one_process(aggregation):
    mask = torch.tensor([[True, True], [True, False], [False, False], [True, True], [False, True]])
    groups = torch.tensor([4, 4, 4, 1, 0])
    whole = step_weights(mask, aggregation, **options(aggregation, groups))
    for rows, other in zip((slice(0, 3), slice(3, 5)), OF_OTHER_RANK[aggregation], strict=True):
        needs = options(aggregation, groups[rows])
        part = step_weights(mask[rows], aggregation, **needs, reduce=lambda count, n=other: count + n)
        assert part.tolist() == [pytest.approx(row) for row in whole[rows].tolist()]


@pytest.mark.parametrize(("aggregation", "missing"), [("fixed_length", "fixed_length"), ("group_mean", "group_ids")])
def test_step_weights_name_a_missing_input(aggregation, missing):
    with pytest.raises(ConfigError, match=missing):
        step_weights(MASK, aggregation)
