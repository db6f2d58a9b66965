"""Tasks for training and evaluating tool-selection policies: requests with their right calls."""

import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from grpo.errors import ConfigError, GRPOError

Difficulty = Literal["easy", "medium", "hard"]


class TaskError(GRPOError, ValueError):
    """Data is not a valid task. The message names the field, and the line if the task comes from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTask:
    """A request and its right call.

    Raises:
        TaskError: A field is of the wrong type.
    """

    text: str
    """The request."""
    tool: str
    """Name of the right tool."""
    arguments: Mapping[str, Any]
    """The right arguments. Enumerated parameters are included even if they have their default value, except where the
    right call omits them."""
    category: str
    """Category of the right tool."""
    difficulty: Difficulty
    """`easy`: the request uses the description's words, and every enumerated parameter keeps its default. `medium`: the request
    uses other words, or asks for a parameter value. `hard`: it does both."""
    slots: Mapping[str, Any]
    """Values in the request for parameters that are not enumerated, by parameter. They fill the call's free parameters."""
    shares_words: bool
    """Whether the request shares a content word with the tool's name or description."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TaskError(f"a task's {name} must be of type {kind.__name__}; got {value!r}.")
        if self.difficulty not in get_args(Difficulty):
            raise TaskError(f"a task's difficulty must be one of {get_args(Difficulty)}; got {self.difficulty!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON values."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"arguments": dict(self.arguments), "slots": dict(self.slots)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ToolTask":
        """The inverse of `to_dict`.

        Raises:
            TaskError: A field is missing, unknown or of the wrong type.
        """
        if not isinstance(fields, Mapping):
            raise TaskError(f"a task must be an object with the fields {', '.join(_TYPES)}; got {fields!r}.")
        for what, names in (("lacks", _TYPES.keys() - fields.keys()), ("has unknown", fields.keys() - _TYPES.keys())):
            if names:
                raise TaskError(f"a task {what} {', '.join(sorted(names))}; its fields are {', '.join(_TYPES)}.")
        return cls(**fields)

    def to_state(self) -> dict[str, Any]:
        """Fields by name, for checkpoints."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "ToolTask":
        """The inverse of `to_state`."""
        return cls(**state)


_TYPES: Mapping[str, type] = {
    "text": str, "tool": str, "arguments": Mapping, "category": str, "difficulty": str, "slots": Mapping, "shares_words": bool,
}  # fmt: skip


def save_tasks(path: str | os.PathLike[str], tasks: Iterable[ToolTask]) -> None:
    """Write tasks to a file, one JSON object per line. An existing file is replaced after all tasks are written.

    Raises:
        ValueError: JSON cannot represent an argument, for example NaN.
    """
    target = Path(path)
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            for task in tasks:
                file.write(json.dumps(task.to_dict(), ensure_ascii=False, allow_nan=False) + "\n")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def load_tasks(path: str | os.PathLike[str]) -> list[ToolTask]:
    """Read tasks that `save_tasks` wrote. Blank lines are skipped.

    Raises:
        TaskError: A line is not a task. The message has the line number.
    """
    tasks = []
    # Not splitlines: a JSON string may contain other line separators unescaped.
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            tasks.append(ToolTask.from_dict(json.loads(line)))
        except TaskError as error:
            raise TaskError(f"{path}, line {number}: {error}") from error
        except ValueError as error:  # neither JSON nor UTF-8
            raise TaskError(
                f"{path}, line {number}: each line must be JSON: {error}. Write one object per line."
            ) from error
    return tasks


def split_tasks(
    tasks: Sequence[ToolTask],
    held_out_fraction: float,
    seed: int,
    key: Callable[[ToolTask], Hashable] | None = None,
) -> tuple[list[ToolTask], list[ToolTask]]:
    """Split tasks into training tasks and held-out tasks, both in their original order.

    Args:
        tasks: The tasks. Each tool's tasks are split separately.
        held_out_fraction: Share of each tool's tasks (or keys, if `key` is given) to hold out, from 0 to 1, rounded to the
            nearest count.
        seed: Seed of the random selection.
        key: Tasks of one tool with equal keys stay together. Use it to hold out whole wordings.

    Raises:
        ConfigError: The fraction is not from 0 to 1.
    """
    if not 0 <= held_out_fraction <= 1:
        raise ConfigError(f"split_tasks: held_out_fraction must be from 0 to 1; got {held_out_fraction}.")
    bundles: dict[str, dict[Hashable, list[int]]] = {}
    for index, task in enumerate(tasks):
        bundles.setdefault(task.tool, {}).setdefault(index if key is None else key(task), []).append(index)
    held_out: set[int] = set()
    for tool, by_key in bundles.items():
        keys = list(by_key)
        # Seed with the tool's name, so that the split of one tool does not depend on the other tools.
        chosen = Random(f"{seed} {tool}").sample(keys, round(held_out_fraction * len(keys)))
        held_out.update(index for one in chosen for index in by_key[one])
    return (
        [task for index, task in enumerate(tasks) if index not in held_out],
        [task for index, task in enumerate(tasks) if index in held_out],
    )
