"""Episode policies of every kind, and trainers for them."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from adapters.control import EnvironmentReward, EpisodeOptions, EpisodePolicy
from adapters.control.environments.episodes import Episode, EpisodeStart
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer
from tests.support.control_environments import UNIT, Crossing, Spaces, space_of_everything

IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
ACTIONS = spaces.Dict(
    {
        "arm": UNIT,
        "grip": spaces.Discrete(3),
        "rest": spaces.Tuple((spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(2))),
    }
)
STARTS = [EpisodeStart(seed=1), EpisodeStart(seed=2)]

POLICIES: dict[str, Callable[[], EpisodePolicy]] = {
    "categorical": lambda: EpisodePolicy("CartPole-v1", num_members=3),
    "critic": lambda: EpisodePolicy("CartPole-v1", num_members=3, critic=True),
    "normalized": lambda: EpisodePolicy(
        "CartPole-v1", num_members=3, options=EpisodeOptions(normalize_observations=True)
    ),
    "gaussian": lambda: EpisodePolicy(
        "Pendulum-v1", num_members=3, options=EpisodeOptions(max_episode_steps=9, initial_log_std=-1.0)
    ),
    "squashed": lambda: EpisodePolicy(
        "Pendulum-v1", num_members=3, distribution="squashed", options=EpisodeOptions(max_episode_steps=9)
    ),
    "beta": lambda: EpisodePolicy(
        "Pendulum-v1", num_members=3, distribution="beta", options=EpisodeOptions(max_episode_steps=9)
    ),
    "by observation": lambda: EpisodePolicy(
        "Pendulum-v1", num_members=3, options=EpisodeOptions(max_episode_steps=9, std="observation")
    ),
    "everything": lambda: EpisodePolicy(lambda: Spaces(space_of_everything(), ACTIONS), num_members=3),
    "masked": lambda: EpisodePolicy(Crossing, num_members=3, action_mask="info"),
    "image": lambda: EpisodePolicy(lambda: Spaces(IMAGE, spaces.Discrete(3)), num_members=2),
    "masked image": lambda: EpisodePolicy(
        lambda: Spaces(IMAGE, spaces.Discrete(3)),
        num_members=2,
        action_mask=lambda images: torch.tensor([[True, False, True]]).repeat(len(images), 1),
    ),
}


def policy_of(environment: Any, **arguments: Any) -> EpisodePolicy:
    """A policy whose options stand among its arguments, so that tests can give some of both."""
    options = {field.name: arguments.pop(field.name) for field in fields(EpisodeOptions) if field.name in arguments}
    return EpisodePolicy(environment, **arguments, options=EpisodeOptions(**options))


def made(kind: str) -> EpisodePolicy:
    """A policy whose weights are large enough to make a difference to its actions."""
    policy = POLICIES[kind]()
    with torch.no_grad():
        for value in policy.parameters():
            value.add_(0.1 * torch.randn_like(value))
    return policy


def rows_of(groups: Sequence[Sequence[Episode]]) -> list[Episode]:
    return [episode for group in groups for episode in group]


def trainer_of(policy: EpisodePolicy, **settings: Any) -> GRPOTrainer:
    config = GRPOConfig(group_size=3, seed=0, **{"advantage": AdvantageConfig(scale="batch"), **settings})
    return GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())
