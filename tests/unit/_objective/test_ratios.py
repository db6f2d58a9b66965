"""Probability ratios at the level of steps and of rows: values, gradients, holes, and rows without a step."""

import math
from itertools import product
from typing import get_args

import pytest
import torch

from grpo._objective.ratios import MAX_LOG_RATIO, RatioLevel, bounded_exp, either, log_ratio_at_level, past_bounds
from tests.support.objective_inputs import double

LEVELS = ["step", "row", "row_sum", "row_step", "none"]


def test_the_allowed_ratio_levels_are_the_tested_ones():
    assert list(get_args(RatioLevel)) == LEVELS


# Row 0 has a hole in the middle, row 1 is full, row 2 has no step at all.
MASK = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
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
    torch.testing.assert_close(log_ratio_at_level(LOG_RATIO, MASK, level), double(VALUES[level]), rtol=0, atol=1e-15)


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
    at_level = log_ratio_at_level(torch.where(MASK, leaf, 0.0), MASK, level)
    (gradient,) = torch.autograd.grad((at_level * torch.where(MASK, SLOPES, 0.0)).sum(), leaf)
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


@pytest.mark.parametrize(("level", "shape"), list(product(LEVELS, [(0, 3), (3, 0)])))
def test_every_level_accepts_batches_without_rows_or_steps(level, shape):
    at_level = log_ratio_at_level(torch.zeros(shape), torch.ones(shape, dtype=torch.bool), level)
    assert bounded_exp(at_level).shape == ((shape[0], 1) if level in ("row", "row_sum") else shape)
