"""Tools that try to reach what workers must not reach, for the tests of confinement."""

import ctypes
import multiprocessing
import multiprocessing.synchronize
import os
import socket
import tempfile
from pathlib import Path
from typing import Any


def outcome_of(what: str, path: str) -> str:
    """Read or write a file, or list a folder. Returns what was read, "done", or the name of the error."""
    try:
        if what == "write":
            Path(path).write_text("written")
        elif what == "truncate":
            os.truncate(path, 0)
        elif what == "list":
            return ",".join(sorted(each.name for each in Path(path).iterdir()))
        else:
            return Path(path).read_text(errors="replace")
    except OSError as error:
        return type(error).__name__
    return "done"


def secrets(secret: str, program: int) -> list[str]:
    """Look for a secret in the environments of all processes, and try to look into the program. Returns what was seen."""
    seen = []
    for folder in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cmdline"):
            try:
                found = secret in (folder / name).read_text(errors="replace")
            except OSError:
                continue
            if found:
                seen.append(f"{folder.name}/{name}")
    for look in (
        lambda at: (at / "cwd").readlink(),
        lambda at: [file.readlink() for file in (at / "fd").iterdir()],
        lambda at: (at / "mem").open("rb"),
    ):
        try:
            seen.append(str(look(Path("/proc", str(program)))))
        except OSError:
            continue
    return seen


def visible_processes() -> list[int]:
    """Numbers of the processes that Linux lists."""
    return sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def outcome_of_signal(pid: int) -> str:
    """Send the signal 0, which only checks the permission."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return type(error).__name__
    return "sent"


def outcome_of_connection(path: str) -> str:
    """Connect to a socket in a file."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError as error:
            return type(error).__name__
    return "connected"


def temporary() -> dict[str, Any]:
    """Use a temporary file, and a lock in shared memory."""
    with tempfile.NamedTemporaryFile() as file:
        folder = str(Path(file.name).parent)
    try:
        with multiprocessing.Lock():
            locked = True
    except OSError:
        locked = False
    sizes = [os.statvfs(path).f_blocks * os.statvfs(path).f_frsize for path in ("/tmp", "/dev/shm")]
    return {"folder": folder, "locked": locked, "sizes": sizes}


def core_can_be_dumped() -> bool:
    """Whether other processes of this user may look into this process (PR_GET_DUMPABLE)."""
    return bool(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
