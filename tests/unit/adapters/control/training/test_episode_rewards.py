"""Rewards of episodes worked out by hand, and the advantages that the trainer computes from them."""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from adapters.control import EnvironmentReward, EpisodeOptions, EpisodePolicy, StepReward, effort
from adapters.control.environments.episodes import Episode, EpisodeStart, episode_mask
from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, WeightedRewards
from grpo.errors import ConfigError, RewardError
from tests.support.control_environments import UNIT, Chance, Spaces
from tests.support.control_episodes import episode_of
from tests.support.control_policies import policy_of

STARTS = [EpisodeStart(seed=1), EpisodeStart(seed=2)]


def episode(*rewards: float, actions: Tensor | None = None) -> Episode:
    return episode_of(rewards, actions=torch.zeros(len(rewards), 2) if actions is None else actions)


EPISODES = [episode(1.0), episode(2.0, 4.0), episode(3.0, 5.0, 7.0)]


def rewards_of(model: Any, episodes: list[Episode] = EPISODES) -> Tensor:
    return model.compute_rewards([EpisodeStart(seed=1)] * len(episodes), episodes)


def test_rewards_per_step_are_padded_with_zeros() -> None:
    rewards = rewards_of(EnvironmentReward())
    assert rewards.dtype == torch.float64
    assert rewards.tolist() == [[1.0, 0.0, 0.0], [2.0, 4.0, 0.0], [3.0, 5.0, 7.0]]


def test_rewards_per_episode_are_discounted_sums() -> None:
    for discount, expected in (
        (1.0, [1.0, 6.0, 15.0]),
        (0.5, [1.0, 2.0 + 2.0, 3.0 + 2.5 + 1.75]),
        (0.0, [1.0, 2.0, 3.0]),
    ):
        assert rewards_of(EnvironmentReward(per="episode", discount=discount)).tolist() == expected


def test_discounts_that_have_no_effect_or_no_meaning_are_refused() -> None:
    settings: list[dict[str, Any]] = [{"discount": 0.9}, {"per": "episode", "discount": 1.1}, {"discount": -0.1}]
    for one in settings:
        with pytest.raises(ConfigError, match=rf"\[0, 1\], and be 1 with per='step'; got .*discount={one['discount']}"):
            EnvironmentReward(**one)


def test_the_cost_of_effort_is_the_negative_sum_of_squared_actions() -> None:
    taken = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
    rewards = rewards_of(StepReward(effort), [episode(0.0, 0.0, actions=taken), episode(0.0)])
    assert rewards.tolist() == [[-5.0, -0.25], [0.0, 0.0]]


def test_a_term_of_a_wrong_length_is_named() -> None:
    first = episode(5.0)

    def late(one: Episode) -> Tensor:
        return one.rewards if one is first else one.rewards[1:]

    def total(one: Episode) -> Tensor:
        return one.rewards if one is first else one.rewards.sum()

    for term, got in ((late, r"late must return one number per step, \[3\]; got \[2\]"), (total, r"total .* got \[\]")):
        with pytest.raises(RewardError, match=f"{got} for row 1"):
            rewards_of(StepReward(term), [first, EPISODES[2]])


def trainer_of(reward: Any, policy: EpisodePolicy | None = None, **settings: Any) -> GRPOTrainer:
    policy = policy or policy_of(lambda: Chance(5, end_above=0.8), num_members=3, hidden=(4,))
    return GRPOTrainer(config=GRPOConfig(group_size=3, seed=0, **settings), policy=policy, reward_model=reward)


