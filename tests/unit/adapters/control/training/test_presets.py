"""Presets: measured settings, and settings chosen by what random actions show of an environment."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

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
from grpo.errors import ConfigError, ContractError
from grpo.surrogates import Clip
from tests.support.control_policies import IMAGE
from tests.support.odd_environments import Masked, Odd


class Track(gymnasium.Env):
    """A position on a line, which an action moves by one cell to the left or to the right.

    Args:
        num_cells: Number of cells to either side of the start. The episode terminates there.
        rewards: Maps the new cell to a reward.
        limit: The time limit.
        observations: `number` of the cell, or `box` with the position.
        actions: Number of numbers of a box of actions. None: two actions.
    """

    def __init__(
        self,
        rewards: Callable[[int], float] = lambda cell: -1.0,
        num_cells: int = 10**6,
        limit: int = 100,
        observations: str = "box",
        actions: int | None = None,
    ) -> None:
        self._rewards, self._num_cells, self._limit, self._is_box = rewards, num_cells, limit, observations == "box"
        self.observation_space = (
            spaces.Box(-np.inf, np.inf, (1,), np.float32) if self._is_box else spaces.Discrete(2 * num_cells + 1)
        )
        self.action_space = spaces.Discrete(2) if actions is None else spaces.Box(-1.0, 1.0, (actions,), np.float32)
        self.cell = self.time = 0

    def _look(self) -> Any:
        return np.array([self.cell], dtype=np.float32) if self._is_box else self.cell + self._num_cells

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cell = self.time = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.cell += 1 if np.ravel(action)[0] > 0 else -1
        self.time += 1
        return self._look(), self._rewards(self.cell), abs(self.cell) >= self._num_cells, self.time >= self._limit, {}


def limited(limit: int, num_cells: int) -> Callable[[], gymnasium.Env]:
    """A function that creates a `Track` with a reward at every step and a `TimeLimit`."""
    return lambda: gymnasium.wrappers.TimeLimit(Track(float, num_cells, limit=10**6), limit)


def test_settings_follow_from_what_random_actions_find(subtests: pytest.Subtests) -> None:
    """Each environment differs from another one in what the setting is chosen by."""
    rows: tuple[tuple[str, Callable[[], gymnasium.Env], dict[str, Any]], ...] = (
        # all rewards are equal, and no episode ends: repeated actions reach farther in a random walk, sqrt(4) times
        ("steps that cost 1", lambda: Track(), {"repeat": 4, "num_steps": 128, "gamma": 0.99, "num_epochs": 4}),
        ("an end within reach", lambda: Track(num_cells=3), {"repeat": 1, "num_steps": 64, "gamma": 0.99}),
        ("a dense reward", limited(200, 10**6), {"repeat": 1, "gamma": 0.95}),
        ("a dense reward for longer", limited(201, 10**6), {"gamma": 0.99}),
        ("a dense reward and an end", limited(200, 3), {"gamma": 0.99}),
        ("an end of long episodes", limited(1_000, 3), {"gamma": 0.995}),
        ("an end of shorter episodes", limited(999, 3), {"gamma": 0.99}),
        ("two numbers", lambda: Track(actions=2),
         {"num_epochs": 10, "learning_rate": 1e-3, "normalize_observations": True}),
        ("three numbers", lambda: Track(actions=3),
         {"num_groups": 8, "num_epochs": 10, "learning_rate": 3e-4, "normalize_observations": True}),
        ("several categories are no table", lambda: gymnasium.make("Blackjack-v1"),
         {"num_groups": 16, "num_epochs": 4, "normalize_observations": True}),
        ("a table", lambda: Track(lambda cell: -1.0, 3, observations="number"),
         {"num_groups": 16, "learning_rate": 1e-3, "normalize_observations": False, "gamma": 0.99, "repeat": 1}),
        # 1 - 1 / (10 x 50): standing still costs 500
        ("a rare fall", lambda: Track(lambda cell: -50.0 if abs(cell) == 3 else -1.0, 3), {"gamma": 0.998}),
        ("a rare fall that costs little", lambda: Track(lambda cell: -2.0 if abs(cell) == 3 else -1.0, 3), {"gamma": 0.99}),
        ("a rare abyss", lambda: Track(lambda cell: -1e6 if abs(cell) == 3 else -1.0, 3), {"gamma": 0.999}),
        ("a table with rare rewards", lambda: Track(lambda cell: float(cell == 9), 9, observations="number"),
         {"num_groups": 32, "learning_rate": 3e-4, "gamma": 0.99}),
        ("a table and a box", lambda: Track(lambda cell: -1.0, 3, observations="number", actions=1),
         {"num_groups": 16, "num_epochs": 10, "num_steps": 128}),
        # an iteration takes 64 decisions: of 64 members with one each, of 16 with four or more, or of 8 with eight
        ("one step", lambda: Track(num_cells=1), {"num_groups": 64, "num_steps": 8}),
        ("seven steps", lambda: Track(float, limit=7), {"num_groups": 16, "num_steps": 32, "repeat": 1}),
        ("eight steps", lambda: Track(float, limit=8), {"num_groups": 8, "num_steps": 64, "repeat": 1}),
        # six decisions of four steps
        ("24 equal steps", lambda: Track(limit=24), {"num_groups": 16, "num_steps": 64, "repeat": 4}),
        ("a mask", lambda: Masked(), {"action_mask": "info", "repeat": 1}),
    )  # fmt: skip
    for name, environment, expected in rows:
        with subtests.test(name):
            preset = preset_for(environment)
            assert {key: getattr(preset, key) for key in expected} == expected
            assert (preset.credit, preset.group_size) == ("fitted", 1)


def test_settings_with_the_groups_mean_follow_from_actions_images_and_the_time_limit(subtests: pytest.Subtests) -> None:
    """Runs have at least 500,000 steps and 50 iterations of the longest episodes."""
    robot = spaces.Box(-1.0, 1.0, (3,), np.float32)
    nested = spaces.Dict(camera=IMAGE, speed=robot)
    rows: tuple[tuple[Any, dict[str, Any], tuple[int, int, int, bool], int], ...] = (
        # environment, options; groups, episodes per group, epochs, normalised observations; longest episode
        ("MountainCarContinuous-v0", {}, (1, 8, 10, True), 999),
        ("MountainCarContinuous-v0", {"max_episode_steps": 100}, (2, 8, 10, True), 100),
        ("FrozenLake-v1", {}, (2, 8, 4, False), 100),
        ("CliffWalking-v1", {}, (1, 8, 4, False), 0),  # it has no time limit
        ("CliffWalking-v1", {"max_episode_steps": 200}, (2, 8, 4, False), 200),
        ("CliffWalking-v1", {"max_episode_steps": 30_000}, (1, 8, 4, False), 30_000),
        (lambda: gymnasium.wrappers.TimeLimit(Odd(IMAGE), 4), {"credit": None}, (2, 8, 4, False), 4),
        (lambda: Odd(IMAGE, act=robot), {"credit": None}, (1, 8, 10, False), 0),
        (lambda: Odd(nested, act=robot), {"credit": None}, (1, 8, 10, False), 0),
    )
    for environment, options, settings, longest in rows:
        with subtests.test(environment=environment, options=options):
            preset = preset_for(environment, **{"credit": "group"} | options)
            found = preset.num_groups, preset.group_size, preset.num_epochs, preset.normalize_observations
            assert (preset.credit, found) == ("group", settings)
            steps = preset.total_steps + 2_000  # up to 2,000 steps have shown what to choose
            assert steps >= 50 * preset.num_groups * preset.group_size * longest
            assert steps >= 500_000
            assert preset.total_steps // preset.evaluate_every == 20
            policy = preset.make_policy(num_members=1)
            assert policy.max_episode_steps == options.get("max_episode_steps")
            policy.pool.close()


def test_a_choice_has_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "grpo"):
        preset = preset_for(lambda: Track())
    assert preset.why == (
        "2,000 random steps, which are a part of the run's 500,000, and the spaces of Track: a fitted value function, Fourier "
        "features (Box observations of 1 numbers); 4 epochs (Discrete actions); each action repeated 4 times (no episode "
        f"terminated, all rewards are equal, and repeated actions reach {preset.why.partition('reach ')[2][:3]} times as far); "
        "gamma 0.99 (the default)."
    )
    assert preset.why in caplog.text
    assert preset_for("CartPole-v1").why == ""


def test_steps_of_random_actions_count_are_few_in_a_short_run_and_change_no_global_generator() -> None:
    taken = []

    def drawn() -> tuple[float, float]:
        return random.random(), float(torch.rand(()))

    class Counted(Track):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            drawn()

        def step(self, action: Any) -> Any:
            taken.append(action)
            drawn()
            return super().step(action)

    random.seed(3)
    torch.manual_seed(3)
    expected = drawn()
    random.seed(3)
    torch.manual_seed(3)
    preset = preset_for(Counted, total_steps=4_000)
    assert drawn() == expected
    assert len(taken) == 2 * 200  # a twentieth for each probe
    assert preset.total_steps == 4_000 - 400
    assert preset_for(Counted, total_steps=4_000) == preset
    taken.clear()
    assert preset_for(lambda: Counted(num_cells=3)).total_steps == 500_000 - 1_000
    assert len(taken) == 1_000
    taken.clear()
    assert preset_for(Counted, total_steps=1).total_steps == 1
    assert len(taken) == 2


def test_a_function_or_a_wrapped_environment_is_trained_in_place_of_the_id() -> None:
    plain = preset_for(lambda: gymnasium.make("CartPole-v1"), credit="fitted")
    assert replace(plain, environment=None) == FITTED_PRESETS["CartPole-v1"]
    stack = gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), 2)
    preset = preset_for(stack)
    assert (preset.env_id, preset.credit, preset.why != "") == ("CartPole-v1", "fitted", True)
    policy = preset.make_policy(seed=0)
    assert policy.pool.observation_space.shape == (2, 4)
    assert policy.pool.num_members == preset.num_groups
    trainer = preset.make_trainer(policy, seed=0)
    assert trainer.step(episode_starts(preset.num_groups)(0))["train/num_updates"] > 0
    for keywords in ({"g": 5.0}, {"max_episode_steps": 50}):
        other = preset_for(lambda keywords=keywords: gymnasium.make("Pendulum-v1", **keywords))
        assert (other.env_id, other.why != "") == ("Pendulum-v1", True), "other keywords are another environment"


def test_a_registered_environment_may_need_keywords() -> None:
    class Needs(Track):
        def __init__(self, *, cells: int) -> None:
            super().__init__(num_cells=cells)

    gymnasium.register("Needs-v0", entry_point=Needs)
    try:
        for environment in (lambda: gymnasium.make("Needs-v0", cells=3), gymnasium.make("Needs-v0", cells=3)):
            assert preset_for(environment).make_policy().pool.layers[-1] == "Needs(cells=3)"
        with pytest.raises(ConfigError, match="missing 1 required keyword-only argument: 'cells'"):
            preset_for("Needs-v0")
    finally:
        del gymnasium.registry["Needs-v0"]


def test_few_iterations_are_said(caplog: pytest.LogCaptureFixture) -> None:
    def said(environment: Any, **options: Any) -> bool:
        caplog.clear()
        preset_for(environment, **options)
        return "policy improves once in an iteration" in caplog.text

    assert said("CartPole-v1", total_steps=79_999)  # 8 episodes of 500 steps
    assert "79,999 steps of CartPole-v1 may be only 19 iteration(s)" in caplog.text
    assert not said("CartPole-v1", total_steps=80_000)
    assert not said("CartPole-v1")
    assert said("CartPole-v1", credit="fitted", total_steps=10_239)  # 8 members of 64 steps
    assert caplog.text.endswith("Use more steps, or a smaller num_steps: dataclasses.replace(preset, num_steps=...).\n")
    assert not said("CartPole-v1", credit="fitted", total_steps=10_240)
    assert not said("CartPole-v1", total_steps=8_000, max_episode_steps=50)
    # the limit of an environment that is not registered counts, too: 2 groups of 8 episodes of 50 steps, less 1,780
    assert not said(lambda: gymnasium.wrappers.TimeLimit(Track(), 50), credit="group", total_steps=17_800)
    assert said(lambda: gymnasium.wrappers.TimeLimit(Track(), 50), credit="group", total_steps=16_000)
    assert caplog.text.endswith("or (but for images) credit='fitted', which has short iterations.\n")


def test_wrong_arguments_and_what_cannot_be_made_again_are_refused(subtests: pytest.Subtests) -> None:
    class Silent(gymnasium.ObservationWrapper):
        def observation(self, observation: Any) -> Any:
            return observation

    cases: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
        (Track(), {}, ConfigError, "Track is not registered, so it cannot be made again. Pass a function"),
        (Silent(gymnasium.make("CartPole-v1")), {}, ConfigError, "Silent.*cannot be made again. Pass a function that"),
        (3, {}, ConfigError, "got int 3"),
        (lambda: 3, {}, ConfigError, r"must be a gymnasium\.Env; got a int"),
        ("CartPool-v1", {}, ConfigError, r"is registered as 'CartPool-v1'\. Did you mean 'CartPole-v1'"),
        ("CartPole-v1", {"credit": "gae"}, ConfigError, "credit must be one of 'group', 'fitted'; got str 'gae'"),
        ("CartPole-v1", {"total_steps": 0}, ConfigError, "total_steps must be an integer >= 1"),
        (lambda: Odd(IMAGE), {"credit": "fitted"}, ConfigError, "Odd has images.*Use credit='group'"),
        (lambda: Odd(reward="one"), {}, ContractError, "reward must be a number; got 'one'"),
    )
    for environment, options, error, words in cases:
        with subtests.test(words), pytest.raises(error, match=words):
            preset_for(environment, **options)


# --- measured settings, and training


def test_presets_name_registered_environments_and_set_the_config() -> None:
    assert len(PRESETS) >= 6
    for env_id, preset in [*PRESETS.items(), *FITTED_PRESETS.items()]:
        assert env_id in gymnasium.registry or preset.environment is not None  # MiniGrid may not be installed
        assert preset_for(env_id, credit=preset.credit) is preset
        assert preset_for(env_id) is PRESETS.get(env_id, preset)
        assert preset.env_id == env_id
        config = preset.make_config(seed=3)
        assert (config.group_size, config.advantage.gamma, config.seed) == (preset.group_size, preset.gamma, 3)
        assert (config.batch_size, config.num_epochs_per_update) == (preset.batch_size, preset.num_epochs)
        assert config.objective.surrogate == Clip(low=preset.clip, high=preset.clip)
        assert (config.objective.entropy_coef, config.learning_rate) == (preset.entropy_coef, preset.learning_rate)
    short = preset_for("Pendulum-v1", credit="fitted", total_steps=50_000)
    assert (short.total_steps, short.evaluate_every) == (50_000, 2_500)
    assert preset_for("HalfCheetah-v5").max_episode_steps == 250
    assert preset_for("HalfCheetah-v5", max_episode_steps=99).max_episode_steps == 99
    assert preset_for("MountainCar-v0", credit="group").credit == "group"


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


def test_a_fitted_preset_trains_with_its_value_function_and_short_iterations() -> None:
    preset = preset_for("CartPole-v1", credit="fitted")
    trainer = preset.make_trainer(seed=0)
    assert isinstance(trainer.advantages, FittedAdvantages)
    assert trainer.advantages.gamma == preset.gamma
    metrics = trainer.step(episode_starts(preset.num_groups)(0))
    assert metrics["episodes/steps"] <= preset.num_groups * (preset.num_steps or 0)
    assert metrics["train/advantages_std"] > 0
    own = preset.make_trainer(trainer.policy, advantages=AdvantageEstimator(AdvantageConfig()))
    assert isinstance(own.advantages, AdvantageEstimator)


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
