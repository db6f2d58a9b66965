"""What workers may reach: one file per kind of confinement, all behind the interface `Confinement`.

Every kind also has what `process` gives: a user id per worker where the program is root, resource limits, no capabilities.

A fork server loads this package without `adapters.tools`, so it imports only the standard library.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol, assert_never, get_args

from .bubblewrap import Bubblewrap
from .landlock import Landlock
from .user import User

Kind = Literal["bubblewrap", "landlock", "user"]
"""Kinds of confinement, the strictest first."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/nix/store", "/gnu/store")


class Confinement(Protocol):
    """One kind of confinement."""

    def unavailable(self) -> str | None:
        """Why this machine lacks this kind. None if it works here."""
        ...

    def prefix(self, root: str, readable: Sequence[str]) -> list[str]:
        """Command that precedes the command of the process that starts the workers. Empty if there is none.

        Args:
            root: The tools' folder.
            readable: Other files and folders that tools may read.
        """
        ...

    def enter(self, root: str, readable: Sequence[str]) -> None:
        """Confine a worker process, before its first call.

        Raises:
            OSError: The process is not confined.
        """
        ...


def confinement_of(kind: Kind) -> Confinement:
    """The confinement of this kind."""
    match kind:
        case "bubblewrap":
            return Bubblewrap()
        case "landlock":
            return Landlock()
        case "user":
            return User()
        case _:
            assert_never(kind)


def choose(wanted: Literal["auto"] | Kind) -> tuple[Kind | None, list[str]]:
    """The wanted kind, or the first that works. Returns the kind, or None, and why kinds do not work."""
    reasons: list[str] = []
    kinds: Sequence[Kind] = get_args(Kind) if wanted == "auto" else (wanted,)
    for kind in kinds:
        reason = confinement_of(kind).unavailable()
        if reason is None:
            return kind, reasons
        reasons.append(f"{kind}: {reason}")
    return None, reasons


def readable_paths(more: Iterable[str]) -> list[str]:
    """What tools may read besides their folder: the system's programs, Python, `sys.path`, imported packages, and `more`."""
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, sys.executable, *sys.path]
    specs = (getattr(module, "__spec__", None) for name, module in list(sys.modules.items()) if "." not in name)
    packages = [path for spec in specs if spec is not None for path in spec.submodule_search_locations or ()]
    programs = [path for name in ("PATH", "LD_LIBRARY_PATH") for path in os.environ.get(name, "").split(":") if path]
    found = {str(Path(path).absolute()) for path in (*python, *packages, *programs, *more)}
    found |= {*_SYSTEM, os.path.realpath("/etc/resolv.conf")}
    here = {Path(path) for path in found if os.access(path, os.R_OK)}
    return sorted(str(path) for path in here if not (here & {*path.parents} - {Path("/")}))
