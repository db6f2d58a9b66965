"""Compare two policies, or one policy before and after training, on the same states, rewards and random numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from grpo._common.protocols import require_methods
from grpo.config import RewardConfig
from grpo.errors import ConfigError, ContractError
from grpo.policy_base import POLICY_METHODS
from grpo.types import Rows

from .attempts import (
    AtK,
    bootstrap_intervals,
    compared_at,
    numbers_of_attempts,
    pass_at_k,
    passing_reward,
    require_confidence,
)
from .measurement import PolicyMeasurement, fingerprints_of, measure_policy
from .report import ComparisonReport, Outcome, StateComparison

ROUNDING = 1e-6
"""A difference below this fraction of a state's largest reward counts as rounding, because rewards may be float32."""


def compare_policies(
    original: Any,
    trained: Any,
    states: Rows,
    reward_model: Any,
    *,
    num_actions_per_state: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    confidence: float = 0.95,
    reward: RewardConfig | None = None,
    label: Callable[[Any], str] | None = None,
    progress: bool = True,
    pass_reward: float | None = None,
) -> ComparisonReport:
    """Compare the rewards of two policies in the same states, with the same reward model and the same random numbers.

    Args:
        original: The result of `measure_policy` before training, because training changes a policy in place. Or another
            policy, which is measured now.
        trained: A `PolicyModel`.
        states: B states. If `original` is a measurement: the same states.
        reward_model, reward, label, progress: As in `measure_policy`.
        num_actions_per_state: None: as `original` was measured, or the default of `measure_policy`.
        batch_size: None: as `original` was measured, or the default of `measure_policy`.
        seed: None: as `original` was measured, or the default of `measure_policy`.
        confidence: Confidence level of the intervals. Larger: wider intervals.
        pass_reward: Smallest reward of an action that passes, for pass@k. None: 1 if all rewards are 0 or 1; otherwise the
            report has no pass@k.

    Raises:
        ConfigError: A number is out of range or differs from how `original` was measured, or both policies are one object.
        ContractError: `original` was measured in other states.
        ProtocolError, RewardError: As in `measure_policy`.

    Example:
        >>> before = measure_policy(policy, problems, reward)  # doctest: +SKIP
        >>> trainer.train(training_problems, num_iterations=100)  # doctest: +SKIP
        >>> print(compare_policies(before, policy, problems, reward))  # doctest: +SKIP
    """
    require_methods(trained, POLICY_METHODS, "trained", "PolicyModel")
    require_confidence("compare_policies", confidence)
    given = {"num_actions_per_state": num_actions_per_state, "batch_size": batch_size, "seed": seed}
    others: dict[str, Any] = {"reward": reward, "label": label, "progress": progress}
    if isinstance(original, PolicyMeasurement):
        how = _as_measured(original, states, given)
        before = original
    else:
        _require_another_policy(original, trained)
        how = {name: value for name, value in given.items() if value is not None}
        before = measure_policy(original, states, reward_model, **how, **others)
    return _report(before, measure_policy(trained, states, reward_model, **how, **others), confidence, pass_reward)


def _as_measured(original: PolicyMeasurement, states: Rows, given: dict[str, int | None]) -> dict[str, Any]:
    """Return the settings with which `original` was measured, to measure the trained policy in the same way."""
    _require_same_states(original, states)
    measured = {name: getattr(original, name) for name in given}
    changed = [name for name, value in given.items() if value is not None and value != measured[name]]
    if changed:
        raise ConfigError(
            f"compare_policies: {changed[0]} must be {measured[changed[0]]}, as `original` was measured; "
            f"got {given[changed[0]]}. Remove this argument, or measure `original` with the same value."
        )
    return measured


def _require_another_policy(original: Any, trained: Any) -> None:
    require_methods(original, POLICY_METHODS, "original", "PolicyModel")
    if original is trained:
        raise ConfigError(
            f"compare_policies needs two policies; original and trained are the same {type(trained).__name__}. Training "
            "changes a policy in place: pass what measure_policy returned before training, or a copy made before it."
        )


