"""Confinement of a worker process: its user, its resource limits, and its end."""

import contextlib
import ctypes
import os
import shutil
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


def enter_root(setup: dict[str, Any], user: tuple[int, int] | None = None) -> None:
    """Make the tools' folder the working directory. A folder of the executor is created again if a tool has removed it.

    Args:
        setup: Settings from `workers.WorkerSource`.
        user: User id and group id of the workers, if this process has not changed to them yet.

    Raises:
        FileNotFoundError: The folder is gone, and the executor did not create it.
    """
    try:
        os.chdir(setup["root"])
    except FileNotFoundError:
        if not setup["own_root"]:
            raise FileNotFoundError(
                f"root={setup['root']} must exist, but it is gone: a tool or another program removed it. Create it again"
            ) from None
        make_root(setup["root"], user)
        os.chdir(setup["root"])


def make_root(root: str, user: tuple[int, int] | None) -> None:
    """Create the tools' folder if it is missing, for the workers' group if they have user ids of their own."""
    Path(root).mkdir(mode=0o700, exist_ok=True)
    if user is not None:
        os.chown(root, 0, user[1])
        Path(root).chmod(0o2770)  # the workers share a group, which owns their files


def take_user(user: tuple[int, int]) -> None:
    """Change this process to a user id and a group id, without other groups."""
    uid, gid = user
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def why_not_user(user: tuple[int, int]) -> str | None:
    """Try to start a process of this user and group, and to end it. Returns the reason if that fails, otherwise None."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            take_user(user)
            status = 0
        except OSError as error:
            status = error.errno or 1
        finally:
            os._exit(status)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        os.kill(pid, 0)  # checks the permission; the process has ended, but is not reaped yet
    except PermissionError as error:
        return f"cannot end processes of user {user[0]} ({error.strerror})"
    finally:
        os.waitpid(pid, 0)
    if ended is not None and ended.si_status != 0:
        return f"cannot change to user {user[0]} ({os.strerror(ended.si_status)})"
    return None


def confine_process(setup: dict[str, Any], user: tuple[int, int] | None) -> list[str]:
    """Drop privileges and set limits for this process. Returns what does not work as intended, as ends of a sentence.

    Args:
        setup: Settings from `workers.WorkerSource`.
        user: User id and group id to change to. None keeps the current user.

    Raises:
        PermissionError: After the change, the process cannot read the tools' folder, or would run another program than the
            executor's user.
        FileNotFoundError: The tools' folder is gone.
    """
    parent = os.getppid()
    os.setsid()
    enter_root(setup, user)
    os.umask(0o007)
    problems = set_limits(setup["limits"], own_user=user is not None)
    interpreter = [path for path in interpreter_paths() if os.access(path, os.R_OK)]
    if user is None:
        reason = setup.get("no_own_users", "run the program as root on Linux for workers with user ids of their own")
        problems.append(
            f"they run as user {os.geteuid()}, like the program itself: tools can read and change what it can, and the number "
            f"of their processes is not limited; {reason}"
        )
    else:
        take_user(user)
    for option, value, name in (
        (PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS"),
        (PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER"),
        (PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG"),
    ):
        if failed := prctl(option, value):
            problems.append(f"{name} is not set ({failed})")
    problems = [f"are less confined than intended: {problem}" for problem in problems]
    if os.getppid() != parent:
        raise RuntimeError("the fork server is gone")
    if not os.access(setup["root"], os.R_OK | os.X_OK):
        raise PermissionError(
            f"root={setup['root']} must be readable by user {os.geteuid()}, the workers' user; make the folder and its "
            "parent folders readable (chmod o+rx), or use another root"
        )
    if user is not None:
        check_programs(setup["programs"])
        if unreadable := [path for path in interpreter if not os.access(path, os.R_OK)]:
            problems.append(
                f"cannot read all of Python: user {os.geteuid()}, the workers' user, must be able to read {unreadable[0]}. A "
                "call fails if it imports a module that is not imported yet, such as a time zone or a codec. Make the folder "
                "and its parent folders readable (chmod o+rx), use a Python elsewhere, or set WorkerLimits(first_uid=None)"
            )
    return problems


def interpreter_paths() -> list[str]:
    """The interpreter and the folders of its modules."""
    homes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return [sys.executable, *(path for path in sys.path if any(Path(path).is_relative_to(home) for home in homes))]


def check_programs(programs: dict[str, tuple[str, str]]) -> None:
    """Check that this process's user runs the same programs as the executor's user.

    Args:
        programs: Name and path of each tool's program, as the executor's user finds it, by tool.

    Raises:
        PermissionError: This user would run another program, or none.
    """
    for tool, (program, path) in programs.items():
        found = shutil.which(program)
        if found != path:
            raise PermissionError(
                f"tool {tool}: the program {program} must be {path} for user {os.geteuid()} too, the workers' user; got "
                f"{found or 'no program'}. Make {path} executable for all users, or name another program"
            )


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
