"""What every kind of confinement shares: the workers' users, and the limits of one process."""

import ctypes
import functools
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any

LINUX = sys.platform == "linux"
NUM_UIDS = 1000
PR_GET_CHILD_SUBREAPER = 37
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

_CAPABILITIES = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}


def why_no_own_users(first_uid: int | None) -> str | None:
    """Why workers cannot have user ids of their own, or None if they can."""
    if not LINUX or os.geteuid() != 0:
        return "run the program as root on Linux for workers with user ids of their own"
    if first_uid is None:
        return "set WorkerLimits.first_uid for workers with user ids of their own"
    held = int(_status("CapEff"), 16)
    if lacking := [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]:
        return f"root lacks {', '.join(lacking)}, the capabilities for workers with user ids of their own"
    for ids in ("uid_map", "gid_map"):  # a container may have few user ids
        ranges = [map(int, line.split()) for line in Path("/proc/self", ids).read_text().splitlines()]
        if not any(start <= first_uid and first_uid + NUM_UIDS <= start + count for start, _, count in ranges):
            return f"this user namespace lacks the {NUM_UIDS} ids from WorkerLimits.first_uid={first_uid} on"
    return None


def prctl(option: int, value: int) -> str | None:
    """Call Linux's `prctl`. Returns the reason if it failed, otherwise None."""
    if not LINUX:
        return "only Linux can"
    return os.strerror(ctypes.get_errno()) if _libc().prctl(option, value, 0, 0, 0) else None


def adopts_orphans() -> bool:
    """Whether this process still becomes the parent of its children's children when their parents end."""
    if not LINUX:
        return True
    flag = ctypes.c_int()
    _libc().prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0)
    return bool(flag.value)


def take_user(user: tuple[int, int]) -> None:
    """Change this process to a user id and a group id, without other groups."""
    uid, gid = user
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def drop_privileges() -> list[str]:
    """Give up all capabilities for ever, adopt orphans, and end with the parent process. Returns what did not work."""
    if LINUX:  # a worker that stays root, or was started with some, could read every process
        _libc().capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
    settings = ((PR_SET_NO_NEW_PRIVS, 1), (PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGKILL))
    reasons = [(option, prctl(option, value)) for option, value in settings]
    return [f"prctl({option}) does not work ({reason})" for option, reason in reasons if reason is not None]


def set_limits(limits: dict[str, Any], *, own_user: bool) -> None:
    """Set hard resource limits. A limit that is lower already stays."""
    import resource  # Unix only; other systems may import this module

    wanted = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": limits["file_bytes"], "RLIMIT_NOFILE": limits["open_files"]}
    if limits["memory_bytes"] is not None:
        used = 1024 * int(_status("VmData").split()[0]) if LINUX else 0
        wanted["RLIMIT_DATA"] = used + limits["memory_bytes"]
    if own_user:  # RLIMIT_NPROC counts all processes of a user, and does not apply to root
        wanted["RLIMIT_NPROC"] = limits["processes"]
    for kind, value in ((getattr(resource, name), value) for name, value in wanted.items() if value is not None):
        hard = resource.getrlimit(kind)[1]
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))


def children() -> list[int]:
    """Process ids of this process's children, as Linux lists them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # not Linux, or a kernel without this list
        return []


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _status(field: str) -> str:
    """A field of `/proc/self/status`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:"))
