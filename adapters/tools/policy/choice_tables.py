"""A catalogue as tensors: the choices of each tool, and the choices that a call made.

Axes: K tools, J enumerated parameters (maximum over tools), V values (maximum over parameters), C distinct value texts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import ABSENT, ParameterChoices, Tool, ToolCatalogue
from grpo.errors import ContractError


class ChoiceTables:
    """Lookup tables for a policy over `catalogue`.

    Args:
        catalogue: The tools, in the order of the tables.
    """

    def __init__(self, catalogue: ToolCatalogue) -> None:
        self.names = tuple(catalogue)
        self.tool_texts = [tool.text for tool in catalogue.values()]
        self.position = {name: place for place, name in enumerate(self.names)}
        self.choices: list[tuple[ParameterChoices, ...]] = [tool.choices for tool in catalogue.values()]
        self.tools = list(catalogue.values())
        self._parts = [(tool.free_parameters, tool.constants, _named(tool)) for tool in self.tools]
        self.to_fill = [tool.required_free for tool in self.tools]
        """The required parameters of each tool that a policy does not decide."""
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
        """Index into `value_texts` of each value."""
        self.exists: Bool[Tensor, "K J V"] = exists
        """True where there is a value, False for padding."""
        self.decides: Bool[Tensor, "K T"] = torch.cat(
            [torch.ones(len(self.names), 1, dtype=torch.bool), exists.any(2)], dim=1
        )
        """The decision steps of each tool: one to choose the tool, then one per enumerated parameter. T = 1 + J."""

    def steps_of(self, calls: Sequence[ToolCall]) -> Int64[Tensor, "N T"]:
        """The choices of each call: the index of its tool, then the index of each enumerated value; 0 where there is no step.

        Raises:
            ContractError: A call's tool is not in the catalogue, or a value is not enumerated in the tool's schema.
        """
        drawn, place_of, drawn_steps = self._drawn
        places = [place_of.get(id(call), -1) for call in calls]
        if all(place >= 0 and drawn[place] is call for place, call in zip(places, calls, strict=True)):
            return drawn_steps[places]
        steps, known = self.parts_of(calls)
        for row, place in (~known).nonzero().tolist():
            call = calls[row]
            choice = self.choices[self.position[call.tool]][place - 1]
            came = repr(call.arguments[choice.name]) if choice.name in call.arguments else "nothing"
            listed = [value for value in choice.values if value is not ABSENT]
            raise ContractError(
                f"ToolSelectionPolicy: {call.tool}.{choice.name} must be one of {listed}"
                f"{' or left out' if ABSENT in choice.values else ''}; got {came}."
            )
        return steps

    def remember(self, calls: Sequence[ToolCall], steps: Int64[Tensor, "N t"]) -> None:
        """Remember the steps of calls that were just drawn, and forget the previous calls.

        `steps_of` then looks up the remembered calls by identity and does not read their arguments.

        Args:
            calls: The drawn calls.
            steps: The calls' choices, one row per call. Columns after the last step of the longest call may be left out.
        """
        padded = torch.nn.functional.pad(steps, (0, 1 + self.max_choices - steps.shape[1]))
        # One assignment here and one read in `steps_of`, because another thread may draw in between.
        self._drawn = calls, {id(call): place for place, call in enumerate(calls)}, padded

    def parts_of(self, calls: Sequence[ToolCall]) -> tuple[Int64[Tensor, "N T"], Bool[Tensor, "N T"]]:
        """The choices of calls that may be incomplete, as `steps_of`, and whether a call determines each choice.

        Raises:
            ContractError: A call's tool is not in the catalogue.
        """
        width = 1 + self.max_choices
        steps, known = (
            torch.zeros(len(calls), width, dtype=torch.int64),
            torch.ones(len(calls), width, dtype=torch.bool),
        )
        for row, call in enumerate(calls):
            if call.tool not in self.position:
                raise ContractError(
                    f"ToolSelectionPolicy: a call must name one of the tools {', '.join(self.names[:40])}; got {call.tool!r}."
                )
            steps[row, 0] = tool = self.position[call.tool]
            for column, choice in enumerate(self.choices[tool], start=1):
                index = choice.index(call.arguments)
                steps[row, column], known[row, column] = index or 0, index is not None
        return steps, known

    def call(self, steps: Sequence[int], given: Mapping[str, Any]) -> ToolCall:
        """The call that a row of [T] steps encodes.

        Args:
            steps: Choices as `steps_of` returns them.
            given: Values of the other parameters. Names that the tool lacks, or that `steps` decides, are ignored.
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


def _named(tool: Tool) -> list[tuple[int, str, tuple[Any, ...]]]:
    """Step, name and values of each enumerated parameter."""
    return [(column, choice.name, choice.values) for column, choice in enumerate(tool.choices, start=1)]
