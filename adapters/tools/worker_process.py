"""Confinement of a worker process: its user, its resource limits, and its end."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38


def prctl(option: int, value: int) -> str | None:
    """Call Linux's `prctl`. Returns the reason if it failed, otherwise None."""
    if not LINUX:
        return "only Linux can"
    libc = ctypes.CDLL(None, use_errno=True)
    return os.strerror(ctypes.get_errno()) if libc.prctl(option, value, 0, 0, 0) else None


def children() -> list[int]:
    """Process ids of this process's children, as Linux lists them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # not Linux, or a kernel without this list
        return []


def confine_process(setup: dict[str, Any], user: tuple[int, int] | None) -> list[str]:
    """Drop privileges and set limits for this process. Returns the restrictions that could not be applied.

    Args:
        setup: Settings from `workers.WorkerSource`.
        user: User id and group id to change to. None keeps the current user.

    Raises:
        PermissionError: The process cannot read the tools' folder after the change.
    """
    parent = os.getppid()
    problems = []
    os.setsid()
    os.chdir(setup["root"])
    os.umask(0o007)
    problems += set_limits(setup["limits"], own_user=user is not None)
    if user is None:
        problems.append(
            f"they run as user {os.geteuid()}, like the program itself: tools can read and change what it can, and the number "
            "of their processes is not limited; run the program as root on Linux for workers with user ids of their own"
        )
    else:
        try:
            uid, gid = user
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        except OSError as error:
            problems.append(f"they could not leave user {os.geteuid()} ({error}): tools can do what the program can")
    for option, value, name in (
        (PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS"),
        (PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER"),
        (PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG"),
    ):
        if failed := prctl(option, value):
            problems.append(f"{name} is not set ({failed})")
    if os.getppid() != parent:
        raise RuntimeError("the fork server is gone")
    if not os.access(setup["root"], os.R_OK | os.X_OK):
        raise PermissionError(
            f"root={setup['root']} must be readable by user {os.geteuid()}, the workers' user; make the folder and its "
            "parent folders readable (chmod o+rx), or use another root"
        )
    return problems


def set_limits(limits: dict[str, Any], *, own_user: bool) -> list[str]:
    """Set hard resource limits. Returns the limits that could not be set."""
    import resource  # Unix only; other systems may import this module

    used = 0
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        used = 1024 * int(next(line for line in lines if line.startswith("VmData:")).split()[1])
    wanted = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": limits["file_bytes"], "RLIMIT_NOFILE": limits["open_files"]}
    if limits["memory_bytes"] is not None:
        wanted["RLIMIT_DATA"] = used + limits["memory_bytes"]
    if own_user:  # RLIMIT_NPROC counts all processes of a user, and does not apply to root
        wanted["RLIMIT_NPROC"] = limits["processes"]
    problems = []
    for name, value in wanted.items():
        if value is not None:
            try:
                resource.setrlimit(getattr(resource, name), (value, value))
            except (OSError, ValueError) as error:
                problems.append(f"{name}={value} is not set ({error})")
    return problems
