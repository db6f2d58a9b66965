"""What the loss computes with: step weights, ratios, the steps that a surrogate reads, and metrics."""

import math
from collections.abc import Mapping
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from grpo import ConfigError, Mask, Truncate, step_weights
from grpo._objective.metrics import Measured, all_moments, measured_steps
from grpo._objective.ratios import MAX_LOG_RATIO, RatioLevel, bounded_exp, either, log_ratio_at_level, past_bounds
from grpo._objective.weights import Aggregation
from grpo.surrogates import Steps
from tests.support.objective_inputs import double, objective_inputs

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


LEVELS = get_args(RatioLevel)


# Row 0 has a hole in the middle, row 1 is full, row 2 has no step at all.
HOLES = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
LOG_RATIO = double([[0.3, 0.0, -0.1], [0.5, 0.2, -0.1], [0.0, 0.0, 0.0]])
# means: (.3 - .1)/2 = .1, (.5 + .2 - .1)/3 = .2, none: 0.    sums: .2, .6, 0
VALUES = {
    "step": [[0.3, 0.0, -0.1], [0.5, 0.2, -0.1], [0.0, 0.0, 0.0]],
    "row": [[0.1], [0.2], [0.0]],
    "row_sum": [[0.2], [0.6], [0.0]],
    "row_step": [[0.1, 0.0, 0.1], [0.2, 0.2, 0.2], [0.0, 0.0, 0.0]],  # the row's, at every valid step
    "none": [[0.0] * 3] * 3,
}


@pytest.mark.parametrize("level", LEVELS)
def test_log_ratios_at_each_level_equal_hand_worked_values(level):
    torch.testing.assert_close(log_ratio_at_level(LOG_RATIO, HOLES, level), double(VALUES[level]), rtol=0, atol=1e-15)


# What each step's loss has as its slope in the log-ratio of the level.
SLOPES = double([[1.0, 2.0, 4.0], [3.0, 5.0, 7.0], [11.0, 13.0, 17.0]])
ON_STEPS = [[1.0, 0.0, 4.0], [3.0, 5.0, 7.0], [0.0, 0.0, 0.0]]
GRADIENTS = {
    "step": ON_STEPS,
    "row": [[2.5, 0.0, 2.5], [5.0, 5.0, 5.0], [0.0, 0.0, 0.0]],  # (1 + 4)/2 on two steps, (3 + 5 + 7)/3 on three
    "row_sum": [[5.0, 0.0, 5.0], [15.0, 15.0, 15.0], [0.0, 0.0, 0.0]],
    "row_step": ON_STEPS,
    "none": ON_STEPS,
}


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_log_ratios_at_each_level_equal_hand_worked_values(level):
    """With respect to the log-probs, of which those outside the mask have been replaced by 0."""
    leaf = LOG_RATIO.clone().requires_grad_()
    at_level = log_ratio_at_level(torch.where(HOLES, leaf, 0.0), HOLES, level)
    (gradient,) = torch.autograd.grad((at_level * torch.where(HOLES, SLOPES, 0.0)).sum(), leaf)
    torch.testing.assert_close(gradient, double(GRADIENTS[level]), rtol=1e-15, atol=0)


# value and slope; at the bound itself the slope is still the value
@pytest.mark.parametrize(("x", "value", "slope"), [
    (25.0, math.exp(20), 0.0), (20.0, math.exp(20), math.exp(20)), (2.0, math.exp(2), math.exp(2)), (0.0, 1.0, 1.0),
    (-2.0, math.exp(-2), math.exp(-2)), (-20.0, math.exp(-20), math.exp(-20)), (-25.0, math.exp(-20), 0.0),
    (math.inf, math.exp(20), 0.0),
])  # fmt: skip
def test_beyond_twenty_the_exponential_is_constant(x, value, slope):
    leaf = double([[x]]).requires_grad_()
    ratio = bounded_exp(leaf)
    assert (MAX_LOG_RATIO, ratio.item()) == (20.0, pytest.approx(value, rel=1e-14))
    assert torch.autograd.grad(ratio, leaf)[0].item() == pytest.approx(slope, rel=1e-14)


def test_bounded_exp_of_nan_is_nan():
    assert bounded_exp(double([[math.nan, 0.0]])).isnan().tolist() == [[True, False]]


