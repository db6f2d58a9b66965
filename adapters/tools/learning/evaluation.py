"""Accuracy of a policy's most likely calls, by category and difficulty, with a confusion matrix."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, assert_never

import numpy as np

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import ToolCatalogue
from grpo.errors import ConfigError

from .task_errors import classify_error
from .tasks import ToolTask


class PredictsCalls(Protocol):
    """A `ToolSelectionPolicy`, or any other object that predicts calls for tasks."""

    def predict(self, states: Any) -> list[ToolCall]:
        """Return one call per task."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Accuracy on a set of tasks."""

    num_tasks: int
    """Number of tasks."""
    right_tool: float
    """Share of the tasks for which the right tool was called."""
    right_call: float
    """Share of the tasks for which the whole call was right: the tool and every argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReport:
    """Result of `evaluate_tools`. `print(report)` shows a table; `report.to_json(path)` saves everything."""

    overall: Accuracy
    """Accuracy on all tasks."""
    by_category: Mapping[str, Accuracy]
    """Accuracy by the category of the right tool."""
    by_difficulty: Mapping[str, Accuracy]
    """Accuracy by difficulty: `easy`, `medium`, `hard`."""
    by_words: Mapping[str, Accuracy]
    """Accuracy of tasks that share a content word with their tool's name or description (`shared words`), and of tasks that
    do not (`no shared word`)."""
    errors: Mapping[str, int]
    """Number of wrong calls by kind of error (`ErrorKind`)."""
    tools: tuple[str, ...]
    """Names of the catalogue's tools, then `?` for calls of a tool that the catalogue lacks."""
    categories: tuple[str, ...]
    """The catalogue's categories, then `?` for calls of a tool that the catalogue lacks."""
    category_of: tuple[str, ...]
    """Category of each entry of `tools`."""
    confusion: tuple[tuple[int, ...], ...]
    """Confusion matrix over `tools`: entry [i, j] is the number of tasks with right tool i for which tool j was called."""

    def confusion_matrix(self, of: Literal["tool", "category"] = "tool") -> np.ndarray:
        """Number of tasks by right tool (row) and called tool (column), or by the categories of these tools."""
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
        """Table of accuracies by category, difficulty and words, then the kinds of errors and the most confused pairs."""
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
        """Fields by name, as plain numbers, strings, lists and dicts."""
        return asdict(self)

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict` to a file. The folder is created if it does not exist."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ToolReport":
        """The inverse of `to_dict`.

        Raises:
            ConfigError: The values do not come from `to_dict`.
        """
        names = {each.name for each in fields(cls)}
        try:
            if set(values) != names:
                raise ConfigError(
                    f"fields must be {', '.join(sorted(names))}; got {', '.join(sorted(map(str, values)))}"
                )
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
            raise ConfigError(f"ToolReport.from_dict: {error}. Pass the result of to_dict().") from error

    @classmethod
    def from_json(cls, path: str | Path) -> "ToolReport":
        """Read a report that `to_json` wrote.

        Raises:
            ConfigError: The file does not exist or holds no report.
        """
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} holds no report: {error}. Write a report with ToolReport.to_json.") from error
        return cls.from_dict(values)


def evaluate_tools(policy: PredictsCalls, tasks: Sequence[ToolTask], catalogue: ToolCatalogue) -> ToolReport:
    """Compare the policy's most likely calls with the right calls. No tool is executed.

    Args:
        policy: The policy to evaluate. `predict` is called once.
        tasks: Tasks with their right calls.
        catalogue: Catalogue that holds the tasks' tools.

    Raises:
        ConfigError: There is no task, or the catalogue lacks a task's tool.
    """
    if not tasks:
        raise ConfigError("evaluate_tools needs at least one task; got none.")
    unknown = sorted({task.tool for task in tasks} - set(catalogue))
    if unknown:
        raise ConfigError(
            f"evaluate_tools: the catalogue must have the right tool of every task; it lacks {', '.join(unknown)}. Add these "
            "tools, or leave out their tasks."
        )
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
