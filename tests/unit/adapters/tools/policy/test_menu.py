"""A catalogue as tensors, calls as steps and back, worked by hand, and the warning for values that `fill` never gives."""

import pytest
import torch

from adapters.tools import HashingEncoder, Tool, ToolCatalogue, ToolSelectionPolicy
from adapters.tools.policy.menu import Menu
from grpo.errors import GRPOWarning
from tests.support.tool_policies import call

UNIT = {"enum": ["mile", "foot"]}


def tool(name: str, properties: dict, *required: str) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(name=name, description=f"Do {name}.", function=print, parameters=schema)


OF_CONVERT = {"value": {"type": "number"}, "unit": UNIT, "version": {"const": 2}, "exact": {"type": "boolean"}}
CATALOGUE = ToolCatalogue([
    tool("ping", {}), tool("convert", OF_CONVERT, "value", "unit", "version"), tool("measure", {"unit": UNIT}, "unit"),
])  # fmt: skip
MENU = Menu(CATALOGUE, HashingEncoder(8))


def test_the_tables_of_a_small_catalogue_equal_hand_worked_ones() -> None:
    """ "mile unit" belongs to two tools and is listed once."""
    texts = ["mile unit", "foot unit", "false exact", "true exact", "left out exact"]
    assert list(MENU.catalogue.value_places) == texts
    assert MENU.values.tolist() == [[[-1, -1, -1], [-1, -1, -1]], [[0, 1, -1], [2, 3, 4]], [[0, 1, -1], [-1, -1, -1]]]


def test_calls_and_steps_convert_into_each_other(subtests: pytest.Subtests) -> None:
    for made, steps in (
        (call("ping"), [0]),
        (call("convert", value=3.0, version=2, unit="foot", exact=True), [1, 1, 1]),
        (call("convert", value=3.0, version=2, unit="mile"), [1, 0, 2]),  # left out
        (call("measure", unit="foot"), [2, 1]),
    ):
        with subtests.test(made.tool, steps=steps):
            assert MENU.steps_of([made]).tolist() == [steps]
            assert MENU.call(steps, {"value": 3.0}) == made


def test_steps_are_padded_to_the_longest_call_and_a_partial_call_leaves_choices_open() -> None:
    assert MENU.steps_of([call("ping"), call("measure", unit="foot")]).tolist() == [[0, -1], [2, 1]]
    assert (MENU.steps_of([]).shape, MENU.steps_of([]).dtype) == ((0, 1), torch.int64)
    partial = MENU.steps_of([call("convert", exact=True), call("ping")], partial=True)
    assert partial.tolist() == [[1, -1, 1], [0, -1, -1]]


def test_given_values_fill_only_parameters_without_a_decision_or_constant() -> None:
    """`unit` is decided, `version` constant, and there is no `tone`."""
    given = {"value": 3.0, "unit": "foot", "version": 9, "tone": "loud", "exact": True}
    assert MENU.call([1, 0, 2], given) == call("convert", value=3.0, version=2, unit="mile")
    assert MENU.call([1, 0, 0], {}) == call("convert", version=2, unit="mile", exact=False)


def test_equal_tools_of_a_state_share_what_fill_has_given() -> None:
    """Two calls of `measure` and one of `ping` in the first state, one of `measure` in the second."""
    asked: list[tuple[str, str]] = []

    def fill(state: str, of: Tool) -> dict[str, object]:
        asked.append((state, of.name))
        return {}

    steps = torch.tensor([[2, 0], [2, 1], [0, -1], [2, 0]])
    mile, foot = call("measure", unit="mile"), call("measure", unit="foot")
    groups = MENU.calls(fill, ["a", "b"], torch.tensor([0, 0, 0, 1]), steps)
    assert groups == [[mile, foot, call("ping")], [mile]]
    assert asked == [("a", "measure"), ("a", "ping"), ("b", "measure")]


def convert(menu: Menu, *is_given: bool) -> None:
    """Make calls of `convert`, each in a state of its own, with or without its required value."""
    steps = torch.tensor([[1, 0, 2]] * len(is_given))
    menu.calls(lambda given, _: {"value": 1.0} if given else {}, is_given, torch.arange(len(is_given)), steps)


def test_the_hundredth_call_without_a_required_value_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    """One value is enough for silence."""
    menu, filled = Menu(CATALOGUE, HashingEncoder(8)), Menu(CATALOGUE, HashingEncoder(8))
    convert(menu, *[False] * 99)
    convert(filled, *[False] * 99, True, *[False] * 300)
    assert len(recwarn) == 0
    message = r"no value for the required parameter value in 100 calls of convert.*Pass fill="
    with pytest.warns(GRPOWarning, match=message):
        convert(menu, False)
    convert(menu, *[False] * 300)
    assert len(recwarn) == 0


def test_the_warning_names_the_line_that_draws_and_only_the_first_parameter_without_a_value() -> None:
    """A catalogue of hundreds of tools would give hundreds of warnings with the same advice."""
    made = ToolSelectionPolicy(CATALOGUE.without("ping", "measure"), fill=lambda *_: {})
    with pytest.warns(GRPOWarning, match="in 100 calls of convert") as warned:
        made.sample_actions(["a"], 100)
    assert [warning.filename for warning in warned] == [__file__]
    tools = [tool(f"tool_{number}", {"text": {"type": "string"}}, "text") for number in range(3)]
    menu = Menu(ToolCatalogue(tools), HashingEncoder(8))
    with pytest.warns(GRPOWarning) as warned:
        menu.calls(lambda *_: {}, [""], torch.zeros(300, dtype=torch.int64), torch.arange(3).repeat(100).unsqueeze(1))
    assert ["tool_0" in str(warning.message) for warning in warned] == [True]
