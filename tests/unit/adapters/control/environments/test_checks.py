"""`check_environment` finds environments that break a rule, and passes Gymnasium's own environments."""

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from adapters.control import check_environment
from grpo.errors import ConfigError, ContractError
from tests.support.control_environments import Chance, Crossing, Nested, Spaces

RULES = (
    "creation", "statistics", "time limit", "observations", "masks", "rewards", "seeded", "resettable",
    "independent", "group", "snapshots",
)  # fmt: skip


class Walk(gymnasium.Env):
    """A correct environment: a walk with wind. `snapshot` and `restore` are its own."""

    spec = EnvSpec("Walk", max_episode_steps=30)
    observation_space = spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.place, self.wind = 0.0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.wind = float(self.np_random.normal()), 0.0
        return self.look(), {}

    def look(self) -> Any:
        return np.array([self.place, self.wind], dtype=np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.wind = 0.5 * self.wind + float(self.np_random.normal())
        self.place += float(action) - 1.0 + self.wind
        return self.look(), self.place, bool(abs(self.place) > 20.0), False, {}

    def snapshot(self) -> Any:
        return self.place, self.wind

    def restore(self, state: Any) -> None:
        self.place, self.wind = state


class IgnoresSeed(Walk):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset()


class DrawsGlobally(Walk):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += float(torch.rand(()))
        return super().step(action)


class SeedsGlobally(DrawsGlobally):
    """Equal episodes if instances run one after the other, and others if they take turns."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(seed or 0)
        return super().reset(seed=seed)


class Forgets(Walk):
    """Does not reset the wind."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        wind = self.wind
        super().reset(seed=seed)
        self.wind = wind
        return self.look(), {}


class HidesMemory(Walk):
    """What survives the reset is seen at a later step only."""

    num_steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        self.place += 0.1 * (self.num_steps > 40)
        return super().step(action)


class LeavesWind(Walk):
    """Its snapshot lacks the wind."""

    def snapshot(self) -> Any:
        return self.place

    def restore(self, state: Any) -> None:
        self.place = state


class SharesState(Walk):
    """Its snapshot is taken by a step."""

    def snapshot(self) -> Any:
        self.place += 1.0
        return super().snapshot()


class Outside(Walk):
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)


class WrongShape(Walk):
    observation_space = spaces.Box(-100.0, 100.0, (3,), np.float32)


def returning(changed: Callable[..., Any]) -> type[Walk]:
    """A walk whose step returns something else, given what it would return."""

    class Changed(Walk):
        def step(self, action: Any) -> Any:
            return changed(*super().step(action))

    return Changed


Unpaid = returning(lambda observation, reward, *rest: (observation, None, *rest))
Infinite = returning(lambda observation, reward, *rest: (observation, np.inf, *rest))
NotBool = returning(lambda observation, reward, terminated, *rest: (observation, reward, None, *rest))
FourValues = returning(lambda *five: five[:4])
Guess: Any = returning(lambda observation, reward, terminated, *rest: (observation, reward, True, *rest))
"""One decision, so that a group has three outcomes."""


class NoInfo(Walk):
    def reset(self, **options: Any) -> Any:
        return list(super().reset(**options))


class Unlimited(Walk):
    spec = None


class Raises(Walk):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise ArithmeticError("out of paper")


class Narrows(Walk):
    """Allows fewer actions from its first reset on."""

    def reset(self, **options: Any) -> Any:
        self.action_space = spaces.Discrete(2)
        return super().reset(**options)


class Counts(Walk):
    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


class Single:
    env: ClassVar[Walk] = Walk()

    def __call__(self) -> gymnasium.Env:
        return self.env


