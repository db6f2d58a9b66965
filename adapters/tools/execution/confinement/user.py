"""Confinement by the workers' user alone: the fallback, which works everywhere."""

from collections.abc import Sequence


class User:
    """Tools can reach what the workers' user can reach. A worker with a user id of its own can change only its own files."""

    def unavailable(self) -> str | None:
        """This kind works everywhere."""
        return None

    def prefix(self, root: str, readable: Sequence[str]) -> list[str]:
        """Nothing precedes the command."""
        del root, readable
        return []

    def enter(self, root: str, readable: Sequence[str]) -> None:
        """Do nothing: `process` has changed the user."""
