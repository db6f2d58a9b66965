"""The clipped surrogate, value and gradient, inside and outside its bounds."""

import pytest
import torch

from grpo import clipped_surrogate


def value_and_gradient(ratio: float, advantage: float, clip_low: float, clip_high: float) -> tuple[float, float]:
    """One step's loss and its derivative with respect to the ratio."""
    leaf = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss = clipped_surrogate(leaf, advantages, clip_low=clip_low, clip_high=clip_high)
    loss.sum().backward()
    return loss.item(), leaf.grad.item()


# loss = -min(rho A, clip(rho, 1 - low, 1 + high) A); inside, or where the min takes the unclipped arm, d loss / d rho = -A
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.0),  # inside
        (0.9, 2.0, -1.8, -2.0),
        (1.1, -2.0, 2.2, 2.0),
        (0.9, -2.0, 1.8, 2.0),
        (1.5, 2.0, -2.4, 0.0),  # good and already more likely: -min(3, 2.4), no more push
        (0.5, 2.0, -1.0, -2.0),  # good but less likely: -min(1, 1.6), pull back
        (1.5, -2.0, 3.0, 2.0),  # bad and more likely: -min(-3, -2.4), pull back
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely: -min(-1, -1.6), no more push
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_symmetric_bounds(ratio, advantage, loss, gradient):
    assert value_and_gradient(ratio, advantage, 0.2, 0.2) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.25, 1.0, -1.25, -1.0),  # beyond 1.2, inside 1.28
        (1.30, 1.0, -1.28, 0.0),
        (1.30, -1.0, 1.30, 1.0),
        (0.85, -1.0, 0.85, 1.0),
        (0.75, -1.0, 0.80, 0.0),  # beyond 0.8; would be inside 1 - 0.28
        (0.75, 1.0, -0.75, -1.0),
    ],
)
def test_a_higher_upper_bound(ratio, advantage, loss, gradient):
    assert value_and_gradient(ratio, advantage, 0.2, 0.28) == pytest.approx((loss, gradient))


@pytest.mark.parametrize("ratio", [1e-6, 0.01, 0.5, 0.99])
def test_clip_low_of_one_is_no_lower_bound(ratio):
    # -min(-rho, -clip(rho, 0, 1.2)) = rho
    assert value_and_gradient(ratio, -1.0, 1.0, 0.2) == pytest.approx((ratio, 1.0))


def test_clip_low_of_one_leaves_the_upper_bound():
    assert value_and_gradient(1.5, 1.0, 1.0, 0.2) == pytest.approx((-1.2, 0.0))


@pytest.mark.parametrize(("ratio", "advantage"), [(1.01, 1.0), (0.99, -1.0)])
def test_bounds_of_zero_stop_at_one(ratio, advantage):
    assert value_and_gradient(ratio, advantage, 0.0, 0.0) == pytest.approx((-advantage, 0.0))


def test_one_advantage_per_row_counts_for_all_its_steps():
    ratio = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
    loss = clipped_surrogate(ratio, torch.tensor([[1.0], [-1.0]]), clip_low=0.25, clip_high=0.25)
    assert loss.tolist() == [[-0.5, -1.0, -1.25], [0.75, 1.0, 1.5]]


def test_advantages_per_step_count_step_by_step():
    ratio, advantages = torch.tensor([[0.5, 1.0, 1.5]]), torch.tensor([[-4.0, 3.0, 2.0]])
    # -min(-2, -3) = 3;  -3;  -min(3, 2.5)
    assert clipped_surrogate(ratio, advantages, clip_low=0.25, clip_high=0.25).tolist() == [[3.0, -3.0, -2.5]]
