"""What workers may reach: one file per kind of confinement, each a class with the methods of `user.Confinement`.

Every kind also has what `process` gives: a user id per worker where the program is root, resource limits, no capabilities.

A fork server loads this package without `adapters.tools`, so it imports only the standard library.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from .bubblewrap import Bubblewrap
from .landlock import Landlock
from .process import drop_privileges, set_limits, take_user
from .user import Confinement

Kind = Literal["bubblewrap", "landlock", "user"]
"""Kinds of confinement, the strictest first."""

KINDS: Mapping[Kind, Confinement] = {"bubblewrap": Bubblewrap(), "landlock": Landlock(), "user": Confinement()}

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/nix/store", "/gnu/store")


def choose(wanted: Literal["auto"] | Kind) -> tuple[Kind | None, list[str]]:
    """The wanted kind, or the first that works. Returns the kind, or None, and why kinds do not work."""
    reasons: list[str] = []
    for kind, confinement in KINDS.items():
        if wanted in ("auto", kind):
            reason = confinement.unavailable()
            if reason is None:
                return kind, reasons
            reasons.append(f"{kind}: {reason}")
    return None, reasons


def readable_paths(more: Iterable[str]) -> list[str]:
    """What tools may read besides their folder: the system's programs, Python, `sys.path`, imported packages, and `more`.

    What a link points to is included, because the link alone may be in a folder that is readable.
    """
    interpreter = [Path(sys.executable)]
    while interpreter[-1].is_symlink():
        interpreter.append(Path(os.path.normpath(interpreter[-1].parent / interpreter[-1].readlink())))
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *interpreter, *sys.path]
    specs = (getattr(module, "__spec__", None) for name, module in list(sys.modules.items()) if "." not in name)
    packages = [path for spec in specs if spec is not None for path in spec.submodule_search_locations or ()]
    programs = [path for name in ("PATH", "LD_LIBRARY_PATH") for path in os.environ.get(name, "").split(":") if path]
    named = (*python, *packages, *programs, *_SYSTEM, "/etc/resolv.conf", *more)
    found = {Path(path).absolute() for path in named}
    here = {path for path in found | {path.resolve() for path in found} if os.access(path, os.R_OK)}
    return sorted(str(path) for path in here if not (here & {*path.parents} - {Path("/")}))


def confine(setup: dict[str, Any], user: tuple[int, int] | None) -> list[str]:
    """Confine this process, a new worker in its folder. Returns what does not work as intended, as ends of a sentence.

    `user` has the user id and group id to change to. None keeps the current user.

    Raises:
        OSError: The tools' folder is unreadable, or the kind of confinement does not work.
    """
    parent = os.getppid()
    os.setsid()
    os.umask(0o007)
    set_limits(setup["limits"], own_user=user is not None)
    python = [path for path in setup["python"] if os.access(path, os.R_OK)]
    problems = []
    if user is not None:
        take_user(user)
    else:
        like = "like the program itself: tools can read and change what it can, " if setup["kind"] == "user" else ""
        problems.append(
            f"they run as user {os.geteuid()}, {like}and the number of their processes is not limited; {setup['no_own_users']}"
        )
    problems += drop_privileges()
    if os.getppid() != parent:
        raise RuntimeError("the fork server is gone")
    kind: Kind = setup["kind"]
    KINDS[kind].enter(setup["root"], setup["readable"])
    problems = [f"are less confined than intended: {problem}" for problem in problems]
    if not os.access(setup["root"], os.R_OK | os.X_OK):
        raise PermissionError(
            f"root={setup['root']} must be readable by user {os.geteuid()}, the workers' user; make the folder and its "
            "parent folders readable (chmod o+rx), or use another root"
        )
    if unreadable := [path for path in python if not os.access(path, os.R_OK)]:
        problems.append(
            f"cannot read all of Python: user {os.geteuid()}, the workers' user, must be able to read {unreadable[0]}. A "
            "call fails if it imports a module that is not imported yet, such as a time zone or a codec. Make the folder "
            "and its parent folders readable (chmod o+rx), use a Python elsewhere, or set WorkerLimits(first_uid=None)"
        )
    return problems