def test_the_default_advantage_equals_hand_worked_values() -> None:
    """Returns to go minus their mean over the episodes of the group that are active at that step.

    G = [1], [6, 4], [15, 12, 7]; the means are (1 + 6 + 15) / 3 = 22/3, (4 + 12) / 2 = 8, and 7 for the last episode alone.
    """
    reward = EnvironmentReward()
    batch = ExperienceBatch.from_rows(
        [EpisodeStart(seed=1)] * 3, EPISODES, rewards_of(reward), [0, 0, 0], mask=episode_mask(EPISODES)
    )
    expected = [[-19 / 3, 0.0, 0.0], [-4 / 3, -4.0, 0.0], [23 / 3, 4.0, 0.0]]
    torch.testing.assert_close(trainer_of(reward).advantages(batch), torch.tensor(expected, dtype=torch.float64))


def test_weighted_terms_are_added_and_reported_by_name() -> None:
    policy = EpisodePolicy(lambda: Chance(4), num_members=3, options=EpisodeOptions(hidden=(4,)))
    reward = WeightedRewards({"env": EnvironmentReward(), "effort": StepReward(effort)}, {"env": 1.0, "effort": 0.1})
    trainer = trainer_of(reward, policy)
    batch = trainer.collect(STARTS)
    metrics = trainer.update(batch)
    env = torch.stack([one.rewards for one in batch.actions])
    cost = torch.stack([-one.actions.double().square().sum(1) for one in batch.actions])
    torch.testing.assert_close(batch.rewards, env + 0.1 * cost)
    assert metrics["rewards/env/mean"] == pytest.approx(float(env.sum(1).mean()))
    assert metrics["rewards/effort/mean"] == pytest.approx(float(cost.sum(1).mean()))
    assert metrics["rewards/mean"] == pytest.approx(float((env + 0.1 * cost).sum(1).mean()))


class Preferred(nn.Module):
    """A learned reward model: one number per episode, the sum of scores per step."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 1)
        self.asked_in_training = False

    def compute_rewards(self, states: Any, actions: list[Episode]) -> Tensor:
        self.asked_in_training |= self.training
        return torch.stack([self.score(one.observations).sum() for one in actions])


def test_a_learned_reward_model_is_not_trained() -> None:
    reward = Preferred()
    trainer = trainer_of(
        reward, EpisodePolicy("Pendulum-v1", num_members=3, options=EpisodeOptions(hidden=(4,), max_episode_steps=6))
    )
    weights = [value.clone() for value in reward.parameters()]
    batch = trainer.collect(STARTS)
    assert not batch.rewards.requires_grad
    expected = [reward.score(one.observations).sum().item() for one in batch.actions]
    torch.testing.assert_close(batch.rewards, torch.tensor(expected))
    before = [value.clone() for value in trainer.policy.parameters()]
    trainer.update(batch)
    assert not reward.asked_in_training
    assert all(torch.equal(now, then) for now, then in zip(reward.parameters(), weights, strict=True))
    assert any(not torch.equal(now, then) for now, then in zip(trainer.policy.parameters(), before, strict=True))


def test_episodes_of_one_step_have_one_reward_per_row(subtests: pytest.Subtests) -> None:
    """Blackjack often gives such a batch. The advantages are the differences from the group's mean."""
    for reward in (EnvironmentReward(), StepReward(lambda one: one.rewards)):
        with subtests.test(reward=type(reward).__name__):
            policy = policy_of(lambda: Spaces(UNIT, spaces.Discrete(4), length=1), num_members=3, hidden=(4,))
            trainer = trainer_of(reward, policy)
            batch = trainer.collect(STARTS)
            totals = torch.tensor([float(one.rewards.sum()) for one in batch.actions], dtype=torch.float64).view(2, 3)
            expected = (totals - totals.mean(1, keepdim=True)).flatten()
            torch.testing.assert_close(trainer.advantages(batch).flatten(), expected)
            assert trainer.update(batch)["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
            both = WeightedRewards({"env": reward, "own": StepReward(lambda one: one.rewards)})
            assert trainer_of(both, policy).collect(STARTS).rewards.shape == (6,)
    assert rewards_of(EnvironmentReward(), EPISODES[:1]).shape == (1, 1)  # a single episode keeps [N, T]
