"""One reward function: its arguments, selected by the names of its parameters, and its return values."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from adapters.llm.completions import Completion
from adapters.llm.prompts.states import PromptState, prompt_of
from grpo.arguments import Settings, describe
from grpo.errors import ConfigError, GRPOError, RewardError
from grpo.rewards import Call, PlannedCalls, is_async

OF_ALL_ROWS = ("prompts", "completions", "completion_ids")
"""Parameter names of functions that are called once with lists. Column names are allowed too."""
OF_ONE_ROW = ("prompt", "completion")
"""Parameter names of functions that are called for each row. Column names are allowed too."""
OBJECTS_OF_ALL_ROWS = ("states", "actions")
"""The trainer's objects in lists. A column of this name takes their place. `**kwargs` does not receive the objects, because TRL
does not pass them."""
OBJECTS_OF_ONE_ROW = ("state", "action")
"""The trainer's objects of a row, as `OBJECTS_OF_ALL_ROWS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """All arguments that N rows offer to reward functions."""

    of_all_rows: dict[str, list[Any]]
    """Arguments by name for functions that are called once: lists with N entries."""
    of_one_row: dict[str, list[Any]]
    """Arguments by name for functions that are called for each row: lists with one entry per row."""
    objects: dict[str, list[Any]]
    """The trainer's states and actions, by the names that ready-made verifiers have for them, whatever the columns are."""
    columns: frozenset[str]
    """Names of the columns."""
    num_rows: int
    """Number of rows, N."""

    @classmethod
    def made_of(cls, states: Sequence[PromptState], actions: Sequence[Completion], prompt_column: str) -> "Offer":
        """Collect the arguments from states and completions."""
        for row, action in enumerate(actions):
            if not isinstance(action, Completion):
                raise RewardError(
                    f"CompletionRewards: actions must be Completions; got {describe(action)} at row {row}."
                )
        prompts = [prompt_of(state, prompt_column) for state in states]
        columns = _columns_of(states)
        texts = [action.text for action in actions]
        messages = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        whole = (prompts, messages, [list(action.token_ids) for action in actions])
        objects: tuple[list[Any], list[Any]] = (list(states), list(actions))
        of_all = dict(zip(OBJECTS_OF_ALL_ROWS, objects, strict=True))
        of_one = dict(zip(OBJECTS_OF_ONE_ROW, objects, strict=True))
        return cls(
            of_all_rows=of_all | columns | dict(zip(OF_ALL_ROWS, whole, strict=True)),
            of_one_row=of_one | columns | dict(zip(OF_ONE_ROW, (prompts, texts), strict=True)),
            objects=of_all | of_one,
            columns=frozenset(columns),
            num_rows=len(prompts),
        )


