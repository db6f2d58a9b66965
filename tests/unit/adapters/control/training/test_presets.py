"""Presets: registered environments, their settings, and settings for an environment without a preset."""

from dataclasses import replace
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.envs.registration import register

from adapters.control import (
    FITTED_PRESETS,
    PRESETS,
    EnvironmentReward,
    EpisodeOptions,
    FittedAdvantages,
    episode_starts,
    preset_for,
)
from grpo import AdvantageConfig, AdvantageEstimator
from grpo.errors import ConfigError
from grpo.surrogates import Clip
from tests.support.control_environments import Spaces
from tests.support.control_policies import IMAGE


def test_presets_name_registered_environments_and_set_the_config() -> None:
    assert len(PRESETS) >= 6
    for env_id, preset in [*PRESETS.items(), *FITTED_PRESETS.items()]:
        assert env_id in gymnasium.registry or preset.environment is not None  # MiniGrid may not be installed
        assert preset_for(env_id, credit=preset.credit) is preset
        assert preset.env_id == env_id
        config = preset.make_config(seed=3)
        assert (config.group_size, config.advantage.gamma, config.seed) == (preset.group_size, preset.gamma, 3)
        assert (config.batch_size, config.num_epochs_per_update) == (preset.batch_size, preset.num_epochs)
        assert config.objective.surrogate == Clip(low=preset.clip, high=preset.clip)
        assert (config.objective.entropy_coef, config.learning_rate) == (preset.entropy_coef, preset.learning_rate)


def test_a_preset_trains_with_its_own_settings_or_those_given() -> None:
    preset = PRESETS["CartPole-v1"]
    policy = preset.make_policy(critic=True)
    assert policy.pool.num_members == preset.num_groups * preset.group_size
    assert policy.normalizer is not None
    assert preset.make_policy(num_members=2, options=EpisodeOptions()).normalizer is None
    trainer = preset.make_trainer(policy, seed=0)
    group = trainer.optimizer_step.optimizer.param_groups[0]  # type: ignore[union-attr]
    assert (group["lr"], group["eps"]) == (preset.learning_rate, 1e-5)
    metrics = trainer.step(episode_starts(preset.num_groups)(0))
    assert metrics["group_stats/num_groups"] == preset.num_groups
    per_episode = preset.make_trainer(policy, reward_model=EnvironmentReward(per="episode"))
    assert [trainer.collect(episode_starts(1)(0)).rewards.dim() for trainer in (trainer, per_episode)] == [2, 1]


def test_an_environment_without_a_preset_gets_settings_by_what_it_is() -> None:
    """(baseline, groups, episodes per group, epochs, normalised observations)."""

    def settings(env_id: str, **options: Any) -> tuple[str, int, int, int, bool]:
        preset = preset_for(env_id, **options)
        assert preset.env_id == env_id
        episodes = preset.num_groups, preset.group_size
        return preset.credit, *episodes, preset.num_epochs, preset.normalize_observations

    assert settings("Pusher-v5") == ("fitted", 8, 1, 10, True)
    assert settings("Blackjack-v1") == ("fitted", 16, 1, 4, True)
    assert settings("CliffWalkingSlippery-v1") == ("fitted", 16, 1, 4, False)
    assert settings("MountainCarContinuous-v0", credit="group") == ("group", 1, 8, 10, True)
    assert settings("FrozenLake-v1", credit="group") == ("group", 2, 8, 4, False)
    assert settings("CliffWalking-v1", credit="group") == ("group", 1, 8, 4, False)  # it has no time limit
    register(id="Picture-v0", entry_point=lambda: Spaces(IMAGE, gymnasium.spaces.Discrete(3)), max_episode_steps=4)
    try:
        assert settings("Picture-v0") == ("group", 2, 8, 4, False)
        with pytest.raises(ConfigError, match=r"Picture-v0 has images.*Use credit='group'"):
            preset_for("Picture-v0", credit="fitted")
    finally:
        gymnasium.registry.pop("Picture-v0")
    with pytest.raises(ConfigError, match=r"no environment is registered as 'CartPool-v1'. Did you mean 'CartPole-v1'"):
        preset_for("CartPool-v1")
    with pytest.raises(ConfigError, match="credit must be one of 'group', 'fitted'; got str 'gae'"):
        preset_for("CartPole-v1", credit="gae")  # type: ignore[arg-type]


def test_a_fitted_preset_trains_with_its_value_function_and_short_iterations() -> None:
    assert preset_for("CartPole-v1", credit="group") is preset_for("CartPole-v1") is PRESETS["CartPole-v1"]
    preset = preset_for("CartPole-v1", credit="fitted")
    assert preset is FITTED_PRESETS["CartPole-v1"]
    trainer = preset.make_trainer(seed=0)
    assert isinstance(trainer.advantages, FittedAdvantages)
    assert trainer.advantages.gamma == preset.gamma
    metrics = trainer.step(episode_starts(preset.num_groups)(0))
    assert metrics["episodes/steps"] <= preset.num_groups * (preset.num_steps or 0)
    assert metrics["train/advantages_std"] > 0
    own = preset.make_trainer(trainer.policy, advantages=AdvantageEstimator(AdvantageConfig()))
    assert isinstance(own.advantages, AdvantageEstimator)


def test_settings_without_a_preset_have_at_least_50_iterations_of_the_longest_episodes(
    subtests: pytest.Subtests,
) -> None:
    rows: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("CliffWalking-v1", {"max_episode_steps": 200}, 200),
        ("CliffWalking-v1", {"max_episode_steps": 30_000}, 30_000),
        ("FrozenLake-v1", {}, 100),
        ("MountainCarContinuous-v0", {}, 999),
        ("MountainCarContinuous-v0", {"max_episode_steps": 100}, 100),
    )
    for env_id, options, longest in rows:
        with subtests.test(env_id=env_id, options=options):
            preset = preset_for(env_id, credit="group", **options)
            per_iteration = preset.num_groups * preset.group_size * longest
            assert preset.total_steps + 2_000 >= 50 * per_iteration  # up to 2,000 steps have shown what to choose
            assert preset.total_steps + 2_000 >= 500_000
            assert preset.total_steps // preset.evaluate_every == 20
            policy = preset.make_policy(num_members=1)
            assert policy.max_episode_steps == options.get("max_episode_steps")
            policy.pool.close()


def test_a_preset_takes_another_limit() -> None:
    assert preset_for("HalfCheetah-v5").max_episode_steps == 250
    assert preset_for("HalfCheetah-v5", max_episode_steps=99).max_episode_steps == 99


def test_a_seed_fixes_the_first_weights_and_leaves_the_generator() -> None:
    preset = replace(preset_for("CartPole-v1"), num_groups=1, group_size=2)
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    trainers = [preset.make_trainer(seed=seed) for seed in (3, 3, 4)]
    assert torch.rand(()) != expected, "a trainer with a seed seeds the generators"
    first, same, other = [torch.cat([value.flatten() for value in one.policy.parameters()]) for one in trainers]
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    weights = torch.cat([value.flatten() for value in preset.make_policy(seed=3).parameters()])
    assert torch.equal(weights, first)
    assert torch.rand(()) == expected