def _require_same_states(original: PolicyMeasurement, states: Rows) -> None:
    required = f"compare_policies: states must be the {len(original.fingerprints)} that `original` was measured in"
    if len(states) != len(original.fingerprints):
        raise ContractError(f"{required}; got {len(states)}. Pass the same states to both.")
    for place, (old, new) in enumerate(zip(original.fingerprints, fingerprints_of(states), strict=True)):
        if old != new:
            raise ContractError(
                f"{required}, in the same order; state {place} was {original.labels[place]!r} and is a different one now. Pass "
                "the same states to both, and do not change them in between."
            )


def _report(
    before: PolicyMeasurement, after: PolicyMeasurement, confidence: float, pass_reward: float | None
) -> ComparisonReport:
    """Compare two measurements state by state."""
    means = before.rewards.nanmean(1), after.rewards.nanmean(1)
    differences = means[1] - means[0]
    largest = torch.cat([before.rewards, after.rewards], dim=1).nan_to_num(0.0).abs().amax(1)
    states = tuple(
        StateComparison(
            label=name,
            before=old,
            after=new,
            difference=difference,
            outcome=_outcome(difference, scale),
            answer_before=answer_before,
            answer_after=answer_after,
        )
        for name, answer_before, answer_after, old, new, difference, scale in zip(
            after.labels,
            before.answers,
            after.answers,
            *(values.tolist() for values in (*means, differences, largest)),
            strict=True,
        )
    )
    outcomes = [state.outcome for state in states]
    improvement = after.mean_reward - before.mean_reward
    bootstrap: dict[str, Any] = {"confidence": confidence, "seed": after.seed}
    (average,) = compared_at([after.num_actions_per_state], [means[0]], [means[1]], **bootstrap)
    passes = passing_reward(pass_reward, before.rewards, after.rewards)
    passing: tuple[AtK, ...] = ()
    if passes is not None:
        counts = numbers_of_attempts(before.rewards, after.rewards)
        of_both = [[pass_at_k(each.rewards, k, passes) for k in counts] for each in (before, after)]
        passing = compared_at(counts, *of_both, **bootstrap)
    is_positive = before.mean_reward > ROUNDING * float(largest.max())
    return ComparisonReport(
        mean_reward_before=before.mean_reward,
        mean_reward_after=after.mean_reward,
        improvement=improvement,
        improvement_percent=100 * improvement / before.mean_reward if is_positive else None,
        confidence=confidence,
        confidence_interval=average.difference_interval,
        avg_at_k=average,
        pass_at_k=passing,
        pass_reward=passes,
        num_improved=outcomes.count("improved"),
        num_worse=outcomes.count("worse"),
        num_unchanged=outcomes.count("unchanged"),
        num_actions_per_state=after.num_actions_per_state,
        seed=after.seed,
        components_before=before.component_means,
        components_after=after.component_means,
        reward_failures_before=dict(before.reward_failures),
        reward_failures_after=dict(after.reward_failures),
        states=states,
    )


def _outcome(difference: float, scale: float) -> Outcome:
    if abs(difference) <= ROUNDING * scale:
        return "unchanged"
    return "improved" if difference > 0 else "worse"


def paired_interval(
    differences: Float64[np.ndarray, " B"], *, confidence: float, seed: int
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean of B paired differences.

    low, high = quantiles (1 -+ confidence) / 2 of the means of B differences drawn with replacement from these B

    The rewards are paired by state: a hard state is hard for both policies, so differences vary much less than rewards.
    The interval is too narrow for fewer than about 20 states, which cannot show how much states differ.

    Args:
        differences: After - before, one per state.
        confidence: Confidence level of the interval. Larger: a wider interval.
        seed: Seed of the resampling, which uses its own generator.

    Returns:
        Low and high. None for a single state.

    Example:
        >>> paired_interval(np.array([0.0, 1.0]), confidence=0.95, seed=0)  # the means are 0, .5 and 1: 1/4, 1/2, 1/4
        (0.0, 1.0)

    Source:
        Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13. On pairing by question: Miller 2024,
        Adding Error Bars to Evals, arXiv:2411.00640.
    """
    (interval,) = bootstrap_intervals(differences[:, None], confidence=confidence, seed=seed)
    return interval
