"""Metrics of non-stationary bandits, as functions on arrays.

Axes: S time steps, K arms, P pulls. Leading axes (runs, seeds) are kept. A *segment* is a maximal run of steps in one
regime: regimes [0, 0, 1, 1, 0] have three segments.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64
from numpy.typing import ArrayLike

from grpo.errors import ConfigError


def structured_reward(
    rewards: ArrayLike, regimes: ArrayLike, structured: Sequence[int] = (1, 3)
) -> Float64[np.ndarray, "..."] | np.float64:
    """Mean reward over the steps in which the arms differ.

    On the dynamic bandit, a random policy gets .27 and the oracle .75. In the other regimes all arms pay the same, so these
    steps would only dilute the difference.

    Args:
        rewards: [..., S], reward of each step.
        regimes: [S], the regime of each step (`dynamic_regimes`).
        structured: The regimes in which the arms differ. Only their steps count.
    """
    counted = np.isin(np.asarray(regimes), structured)
    if not counted.any():
        raise ConfigError(
            f"structured_reward: at least one step must be in the regimes {tuple(structured)}; got none. Pass other regimes."
        )
    return np.asarray(rewards, dtype=np.float64)[..., counted].mean(axis=-1)


def best_arm_probability(probabilities: ArrayLike, means: ArrayLike) -> Float64[np.ndarray, "... S"]:
    """Probability put on the best arm at each step: [..., S, K] -> [..., S].

    Equally good arms count together, so the result is 1 where all arms are equal.

    Args:
        probabilities: [..., S, K], the policy's probabilities, or fractions of pulls (see `pull_fractions`).
        means: [..., S, K], expected rewards.
    """
    return (np.asarray(probabilities, dtype=np.float64) * is_best(means)).sum(axis=-1)


def is_best(means: ArrayLike) -> Bool[np.ndarray, "... K"]:
    """Whether no arm has a larger expected reward, for each arm: [..., K] -> [..., K]. Equally good arms are all the best."""
    expected = np.asarray(means, dtype=np.float64)
    return expected == expected.max(axis=-1, keepdims=True)


def pull_fractions(arms: ArrayLike, num_arms: int, pulls_per_step: int) -> Float64[np.ndarray, "... S K"]:
    """Fraction of the pulls on each arm within each step, for strategies that have no probabilities.

    Args:
        arms: [..., P], the pulled arms, with P = S * pulls_per_step.
        num_arms: Number of arms, K.
        pulls_per_step: Number of pulls per step.
    """
    pulled = np.asarray(arms)
    if pulled.shape[-1] % pulls_per_step:
        raise ConfigError(
            f"pull_fractions: the number of pulls must be a multiple of pulls_per_step={pulls_per_step}; "
            f"got {pulled.shape[-1]}. Cut the last, incomplete step."
        )
    steps = pulled.reshape(*pulled.shape[:-1], -1, pulls_per_step)
    return np.stack([(steps == arm).mean(axis=-1) for arm in range(num_arms)], axis=-1)


def mean_by_regime(values: ArrayLike, regimes: ArrayLike) -> dict[int, Float64[np.ndarray, "..."] | np.float64]:
    """Mean of a per-step value within each regime.

    Args:
        values: [..., S], value of each step.
        regimes: [S], the regime of each step.
    """
    per_step = np.asarray(values, dtype=np.float64)
    labels = np.asarray(regimes)
    return {int(regime): per_step[..., labels == regime].mean(axis=-1) for regime in np.unique(labels)}


def segment_starts(regimes: Int[np.ndarray, " S"]) -> Int64[np.ndarray, " M"]:
    """The first step of every segment: [0, 0, 1, 1, 0] -> [0, 2, 4]."""
    return np.flatnonzero(np.concatenate(([True], regimes[1:] != regimes[:-1])))


def time_to_reach(values: ArrayLike, regimes: ArrayLike, threshold: float = 0.5) -> Int64[np.ndarray, "... M"]:
    """Steps from each segment's start until the value is first >= threshold, or the segment's length if no value reaches it.

    With `best_arm_probability` and threshold .5, this is the time to 50 %. It is 0 if the first step reaches the threshold.

    Args:
        values: [..., S], value of each step.
        regimes: [S], the regime of each step, with M segments.
    """
    reached = np.asarray(values, dtype=np.float64) >= threshold
    labels = np.asarray(regimes)
    starts = segment_starts(labels)
    ends = np.append(starts[1:], len(labels))
    times = [
        np.where(segment.any(axis=-1), segment.argmax(axis=-1), segment.shape[-1])  # argmax: the first that is True
        for segment in (reached[..., start:end] for start, end in zip(starts, ends, strict=True))
    ]
    return np.stack(times, axis=-1)


def cumulative_regret(means: ArrayLike, arms: ArrayLike) -> Float64[np.ndarray, "... P"]:
    """Sum over the pulls so far of max_a means[p, a] - means[p, arms[p]].

    Args:
        means: [..., P, K], expected rewards at each pull.
        arms: [..., P], the pulled arms.
    """
    expected = np.asarray(means, dtype=np.float64)
    pulled = np.asarray(arms)
    expected = np.broadcast_to(expected, (*pulled.shape, expected.shape[-1]))
    chosen = np.take_along_axis(expected, pulled[..., None], axis=-1)[..., 0]
    return np.cumsum(expected.max(axis=-1) - chosen, axis=-1)
