"""Tools and catalogues: names, and the decisions that a schema leaves; calls and results: equality as JSON has it."""

import math
from typing import Any

import numpy as np
import pytest

from adapters.tools.catalogue.calls import same_json
from adapters.tools.catalogue.tools import ABSENT, Tool, ToolCatalogue
from grpo.errors import ConfigError
from tests.support import tool_functions
from tests.support.annotated import Colour

TEXT = {"type": "string"}


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
        *((name, (None,), f"Tool: {name} must be a text; got NoneType None") for name in ("name", "description", "category")),
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
UNIT = {"enum": ["mile", 3]}
HOW = [
    {"const": "md5", "description": "short and quick"}, {"const": 256, "title": "SHA", "description": "long"},
    {"enum": [None, "none"]},
]  # fmt: skip
OF_HOW = ["md5 short and quick", "256 SHA long", "null", "none"]
# name: (schema, whether it is required, texts of the values to decide without the name, or the constant, or None)
PARAMETERS: dict[str, tuple[Any, bool, Any]] = {
    "from_unit": (UNIT, True, ["mile", "3"]), "free": (TEXT, True, None), "a": ({"type": "boolean"}, True, ["false", "true"]),
    "sure": ({"type": "boolean"}, False, ["false", "true", "left out"]), "version": ({"const": 2}, True, 2),
    "unit": ({"enum": ["mile"]}, True, "mile"), "maybe": ({"const": 2}, False, ["2", "left out"]), "note": (TEXT, False, None),
    "one": ({"oneOf": HOW}, True, OF_HOW), "any_of": ({"anyOf": HOW}, True, OF_HOW),
    "range": ({"properties": {"unit": UNIT}}, False, None),
    "units": ({"type": "array", "items": UNIT}, True, None), "any": (True, True, None), "never": (False, False, None),
    "either": ({"anyOf": [UNIT, TEXT]}, False, None), "nothing": ({"type": "null"}, True, "null"),
    "referred": ({"$ref": "#/$defs/unit", "description": "A unit."}, True, ["mile A unit.", "3 A unit."]),
    "or_null": ({"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}, True, ["mile", "3", "null"]),
    "no_schema": ({"anyOf": [True, {"const": 1}]}, False, None), "no_value": ({"anyOf": [False]}, False, None),
}  # fmt: skip


def test_enumerations_are_decided_in_the_order_of_the_schema_and_single_values_are_constants() -> None:
    required = [name for name, (_, is_required, _) in PARAMETERS.items() if is_required]
    properties = {name: schema for name, (schema, *_) in PARAMETERS.items()}
    made = tool({"properties": properties, "required": [*reversed(required), "undescribed"], "$defs": {"unit": UNIT}})
    decided = {name: value for name, (*_, value) in PARAMETERS.items()}
    assert [(choice.name, [*choice.texts]) for choice in made.choices] == [
        (name, [f"{text} {name.replace('_', ' ')}" for text in texts])
        for name, texts in decided.items()
        if isinstance(texts, list)
    ]
    assert made.choices[0].values == ("mile", 3)
    assert made.constants == {"version": 2, "unit": "mile", "nothing": None}
    free = [name for name, value in decided.items() if value is None and name != "never"]
    assert made.free_parameters == (*free, "undescribed")
    assert made.required_free == ("free", "units", "any", "undescribed"), "values within a list are not decided"
    assert "never" not in made.properties
    assert made.properties["any"] == {}
    assert "$defs" not in made.parameters


def test_the_value_in_a_call_is_found_among_the_choices() -> None:
    either, mixed = {"enum": ["x", "y"]}, {"enum": [1, 1.0, True, 0, False, [True], [1], 2]}
    properties = {"a": either, "b": either, "c": mixed}
    optional, needed, choice = tool({"properties": properties, "required": ["b", "c"]}).choices
    assert [optional.index(given) for given in ({"a": "x"}, {"a": "y"}, {}, {"a": "z"})] == [0, 1, 2, None]
    assert [needed.index(given) for given in ({"b": "x"}, {"b": "y"}, {}, {"b": "z"})] == [0, 1, None, None]
    assert [choice.index({"c": value}) for value in choice.values] == list(range(len(choice.values)))
    assert [choice.index({"c": value}) for value in (1.0, [1.0], (True,), {1}, math.nan)] == [0, 5, 4, None, None]


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
