"""The tools that a policy chooses from, as tensors; calls as rows of choices, and back.

Axes: K tools, J enumerated parameters (maximum over tools), V values (maximum over parameters), C distinct value texts.
A row of T steps is the index of a tool, then the index of each of its enumerated values, then -1 as padding.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import ABSENT, Tool, ToolCatalogue
from adapters.tools.text.encoders import with_own_feature
from adapters.tools.text.evidence import Evidence
from grpo.errors import ContractError, warn_user

Fill: TypeAlias = Callable[[Any, Tool], Mapping[str, Any]]
"""Maps a state and a tool to values of the tool's parameters."""

NUM_CALLS = 100
"""Calls of a tool without a required value before a warning. A call of a wrong tool often has no value."""


class Menu(nn.Module):
    """The encoded tools and their choices, on the policy's device and in its precision."""

    tool_vectors: Tensor
    """Encoded text of each tool, [K, D]."""
    value_vectors: Tensor
    """Encoded text of each distinct value, [C, D]."""
    values: Tensor
    """`value_places` of each value, [K, J, V], and -1 at padding."""
    offsets: Tensor
    """c_k of each tool, [K]."""

    def __init__(self, catalogue: ToolCatalogue, encoder: Callable[[Sequence[str]], Tensor]) -> None:
        super().__init__()
        self.encoder = encoder
        self.offset_of: dict[str, float] = {}
        """c_k of each added tool by name."""
        self._num_missing: dict[tuple[str, str], float] = defaultdict(float)
        self._has_warned = False
        for name in ("tool_vectors", "value_vectors", "values", "offsets"):
            self.register_buffer(name, torch.zeros(0), persistent=False)
        self.use(catalogue)

    def use(self, catalogue: ToolCatalogue) -> None:
        """Replace the tools."""
        self.catalogue, self.tools = catalogue, list(catalogue.values())
        self.position = {name: place for place, name in enumerate(catalogue)}
        self.choices = list(catalogue.choices.values())
        self._given = [(tool.free_parameters, tool.constants, tool.required_free) for tool in self.tools]
        every_choice = [choice for of in self.choices for choice in of]
        place = catalogue.value_places
        texts = list(place)
        num_values = max((len(choice.texts) for choice in every_choice), default=0)
        values = torch.full((len(self.tools), max(map(len, self.choices)), num_values), -1)
        for row, of in zip(values, self.choices, strict=True):
            for column, choice in zip(row, of, strict=False):
                column[: len(choice.texts)] = torch.tensor([place[text] for text in choice.texts])
        self.values = values.to(self.offsets.device)
        self.tool_vectors = self.encoder([tool.text for tool in self.tools]).to(self.offsets)
        of_values = with_own_feature(texts, self.encoder(texts)) if texts else self.tool_vectors[:0]
        self.value_vectors = of_values.to(self.offsets)
        self.evidence = Evidence(catalogue)
        self.set_offsets(self.offset_of)

    def set_offsets(self, offset_of: Mapping[str, float]) -> None:
        """Set c_k of the added tools by name, and 0 for all others. Names that the catalogue lacks are ignored."""
        self.offset_of = {name: offset for name, offset in offset_of.items() if name in self.catalogue}
        self.offsets = torch.tensor([self.offset_of.get(name, 0.0) for name in self.catalogue]).to(self.offsets)

    def steps_of(self, calls: Sequence[ToolCall], *, partial: bool = False) -> Int64[Tensor, "N T"]:
        """The steps of each call. T is that of the longest call. A `partial` call may leave choices open, which become -1."""
        rows = []
        for call in calls:
            if getattr(call, "tool", None) not in self.position:
                names = f"one of the tools {', '.join(list(self.position)[:40])}"
                raise ContractError(f"ToolSelectionPolicy: an action must be a ToolCall of {names}; got {call!s:.200}.")
            row = [self.position[call.tool]]
            for choice in self.choices[row[0]]:
                index = choice.index(call.arguments)
                if index is None and (not partial or choice.name in call.arguments):
                    listed = ["left out" if value is ABSENT else value for value in choice.values]
                    name = f"ToolSelectionPolicy: {call.tool}.{choice.name}"
                    raise ContractError(f"{name} must be one of {listed}; got {call}.")
                row.append(-1 if index is None else index)
            rows.append(row)
        width = max(map(len, rows), default=1)
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int64).view(-1, width)

    def call(self, steps: Sequence[int], given: Mapping[str, Any]) -> ToolCall:
        """The call of a row of steps, with given values. Names that the tool lacks, or that a policy decides, are ignored."""
        free, constants, _ = self._given[steps[0]]
        arguments = {name: given[name] for name in free if name in given} | dict(constants)
        for choice, step in zip(self.choices[steps[0]], steps[1:], strict=False):
            if choice.values[step] is not ABSENT:
                arguments[choice.name] = choice.values[step]
        return ToolCall(tool=self.tools[steps[0]].name, arguments=arguments)

    def calls(self, fill: Fill, states: Any, rows: Tensor, steps: Int64[Tensor, "N T"]) -> list[list[ToolCall]]:
        """The calls of each state, with the values of `fill`. Warns if a required value is never given."""
        calls: list[list[ToolCall]] = [[] for _ in states]
        filled: dict[tuple[int, int], Mapping[str, Any]] = {}  # the calls of a group often agree
        for row, taken in zip(rows.tolist(), steps.tolist(), strict=True):
            tool, key = self.tools[taken[0]], (row, taken[0])
            if key not in filled:
                filled[key] = fill(states[row], tool)
            calls[row].append(self.call(taken, filled[key]))
            *_, required = self._given[taken[0]]
            for name in required:
                self._num_missing[tool.name, name] += -math.inf if name in filled[key] else 1
                if self._num_missing[tool.name, name] == NUM_CALLS and not self._has_warned:
                    self._has_warned = True
                    warn_user(
                        f"ToolSelectionPolicy: fill gave no value for the required parameter {name} in {NUM_CALLS} calls of "
                        f"{tool.name}, and such calls fail. Pass fill=..., a function (state, tool) -> values. Others are "
                        "not reported."
                    )
        return calls
