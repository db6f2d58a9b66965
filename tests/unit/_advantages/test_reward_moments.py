"""Mean and standard deviation of every reward since the run began."""

import pytest
import torch

from grpo._advantages.reward_moments import RewardMoments


def moments_of(*batches: torch.Tensor) -> RewardMoments:
    moments = RewardMoments()
    for rewards in batches:
        moments.add(rewards)
    return moments


def test_without_any_reward_the_mean_is_none_and_the_std_is_0():
    assert moments_of().mean is None
    assert moments_of(torch.zeros(0)).mean is None
    assert moments_of().std == 0


def test_batches_of_any_size_give_the_moments_of_all_rewards(subtests):
    for sizes in [[30], [1, 29], [10, 1, 19], [15, 15]]:
        with subtests.test(sizes=sizes):
            rewards = 100 + torch.randn(30, dtype=torch.float64)
            moments = moments_of(*rewards.split(sizes))
            assert moments.mean == pytest.approx(rewards.mean().item(), rel=1e-14)
            assert moments.std == pytest.approx(rewards.std(correction=0).item(), rel=1e-11)


def test_equal_rewards_have_no_standard_deviation(subtests):
    for value in [0.3, 0.9, -0.7]:
        with subtests.test(value=value):
            same = torch.full((7,), value)
            near = same.nextafter(torch.tensor(1.0))
            assert moments_of(same, same[:3], near).std == 0
