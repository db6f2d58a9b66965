"""Argument checks that several modules share."""

import math
from numbers import Integral, Real
from typing import Any, get_args

from grpo.errors import ConfigError


def require_option(owner: str, name: str, value: Any, literal: Any) -> None:
    """Check that `value` is one of the options of a `Literal`.

    Raises:
        ConfigError: The value is not an option. The message lists the options.
    """
    words = get_args(literal)
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"{owner}: {name} must be {' or '.join(map(repr, words))}; got {value!r}.")


def require_discount(owner: str, discount: float) -> None:
    """Check that a discount factor lies in (0, 1].

    Raises:
        ConfigError: The discount is outside (0, 1].
    """
    require_real(owner, discount=discount)
    if not 0 < discount <= 1:
        raise ConfigError(f"{owner}: discount must lie in (0, 1], where 1 never forgets; got {discount}.")


def require_whole(owner: str, *, at_least: int = 1, **values: Any) -> None:
    """Check that each value is a whole number that is not too small.

    Raises:
        ConfigError: A value is not. The message names the argument.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
            raise ConfigError(f"{owner}: {name} must be a whole number >= {at_least}; got {value!r}.")


def require_real(owner: str, **values: Any) -> None:
    """Check that each value is a finite number.

    Raises:
        ConfigError: A value is not. The message names the argument.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ConfigError(f"{owner}: {name} must be a finite number; got {value!r}.")


def require_instance(owner: str, kind: type, **values: Any) -> None:
    """Check that each value is an instance of a class.

    Raises:
        ConfigError: A value is not. The message names the argument.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            raise ConfigError(f"{owner}: {name} must be a {kind.__name__}; got {type(value).__name__}.")
