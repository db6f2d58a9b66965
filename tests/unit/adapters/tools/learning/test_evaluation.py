"""An evaluation report with hand-worked numbers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.evaluation import Abstention, Accuracy, ToolReport, evaluate_tools
from adapters.tools.learning.tasks import ToolTask
from grpo.errors import ConfigError


def sort(order: Literal["up", "down"] = "up") -> None:
    """Sort items."""


def shuffle() -> None:
    """Shuffle items."""


def add(number: int, more: int = 0) -> None:
    """Add numbers."""


CATALOGUE = ToolCatalogue(
    [
        Tool.from_function(sort, category="lists"),
        Tool.from_function(shuffle, category="lists"),
        Tool.from_function(add, category="arithmetic"),
    ]
)


def row(
    tool: str, difficulty: Any, shares_words: bool, arguments: dict[str, Any], made: ToolCall
) -> tuple[ToolTask, ToolCall]:
    task = ToolTask(
        text=f"{tool} {difficulty}",
        tool=tool,
        arguments=arguments,
        labels={"difficulty": difficulty, "words": "shared words" if shares_words else "no shared word"},
    )
    return task, made


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool=tool, arguments=arguments)


ROWS = [
    row("sort", "easy", True, {"order": "up"}, call("sort", order="up")),  # right
    row("sort", "easy", True, {"order": "up"}, call("sort", order="down")),  # wrong parameter
    row("sort", "hard", False, {"order": "down"}, call("shuffle")),  # wrong tool, same category
    row("shuffle", "easy", True, {}, call("shuffle")),  # right
    row("add", "hard", False, {"number": 1}, call("shuffle")),  # wrong tool
    row("add", "easy", True, {"number": 1}, call("add")),  # missing
    row("add", "hard", False, {"number": 1}, call("fly")),  # there is no such tool: invalid
    row("add", "easy", False, {"number": 1}, call("add", number=1, more=2)),  # redundant
    row("add", "easy", True, {"number": 1}, call("add", number="one")),  # invalid
    row("add", "hard", False, {"number": 1}, call("shuffle")),  # wrong tool
]
TASKS = [task for task, _ in ROWS]


class Answers:
    """A policy that gives the answers it was made with."""

    def __init__(self, calls: Sequence[ToolCall | None]) -> None:
        self.calls = list(calls)
        self.asked: list[Any] = []

    def predict(self, states: Any) -> list[ToolCall]:
        self.asked.append(list(states))
        return self.calls


@pytest.fixture(scope="module")
def report() -> ToolReport:
    policy = Answers([made for _, made in ROWS])
    found = evaluate_tools(policy, TASKS, CATALOGUE)
    assert policy.asked == [TASKS], "all at once, and only once"
    return found


def test_errors_are_counted_by_kind_with_the_most_frequent_first(report: ToolReport) -> None:
    assert list(report.errors.items())[:2] == [("wrong_tool", 3), ("invalid", 2)]
    assert report.errors == {"wrong_tool": 3, "invalid": 2, "wrong_parameter": 1, "missing": 1, "redundant": 1}


def test_the_confusion_matrix_counts_called_tools_per_asked_tool(report: ToolReport) -> None:
    """Rows: sort, shuffle, add, no tool, ?; columns: what was called."""
    assert report.tools == ("sort", "shuffle", "add", "no tool", "?")
    assert report.confusion == ((2, 1, 0, 0, 0), (0, 1, 0, 0, 0), (0, 2, 3, 0, 1), (0,) * 5, (0,) * 5)
    assert report.confusion_matrix().tolist() == [list(counts) for counts in report.confusion]


def test_the_confusion_matrix_of_categories_sums_over_their_tools(report: ToolReport) -> None:
    assert report.categories == ("lists", "arithmetic", "no tool", "?")
    assert report.category_of == ("lists", "lists", "arithmetic", "no tool", "?")
    assert report.confusion_matrix("category").tolist() == [[4, 0, 0, 0], [2, 3, 0, 1], [0] * 4, [0] * 4]


TABLE = """\
                           tasks  right tool  right call
all                           10       60.0%       20.0%

lists                          4       75.0%       50.0%
arithmetic                     6       50.0%        0.0%

easy                           6      100.0%       33.3%
hard                           4        0.0%        0.0%

shared words                   5      100.0%       40.0%
no shared word                 5       20.0%        0.0%

