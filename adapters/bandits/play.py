"""Playing a bandit strategy on a testbed, all runs side by side.

Axis letters: R runs, K arms, P pulls.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64

from .testbeds import Testbed

STREAM = 1
"""Beside the seed: a testbed with the same seed draws other numbers, else a strategy's draws would foretell its rewards."""

Arms: TypeAlias = Int64[np.ndarray, " R"]
Rewards: TypeAlias = Float64[np.ndarray, " R"]


@runtime_checkable
class Baseline(Protocol):
    """A strategy playing R runs at once: choose an arm in each, then learn from what they paid."""

    def select(self, rng: np.random.Generator) -> Arms:
        """The arm to pull next in every run."""
        ...

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Learn from one pull per run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayRecord:
    """What was pulled, and what it paid."""

    arms: Int64[np.ndarray, "R P"]
    """The arm of every pull."""
    rewards: Float64[np.ndarray, "R P"]
    """What it paid."""
    regrets: Float64[np.ndarray, "R P"]
    """Pseudo-regret of each pull: the best arm's mean at that time minus the chosen arm's; sum it for the total."""


def play(baseline: Baseline, testbed: Testbed, num_pulls: int, seed: int = 0) -> PlayRecord:
    """`num_pulls` pulls in every run of the testbed, from its present time on.

    Args:
        baseline: built for `testbed.num_runs` runs and `testbed.num_arms` arms.
        testbed: its clocks move; `reset()` it first to start from the beginning.
        num_pulls: P.
        seed: of the baseline's own draws; the testbed has its own.

    Raises:
        RewardError: the testbed ends before.
    """
    rng = np.random.default_rng((seed, STREAM))
    runs = np.arange(testbed.num_runs)
    steps = testbed.steps_at(testbed.pulls[:, None] + np.arange(num_pulls))
    arms = np.empty((testbed.num_runs, num_pulls), dtype=np.int64)
    rewards = np.empty((testbed.num_runs, num_pulls))
    for pull in range(num_pulls):
        arms[:, pull] = baseline.select(rng)
        rewards[:, pull] = testbed.pull(runs, arms[:, pull])
        baseline.update(arms[:, pull], rewards[:, pull])
    rows = runs[:, None]
    regrets = testbed.best_means[rows, steps] - testbed.means[rows, steps, arms]
    return PlayRecord(arms=arms, rewards=rewards, regrets=regrets)


class Uniform:
    """Every arm with the same probability, for ever: chance level."""

    def __init__(self, num_runs: int, num_arms: int) -> None:
        self.num_runs = num_runs
        self.num_arms = num_arms

    def select(self, rng: np.random.Generator) -> Arms:
        """Any arm."""
        return rng.integers(self.num_arms, size=self.num_runs)

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Nothing is learned."""


class Oracle:
    """The arm with the highest mean at the present time: no regret."""

    def __init__(self, testbed: Testbed) -> None:
        self.testbed = testbed

    def select(self, rng: np.random.Generator) -> Arms:
        """The best arm, the first where several are best."""
        return self.testbed.means_now().argmax(axis=1)

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """There is nothing to learn."""
