"""Tasks for training and evaluating tool-selection policies: requests with their right calls."""

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from random import Random
from typing import Any

import pydantic

from adapters.tools.catalogue.calls import ToolCall
from grpo.errors import ConfigError, GRPOError
from grpo.sinks import replace_text

from .records import JSONObject, Record, record


class TaskError(GRPOError, ValueError):
    """Data is not a valid task. The message names the field, and the line if the task comes from a file."""


@record
class ToolTask(Record):
    """A request and its right call.

    Raises:
        TaskError: A field is of the wrong type, or a task without a tool has arguments.

    Example:
        >>> ToolTask(text="add 2 and 3", tool="add", arguments={"a": 2, "b": 3}).right_calls
        (ToolCall(tool='add', arguments={'a': 2, 'b': 3}),)
        >>> ToolTask(text="how are you?", tool=None).right_calls
        (None,)
    """

    error = TaskError

    text: pydantic.StrictStr
    """The request."""
    tool: pydantic.StrictStr | None
    """Name of the right tool. None: the right answer is to call no tool."""
    arguments: JSONObject = field(default_factory=dict)
    """The right arguments, as JSON values: "red", not `Colour.RED`. Enumerated parameters are included even if they have their
    default value, except where the right call omits them."""
    other_calls: tuple[ToolCall, ...] = ()
    """Other calls that are right too."""
    slots: Mapping[str, Any] = field(default_factory=dict)
    """Values of the parameters that are not enumerated. Empty: the policy's `fill` has to find the values."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Kinds of this task, such as `{"difficulty": "hard"}`. `evaluate_tools` reports the accuracy for each label."""

    def __post_init__(self) -> None:
        if self.tool is None and self.arguments:
            raise ValueError(f"a task without a tool must have no arguments; got {self.arguments!r:.120}.")

    @property
    def right_calls(self) -> tuple[ToolCall | None, ...]:
        """All right answers, the task's own first. None: no call."""
        own = None if self.tool is None else ToolCall(tool=self.tool, arguments=self.arguments)
        return (own, *self.other_calls)


def save_tasks(path: str | os.PathLike[str], tasks: Iterable[ToolTask]) -> None:
    """Write tasks to a file, one JSON object per line. An existing file is replaced after all tasks are written.

    Raises:
        ValueError: JSON cannot represent an argument, for example NaN.
    """
    text = "".join(task.to_json() + "\n" for task in tasks)
    replace_text(Path(path), text)


def load_tasks(path: str | os.PathLike[str]) -> list[ToolTask]:
    """Read tasks that `save_tasks` wrote. Blank lines are skipped.

    Raises:
        TaskError: A line is not a task. The message has the line number.
    """
    tasks = []
    # Not splitlines: a JSON string may contain other line separators unescaped.
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        try:
            tasks += [ToolTask.from_json(line)] if line.strip() else []
        except TaskError as error:
            raise TaskError(f"{path}, line {number}: {error}") from error
    return tasks


def split_tasks(
    tasks: Sequence[ToolTask],
    held_out_fraction: float,
    seed: int,
    key: Callable[[ToolTask], Hashable] | None = None,
) -> tuple[list[ToolTask], list[ToolTask]]:
    """Split each tool's tasks into training tasks and held-out tasks, both in their original order.

    Args:
        tasks: The tasks.
        held_out_fraction: Share of each tool's tasks (or keys, if `key` is given) to hold out, from 0 to 1, rounded to the
            nearest count.
        seed: Seed of the random selection. The split of one tool does not depend on the other tools.
        key: Tasks of one tool with equal keys stay together. Use it to hold out whole wordings.

    Raises:
        ConfigError: The fraction is not from 0 to 1.
    """
    if not 0 <= held_out_fraction <= 1:
        raise ConfigError(f"split_tasks: held_out_fraction must be from 0 to 1; got {held_out_fraction}.")
    keys = [index if key is None else key(task) for index, task in enumerate(tasks)]
    keys_of: dict[str | None, dict[Hashable, None]] = {}
    for task, own in zip(tasks, keys, strict=True):
        keys_of.setdefault(task.tool, {})[own] = None
    held_out = {
        (tool, one)
        for tool, own in keys_of.items()
        for one in Random(f"{seed} {tool}").sample([*own], round(held_out_fraction * len(own)))
    }
    parts: tuple[list[ToolTask], list[ToolTask]] = ([], [])
    for task, own in zip(tasks, keys, strict=True):
        parts[(task.tool, own) in held_out].append(task)
    return parts
