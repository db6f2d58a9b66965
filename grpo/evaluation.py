"""Two policies compared, or one before and after training: rewards state by state, as numbers, as a table and as JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float64

from .errors import ConfigError, ContractError
from .measurement import PolicyMeasurement, fingerprints_of, measure_policy
from .policy_base import POLICY_METHODS, require_methods
from .reward_calls import RewardConfig
from .types import Rows

ROUNDING = 1e-6
"""Differences below this share of a state's largest reward are none: rewards may be float32."""
WIDTH = 100
"""Columns of a printed table."""
NUMBER = 12
"""Columns of a number in it."""
NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """One state (a problem, a prompt, a beginning), before and after."""

    label: str
    """What the state is called."""
    before: float
    """Mean reward of the original's actions in it."""
    after: float
    """And of the trained policy's."""
    difference: float
    """`after - before`."""
    outcome: Literal["improved", "worse", "unchanged"]
    """`unchanged`: the difference is below a millionth of the state's largest reward, which may be rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """What `compare_policies` found. `print(report)` shows a table; `report.to_json(path)` keeps all of it."""

    mean_reward_before: float
    """The original's; every state counts the same."""
    mean_reward_after: float
    """The trained policy's."""
    improvement: float
    """`mean_reward_after - mean_reward_before`."""
    improvement_percent: float | None
    """100 improvement / |mean_reward_before|, so that it is positive where things got better, below zero too. None: the
    original's mean is 0, or nothing but the rounding of larger rewards."""
    confidence: float
    """Of the interval."""
    confidence_interval: tuple[float, float] | None
    """Of the improvement, over states like these; see `paired_interval`. None: one state tells nothing of others."""
    num_improved: int
    """States with a higher reward than before."""
    num_worse: int
    """And with a lower one."""
    num_unchanged: int
    """And with the same, rounding aside."""
    num_actions_per_state: int
    """Actions that each policy sampled in each state."""
    seed: int
    """Of both policies' random numbers, and of the interval's."""
    components_before: dict[str, float]
    """Means of the named parts of the reward, before weighting, where they are told and apply."""
    components_after: dict[str, float]
    """Likewise."""
    reward_failures_before: dict[str, float]
    """Rows left out, rewards set to 0, calls made again: what `RewardConfig` allowed to happen, by metric name."""
    reward_failures_after: dict[str, float]
    """Likewise."""
    states: tuple[StateComparison, ...]
    """One per state, in the order given."""

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as one JSON object with the names of the fields; None is null, and there is no NaN.

        Args:
            path: a file to write it to as well; its folder is made. None: none.
        """
        text = json.dumps(asdict(self), indent=2, allow_nan=False)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def table(self, max_rows: int | None = 20) -> str:
        """Summary, parts of the reward, and states from the largest improvement to the largest loss, 100 columns wide.

        Args:
            max_rows: states that are shown: half from the top, half from the bottom. None: all.
        """
        ranked = sorted(self.states, key=lambda state: -state.difference)
        rows = [_row(state.before, state.after, state.label) for state in ranked]
        if max_rows is not None and len(rows) > max_rows:
            num_bottom = max(max_rows, 0) // 2
            num_top = max(max_rows, 0) - num_bottom
            gap = " " * (3 * NUMBER + 2) + f"... {len(rows) - num_top - num_bottom} more"
            rows = [*rows[:num_top], gap, *rows[len(rows) - num_bottom :]]
        parts = [
            _row(self.components_before.get(name), self.components_after.get(name), name)
            for name in dict.fromkeys([*self.components_before, *self.components_after])
        ]
        lines = self._summary()
        if parts:
            lines += ["", _header("part of the reward"), *parts]
        return "\n".join([*lines, "", _header("state"), *rows])

    def __str__(self) -> str:
        return self.table()

    def _summary(self) -> list[str]:
        percent = self.improvement_percent
        relative = "no percentage of 0" if percent is None else f"{percent:+.4g} %"
        interval = self.confidence_interval
        bounds = (
            "none from one state" if interval is None else f"{_number(interval[0], '+')} to {_number(interval[1], '+')}"
        )
        failures = {
            name: (self.reward_failures_before[name], self.reward_failures_after[name])
            for name in self.reward_failures_before
            if self.reward_failures_before[name] or self.reward_failures_after[name]
        }
        rewards = f"Mean reward: {_number(self.mean_reward_before)} -> {_number(self.mean_reward_after)}"
        counts = f"{self.num_improved} improved, {self.num_worse} worse, {self.num_unchanged} unchanged"
        return [
            f"{rewards}, {_number(self.improvement, '+')} ({relative})",
            f"{100 * self.confidence:g} % confidence interval of the difference: {bounds}",
            f"{len(self.states)} states: {counts}; {self.num_actions_per_state} actions in each",
            *(f"{name}: {before:g} before, {after:g} after" for name, (before, after) in failures.items()),
        ]


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
) -> ComparisonReport:
    """What `trained` earns beside `original`, in the same states, by the same reward, from the same random numbers.

    Args:
        original: what `measure_policy` returned before training, which changes a policy in place; or another policy. The
            same model with an adapter switched off is measured while it is off.
        trained: a `PolicyModel`.
        states: B states; those that `original` was measured in.
        reward_model: see `measure_policy`, here and for what is not listed.
        num_actions_per_state: None: as `original` was measured, or `measure_policy`'s own default.
        batch_size: likewise.
        seed: likewise.
        confidence: of the interval of the improvement; larger is wider.

    Raises:
        ConfigError: a number out of range or unlike the one that `original` was measured with, or one policy given twice.
        ContractError: states unlike those that `original` was measured in.
        ProtocolError, RewardError: as in `measure_policy`.

    Example:
        >>> before = measure_policy(policy, problems, reward)  # doctest: +SKIP
        >>> trainer.train(training_problems, num_iterations=100)  # doctest: +SKIP
        >>> print(compare_policies(before, policy, problems, reward))  # doctest: +SKIP
    """
    require_methods(trained, POLICY_METHODS, "trained", "PolicyModel")
    if not 0 < confidence < 1:
        raise ConfigError(f"compare_policies: confidence must be > 0 and < 1; got {confidence}.")
    given = {"num_actions_per_state": num_actions_per_state, "batch_size": batch_size, "seed": seed}
    how: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    others: dict[str, Any] = {"reward": reward, "label": label, "progress": progress}
    if isinstance(original, PolicyMeasurement):
        before = original
        _require_same_states(before, states)
        measured = {name: getattr(before, name) for name in given}
        changed = [name for name, value in how.items() if value != measured[name]]
        if changed:
            raise ConfigError(
                f"compare_policies: {changed[0]} must be {measured[changed[0]]}, as `original` was measured; "
                f"got {how[changed[0]]}. Leave it out, or measure `original` with it."
            )
        how = measured
    else:
        require_methods(original, POLICY_METHODS, "original", "PolicyModel")
        if original is trained:
            raise ConfigError(
                f"compare_policies needs two policies; original and trained are one {type(trained).__name__}. Training "
                "changes a policy in place: pass what measure_policy returned before it, or a copy from before it."
            )
        before = measure_policy(original, states, reward_model, **how, **others)
    return _report(before, measure_policy(trained, states, reward_model, **how, **others), confidence)


def _report(before: PolicyMeasurement, after: PolicyMeasurement, confidence: float) -> ComparisonReport:
    """The two sides, paired by state."""
    means = before.rewards.nanmean(1), after.rewards.nanmean(1)
    differences = means[1] - means[0]
    largest = torch.cat([before.rewards, after.rewards], dim=1).nan_to_num(0.0).abs().amax(1)
    states = tuple(
        StateComparison(label=name, before=old, after=new, difference=difference, outcome=_outcome(difference, scale))
        for name, old, new, difference, scale in zip(
            after.labels, *(values.tolist() for values in (*means, differences, largest)), strict=True
        )
    )
    outcomes = [state.outcome for state in states]
    improvement = after.mean_reward - before.mean_reward
    is_zero = abs(before.mean_reward) <= ROUNDING * float(largest.max())
    return ComparisonReport(
        mean_reward_before=before.mean_reward,
        mean_reward_after=after.mean_reward,
        improvement=improvement,
        improvement_percent=None if is_zero else 100 * improvement / abs(before.mean_reward),
        confidence=confidence,
        confidence_interval=paired_interval(differences.numpy(), confidence=confidence, seed=after.seed),
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


def _outcome(difference: float, scale: float) -> Literal["improved", "worse", "unchanged"]:
    if abs(difference) <= ROUNDING * scale:
        return "unchanged"
    return "improved" if difference > 0 else "worse"


def _require_same_states(original: PolicyMeasurement, states: Rows) -> None:
    required = f"compare_policies: states must be the {len(original.fingerprints)} that `original` was measured in"
    if len(states) != len(original.fingerprints):
        raise ContractError(f"{required}; got {len(states)}. Pass the same states to both.")
    for place, (old, new) in enumerate(zip(original.fingerprints, fingerprints_of(states), strict=True)):
        if old != new:
            raise ContractError(
                f"{required}, in the same order; state {place} was {original.labels[place]!r}, and is another now. Pass the "
                "same states to both, and do not change them in between."
            )


def paired_interval(
    differences: Float64[np.ndarray, " B"], *, confidence: float, seed: int
) -> tuple[float, float] | None:
    """Percentile bootstrap of a mean difference: quantiles (1 -+ confidence) / 2 of means of B differences drawn from these B.

    Paired: a hard state is hard for both policies, and only their difference counts, which varies far less than the rewards.
    With fewer than some 20 states it is too narrow, since so few cannot show how different states are.

    Args:
        differences: after - before, one per state.
        confidence: of the interval; larger is wider.
        seed: of the resampling, which has a generator of its own.

    Returns:
        Low and high; None for a single state.

    Example:
        >>> paired_interval(np.array([0.0, 1.0]), confidence=0.95, seed=0)  # the means are 0, .5 and 1: 1/4, 1/2, 1/4
        (0.0, 1.0)

    Source:
        Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13. On pairing by question: Miller 2024,
        Adding Error Bars to Evals, arXiv:2411.00640.
    """
    num_states = len(differences)
    if num_states < 2:
        return None
    generator = np.random.default_rng(seed)
    at_once = max(2**20 // num_states, 1)  # bounds the memory, whatever the number of states
    means = [
        differences[generator.integers(num_states, size=(min(at_once, NUM_RESAMPLES - done), num_states))].mean(axis=1)
        for done in range(0, NUM_RESAMPLES, at_once)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return low, high


def _header(name: str) -> str:
    return f"{'before':>{NUMBER}}{'after':>{NUMBER}}{'difference':>{NUMBER}}  {name}"


def _row(before: float | None, after: float | None, label: str) -> str:
    difference = None if before is None or after is None else after - before
    numbers = [_number(before), _number(after), _number(difference, "+")]
    return "".join(f"{number:>{NUMBER}}" for number in numbers) + f"  {_shown(label, WIDTH - 3 * NUMBER - 2)}"


def _number(value: float | None, sign: Literal["", "+"] = "") -> str:
    """Four decimals, or an exponent where they would say nothing or not fit."""
    if value is None:
        return "-"
    return f"{value:{sign}.4f}" if value == 0 or 1e-4 <= abs(value) < 1e5 else f"{value:{sign}.2e}"


def _shown(text: str, width: int) -> str:
    """On one line, without characters that a terminal would obey, and cut to `width`."""
    line = "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in " ".join(text.split())
    )
    return line if len(line) <= width else line[: width - 3] + "..."
