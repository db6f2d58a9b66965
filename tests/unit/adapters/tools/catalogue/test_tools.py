"""Tools and catalogues: names, and the decisions that a schema leaves; calls and results: equality as JSON has it."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest

from adapters import tools as public
from adapters.tools import ToolResult, ToolTimeoutError
from adapters.tools.catalogue.calls import same_json
from adapters.tools.catalogue.tools import ABSENT, Tool, ToolCatalogue
from grpo.errors import ConfigError, GRPOError
from tests.support import tool_functions
from tests.support.annotated import Colour


def tool(schema: dict[str, Any] | None = None, **fields: Any) -> Tool:
    """A tool of the parameters in `schema`."""
    described = {"name": "t", "description": "Do it.", "function": print}
    if schema is not None:
        described["parameters"] = {"type": "object", **schema}
    return Tool(**described | fields)


# --- what a tool is
def test_a_tool_that_cannot_be_used_is_refused_when_it_is_made(subtests: pytest.Subtests) -> None:
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"items": deep}
    no_object = 'Tool t: parameters must be a JSON Schema with "type": "object"'
    for field, values, message in (
        ("name", ("", "two words", "x" * 65, "größe", "a\n", "a/b"),
         r"Tool: name must be 1 to 64 letters, digits, '_', '-' or '\.'; got"),
        ("description", (" \n",), "Tool t: description must not be empty"),
        ("function", ("ping",), "Tool t: function must be callable; got 'ping'"),
        ("remote", (True,), "Tool t: function must be `async def` if the tool is remote"),
        ("remote", (1,), "Tool: remote must be True or False; got int 1"),
        ("category", (None,), "Tool: category must be a text; got NoneType None"),
        ("parameters", ({"type": "objekt"}, {"type": "array"}, {}, True), no_object),
        ("parameters", ({"type": "object", "properties": {"a": {"type": "x"}}},), r"at \$\.properties\.a\.type: 'x'"),
        ("parameters", ({"type": "object", "required": "a"},),
         r"Tool t: parameters must be a valid JSON Schema; at \$\.required: 'a' is not of type"),
        ("parameters", ({"type": "object", "properties": {"x": deep}},), "Tool t: parameters: maximum recursion depth"),
        ("timeout", (0, -1.0, math.nan, math.inf, True, "3", 10**400),
         "Tool t: timeout must be a positive, finite number of seconds, or None; got "),
        ("cost", (math.nan, -math.inf, False, "3", None, 10**400), "Tool t: cost must be a finite number; got "),
    ):  # fmt: skip
        for number, value in enumerate(values):
            with subtests.test(field, number=number), pytest.raises(ConfigError, match=message):
                tool(**{field: value})


def test_a_tool_has_no_parameters_by_default_and_is_encoded_as_its_name_in_words_and_its_description() -> None:
    made = tool(name="read_csv-file.fast")
    assert made.text == "read csv file fast: Do it."
    for name in ("a", "read_lines", "files.read-2", "x" * 64):
        assert tool(name=name).name == name
    assert made.parameters == {"type": "object", "properties": {}}
    assert (made.category, made.remote, made.timeout, made.cost) == ("general", False, None, 0.0)
    assert (made.free_parameters, made.required_free) == ((), ())
    assert tool(function=tool_functions.async_exit, remote=True).remote


# --- decisions
def test_enumerations_are_decisions_in_the_order_of_the_schema_and_single_values_constants() -> None:
    properties = {
        "from_unit": {"enum": ["mile", 3]}, "free": {"type": "string"}, "a": {"type": "boolean"}, "version": {"const": 2},
        "unit": {"enum": ["mile"]},
    }  # fmt: skip
    made = tool({"properties": properties, "required": [*reversed(properties), "undescribed"]})
    assert {choice.name: choice.values for choice in made.choices} == {"from_unit": ("mile", 3), "a": (False, True)}
    assert [choice.name for choice in made.choices] == ["from_unit", "a"]
    assert made.choices[0].texts == ("mile from unit", "3 from unit"), "described by value and parameter"
    assert made.constants == {"version": 2, "unit": "mile"}


def test_constants_with_descriptions_are_an_enumeration(subtests: pytest.Subtests) -> None:
    parts = [
        {"const": "md5", "description": "short and quick"}, {"const": 256, "title": "SHA", "description": "long"},
        {"enum": [None, "none"]},
    ]  # fmt: skip
    for key in ("oneOf", "anyOf"):
        with subtests.test(key):
            (choice,) = tool({"properties": {"how": {key: parts}}, "required": ["how"]}).choices
            assert choice.values == ("md5", 256, None, "none")
            assert choice.texts == ("md5 short and quick how", "256 SHA long how", "null how", "none how")


def test_the_value_in_a_call_is_found_among_the_choices() -> None:
    either, mixed = {"enum": ["x", "y"]}, {"enum": [1, 1.0, True, 0, False, [True], [1], 2]}
    properties = {"a": either, "b": either, "c": mixed}
    optional, needed, choice = tool({"properties": properties, "required": ["b", "c"]}).choices
    assert [optional.index(given) for given in ({"a": "x"}, {"a": "y"}, {}, {"a": "z"})] == [0, 1, 2, None]
    assert [needed.index(given) for given in ({"b": "x"}, {"b": "y"}, {}, {"b": "z"})] == [0, 1, None, None]
    assert [choice.index({"c": value}) for value in choice.values] == list(range(len(choice.values)))
    assert [choice.index({"c": value}) for value in (1.0, [1.0], (True,), {1}, math.nan)] == [0, 5, 4, None, None]


def test_the_absent_marker_keeps_its_identity_when_copied() -> None:
    """A reference policy is a copy, and its ABSENT must still be recognised."""
    assert copy.deepcopy(ABSENT) is ABSENT
    assert pickle.loads(pickle.dumps(ABSENT)) is ABSENT
    (choice,) = copy.deepcopy(tool({"properties": {"sure": {"type": "boolean"}}}).choices)
    assert choice.index({}) == 2


def values_of(schema: Any, *, required: bool = True) -> tuple[Any, ...]:
    """What may be chosen for a parameter of this schema."""
    made = tool({"properties": {"x": schema}, "required": ["x"] if required else []})
    return made.choices[0].values if made.choices else tuple(made.constants.values())


def test_an_optional_parameter_may_be_left_out_unless_its_default_is_a_value(subtests: pytest.Subtests) -> None:
    sure = {"type": "boolean"}
    for schema, required, values in (
        (sure, True, (False, True)), (sure | {"default": False}, True, (False, True)), (sure, False, (False, True, ABSENT)),
        (sure | {"default": False}, False, (False, True)), ({"const": 2}, False, (2, ABSENT)),
        ({"enum": ["a", "b"], "default": None}, False, ("a", "b", ABSENT)), ({"type": "string"}, False, ()), ({}, True, ()),
        ({"enum": ["a", None], "default": None}, False, ("a", None)), ({"oneOf": [{"const": 1}, {"type": "string"}]}, True, ()),
        ({"enum": [1, 2], "default": 1.0}, False, (1, 2)), ({"enum": [1, 2], "default": True}, False, (1, 2, ABSENT)),
    ):  # fmt: skip
        with subtests.test(str(schema), required=required):
            assert values_of(schema, required=required) == values
    assert tool({"properties": {"sure": sure}}).choices[0].texts == ("false sure", "true sure", "left out sure")
    assert tool({"properties": {"version": {"const": 2}}}).constants == {}


def test_equal_values_of_a_schema_become_one_choice(subtests: pytest.Subtests) -> None:
    for schema, values in (
        ({"enum": [1, 1.0, True, "1", [1], [1], [True]]}, [1.0, True, "1", [1], [True]]),
        ({"enum": [1.0, 1, 2]}, [1, 2]),
        ({"enum": [[1], [1.0], [1.5], {"a": [2.0]}, {"a": [2]}]}, [[1.0], [1.5], {"a": [2]}]),
        ({"anyOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["a", "b", "c"]),
        ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["a", "c"]),
        ({"oneOf": [{"enum": [1.0, 1]}, {"const": 2}]}, [1, 2]),
        ({"oneOf": [{"const": 1, "title": "one"}, {"const": 1.0}, {"const": True}, {"const": 0}]}, [True, 0]),
        ({"oneOf": [{"enum": [[1]]}, {"enum": [[1], [2]]}]}, [[2]]),
        ({"enum": [math.nan, "a", Colour.RED, "b"]}, ["a", "b"]),  # JSON cannot hold the others
        ({"anyOf": [False, {"const": 1}, {"const": 2}]}, [1, 2]),
    ):
        with subtests.test(str(schema)):
            found = values_of(schema)
            assert [(type(value), value) for value in found] == [(type(value), value) for value in values]


def test_a_long_enumeration_is_read() -> None:
    """Comparing each of 60,000 values with every other takes longer than a test may take."""
    texts, numbers = [f"value {i}" for i in range(30_000)], list(range(30_000))
    assert len(values_of({"oneOf": [{"enum": texts}, {"enum": numbers}]})) == 60_000


def test_properties_with_the_schema_true_are_free_and_with_false_are_removed() -> None:
    unit = {"enum": ["m", "km"]}
    made = tool({"properties": {"any": True, "never": False, "unit": unit}, "required": ["any", "unit"]})
    assert dict(made.properties) == {"any": {}, "unit": unit}
    assert ([choice.name for choice in made.choices], made.constants) == (["unit"], {})
    assert values_of({"anyOf": [True, {"const": 1}]}) == values_of({"anyOf": [False]}, required=False) == ()


def test_the_parameters_that_the_policy_does_not_decide_are_told() -> None:
    unit = {"enum": ["m", "km"]}
    properties = {
        "unit": unit, "sure": {"type": "boolean"}, "version": {"const": 2}, "maybe": {"const": 2}, "text": {"type": "string"},
        "note": {"type": "string"},
        "units": {"type": "array", "items": unit}, "range": {"properties": {"unit": unit}}, "any": True,
        "either": {"anyOf": [unit, {"type": "string"}]}, "never": False,
    }  # fmt: skip
    made = tool({"properties": properties, "required": ["unit", "version", "text", "units", "undescribed"]})
    assert made.free_parameters == ("text", "note", "units", "range", "any", "either", "undescribed")
    assert made.required_free == ("text", "units", "undescribed"), "values within a list are not decided"
    assert {choice.name for choice in made.choices} == {"unit", "sure", "maybe"}


def test_choices_behind_references_and_beside_null_are_decisions() -> None:
    unit = {"$ref": "#/$defs/unit"}
    other = {"anyOf": [unit, {"type": "null"}]}
    properties = {"unit": unit | {"description": "A unit."}, "other": other, "none": {"type": "null"}}
    made = tool({"properties": properties, "required": list(properties), "$defs": {"unit": {"enum": ["m", "km"]}}})
    assert {choice.name: choice.values for choice in made.choices} == {"unit": ("m", "km"), "other": ("m", "km", None)}
    assert made.choices[0].texts == ("m A unit. unit", "km A unit. unit")
    assert made.constants == {"none": None}
    assert "$defs" not in made.parameters


# --- catalogues
def named(*names: str) -> list[Tool]:
    return [tool(name=name, category=name[0]) for name in names]


def test_a_catalogue_is_a_mapping_in_the_order_of_its_tools(subtests: pytest.Subtests) -> None:
    tools = named("b1", "a1", "b2")
    catalogue = ToolCatalogue(iter(tools))
    assert (list(catalogue), len(catalogue), catalogue.categories) == (["b1", "a1", "b2"], 3, ("b", "a"))
    assert catalogue["a1"] is tools[1]
    assert "a1" in catalogue
    for name in ("c", None, 1, [], {}, {"a1"}, b"a1", ("a1",)):
        with subtests.test(str(name)):
            assert name not in catalogue
            assert catalogue.get(name) is None
            with pytest.raises(KeyError):
                catalogue[name]


def test_what_is_no_list_of_different_tools_is_refused(subtests: pytest.Subtests) -> None:
    kind = r"^ToolCatalogue\.tools must be a list of Tool objects; got "
    for tools, message in (
        ([], "must have at least one tool"),
        (named("a", "b", "c", "a", "c", "c"), r"tools must have different names; several have a, c\."),
        (7, rf"{kind}7\."), ("ab", rf"{kind}'ab'\."), ([*named("a"), "b"], rf"{kind}'b'\."),
        ({"a": named("a")[0]}, rf"{kind}'a'\."),
    ):  # fmt: skip
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            ToolCatalogue(tools)


def test_adding_or_removing_tools_makes_a_new_catalogue() -> None:
    catalogue = ToolCatalogue(named("a", "b"))
    assert list(catalogue.with_tools(*named("d", "c"))) == ["a", "b", "d", "c"]
    assert list(catalogue.without("a", "unknown")) == ["b"]
    assert list(catalogue) == ["a", "b"]
    with pytest.raises(ConfigError, match="several have b"):
        catalogue.with_tools(*named("b"))
    with pytest.raises(ConfigError, match="at least one tool"):
        catalogue.without("a", "b")


# --- calls and results
def test_values_are_equal_as_in_json(subtests: pytest.Subtests) -> None:
    for one, other, same in (
        (1, 1.0, True), (0.0, -0.0, True), (10**400, 10**400, True), (10**400, math.inf, False), (True, 1, False),
        (False, 0.0, False), (True, True, True), (None, None, True), (None, False, False), ("1", 1, False), ("a", "a", True),
        ([1, 2], (1.0, 2.0), True), ([1], [1, 2], False), ([True], [1], False), ({"a": [{"b": 1}]}, {"a": ({"b": 1.0},)}, True),
        ({"a": {"b": True}}, {"a": {"b": 1}}, False), ({"a": 1, "b": None}, {"a": 1}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ([], {}, False), ([], "", False),
    ):  # fmt: skip
        with subtests.test(one=one, other=other):
            assert same_json(one, other) is same
            assert same_json(other, one) is same


def test_a_value_that_json_cannot_hold_equals_nothing(subtests: pytest.Subtests) -> None:
    class Broken(dict[str, Any]):
        def keys(self) -> Any:
            raise RuntimeError

    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    circle: list[Any] = []
    circle.append(circle)
    for value in (
        math.nan, math.inf, -math.inf, b"a", {1}, object(), 1j, np.array([1, 2]), np.array(1), np.int64(1), np.bool_(True),
        {1: 2}, [np.array([1, 2])], Broken(a=1), deep, circle,
    ):  # fmt: skip
        with subtests.test(type(value).__name__):
            for other in (value, 1, [1], {"a": 1}, "a", True, None):
                assert same_json(value, other) is False
                assert same_json(other, value) is False


def test_a_result_is_an_output_or_an_error() -> None:
    result, failed = ToolResult(output=None), ToolResult(error=ToolTimeoutError("too slow"))
    assert (result.ok, failed.ok) == (True, False)
    assert (result.seconds, failed.output) == (0.0, None)


# --- constructors answer every wrong input with an error of this package that names the argument
async def rest() -> None:
    """Do nothing."""


CATALOGUE = public.ToolCatalogue([public.Tool.from_function(rest, remote=True)])
TASK = {"text": "", "tool": "t", "arguments": {}, "slots": {}, "labels": {}, "other_calls": []}
RIGHT: dict[Any, dict[str, Any]] = {
    public.Tool: {
        "name": "t", "description": "d", "function": rest, "category": "c", "parameters": {"type": "object"},
        "remote": True, "timeout": 1.0, "cost": 0.0,
    },
    public.ToolCatalogue: {"tools": list(CATALOGUE.values())},
    public.ToolExecutor: {"catalogue": CATALOGUE, "num_workers": 1, "allow": ["rest"], "options": None},
    public.ExecutorOptions: {
        "timeout": 1.0, "max_output_bytes": 9, "max_concurrency": 1, "root": None, "fresh_folder": False, "readable": (),
        "confinement": "auto", "log_path": None, "redact": ("a",), "limits": public.WorkerLimits(),
    },
    public.ToolSelectionPolicy: {
        "catalogue": CATALOGUE, "num_features": 2, "hidden": (2,), "encoder": public.HashingEncoder(8), "describe": str,
        "fill": lambda state, tool: {}, "available": lambda state: None,
    },
    public.HashingEncoder: {"num_features": 8}, public.ToolTask: TASK, public.Command: {"argv": ("wc",), "max_output_bytes": 5},
    public.MCPServer: {"command": ["a"], "env": {}, "cwd": ".", "start_timeout": 1.0}, public.latency_cost: {"per_second": 1.0},
}  # fmt: skip
ALSO_RIGHT: list[tuple[str, Any]] = [
    ("name", "abc"), ("description", "abc"), ("category", "abc"), ("text", "abc"), ("tool", "abc"), ("arguments", {}),
    ("slots", {}), ("labels", {}), ("env", {}), ("cwd", "abc"), ("cost", -1), ("allow", {}), ("root", "abc"),
    ("log_path", "abc"),
]  # fmt: skip
"""Arguments that are right for some class, though they are wrong for others."""


def test_wrong_arguments_are_refused_by_name(subtests: pytest.Subtests) -> None:
    for make, right in RIGHT.items():
        made = make(**right)
        if isinstance(made, public.ToolExecutor):
            made.close()
        for name in right:
            for wrong in ("abc", {}, [None], float("nan"), object(), b"x", -1):
                if isinstance(wrong, str | dict | int) and (name, wrong) in ALSO_RIGHT:
                    continue
                with subtests.test(make=make.__name__, name=name, wrong=repr(wrong)):
                    with pytest.raises(GRPOError) as raised:
                        make(**right | {name: wrong})
                    assert name.split("_")[0] in str(raised.value)
