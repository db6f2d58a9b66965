"""Kinds of error: which one a call has, by hand. Right calls have none."""

import enum
from dataclasses import replace
from typing import Literal

import pytest

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.evaluation import classify_error
from adapters.tools.learning.tasks import TaskError, ToolTask
from examples.tool_workbench import make_workbench_tasks, workbench_catalogue


def scale(number: float, unit: Literal["m", "km"], digits: int = 2, sign: bool = False, note: str | None = None) -> str:
    """Scale a number."""
    return f"{number} {unit} {digits} {sign} {note}"


def shout(text: str) -> str:
    """Shout a text."""
    return text.upper()


def wait() -> None:
    """Wait a little."""


CATALOGUE = ToolCatalogue([Tool.from_function(function, category="a") for function in (scale, shout, wait)])
TASK = ToolTask(
    text="Scale 3 as m",
    tool="scale",
    arguments={"number": 3, "unit": "m", "sign": False},
    slots={"number": 3},
)
WAIT = replace(TASK, tool="wait", arguments={}, slots={})


def test_the_first_kind_of_error_that_holds_is_named(subtests: pytest.Subtests) -> None:
    for tool, arguments, kind in (
        ("scale", {"number": 3, "unit": "m", "sign": False}, None),
        ("scale", {"number": 3.0, "unit": "m", "sign": False}, None),
        ("scale", {"number": 3, "unit": "m"}, None),  # sign is at its default
        ("scale", {"number": 3, "unit": "m", "sign": False, "digits": 2}, None),  # a default spelled out
        ("scales", {"number": 3, "unit": "m", "sign": False}, "invalid"),  # there is no such tool
        ("scale", {"number": "3", "unit": "m"}, "invalid"),
        ("scale", {"number": 3, "unit": "mile"}, "invalid"),
        ("scale", {"number": 3, "unit": "m", "extra": 1}, "invalid"),
        ("scale", {"number": "3"}, "invalid"),  # comes before missing
        ("shout", {"text": 3}, "invalid"),  # comes before wrong_tool
        ("shout", {"text": "hey"}, "wrong_tool"),
        ("shout", {}, "wrong_tool"),  # what it lacks is not held against it
        ("scale", {"number": 3, "sign": False}, "missing"),
        ("scale", {"unit": "km"}, "missing"),  # comes before wrong_parameter
        ("scale", {"unit": "m", "note": "x"}, "missing"),  # comes before redundant
        ("scale", {"number": 3, "unit": "m", "note": "x"}, "redundant"),
        ("scale", {"number": 3, "unit": "m", "digits": 3}, "redundant"),
        ("scale", {"number": 4, "unit": "m", "note": "x"}, "redundant"),  # comes before wrong_parameter
        ("scale", {"number": 3, "unit": "km"}, "wrong_parameter"),
        ("scale", {"number": 4, "unit": "m"}, "wrong_parameter"),
        ("scale", {"number": 3, "unit": "m", "sign": True}, "wrong_parameter"),
    ):
        with subtests.test(kind, tool=tool, arguments=arguments):
            assert classify_error(TASK, ToolCall(tool=tool, arguments=arguments), CATALOGUE) == kind


def test_an_optional_argument_that_the_task_has_counts_as_missing() -> None:
    task = replace(TASK, arguments={"number": 3, "unit": "m", "note": "x", "digits": 1})
    for lacking in ("note", "digits"):
        arguments = {name: value for name, value in task.arguments.items() if name != lacking}
        kind = classify_error(task, ToolCall(tool="scale", arguments=arguments), CATALOGUE)
        # digits: an absent argument means the default, 2, not 1
        assert kind == {"note": "missing", "digits": "wrong_parameter"}[lacking]


def test_a_schema_that_cannot_be_applied_makes_a_call_invalid(subtests: pytest.Subtests) -> None:
    for schema, value in (
        ({"type": "number", "multipleOf": 0.1}, 10**400),
        ({"$ref": "#/properties/x"}, 1),
        ({"$ref": "#/required"}, 1),
        ({"$ref": "#/nowhere"}, 1),
    ):
        with subtests.test(str(schema)):
            parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
            catalogue = ToolCatalogue([Tool(name="t", description="Odd.", function=wait, parameters=parameters)])
            task = replace(TASK, tool="t", arguments={"x": 1})
            assert classify_error(task, ToolCall(tool="t", arguments={"x": value}), catalogue) == "invalid"


def test_arguments_that_cannot_be_passed_are_invalid(subtests: pytest.Subtests) -> None:
    for arguments in (None, 3, "text", [("number", 3)], {1: 2}, {"number": {3}}, {"number": float("nan")}):
        with subtests.test(str(arguments)):
            anything = Tool(
                name="t",
                description="Take anything.",
                function=wait,
                parameters={"type": "object", "additionalProperties": True},
            )
            catalogue = ToolCatalogue([anything])
            assert (
                classify_error(replace(TASK, tool="t"), ToolCall(tool="t", arguments=arguments), catalogue) == "invalid"
            )


