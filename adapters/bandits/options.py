"""Argument checks that several modules share."""

from typing import Any, get_args

from grpo.arguments import require_numbers
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
    require_numbers(owner, discount=discount)
    if not 0 < discount <= 1:
        raise ConfigError(f"{owner}: discount must lie in (0, 1], where 1 never forgets; got {discount}.")
