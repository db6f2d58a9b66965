"""Presets chosen by what random actions show of an environment."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from adapters.control import FITTED_PRESETS, PRESETS, episode_starts, preset_for
from grpo.errors import ConfigError, ContractError
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
        ("three numbers", lambda: Track(actions=3), {"num_epochs": 10, "learning_rate": 3e-4}),
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
            assert preset.credit == "fitted"


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


def test_steps_of_random_actions_count_and_are_few_in_a_short_run() -> None:
    taken = []

    class Counted(Track):
        def step(self, action: Any) -> Any:
            taken.append(action)
            return super().step(action)

    preset = preset_for(lambda: Counted(), total_steps=4_000)
    assert len(taken) == 2 * 200  # a twentieth for each probe
    assert preset.total_steps == 4_000 - 400
    taken.clear()
    assert preset_for(lambda: Counted(num_cells=3)).total_steps == 500_000 - 1_000
    assert len(taken) == 1_000
    taken.clear()
    assert preset_for(lambda: Counted(), total_steps=1).total_steps == 1
    assert len(taken) == 2


def test_equal_environments_have_equal_presets_and_global_generators_do_not_change() -> None:
    class Global(Track):
        def __init__(self) -> None:
            super().__init__()
            random.random()
            torch.rand(())

        def step(self, action: Any) -> Any:
            random.random()
            torch.rand(())
            return super().step(action)

    def drawn() -> tuple[float, float]:
        return random.random(), float(torch.rand(()))

    random.seed(3)
    torch.manual_seed(3)
    expected = drawn()
    random.seed(3)
    torch.manual_seed(3)
    first = preset_for(Global)
    assert drawn() == expected
    assert preset_for(Global) == first


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


def test_images_are_not_normalised_whatever_the_actions() -> None:
    for space in (IMAGE, spaces.Dict(camera=IMAGE, speed=spaces.Box(-1.0, 1.0, (2,), np.float32))):
        preset = preset_for(lambda space=space: Odd(space, act=spaces.Box(-1.0, 1.0, (3,), np.float32)))
        assert (preset.credit, preset.num_epochs, preset.normalize_observations) == ("group", 10, False)
        preset.make_policy(num_members=1)


def test_an_id_with_a_measured_preset_has_it() -> None:
    assert preset_for("MountainCar-v0") is FITTED_PRESETS["MountainCar-v0"]
    assert preset_for("Pendulum-v1") is PRESETS["Pendulum-v1"]
    assert preset_for("MountainCar-v0", credit="group").credit == "group"
    short = preset_for("Pendulum-v1", credit="fitted", total_steps=50_000)
    assert (short.total_steps, short.evaluate_every) == (50_000, 2_500)


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


def test_what_cannot_be_made_again_is_refused_with_a_remedy() -> None:
    class Silent(gymnasium.ObservationWrapper):
        def observation(self, observation: Any) -> Any:
            return observation

    cases: tuple[tuple[Any, str], ...] = (
        (Track(), "Track is not registered, so it cannot be made again. Pass a function"),
        (Silent(gymnasium.make("CartPole-v1")), "Silent.*cannot be made again. Pass a function that creates it"),
        (3, "got int 3"),
        (lambda: 3, r"must be a gymnasium\.Env; got a int"),
    )
    for environment, words in cases:
        with pytest.raises(ConfigError, match=words):
            preset_for(environment)
    with pytest.raises(ConfigError, match="total_steps must be an integer >= 1"):
        preset_for("CartPole-v1", total_steps=0)
    with pytest.raises(ContractError, match="reward must be a number; got 'one'"):
        preset_for(lambda: Odd(reward="one"))
