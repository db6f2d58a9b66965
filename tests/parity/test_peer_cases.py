"""What counts as a difference between two libraries."""

import math

import pytest
import torch

from tests.support.peer_cases import TOLERANCE, assert_equal, assert_equal_losses

THEIRS = torch.tensor([4.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("value", [4.1 * TOLERANCE, math.nan, math.inf])  # relative to the largest entry, 4
def test_large_differences_other_shapes_and_what_is_not_finite_count(value: float) -> None:
    assert_equal("", THEIRS + 3.9 * TOLERANCE, THEIRS, "")
    for ours in (THEIRS + torch.tensor([0.0, value]), THEIRS + torch.tensor([value, 0.0]), THEIRS.unsqueeze(1)):
        for one, other in ((ours, THEIRS), (THEIRS, ours)):
            with pytest.raises(AssertionError, match=r"^the loss: .*(\n.*)*case: seed 7"):
                assert_equal("the loss", one, other, "seed 7")


def test_losses_are_compared_in_value_and_gradient() -> None:
    leaf = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    same_value = leaf.detach().sum() + (leaf.detach() - leaf).sum()  # equal to leaf.sum(), with the opposite gradient
    assert_equal_losses("the loss", leaf.sum(), leaf.sum() + 0.0, {"log_probs": leaf}, "seed 0")
    with pytest.raises(AssertionError, match=r"the loss, gradient in log_probs: 2 of 2 entries differ, by up to 2"):
        assert_equal_losses("the loss", leaf.sum(), same_value, {"log_probs": leaf}, "seed 0")
