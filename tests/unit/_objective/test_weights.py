"""Step weights: every normaliser by hand, for rows and groups without steps, and for several ranks."""

from typing import get_args
from unittest.mock import Mock

import pytest
import torch

from grpo import ConfigError, ObjectiveConfig, step_weights
from grpo._objective.weights import Aggregation
from tests.support.objective_inputs import double, loss_and_gradient

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


def test_step_weights_of_each_aggregation_equal_hand_worked_values(subtests):
    for aggregation in WEIGHTS:
        with subtests.test(aggregation=aggregation):
            weights = step_weights(MASK, aggregation, **options(aggregation))
            assert weights.dtype == torch.float64
            for row, expected in zip(weights.tolist(), [*WEIGHTS[aggregation], [0, 0, 0]], strict=True):
                assert row == pytest.approx(expected, rel=1e-15)
            assert weights.sum().item() == pytest.approx(SUMS[aggregation])


def test_step_weights_without_any_step_are_zero(subtests):
    for aggregation in WEIGHTS:
        with subtests.test(aggregation=aggregation):
            weights = step_weights(torch.zeros(3, 2, dtype=torch.bool), aggregation, **options(aggregation))
            assert weights.tolist() == [[0, 0]] * 3


def test_step_weights_of_no_rows_are_empty_and_still_reduced_over_ranks(subtests):
    for aggregation in WEIGHTS:
        with subtests.test(aggregation=aggregation):
            # a rank may have none, and still has to join the sum of the counts
            reduce = Mock(side_effect=lambda count: count + 4)
            no_groups = torch.zeros(0, dtype=torch.int64)
            weights = step_weights(
                torch.zeros(0, 3, dtype=torch.bool), aggregation, **options(aggregation, no_groups),
                reduce=reduce,
            )  # fmt: skip
            assert weights.shape == (0, 3)
            assert reduce.call_count == 1


# what the other of two ranks adds: rows, steps or groups
OF_OTHER_RANK = {
    "row_mean": (2, 3), "fixed_length": (2, 3), "row_sum": (2, 3), "step_mean": (3, 3), "group_mean": (2, 1)
}  # fmt: skip


def test_step_weights_of_two_ranks_equal_those_of_one_process(subtests):
    for aggregation in WEIGHTS:
        with subtests.test(aggregation=aggregation):
            mask = torch.tensor([[True, True], [True, False], [False, False], [True, True], [False, True]])
            groups = torch.tensor([4, 4, 4, 1, 0])
            whole = step_weights(mask, aggregation, **options(aggregation, groups))
            for rows, other in zip((slice(0, 3), slice(3, 5)), OF_OTHER_RANK[aggregation], strict=True):
                part = step_weights(
                    mask[rows],
                    aggregation,
                    **options(aggregation, groups[rows]),
                    reduce=lambda count, n=other: count + n,
                )
                assert part.tolist() == [pytest.approx(row) for row in whole[rows].tolist()]


def test_step_weights_name_a_missing_input(subtests):
    for aggregation, missing in [("fixed_length", "fixed_length"), ("group_mean", "group_ids")]:
        with subtests.test(aggregation=aggregation, missing=missing), pytest.raises(ConfigError, match=missing):
            step_weights(MASK, aggregation)


def test_row_mean_weights_make_the_loss_the_mean_of_row_means():
    # on-policy the loss of a step is -A: rows of A = 1, 3 with lengths 3, 1 and an empty row: -(1 + 3)/3
    loss, _ = loss_and_gradient(
        double([[-1.0] * 3] * 3),
        double([1, 3, 9]),
        ObjectiveConfig(),
        mask=MASK,
        weights=step_weights(MASK, "row_mean"),
    )
    assert loss.item() == pytest.approx(-4 / 3)
