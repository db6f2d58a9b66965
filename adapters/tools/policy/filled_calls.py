"""Calls with the values that a policy does not decide, and a warning for required parameters that never get a value."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool
from grpo.errors import GRPOWarning

from .choice_tables import ChoiceTables

NUM_CALLS = 100
"""Calls of a tool without a required value before the warning. A call of a wrong tool often has no value, because the request
has none."""


class FilledCalls:
    """Makes calls from steps, and counts the required parameters for which `fill` never gives a value."""

    def __init__(self) -> None:
        self._missing: Counter[tuple[str, str]] = Counter()
        self._given: set[tuple[str, str]] = set()

    def __call__(
        self,
        tables: ChoiceTables,
        fill: Callable[[Any, Tool], Mapping[str, Any]],
        states: Any,
        rows: Sequence[int],
        steps: Sequence[Sequence[int]],
    ) -> list[ToolCall]:
        """The calls that the steps encode, in the states `rows`."""
        calls = []
        filled: dict[tuple[int, int], Mapping[str, Any]] = {}  # the calls of a group often agree
        for row, taken in zip(rows, steps, strict=True):
            tool, key = tables.tools[taken[0]], (row, taken[0])
            if key not in filled:
                filled[key] = fill(states[row], tool)
            calls.append(tables.call(taken, filled[key]))
            for name in tables.to_fill[taken[0]]:
                self._note(tool.name, name, name in filled[key])
        return calls

    def _note(self, tool: str, parameter: str, is_given: bool) -> None:
        key = tool, parameter
        if is_given:
            self._given.add(key)
        elif key not in self._given:
            self._missing[key] += 1
            if self._missing[key] == NUM_CALLS:
                warnings.warn(
                    f"ToolSelectionPolicy: fill gave no value for the required parameter {parameter} in "
                    f"{NUM_CALLS} calls of {tool}, and such calls fail. Pass fill=..., a function (state, tool) -> values.",
                    GRPOWarning,
                    stacklevel=4,
                )
