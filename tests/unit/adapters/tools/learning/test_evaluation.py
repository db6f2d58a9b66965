"""An evaluation report with hand-worked numbers."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from adapters.tools import HeldOut, TaskError, Tool, ToolCall, ToolCatalogue, ToolTask
from adapters.tools.learning.evaluation import Abstention, Accuracy, ToolReport, classify_error, evaluate_tools
from adapters.tools.learning.held_out import folds
from grpo.errors import ConfigError
from tests.support.annotated import Colour
from tests.support.tool_policies import call


def sort(order: Literal["up", "down"] = "up") -> None: ...
def shuffle() -> None: ...
def add(number: int, more: int = 0) -> None: ...


CATALOGUE = ToolCatalogue(
    Tool.from_function(function, description="Do it.", category=category)
    for function, category in ((sort, "lists"), (shuffle, "lists"), (add, "arithmetic"))
)


def row(tool: str, difficulty: Any, shares_words: bool, arguments: dict[str, Any], made: ToolCall) -> Any:
    labels = {"difficulty": difficulty, "words": "shared words" if shares_words else "no shared word"}
    return ToolTask(text=f"{tool} {difficulty}", tool=tool, arguments=arguments, labels=labels), made


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


def test_errors_are_counted_by_kind_and_called_tools_per_asked_tool(report: ToolReport) -> None:
    """Rows: sort, shuffle, add, no tool, ?; columns: what was called. Categories sum over their tools."""
    assert list(report.errors.items())[:2] == [("wrong_tool", 3), ("invalid", 2)], "the most frequent first"
    assert report.errors == {"wrong_tool": 3, "invalid": 2, "wrong_parameter": 1, "missing": 1, "redundant": 1}
    assert report.tools == ("sort", "shuffle", "add", "no tool", "?")
    assert report.confusion == ((2, 1, 0, 0, 0), (0, 1, 0, 0, 0), (0, 2, 3, 0, 1), (0,) * 5, (0,) * 5)
    assert report.confusion_matrix().tolist() == [list(counts) for counts in report.confusion]
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


def test_json_that_is_no_report_is_refused(report: ToolReport, tmp_path, subtests: pytest.Subtests) -> None:
    whole = asdict(report)
    lacking = {name: value for name, value in whole.items() if name != "tools"}
    wrong = (lacking, whole | {"overall": {"num_tasks": 1}}, whole | {"by_label": 3}, [], None)
    for text in (*map(json.dumps, wrong), "{", None):
        path = tmp_path / ("none.json" if text is None else "other.json")
        if text is not None:
            path.write_text(text)
        message = rf"(?s){path.name} holds no report: .*Write a report with ToolReport\.to_json"
        with subtests.test(text), pytest.raises(ConfigError, match=message):
            ToolReport.from_json(path)


def test_a_called_tool_that_is_no_text_counts_as_unknown() -> None:
    odd = [ToolCall(tool=name) for name in (["sort"], None, np.array(["sort", "add"]))]  # type: ignore[arg-type]
    found = evaluate_tools(Answers(odd), TASKS[:3], CATALOGUE)
    assert found.overall == Accuracy(num_tasks=3, right_tool=0.0, right_call=0.0)
    assert found.errors == {"invalid": 3}
    assert found.confusion[0] == (0, 0, 0, 0, 3)


def test_right_calls_have_full_shares_and_no_errors() -> None:
    calls = [task.right_calls[0] for task in TASKS]
    policy = Answers(calls)
    report = evaluate_tools(policy, iter(TASKS), CATALOGUE)
    assert report.overall == Accuracy(num_tasks=10, right_tool=1.0, right_call=1.0)
    assert report.errors == {}
    assert str(report).endswith("\nerrors: none")
    assert policy.asked == [TASKS]


def test_tasks_that_cannot_be_evaluated_are_refused(subtests: pytest.Subtests) -> None:
    lacks_scale = SCALES.without("scale")
    other = replace(SCALE, tool="wait", arguments={}, slots={}, other_calls=(call("scale"),))
    for function, arguments, message in (
        (evaluate_tools, (Answers([]), [], CATALOGUE), "evaluate_tools needs at least one task"),
        (evaluate_tools, (Answers([None]), ["a"], CATALOGUE), "tasks must be a list of ToolTask objects; got 'a'"),
        (evaluate_tools, (Answers([None] * len(TASKS)), TASKS, CATALOGUE.without("shuffle")),
         "must have the task's tool 'shuffle'; it has sort, add"),
        (classify_error, (SCALE, call("shout"), lacks_scale), "must have the task's tool 'scale'; it has shout, wait"),
        (classify_error, (other, call("wait"), lacks_scale), "must have the task's tool 'scale'"),
    ):  # fmt: skip
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            function(*arguments)
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


def confident(calls: Sequence[Any], confidences: Sequence[float]) -> Any:
    """Answers whose confidences are given, too."""

    def predict_top(states: Any, k: int) -> list[list[Any]]:
        assert k == 1
        return [[SimpleNamespace(confidence=one)] for one in confidences]

    return SimpleNamespace(predict=lambda states: calls, predict_top=predict_top)


def test_a_call_is_right_if_it_equals_any_right_answer() -> None:
    """4 of 7 calls are right. The row of the matrix is the called tool if it is right, and else the first answer."""
    report = evaluate_tools(Answers([made for _, made in SEVERAL]), [one for one, _ in SEVERAL], CATALOGUE)
    assert report.overall == Accuracy(num_tasks=7, right_tool=4 / 7, right_call=4 / 7)
    assert report.errors == {"wrong_tool": 3}
    assert report.confusion == ((1, 0, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 1, 1, 0), (0, 0, 1, 2, 0), (0,) * 5)
    assert list(report.by_label) == ["category"]
    assert [*report.by_label["category"].items()] == [
        (name, Accuracy(num_tasks=number, right_tool=share, right_call=share))
        for name, number, share in (("lists", 2, 0.5), ("no tool", 3, 2 / 3), ("own", 2, 0.5))
    ]


def test_abstention_counts_rightly_and_wrongly_left_requests_and_ranks_confidences(tmp_path: Path) -> None:
    """Pairs of a confidence with a tool (.9, .4, .1, .2) and without (.4, .1, .3).

    .9 wins 3; .4 wins 2 and draws 1; .1 draws 1; .2 wins 1: (3 + 2.5 + .5 + 1) / 12.
    """
    confidences = [0.4, 0.1, 0.3, 0.9, 0.4, 0.1, 0.2]
    policy = confident([made for _, made in SEVERAL], confidences)
    report = evaluate_tools(policy, [one for one, _ in SEVERAL], CATALOGUE)
    assert report.abstention == Abstention(num_tasks=3, rightly=2 / 3, wrongly=0.25, auroc=pytest.approx(7 / 12))
    assert "\nno tool: rightly 66.7%, wrongly 25.0%, AUROC 0.583\n" in str(report)
    report.to_json(tmp_path / "report.json")
    assert ToolReport.from_json(tmp_path / "report.json") == report


def test_a_task_that_may_be_left_without_a_tool_is_right_both_ways_and_not_ranked(report: ToolReport) -> None:
    both = ToolTask(text="hm", tool=None, other_calls=(call("shuffle"),))
    policy = confident([None, call("shuffle"), None], [0.9, 0.5, 0.1])
    found = evaluate_tools(policy, [both, both, NEEDS_NONE], CATALOGUE)
    assert found.overall.right_call == 1.0
    assert found.abstention == Abstention(num_tasks=1, rightly=1.0, wrongly=0.0, auroc=None)
    without = evaluate_tools(Answers([None, call("shuffle")]), [NEEDS_NONE, EITHER], CATALOGUE)
    assert without.abstention == found.abstention, "no AUROC without confidences"
    assert "\nno tool: rightly 100.0%, wrongly 0.0%\n" in str(without)
    assert report.abstention is None, "no task needs no tool"


# --- Kinds of error of a call
def scale(number: float, unit: Literal["m", "km"], digits: int = 2, sign: bool = False, note: str | None = None): ...
def shout(text: str): ...
def wait(): ...


SCALES = ToolCatalogue(Tool.from_function(function, description="Do it.") for function in (scale, shout, wait))
SCALE = ToolTask(text="", tool="scale", arguments={"number": 3, "unit": "m", "sign": False}, slots={"number": 3})


def tool_of(**schema: Any) -> ToolCatalogue:
    """A catalogue of one tool with this schema."""
    return ToolCatalogue([Tool(name="t", description="Odd.", function=wait, parameters={"type": "object"} | schema)])


def test_the_first_kind_of_error_that_holds_is_named(subtests: pytest.Subtests) -> None:
    for tool, arguments, kind in (
        ("scale", {"number": 3, "unit": "m", "sign": False}, None),
        # sign is at its default, and a default spelled out
        ("scale", {"number": 3.0, "unit": "m"}, None), ("scale", {"number": 3, "unit": "m", "digits": 2}, None),
        ("scales", {"number": 3, "unit": "m", "sign": False}, "invalid"),  # there is no such tool
        ("scale", {"number": "3", "unit": "m"}, "invalid"), ("scale", {"number": 3, "unit": "mile"}, "invalid"),
        ("scale", {"number": 3, "unit": "m", "extra": 1}, "invalid"),
        # comes before missing, and before wrong_tool
        ("scale", {"number": "3"}, "invalid"), ("shout", {"text": 3}, "invalid"),
        ("shout", {"text": "hey"}, "wrong_tool"), ("shout", {}, "wrong_tool"),  # what it lacks is not held against it
        # comes before wrong_parameter, and before redundant
        ("scale", {"number": 3, "sign": False}, "missing"), ("scale", {"unit": "km"}, "missing"),
        ("scale", {"unit": "m", "note": "x"}, "missing"),
        # comes before wrong_parameter
        ("scale", {"number": 4, "unit": "m", "note": "x"}, "redundant"),
        ("scale", {"number": 3, "unit": "m", "note": "x"}, "redundant"),
        ("scale", {"number": 3, "unit": "m", "digits": 3}, "redundant"),
        ("scale", {"number": 3, "unit": "km"}, "wrong_parameter"), ("scale", {"number": 4, "unit": "m"}, "wrong_parameter"),
        ("scale", {"number": 3, "unit": "m", "sign": True}, "wrong_parameter"),
    ):  # fmt: skip
        with subtests.test(kind, tool=tool, arguments=arguments):
            assert classify_error(SCALE, call(tool, **arguments), SCALES) == kind


def test_what_cannot_be_called_is_invalid(subtests: pytest.Subtests) -> None:
    for schema, value in (
        ({"type": "number", "multipleOf": 0.1}, 10**400), ({"$ref": "#/properties/x"}, 1), ({"$ref": "#/required"}, 1),
        ({"$ref": "#/nowhere"}, 1),
    ):  # fmt: skip
        with subtests.test(str(schema)):
            task = replace(SCALE, tool="t", arguments={"x": 1})
            catalogue = tool_of(properties={"x": schema}, required=["x"])
            assert classify_error(task, call("t", x=value), catalogue) == "invalid"
    anything = tool_of(additionalProperties=True)
    for arguments in (None, 3, "text", [("number", 3)], {1: 2}, {"number": {3}}, {"number": float("nan")}):
        with subtests.test(str(arguments)):
            made = ToolCall(tool="t", arguments=arguments)
            assert classify_error(replace(SCALE, tool="t"), made, anything) == "invalid"
    for name in (None, 3, ["scale"], {"scale": 1}):
        with subtests.test(str(name)):
            assert classify_error(SCALE, ToolCall(tool=name, arguments=SCALE.arguments), SCALES) == "invalid"


def test_boolean_property_schemas_and_additional_properties_are_respected(subtests: pytest.Subtests) -> None:
    own = {"properties": {"any": True, "never": False}, "required": ["any"]}
    task = replace(SCALE, tool="t", arguments={"any": (1, 2)}, slots={"never": 1})
    none = ToolTask(text="", tool="t")
    for asked, schema, arguments, kind in (
        (task, own, {"any": [1.0, 2]}, None), (task, own, {"any": 3}, "wrong_parameter"), (task, own, {}, "missing"),
        (task, own, {"any": [1, 2], "never": 1}, "invalid"), (none, {}, {"x": 1}, "invalid"),
        (none, {"additionalProperties": True}, {"x": 1}, "redundant"),
    ):  # fmt: skip
        with subtests.test(kind, arguments=arguments):
            assert classify_error(asked, call("t", **arguments), tool_of(**schema)) == kind


def test_the_mildest_error_counts_where_several_calls_or_none_is_right(subtests: pytest.Subtests) -> None:
    """`twice`: the call is redundant compared with the other right call. `more`: an optional argument that the task has counts
    as missing, unless it has a default: an absent `digits` means 2, not 1."""
    several = replace(SCALE, other_calls=(call("shout", text="3"), call("wait")))
    twice = replace(SCALE, other_calls=(call("scale", number=3, unit="km"),))
    more = replace(SCALE, arguments={"number": 3, "unit": "m", "note": "x", "digits": 1})
    for task, made, kind in (
        (several, call("scale", **SCALE.arguments), None), (several, call("wait"), None),
        (several, call("shout", text="3"), None), (several, call("shout", text="4"), "wrong_parameter"),
        (several, call("shout"), "missing"), (several, call("wait", text="3"), "invalid"), (several, call("fly"), "invalid"),
        (several, None, "wrong_tool"), (twice, call("scale", number=3, unit="km", sign=True), "wrong_parameter"),
        (more, call("scale", number=3, unit="m", digits=1), "missing"),
        (more, call("scale", number=3, unit="m", note="x"), "wrong_parameter"),
        (NEEDS_NONE, None, None), (NEEDS_NONE, call("wait"), "wrong_tool"), (NEEDS_NONE, call("fly"), "invalid"),
        (replace(NEEDS_NONE, other_calls=(call("wait"),)), call("wait"), None),
    ):  # fmt: skip
        with subtests.test(str(made)):
            assert classify_error(task, made, SCALES) == kind


def test_arguments_are_values_that_json_can_represent() -> None:
    """A call has "red": an argument that is a member of an Enum would never equal it."""
    with pytest.raises(TaskError, match=r"ToolTask\.arguments: Object of type Colour is not JSON serializable"):
        ToolTask(text="paint it", tool="paint", arguments={"colour": Colour.RED})
    assert ToolTask(text="paint it", tool="paint", arguments={"sizes": (1, 2)}).arguments == {"sizes": [1, 2]}


# --- what training changes on requests that it did not learn from
def test_the_error_is_that_of_half_a_request_more_in_each_cell() -> None:
    """2 requests gain a right tool, 3 lose it, 4 keep it and 1 never has it. With half a request more in each of these cells
    there are 12 requests with the differences 1 (2.5), -1 (3.5) and 0 (6): their variance is 6/12 - (1/12)^2 = 71/144. The
    squared error is 71/1728, and 10 (4 71/1728 / 0.05^2) = 657.4 requests are needed."""
    found = HeldOut.of([0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 1, 1, 1, 1, 0])
    assert (found.before, found.after, found.gain) == pytest.approx((0.7, 0.6, -0.1))
    assert found.error == pytest.approx((71 / 1728) ** 0.5)
    assert (found.num_requests, found.requests_needed, found.is_clear) == (10, 658, False)
    assert str(found) == (
        "held out: 0.700 before, 0.600 after (-0.100 +- 0.203, 10 requests); a difference of 0.05 shows from about 658 "
        "requests on"
    )


def test_a_difference_of_five_points_shows_if_it_is_five_requests(subtests: pytest.Subtests) -> None:
    """No request changes: sqrt(1/42 / 42) = 0.024, and 40 (2 0.024 / 0.05)^2 = 36. But 5 of 40 requests are more than 0.05."""
    for number, end in (
        (40, "+- 0.024, 40 requests); a difference of 0.05 shows from about 100 requests on"),
        (99, "+- 0.010, 99 requests); a difference of 0.05 shows from about 100 requests on"),
        (100, "+- 0.010, 100 requests)"),
    ):
        with subtests.test(number=number):
            assert str(HeldOut.of([1] * number, [1] * number)).endswith(end)
            gains = HeldOut.of([0] * number, [1] * 5 + [0] * (number - 5))
            assert (gains.is_clear, gains.gain > 0.05) == (True, number < 100)


def test_a_clear_difference_names_no_number_of_requests(subtests: pytest.Subtests) -> None:
    """Differences of 1 for 8 of 10: ((8 + 1) / 12 - (8 / 12)^2) / 12 = 11/432."""
    for sign in (1, -1):
        with subtests.test(sign=sign):
            before, after = [0.0] * 10, [1.0] * 8 + [0.0] * 2
            found = HeldOut.of(before, after) if sign == 1 else HeldOut.of(after, before)
            assert found.is_clear
            assert found.error == pytest.approx((11 / 432) ** 0.5)
            assert str(found).endswith("+- 0.160, 10 requests)")


def test_every_place_is_in_one_fold_and_equal_keys_are_together() -> None:
    """Seven keys in three folds: sizes 3, 2 and 2."""
    parts = folds([*"abcdefg"], 3, 0, owner="test")
    assert sorted(place for part in parts for place in part) == [*range(7)]
    assert sorted(map(len, parts)) == [2, 2, 3]
    assert sorted(map(sorted, folds([*"abcb"], 5, 0, owner="test"))) == [[0], [1, 3], [2]]
    assert folds([*"abcdefg"], 3, 1, owner="test") != parts


def test_what_cannot_be_held_out_is_refused(subtests: pytest.Subtests) -> None:
    for keys, num_folds, message in (
        ("aa", 5, "needs at least two different requests to hold some out; got 1"),
        ("ab", 1, "num_folds must be an integer >= 2"),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=f"^test.*{message}"):
            folds([*keys], num_folds, 0, owner="test")
