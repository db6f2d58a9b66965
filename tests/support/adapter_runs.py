"""One small run of every adapter, for tests that stop runs, kill them, or measure their memory."""

from typing import Any

import numpy as np
import torch

from adapters.bandits import BanditReward, SoftmaxPolicy, random_walk_testbed
from adapters.control import EnvironmentReward, EpisodeOptions, EpisodePolicy, episode_starts
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig
from tests.support.tool_policies import TEXTS
from tests.support.tool_policies import policy as tool_policy

TWICE = {"batch_size": 8, "num_epochs_per_update": 2}
"""Several updates per iteration, over all rows and over again."""


def trainer_of(policy: Any, reward: Any, seed: int, **settings: Any) -> GRPOTrainer:
    config = GRPOConfig(**{"group_size": 6, "learning_rate": 0.01, "seed": seed} | settings)
    return GRPOTrainer(config=config, policy=policy, reward_model=reward)


def bandit(seed: int) -> Any:
    """A bandit whose testbed has a clock and a generator of its own."""
    torch.manual_seed(seed)
    reward = BanditReward(random_walk_testbed(num_runs=2, num_steps=100_000, seed=seed))
    return trainer_of(SoftmaxPolicy(10, num_states=2), reward, seed, **TWICE), np.arange(2), {}


def control(seed: int) -> Any:
    """Episodes with normalised observations, whose statistics are buffers of the policy; updates draw single steps."""
    torch.manual_seed(seed)
    policy = EpisodePolicy(
        "CartPole-v1",
        num_members=4,
        options=EpisodeOptions(max_episode_steps=12, normalize_observations=True, hidden=(8,)),
    )
    settings = {"advantage": AdvantageConfig(scale="batch"), "batch_size": 60, "num_epochs_per_update": 2}
    return trainer_of(policy, EnvironmentReward(), seed, **settings), episode_starts(2, seed=3), {}


def critic(seed: int) -> Any:
    """Continuous actions with a critic."""
    torch.manual_seed(seed)
    policy = EpisodePolicy(
        "Pendulum-v1", num_members=4, critic=True, options=EpisodeOptions(max_episode_steps=6, hidden=(8,))
    )
    settings = {"advantage": AdvantageConfig(credit="gae", scale="batch"), "batch_size": 40}
    return trainer_of(policy, EnvironmentReward(), seed, **settings), episode_starts(2, seed=3), {}


def is_short(states: Any, actions: Any) -> list[float]:
    return [float(len(str(action.arguments)) % 5) for action in actions]


def tools(seed: int) -> Any:
    torch.manual_seed(seed)
    return trainer_of(tool_policy(), is_short, seed, num_states_per_iteration=3, **TWICE), TEXTS, {}


def is_odd(states: Any, actions: Any) -> list[float]:
    return [float(sum(action.token_ids) % 2) + 0.1 * len(action) for action in actions]


def llm(seed: int) -> Any:
    from adapters.llm import HFPolicy, SamplingConfig  # the import takes seconds
    from tests.support.llm_models import character_tokenizer, tiny_model

    torch.manual_seed(seed)
    sampling = SamplingConfig(max_new_tokens=5, temperature=0.9)
    policy = HFPolicy(tiny_model(), character_tokenizer(), sampling=sampling)
    settings = {"objective": ObjectiveConfig(sampler_correction="truncate"), **TWICE}
    return trainer_of(policy, is_odd, seed, **settings), ["1+1=", "12+30=?"], {}


RUNS = {"bandit": bandit, "control": control, "critic": critic, "tools": tools, "llm": llm}
"""Makes, from a seed: a trainer, its states, and options of `train`."""
