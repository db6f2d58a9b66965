"""Accuracy of a policy's most likely calls, by category and label, with a confusion matrix."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pydantic
from jaxtyping import Bool

from adapters.tools.catalogue.calls import ToolCall, plain_name
from adapters.tools.catalogue.tools import ToolCatalogue
from grpo.errors import ConfigError

from .task_errors import classify_error
from .tasks import ToolTask

NO_TOOL, UNKNOWN = "no tool", "?"


class PredictsCalls(Protocol):
    """A `ToolSelectionPolicy`, or any object that predicts calls for tasks. `predict_top` is optional: it returns the most
    likely calls per task, each with its `confidence`."""

    def predict(self, states: Any) -> Sequence[ToolCall | None]:
        """Return one call per task. None: no tool."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Accuracy on a set of tasks."""

    num_tasks: int
    """Number of tasks."""
    right_tool: float
    """Share of the tasks for which a right tool was called, or rightly none."""
    right_call: float
    """Share of the tasks for which the whole call was right: the tool and every argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abstention:
    """How well a policy separates requests that need a tool from requests that need none."""

    num_tasks: int
    """Number of tasks for which only no tool is right."""
    rightly: float
    """Share of these tasks for which the policy called no tool."""
    wrongly: float
    """Share of the tasks that need a tool for which the policy called none. 0 if no task needs a tool."""
    auroc: float | None
    """Probability that the policy is more confident of its call for a task that needs a tool than for a task that needs none,
    where equal confidences count half. None: the policy has no `predict_top`, or no task needs a tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReport:
    """Result of `evaluate_tools`. `print(report)` shows a table; `report.to_json(path)` saves everything."""

    overall: Accuracy
    """Accuracy on all tasks."""
    by_label: Mapping[str, Mapping[str, Accuracy]]
    """Accuracy by each label of the tasks, such as `by_label["difficulty"]["hard"]`. `by_label["category"]` is the category of
    the right tool."""
    abstention: Abstention | None
    """How well the policy calls no tool where none is right. None: every task needs a tool."""
    errors: Mapping[str, int]
    """Number of wrong calls by kind of error (`ErrorKind`)."""
    tools: tuple[str, ...]
    """Names of the catalogue's tools, then `no tool`, and `?` for calls of a tool that the catalogue lacks."""
    category_of: tuple[str, ...]
    """Category of each entry of `tools`. `no tool` and `?` are their own categories."""
    confusion: tuple[tuple[int, ...], ...]
    """Confusion matrix over `tools`: entry [i, j] is the number of tasks with right tool i for which tool j was called."""

    @property
    def categories(self) -> tuple[str, ...]:
        """The different categories, in the catalogue's order."""
        return tuple(dict.fromkeys(self.category_of))

    def confusion_matrix(self, of: Literal["tool", "category"] = "tool") -> np.ndarray:
        """Number of tasks by right tool (row) and called tool (column), or by the categories of these tools."""
        names = {"tool": self.tools, "category": self.category_of}[of]
        belongs = np.array([[own == name for name in dict.fromkeys(names)] for own in names], dtype=int)
        return belongs.T @ np.array(self.confusion) @ belongs

    def __str__(self) -> str:
        """Table of accuracies by label, then the use of no tool, the kinds of errors and the most confused pairs."""
        lines = [f"{'':24s}{'tasks':>8s}{'right tool':>12s}{'right call':>12s}"]
        for parts in ({"all": self.overall}, *self.by_label.values()):
            for name, part in parts.items():
                lines.append(f"{name:24s}{part.num_tasks:8d}{part.right_tool:12.1%}{part.right_call:12.1%}")
            lines.append("")
        if self.abstention is not None:
            rightly, wrongly, auroc = self.abstention.rightly, self.abstention.wrongly, self.abstention.auroc
            ranking = "" if auroc is None else f", AUROC {auroc:.3f}"
            lines += [f"no tool: rightly {rightly:.1%}, wrongly {wrongly:.1%}{ranking}", ""]
        lines.append("errors: " + (", ".join(f"{kind} {count}" for kind, count in self.errors.items()) or "none"))
        wrong = Counter(
            {
                f"{called} instead of {right}": count
                for right, counts in zip(self.tools, self.confusion, strict=True)
                for called, count in zip(self.tools, counts, strict=True)
                if called != right and count
            }
        )
        return "\n".join([*lines, *(f"  {pair}: {count}" for pair, count in wrong.most_common(5))])

    def to_json(self, path: str | Path) -> None:
        """Write the report to a file. The folder is created if it does not exist."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> "ToolReport":
        """Read a report that `to_json` wrote.

        Raises:
            ConfigError: The file does not exist or holds no report.
        """
        try:
            return pydantic.TypeAdapter(cls).validate_json(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} holds no report: {error}. Write a report with ToolReport.to_json.") from error


def evaluate_tools(policy: PredictsCalls, tasks: Sequence[ToolTask], catalogue: ToolCatalogue) -> ToolReport:
    """Compare the policy's most likely calls with the right calls. No tool is executed.

    A call is right if it equals any of the task's right calls. A prediction of None is right if `tool=None` is.

    Args:
        policy: The policy to evaluate. `predict` is called once, and `predict_top` once if the policy has it and both kinds of
            tasks exist: tasks that need a tool, and tasks that need none.
        tasks: Tasks with their right calls.
        catalogue: Catalogue that holds the tasks' tools.

    Raises:
        ConfigError: There is no task, or the catalogue lacks a tool of a task.
    """
    if not tasks:
        raise ConfigError("evaluate_tools needs at least one task; got none.")
    tools = (*catalogue, NO_TOOL, UNKNOWN)
    category_of = (*(tool.category for tool in catalogue.values()), NO_TOOL, UNKNOWN)
    place = {name: number for number, name in enumerate(tools)}

    def place_of(call: ToolCall | None) -> int:
        return place[NO_TOOL if call is None else plain_name(call.tool) if call.tool in catalogue else UNKNOWN]

    calls = policy.predict(tasks)
    errors = [classify_error(task, call, catalogue) for task, call in zip(tasks, calls, strict=True)]
    called = [place_of(call) for call in calls]
    answers = [list(map(place_of, task.right_calls)) for task in tasks]
    # A right call of one of the other right tools counts for that tool.
    right = [own if own in several else several[0] for own, several in zip(called, answers, strict=True)]
    confusion = np.zeros((len(tools), len(tools)), dtype=int)
    np.add.at(confusion, (right, called), 1)
    is_right = np.array([np.equal(right, called), [error is None for error in errors]])

    def accuracy(rows: Sequence[int]) -> Accuracy:
        right_tool, right_call = is_right[:, rows].mean(1).tolist()
        return Accuracy(num_tasks=len(rows), right_tool=right_tool, right_call=right_call)

    rows_of: dict[str, dict[str, list[int]]] = {"category": {name: [] for name in category_of}}
    for row, task in enumerate(tasks):
        for label, value in {"category": category_of[answers[row][0]], **task.labels}.items():
            rows_of.setdefault(label, {}).setdefault(value, []).append(row)
    return ToolReport(
        overall=accuracy(range(len(tasks))),
        by_label={
            label: {value: accuracy(rows) for value, rows in parts.items() if rows} for label, parts in rows_of.items()
        },
        abstention=_abstention(policy, tasks, np.array([call is None for call in calls])),
        errors=dict(Counter(error for error in errors if error is not None).most_common()),
        tools=tools,
        category_of=category_of,
        confusion=tuple(map(tuple, confusion.tolist())),
    )


def _abstention(
    policy: PredictsCalls, tasks: Sequence[ToolTask], without_tool: Bool[np.ndarray, " N"]
) -> Abstention | None:
    needs_none = np.array([set(task.right_calls) == {None} for task in tasks])
    needs_tool = np.array([None not in task.right_calls for task in tasks])
    if not needs_none.any():
        return None
    auroc = None
    predict_top = getattr(policy, "predict_top", None)
    if needs_tool.any() and predict_top is not None:
        confidences = np.array([best[0].confidence for best in predict_top(tasks, 1)])
        lower, higher = np.sort(confidences[needs_none]), confidences[needs_tool]
        below = np.searchsorted(lower, higher, "left") + np.searchsorted(lower, higher, "right")
        auroc = float(below.mean() / (2 * len(lower)))
    return Abstention(
        num_tasks=int(needs_none.sum()),
        rightly=float(without_tool[needs_none].mean()),
        wrongly=float(without_tool[needs_tool].mean()) if needs_tool.any() else 0.0,
        auroc=auroc,
    )
