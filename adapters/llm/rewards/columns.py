"""What a column of a row holds, as accepted answers: texts, numbers, missing values, and lists of them."""

import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from grpo.arguments import describe
from grpo.errors import RewardError


@dataclass(frozen=True, slots=True)
class Accepted:
    """One accepted answer."""

    text: str
    """The answer as text. Numbers are written out: 5 for 5.0, and 0.00001 for 1e-05."""
    number: Fraction | None = None
    """The value, if the column holds a number. None: it holds a text."""

    def equals(self, found: str) -> bool:
        """Whether a text is the answer. A number may be written in any way that Python reads: 5, 5.0 or 5e0."""
        if self.text == found:
            return True
        if self.number is None or len(found) > 400 or "_" in found:
            return False
        try:
            value = Decimal(found.strip())
        except InvalidOperation:  # the text is no number, so it does not equal one
            return False
        return value.is_finite() and abs(value.adjusted()) < 1000 and Fraction(value) == self.number


def accepted_answers(state: object, column: str, owner: object) -> tuple[Accepted, ...]:
    """The answers that a row's column accepts. An empty tuple: there is none, so a reward does not apply to the row.

    Texts, numbers of Python, torch, numpy and pandas, and lists, sets, arrays and series of them are converted. None, NaN and
    pandas' NA and NaT are missing values.
    """
    name = owner if isinstance(owner, str) else type(owner).__name__
    if not isinstance(state, Mapping):
        raise RewardError(
            f"{name} needs rows (dicts) with a column {column!r}; got {describe(state)} as a prompt. Pass rows."
        )
    if column not in state:
        raise RewardError(
            f"{name} needs the column {column!r}; the row has {', '.join(map(repr, state))}. Add the column, or pass column=..."
        )
    return answers_of(state[column], column, name)


def answers_of(value: Any, column: str, name: str) -> tuple[Accepted, ...]:
    """The answers that a value accepts; see `accepted_answers`."""
    several = _elements(value)
    found = [_one(each, column, name) for each in ([value] if several is None else several)]
    return tuple(answer for answer in found if answer is not None)


def _elements(value: Any) -> list[Any] | None:
    """The elements of a list, a set, an array or a series. None: the value is one value."""
    pandas = sys.modules.get("pandas")  # a value of pandas exists only if somebody has imported pandas
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() and value.element_size() < 4 else value.numpy()
    if pandas is not None and isinstance(value, pandas.Series | pandas.Index | pandas.api.extensions.ExtensionArray):
        return list(value)
    if isinstance(value, np.ndarray):
        return [value[()]] if value.ndim == 0 else list(value)
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | range):
        return list(value)
    return None


def _one(value: Any, column: str, name: str) -> Accepted | None:
    """One accepted answer. None: the value is missing."""
    pandas = sys.modules.get("pandas")
    if isinstance(value, Tensor) and value.dim() == 0:
        [value] = _elements(value) or [None]
    if value is None or (pandas is not None and (value is pandas.NA or value is pandas.NaT)):
        return None
    if isinstance(value, str):
        return Accepted(str(value))
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return Accepted(str(int(value)), Fraction(int(value)))
    if isinstance(value, float | np.floating):
        if math.isnan(value):
            return None
        if math.isfinite(value):
            text = np.format_float_positional(value, trim="-")  # the shortest text that gives the same float
            return Accepted(text, Fraction(text))
    if isinstance(value, Decimal) and value.is_nan():
        return None
    if isinstance(value, Decimal | Fraction) and not (isinstance(value, Decimal) and value.is_infinite()):
        return Accepted(format(value, "f") if isinstance(value, Decimal) else str(value), Fraction(value))
    raise RewardError(
        f"{name}: the column {column!r} must hold a text, a finite number, None, or a list of accepted answers; got "
        f"{describe(value)}. Convert the column to the text that a right completion has."
    )
