"""Sinks: what a run records, iteration by iteration, in a file or a tracker, as numbers and as tables of samples."""

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, runtime_checkable
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._common.checks import require_count
from ._common.conversion import describe, reward_name
from ._common.protocols import has_method
from .config import GRPOConfig
from .errors import ConfigError, warn_user
from .types import Rows

LONGEST_TEXT = 2_000
"""Characters of a state or an action in a table. Longer texts are cut in the middle."""
MOST_NUMBERS = 1_000
"""Numbers of a tensor or an array that a table shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Rows of one iteration or one evaluation, as they were sampled on this rank."""

    kind: Literal["train", "eval"]
    """`train`: rows that the policy is updated on. `eval`: rows of an evaluation."""
    states: Rows
    """N states, one per row."""
    actions: Rows
    """N actions."""
    group_ids: Int[Tensor, " N"]
    """The group of each row. The rows of a group have the same state."""
    rewards: Float[Tensor, " N"]
    """The reward of each row. Rewards per step are added up."""
    reward_components: Mapping[str, Float[Tensor, " N"]] = field(default_factory=dict)
    """The named parts of the reward before weighting. NaN: the part does not apply to the row."""
    advantages: Float[Tensor, " N"] | None = None
    """The advantage of each row: the mean over its steps, if steps have advantages of their own. None: an evaluation."""
    num_steps: Int[Tensor, " N"] | None = None
    """The number of decisions in each row, such as the tokens of a response. None: an evaluation that did not count them."""

    def table(self, num_states: int = 2, num_actions: int = 2) -> list[dict[str, str | float | None]]:
        """The first rows of the first groups, for people to read. States and actions are converted by `str`.

        Args:
            num_states: Number of groups.
            num_actions: Number of rows of each group.

        Returns:
            One dict per row with the keys "state", "action", "reward", "reward/NAME" for each named part, "advantage" and
            "steps". None: the number is not known, or does not apply to the row.

        Example:
            >>> import torch
            >>> samples = Samples(kind="eval", states=["a", "a"], actions=[1, 0], group_ids=torch.tensor([0, 0]),
            ...                   rewards=torch.tensor([1.0, 0.0]))
            >>> samples.table(num_actions=1)
            [{'state': 'a', 'action': '1', 'reward': 1.0, 'advantage': None, 'steps': None}]
        """
        chosen: dict[int, list[int]] = {}
        for row, group in enumerate(self.group_ids.tolist()):
            if group in chosen or len(chosen) < num_states:
                chosen.setdefault(group, []).append(row)
            elif len(chosen[next(reversed(chosen))]) >= num_actions:
                break  # the rows of a group are usually adjacent, so that no later row belongs to a chosen group
        return [self._row(row) for rows in chosen.values() for row in rows[:num_actions]]

    def _row(self, row: int) -> dict[str, str | float | None]:
        parts = {f"reward/{name}": _number(values, row) for name, values in self.reward_components.items()}
        return {
            "state": as_text(self.states[row]),
            "action": as_text(self.actions[row]),
            "reward": _number(self.rewards, row),
            **parts,
            "advantage": _number(self.advantages, row),
            "steps": _number(self.num_steps, row),
        }


def as_text(value: Any) -> str:
    """A state or an action as text: `str`, tensors as lists, floats with three digits. Long texts are cut in the middle. Of
    tensors and arrays with many numbers, such as pictures, the text has the dtype, the shape and a checksum."""
    text = str(_shortened(value))
    half = LONGEST_TEXT // 2
    return (
        text if len(text) <= LONGEST_TEXT else f"{text[:half]} [... {len(text) - 2 * half:,} more ...] {text[-half:]}"
    )


def _shortened(value: Any) -> Any:
    """A value of plain types, with lists in place of tensors and arrays, and floats rounded to three digits, or to integers."""
    if hasattr(value, "tolist"):
        is_large = math.prod(getattr(value, "shape", ())) > MOST_NUMBERS
        numbers = value.tolist()
        value = f"{value.dtype} {list(value.shape)} {crc32(str(numbers).encode()):08x}" if is_large else numbers
    if type(value) is float and math.isfinite(value) and value:
        return round(value, max(2 - math.floor(math.log10(abs(value))), 0))
    if type(value) in (list, tuple):
        return type(value)(map(_shortened, value))
    return {name: _shortened(part) for name, part in value.items()} if type(value) is dict else value


def _number(values: Tensor | None, row: int) -> float | None:
    value = math.nan if values is None else float(values[row])
    return value if math.isfinite(value) else None