class CompletionFunction:
    """A reward function, and how it is called. The signature of the function is read once.

    Args:
        name: Name of the function in messages and metrics.
        function: The function. It takes arguments by name, see `CompletionRewards`.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.is_async = is_async(function)
        self._function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:
            raise ConfigError(
                f"Reward function {name} must have a signature that Python can read; it has none. Wrap it in a def."
            ) from error
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._named = frozenset(p.name for p in named)
        self._required = [p.name for p in named if p.default is p.empty]
        self._takes_the_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        # a function of this package reads the whole row, and no column may take its place
        self._is_ready_made = isinstance(_wrapped(function), Settings)
        names = [*OF_ONE_ROW, *OBJECTS_OF_ONE_ROW], [*OF_ALL_ROWS, *OBJECTS_OF_ALL_ROWS]
        # beside "completions", "state" can only be a column
        is_of_one, is_of_all = (not self._named.isdisjoint(kind) for kind in (OF_ONE_ROW, OF_ALL_ROWS))
        if not is_of_one and not is_of_all:
            is_of_one, is_of_all = (
                not self._named.isdisjoint(kind) for kind in (OBJECTS_OF_ONE_ROW, OBJECTS_OF_ALL_ROWS)
            )
        self.is_per_row = is_of_one
        is_of_all = is_of_all or (self._takes_the_rest and not is_of_one)
        if is_of_one == is_of_all or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ConfigError(
                f"Reward function {name}{inspect.signature(function)} must name its arguments: {', '.join(names[1])} "
                f"for one call with lists, or {', '.join(names[0])} for a call per row. Columns can be named in both cases. "
                "Rename its parameters, and do not mix the two kinds."
            )

    def planned(self, offer: Offer) -> PlannedCalls:
        """The calls for these rows, whose answers become one number per row. Errors name the function, and the row if it is
        called per row.
        """
        calls = self._arguments(offer)
        function = self._await_one if self.is_async else self._ask_one
        names = [f"{self.name} at row {row}" for row in range(len(calls))] if self.is_per_row else [self.name]
        named = [
            Call(name=name, function=function, arguments=(name, arguments))
            for name, arguments in zip(names, calls, strict=True)
        ]
        return PlannedCalls(calls=named, combine=lambda answers: self.rewards(answers, offer.num_rows))

    def _arguments(self, offer: Offer) -> list[dict[str, Any]]:
        """Keyword arguments of each call: one call with lists, or one call per row. Functions may change the lists."""
        offered = offer.of_one_row if self.is_per_row else offer.of_all_rows
        if self._is_ready_made:
            offered = offered | offer.objects
        missing = [name for name in self._required if name not in offered]
        if missing:
            raise RewardError(
                f"Reward function {self.name} needs {', '.join(missing)}; the rows offer {', '.join(sorted(offered))}. "
                "Add the column to every row, or give the parameter a default."
            )
        only_by_name = {*OBJECTS_OF_ALL_ROWS, *OBJECTS_OF_ONE_ROW} - offer.columns
        rest = offered.keys() - only_by_name if self._takes_the_rest else frozenset[str]()
        wanted = [name for name in offered if name in self._named or name in rest]
        if self.is_per_row:
            return [{name: offered[name][row] for name in wanted} for row in range(offer.num_rows)]
        return [{name: list(offered[name]) for name in wanted}]

    def _ask_one(self, name: str, arguments: dict[str, Any]) -> Any:
        with self._named_in_errors(name):
            return self._function(**arguments)

    async def _await_one(self, name: str, arguments: dict[str, Any]) -> Any:
        with self._named_in_errors(name):
            return await self._function(**arguments)

    def rewards(self, answers: Sequence[Any], num_rows: int) -> Float64[Tensor, " N"]:
        """Convert the answers to one number per row. None becomes NaN, which means "does not apply".

        NaN that the function returned is an error. It becomes infinity, so that it differs from None, and the trainer's
        `reward.non_finite` decides what happens.
        """
        numbers = answers if self.is_per_row else self._one_per_row(answers[0], num_rows)
        return torch.tensor([self._number(number, row) for row, number in enumerate(numbers)], dtype=torch.float64)

    def _one_per_row(self, answer: Any, num_rows: int) -> Sequence[Any]:
        numbers = answer.tolist() if isinstance(answer, Tensor | np.ndarray) else answer
        if not isinstance(numbers, Sequence) or isinstance(numbers, str) or len(numbers) != num_rows:
            raise RewardError(
                f"Reward function {self.name} must return one number or None per row, a list of {num_rows}; got "
                f"{describe(answer)} for rows 0 to {num_rows - 1}."
            )
        return numbers

    def _number(self, value: Any, row: int) -> float:
        if value is None:
            return math.nan
        if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.dim() == 0):
            value = value.item()
        if not isinstance(value, Real):
            raise RewardError(
                f"Reward function {self.name} must return a number, or None where it does not apply; got "
                f"{describe(value)} at row {row}."
            )
        number = float(value)
        return math.inf if math.isnan(number) else number

    @contextmanager
    def _named_in_errors(self, name: str) -> Iterator[None]:
        """Name the function in its exceptions. They are not GRPOErrors, so `reward.on_failure` applies to them."""
        try:
            yield
        except GRPOError:
            raise
        except Exception as error:
            where = name.removeprefix(self.name)
            raise RuntimeError(f"{self.name} raised {type(error).__name__}: {error}{where}") from error


def function_name(function: Any) -> str:
    """Name of a function that was passed without a name."""
    function = _wrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))


def _wrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _columns_of(states: Sequence[PromptState]) -> dict[str, list[Any]]:
    """Each column of the rows as a list, except columns with the name of an argument such as `prompt`."""
    rows = [state if isinstance(state, Mapping) else {} for state in states]
    taken = (*OF_ALL_ROWS, *OF_ONE_ROW)
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in taken]
    for index, row in enumerate(rows):
        missing = [name for name in names if name not in row]
        if missing:
            raise RewardError(
                f"CompletionRewards: rows must have the same columns; row {index} lacks {', '.join(map(repr, missing))}. "
                "Set the column to None in rows to which it does not apply."
            )
    return {name: [row[name] for row in rows] for name in names}
