"""One reward function: the arguments it asks for by the names of its parameters, and what it may return."""

import asyncio
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
from adapters.llm.prompts import PromptState, prompt_of
from grpo.errors import ConfigError, GRPOError, RewardError
from grpo.writing import describe

OF_ALL_ROWS = ("prompts", "completions", "completion_ids", "states", "actions")
"""What a function that is called once may ask for, besides columns: one list each."""
OF_ONE_ROW = ("prompt", "completion", "state", "action")
"""What a function that is called for each row may ask for, besides columns."""
ONLY_BY_NAME = frozenset({"states", "actions", "state", "action"})
"""Not part of what `**kwargs` takes, which is what TRL passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What N rows offer to reward functions: lists of N by name."""

    of_all_rows: dict[str, list[Any]]
    of_one_row: dict[str, list[Any]]
    num_rows: int

    @classmethod
    def made_of(cls, states: Sequence[PromptState], actions: Sequence[Completion], prompt_column: str) -> "Offer":
        """Sort states and completions into arguments.

        Raises:
            ContractError: a state without a prompt.
            RewardError: an action that is no completion, or rows that differ in their columns.
        """
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
        whole = (prompts, messages, [list(action.token_ids) for action in actions], list(states), list(actions))
        single = (prompts, texts, list(states), list(actions))
        return cls(
            of_all_rows=columns | dict(zip(OF_ALL_ROWS, whole, strict=True)),
            of_one_row=columns | dict(zip(OF_ONE_ROW, single, strict=True)),
            num_rows=len(prompts),
        )


class CompletionFunction:
    """How a plain function is called, resolved once from its signature.

    Args:
        name: what messages and metrics call it.
        function: it takes arguments by name, see `CompletionRewards`.

    Raises:
        ConfigError: a signature that does not say what the function is to be called with.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.is_async = _is_async(function)
        self._function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:
            raise ConfigError(f"Reward function {name} has no signature to read. Wrap it in a def.") from error
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._named = frozenset(p.name for p in named)
        self._required = [p.name for p in named if p.default is p.empty]
        self._takes_the_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.is_per_row = not self._named.isdisjoint(OF_ONE_ROW)
        is_for_all = not self._named.isdisjoint(OF_ALL_ROWS) or (self._takes_the_rest and not self.is_per_row)
        if is_for_all == self.is_per_row or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ConfigError(
                f"Reward function {name}{inspect.signature(function)} must name what it wants: {', '.join(OF_ALL_ROWS)} to be "
                f"called once with lists, or {', '.join(OF_ONE_ROW)} to be called for each row; columns by their names in "
                "either case. Rename its parameters, and do not mix the two."
            )

    def calls(self, offer: Offer) -> list[dict[str, Any]]:
        """Keyword arguments: of the one call, or of one call per row. Lists are copies: a function may sort its own.

        Raises:
            RewardError: the function needs a column that the rows do not have.
        """
        offered = offer.of_one_row if self.is_per_row else offer.of_all_rows
        missing = [name for name in self._required if name not in offered]
        if missing:
            raise RewardError(
                f"Reward function {self.name} needs {', '.join(missing)}; the rows offer {', '.join(sorted(offered))}. "
                "Add the column to every row, or give the parameter a default."
            )
        rest = offered.keys() - ONLY_BY_NAME if self._takes_the_rest else frozenset[str]()
        wanted = [name for name in offered if name in self._named or name in rest]
        if self.is_per_row:
            return [{name: offered[name][row] for name in wanted} for row in range(offer.num_rows)]
        return [{name: list(offered[name]) for name in wanted}]

    def ask(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """The answer to each call, one after the other."""
        answers = []
        for index, arguments in enumerate(calls):
            with self._named_in_errors(index):
                answers.append(self._function(**arguments))
        return answers

    async def ask_async(self, index: int, arguments: dict[str, Any], timeout: float | None) -> Any:
        """The answer to one call.

        Raises:
            TimeoutError: naming the function, and the row where there is one.
        """
        with self._named_in_errors(index):
            deadline = asyncio.timeout(timeout)
            try:
                async with deadline:
                    return await self._function(**arguments)
            except TimeoutError as error:
                if deadline.expired():
                    raise TimeoutError(f"no answer within timeout={timeout} s") from error
                raise

    def rewards(self, answers: Sequence[Any], num_rows: int) -> Float64[Tensor, " N"]:
        """One number per row from all answers; NaN: does not apply.

        NaN that the function itself returned is a fault, and becomes infinity to be told apart: the trainer's
        `reward.non_finite` decides about it.

        Raises:
            RewardError: not one number or None per row.
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
    def _named_in_errors(self, index: int) -> Iterator[None]:
        """What a function raises does not say whose it was. No GRPOError: the trainer may forgive it (`reward.on_failure`)."""
        try:
            yield
        except GRPOError:
            raise
        except Exception as error:
            where = f" at row {index}" if self.is_per_row else ""
            raise RuntimeError(f"{self.name} raised {type(error).__name__}: {error}{where}") from error


def function_name(function: Any) -> str:
    """What a function is called by those who did not name it."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _is_async(function: Any) -> bool:
    """`async def`, also under `functools.partial`, and as `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _columns_of(states: Sequence[PromptState]) -> dict[str, list[Any]]:
    """Each column as a list, but for those whose names mean something else."""
    rows = [state if isinstance(state, Mapping) else {} for state in states]
    taken = (*OF_ALL_ROWS, *OF_ONE_ROW)
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in taken]
    for index, row in enumerate(rows):
        missing = [name for name in names if name not in row]
        if missing:
            raise RewardError(
                f"CompletionRewards: rows must have the same columns; row {index} lacks {', '.join(map(repr, missing))}. "
                "Give it None where a column does not apply."
            )
    return {name: [row[name] for row in rows] for name in names}
