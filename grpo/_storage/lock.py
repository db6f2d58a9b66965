"""A lock on a folder of checkpoints, so that two runs do not write to the same folder."""

import errno
import json
import os
import socket
import threading
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo.errors import CheckpointError, warn_user

fcntl: Any = import_module("fcntl") if os.name == "posix" else None
FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems that have no locks."""

_held: dict[str, int] = {}
"""The lock files that this process holds, with its id: a forked child inherits the dict, and not the locks."""
_guard = threading.Lock()


class FolderLock:
    """A context manager that holds a lock file. The system releases the lock if the process dies.

    The system's record locks do not stop the process that holds them, so that locks of this process are counted as well.
    Closing any descriptor of a locked file in the same process would release its lock: nothing else may open the file.

    Args:
        path: The lock file, in an existing folder. It is removed when the lock is released.
        purpose: What the holder of the lock writes to, for error messages.
    """

    def __init__(self, path: Path, purpose: Path) -> None:
        self._path, self._purpose = Path(os.path.realpath(path.parent)) / path.name, purpose
        self._descriptor: int | None = None

    def __enter__(self) -> "FolderLock":
        """Take the lock."""
        key = str(self._path)
        with _guard:
            if _held.get(key) == os.getpid():
                raise CheckpointError(
                    f"{self._purpose} is in use by another writer of this process. Let it finish, or choose another path."
                )
            try:
                self._descriptor = self._taken()
            except OSError as error:
                raise CheckpointError(f"Cannot lock {self._purpose} with {self._path}: {error}.") from error
            _held[key] = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release the lock and remove its file. A forked child leaves the lock to its parent."""
        descriptor, self._descriptor = self._descriptor, None
        with _guard:
            if descriptor is None or _held.get(str(self._path)) != os.getpid():
                return
            del _held[str(self._path)]
            try:
                if fcntl is None:  # Windows removes no open file, and has no lock that this could release too early
                    os.close(descriptor)
                    self._path.unlink(missing_ok=True)
                    return
                try:
                    if _is_same_file(descriptor, self._path):
                        self._path.unlink()
                finally:
                    os.close(descriptor)
            except OSError as problem:
                warn_user(
                    f"Cannot remove {self._path}: {problem}. The lock is released, and the next run takes the file over."
                )

    def _taken(self) -> int:
        """Return a descriptor of the locked file."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | FLAGS, 0o600)
            try:
                self._lock(descriptor)
                if _is_same_file(descriptor, self._path):
                    self._sign(descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its holder removed the file while this process was opening it

    def _lock(self, descriptor: int) -> None:
        if fcntl is None:
            self._warn("this system has no locks for files")
            return
        try:
            # the system drops a record lock with its process; a file that only exists would outlive a killed run
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD_BY_ANOTHER:
                raise CheckpointError(
                    f"{self._purpose} is in use by {_holder(descriptor)}. Wait until it has ended, stop it, or choose another "
                    "path."
                ) from error
            if error.errno not in WITHOUT_LOCKS:
                raise
            self._warn(f"its file system has no locks ({error.strerror})")

    def _warn(self, reason: str) -> None:
        warn_user(f"{self._purpose} cannot be locked: {reason}. Make sure that no other run writes to it.")

    def _sign(self, descriptor: int) -> None:
        """Write who holds the lock. On a full disk the lock holds without a name."""
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            FileIO(descriptor, "wb", closefd=False).write(json.dumps(holder).encode())


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        at_path = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), at_path)


def _holder(descriptor: int) -> str:
    """Describe the process that signed a lock file."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(holder['pid'])} on {holder['host']}, which started to write at {holder['started']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process, which has not written its name yet"
