"""avg@k and pass@k: what several attempts at a state earn, with intervals over the states."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from grpo._common.checks import require_count
from grpo.errors import ConfigError

Interval: TypeAlias = tuple[float, float] | None
"""Lower and upper bound. None: there is only one state."""

NUM_RESAMPLES = 10_000
"""Number of bootstrap resamples behind a confidence interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over states, with its confidence interval."""

    value: float
    """The mean. Every state has the same weight."""
    interval: Interval
    """Confidence interval (see `paired_interval`), for other states like these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtK:
    """avg@k or pass@k of two policies on the same states, with confidence intervals over the states."""

    k: int
    """Number of attempts at each state."""
    before: float
    """Of the original policy."""
    before_interval: Interval
    """Confidence interval of `before`."""
    after: float
    """Of the trained policy."""
    after_interval: Interval
    """Confidence interval of `after`."""
    difference: float
    """`after - before`."""
    difference_interval: Interval
    """Confidence interval of the difference. Its states are paired, so it is narrower than the two others suggest."""


def pass_at_k(rewards: Float64[Tensor, "B G"], k: int, pass_reward: float) -> Float64[Tensor, " B"]:
    """The probability that at least one of k attempts at a state passes, estimated from n attempts of which c passed.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - product over i < k of (n - c - i) / (n - i)

    The estimate is unbiased, and uses all n attempts. An attempt passes if its reward is at least `pass_reward`.

    Args:
        rewards: Rewards of n attempts in each of B states. NaN: an attempt without a reward, which counts for nothing.
        k: Number of attempts. Larger: a higher probability.
        pass_reward: Smallest reward of an attempt that passes.

    Raises:
        ConfigError: A state has fewer than k attempts.

    Example:
        >>> pass_at_k(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).double(), 2, 1.0)  # 1 - C(2, 2) / C(3, 2) = 2/3
        tensor([0.6667, 0.0000], dtype=torch.float64)

    Source:
        Chen et al. 2021 (Codex), arXiv:2107.03374, eq. 1.
    """
    require_count("pass_at_k: k", k)
    count = (~rewards.isnan()).sum(1)
    if k > int(count.min()):
        raise ConfigError(
            f"pass@{k} needs {k} attempts at each state; a state has {int(count.min())}. Measure with a larger "
            "num_actions_per_state, or lower k."
        )
    failed = count - (rewards >= pass_reward).sum(1)  # NaN is no pass
    none = torch.ones(len(rewards), dtype=torch.float64)
    for i in range(k):
        none = none * (failed - i).clamp(min=0) / (count - i)
    return 1.0 - none


def require_confidence(owner: str, confidence: float) -> None:
    """Check that a confidence level is between 0 and 1."""
    if not 0 < confidence < 1:
        raise ConfigError(f"{owner}: confidence must be > 0 and < 1; got {confidence}.")


def passing_reward(given: float | None, *rewards: Float64[Tensor, "B G"]) -> float | None:
    """The reward from which an attempt passes: the given one, or 1 if all rewards are 0 or 1. None: there is none."""
    if given is not None:
        return float(given)
    known = torch.cat([values.flatten() for values in rewards])
    known = known[~known.isnan()]
    return 1.0 if bool(((known == 0) | (known == 1)).all()) else None


def numbers_of_attempts(*rewards: Float64[Tensor, "B G"]) -> list[int]:
    """1, 2, 4 and so on, up to the number of attempts that every state has, and this number itself."""
    most = min(int((~values.isnan()).sum(1).min()) for values in rewards)
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def bootstrap_intervals(
    columns: Float64[np.ndarray, "B M"], *, confidence: float, seed: int
) -> list[tuple[float, float] | None]:
    """The percentile bootstrap interval of the mean of each column. The same states are drawn for all columns."""
    num_states, num_columns = columns.shape
    if num_states < 2:
        return [None] * num_columns
    generator = np.random.default_rng(seed)
    at_once = max(2**20 // (num_states * num_columns), 1)  # bounds the memory for any number of states
    means = [
        columns[generator.integers(num_states, size=(min(at_once, NUM_RESAMPLES - done), num_states))].mean(axis=1)
        for done in range(0, NUM_RESAMPLES, at_once)
    ]
    bounds = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return [(low, high) for low, high in bounds.T.tolist()]


def compared_at(
    counts: list[int],
    before: list[Float64[Tensor, " B"]],
    after: list[Float64[Tensor, " B"]],
    *,
    confidence: float,
    seed: int,
) -> tuple[AtK, ...]:
    """Compare values of each state before and after, for each number of attempts."""
    sides = [torch.stack(values, dim=1) for values in (before, after)]
    columns = torch.cat([*sides, sides[1] - sides[0]], dim=1)
    means = columns.mean(0).view(3, -1).T.tolist()
    found = bootstrap_intervals(columns.numpy(), confidence=confidence, seed=seed)
    return tuple(
        AtK(
            k=k,
            before=means[place][0],
            before_interval=found[place],
            after=means[place][1],
            after_interval=found[len(counts) + place],
            difference=means[place][2],
            difference_interval=found[2 * len(counts) + place],
        )
        for place, k in enumerate(counts)
    )
