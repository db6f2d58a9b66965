"""Harmless tools for the tests of the executor."""

import asyncio
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

CALLS: list[str] = []


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def nothing() -> None:
    """Return nothing."""


def echo(value: Any) -> Any:
    """Return what came."""
    return value


def nap(seconds: float) -> str:
    """Sleep, and leave a file that says so."""
    Path(f"begun-{os.getpid()}").touch()
    time.sleep(seconds)
    return "rested"


def meet(number: int) -> int:
    """Wait until `number` processes are here. Returns the process's own number."""
    Path(f"here-{os.getpid()}").touch()
    while len(list(Path().glob("here-*"))) < number:
        time.sleep(0.005)
    return os.getpid()


async def async_nap(seconds: float) -> str:
    """Sleep without holding anything up."""
    await asyncio.sleep(seconds)
    return "rested"


async def stubborn(seconds: float) -> str:
    """Sleep on when cancelled."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            await asyncio.sleep(until - time.monotonic())
        except asyncio.CancelledError:
            continue
    return "rested"


async def async_raise(message: str) -> None:
    """Raise."""
    raise KeyError(message)


async def async_exit() -> None:
    """Leave the program."""
    sys.exit(3)


def read(path: Path) -> str:
    """Read a file; the type of the path comes first."""
    return f"{type(path).__name__}:{path.read_text()}"


def where(path: str) -> str:
    """The path as it came."""
    return path


async def where_remote(path: Path) -> str:
    """The path as it came."""
    return str(path)


def leave(name: str) -> list[str]:
    """Leave a file in the working directory. Returns all names there."""
    Path(name).touch()
    return sorted(path.name for path in Path.cwd().iterdir())


def wheres(paths: Any) -> Any:
    """The paths as they came, with their types."""
    return json.loads(json.dumps(paths, default=lambda path: f"Path({path})"))


def who() -> dict[str, Any]:
    """What a worker is."""
    return {
        "uid": os.getresuid(),
        "gid": os.getresgid(),
        "groups": os.getgroups(),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "server_group": os.getpgid(os.getppid()),
        "cwd": str(Path.cwd()),
        "environment": sorted(os.environ),
        "initial_environment": _own("environ"),
        "umask": _umask(),
        "descriptors": [fd for fd in range(256) if _is_open(fd)],
        "recursion_limit": sys.getrecursionlimit(),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "data": resource.getrlimit(resource.RLIMIT_DATA),
        "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
        "processes": resource.getrlimit(resource.RLIMIT_NPROC),
        "cpu": resource.getrlimit(resource.RLIMIT_CPU),
        "no_new_privs": ctypes.CDLL(None).prctl(39, 0, 0, 0, 0),
        "modules": [name for name in ("torch", "adapters", "grpo", "__mp_main__") if name in sys.modules],
        "child_signal": str(signal.getsignal(signal.SIGCHLD)),
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0],
        "threads": threading.active_count(),
        "capabilities": _own("status").partition("CapEff:")[2].split()[0],
        "temporary": os.environ.get("TMPDIR"),
    }


def _own(name: str) -> str:
    try:
        return Path(f"/proc/self/{name}").read_text()
    except OSError:
        return ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def kill(pid: int) -> None:
    """Kill a process."""
    os.kill(pid, signal.SIGKILL)


def remember(text: str) -> list[str]:
    """Everything that this process was asked to remember."""
    CALLS.append(text)
    return CALLS


def spin(seconds: float) -> str:
    """Compute."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return "done"


def hold(number: int) -> int:
    """Open files and leave them open."""
    return len([os.open(os.devnull, os.O_RDONLY) for _ in range(number)])


def imports(name: str) -> str:
    """Import a module while running."""
    return __import__(name).__name__


def processes() -> list[tuple[int, int, int, str]]:
    """Number, parent, user and state of each process, as Linux lists them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            user = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("Uid:"))
        except OSError:  # it has ended
            continue
        found.append((int(folder.name), int(parent), int(user.split()[1]), state))
    return found


def descendants(pid: int) -> list[tuple[int, str]]:
    """Number and state of each process below one, of all users."""
    below: dict[int, list[tuple[int, str]]] = {}
    for number, parent, _, state in processes():
        below.setdefault(parent, []).append((number, state))
    found, ahead = [], [pid]
    while ahead:
        for number, state in below.get(ahead.pop(), []):
            found.append((number, state))
            ahead.append(number)
    return found


class Greeter:
    """A tool with something in it."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    def __call__(self, name: str) -> str:
        """Greet."""
        return f"{self.greeting} {name}"


def write_files(number: int, kibibytes: int, folder: str = ".", keep: bool = True) -> int:
    """Write files of this size, which stay or replace one another. Returns their number."""
    Path(folder).mkdir(exist_ok=True)
    for i in range(number):
        Path(folder, f"file-{i if keep else 0}").write_bytes(bytes(1024 * kibibytes))
    return number


def write_for_ever(folder: str = ".", pause: float = 0.0) -> None:
    """Write one file of a mebibyte after another, with a pause in seconds after each."""
    Path(folder).mkdir(exist_ok=True)
    for i in range(10**9):
        Path(folder, f"file-{i}").write_bytes(bytes(2**20))
        time.sleep(pause)


def remove_files() -> int:
    """Remove the files of the working directory. Returns their number."""
    names = [path for path in Path.cwd().iterdir() if path.is_file()]
    for path in names:
        path.unlink()
    return len(names)


def link_files() -> None:
    """Link to large folders, and give a file of a mebibyte ten names."""
    Path("usr").symlink_to("/usr")
    Path("file").write_bytes(bytes(2**20))
    for i in range(10):
        Path(f"name-{i}").hardlink_to("file")
