"""Warnings about prompts, each kind of which is given once."""

import re

from grpo.errors import warn_user


class SaidOnce:
    """Warns of each kind of mistake with prompts once. Two messages are of one kind if only names and numbers differ."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def __call__(self, message: str) -> None:
        """Warn, unless a message of this kind was given."""
        kind = re.sub(r"state \d+|'.*?'|\d+|\[.*?\]", "", message)[:40]
        if kind not in self._kinds:
            self._kinds.add(kind)
            warn_user(f"HFPolicy: {message} (This warning is given once.)")
