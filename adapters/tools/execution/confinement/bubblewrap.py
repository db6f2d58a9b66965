"""Confinement by bubblewrap (`bwrap`): the workers see a few mounted folders and their own processes, and nothing else."""

import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .user import Confinement

_TMP_BYTES = str(256 * 2**20)
"""Size of the workers' own `/tmp`, and of their `/dev/shm`. Both are in memory."""
_NAMESPACES = ("bwrap", "--unshare-pid", "--unshare-ipc", "--as-pid-1")


class Bubblewrap(Confinement):
    """The process that starts the workers runs in mount, process and IPC namespaces of its own. The network is shared.

    It is process 1 of its namespace, so Linux ends all of its workers with it, and no worker can signal it.
    Where the program is not root, bubblewrap also makes a user namespace, and the workers keep the program's user id.
    """

    def unavailable(self) -> str | None:
        """Try to start a program."""
        if shutil.which("bwrap") is None:
            return "the program bwrap is missing; install the package bubblewrap"
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            return "bwrap never ends if the program ignores SIGCHLD; call signal.signal(signal.SIGCHLD, signal.SIG_DFL) before"
        trial = [*_NAMESPACES, "--ro-bind", "/", "/", *_tmpfs("/tmp"), "--proc", "/proc", "--dev", "/dev", "true"]  # fmt: skip
        run = subprocess.run(
            trial, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False
        )
        return None if run.returncode == 0 else f"bwrap does not work here ({run.stderr.strip()[:200]})"

    def prefix(self, root: str, readable: Sequence[str]) -> list[str]:
        """Mount the readable paths read-only and `root` writable, each under its own name, and parents before children."""
        mounts = {
            "/dev": ["--dev", "/dev"],
            "/dev/shm": _tmpfs("/dev/shm"),
            "/proc": ["--proc", "/proc"],
            "/tmp": _tmpfs("/tmp"),
        }
        mounts = {path: ["--ro-bind", path, path] for path in readable if not Path(path).is_relative_to(root)} | mounts
        if "/tmp" in readable:  # a module of the program may be there
            mounts["/tmp"] = ["--ro-bind", "/tmp", "/tmp", "--setenv", "TMPDIR", root]
        mounts[root] = ["--bind", root, root]
        above = {folder for path in mounts for folder in Path(path).parents[:-1]}
        for folder in above:  # bwrap would make these folders for root only
            if not any(folder.is_relative_to(path) for path in (*readable, root) if path != "/"):
                mounts.setdefault(str(folder), ["--perms", "0755", "--dir", str(folder)])
        return [*_NAMESPACES, *(word for path in sorted(mounts) for word in mounts[path]), "--"]


def _tmpfs(path: str) -> list[str]:
    return ["--perms", "1777", "--size", _TMP_BYTES, "--tmpfs", path]
