"""What a failing parity case prints: the formula, both values side by side, and the settings of the case."""

import math

import pytest
import torch
from torch import Tensor

from tests.support.peer_cases import TOLERANCE, assert_equal, assert_equal_losses


def failure_of(ours: Tensor, theirs: Tensor, **options: float) -> str:
    with pytest.raises(AssertionError) as failure:
        assert_equal("the clipped loss", ours, theirs, "seed 7, Clip(low=0.2)", **options)
    return str(failure.value)


def test_a_failure_shows_both_values_the_formula_and_the_case() -> None:
    ours, theirs = torch.tensor([[1.0, 0.123456789012345], [1.0, 0.25]], dtype=torch.float64)
    lines = failure_of(ours, theirs).splitlines()
    assert lines[0] == "the clipped loss: 1 of 2 entries differ, by up to 0.127."
    assert lines[1].split() == ["entry", "ours", "theirs"]
    assert lines[2].split() == ["[1]", "0.123456789012345", "0.25"]
    assert lines[3].strip() == "case: seed 7, Clip(low=0.2)"


def test_a_non_finite_number_counts_as_a_difference() -> None:
    for value in (math.nan, math.inf):
        assert str(value) in failure_of(torch.tensor([value, 0.5]), torch.tensor([0.5, 0.5]))
        assert str(value) in failure_of(torch.tensor([0.5, 0.5]), torch.tensor([value, 0.5]))


def test_a_different_shape_counts_as_a_difference() -> None:
    assert "ours is [2], theirs [2, 1]" in failure_of(torch.zeros(2), torch.zeros(2, 1))


def test_differences_within_the_tolerance_pass_and_larger_ones_fail() -> None:
    theirs = torch.tensor([4.0, 0.0], dtype=torch.float64)
    assert_equal("", theirs + 3.9 * TOLERANCE, theirs, "")  # relative to the largest entry
    failure_of(theirs + 4.1 * TOLERANCE, theirs)
    assert_equal("", theirs + 0.09, theirs, "", allowed=0.1)
    failure_of(theirs + 0.11, theirs, allowed=0.1)
    assert_equal("", torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool), "")
    failure_of(torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool))


def test_losses_are_compared_in_value_and_gradient() -> None:
    leaf = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    other = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    same_value = leaf.detach().sum() + (leaf.detach() - leaf).sum()  # equal to leaf.sum(), with the opposite gradient
    assert_equal_losses("the loss", leaf.sum(), leaf.sum() + 0.0, {"log_probs": leaf, "entropy": other}, "seed 0")
    with pytest.raises(AssertionError, match=r"the loss, gradient in log_probs: 2 of 2 entries differ, by up to 2"):
        assert_equal_losses("the loss", leaf.sum(), same_value, {"log_probs": leaf}, "seed 0")