def test_each_broken_rule_is_found_and_named(subtests: pytest.Subtests) -> None:
    broken: tuple[tuple[Any, str, str], ...] = (
        (Single(), "creation", "two calls returned the same"),
        (lambda: 3, "creation", "must be a gymnasium.Env; got a int"),
        (3, "creation", "must be an id or a function that creates one; got int 3"),
        ("CartPol-v1", "creation", "Did you mean 'CartPole-v1'"),
        (lambda: gymnasium.wrappers.NormalizeObservation(Walk()), "statistics", "NormalizeObservation keeps a running"),
        (Outside, "observations", "must lie within its space"),
        (WrongShape, "observations", r"must be float32 \[3\]; got float32 \[2\]"),
        (FourValues, "observations", r"step\(\) must return .*got 4 values"),
        (NoInfo, "observations", r"reset\(\) must return \(observation, info\) .*got a list"),
        (Narrows, "observations", r"action_space must stay .* was Discrete\(3\), and is Discrete\(2\) after a reset"),
        (Raises, "observations", "ArithmeticError: out of paper"),
        (Unpaid, "rewards", "the reward must be a finite number; got None"),
        (Infinite, "rewards", "must be a finite number; got inf"),
        (NotBool, "rewards", "terminated must be True or False; got None"),
        (IgnoresSeed, "seeded", "the first observation differs. .* super"),
        (DrawsGlobally, "seeded", "observation differs at step 1"),
        (SeedsGlobally, "independent", "if two take turns, observation differs at step"),
        (Forgets, "resettable", "after another episode the first observation differs"),
        (HidesMemory, "resettable", "after another episode observation differs at step"),
        (lambda: gymnasium.wrappers.TimeLimit(Nested(), 9), "independent", "if two take turns"),  # share a space
        (LeavesWind, "snapshots", "restored in .* must continue exactly; observation differs at step"),
        (SharesState, "snapshots", "Taking a snapshot must not change the environment; observation differs"),
    )
    for environment, rule, message in broken:
        with subtests.test(environment=getattr(environment, "__name__", str(environment)), rule=rule):
            report = check_environment(environment)
            assert [result.name for result in report.results] == list(RULES)
            assert [result.name for result in report.failures] == [rule], report
            with pytest.raises(ContractError, match=message):
                report.raise_for_failures()


@pytest.mark.slow
def test_correct_environments_pass(subtests: pytest.Subtests) -> None:
    correct: tuple[tuple[str | Callable[[], gymnasium.Env], dict[str, Any]], ...] = (
        ("CartPole-v1", {}),
        ("Pendulum-v1", {}),
        ("FrozenLake-v1", {}),
        ("Taxi-v4", {}),
        ("MountainCarContinuous-v0", {"num_steps": 50}),
        ("CliffWalking-v1", {"max_episode_steps": 100}),
        (Walk, {}),
        (lambda: gymnasium.wrappers.TimeLimit(Unlimited(), 5), {}),
        (lambda: gymnasium.wrappers.FrameStackObservation(Walk(), 3), {}),
    )
    for environment, options in correct:
        with subtests.test(environment=str(environment)):
            report = check_environment(environment, **options)
            assert {result.status for result in report.results} == {"passed"}, report


def test_environments_without_snapshots_pass_the_other_rules(subtests: pytest.Subtests) -> None:
    for environment in (
        Chance,
        Crossing,  # with masks: any other action is an error
        lambda: Spaces(spaces.Discrete(3), spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2)))),
    ):
        with subtests.test(environment=str(environment)):
            report = check_environment(environment, max_episode_steps=None, strict=True)
            assert report["snapshots"].status == "absent"


def test_a_robot_passes() -> None:
    pytest.importorskip("mujoco", reason="mujoco is not installed")
    report = check_environment("Reacher-v5")
    assert {result.status for result in report.results} == {"passed"}, report


def test_a_seed_that_leaves_few_outcomes_is_noted(subtests: pytest.Subtests) -> None:
    for environment in ("Blackjack-v1", Guess):
        with subtests.test(environment=environment):
            report = check_environment(environment, max_episode_steps=20)
            assert report.ok
            assert report["group"].status == "note"
            assert "Use a smaller group_size and more starts" in report["group"].message


def test_an_environment_without_a_limit_whose_episodes_end_is_noted() -> None:
    """Each episode of `Guess` ends at its first step. The same environment that ends none of them fails."""

    class Endless(Guess):
        spec = None

    report = check_environment(Endless)
    assert report["time limit"].status == "note"
    assert "all of 32 episodes of random actions ended within 200 steps" in report["time limit"].message
    report = check_environment(Unlimited)
    assert report["time limit"].status == "note"
    assert "only 27 of 32 episodes of random actions ended within 200 steps" in report["time limit"].message
    assert "truncated after 10,000 steps" in report["time limit"].message


def test_environments_are_closed_and_generators_restored() -> None:
    created: list[Counts] = []

    def make() -> gymnasium.Env:
        created.append(Counts())
        return created[-1]

    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    check_environment(make)
    check_environment(SeedsGlobally)
    assert torch.rand(()) == expected
    assert [env.num_closed for env in created] == [1, 1, 1]


def test_numbers_and_names_that_cannot_be_used_are_refused(subtests: pytest.Subtests) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_steps": 0}, "num_steps must be an integer >= 1; got int 0"),
        ({"num_steps": 2.5}, "num_steps must be an integer >= 1; got float 2.5"),
        ({"seed": -1}, "seed must be an integer >= 0; got int -1"),
        ({"max_episode_steps": "9"}, "max_episode_steps must be an integer >= 1, or None; got str '9'"),
        ({"skip": ["seeds"]}, r"skip must contain names of checks, .* got \['seeds'\]"),
    )
    for options, message in wrong:
        with subtests.test(options=options), pytest.raises(ConfigError, match=message):
            check_environment(Walk, **options)
