"""Checks of arguments that a run and code of a domain make. The algorithm does not use them."""

import math
from collections.abc import Callable, Iterable
from functools import wraps
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

from grpo.errors import ConfigError

from .conversion import describe
from .names import require_arguments

_T = TypeVar("_T")
Args = ParamSpec("Args")
Result = TypeVar("Result")


def with_checked_arguments(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Make a constructor or a function raise the error of `require_arguments`."""
    owner = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*args: Args.args, **named: Args.kwargs) -> Result:
        require_arguments(owner, function, args, named)
        return function(*args, **named)

    return checked


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


def require_instances(owner: str, kind: Any, what: str = "", /, **named: Any) -> None:
    """Raise a ConfigError that names the argument and `what` it must be, unless each value is an instance of `kind`.

    `kind` may be a `Literal` of words. The message then lists the words, and `what` is left out.
    """
    words = get_args(kind) if get_origin(kind) is Literal else ()
    what = f"one of {', '.join(map(repr, words))}" if words else what
    for name, value in named.items():
        if not (isinstance(value, str) and value in words if words else isinstance(value, kind)):
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


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number within the range of floats."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