errors: wrong_tool 3, invalid 2, wrong_parameter 1, missing 1, redundant 1
  shuffle instead of add: 2
  shuffle instead of sort: 1
  ? instead of add: 1"""


def test_a_report_survives_a_json_round_trip(report: ToolReport, tmp_path) -> None:
    report.to_json(tmp_path / "new" / "report.json")
    again = ToolReport.from_json(tmp_path / "new" / "report.json")
    assert again == report
    assert str(again) == TABLE


def test_json_that_is_no_report_is_refused(report: ToolReport, tmp_path) -> None:
    whole = asdict(report)
    lacking = {name: value for name, value in whole.items() if name != "tools"}
    for wrong in (lacking, whole | {"overall": {"num_tasks": 1}}, whole | {"by_label": 3}, [], None):
        (tmp_path / "other.json").write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=r"other\.json holds no report: .*"):
            ToolReport.from_json(tmp_path / "other.json")
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "none.json"):
        with pytest.raises(
            ConfigError, match=rf"(?s){name} holds no report: .*Write a report with ToolReport\.to_json"
        ):
            ToolReport.from_json(tmp_path / name)


def test_a_called_tool_that_is_no_text_counts_as_unknown() -> None:
    odd = [ToolCall(tool=name) for name in (["sort"], None, np.array(["sort", "add"]))]  # type: ignore[arg-type]
    found = evaluate_tools(Answers(odd), TASKS[:3], CATALOGUE)
    assert found.overall == Accuracy(num_tasks=3, right_tool=0.0, right_call=0.0)
    assert found.errors == {"invalid": 3}
    assert found.confusion[0] == (0, 0, 0, 0, 3)


def test_right_calls_have_full_shares_and_no_errors() -> None:
    calls = [ToolCall(tool=task.tool, arguments=task.arguments) for task in TASKS]
    report = evaluate_tools(Answers(calls), TASKS, CATALOGUE)
    assert report.overall == Accuracy(num_tasks=10, right_tool=1.0, right_call=1.0)
    assert report.errors == {}
    assert str(report).endswith("\nerrors: none")
    policy = Answers(calls)
    assert evaluate_tools(policy, iter(TASKS), CATALOGUE) == report
    assert policy.asked[0] == TASKS


def test_missing_tasks_and_tasks_of_unknown_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match="evaluate_tools needs at least one task"):
        evaluate_tools(Answers([]), [], CATALOGUE)
    with pytest.raises(ConfigError, match="tasks must be a list of ToolTask objects; got 'a'"):
        evaluate_tools(Answers([None]), ["a"], CATALOGUE)
    with pytest.raises(ConfigError, match="must have the task's tool 'shuffle'; it has sort, add"):
        evaluate_tools(Answers([None] * len(TASKS)), TASKS, CATALOGUE.without("shuffle"))


def test_fewer_calls_than_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        evaluate_tools(Answers([call("sort")]), TASKS, CATALOGUE)


# --- several right answers, and no tool


NEEDS_NONE = ToolTask(text="how are you?", tool=None)
EITHER = ToolTask(text="mix it", tool="shuffle", other_calls=(call("sort", order="down"), call("sort", order="up")))
OPTIONAL = ToolTask(text="one?", tool="add", arguments={"number": 1}, labels={"category": "own"})
SEVERAL = [
    (NEEDS_NONE, None),  # right
    (NEEDS_NONE, call("add", number=1)),  # wrong tool
    (NEEDS_NONE, None),  # right
    (EITHER, call("sort", order="up")),  # right, as the third answer; the category is the first answer's
    (EITHER, call("add", number=1)),  # wrong tool
    (OPTIONAL, None),  # wrong tool
    (OPTIONAL, call("add", number=1)),  # right
]


class Confident(Answers):
    """Answers whose confidences are given, too."""

    def __init__(self, calls: Sequence[Any], confidences: Sequence[float]) -> None:
        super().__init__(calls)
        self.confidences = confidences

    def predict_top(self, states: Any, k: int) -> list[list[Any]]:
        assert k == 1
        return [[SimpleNamespace(confidence=one)] for one in self.confidences]


def test_a_call_is_right_if_it_equals_any_right_answer() -> None:
    """4 of 7 calls are right. The row of the matrix is the called tool if it is right, and else the first answer."""
    report = evaluate_tools(Answers([made for _, made in SEVERAL]), [one for one, _ in SEVERAL], CATALOGUE)
    assert report.overall == Accuracy(num_tasks=7, right_tool=4 / 7, right_call=4 / 7)
    assert report.errors == {"wrong_tool": 3}
    assert report.confusion == ((1, 0, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 1, 1, 0), (0, 0, 1, 2, 0), (0,) * 5)
    assert report.by_label == {
        "category": {
            "lists": Accuracy(num_tasks=2, right_tool=0.5, right_call=0.5),
            "no tool": Accuracy(num_tasks=3, right_tool=2 / 3, right_call=2 / 3),
            "own": Accuracy(num_tasks=2, right_tool=0.5, right_call=0.5),
        }
    }
    assert list(report.by_label["category"]) == ["lists", "no tool", "own"]


def test_abstention_counts_rightly_and_wrongly_left_requests_and_ranks_confidences(tmp_path: Path) -> None:
    """Pairs of a confidence with a tool (.9, .4, .1, .2) and without (.4, .1, .3).

    .9 wins 3; .4 wins 2 and draws 1; .1 draws 1; .2 wins 1: (3 + 2.5 + .5 + 1) / 12.
    """
    confidences = [0.4, 0.1, 0.3, 0.9, 0.4, 0.1, 0.2]
    policy = Confident([made for _, made in SEVERAL], confidences)
    report = evaluate_tools(policy, [one for one, _ in SEVERAL], CATALOGUE)
    assert report.abstention == Abstention(num_tasks=3, rightly=2 / 3, wrongly=0.25, auroc=pytest.approx(7 / 12))
    assert "\nno tool: rightly 66.7%, wrongly 25.0%, AUROC 0.583\n" in str(report)
    report.to_json(tmp_path / "report.json")
    assert ToolReport.from_json(tmp_path / "report.json") == report


def test_a_task_that_may_be_left_without_a_tool_is_right_both_ways_and_not_ranked() -> None:
    both = ToolTask(text="hm", tool=None, other_calls=(call("shuffle"),))
    policy = Confident([None, call("shuffle"), None], [0.9, 0.5, 0.1])
    report = evaluate_tools(policy, [both, both, NEEDS_NONE], CATALOGUE)
    assert report.overall.right_call == 1.0
    assert report.abstention == Abstention(num_tasks=1, rightly=1.0, wrongly=0.0, auroc=None)


def test_abstention_has_no_auroc_without_confidences_and_is_absent_without_its_tasks(report: ToolReport) -> None:
    found = evaluate_tools(Answers([None, call("shuffle")]), [NEEDS_NONE, EITHER], CATALOGUE)
    assert found.abstention == Abstention(num_tasks=1, rightly=1.0, wrongly=0.0, auroc=None)
    assert "\nno tool: rightly 100.0%, wrongly 0.0%\n" in str(found)
    assert report.abstention is None