def test_a_ratio_passes_a_bound_only_in_the_direction_of_the_advantage():
    below, above = past_bounds(double([[0.5, 0.25, 2.0, 4.0]]).expand(3, 4), double([[-1.0], [1.0], [0.0]]), 0.5, 1.0)
    assert below.tolist() == [[False, True, False, False], [False] * 4, [False] * 4]
    assert above.tolist() == [[False] * 4, [False, False, False, True], [False] * 4]


def test_either_does_not_round_its_two_numbers_to_float32():
    assert either(torch.tensor([[True, False]]), 0.1, 0.3, like=double([[0.0, 0.0]])).tolist() == [[0.1, 0.3]]


NAN, INF = math.nan, math.inf
STEP_MASK = torch.tensor([[True, False, True]])
LOG_PROBS = double([[-1.0, NAN, -2.0]])
OLD = double([[-1.5, INF, -1.75]])
BEHAVIOUR = double([[-2.0, -INF, NAN]])


def steps_of(correction=None, **changes) -> Steps:
    tensors = {"log_probs": LOG_PROBS, "advantages": double([3.0]), "old_log_probs": OLD, "mask": STEP_MASK}
    return Steps(objective_inputs(**{**tensors, **changes}), correction)


def test_values_are_zero_outside_the_mask():
    steps = steps_of(behaviour_log_probs=BEHAVIOUR, advantages=double([[1.0, NAN, -2.0]]))
    assert steps.mask is STEP_MASK
    assert (steps.log_probs.tolist(), steps.old_log_probs.tolist()) == ([[-1, 0, -2]], [[-1.5, 0, -1.75]])
    assert (steps.sampled_log_probs.tolist(), steps.advantages.tolist()) == ([[-2, 0, -1.75]], [[1, 0, -2]])
    assert steps.constant(double([[5.0, NAN, 6.0]])).tolist() == [[5, 0, 6]]
    selected = torch.tensor([[True, True, False]])  # is kept unchanged, and one advantage per row is one column
    steps = steps_of(selected=selected)
    assert steps.selected is steps.require_selected() is selected
    assert steps.advantages.tolist() == [[3.0]]


def test_without_old_log_probs_the_ratio_is_1_and_has_the_gradient_of_log_probs():
    leaf = LOG_PROBS.clone().requires_grad_()
    steps = steps_of(log_probs=leaf, old_log_probs=None)
    assert steps.old_is_current
    assert not steps_of(old_log_probs=LOG_PROBS).old_is_current
    assert torch.equal(steps.old_log_probs, steps.log_probs)
    assert torch.equal(steps.sampled_log_probs, steps.log_probs)
    assert steps.ratio().tolist() == [[1, 1, 1]]
    assert torch.autograd.grad(steps.ratio().sum(), leaf)[0].tolist() == [[1, 0, 1]]


def test_sampled_log_probs_are_the_behaviours_if_known_and_else_the_old_policys():
    assert torch.equal(steps_of().sampled_log_probs, steps_of().old_log_probs)
    assert steps_of(old_log_probs=None, behaviour_log_probs=BEHAVIOUR).sampled_log_probs.tolist() == [[-2, 0, -2]]


def test_the_ratio_is_clamped_and_the_log_ratio_is_not():
    """Both are those of steps unless another level is named."""
    steps = steps_of(log_probs=double([[-1.0, NAN, -2.0]]), old_log_probs=double([[-31.0, NAN, 28.0]]))
    assert steps.log_ratio().tolist() == steps.log_ratio("step").tolist() == [[30, 0, -30]]
    assert steps.ratio()[0].tolist() == pytest.approx([math.exp(20), 1, math.exp(-20)], rel=1e-14)
    assert steps.ratio() is steps.ratio("step")


def test_a_correction_without_behaviour_log_probs_is_refused():
    assert steps_of().sampler_weights is None
    message = r"objective\.sampler_correction=Mask\(.*\) needs behaviour_log_probs\. Return them in SampledActions"
    with pytest.raises(ConfigError, match=message):
        steps_of(Mask())


METRIC_MASK = torch.tensor([[True, True, False], [True, False, False]])


