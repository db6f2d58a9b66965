"""Rewards of episodes and advantages, of the group's mean and of a fitted value function, worked out by hand."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from adapters.control import EnvironmentReward, EpisodePolicy, FittedAdvantages, StepReward, effort
from adapters.control.environments.episodes import Episode, EpisodeStart, episode_mask
from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, WeightedRewards
from grpo.errors import ConfigError, ContractError, RewardError
from tests.support.control_environments import UNIT, Chance, Spaces
from tests.support.control_episodes import episode_of
from tests.support.control_policies import IMAGE, policy_of

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


def batch_of(episodes: list[Episode], group_ids: Sequence[int] | None = None) -> ExperienceBatch:
    """Each episode is a group if nothing else is given."""
    rewards, groups = rewards_of(EnvironmentReward(), episodes), group_ids or range(len(episodes))
    states = [EpisodeStart()] * len(episodes)
    return ExperienceBatch.from_rows(states, episodes, rewards, list(groups), mask=episode_mask(episodes))


def test_the_default_advantage_equals_hand_worked_values() -> None:
    """Returns to go minus their mean over the episodes of the group that are active at that step.

    G = [1], [6, 4], [15, 12, 7]; the means are (1 + 6 + 15) / 3 = 22/3, (4 + 12) / 2 = 8, and 7 for the last episode alone.
    """
    batch = batch_of(EPISODES, [0, 0, 0])
    expected = [[-19 / 3, 0.0, 0.0], [-4 / 3, -4.0, 0.0], [23 / 3, 4.0, 0.0]]
    got = trainer_of(EnvironmentReward()).advantages(batch)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_weighted_terms_are_added_and_reported_by_name() -> None:
    policy = policy_of(lambda: Chance(4), num_members=3, hidden=(4,))
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

    def compute_rewards(self, states: Any, actions: list[Episode]) -> Tensor:
        return torch.stack([self.score(one.observations).sum() for one in actions])


def test_a_learned_reward_model_is_not_trained() -> None:
    reward = Preferred()
    trainer = trainer_of(reward)
    batch = trainer.collect(STARTS)
    assert not batch.rewards.requires_grad
    torch.testing.assert_close(batch.rewards, reward.compute_rewards(STARTS, batch.actions).detach())
    trainer.update(batch)
    assert reward.score.weight.grad is None


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


# --- a value function that is fitted, beside values that are worked out by hand


TWO = spaces.Discrete(3)
LINE = spaces.Box(-10.0, 10.0, (1,), np.float32)


def policy_on(space: spaces.Space) -> EpisodePolicy:
    return EpisodePolicy(lambda: Spaces(space, spaces.Discrete(2)), num_members=1)


def seen(observations: Any, rewards: Sequence[float], final: Any, *, terminated: bool = True) -> Episode:
    return episode_of(rewards, observations=observations, final=final, terminated=terminated)


def one_hot(*places: int) -> list[list[float]]:
    return [[float(place == number) for number in range(3)] for place in places]


def whitened(values: list[list[float]], mask: torch.Tensor) -> torch.Tensor:
    padded = torch.tensor(values, dtype=torch.float64)
    valid = padded[mask]
    return torch.where(mask, (padded - valid.mean()) / valid.std(correction=0), 0.0)


def chain() -> list[Episode]:
    """0 -> 1 -> end. The second step pays 1 or 3, so V(1) = 2, and with gamma 1/2, V(0) = 1."""
    return [seen(one_hot(0, 1), [0.0, reward], one_hot(2)[0]) for reward in (1.0, 3.0)]


def test_a_table_is_worked_by_hand() -> None:
    for gae_lambda, expected in (
        (0.0, [[0.0, -1.0], [0.0, 1.0]]),  # delta = r + gamma V' - V
        (1.0, [[-0.5, -1.0], [0.5, 1.0]]),  # + gamma times the advantage of the next step
    ):
        advantages = FittedAdvantages(policy_on(TWO), gamma=0.5, gae_lambda=gae_lambda, ridge=1e-9)
        batch = batch_of(chain())
        torch.testing.assert_close(advantages(batch), whitened(expected, batch.mask), rtol=1e-5, atol=1e-5)


def test_the_value_of_the_next_state_counts_unless_the_episode_terminated() -> None:
    """2 -> 2 pays 1 and is cut: with gamma 1/2, V(2) = 2. A row that ends there adds gamma V(2) = 1."""
    for terminated, value in ((True, 1.0), (False, 2.0)):
        loops = [seen(one_hot(2), [1.0], one_hot(2)[0], terminated=terminated)]
        into = [seen(one_hot(0), [reward], one_hot(2)[0], terminated=False) for reward in (0.0, 4.0)]
        batch = batch_of([*loops, *into])
        got = FittedAdvantages(policy_on(TWO), gamma=0.5, ridge=1e-9)(batch)
        mean = 2.0 + 0.5 * value  # V(0)
        expected = [[1.0 + 0.5 * value * (not terminated) - value]]
        expected += [[reward + 0.5 * value - mean] for reward in (0.0, 4.0)]
        torch.testing.assert_close(got, whitened(expected, batch.mask), rtol=1e-5, atol=1e-5)


def test_padding_has_no_advantage_and_changes_none() -> None:
    episodes = [*chain(), seen(one_hot(1), [2.5], one_hot(2)[0])]
    batch = batch_of(episodes)
    got = FittedAdvantages(policy_on(TWO), gamma=0.5, ridge=1e-9)(batch)
    assert float(got[2, 1]) == 0.0
    poisoned = copy.copy(batch.rewards)
    poisoned[2, 1] = 1e6
    object.__setattr__(batch, "rewards", poisoned)
    assert torch.equal(FittedAdvantages(policy_on(TWO), gamma=0.5, ridge=1e-9)(batch), got)


def bandit(count: int, seed: int, value: Callable[[Any], Any]) -> tuple[list[Episode], np.ndarray]:
    """One step from x, uniform in [-2, 2]. The reward is value(x), and noise."""
    rng = np.random.default_rng(seed)
    x, noise = rng.uniform(-2.0, 2.0, count), rng.standard_normal(count)
    return [seen([[at]], [value(at) + more], [0.0]) for at, more in zip(x, noise, strict=True)], noise


def test_fourier_features_fit_a_curve() -> None:
    episodes, noise = bandit(2000, 0, lambda x: 5.0 * np.sin(2.0 * x))
    got = FittedAdvantages(policy_on(LINE), gamma=0.9)(batch_of(episodes)).squeeze(1)
    expected = (noise - noise.mean()) / noise.std()
    assert np.corrcoef(got.numpy(), expected)[0, 1] > 0.95
    assert np.corrcoef(np.array([float(one.rewards) for one in episodes]), expected)[0, 1] < 0.4


def test_steps_of_earlier_iterations_are_used_and_the_oldest_forgotten() -> None:
    first, second = bandit(300, 1, np.cos)[0], bandit(200, 2, lambda x: x)[0]
    policy = policy_on(LINE)
    alone = FittedAdvantages(policy, gamma=0.9)(batch_of(second))
    for num_kept, is_forgotten in ((200, True), (250, False)):
        advantages = FittedAdvantages(policy, gamma=0.9, num_kept=num_kept)
        advantages(batch_of(first))
        assert torch.equal(advantages(batch_of(second)), alone) == is_forgotten


def test_small_images_with_a_network_of_ones_own_are_fitted_as_rows() -> None:
    space = spaces.Box(0, 255, (2, 1, 3), np.uint8)
    as_images = EpisodePolicy(lambda: Spaces(space, spaces.Discrete(2)), num_members=1, torso=torch.nn.Flatten())
    as_rows = EpisodePolicy(lambda: Spaces(space, spaces.Discrete(2)), num_members=1)
    assert as_images.encoder.is_image
    pixels, rewards = torch.randint(256, (6, 2, 1, 3), dtype=torch.uint8), torch.arange(6.0).tolist()
    found = [
        FittedAdvantages(policy, gamma=0.9)(batch_of([seen(rows.tolist(), rewards, last.tolist())]))
        for policy, rows, last in (
            (as_images, pixels, pixels[0]),
            (as_rows, pixels.flatten(1).float(), pixels[0].flatten().float()),
        )
    ]
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_cannot_be_fitted_is_refused() -> None:
    policy = policy_on(LINE)
    with pytest.raises(ConfigError, match=r"got images.*Keep the group's mean, or use a critic"):
        FittedAdvantages(policy_on(IMAGE), gamma=0.9)
    wrong: list[dict[str, Any]] = [{"gamma": 1.1}, {"gamma": -0.1}, {"gae_lambda": 1.1}, {"gae_lambda": -0.1}]
    for settings in (*wrong, {"width": 0.0}, {"ridge": 0.0}):
        with pytest.raises(ConfigError, match="must lie in"):
            FittedAdvantages(policy, **{"gamma": 0.9} | settings)
    advantages = FittedAdvantages(policy, gamma=1.0, gae_lambda=0.0)
    batch = batch_of([seen([[0.0], [1.0]], [1.0, 2.0], [0.0])])
    object.__setattr__(batch, "rewards", torch.tensor([3.0]))
    with pytest.raises(ContractError, match=r"rewards must be per step.*EnvironmentReward\(\)"):
        advantages(batch)
    object.__setattr__(batch, "actions", ["left"])
    with pytest.raises(ContractError, match="actions must be Episode objects"):
        advantages(batch)
