"""Wrong arguments of every public class and function of adapters.control are answered with a typed error."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from adapters.control import (
    Bernoulli,
    Categorical,
    CNNTorso,
    ControlPreset,
    EnvironmentReward,
    Episode,
    EpisodeOptions,
    EpisodePolicy,
    EpisodeStart,
    Evaluation,
    FromTorch,
    Gaussian,
    MultiCategorical,
    Snapshot,
    StepReward,
    check_environment,
    distribution_for,
    episode_starts,
    evaluate_policy,
    make_pool,
    mlp_torso,
    preset_for,
    restore_snapshot,
    take_snapshot,
)
from grpo.errors import GRPOError

pytestmark = pytest.mark.usefixtures("without_type_checks")

WRONG: tuple[Any, ...] = (
    -1,
    2.5,
    float("nan"),
    "abc",
    b"x",
    ["a"],
    {"a": 1},
    np.zeros(3),
    torch.zeros(3),
    object(),
    int,
    (1, 2),
)


def cases() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions with good arguments, which are replaced one at a time."""
    steps = {name: torch.zeros(2, 3) for name in ("observations", "actions")}
    rows = {
        "rewards": torch.zeros(2),
        "log_probs": torch.zeros(2),
        "allowed": None,
        "final_observation": torch.zeros(3),
    }
    policy = EpisodePolicy("CartPole-v1", num_members=1, options=EpisodeOptions(hidden=(4,)))
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    snapshot = take_snapshot(env, observation)
    preset = {
        "total_steps": 10,
        "threshold": 1.0,
        "gamma": 0.9,
        "group_size": 2,
        "learning_rate": 1e-3,
        "evaluate_every": 5,
    }
    build = torch.distributions.Categorical
    yield EpisodeStart, {"seed": 1, "options": None, "snapshot": None}
    yield Episode, {**steps, **rows, "terminated": True, "truncated": False}
    yield Snapshot, {"environment": "CartPole-v1", "layers": (), "observation": None}
    yield Evaluation, {"returns": np.ones(2), "lengths": np.ones(2, int)}
    yield ControlPreset, {"env_id": "CartPole-v1", **preset, "max_episode_steps": None, "normalize_observations": True}
    yield EpisodePolicy, {
        "environment": "CartPole-v1", "num_members": 1, "torso": None, "distribution": "auto", "critic": False,
        "action_mask": None, "options": None, "vectorization": "auto",
    }  # fmt: skip
    yield EpisodeOptions, {
        "hidden": (4,), "activation": "tanh", "std": "shared", "initial_log_std": 0.0, "normalize_observations": True,
        "max_episode_steps": 5, "split_steps": True, "state_key_decimals": 3,
    }  # fmt: skip
    yield policy.sample_actions, {"states": [EpisodeStart(seed=1)], "num_actions_per_state": 1}
    yield policy.score_actions, {"states": None, "actions": policy.generate_actions([EpisodeStart(seed=1)], 1)[0]}
    yield EnvironmentReward, {"per": "step", "discount": 1.0}
    yield StepReward, {"term": len}
    yield CNNTorso, {"shape": (40, 40, 3), "num_features": 4}
    yield mlp_torso, {"num_inputs": 3, "hidden": (4,), "activation": "tanh"}
    yield episode_starts, {"num_groups": 2, "seed": 0}
    yield make_pool, {"env": "CartPole-v1", "num_members": 1, "vectorization": "auto"}
    yield distribution_for, {"space": spaces.Discrete(2), "kind": "auto"}
    for distribution in (Categorical, MultiCategorical, Bernoulli, Gaussian):
        yield distribution, {"space": 3}
    yield FromTorch, {"space": spaces.Discrete(2), "num_parameters": 2, "build": build}
    yield evaluate_policy, {"policy": policy, "num_episodes": 1, "seed": 0, "max_steps": 3}
    yield preset_for, {"environment": "CartPole-v1", "credit": None, "total_steps": 9_000, "max_episode_steps": 5}
    yield take_snapshot, {"env": env, "observation": observation}
    yield restore_snapshot, {"env": env, "snapshot": snapshot}
    yield check_environment, {"environment": "CartPole-v1", "num_steps": 3, "seed": 0}


def test_wrong_arguments_get_typed_errors() -> None:
    """Some values are good for some arguments. Those that are not raise an error of this package."""
    count, untyped = 0, []
    for call, good in cases():
        for name in good:
            for value in WRONG:
                count += 1
                try:
                    call(**{**good, name: value})
                except GRPOError:
                    continue
                except Exception as error:
                    untyped.append(f"{call.__name__}({name}={value!r}): {type(error).__name__}: {error}"[:160])
    assert count > 700
    assert not untyped, "\n".join(untyped)
