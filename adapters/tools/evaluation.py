"""How often a policy's likeliest call is the right one: by category, by difficulty, and what was chosen instead."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, assert_never

import numpy as np

from grpo.errors import ConfigError

from .calls import ToolCall
from .catalogue import ToolCatalogue
from .task_errors import classify_error
from .tasks import ToolTask


class PredictsCalls(Protocol):
    """A `ToolSelectionPolicy`, or anything else that answers tasks."""

    def predict(self, states: Any) -> list[ToolCall]:
        """One call per task."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Of a set of tasks."""

    num_tasks: int
    """How many there are."""
    right_tool: float
    """Share of them for which the right tool was called."""
    right_call: float
    """Share of them for which the call was right in all: the tool, and every argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReport:
    """What `evaluate_tools` found. `print(report)` shows a table; `report.to_json(path)` keeps all of it."""

    overall: Accuracy
    """Of all tasks."""
    by_category: Mapping[str, Accuracy]
    """Of the right tool's category."""
    by_difficulty: Mapping[str, Accuracy]
    """easy, medium, hard."""
    by_words: Mapping[str, Accuracy]
    """Whether a task shares a content word with its tool's name or description: `shared words`, `no shared word`."""
    errors: Mapping[str, int]
    """Calls that were not right, by kind (`ErrorKind`)."""
    tools: tuple[str, ...]
    """Of the catalogue; a call of something else stands under `?`, the last one."""
    categories: tuple[str, ...]
    """Likewise."""
    category_of: tuple[str, ...]
    """Of each of `tools`."""
    confusion: tuple[tuple[int, ...], ...]
    """[right, called]: how often which tool was called where another, or the same, was right."""

    def confusion_matrix(self, of: Literal["tool", "category"] = "tool") -> np.ndarray:
        """Counts [right, called], of tools or of their categories."""
        counts = np.array(self.confusion)
        match of:
            case "tool":
                return counts
            case "category":
                belongs = np.array([[own == category for category in self.categories] for own in self.category_of])
                return belongs.T.astype(int) @ counts @ belongs.astype(int)
            case _:
                assert_never(of)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Shares by category, by difficulty and by words, then kinds of errors, then the pairs confused most."""
        lines = [f"{'':24s}{'tasks':>8s}{'right tool':>12s}{'right call':>12s}", _line("all", self.overall)]
        for parts in (self.by_category, self.by_difficulty, self.by_words):
            lines += ["", *(_line(name, accuracy) for name, accuracy in parts.items())]
        lines += ["", "errors: " + (", ".join(f"{kind} {count}" for kind, count in self.errors.items()) or "none")]
        matrix = self.confusion_matrix()
        np.fill_diagonal(matrix, 0)
        worst = np.argsort(-matrix, axis=None, kind="stable")[:5]
        for right, called in zip(*np.unravel_index(worst, matrix.shape), strict=True):
            if matrix[right, called]:
                lines.append(f"  {self.tools[called]} instead of {self.tools[right]}: {matrix[right, called]}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return asdict(self)

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict`; the folder is made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ToolReport":
        """The inverse of `to_dict`.

        Raises:
            ConfigError: values that are not those of `to_dict`.
        """
        names = {each.name for each in fields(cls)}
        try:
            if set(values) != names:
                raise ConfigError(f"it has {', '.join(sorted(map(str, values)))}, and needs {', '.join(sorted(names))}")
            return cls(
                overall=Accuracy(**values["overall"]),
                by_category=_accuracies(values["by_category"]),
                by_difficulty=_accuracies(values["by_difficulty"]),
                by_words=_accuracies(values["by_words"]),
                errors=dict(values["errors"]),
                tools=tuple(values["tools"]),
                categories=tuple(values["categories"]),
                category_of=tuple(values["category_of"]),
                confusion=tuple(tuple(counts) for counts in values["confusion"]),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"ToolReport.from_dict: {error}. Pass what to_dict() returned.") from error

    @classmethod
    def from_json(cls, path: str | Path) -> "ToolReport":
        """What `to_json` wrote.

        Raises:
            ConfigError: no report is there.
        """
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} holds no report: {error}. ToolReport.to_json writes one.") from error
        return cls.from_dict(values)


def evaluate_tools(policy: PredictsCalls, tasks: Sequence[ToolTask], catalogue: ToolCatalogue) -> ToolReport:
    """The policy's likeliest calls beside the right ones. Nothing is executed.

    Args:
        policy: what answers; `predict` is called once.
        tasks: with their right calls.
        catalogue: in which the tasks' tools are.

    Raises:
        ConfigError: no task, or one whose tool the catalogue lacks.
    """
    if not tasks:
        raise ConfigError("evaluate_tools needs at least one task.")
    unknown = sorted({task.tool for task in tasks} - set(catalogue))
    if unknown:
        raise ConfigError(f"evaluate_tools: the catalogue lacks {', '.join(unknown)}, which tasks ask for.")
    calls = policy.predict(tasks)
    errors = [classify_error(task, call, catalogue) for task, call in zip(tasks, calls, strict=True)]
    tools = (*catalogue, "?")
    place = {name: i for i, name in enumerate(tools)}
    confusion = np.zeros((len(tools), len(tools)), dtype=int)
    right = np.array([place[task.tool] for task in tasks])
    called = np.array([place[call.tool] if call.tool in catalogue else len(catalogue) for call in calls])
    np.add.at(confusion, (right, called), 1)
    right_tool = right == called
    right_call = np.array([error is None for error in errors])

    def accuracy(chosen: np.ndarray) -> Accuracy:
        return Accuracy(
            num_tasks=int(chosen.sum()),
            right_tool=float(right_tool[chosen].mean()),
            right_call=float(right_call[chosen].mean()),
        )

    def by(key: Callable[[ToolTask], str], order: Sequence[str]) -> dict[str, Accuracy]:
        keys = np.array([key(task) for task in tasks])
        return {name: accuracy(keys == name) for name in order if (keys == name).any()}

    counts = Counter(error for error in errors if error is not None)
    return ToolReport(
        overall=accuracy(np.ones(len(tasks), dtype=bool)),
        by_category=by(lambda task: task.category, catalogue.categories),
        by_difficulty=by(lambda task: task.difficulty, ("easy", "medium", "hard")),
        by_words=by(_words_shared, ("shared words", "no shared word")),
        errors=dict(counts.most_common()),
        tools=tools,
        categories=(*catalogue.categories, "?"),
        category_of=(*(tool.category for tool in catalogue.values()), "?"),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
    )


def _accuracies(values: Mapping[str, Any]) -> dict[str, Accuracy]:
    return {name: Accuracy(**accuracy) for name, accuracy in values.items()}


def _words_shared(task: ToolTask) -> str:
    return "shared words" if task.shares_words else "no shared word"


def _line(name: str, accuracy: Accuracy) -> str:
    return f"{name:24s}{accuracy.num_tasks:8d}{accuracy.right_tool:12.1%}{accuracy.right_call:12.1%}"