def test_a_tool_that_is_no_text_is_invalid(subtests: pytest.Subtests) -> None:
    for name in (None, 3, ["scale"], {"scale": 1}):
        with subtests.test(str(name)):
            assert classify_error(TASK, ToolCall(tool=name, arguments=TASK.arguments), CATALOGUE) == "invalid"


def test_boolean_property_schemas_are_respected() -> None:
    schema = {"type": "object", "properties": {"any": True, "never": False}, "required": ["any"]}
    catalogue = ToolCatalogue([Tool(name="t", description="Take anything.", function=wait, parameters=schema)])
    task = replace(TASK, tool="t", arguments={"any": (1, 2)}, slots={"never": 1})
    for arguments, kind in (
        ({"any": [1.0, 2]}, None),
        ({"any": 3}, "wrong_parameter"),
        ({}, "missing"),
        ({"any": [1, 2], "never": 1}, "invalid"),
    ):
        assert classify_error(task, ToolCall(tool="t", arguments=arguments), catalogue) == kind


def test_the_mildest_error_counts_where_several_calls_are_right(subtests: pytest.Subtests) -> None:
    task = replace(TASK, other_calls=(ToolCall(tool="shout", arguments={"text": "3"}), ToolCall(tool="wait")))
    for call, kind in (
        (ToolCall(tool="scale", arguments=TASK.arguments), None),
        (ToolCall(tool="wait"), None),
        (ToolCall(tool="shout", arguments={"text": "3"}), None),
        (ToolCall(tool="shout", arguments={"text": "4"}), "wrong_parameter"),
        (ToolCall(tool="shout"), "missing"),
        (ToolCall(tool="wait", arguments={"text": "3"}), "invalid"),
        (ToolCall(tool="fly"), "invalid"),
        (None, "wrong_tool"),
    ):
        with subtests.test(str(call)):
            assert classify_error(task, call, CATALOGUE) == kind
    twice = replace(TASK, other_calls=(ToolCall(tool="scale", arguments={"number": 3, "unit": "km"}),))
    call = ToolCall(tool="scale", arguments={"number": 3, "unit": "km", "sign": True})
    assert classify_error(twice, call, CATALOGUE) == "wrong_parameter"  # and redundant compared with the other call


def test_only_no_call_is_right_for_a_task_without_a_tool() -> None:
    task = ToolTask(text="how are you?", tool=None)
    assert classify_error(task, None, CATALOGUE) is None
    assert classify_error(task, ToolCall(tool="wait"), CATALOGUE) == "wrong_tool"
    assert classify_error(task, ToolCall(tool="fly"), CATALOGUE) == "invalid"
    assert classify_error(replace(task, other_calls=(ToolCall(tool="wait"),)), ToolCall(tool="wait"), CATALOGUE) is None


def test_a_task_whose_tool_the_catalogue_lacks_is_refused() -> None:
    catalogue = CATALOGUE.without("scale")
    with pytest.raises(ValueError, match="must have the task's tool 'scale'; it has shout, wait"):
        classify_error(TASK, ToolCall(tool="shout"), catalogue)
    with pytest.raises(ValueError, match="must have the task's tool 'scale'"):
        classify_error(replace(WAIT, other_calls=(ToolCall(tool="scale"),)), ToolCall(tool="wait"), catalogue)


def test_right_calls_have_no_error() -> None:
    catalogue = workbench_catalogue()
    for task in make_workbench_tasks(350, seed=1):
        assert classify_error(task, ToolCall(tool=task.tool, arguments=task.arguments), catalogue) is None


def test_arguments_that_a_schema_does_not_name_are_invalid_unless_it_allows_them(subtests: pytest.Subtests) -> None:
    for allowed, kind in (({}, "invalid"), ({"additionalProperties": True}, "redundant")):
        with subtests.test(kind):
            tool = Tool(name="open", description="Open.", function=print, parameters={"type": "object"} | allowed)
            task, call = ToolTask(text="", tool="open"), ToolCall(tool="open", arguments={"x": 1})
            assert classify_error(task, call, ToolCatalogue([tool])) == kind


class Colour(enum.Enum):
    RED = "red"


def test_arguments_are_values_that_json_can_represent() -> None:
    """A call has "red": an argument that is a member of an Enum would never equal it."""
    with pytest.raises(TaskError, match=r"ToolTask\.arguments: Object of type Colour is not JSON serializable"):
        ToolTask(text="paint it", tool="paint", arguments={"colour": Colour.RED})
    assert ToolTask(text="paint it", tool="paint", arguments={"sizes": (1, 2)}).arguments == {"sizes": [1, 2]}
