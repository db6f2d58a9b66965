"""Tools and catalogues: names, and the decisions that a schema leaves."""

import copy
import enum
import math
import pickle
from typing import Any

import pytest

from adapters.tools.catalogue.tools import ABSENT, Tool, ToolCatalogue
from grpo.errors import ConfigError


def ping() -> str:
    """Say that you are there."""
    return "pong"


async def ask(question: str) -> str:
    """Ask another machine."""
    return question


def tool(schema: dict[str, Any] | None = None, **fields: Any) -> Tool:
    """A tool of the parameters in `schema`."""
    described = {"name": "t", "description": "Do it.", "function": ping}
    if schema is not None:
        described["parameters"] = {"type": "object", **schema}
    return Tool(**described | fields)


def deep_schema() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(10_000):
        schema = {"items": schema}
    return {"type": "object", "properties": {"x": schema}}


# --- what a tool is


def test_a_tool_name_may_hold_letters_digits_and_three_signs(subtests: pytest.Subtests) -> None:
    for name in ("a", "read_lines", "files.read-2", "x" * 64):
        with subtests.test(name):
            assert tool(name=name).name == name


def test_other_tool_names_are_refused(subtests: pytest.Subtests) -> None:
    for name in ("", "two words", "x" * 65, "größe", "a\n", "a/b"):
        with (
            subtests.test(name),
            pytest.raises(ConfigError, match=r"Tool: name must be 1 to 64 letters, digits, '_', '-' or '\.'; got"),
        ):
            tool(name=name)


