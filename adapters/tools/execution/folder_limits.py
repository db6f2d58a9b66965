"""Limits of what calls write to disk. Linux has no such limit for a folder, so the folders are measured while calls run."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from adapters.tools.errors import FolderFullError, RootFullError

ENTRY_BYTES = 4096
"""The least that a file, a folder or a link counts: a block of the disk. So their number has a limit too."""
Watch = Callable[[bool], None]
"""Is called with False while a call runs, and with True when it has returned. It may raise a `ToolError`."""
_SHARE = 10
"""A folder is measured again after this many times the CPU time of its last measurement."""


class FolderLimits:
    """Measures the tools' folder and the folders of calls. What was there when the executor began does not count.

    A file that a tool has removed, and still holds open, is in no folder and does not count.

    Args:
        root: The tools' folder.
        max_folder_bytes: Maximum size of the folder of a call. None: no limit.
        max_root_bytes: Maximum size of the tools' folder with all folders of calls. None: no limit.
    """

    def __init__(self, root: Path, max_folder_bytes: int | None, max_root_bytes: int | None) -> None:
        self._root = root
        self._max_folder = math.inf if max_folder_bytes is None else max_folder_bytes
        self._max_root = math.inf if max_root_bytes is None else max_root_bytes
        self._is_limited = not math.isinf(min(self._max_folder, self._max_root))
        self._given = bytes_in(root) if self._is_limited else 0
        self._in_root = _Measured(root, self._given + self._max_root)

    def of(self, folder: str | None) -> Watch:
        """A function that checks the limits for one call in this folder (None: in the tools' folder itself), from now on.

        Its argument says whether the call has returned. The call's folder is then measured anew, however long that takes; the
        tools' folder itself is not, because it may hold much that no call has written.

        The function raises a FolderFullError if the call has made its folder larger than the limit, and a RootFullError if the
        tools' folder is too large, and this call is not to blame. The latter may be raised here already.
        """
        if not self._is_limited:
            return lambda _: None
        self._check_root()
        # a call in a full folder may run, for example to remove files
        if folder is None:
            most = max(self._given + self._max_folder, self._in_root())
            size: Callable[[], int] = self._in_root
        else:
            most = max(self._max_folder, bytes_in(self._root / folder))
            size = _Measured(self._root / folder, most)

        def check(has_returned: bool) -> None:
            is_last = has_returned and folder is not None
            if (bytes_in(self._root / str(folder), most) if is_last else size()) > most:
                raise FolderFullError(
                    f"the files in its folder take more than {self._max_folder} bytes, so the call was ended. Its files stay; "
                    "remove some, or write less."
                )
            self._check_root()

        return check

    def _check_root(self) -> None:
        if self._in_root() > self._given + self._max_root:
            raise RootFullError(
                f"the files in {self._root}, with those of other calls, take more than {self._max_root} bytes. Remove some, or "
                "raise ExecutorOptions(max_root_bytes=...)."
            )


class _Measured:
    """The size of a folder, which threads measure together. A measurement ends early if the size is above `enough`."""

    def __init__(self, path: Path, enough: float) -> None:
        self._path, self._enough = path, enough
        self._size, self._until = 0, 0.0
        self._measuring = threading.Lock()

    def __call__(self) -> int:
        if self._measuring.acquire(blocking=self._until == 0.0):  # others take the last measurement
            try:
                if time.monotonic() >= self._until:
                    began = time.thread_time()  # not the time on the clock: a busy machine interrupts this thread
                    self._size = bytes_in(self._path, self._enough)
                    self._until = time.monotonic() + _SHARE * (time.thread_time() - began)
            finally:
                self._measuring.release()
        return self._size


def bytes_in(folder: str | Path, enough: float = math.inf) -> int:
    """Size on the disk of all that is in a folder, in bytes, or a size above `enough`. Links are not followed."""
    total, ahead, linked = 0, [os.fspath(folder)], set()
    while ahead and total <= enough:
        for entry in _entries(ahead.pop()):
            with contextlib.suppress(OSError):  # removed meanwhile
                about = entry.stat(follow_symlinks=False)
                if about.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                    if (about.st_dev, about.st_ino) in linked:
                        continue
                    linked.add((about.st_dev, about.st_ino))
                total += max(512 * about.st_blocks, ENTRY_BYTES)
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(entry.path)
    return total


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder, also if a tool has closed it and this program is not root. Empty if the folder is gone."""
    for _ in range(2):
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except PermissionError:
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW)
                try:
                    Path(f"/proc/self/fd/{descriptor}").chmod(0o700)  # never what a link leads to
                finally:
                    os.close(descriptor)
        except OSError:
            break
    return []
