"""Checks of arguments that several modules share. Each raises `ConfigError` and names the owner, the argument and its value."""

import math
from typing import Any

from grpo.errors import ConfigError
from grpo.writing import describe


def require_integers(owner: str, least: int, /, *, optional: bool = False, **named: Any) -> None:
    """Check that every named value is an integer of at least `least`, or None if it is optional."""
    for name, value in named.items():
        if optional and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            alternative = ", or None" if optional else ""
            raise ConfigError(f"{owner}: {name} must be an integer >= {least}{alternative}; got {describe(value)}.")


def require_numbers(owner: str, **named: Any) -> None:
    """Check that every named value is a finite number."""
    for name, value in named.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < math.inf:
            raise ConfigError(f"{owner}: {name} must be a finite number; got {describe(value)}.")


def require_instance(owner: str, name: str, value: Any, kind: Any, spelled: str) -> None:
    """Check that a value is an instance of `kind`, which the error spells as `spelled`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{owner}: {name} must be {spelled}; got {describe(value)}.")
