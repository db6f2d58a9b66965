"""Checks of arguments."""

from typing import Any

import numpy as np

from grpo.errors import ConfigError

from .conversion import describe


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
