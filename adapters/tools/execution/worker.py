"""The call loop of a worker process: run one call, answer with JSON, clean up, repeat.

A frame is a 4-byte length followed by the content. A fork server loads this module without `adapters.tools`.
"""

import contextlib
import functools
import inspect
import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..catalogue.arguments import ArgumentChecker  # noqa: TID252  # a fork server loads this file in another package
from .confinement.process import LINUX, adopts_orphans, children

LENGTH = struct.Struct(">I")
TOKEN_BYTES = 8
"""Length of the random token that precedes a request and its answer. An answer forged before the request lacks the token."""
OK, RETIRE = 1, 2
"""Flags in the byte after an answer's token. OK: the answer is an output, not an error. RETIRE: the worker must be replaced."""
PASSED_ON = (
    "InvalidArgumentsError", "PathOutsideRootError", "OutputTooLargeError", "InvalidOutputError", "ServerLostError",
)  # fmt: skip
"""Names of this package's errors that a tool may raise. The result then has an error of the same type."""
REPORTED = (*PASSED_ON, "ToolRaisedError", "WorkerLostError")
"""Names of the errors that a worker may report."""

_MAX_MESSAGE = 1000
_ENCODE = json.JSONEncoder(allow_nan=False).encode  # `json.dumps` would build a new encoder per call
_OFTEN_RESET = {
    getattr(signal, name) for name in ("SIGCHLD", "SIGPIPE", "SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
}
"""Signals whose handlers are reset also where Python has not seen a change, which C code may have made."""
_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP} if hasattr(signal, "SIGKILL") else set()
"""Signals whose handlers are reset after each call. A program that ignores SIGCHLD cannot read its children's status."""
_THREADS = Path("/proc/self/task")
"""One folder for each thread. Its number of links counts them, and two more."""
_LOOK_SECONDS = 0.1
_THREAD_SECONDS = 0.05
"""Time for a thread that a tool has joined to leave this folder."""


class PartOfFrameError(TimeoutError):
    """The time is up, and a part of a frame has arrived."""


def receive(
    connection: socket.socket,
    max_bytes: int = 2**20,
    deadline: float | None = None,
    watch: Callable[[], None] | None = None,
) -> bytes:
    """Read one frame. While it waits until the deadline, it calls `watch` every 0.1 seconds.

    Raises:
        EOFError: The other side is gone.
        TimeoutError: The frame was not complete at `deadline`, a time of `time.monotonic`.
        ValueError: The other side wrote a frame of more than `max_bytes`, or more than a frame.
    """
    data = bytearray()
    size = LENGTH.size
    look = math.inf if watch is None else time.monotonic() + _LOOK_SECONDS
    while len(data) < size:
        try:
            if watch is not None and time.monotonic() >= look:
                watch()
                look = time.monotonic() + _LOOK_SECONDS
            if deadline is not None:
                connection.settimeout(max(0.0, min(deadline, look) - time.monotonic()))
            part = connection.recv(65_536)
        except (TimeoutError, BlockingIOError):
            if deadline is not None and look < deadline:
                continue
            raise (PartOfFrameError if data else TimeoutError)() from None
        if not part:
            raise EOFError("it ended")
        data += part
        if len(data) >= LENGTH.size:
            size = LENGTH.size + LENGTH.unpack_from(data)[0]
        if size > max_bytes:
            raise ValueError(f"it wrote a frame of {size} bytes; at most {max_bytes} are read")
    if len(data) > size:
        raise ValueError("it wrote without having been asked")
    return bytes(data[LENGTH.size :])


def send(connection: socket.socket, content: bytes) -> None:
    """Write one frame."""
    connection.sendall(LENGTH.pack(len(content)) + content)


class CallError(Exception):
    """A call failed. Its arguments are the name of the error to report, one of `REPORTED`, and the message."""


