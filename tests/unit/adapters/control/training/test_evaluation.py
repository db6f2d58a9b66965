"""Evaluations run the most likely actions from fixed starts, and change neither the policy nor random generators."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from adapters.control import EnvironmentReward, EpisodeOptions, EpisodePolicy, Evaluation, FromTorch, evaluate_policy
from adapters.control.environments.episodes import episode_starts
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError, ContractError
from tests.support.control_environments import UNIT, Chance, Crossing, Spaces
from tests.support.control_policies import policy_of


def trained(env: Any = "Pendulum-v1", **options: Any) -> EpisodePolicy:
    policy = policy_of(env, **{"num_members": 3, "hidden": (8,), "max_episode_steps": 9} | options)
    config = GRPOConfig(group_size=3, seed=0)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())
    for iteration in range(2):
        trainer.step(episode_starts(2)(iteration))
    return policy


def everything_random() -> list[Any]:
    return [torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()]  # noqa: NPY002


def test_an_evaluation_changes_no_policy_state_mode_or_generator(subtests: pytest.Subtests) -> None:
    laplace = FromTorch(UNIT, 2, lambda mean: torch.distributions.Laplace(mean, 0.5))  # draws from a global generator
    policies = trained(normalize_observations=True), trained(lambda: Spaces(UNIT, UNIT), distribution=laplace)
    for policy, deterministic, is_training in (
        (policies[0], True, True),
        (policies[0], False, False),
        (policies[1], False, True),
    ):
        with subtests.test(policy=policies.index(policy), deterministic=deterministic, is_training=is_training):
            policy.train(is_training)
            policy.actor[0].eval()  # a part that the user keeps in evaluation mode
            before = {name: value.clone() for name, value in policy.state_dict().items()}
            drawn = everything_random()
            evaluate_policy(policy, num_episodes=4, deterministic=deterministic)
            assert everything_random() == drawn
            for name, value in policy.state_dict().items():
                assert torch.equal(value, before[name]), name
            assert (policy.training, policy.actor[0].training) == (is_training, False)


def test_an_evaluation_is_repeatable() -> None:
    policy = trained()
    first, second = evaluate_policy(policy, num_episodes=4), evaluate_policy(policy, num_episodes=4)
    assert first.returns.tolist() == second.returns.tolist()
    noisy = evaluate_policy(policy, num_episodes=4, deterministic=False)
    assert noisy.returns.tolist() == evaluate_policy(policy, num_episodes=4, deterministic=False).returns.tolist()
    assert noisy.returns.tolist() != first.returns.tolist()
    assert evaluate_policy(policy, num_episodes=4, seed=1).returns.tolist() != first.returns.tolist()


def test_evaluation_takes_the_most_likely_actions_unless_told_to_sample() -> None:
    policy = EpisodePolicy("CartPole-v1", num_members=2, options=EpisodeOptions(hidden=(4,)))
    with torch.no_grad():
        policy.actor[1].weight.zero_()
        policy.actor[1].bias.copy_(torch.tensor([0.0, 0.1]))  # always to the right
    result = evaluate_policy(policy, num_episodes=3)
    assert set(result.lengths.tolist()) <= {8, 9, 10}  # the pole falls at once
    assert result.returns.tolist() == result.lengths.tolist()  # 1 per step
    assert result.mean_return == result.returns.mean()
    noisy = evaluate_policy(policy, num_episodes=20, deterministic=False)
    assert noisy.mean_return > 12  # left and right about equally often


def test_an_evaluation_obeys_action_masks() -> None:
    policy = EpisodePolicy(lambda: Crossing(allows=2), action_mask="info", num_members=2)
    # the environment raises for a masked action
    assert evaluate_policy(policy, num_episodes=4).lengths.tolist() == [6] * 4


def test_an_evaluation_restores_the_mode_after_an_error() -> None:
    policy = EpisodePolicy(lambda: Crossing(tells=False), action_mask="info", num_members=1).train()
    with pytest.raises(ContractError):
        evaluate_policy(policy)
    assert policy.training


def test_limits_of_training_apply_to_evaluations_only_if_the_environment_has_none() -> None:
    for env_id, length in (("Pendulum-v1", 200), ("CliffWalking-v1", 7)):  # a first policy walks into a wall
        policy = EpisodePolicy(env_id, num_members=2, options=EpisodeOptions(max_episode_steps=7))
        assert evaluate_policy(policy, num_episodes=2).lengths.tolist() == [length] * 2
        assert evaluate_policy(policy, num_episodes=2, max_steps=11).lengths.tolist() == [11, 11]


def test_an_evaluation_prints_its_mean_and_numbers_below_1_are_refused() -> None:
    result = Evaluation(returns=np.array([1.0, 3.0]), lengths=np.array([10, 21]))
    assert str(result) == "return 2.0 +- 1.0 in 2 episodes of 16 steps"
    for name, value, words in (
        ("num_episodes", 0, ">= 1; got int 0"),
        ("max_steps", 0, ">= 1, or None; got int 0"),
        ("seed", -1, ">= 0; got int -1"),
    ):
        with pytest.raises(ConfigError, match=f"{name} must be an integer {words}"):
            evaluate_policy(EpisodePolicy(Chance), **{name: value})
    evaluate_policy(EpisodePolicy(Chance), num_episodes=1, max_steps=1, seed=0)