def moments(per_step: Mapping[str, Tensor | float], mask: Tensor = METRIC_MASK, **terms: Tensor) -> dict[str, Tensor]:
    return Measured(terms=terms, per_step=per_step, mask=mask).moments()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.0, 3.0, math.nan], [-2.0, math.inf, 9.0]], [3, 2, 14]),  # 1, 3 | -2: sum 2, squares 14
        ([[2.0], [5.0]], [3, 9, 33]),  # one value per row counts at each of its steps: 2, 2 | 5
        ([[True, False, True], [True, True, True]], [3, 2, 2]),
        ([[1e8, 1.0, 0.0], [0.0, 0.0, 0.0]], [3, 1e8 + 1, 1e16 + 1]),  # in float32, 1e8 + 1 is 1e8
    ],
)
def test_moments_are_over_the_valid_steps_and_in_float64(values, expected):
    found = moments({"entropy": torch.tensor(values)})
    assert (list(found), found["entropy"].tolist(), found["entropy"].dtype) == (["entropy"], expected, torch.float64)


def test_a_scalar_counts_once_per_valid_step():
    values = {"ratio": 1.0, "entropy": torch.zeros(2, 3), "clip_fraction": 0.0, "other": 3.0}
    found = {name: value.tolist() for name, value in moments(values).items()}
    assert found == {"entropy": [3, 0, 0], "ratio": [3, 3, 3], "clip_fraction": [3, 0, 0], "other": [3, 9, 27]}


def test_loss_terms_are_reported_as_shares_with_a_count_of_0():
    found = moments({}, policy_loss=torch.tensor(-2.5), total_loss=torch.tensor(-2.25, dtype=torch.float64))
    as_lists = {name: values.tolist() for name, values in found.items()}
    assert as_lists == {"policy_loss": [0, -2.5, 0], "total_loss": [0, -2.25, 0]}
    assert all(values.dtype == torch.float64 for values in found.values())


def test_micro_batches_that_are_measured_together_have_the_moments_that_each_has_alone():
    def measured(num_rows: int, width: int = 1, **more: Tensor) -> Measured:
        values = {"ratio": torch.rand(num_rows, 1), "kl": torch.randn(num_rows, width), "clip_fraction": 0.0}
        terms = {"policy_loss": torch.rand(()), "total_loss": torch.rand((), dtype=torch.float64)}
        return Measured(terms=terms, per_step=values | more, mask=torch.rand(num_rows, width) < 0.8)

    torch.manual_seed(0)
    ready = {"own": torch.tensor([1.0, 2.0, 4.0])}
    kept = measured(5, kept=torch.ones(5, 1))
    added = [measured(200), measured(7, 3), ready, measured(31), measured(9, 3), measured(1), kept]
    together = all_moments(added)
    assert together[2] is ready
    for found, each in zip(together, added, strict=True):
        alone = each.moments() if isinstance(each, Measured) else each
        assert found.keys() == alone.keys()
        assert all(torch.equal(value, alone[name]) for name, value in found.items())


def test_only_metrics_of_the_given_inputs_are_reported():
    # log-probs and log-ratios are 0;  sampler weights 1, 2 | 1/2;  one selected step;  entropy 1 at each step
    inputs = {
        "behaviour_log_probs": double([[1.0, 0.5, 9.0], [2.0, 9.0, 9.0]]).log(),
        "selected": torch.tensor([[False, True, True], [False, True, True]]),
    }
    log_probs = torch.zeros(METRIC_MASK.shape, dtype=torch.float64)
    steps = Steps(
        objective_inputs(log_probs, torch.ones(2), old_log_probs=None, mask=METRIC_MASK, **inputs), Truncate()
    )
    found = measured_steps({}, steps, "step", None, {"entropy": torch.ones(2, 3), "kl": None}).moments()
    fractions = ("ratio_clamped_fraction", "clip_fraction_low", "clip_fraction_high", "clip_fraction")
    assert {name: values.tolist() for name, values in found.items()} == {
        "ratio": [3, 3, 3],
        **{name: [3, 0, 0] for name in fractions},
        "sampler_ratio": pytest.approx([3, 3.5, 5.25]),
        "selected_fraction": [3, 1, 1],
        "entropy": [3, 3, 3],
    }
