"""Checks of constructor arguments."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

from grpo.errors import ConfigError

_T = TypeVar("_T")


def require_whole(owner: str, **values: Any) -> None:
    """Raise a ConfigError that names the argument, unless each value is a whole number >= 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
            raise ConfigError(f"{owner}.{name} must be a whole number >= 1; got {value!r}.")


def require_real(owner: str, **values: Any) -> None:
    """Raise a ConfigError that names the argument, unless each value is a finite number."""
    for name, value in values.items():
        if not is_finite(value):
            raise ConfigError(f"{owner}.{name} must be a finite number; got {value!r}.")


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number within the range of floats."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def require_type(owner: str, kind: type | tuple[type, ...], what: str, **values: Any) -> None:
    """Raise a ConfigError that names the argument and what it must be, unless each value is an instance of `kind`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise ConfigError(f"{owner}.{name} must be {what}; got {value!r:.100}.")


def require_each(what: str, kind: type[_T], values: Any) -> list[_T]:
    """The values as a list. Raises a ConfigError that begins with `what`, unless they are a list of instances of `kind`."""
    is_list = isinstance(values, Iterable) and not isinstance(values, str)
    listed = list(values) if is_list else []
    for wrong in [value for value in listed if not isinstance(value, kind)] if is_list else [values]:
        raise ConfigError(f"{what} must be a list of {kind.__name__} objects; got {wrong!r:.200}.")
    return listed
