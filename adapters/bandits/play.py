"""Play a bandit strategy on all runs of a testbed in parallel.

Axes: R runs, K arms, P pulls.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64

from grpo.arguments import require_instances, require_integers, require_numbers
from grpo.errors import ConfigError

from .testbeds import Testbed

STREAM = 1
"""Added to the strategy's seed, so that a strategy and a testbed with the same seed draw different numbers."""

Arms: TypeAlias = Int64[np.ndarray, " R"]
Rewards: TypeAlias = Float64[np.ndarray, " R"]


@runtime_checkable
class Baseline(Protocol):
    """A strategy that plays R runs in parallel: it selects an arm in each run, then learns from the rewards."""

    def select(self, rng: np.random.Generator) -> Arms:
        """The arm to pull next in every run."""
        ...

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Learn from one pull per run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayRecord:
    """Result of `play`: the arm, the reward and the regret of P pulls in each of R runs."""

    arms: Int64[np.ndarray, "R P"]
    """The pulled arm of each pull."""
    rewards: Float64[np.ndarray, "R P"]
    """The reward of each pull."""
    regrets: Float64[np.ndarray, "R P"]
    """Pseudo-regret of each pull: the best arm's mean at that time minus the pulled arm's mean. Sum it for the total."""


def play(baseline: Baseline, testbed: Testbed, num_pulls: int, seed: int = 0) -> PlayRecord:
    """Play `num_pulls` pulls in every run of the testbed, starting at its current time.

    Args:
        baseline: A strategy for `testbed.num_runs` runs and `testbed.num_arms` arms.
        testbed: The testbed. Every pull advances its time; call `testbed.reset()` first to start from the beginning.
        num_pulls: Number of pulls per run, P.
        seed: Seed of the strategy's draws. The testbed has its own seed.

    Raises:
        RewardError: The testbed ends before the last pull.
    """
    require_instances("play", Testbed, "a Testbed", testbed=testbed)
    require_integers("play", 0, num_pulls=num_pulls, seed=seed)
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
    """Pull every arm with the same probability. This is chance level."""

    def __init__(self, num_runs: int, num_arms: int) -> None:
        require_integers("Uniform", 1, num_runs=num_runs, num_arms=num_arms)
        self.num_runs = num_runs
        self.num_arms = num_arms

    def select(self, rng: np.random.Generator) -> Arms:
        """Pull a random arm."""
        return rng.integers(self.num_arms, size=self.num_runs)

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Do nothing, because this strategy does not learn."""


class Oracle:
    """Pull the arm with the highest current mean. The regret is 0."""

    def __init__(self, testbed: Testbed) -> None:
        require_instances("Oracle", Testbed, "a Testbed", testbed=testbed)
        self.testbed = testbed

    def select(self, rng: np.random.Generator) -> Arms:
        """Pull the best arm; the first one if several are best."""
        return self.testbed.means_now().argmax(axis=1)

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Do nothing, because this strategy knows the means."""


def require_discount(owner: str, discount: float) -> None:
    """Check that a strategy's discount factor lies in (0, 1].

    Raises:
        ConfigError: The discount is outside (0, 1].
    """
    require_numbers(owner, discount=discount)
    if not 0 < discount <= 1:
        raise ConfigError(f"{owner}: discount must lie in (0, 1], where 1 never forgets; got {discount}.")