class Worker:
    """Runs tool calls in a worker process, for the executor at the other end of the socket `answers`.

    `setup` has the settings of `workers.setup_of`.
    """

    def __init__(
        self,
        answers: socket.socket,
        setup: dict[str, Any],
        functions: dict[str, Callable[..., Any]],
        checkers: dict[str, ArgumentChecker],
    ) -> None:
        self.answers, self.setup, self.functions, self.checkers = answers, setup, functions, checkers
        self.alone = setup["no_own_users"] is None  # this process started every other process of its user
        self.environment = dict(os.environ)
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self.handlers = {number: handler for number, handler in handlers.items() if handler is not None}
        self.recursion_limit = sys.getrecursionlimit()
        self.irreversible = _irreversible()
        self.misplaced = False

    def serve(self) -> None:
        """Answer requests until the socket is closed."""
        process = os.getpid()
        with contextlib.suppress(EOFError):
            while True:
                request = receive(self.answers)
                limit_cpu(self.setup["limits"]["cpu_seconds"])
                flags = OK
                try:
                    content = self._call(*json.loads(request[TOKEN_BYTES:]))
                except CallError as error:
                    flags, content = 0, json.dumps(error.args).encode()
                if os.getpid() != process:  # the call has forked, and its child went on like a worker
                    os._exit(0)
                flags |= 0 if self._tidy() else RETIRE
                send(self.answers, request[:TOKEN_BYTES] + bytes([flags]) + content)

    def _call(self, name: str, arguments: dict[str, Any], folder: str | None) -> bytes:
        """Run one call. Returns the output as JSON."""
        try:
            root = enter(self.setup, folder)
        except OSError as error:
            self.misplaced = True
            raise CallError("WorkerLostError", message_of(error)) from error
        try:
            arguments = self.checkers[name].at(root)(arguments)
        except ValueError as error:
            raise CallError(getattr(error, "error", "InvalidArgumentsError"), str(error)[: 2 * _MAX_MESSAGE]) from error
        except BaseException as error:
            raise CallError("InvalidArgumentsError", f"the schema cannot be applied: {described(error)}") from error
        try:
            value = self.functions[name](**arguments)
            if inspect.iscoroutine(value):
                import asyncio

                value = asyncio.run(value)
        except BaseException as error:  # includes SystemExit and MemoryError: a tool must not end its worker by raising
            if type(error).__name__ in PASSED_ON and type(error).__module__ == "adapters.tools.errors":
                raise CallError(type(error).__name__, message_of(error)) from error
            raise CallError("ToolRaisedError", described(error)) from error
        sys.setrecursionlimit(self.recursion_limit)  # the executor can only read this depth
        return encode_output(value, self.setup["max_output_bytes"])

    def _tidy(self) -> bool:
        """Restore the process state from before the call. Returns whether that succeeded."""
        # The processes that the call left would count for this user until the worker ends.
        if not adopts_orphans() or _irreversible() != self.irreversible:
            return False
        try:
            self._end_children()
            os.umask(0o007)
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)
            for number, handler in self.handlers.items():
                # A system call for each of the signals would be slow.
                if number in _OFTEN_RESET or signal.getsignal(number) != handler:
                    signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            sys.setrecursionlimit(self.recursion_limit)
            if dict(os.environ) != self.environment:
                os.environ.clear()
                os.environ.update(self.environment)
            free = os.dup(self.answers.fileno())  # the lowest free descriptor
            os.close(free)
        except Exception:
            return False
        open_files = self.setup["limits"]["open_files"]
        return (open_files is None or free <= open_files / 2) and not self.misplaced and _has_one_thread()

    def _end_children(self) -> None:
        """Kill every process that the call started."""
        if self.alone:  # also those that are not children of this process
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # no child process: the usual case
            while True:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    listed = [-1] if self.alone else children()  # -1: every other process of this user
                    if not listed:
                        raise OSError("a process that cannot be found; the executor ends it with this one")
                    for pid in listed:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    os.waitpid(-1, 0)


def limit_cpu(seconds: int | None) -> None:
    """Set this process's limit of processor time for the next call."""
    if seconds is not None:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, hard))


def _irreversible() -> list[Any]:
    """What a process can lower and not raise again: its priority, its processors, and its limits except that of `limit_cpu`."""
    import resource

    processors = os.sched_getaffinity(0) if LINUX else None
    return [os.getpriority(os.PRIO_PROCESS, 0), processors, *map(resource.getrlimit, _limits())]


@functools.cache
def _limits() -> list[int]:
    """The limits of a process, as numbers, without the limit of processor time."""
    import resource

    return [value for name, value in vars(resource).items() if name.startswith("RLIMIT_") and name != "RLIMIT_CPU"]


def enter(setup: dict[str, Any], folder: str | None) -> str:
    """Make the call's folder the working directory, and return it. Raises OSError if the tools' folder is gone."""
    root: str = setup["root"]
    if setup["own_root"] and not os.access(root, os.F_OK):
        Path(root).mkdir(mode=0o700, exist_ok=True)  # a tool has removed it
    os.chdir(root)
    if folder is not None:
        root = str(Path(root, folder))
        Path(root).mkdir(mode=0o770, exist_ok=True)  # the workers share a group
        os.chdir(root)
    return root


def remove_folder(folder: str) -> None:
    """Remove a folder. Its permissions are restored first, because a tool may have made a folder inaccessible."""
    if os.geteuid() != 0:
        for parent, names, _ in os.walk(folder):
            for inner in (Path(parent, name) for name in names):
                if not inner.is_symlink():
                    inner.chmod(0o700)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:  # a tool has removed it
        pass
    except RecursionError as error:  # a thousand folders in one another
        if subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False).returncode:
            raise OSError(f"{folder} cannot be removed: it is too deep") from error


def _has_one_thread() -> bool:
    """Whether all threads but this one have ended, threads of `_thread` and of C libraries included."""
    until = time.monotonic() + _THREAD_SECONDS
    while (number := _THREADS.stat().st_nlink - 2 if LINUX else threading.active_count()) > 1:
        if threading.active_count() > 1 or time.monotonic() > until:
            break
        time.sleep(0.0005)
    return number == 1


def encode_output(value: Any, max_bytes: int) -> bytes:
    """Encode an output as JSON. Raises CallError if it is too large, or JSON cannot represent it."""
    too_large = f"output must take at most {max_bytes} bytes as JSON; got"
    if isinstance(value, str) and len(value) > max_bytes:
        raise CallError("OutputTooLargeError", f"{too_large} more.")
    try:
        content = _ENCODE(value).encode()
    except MemoryError:
        raise CallError("OutputTooLargeError", f"{too_large} more than the memory holds.") from None
    except BaseException as error:  # includes errors that a value's own methods raise, and a value nested too deeply
        message = f"output must be a value that JSON can represent: {described(error)}"
        raise CallError("InvalidOutputError", message) from None
    if len(content) > max_bytes:
        raise CallError("OutputTooLargeError", f"{too_large} {len(content)}.")
    return content


def described(error: BaseException) -> str:
    """Type and message of an error, of bounded length."""
    hint = ". A worker may be unable to read that file: import it at the top of the tool's module, or see ToolExecutor.readable"
    return f"{type(error).__name__[:_MAX_MESSAGE]}: {message_of(error)}{hint if isinstance(error, ImportError) else ''}"


def message_of(error: BaseException) -> str:
    """Message of an error, of bounded length."""
    try:
        return str.__getitem__(str(error), slice(_MAX_MESSAGE))  # a str, also of a subclass that has its own slices
    except BaseException as another:
        return f"(its message raised {type(another).__name__[:_MAX_MESSAGE]})"
