"""A catalogue as tensors: the choices of each tool, and the choices that a call made.

Axes: K tools, J enumerated parameters (maximum over tools), V values (maximum over parameters), C distinct value texts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import ABSENT, ParameterChoices, ToolCatalogue
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
        self._parts = [(tool.free_parameters, tool.constants) for tool in self.tools]
        self.to_fill = [tool.required_free for tool in self.tools]
        """The required parameters of each tool that a policy does not decide."""
        self.value_texts = list(dict.fromkeys(text for of in self.choices for choice in of for text in choice.texts))
        self.max_choices = max(map(len, self.choices))
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
        free, constants = self._parts[tool]
        arguments = {name: given[name] for name in free if name in given} | dict(constants)
        for choice, step in zip(self.choices[tool], steps[1:], strict=False):
            if choice.values[step] is not ABSENT:
                arguments[choice.name] = choice.values[step]
        return ToolCall(tool=self.names[tool], arguments=arguments)
