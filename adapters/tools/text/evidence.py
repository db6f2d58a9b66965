"""Values in a request as evidence for the tools that take them.

Axes: B requests, K tools, C value texts.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.tools.catalogue.tools import ToolCatalogue

from .encoders import TextCache
from .fill import MAX_CHARACTERS, find_values, kind_taken

KINDS = ("number", "date", "text")
"""The kinds of values that are counted. All that `find_values` finds and that is no number, date or phrase is a text."""
MIN_CHARACTERS = 3
"""Enumerated values with fewer letters and digits, such as "a" or "in", are not looked for."""

_WORD = re.compile(r"[^\W_]+")


class Reading(NamedTuple):
    """What a request says."""

    counts: list[int]
    """Number of values of each kind."""
    values: list[int]
    """`value_places` of the values that the request contains."""
    tools: list[int]
    """For each of these values, and each tool that enumerates it, the index of the tool."""


class Evidence:
    """Reads requests for the tools of a catalogue.

        named(x, k)  = number of enumerated values of tool k that request x contains
        filled(x, k) = sum over the kinds of values of min(n, p) - max(r - n, 0)

    The kinds are numbers, dates and texts. n is the number of values of the kind in x, p the number of free parameters of k
    that take such values, and r the number of required parameters among those p.
    """

    def __init__(self, catalogue: ToolCatalogue) -> None:
        place = catalogue.value_places
        self._num_values = len(place)
        self._parameters = torch.zeros(len(catalogue), len(KINDS))
        self._required = torch.zeros(len(catalogue), len(KINDS))
        self._values: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
        self._tools: defaultdict[int, list[int]] = defaultdict(list)
        for row, (tool_name, tool) in enumerate(catalogue.items()):
            required = tool.required_free
            for name in tool.free_parameters:
                kind = kind_taken(name, tool.properties.get(name, {}))
                if kind is not None:
                    self._parameters[row, KINDS.index(kind)] += 1
                    self._required[row, KINDS.index(kind)] += name in required
            for choice in catalogue.choices[tool_name]:
                for value, text in zip(choice.values, choice.texts, strict=True):
                    words = _words(value) if isinstance(value, str) else ()
                    if sum(map(len, words)) >= MIN_CHARACTERS:
                        self._values[words].add(place[text])
                        self._tools[place[text]].append(row)
        self._lengths = sorted({len(words) for words in self._values})
        self._read = TextCache(self._readings)

    def __call__(self, texts: Sequence[str]) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K"], Float[Tensor, "B C"]]:
        """`named` and `filled` of each tool, and for each value text 1 if the request contains its value, otherwise 0."""
        readings = self._read(texts)
        named = _counted([reading.tools for reading in readings], len(self._required))
        contained = _counted([reading.values for reading in readings], self._num_values)
        counts = torch.tensor([reading.counts for reading in readings], dtype=torch.float32).view(-1, 1, len(KINDS))
        filled = torch.minimum(counts, self._parameters) - (self._required - counts).clamp(min=0)
        return named, filled.sum(2), contained

    def _readings(self, texts: Iterable[str]) -> Iterable[Reading]:
        for text in texts:
            shown = text[:MAX_CHARACTERS]
            found = [one.kind for one in find_values(shown) if one.kind != "phrase"]
            kinds = Counter(kind if kind in KINDS else "text" for kind in found)
            words = _words(shown)
            parts = (words[i : i + length] for length in self._lengths for i in range(len(words)))
            values = sorted(set().union(*(self._values.get(part, ()) for part in parts)))
            tools = [tool for value in values for tool in self._tools[value]]
            yield Reading([kinds[kind] for kind in KINDS], values, tools)


def _counted(found: Sequence[Sequence[int]], size: int) -> Float[Tensor, "B size"]:
    """How often each row of `found` holds each number below `size`."""
    rows = torch.tensor([row for row, numbers in enumerate(found) for _ in numbers], dtype=torch.int64)
    columns = torch.tensor([number for numbers in found for number in numbers], dtype=torch.int64)
    return torch.zeros(len(found), size).index_put_((rows, columns), torch.tensor(1.0), accumulate=True)


def _words(text: str) -> tuple[str, ...]:
    """The words of a text, without case and a final "s": "Miles" and "mile" are the same word."""
    return tuple(word.removesuffix("s") for word in _WORD.findall(text.lower()))
