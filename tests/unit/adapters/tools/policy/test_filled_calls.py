"""The warning for required parameters that `fill` never gives."""

import warnings

import pytest

from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.policy.filled_calls import FilledCalls
from adapters.tools.policy.policy import ToolSelectionPolicy
from grpo.errors import GRPOWarning


def test_the_hundredth_call_without_a_value_warns_once() -> None:
    check = FilledCalls()._note
    for _ in range(99):
        check("add", "a", False)
    with pytest.warns(GRPOWarning, match=r"no value for the required parameter a in 100 calls of add.*Pass fill="):
        check("add", "a", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(300):
            check("add", "a", False)


def test_one_value_is_enough_for_silence() -> None:
    check = FilledCalls()._note
    check("add", "a", True)
    for _ in range(300):
        check("add", "a", False)
    for _ in range(99):
        check("add", "b", False)
    with pytest.warns(GRPOWarning, match="parameter b"):
        check("add", "b", False)


def add(a: float, b: float = 1.0, exact: bool = True) -> float:
    """Add two numbers."""
    return a + b


def test_the_policy_checks_required_parameters_that_it_does_not_decide() -> None:
    catalogue = ToolCatalogue([Tool.from_function(add)])
    with pytest.warns(GRPOWarning, match="parameter a in 100 calls of add") as caught:
        ToolSelectionPolicy(catalogue, fill=lambda state, tool: {}).generate_actions(["2 and 3"], 150)
    assert len(caught) == 1, "b has a default, and exact is decided"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ToolSelectionPolicy(catalogue, fill=lambda state, tool: {"a": 2.0}).generate_actions(["2 and 3"], 150)
