"""Requests with the call that answers them: what a policy that chooses tools is trained and measured on."""

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
    """What was read is no task; the field, and for a file the line, is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTask:
    """A request, and the one call that answers it."""

    text: str
    """What is asked for."""
    tool: str
    """The right tool's name."""
    arguments: Mapping[str, Any]
    """The right arguments, complete: with every enumerated parameter, at its default too, but for those that are best left
    out."""
    category: str
    """Of the right tool."""
    difficulty: Difficulty
    """Easy: uses the description's words, and every parameter that is a decision stays at its default. Medium: uses other words
    alone, or asks for a parameter's value. Hard: both."""
    slots: Mapping[str, Any]
    """Values found in the request, by parameter, that a schema does not enumerate: a call's free parameters are filled with
    them."""
    shares_words: bool
    """The request has a content word in common with the tool's name or description."""

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON holds them."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"arguments": dict(self.arguments), "slots": dict(self.slots)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ToolTask":
        """The inverse of `to_dict`.

        Raises:
            TaskError: a field that is missing, unknown, or of another type.
        """
        if not isinstance(fields, Mapping):
            raise TaskError(f"a task must be an object with the fields {', '.join(_TYPES)}; got {fields!r}.")
        for what, names in (("lacks", _TYPES.keys() - fields.keys()), ("has unknown", fields.keys() - _TYPES.keys())):
            if names:
                raise TaskError(f"a task {what} {', '.join(sorted(names))}; its fields are {', '.join(_TYPES)}.")
        for name, kind in _TYPES.items():
            if not isinstance(fields[name], kind):
                raise TaskError(f"a task's {name} must be of type {kind.__name__}; got {fields[name]!r}.")
        if fields["difficulty"] not in get_args(Difficulty):
            raise TaskError(f"a task's difficulty must be one of {get_args(Difficulty)}; got {fields['difficulty']!r}.")
        return cls(**fields)


_TYPES: Mapping[str, type] = {
    "text": str, "tool": str, "arguments": Mapping, "category": str, "difficulty": str, "slots": Mapping, "shares_words": bool,
}  # fmt: skip


def save_tasks(path: str | os.PathLike[str], tasks: Iterable[ToolTask]) -> None:
    """Write tasks to a file, one JSON object per line; a file that is there is replaced once all are written.

    Raises:
        ValueError: an argument that JSON cannot hold, NaN included.
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
    """Read what `save_tasks` wrote; blank lines are passed over.

    Raises:
        TaskError: a line that is no task, by its number.
    """
    tasks = []
    # not splitlines: a text may hold line separators that JSON leaves as they are
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            tasks.append(ToolTask.from_dict(json.loads(line)))
        except TaskError as error:
            raise TaskError(f"{path}, line {number}: {error}") from error
        except ValueError as error:  # neither JSON nor UTF-8
            raise TaskError(f"{path}, line {number}: not JSON: {error}. Write one object per line.") from error
    return tasks


def split_tasks(
    tasks: Sequence[ToolTask],
    held_out_fraction: float,
    seed: int,
    key: Callable[[ToolTask], Hashable] | None = None,
) -> tuple[list[ToolTask], list[ToolTask]]:
    """Tasks to train on and tasks to measure on, both in the order they came in.

    Args:
        tasks: of any tools; each tool's are divided on their own.
        held_out_fraction: of each tool's tasks (of its keys, where there is a key), rounded to the nearest; from 0 to 1.
        seed: which ones.
        key: tasks of one tool with equal keys stay together, so that whole wordings can be held out.

    Raises:
        ConfigError: a fraction outside of 0 to 1.
    """
    if not 0 <= held_out_fraction <= 1:
        raise ConfigError(f"split_tasks: held_out_fraction must be from 0 to 1; got {held_out_fraction}.")
    bundles: dict[str, dict[Hashable, list[int]]] = {}
    for index, task in enumerate(tasks):
        bundles.setdefault(task.tool, {}).setdefault(index if key is None else key(task), []).append(index)
    held_out: set[int] = set()
    for tool, by_key in bundles.items():
        keys = list(by_key)
        # by the tool's name, so that tasks of one tool are divided alike whatever other tools there are
        chosen = Random(f"{seed} {tool}").sample(keys, round(held_out_fraction * len(keys)))
        held_out.update(index for one in chosen for index in by_key[one])
    return (
        [task for index, task in enumerate(tasks) if index not in held_out],
        [task for index, task in enumerate(tasks) if index in held_out],
    )
