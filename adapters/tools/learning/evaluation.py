"""Accuracy of a policy's most likely calls, by category and label, with a confusion matrix."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol, TypeAlias, get_args

import jsonschema
import numpy as np
import pydantic
import referencing

from adapters.tools.catalogue.arguments import json_arguments
from adapters.tools.catalogue.calls import ToolCall, same_json
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from grpo.arguments import require_each
from grpo.errors import ConfigError

from .tasks import ToolTask

NO_TOOL, UNKNOWN = "no tool", "?"

ErrorKind = Literal["invalid", "wrong_tool", "missing", "redundant", "wrong_parameter"]
"""Kind of error in a call, in the order of `classify_error`, which defines each kind."""
Row: TypeAlias = tuple[str, str, ErrorKind | None]
"""The right tool, the called tool and the error of one task."""


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
        ConfigError: `tasks` is no list of tasks, or empty, or the catalogue lacks a tool of a task.
    """
    tasks = require_each("evaluate_tools: tasks", ToolTask, tasks)
    if not tasks:
        raise ConfigError("evaluate_tools needs at least one task; got none.")
    category_of = {name: tool.category for name, tool in catalogue.items()} | {NO_TOOL: NO_TOOL, UNKNOWN: UNKNOWN}
    rows: list[Row] = []
    labelled: dict[str, dict[str, list[Row]]] = {"category": {category: [] for category in category_of.values()}}
    calls = policy.predict(tasks)
    for task, call in zip(tasks, calls, strict=True):
        called, *answers = (_name(one, catalogue) for one in (call, *task.right_calls))
        # A right call of one of the other right tools counts for that tool.
        row = (called if called in answers else answers[0], called, classify_error(task, call, catalogue))
        rows.append(row)
        for label, value in {"category": category_of[answers[0]], **task.labels}.items():
            labelled.setdefault(label, {}).setdefault(value, []).append(row)
    pairs = Counter((right, called) for right, called, _ in rows)
    return ToolReport(
        overall=_accuracy(rows),
        by_label={
            label: {value: _accuracy(part) for value, part in parts.items() if part}
            for label, parts in labelled.items()
        },
        abstention=_abstention(policy, tasks, calls),
        errors=dict(Counter(error for _, _, error in rows if error is not None).most_common()),
        tools=tuple(category_of),
        category_of=tuple(category_of.values()),
        confusion=tuple(tuple(pairs[right, called] for called in category_of) for right in category_of),
    )


def _name(call: ToolCall | None, catalogue: ToolCatalogue) -> str:
    return NO_TOOL if call is None else catalogue[call.tool].name if call.tool in catalogue else UNKNOWN


def _accuracy(rows: Sequence[Row]) -> Accuracy:
    return Accuracy(
        num_tasks=len(rows),
        right_tool=fmean(right == called for right, called, _ in rows),
        right_call=fmean(error is None for _, _, error in rows),
    )


def _abstention(
    policy: PredictsCalls, tasks: Sequence[ToolTask], calls: Sequence[ToolCall | None]
) -> Abstention | None:
    needs_none = [row for row, task in enumerate(tasks) if set(task.right_calls) == {None}]
    needs_tool = [row for row, task in enumerate(tasks) if None not in task.right_calls]
    if not needs_none:
        return None
    auroc = None
    predict_top = getattr(policy, "predict_top", None)
    if needs_tool and predict_top is not None:
        confidences = np.array([best[0].confidence for best in predict_top(tasks, 1)])
        lower, higher = np.sort(confidences[needs_none]), confidences[needs_tool]
        below = np.searchsorted(lower, higher, "left") + np.searchsorted(lower, higher, "right")
        auroc = float(below.mean() / (2 * len(lower)))
    return Abstention(
        num_tasks=len(needs_none),
        rightly=fmean(calls[row] is None for row in needs_none),
        wrongly=fmean(calls[row] is None for row in needs_tool) if needs_tool else 0.0,
        auroc=auroc,
    )


def classify_error(task: ToolTask, call: ToolCall | None, catalogue: ToolCatalogue) -> ErrorKind | None:
    """Classify the error of a call (None: no tool was called). Returns the first kind that applies, or None if it is right.

    1. `invalid`: the catalogue lacks the tool, JSON cannot represent the arguments, or the tool's schema rejects an argument.
       A missing required argument does not count as invalid.
    2. `wrong_tool`: the call names another tool than the task, or there is a call where no tool is right, or no call where a
       tool is right.
    3. `missing`: the call lacks an argument of the task, even if the schema does not require it. An argument whose expected
       value is the schema's default may be omitted.
    4. `redundant`: the call has an argument that the task lacks, with a value other than the schema's default.
    5. `wrong_parameter`: an argument differs from the task's value. Values are compared as JSON: 1 equals 1.0, but not true.

    If the task has several right answers, the call is compared with each, and the error that comes last in this list counts.

    Raises:
        ConfigError: The catalogue lacks a tool of the task.
    """
    lacking = [right.tool for right in task.right_calls if right is not None and right.tool not in catalogue]
    if lacking:
        raise ConfigError(
            f"the catalogue must have the task's tool {lacking[0]!r}; it has {', '.join(catalogue)}. Add the tool."
        )
    if call is None:
        return None if None in task.right_calls else "wrong_tool"
    called, arguments = catalogue.get(call.tool), json_arguments(call.arguments)
    if called is None or arguments is None or not _is_valid(called, arguments):
        return "invalid"
    kinds = [_difference(called, arguments, right) for right in task.right_calls]
    return max(kinds, key=(*get_args(ErrorKind), None).index)


def _difference(called: Tool, arguments: dict[str, Any], right: ToolCall | None) -> ErrorKind | None:
    """The error of a valid call, compared with one right answer."""
    if right is None or called.name != right.tool:
        return "wrong_tool"
    defaults = {name: schema["default"] for name, schema in called.properties.items() if "default" in schema}
    expected, given = defaults | dict(right.arguments), defaults | arguments
    if not expected.keys() <= given.keys():
        return "missing"
    different = [name for name in given if name not in expected or not same_json(given[name], expected[name])]
    if any(name not in right.arguments for name in different):
        return "redundant"
    return "wrong_parameter" if different else None


def _is_valid(tool: Tool, arguments: dict[str, Any]) -> bool:
    """Whether the schema allows the arguments. Unknown arguments are refused as in `ArgumentChecker`, missing ones are not."""
    schema = {"additionalProperties": False} | dict(tool.parameters) | {"required": []}
    try:  # an empty registry: nothing is fetched for a `$ref`
        return jsonschema.Draft202012Validator(schema, registry=referencing.Registry()).is_valid(arguments)
    except Exception:  # the schema cannot be applied to these arguments; the executor rejects them too
        return False
