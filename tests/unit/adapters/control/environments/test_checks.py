"""`check_environment` finds environments that break a rule, and passes Gymnasium's own environments."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from adapters.control import check_environment
from grpo.errors import ConfigError, ContractError
from tests.support.control_environments import Chance, Crossing, Nested, Spaces, Walk
from tests.support.odd_environments import ACTED, BOX, Odd

RULES = (
    "creation", "statistics", "time limit", "observations", "masks", "rewards", "seeded", "resettable",
    "independent", "group", "snapshots",
)  # fmt: skip


class IgnoresSeed(Walk):
    def reset(self, **_: Any) -> Any:
        return super().reset()


class DrawsGlobally(Walk):
    def step(self, action: Any) -> Any:
        self.place += float(torch.rand(()))
        return super().step(action)


class SeedsGlobally(DrawsGlobally):
    """Equal episodes if instances run one after the other, and others if they take turns."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        torch.manual_seed(seed or 0)
        return super().reset(seed=seed)


class HidesMemory(Walk):
    """What survives the reset is seen at a later step only."""

    num_steps = 0

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        self.place += 0.1 * (self.num_steps > 40)
        return super().step(action)


class LeavesWind(Walk):
    """Its snapshot lacks the wind."""

    def snapshot(self) -> Any:
        return self.place, 0.0


class SharesState(Walk):
    """Its snapshot is taken by a step."""

    def snapshot(self) -> Any:
        self.place += 1.0
        return super().snapshot()


class Narrows(Walk):
    """Allows fewer actions from its first reset on."""

    def reset(self, **options: Any) -> Any:
        self.action_space = spaces.Discrete(2)
        return super().reset(**options)


class Raises(Walk):
    def step(self, action: Any) -> Any:
        raise ArithmeticError("out of paper")


class Guess(Walk):
    """One decision, so that a group has three outcomes."""

    def step(self, action: Any) -> Any:
        observation, reward, _, *rest = super().step(action)
        return observation, reward, True, *rest


class Endless(Guess):
    spec = None


class Unlimited(Walk):
    spec = None


def test_each_broken_rule_is_found_and_named(subtests: pytest.Subtests) -> None:
    walk = Walk()
    broken: tuple[tuple[Any, str, str], ...] = (
        (lambda: walk, "creation", "two calls returned the same"),
        (lambda: 3, "creation", "must be a gymnasium.Env; got a int"),
        (3, "creation", "must be an id or a function that creates one; got int 3"),
        ("CartPol-v1", "creation", "Did you mean 'CartPole-v1'"),
        (lambda: gymnasium.wrappers.NormalizeObservation(Walk()), "statistics", "NormalizeObservation keeps a running"),
        (lambda: Odd(look=lambda env: np.full(2, 9, np.float32)), "observations", "must lie within its space"),
        (lambda: Odd(look=lambda env: np.zeros(3)), "observations", r"must be float32 \[2\]; got float64 \[3\]"),
        (lambda: Odd(result=(BOX.sample(), 0.0, True, {})), "observations", r"step\(\) must return .*got 4 values"),
        (lambda: Odd(begins=[BOX.sample(), {}]), "observations", r"reset\(\) must return \(obs.*, info\) .*got a list"),
        (Narrows, "observations", r"action_space must stay .* was Discrete\(3\), and is Discrete\(2\) after a reset"),
        (Raises, "observations", "ArithmeticError: out of paper"),
        (lambda: Odd(reward=None), "rewards", "the reward must be a finite number; got None"),
        (lambda: Odd(reward=np.inf), "rewards", "must be a finite number; got inf"),
        (lambda: Odd(ended=None), "rewards", "terminated must be True or False; got None"),
        (IgnoresSeed, "seeded", "the first observation differs. .* super"),
        (DrawsGlobally, "seeded", "observation differs at step 1"),
        (SeedsGlobally, "independent", "if two take turns, observation differs at step"),
        (HidesMemory, "resettable", "after another episode observation differs at step"),
        (lambda: gymnasium.wrappers.TimeLimit(Nested(), 9), "independent", "if two take turns"),  # share a space
        (LeavesWind, "snapshots", "restored in .* must continue exactly; observation differs at step"),
        (SharesState, "snapshots", "Taking a snapshot must not change the environment; observation differs"),
    )
    for environment, rule, message in broken:
        with subtests.test(environment=getattr(environment, "__name__", str(environment)), message=message):
            report = check_environment(environment, max_episode_steps=30)
            assert [result.name for result in report.results] == list(RULES)
            assert [result.name for result in report.failures] == [rule], report
            with pytest.raises(ContractError, match=message):
                report.raise_for_failures()


CORRECT: dict[str, tuple[Any, dict[str, Any]]] = {
    "CartPole-v1": ("CartPole-v1", {}),
    "Pendulum-v1": ("Pendulum-v1", {}),
    "FrozenLake-v1": ("FrozenLake-v1", {}),
    "Taxi-v4": ("Taxi-v4", {}),
    "MountainCarContinuous-v0": ("MountainCarContinuous-v0", {"num_steps": 50}),
    "CliffWalking-v1": ("CliffWalking-v1", {"max_episode_steps": 100}),
    "Reacher-v5": ("Reacher-v5", {}),
    "a time limit": (lambda: gymnasium.wrappers.TimeLimit(Unlimited(), 5), {}),
    "a stack": (lambda: gymnasium.wrappers.FrameStackObservation(Walk(), 3), {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "a stack" else pytest.mark.slow) for name in CORRECT]
)
def test_correct_environments_pass(name: str) -> None:
    environment, options = CORRECT[name]
    report = check_environment(environment, **options)
    assert {result.status for result in report.results} == {"passed"}, report


def test_what_is_no_fault_is_noted(subtests: pytest.Subtests) -> None:
    for environment, rule, status, words in (
        (Chance, "snapshots", "absent", ""),
        (Crossing, "snapshots", "absent", ""),  # with masks: any other action is an error
        (lambda: Spaces(spaces.Discrete(3), ACTED["parts"]), "snapshots", "absent", ""),
        ("Blackjack-v1", "group", "note", "Use a smaller group_size and more starts"),
        (Guess, "group", "note", "Use a smaller group_size and more starts"),
        (Endless, "time limit", "note", "all of 32 episodes of random actions ended within 200 steps"),
        (Unlimited, "time limit", "note", "only 27 of 32 episodes of random actions ended within 200 steps"),
        (Unlimited, "time limit", "note", "truncated after 10,000 steps"),
    ):
        with subtests.test(environment=str(environment), rule=rule):
            report = check_environment(environment, strict=True)
            assert report.ok
            assert report[rule].status == status
            assert words in report[rule].message


def test_environments_are_closed_and_generators_restored() -> None:
    created: list[Any] = []
    closed: list[Any] = []

    class Counts(Walk):
        def __init__(self) -> None:
            super().__init__()
            created.append(self)

        def close(self) -> None:
            closed.append(self)

    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    check_environment(Counts)
    check_environment(SeedsGlobally)
    assert torch.rand(()) == expected
    assert len(created) == 3
    assert closed == created


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
    with pytest.raises(ContractError, match=r"of a pool must be .*got a int"):
        check_environment(lambda: 3, strict=True)  # type: ignore[arg-type,return-value]
