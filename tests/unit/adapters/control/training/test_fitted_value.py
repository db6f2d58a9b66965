"""The fitted value function, beside values that are worked out by hand, and advantages that are known."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from adapters.control import Episode, EpisodePolicy, EpisodeStart, FittedAdvantages
from adapters.control.environments.episodes import episode_mask, pad_to_steps
from grpo import ExperienceBatch
from grpo.errors import ConfigError, ContractError
from tests.support.control_environments import Spaces
from tests.support.control_episodes import episode_of
from tests.support.control_policies import IMAGE

TWO = spaces.Discrete(3)
LINE = spaces.Box(-10.0, 10.0, (1,), np.float32)


def policy_on(space: spaces.Space) -> EpisodePolicy:
    return EpisodePolicy(lambda: Spaces(space, spaces.Discrete(2)), num_members=1)


def episode(observations: Any, rewards: Sequence[float], final: Any, *, terminated: bool = True) -> Episode:
    return episode_of(rewards, observations=observations, final=final, terminated=terminated)


def batch_of(episodes: Sequence[Episode]) -> ExperienceBatch:
    mask = episode_mask(episodes)
    return ExperienceBatch(
        states=[EpisodeStart()] * len(episodes),
        actions=list(episodes),
        group_ids=torch.arange(len(episodes)),
        rewards=pad_to_steps(torch.cat([one.rewards for one in episodes]), mask),
        mask=mask,
    )


def one_hot(*places: int) -> list[list[float]]:
    return [[float(place == number) for number in range(3)] for place in places]


def whitened(values: list[list[float]], mask: torch.Tensor) -> torch.Tensor:
    padded = torch.tensor(values, dtype=torch.float64)
    valid = padded[mask]
    return torch.where(mask, (padded - valid.mean()) / valid.std(correction=0), 0.0)


def chain() -> list[Episode]:
    """0 -> 1 -> end. The second step pays 1 or 3, so V(1) = 2, and with gamma 1/2, V(0) = 1."""
    return [episode(one_hot(0, 1), [0.0, reward], one_hot(2)[0]) for reward in (1.0, 3.0)]


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
        loops = [episode(one_hot(2), [1.0], one_hot(2)[0], terminated=terminated)]
        into = [episode(one_hot(0), [reward], one_hot(2)[0], terminated=False) for reward in (0.0, 4.0)]
        batch = batch_of([*loops, *into])
        got = FittedAdvantages(policy_on(TWO), gamma=0.5, ridge=1e-9)(batch)
        mean = 2.0 + 0.5 * value  # V(0)
        expected = [[1.0 + 0.5 * value * (not terminated) - value]]
        expected += [[reward + 0.5 * value - mean] for reward in (0.0, 4.0)]
        torch.testing.assert_close(got, whitened(expected, batch.mask), rtol=1e-5, atol=1e-5)


def test_padding_has_no_advantage_and_changes_none() -> None:
    episodes = [*chain(), episode(one_hot(1), [2.5], one_hot(2)[0])]
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
    return [episode([[at]], [value(at) + more], [0.0]) for at, more in zip(x, noise, strict=True)], noise


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


def test_its_state_goes_on() -> None:
    policy = policy_on(LINE)
    one, other = (FittedAdvantages(policy, gamma=0.9, num_kept=400) for _ in range(2))
    one(batch_of(bandit(300, 1, np.cos)[0]))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    batch = batch_of(bandit(200, 2, np.cos)[0])
    assert torch.equal(other(batch), one(batch))


def test_small_images_with_a_network_of_ones_own_are_fitted_as_rows() -> None:
    space = spaces.Box(0, 255, (2, 1, 3), np.uint8)
    as_images = EpisodePolicy(lambda: Spaces(space, spaces.Discrete(2)), num_members=1, torso=torch.nn.Flatten())
    as_rows = EpisodePolicy(lambda: Spaces(space, spaces.Discrete(2)), num_members=1)
    assert as_images.encoder.is_image
    pixels, rewards = torch.randint(256, (6, 2, 1, 3), dtype=torch.uint8), torch.arange(6.0).tolist()
    found = [
        FittedAdvantages(policy, gamma=0.9)(batch_of([episode(rows.tolist(), rewards, last.tolist())]))
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
    batch = batch_of([episode([[0.0], [1.0]], [1.0, 2.0], [0.0])])
    object.__setattr__(batch, "rewards", torch.tensor([3.0]))
    with pytest.raises(ContractError, match=r"rewards must be per step.*EnvironmentReward\(\)"):
        advantages(batch)
    object.__setattr__(batch, "actions", ["left"])
    with pytest.raises(ContractError, match="actions must be Episode objects"):
        advantages(batch)
