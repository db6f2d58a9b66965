"""Confinement by the workers' user alone: the fallback, which works everywhere. The other kinds are derived from it."""

from collections.abc import Sequence


class Confinement:
    """Tools can reach what the workers' user can reach. A worker with a user id of its own can change only its own files."""

    def unavailable(self) -> str | None:
        """Why this machine lacks this kind. None if it works here."""
        return None

    def prefix(self, root: str, readable: Sequence[str]) -> list[str]:
        """Command before the fork server's command. `root` is the tools' folder; `readable` is what else tools may read."""
        return []

    def enter(self, root: str, readable: Sequence[str]) -> None:
        """Confine a worker, before its first call and after the change of its user. Raises OSError if that fails."""
