"""A warning for required parameters that never get a value."""

import warnings
from collections import Counter

from grpo.errors import GRPOWarning


class FillCheck:
    """Warns of required parameters for which `fill` never gives a value."""

    NUM_CALLS = 100
    """Calls of a tool without a value before the warning. A call of a wrong tool often has no value, because the request has
    none."""

    def __init__(self) -> None:
        self._missing: Counter[tuple[str, str]] = Counter()
        self._given: set[tuple[str, str]] = set()

    def __call__(self, tool: str, parameter: str, is_given: bool) -> None:
        """Note whether a call has a value of a required parameter."""
        key = tool, parameter
        if is_given:
            self._given.add(key)
        elif key not in self._given:
            self._missing[key] += 1
            if self._missing[key] == self.NUM_CALLS:
                warnings.warn(
                    f"ToolSelectionPolicy: fill gave no value for the required parameter {parameter} in {self.NUM_CALLS} calls "
                    f"of {tool}, and such calls fail. Pass fill=..., a function of (state, tool) that returns values by "
                    "parameter.",
                    GRPOWarning,
                    stacklevel=4,
                )
