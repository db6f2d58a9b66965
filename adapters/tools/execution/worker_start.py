"""The confinement of a new worker process."""

import os
import shutil
from typing import Any

from .confinement import confinement_of
from .confinement.process import drop_privileges, set_limits, take_user
from .worker import enter


def confine(setup: dict[str, Any], user: tuple[int, int] | None) -> list[str]:
    """Confine this process, a new worker. Returns what does not work as intended, as ends of a sentence.

    `user` has the user id and group id to change to. None keeps the current user.

    Raises:
        OSError: The tools' folder is gone or unreadable, a program is another one, or the kind of confinement does not work.
    """
    parent = os.getppid()
    os.setsid()
    enter(setup, None)
    os.umask(0o007)
    problems = set_limits(setup["limits"], own_user=user is not None)
    python = [path for path in setup["python"] if os.access(path, os.R_OK)]
    if user is None:
        reach = (
            "like the program itself: tools can read and change what it can, and" if setup["kind"] == "user" else "and"
        )
        problems.append(
            f"they run as user {os.geteuid()}, {reach} the number of their processes is not limited; {setup['no_own_users']}"
        )
    else:
        take_user(user)
    problems += drop_privileges()
    if os.getppid() != parent:
        raise RuntimeError("the fork server is gone")
    confinement_of(setup["kind"]).enter(setup["root"], setup["readable"])
    problems = [f"are less confined than intended: {problem}" for problem in problems]
    if not os.access(setup["root"], os.R_OK | os.X_OK):
        raise PermissionError(
            f"root={setup['root']} must be readable by user {os.geteuid()}, the workers' user; make the folder and its "
            "parent folders readable (chmod o+rx), or use another root"
        )
    if user is not None:
        check_programs(setup["programs"])
    if unreadable := [path for path in python if not os.access(path, os.R_OK)]:
        problems.append(
            f"cannot read all of Python: user {os.geteuid()}, the workers' user, must be able to read {unreadable[0]}. A "
            "call fails if it imports a module that is not imported yet, such as a time zone or a codec. Make the folder "
            "and its parent folders readable (chmod o+rx), use a Python elsewhere, or set WorkerLimits(first_uid=None)"
        )
    return problems


def check_programs(programs: dict[str, tuple[str, str]]) -> None:
    """Raise PermissionError if this process would run another program than the executor's user, or none.

    `programs` has the name and the path of each tool's program, as the executor's user finds it, by tool.
    """
    for tool, (program, path) in programs.items():
        found = shutil.which(program)
        if found != path:
            raise PermissionError(
                f"tool {tool}: the program {program} must be {path} for user {os.geteuid()} too, the workers' user; got "
                f"{found or 'no program'}. Make {path} executable for all users, or name another program"
            )
