"""Mean and standard deviation of every reward since the run began."""

import json

import pytest
import torch

from grpo._advantages.reward_moments import RewardMoments


def moments_of(*batches: torch.Tensor) -> RewardMoments:
    moments = RewardMoments()
    for rewards in batches:
        moments.add(rewards)
    return moments


def test_mean_and_std_of_two_batches_equal_hand_worked_values():
    # 1 3: mean 2, std 1.   1 3 5 7: mean 4, squares 9 + 1 + 1 + 9 = 20 over 4
    first = moments_of(torch.tensor([1.0, 3.0]))
    assert (first.mean, first.std) == (2.0, 1.0)
    both = moments_of(torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0]))
    assert (both.mean, both.std) == (4.0, pytest.approx(5**0.5, rel=1e-15))


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


def test_the_state_survives_json():
    first, second = moments_of(torch.tensor([1.0, 3.0, 8.0])), RewardMoments()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for moments in (first, second):
        moments.add(torch.tensor([2.0, 9.0]))
    assert (first.mean, first.std) == (second.mean, second.std)
    assert first.state_dict() == second.state_dict()
