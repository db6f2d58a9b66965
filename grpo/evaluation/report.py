"""The result of comparing two policies: as numbers, as a printed table and as JSON."""

import builtins
import json
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from grpo._common.conversion import describe
from grpo._common.shown import show_text
from grpo.errors import ConfigError

from .attempts import AtK
from .measurement import Answer

Outcome: TypeAlias = Literal["improved", "worse", "unchanged"]

WIDTH = 100
"""Width of a printed table, in characters."""
NUMBER = 12
"""Width of one number in a printed table, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """One state (a problem, a prompt, an initial position): its mean reward before and after."""

    label: str
    """The name of the state in the printed table."""
    before: float
    """Mean reward of the original policy's actions in this state."""
    after: float
    """Mean reward of the trained policy's actions in this state."""
    difference: float
    """`after - before`."""
    outcome: Outcome
    """`improved`, `worse` or `unchanged`. A difference below a millionth of the state's largest reward is `unchanged`."""
    answer_before: Answer
    """One action of the original policy in this state, as text, with its reward."""
    answer_after: Answer
    """One action of the trained policy in this state, as text, with its reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """The result of `compare_policies`. `print(report)` shows a table, and `report.to_json(path)` saves everything."""

    mean_reward_before: float
    """Mean reward of the original policy. Every state has the same weight."""
    mean_reward_after: float
    """Mean reward of the trained policy. Every state has the same weight."""
    improvement: float
    """`mean_reward_after - mean_reward_before`."""
    improvement_percent: float | None
    """100 improvement / mean_reward_before. None: `mean_reward_before` is not positive, or is 0 up to rounding, so that a
    percentage would mean nothing."""
    confidence: float
    """Confidence level of the interval."""
    confidence_interval: tuple[float, float] | None
    """Confidence interval of the improvement (see `paired_interval`). None: there is only one state."""
    avg_at_k: AtK
    """avg@k: the mean reward of the k = `num_actions_per_state` actions, with an interval for each policy."""
    pass_at_k: tuple[AtK, ...]
    """pass@k for k = 1, 2, 4 and so on, up to `num_actions_per_state`: the probability that at least one of k actions passes
    (see `grpo.evaluation.attempts.pass_at_k`). Empty: nothing says which rewards pass."""
    pass_reward: float | None
    """Smallest reward of an action that passes. None: the rewards are not all 0 or 1, and none was given."""
    num_improved: int
    """Number of states whose mean reward rose."""
    num_worse: int
    """Number of states whose mean reward fell."""
    num_unchanged: int
    """Number of states whose mean reward stayed the same, up to rounding."""
    num_actions_per_state: int
    """Number of actions that each policy sampled in each state."""
    seed: int
    """Seed of both policies' random numbers and of the interval's resampling."""
    components_before: dict[str, float]
    """Mean of each named part of the original policy's reward, before weighting, over the rows that the part applies to."""
    components_after: dict[str, float]
    """Mean of each named part of the trained policy's reward, before weighting, over the rows that the part applies to."""
    reward_failures_before: dict[str, float]
    """Original policy: rows dropped, rewards set to 0 and calls repeated, as `RewardConfig` allows. Keyed by metric name."""
    reward_failures_after: dict[str, float]
    """Trained policy: rows dropped, rewards set to 0 and calls repeated, as `RewardConfig` allows. Keyed by metric name."""
    states: tuple[StateComparison, ...]
    """One comparison per state, in the order of the states."""

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the whole report as one JSON object, with the field names as keys. None becomes null; there is no NaN.

        Args:
            path: A file to write the JSON to. Missing folders are created. None: no file is written.
        """
        text = json.dumps(asdict(self), indent=2, allow_nan=False)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, text: str) -> "ComparisonReport":
        """Read a report from the JSON text that `to_json` returned or wrote: `from_json(path.read_text())`.

        Raises:
            ConfigError: The text is not JSON, or has other keys or types than a report of this version.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"ComparisonReport.from_json needs the JSON text that to_json wrote; got {text[:40]!r} ({error}). Pass the "
                "text of the file, and not its path."
            ) from error
        _require_fields(cls, values)
        for state in values["states"]:
            _require_fields(StateComparison, state)
            for name in ("answer_before", "answer_after"):
                _require_fields(Answer, state[name])
                state[name] = Answer(**state[name])
        interval = values["confidence_interval"]
        values["confidence_interval"] = None if interval is None else (interval[0], interval[1])
        values["avg_at_k"] = _at_k(values["avg_at_k"])
        values["pass_at_k"] = tuple(map(_at_k, values["pass_at_k"]))
        values["states"] = tuple(StateComparison(**state) for state in values["states"])
        return cls(**values)

    def table(self, max_rows: int | None = 20) -> str:
        """Return a text with a summary, pass@k, the parts of the reward, and the states from the largest gain to the largest
        loss.

        Args:
            max_rows: Number of states to show, half from the top and half from the bottom. None: all.
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
        if self.pass_at_k:
            passes = [_row(at.before, at.after, f"pass@{at.k}") for at in self.pass_at_k]
            lines += ["", _header(f"one of k actions earns at least {self.pass_reward:g}"), *passes]
        if parts:
            lines += ["", _header("part of the reward"), *parts]
        return "\n".join([*lines, "", _header("state"), *rows])

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        return self.table()

    def _summary(self) -> list[str]:
        percent = self.improvement_percent
        relative = "no percentage: the mean before is not above 0" if percent is None else f"{percent:+.4g} %"
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
        at = self.avg_at_k
        counts = f"{self.num_improved} improved, {self.num_worse} worse, {self.num_unchanged} unchanged"
        return [
            f"{rewards}, {_number(self.improvement, '+')} ({relative})",
            f"{100 * self.confidence:g} % confidence interval of the difference: {bounds}",
            f"avg@{at.k}: {_within(at.before_interval)} before, {_within(at.after_interval)} after",
            f"{len(self.states)} states: {counts}; {self.num_actions_per_state} actions in each",
            *(f"{name}: {before:g} before, {after:g} after" for name, (before, after) in failures.items()),
        ]


def _at_k(values: Any) -> AtK:
    """Read avg@k or pass@k for one k. Intervals are lists in JSON."""
    _require_fields(AtK, values)
    given: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return AtK(**given)


def _require_fields(cls: type, values: Any) -> None:
    """Raise a ConfigError if `values` is not a mapping with the names of the fields of the data class `cls`."""
    required = [one.name for one in fields(cls)]
    if not isinstance(values, Mapping) or set(values) != set(required):
        got = ", ".join(values) if isinstance(values, Mapping) else f"a {type(values).__name__}"
        raise ConfigError(
            f"ComparisonReport.from_json: {cls.__name__} needs {', '.join(required)}; got {got}. Pass what to_json wrote, or "
            "compare the policies again with this version."
        )
    for name, kind in get_type_hints(cls).items():
        if not _is_a(values[name], kind):
            raise ConfigError(
                f"ComparisonReport.from_json: {cls.__name__}.{name} must be what to_json wrote; got {describe(values[name])}. "
                "Compare the policies again."
            )


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value that was read from JSON has the type of a field. Data classes are dicts, and tuples are lists."""
    within = get_args(kind)
    match get_origin(kind):
        case types.UnionType:
            return any(_is_a(value, one) for one in within)
        case typing.Literal:
            return isinstance(value, str) and value in within
        case builtins.dict:
            return isinstance(value, dict) and all(_is_a(one, within[1]) for one in value.values())
        case builtins.tuple if ... in within:
            return isinstance(value, list) and all(_is_a(one, within[0]) for one in value)
        case builtins.tuple:
            return isinstance(value, list) and len(value) == len(within) and all(map(_is_a, value, within))
    if kind is float:
        return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)
    return is_dataclass(kind) or type(value) is kind  # the fields of a data class within are checked after this


def _header(name: str) -> str:
    return f"{'before':>{NUMBER}}{'after':>{NUMBER}}{'difference':>{NUMBER}}  {name}"


def _row(before: float | None, after: float | None, label: str) -> str:
    difference = None if before is None or after is None else after - before
    numbers = [_number(before), _number(after), _number(difference, "+")]
    return "".join(f"{number:>{NUMBER}}" for number in numbers) + f"  {_printable(label, WIDTH - 3 * NUMBER - 2)}"


def _within(interval: tuple[float, float] | None) -> str:
    return "no interval" if interval is None else f"{_number(interval[0])} to {_number(interval[1])}"


def _number(value: float | None, sign: Literal["", "+"] = "") -> str:
    """Format a number with four decimals, or with an exponent if the number is very small or very large."""
    if value is None:
        return "-"
    return f"{value:{sign}.4f}" if value == 0 or 1e-4 <= abs(value) < 1e5 else f"{value:{sign}.2e}"


def _printable(text: str, width: int) -> str:
    """Put text on one line, cut it to `width`, and escape control characters so that a label cannot control the terminal."""
    line = "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in " ".join(text.split())
    )
    return line if len(line) <= width else line[: width - 3] + "..."
