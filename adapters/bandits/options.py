"""Checks of arguments that several modules take."""

from typing import Any, get_args

from grpo.errors import ConfigError


def require_option(owner: str, name: str, value: str, literal: Any) -> None:
    """`value` is one of the words of a `Literal`.

    Raises:
        ConfigError: naming the words.
    """
    words = get_args(literal)
    if value not in words:
        raise ConfigError(f"{owner}: {name} must be {' or '.join(map(repr, words))}; got {value!r}.")


def require_discount(owner: str, discount: float) -> None:
    """A factor per pull that forgets, or at most remembers.

    Raises:
        ConfigError: outside (0, 1].
    """
    if not 0 < discount <= 1:
        raise ConfigError(f"{owner}: discount must lie in (0, 1], 1 = never forget; got {discount}.")