def test_a_tool_that_cannot_be_used_is_refused_when_it_is_made(subtests: pytest.Subtests) -> None:
    for fields, message in (
        ({"description": " \n"}, "Tool t: description must not be empty"),
        ({"function": "ping"}, "Tool t: function must be callable; got 'ping'"),
        ({"remote": True}, "Tool t: function must be `async def` if the tool is remote"),
        ({"remote": 1}, "Tool: remote must be True or False; got int 1"),
        ({"category": None}, "Tool: category must be a text; got NoneType None"),
        ({"parameters": {"type": "objekt"}}, r'Tool t: parameters must be .* "type": "object"; got'),
        (
            {"parameters": {"type": "object", "properties": {"a": {"type": "x"}}}},
            r"Schema; at \$\.properties\.a\.type: 'x'",
        ),
        (
            {"parameters": {"type": "object", "required": "a"}},
            r"Tool t: parameters must be a valid JSON Schema; at \$\.required: 'a' is not of type",
        ),
        ({"parameters": {"type": "array"}}, r'Tool t: parameters must be a JSON Schema with "type": "object"'),
        ({"parameters": {}}, r'Tool t: parameters must be a JSON Schema with "type": "object"'),
        ({"parameters": True}, r'Tool t: parameters must be a JSON Schema with "type": "object"'),
        ({"parameters": deep_schema()}, "Tool t: parameters: maximum recursion depth"),
        *(
            ({"timeout": value}, "Tool t: timeout must be a positive, finite number of seconds, or None; got ")
            for value in (0, -1.0, math.nan, math.inf, True, "3", 10**400)
        ),
        *(
            ({"cost": value}, "Tool t: cost must be a finite number; got ")
            for value in (math.nan, -math.inf, False, "3", None, 10**400)
        ),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            tool(**fields)


def test_a_tool_has_no_parameters_by_default() -> None:
    made = tool()
    assert made.parameters == {"type": "object", "properties": {}}
    assert (made.category, made.remote, made.timeout, made.cost) == ("general", False, None, 0.0)
    assert tool(function=ask, remote=True).remote


def test_the_encoded_text_of_a_tool_is_its_name_in_words_and_its_description() -> None:
    assert tool(name="read_csv-file.fast").text == "read csv file fast: Do it."


class Colour(enum.Enum):
    RED = "red"


# --- decisions


def test_an_enumeration_is_a_decision_described_by_value_and_parameter() -> None:
    (choice,) = tool({"properties": {"from_unit": {"enum": ["mile", 3]}}, "required": ["from_unit"]}).choices
    assert choice.name == "from_unit"
    assert choice.values == ("mile", 3)
    assert choice.texts == ("mile from unit", "3 from unit")


def test_decisions_come_in_the_order_of_the_schema() -> None:
    schema = {
        "properties": {"b": {"enum": [1, 2]}, "x": {"type": "string"}, "a": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    assert [choice.name for choice in tool(schema).choices] == ["b", "a"]


def test_constants_with_descriptions_are_an_enumeration(subtests: pytest.Subtests) -> None:
    for key in ("oneOf", "anyOf"):
        with subtests.test(key):
            parts = [
                {"const": "md5", "description": "short and quick"},
                {"const": 256, "title": "SHA", "description": "long"},
                {"enum": [None, "none"]},
            ]
            (choice,) = tool({"properties": {"how": {key: parts}}, "required": ["how"]}).choices
            assert choice.values == ("md5", 256, None, "none")
            assert choice.texts == ("md5 short and quick how", "256 SHA long how", "null how", "none how")


def test_a_parameter_with_a_single_value_is_a_constant_and_no_decision() -> None:
    properties = {"version": {"const": 2}, "unit": {"enum": ["mile"]}, "free": {"type": "string"}}
    made = tool({"properties": properties, "required": ["version", "unit", "free", "undescribed"]})
    assert made.choices == ()
    assert made.constants == {"version": 2, "unit": "mile"}


def test_booleans_and_numbers_are_different_values() -> None:
    (choice,) = tool({"properties": {"a": {"enum": [1, True, 0, False]}}, "required": ["a"]}).choices
    assert [choice.index({"a": value}) for value in (1, True, 0, False)] == [0, 1, 2, 3]
    assert choice.index({"a": 1.0}) == 0, "numbers are equal as in JSON"


def test_the_value_in_a_call_is_found_among_the_choices() -> None:
    optional, needed = tool(
        {"properties": {"a": {"enum": ["x", "y"]}, "b": {"enum": ["x", "y"]}}, "required": ["b"]}
    ).choices
    assert [optional.index(given) for given in ({"a": "x"}, {"a": "y"}, {}, {"a": "z"})] == [0, 1, 2, None]
    assert [needed.index(given) for given in ({"b": "x"}, {"b": "y"}, {}, {"b": "z"})] == [0, 1, None, None]


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
        ({"enum": [math.nan, "a", Colour.RED, "b"]}, ["a", "b"]),
        ({"anyOf": [False, {"const": 1}, {"const": 2}]}, [1, 2]),
    ):
        with subtests.test(str(schema)):
            found = values_of(schema)
            assert [(type(value), value) for value in found] == [(type(value), value) for value in values]


def test_each_value_is_found_at_its_own_index() -> None:
    (choice,) = tool({"properties": {"x": {"enum": [1, 1.0, [True], [1], 2]}}, "required": ["x"]}).choices
    assert [choice.index({"x": value}) for value in choice.values] == list(range(len(choice.values)))
    assert [choice.index({"x": value}) for value in (1.0, [1.0], (True,), {1}, math.nan)] == [0, 2, 1, None, None]


def test_a_long_enumeration_is_read() -> None:
    """Comparing each of 60,000 values with every other takes longer than a test may take."""
    texts, numbers = [f"value {i}" for i in range(30_000)], list(range(30_000))
    assert len(values_of({"oneOf": [{"enum": texts}, {"enum": numbers}]})) == 60_000


def test_properties_with_the_schema_true_are_free_and_with_false_are_removed() -> None:
    made = tool(
        {"properties": {"any": True, "never": False, "unit": {"enum": ["m", "km"]}}, "required": ["any", "unit"]}
    )
    assert dict(made.properties) == {"any": {}, "unit": {"enum": ["m", "km"]}}
    assert [choice.name for choice in made.choices] == ["unit"]
    assert made.constants == {}
    assert tool({"properties": {"x": {"anyOf": [True, {"const": 1}]}}, "required": ["x"]}).choices == ()
    assert tool({"properties": {"x": {"anyOf": [False]}}}).choices == ()


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
    assert (tool().free_parameters, tool().required_free) == ((), ())


def test_choices_behind_references_and_beside_null_are_decisions() -> None:
    made = tool(
        {
            "properties": {
                "unit": {"$ref": "#/$defs/unit", "description": "A unit."},
                "other": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
                "none": {"type": "null"},
            },
            "required": ["unit", "other", "none"],
            "$defs": {"unit": {"enum": ["m", "km"]}},
        }
    )
    assert [(choice.name, choice.values) for choice in made.choices] == [
        ("unit", ("m", "km")),
        ("other", ("m", "km", None)),
    ]
    assert made.choices[0].texts == ("m A unit. unit", "km A unit. unit")
    assert made.constants == {"none": None}
    assert "$defs" not in made.parameters


# --- catalogues


def named(*names: str) -> list[Tool]:
    return [tool(name=name, category=name[0]) for name in names]


def test_a_catalogue_is_a_mapping_in_the_order_of_its_tools() -> None:
    tools = named("b1", "a1", "b2")
    catalogue = ToolCatalogue(iter(tools))
    assert list(catalogue) == ["b1", "a1", "b2"]
    assert len(catalogue) == 3
    assert catalogue["a1"] is tools[1]
    assert "a1" in catalogue
    assert "c" not in catalogue
    assert catalogue.categories == ("b", "a")


def test_keys_that_are_no_text_are_not_in_a_catalogue(subtests: pytest.Subtests) -> None:
    for name in (None, 1, [], {}, {"a1"}, b"a1", ("a1",)):
        with subtests.test(str(name)):
            catalogue = ToolCatalogue(named("a1"))
            assert name not in catalogue
            assert catalogue.get(name) is None
            with pytest.raises(KeyError):
                catalogue[name]


def test_an_empty_catalogue_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have at least one tool"):
        ToolCatalogue([])


def test_what_is_no_list_of_tools_is_refused(subtests: pytest.Subtests) -> None:
    for tools, shown in ((7, "7"), ("ab", "'ab'"), ([*named("a"), "b"], "'b'"), ({"a": named("a")[0]}, "'a'")):
        with (
            subtests.test(shown),
            pytest.raises(ConfigError, match=rf"^ToolCatalogue\.tools must be a list of Tool objects; got {shown}\."),
        ):
            ToolCatalogue(tools)


def test_duplicate_tool_names_are_refused_and_listed() -> None:
    with pytest.raises(ConfigError, match=r"tools must have different names; several have a, c\."):
        ToolCatalogue(named("a", "b", "c", "a", "c", "c"))


def test_adding_or_removing_tools_makes_a_new_catalogue() -> None:
    catalogue = ToolCatalogue(named("a", "b"))
    assert list(catalogue.with_tools(*named("d", "c"))) == ["a", "b", "d", "c"]
    assert list(catalogue.without("a", "unknown")) == ["b"]
    assert list(catalogue) == ["a", "b"]
    with pytest.raises(ConfigError, match="several have b"):
        catalogue.with_tools(*named("b"))
    with pytest.raises(ConfigError, match="at least one tool"):
        catalogue.without("a", "b")
