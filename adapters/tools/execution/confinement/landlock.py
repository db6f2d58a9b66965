"""Confinement by Landlock: Linux refuses a worker all files but a few folders, without any program or privilege."""

import ctypes
import os
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .user import Confinement

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on all machines."""
_PATH_BENEATH = _GET_VERSION = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
"""Rights that a single file can have. The others belong to folders."""
_ALL = (1 << 15) - 1
"""All rights of version 3."""
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


class Landlock(Confinement):
    """A worker reads the readable paths, `/proc` and a few devices, and writes in `root` only.

    Linux also refuses a worker the memory, the environment and the open files of processes outside. Signals to these processes
    are refused from version 6 on (Linux 6.12).
    """

    def unavailable(self) -> str | None:
        """Ask Linux for the version of Landlock."""
        if sys.platform != "linux":
            return "only Linux has Landlock"
        try:
            version = _version()
        except OSError as error:
            return f"Linux was built or started without Landlock ({error.strerror})"
        return None if version >= 3 else f"it needs version 3 (Linux 6.2); this Linux has version {version}"

    def enter(self, root: str, readable: Sequence[str]) -> None:
        """Restrict this process and all that it starts. There is no way back. Requires PR_SET_NO_NEW_PRIVS."""
        scoped = _ABSTRACT_SOCKETS | _SIGNALS if _version() >= 6 else 0
        attributes = struct.pack("=QQQ", _ALL, 0, scoped)
        ruleset = _call(_CREATE_RULESET, attributes, len(attributes), 0)
        rights = dict.fromkeys((*readable, "/proc"), _READ) | dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE)
        for path, allowed in [*rights.items(), (root, _ALL)]:
            try:
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:  # a path that this user cannot reach needs no rule
                continue
            allowed = allowed if Path(path).is_dir() else allowed & _FILE
            _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, beneath), 0)
            os.close(beneath)
        _call(_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)
        os.environ["TMPDIR"] = tempfile.tempdir = root  # an import may have asked `tempfile` for its folder already


def _version() -> int:
    return _call(_CREATE_RULESET, None, 0, _GET_VERSION)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call. Returns its result, or raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)
