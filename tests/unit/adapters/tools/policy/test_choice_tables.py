"""A catalogue as tensors, and calls as steps and back: worked by hand."""

import pytest
import torch

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.policy.choice_tables import ChoiceTables
from grpo.errors import ContractError

UNIT = {"enum": ["mile", "foot"]}


def nothing() -> None:
    """A placeholder for a function that is not called here."""


def tool(name: str, properties: dict, required: tuple[str, ...]) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(name=name, description=f"Do {name}.", function=nothing, parameters=schema)


CATALOGUE = ToolCatalogue(
    [
        tool("ping", {}, ()),
        tool(
            "convert",
            {"value": {"type": "number"}, "unit": UNIT, "version": {"const": 2}, "exact": {"type": "boolean"}},
            ("value", "unit", "version"),
        ),
        tool("measure", {"unit": UNIT}, ("unit",)),
    ]
)
TABLES = ChoiceTables(CATALOGUE)


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(tool=name, arguments=arguments)


def test_the_tables_of_a_small_catalogue_equal_hand_worked_ones() -> None:
    assert TABLES.names == ("ping", "convert", "measure")
    assert TABLES.tool_texts == [
        "ping: Do ping.",
        "convert: Do convert. value, unit, version, exact",
        "measure: Do measure. unit",
    ]
    # "mile unit" belongs to two tools and is listed once
    assert TABLES.value_texts == ["mile unit", "foot unit", "false exact", "true exact", "left out exact"]
    assert TABLES.max_choices == 2
    assert TABLES.values.tolist() == [[[0, 0, 0], [0, 0, 0]], [[0, 1, 0], [2, 3, 4]], [[0, 1, 0], [0, 0, 0]]]
    yes, no = True, False
    assert TABLES.exists.tolist() == [
        [[no, no, no], [no, no, no]],
        [[yes, yes, no], [yes, yes, yes]],
        [[yes, yes, no], [no, no, no]],
    ]
    assert TABLES.decides.tolist() == [[yes, no, no], [yes, yes, yes], [yes, yes, no]]


def test_a_catalogue_without_decisions_has_tables_without_columns() -> None:
    tables = ChoiceTables(CATALOGUE.without("convert", "measure"))
    assert tables.value_texts == []
    assert tables.values.shape == (1, 0, 0)
    assert tables.decides.tolist() == [[True]]
    assert tables.steps_of([call("ping"), call("ping")]).tolist() == [[0], [0]]
    assert tables.call([0], {"value": 1}) == call("ping")


def test_calls_and_steps_convert_into_each_other(subtests: pytest.Subtests) -> None:
    for made, steps in (
        (call("ping"), [0, 0, 0]),
        (call("convert", value=3.0, version=2, unit="foot", exact=True), [1, 1, 1]),
        (call("convert", value=3.0, version=2, unit="mile"), [1, 0, 2]),  # left out
        (call("measure", unit="foot"), [2, 1, 0]),
    ):
        with subtests.test(made.tool, steps=steps):
            assert TABLES.steps_of([made]).tolist() == [steps]
            assert TABLES.call(steps, {"value": 3.0}) == made


def test_the_steps_of_no_calls_are_an_empty_integer_tensor() -> None:
    assert TABLES.steps_of([]).shape == (0, 3)
    assert TABLES.steps_of([]).dtype == torch.int64


def test_given_values_fill_only_parameters_without_a_decision_or_constant() -> None:
    """`unit` is decided, `version` constant, and there is no `tone`."""
    given = {"value": 3.0, "unit": "foot", "version": 9, "tone": "loud", "exact": True}
    assert TABLES.call([1, 0, 2], given) == call("convert", value=3.0, version=2, unit="mile")
    assert TABLES.call([1, 0, 0], {}) == call("convert", version=2, unit="mile", exact=False)


def test_calls_the_policy_cannot_have_made_are_refused_by_name(subtests: pytest.Subtests) -> None:
    for wrong, message in (
        (call("fly"), r"^ToolSelectionPolicy: a call must name one of the tools ping, convert, measure; got 'fly'\.$"),
        (
            call("measure", unit="yard"),
            r"^ToolSelectionPolicy: measure\.unit must be one of \['mile', 'foot'\]; got 'yard'\.$",
        ),
        (call("measure"), r"^ToolSelectionPolicy: measure\.unit must be one of \['mile', 'foot'\]; got nothing\.$"),
        (call("convert", unit="mile", exact=1), r"convert\.exact must be one of \[False, True\] or left out; got 1\.$"),
    ):
        with subtests.test(message), pytest.raises(ContractError, match=message):
            TABLES.steps_of([call("ping"), wrong])