@runtime_checkable
class MetricSink(Protocol):
    """Receives the metrics of each iteration: a file, a dashboard, a plot.

    `train` calls sinks on the first rank only. A sink that raises is reported and switched off, and the run goes on. Three
    more members are optional; `train` finds them by their names:

    - `start(settings, iteration)` is called before the first iteration of each `train`. `settings` are plain values: the
      config, the classes of policy and reward model, and versions. `iteration` is the number of the first iteration to come.
    - `log_samples(samples, iteration)` receives the `Samples` of an iteration, and of an evaluation.
    - `log_every`, an integer: only every so many iterations are logged, those with an evaluation, and the last.
    """

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Record the metrics of one iteration. Iterations count from 1."""
        ...

    def close(self) -> None:
        """Release files and connections. The code that opened the sink calls this after the last iteration."""
        ...


class GuardedSinks:
    """Calls several sinks. A sink that raises is reported as a `GRPOWarning`, and is not called again.

    Raises:
        ConfigError: `sinks` is not a list of sinks, or a `log_every` is not an integer from 1.
    """

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        given: Any = sinks
        for sink in given if isinstance(given, list | tuple) else ():
            if isinstance(sink, type):
                raise ConfigError(f"sinks: {sink.__name__} is a class. Pass an object: {sink.__name__}(...).")
        if not isinstance(given, list | tuple) or not all(has_method(sink, "log") for sink in given):
            raise ConfigError(
                f"sinks must be a list of MetricSink, which have log(); got {describe(given)}. Pass [sink]."
            )
        self._every = [
            (sink, require_count(f"{type(sink).__name__}.log_every", getattr(sink, "log_every", 1))) for sink in given
        ]

    @property
    def take_samples(self) -> bool:
        """Whether a sink records samples."""
        return any(has_method(sink, "log_samples") for sink, _ in self._every)

    def start(self, settings: Mapping[str, Any], iteration: int) -> None:
        """Tell the sinks what is run, and the number of the first iteration."""
        for sink, _ in [*self._every]:
            if has_method(sink, "start"):
                self._call(sink, "start", settings, iteration)

    def log(
        self, metrics: Mapping[str, float], iteration: int, samples: Sequence[Samples] = (), *, always: bool = False
    ) -> None:
        """Record one iteration in the sinks whose turn it is.

        Args:
            metrics: The iteration's metrics.
            iteration: Its number, from 1.
            samples: Rows of the iteration, and of its evaluation.
            always: Whether it is every sink's turn: the last iteration, or one with an evaluation.
        """
        for sink, every in [*self._every]:
            if always or iteration % every == 0:
                is_sound = self._call(sink, "log", metrics, iteration)
                for rows in samples if is_sound and has_method(sink, "log_samples") else ():
                    is_sound = is_sound and self._call(sink, "log_samples", rows, iteration)

    def _call(self, sink: MetricSink, method: str, *args: Any) -> bool:
        """Call a method of a sink. Returns False if it raised, and the sink is switched off."""
        try:
            getattr(sink, method)(*args)
        except Exception as error:  # a tracker that fails is no reason to lose a run
            self._every = [(other, every) for other, every in self._every if other is not sink]
            warn_user(
                f"{type(sink).__name__}.{method} raised {type(error).__name__} in iteration {args[-1]}: "
                f"{str(error).rstrip('.')}. The sink is switched off, and training goes on without it."
            )
            return False
        return True


def run_settings(config: GRPOConfig, policy: object, reward_model: object) -> dict[str, Any]:
    """What a sink's `start` is told about a run: its config, the kinds of its parts, and versions."""
    try:
        own = metadata.version("model-agnostic-grpo")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "config": config.to_dict(),
        "policy": type(policy).__name__,
        "reward_model": reward_name(reward_model),
        "versions": {
            "model-agnostic-grpo": own,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


class JSONLSink:
    """Writes one JSON object per iteration to a file, one per line, and flushes after each line.

    A run that is resumed continues the file: lines of the iterations that are made again are removed first. A new run, whose
    first iteration is 1, moves the lines of an earlier run to `NAME.1`, `NAME.2` and so on. Control characters in names are
    escaped. NaN and infinity become null, because JSON has no such numbers.

    Args:
        path: The file. Missing folders are created with the first line.
        log_every: Iterations between two lines in `train`. Larger: a smaller file. Evaluations and the last iteration are
            always written.

    Example:
        >>> with JSONLSink("metrics.jsonl") as sink:
        ...     sink.log({"rewards/mean": 0.5}, iteration=1)
        >>> Path("metrics.jsonl").read_text()
        '{"iteration": 1, "rewards/mean": 0.5}\\n'
    """

    def __init__(self, path: str | Path, *, log_every: int = 1) -> None:
        self.path, self.log_every = Path(path), log_every
        self._file: TextIO | None = None
        self._last = 0

    def start(self, settings: Mapping[str, Any], iteration: int) -> None:
        """Continue the file with `iteration`. The settings are not written."""
        self.close()

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Append one line."""
        line = {"iteration": iteration, **{k: v if math.isfinite(v) else None for k, v in metrics.items()}}
        self.write(line, iteration)

    def write(self, line: Mapping[str, Any], iteration: int) -> None:
        """Append any JSON object as the line of an iteration. An iteration may have several lines."""
        if self._file is None or iteration < self._last:
            self.close()
            continue_lines(self.path, iteration)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._last = iteration

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> "JSONLSink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def continue_lines(path: Path, iteration: int) -> None:
    """Prepare a file of JSON lines for a run that continues with `iteration`.

    Lines of this and of later iterations are removed, and so is a last line that a killed process has not finished. If
    `iteration` is 1, the file is moved to a numbered name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or not path.stat().st_size:
        return
    if iteration <= 1:
        numbers = (path.with_name(f"{path.name}.{number}") for number in range(1, 1_000_000))
        path.rename(next(other for other in numbers if not other.exists()))
        return
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # "x" follows no link, which another user may have put there
    with path.open(encoding="utf-8") as old, new.open("x", encoding="utf-8") as kept:
        kept.writelines(line for line in old if _iteration_of(line) < iteration)
        kept.flush()
        os.fsync(kept.fileno())
    new.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Write a file completely or not at all. A link at `path`, or at the name of the unfinished file, is not followed."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with new.open("x", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


def _iteration_of(line: str) -> float:
    """The iteration of a line. Infinity: the line is not complete, or has no iteration."""
    try:
        number = json.loads(line)["iteration"] if line.endswith("\n") else math.inf
    except (ValueError, TypeError, KeyError, RecursionError):  # thousands of nested lists exceed Python's stack
        return math.inf
    return number if isinstance(number, int) else math.inf
