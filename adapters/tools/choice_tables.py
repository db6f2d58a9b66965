"""A catalogue as tensors: which choices follow which tool, and which of them a call has made.

K tools, J parameters that a tool's schema enumerates (at most), V values of one (at most), C different texts of values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from grpo.errors import ContractError

from .calls import ToolCall
from .catalogue import ABSENT, ParameterChoices, Tool, ToolCatalogue


class ChoiceTables:
    """What a policy over `catalogue` looks up.

    Args:
        catalogue: its tools, in its order.
    """

    def __init__(self, catalogue: ToolCatalogue) -> None:
        self.names = tuple(catalogue)
        self.tool_texts = [tool.text for tool in catalogue.values()]
        self.position = {name: place for place, name in enumerate(self.names)}
        self.choices: list[tuple[ParameterChoices, ...]] = [tool.choices for tool in catalogue.values()]
        self.tools = list(catalogue.values())
        self._parts = [(_others(tool), tool.constants, _named(tool)) for tool in self.tools]
        self.value_texts = list(dict.fromkeys(text for of in self.choices for choice in of for text in choice.texts))
        self.max_choices = max(map(len, self.choices))
        self.remember((), torch.zeros(0, 1, dtype=torch.int64))
        shape = (len(self.names), self.max_choices, max((len(c.values) for of in self.choices for c in of), default=0))
        place = {text: i for i, text in enumerate(self.value_texts)}
        values, exists = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        for tool, of in enumerate(self.choices):
            for column, choice in enumerate(of):
                values[tool, column, : len(choice.texts)] = torch.tensor([place[text] for text in choice.texts])
                exists[tool, column, : len(choice.texts)] = True
        self.values: Int64[Tensor, "K J V"] = values
        """Which of `value_texts` each value has."""
        self.exists: Bool[Tensor, "K J V"] = exists
        """Where there is a value."""
        self.decides: Bool[Tensor, "K T"] = torch.cat(
            [torch.ones(len(self.names), 1, dtype=torch.bool), exists.any(2)], dim=1
        )
        """The steps of each tool: choosing it, and one for each parameter that is enumerated. T = 1 + J."""

    def steps_of(self, owner: str, calls: Sequence[ToolCall]) -> Int64[Tensor, "N T"]:
        """What each call chose: its tool, and the place of each enumerated value; 0 where there is no step.

        Raises:
            ContractError: a tool that is not here, or a value that its schema does not enumerate.
        """
        drawn, place_of, drawn_steps = self._drawn
        places = [place_of.get(id(call), -1) for call in calls]
        if all(place >= 0 and drawn[place] is call for place, call in zip(places, calls, strict=True)):
            return drawn_steps[places]
        taken = [self._steps_of_call(owner, call) for call in calls]
        return torch.tensor(taken, dtype=torch.int64).view(len(calls), 1 + self.max_choices)

    def remember(self, calls: Sequence[ToolCall], steps: Int64[Tensor, "N t"]) -> None:
        """Calls that were just drawn, instead of those before: what they chose need not be read back from them.

        Args:
            calls: known by their identity from now on.
            steps: what they chose; t may be less than T where no call has more.
        """
        padded = torch.nn.functional.pad(steps, (0, 1 + self.max_choices - steps.shape[1]))
        # one assignment, and one read in `steps_of`: another thread may draw in between
        self._drawn = calls, {id(call): place for place, call in enumerate(calls)}, padded

    def _steps_of_call(self, owner: str, call: ToolCall) -> list[int]:
        tool = self.position.get(call.tool)
        if tool is None:
            raise ContractError(f"{owner}: no tool is called {call.tool!r}; there are {', '.join(self.names[:40])}.")
        steps = [tool] + [0] * self.max_choices
        for column, choice in enumerate(self.choices[tool], start=1):
            index = choice.index(call.arguments)
            if index is None:
                came = repr(call.arguments[choice.name]) if choice.name in call.arguments else "nothing"
                raise ContractError(
                    f"{owner}: {call.tool}.{choice.name} must be one of {[v for v in choice.values if v is not ABSENT]}"
                    f"{' or left out' if ABSENT in choice.values else ''}; got {came}."
                )
            steps[column] = index
        return steps

    def call(self, steps: Sequence[int], given: Mapping[str, Any]) -> ToolCall:
        """The call that [T] steps stand for.

        Args:
            steps: as `steps_of` has them.
            given: values of other parameters; what the tool does not have, or what was decided, is left out.
        """
        tool = steps[0]
        free, constants, named = self._parts[tool]
        arguments = {}
        for name in free:
            if name in given:
                arguments[name] = given[name]
        if constants:
            arguments.update(constants)
        for column, name, values in named:
            value = values[steps[column]]
            if value is not ABSENT:
                arguments[name] = value
        return ToolCall(tool=self.names[tool], arguments=arguments)


def _others(tool: Tool) -> list[str]:
    """Parameters that are neither decided nor constant."""
    settled = {choice.name for choice in tool.choices} | set(tool.constants)
    return [name for name in tool.properties if name not in settled]


def _named(tool: Tool) -> list[tuple[int, str, tuple[Any, ...]]]:
    """Each parameter that is decided: its step, its name, its values."""
    return [(column, choice.name, choice.values) for column, choice in enumerate(tool.choices, start=1)]
