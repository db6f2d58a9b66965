"""The same seed and the same actions give the same trajectory, bit for bit, in two instances of an environment."""

from typing import Any

import gymnasium
import numpy as np
import pytest

ENVIRONMENTS = [
    "CartPole-v1",
    "Acrobot-v1",
    "Pendulum-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "FrozenLake-v1",
    "CliffWalking-v1",
    "CliffWalkingSlippery-v1",
    "Taxi-v4",
    "Blackjack-v1",
    "HalfCheetah-v5",
    "Hopper-v5",
    "Reacher-v5",
    "Pusher-v5",
    "Walker2d-v5",
    "Ant-v5",
    "Swimmer-v5",
    "InvertedPendulum-v5",
    "InvertedDoublePendulum-v5",
    "Humanoid-v5",
    "HumanoidStandup-v5",
]


def trajectory(env_id: str, seed: int, num_steps: int = 30) -> list[Any]:
    """Observations, rewards and ends of consecutive episodes, as bytes: equal means equal in every bit and in type."""
    env = gymnasium.make(env_id)
    env.action_space.seed(seed)
    seen: list[Any] = [np.asarray(env.reset(seed=seed)[0]).tobytes()]
    for _ in range(num_steps):
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        seen.append((np.asarray(observation).tobytes(), np.float64(reward).tobytes(), terminated, truncated))
        if terminated or truncated:
            seen.append(np.asarray(env.reset()[0]).tobytes())  # without a seed: continues the generator
    env.close()
    return seen


def test_same_seed_and_actions_give_the_same_trajectory(subtests: pytest.Subtests) -> None:
    for env_id in ENVIRONMENTS:
        with subtests.test(env_id=env_id):
            first = trajectory(env_id, seed=3)
            assert first == trajectory(env_id, seed=3)
            assert first != trajectory(env_id, seed=4)  # the comparison above is not of empty records
