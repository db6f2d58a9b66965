"""Checks of arguments."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from grpo.errors import ConfigError

from .conversion import describe

_T = TypeVar("_T")


def require_integers(owner: str, least: int, /, *, optional: bool = False, **named: Any) -> None:
    """Raise a ConfigError that names the argument, unless each value is an integer >= `least`, or None if `optional`."""
    for name, value in named.items():
        is_integer = not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
        if not is_integer and not (optional and value is None):
            kinds = f"an integer >= {least}{', or None' if optional else ''}"
            raise ConfigError(f"{owner}: {name} must be {kinds}; got {describe(value)}.")


def require_numbers(owner: str, /, **named: Any) -> None:
    """Raise a ConfigError that names the argument, unless each value is a finite number."""
    for name, value in named.items():
        if not is_finite(value):
            raise ConfigError(f"{owner}: {name} must be a finite number; got {describe(value)}.")


def require_instances(owner: str, kind: Any, what: str, /, **named: Any) -> None:
    """Raise a ConfigError that names the argument and `what` it must be, unless each value is an instance of `kind`."""
    for name, value in named.items():
        if not isinstance(value, kind):
            raise ConfigError(f"{owner}: {name} must be {what}; got {describe(value)}.")


def require_widths(owner: str, hidden: Any, /) -> None:
    """Raise a ConfigError unless `hidden`, the widths of a network's hidden layers, is a list of integers >= 1."""
    require_instances(owner, list | tuple, "a list of widths", hidden=hidden)
    widths: dict[str, Any] = {f"hidden[{i}]": width for i, width in enumerate(hidden)}
    require_integers(owner, 1, **widths)


def require_each(what: str, kind: type[_T], values: Any) -> list[_T]:
    """The values as a list. Raises a ConfigError that begins with `what`, unless they are a list of instances of `kind`."""
    is_list = isinstance(values, Iterable) and not isinstance(values, str)
    listed = list(values) if is_list else []
    wrong = [value for value in listed if not isinstance(value, kind)] if is_list else [values]
    if wrong:
        raise ConfigError(f"{what} must be a list of {kind.__name__} objects; got {wrong[0]!r:.200}.")
    return listed


def is_one_letter_off(name: str, right: str) -> bool:
    """Whether `name` is `right` with one letter more, less or replaced, or with two neighbours swapped.

    Example:
        >>> [is_one_letter_off(name, "state_keys") for name in ("state_key", "state_kyes", "state_keys", "states")]
        [True, True, False, False]
    """
    short, long = sorted((name, right), key=len)
    start = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[start:] == long[start + 1 :]
    is_swapped = short[start : start + 2] == long[start : start + 2][::-1] and short[start + 2 :] == long[start + 2 :]
    return name != right and (is_swapped or short[start + 1 :] == long[start + 1 :])


def require_count(name: str, value: Any) -> int:
    """Return an integer of at least 1 that fits into 64 bits.

    Raises:
        ConfigError: `value` is anything else.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 1 <= value < 2**63:
        shown = value if isinstance(value, int | float) else describe(value)
        raise ConfigError(f"{name} must be >= 1; got {shown}. Pass an integer below 2**63.")
    return int(value)


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number within the range of floats."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
