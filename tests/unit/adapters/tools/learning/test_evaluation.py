"""An evaluation report with hand-worked numbers."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.evaluation import Accuracy, ToolReport, evaluate_tools
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
        category=CATALOGUE[tool].category,
        difficulty=difficulty,
        slots={},
        shares_words=shares_words,
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

    def __init__(self, calls: Sequence[ToolCall]) -> None:
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


def test_overall_shares_equal_hand_counted_values(report: ToolReport) -> None:
    """Right tool: rows 1, 2, 4, 6, 8, 9; right in all: 1, 4."""
    assert report.overall == Accuracy(num_tasks=10, right_tool=0.6, right_call=0.2)


def test_shares_by_category_follow_the_order_of_the_catalogue(report: ToolReport) -> None:
    assert list(report.by_category.items()) == [
        ("lists", Accuracy(num_tasks=4, right_tool=0.75, right_call=0.5)),
        ("arithmetic", Accuracy(num_tasks=6, right_tool=0.5, right_call=0.0)),
    ]


def test_shares_by_difficulty_go_from_easy_to_hard_without_empty_levels(report: ToolReport) -> None:
    assert list(report.by_difficulty.items()) == [
        ("easy", Accuracy(num_tasks=6, right_tool=1.0, right_call=2 / 6)),
        ("hard", Accuracy(num_tasks=4, right_tool=0.0, right_call=0.0)),
    ]


def test_shares_are_split_by_words_shared_with_the_description(report: ToolReport) -> None:
    assert list(report.by_words.items()) == [
        ("shared words", Accuracy(num_tasks=5, right_tool=1.0, right_call=0.4)),
        ("no shared word", Accuracy(num_tasks=5, right_tool=0.2, right_call=0.0)),
    ]


def test_errors_are_counted_by_kind_with_the_most_frequent_first(report: ToolReport) -> None:
    assert list(report.errors.items())[:2] == [("wrong_tool", 3), ("invalid", 2)]
    assert report.errors == {"wrong_tool": 3, "invalid": 2, "wrong_parameter": 1, "missing": 1, "redundant": 1}


def test_the_confusion_matrix_counts_called_tools_per_asked_tool(report: ToolReport) -> None:
    """Rows: sort, shuffle, add, ?; columns: what was called."""
    assert report.tools == ("sort", "shuffle", "add", "?")
    assert report.confusion == ((2, 1, 0, 0), (0, 1, 0, 0), (0, 2, 3, 1), (0, 0, 0, 0))
    assert report.confusion_matrix().tolist() == [list(counts) for counts in report.confusion]


def test_the_confusion_matrix_of_categories_sums_over_their_tools(report: ToolReport) -> None:
    assert report.categories == ("lists", "arithmetic", "?")
    assert report.category_of == ("lists", "lists", "arithmetic", "?")
    assert report.confusion_matrix("category").tolist() == [[4, 0, 0], [2, 3, 1], [0, 0, 0]]


def test_the_diagonal_is_the_share_of_right_tools(report: ToolReport) -> None:
    matrix = report.confusion_matrix()
    assert np.trace(matrix) / matrix.sum() == report.overall.right_tool
    np.fill_diagonal(matrix, 0)
    assert report.confusion_matrix().trace() == 6, "the report keeps its own"


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


def test_the_report_prints_the_expected_table(report: ToolReport) -> None:
    assert report.table() == TABLE
    assert str(report) == TABLE


def test_a_report_survives_a_json_round_trip(report: ToolReport, tmp_path) -> None:
    report.to_json(tmp_path / "new" / "report.json")
    again = ToolReport.from_json(tmp_path / "new" / "report.json")
    assert again == report
    assert again.table() == TABLE
    assert ToolReport.from_dict(report.to_dict()) == report


def test_json_that_is_no_report_is_refused(report: ToolReport, tmp_path) -> None:
    whole = report.to_dict()
    lacking = {name: value for name, value in whole.items() if name != "tools"}
    for wrong in (
        lacking,
        whole | {"mood": 1},
        whole | {"overall": {"num_tasks": 1}},
        whole | {"by_words": 3},
        [],
        None,
    ):
        with pytest.raises(ConfigError, match=r"ToolReport\.from_dict: .*\. Pass the result of to_dict\(\)"):
            ToolReport.from_dict(wrong)
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "none.json"):
        with pytest.raises(ConfigError, match=rf"{name} holds no report: .*Write a report with ToolReport\.to_json"):
            ToolReport.from_json(tmp_path / name)


def test_a_called_tool_that_is_no_text_counts_as_unknown() -> None:
    odd = [ToolCall(tool=name) for name in (["sort"], None, np.array(["sort", "add"]))]  # type: ignore[arg-type]
    found = evaluate_tools(Answers(odd), TASKS[:3], CATALOGUE)
    assert found.overall == Accuracy(num_tasks=3, right_tool=0.0, right_call=0.0)
    assert found.errors == {"invalid": 3}
    assert found.confusion[0] == (0, 0, 0, 3)


def test_right_calls_have_full_shares_and_no_errors() -> None:
    calls = [ToolCall(tool=task.tool, arguments=task.arguments) for task in TASKS]
    report = evaluate_tools(Answers(calls), TASKS, CATALOGUE)
    assert report.overall == Accuracy(num_tasks=10, right_tool=1.0, right_call=1.0)
    assert report.errors == {}
    assert report.table().endswith("\nerrors: none")


def test_missing_tasks_and_tasks_of_unknown_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match="evaluate_tools needs at least one task"):
        evaluate_tools(Answers([]), [], CATALOGUE)
    with pytest.raises(ConfigError, match="the right tool of every task; it lacks add, shuffle"):
        evaluate_tools(Answers([]), TASKS, CATALOGUE.without("add", "shuffle"))


def test_fewer_calls_than_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        evaluate_tools(Answers([call("sort")]), TASKS, CATALOGUE)
