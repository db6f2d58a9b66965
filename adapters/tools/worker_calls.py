"""What a worker process does: calls, one after another, each answered with JSON and followed by tidying up.

Frames are 4 bytes of length and as many of content.
"""

import contextlib
import inspect
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any

from .worker_process import children

LENGTH = struct.Struct(">I")
TOKEN_BYTES = 8
"""Of the call, before a request and its reply: an answer made up before the question does not know it."""
OK, RETIRE = 1, 2
"""Flags of a reply, the byte after the token: it holds the output, not an error; this worker is not fit for another call."""
PASSED_ON = ("InvalidArgumentsError", "PathOutsideRootError", "OutputTooLargeError", "InvalidOutputError")
"""Errors of this package that a tool may raise itself."""

_MAX_MESSAGE = 1000
_ENCODE = json.JSONEncoder(allow_nan=False).encode  # made once, which `json.dumps` does for each text
_SIGNALS = [
    getattr(signal, name) for name in ("SIGCHLD", "SIGPIPE", "SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
]
"""Whose handlers are as before after each call: a program whose SIGCHLD is ignored does not learn how its children ended."""


def receive(connection: socket.socket) -> bytes | None:
    """One frame; None: the other side is gone."""
    data = bytearray()
    size = LENGTH.size
    while len(data) < size:
        part = connection.recv(65536)
        if not part:
            return None
        data += part
        if len(data) >= LENGTH.size:
            size = LENGTH.size + LENGTH.unpack_from(data)[0]
    return bytes(data[LENGTH.size :])


def send(connection: socket.socket, content: bytes) -> None:
    """One frame."""
    connection.sendall(LENGTH.pack(len(content)) + content)


class Worker:
    """Calls the tools.

    Args:
        alone: this process has a user id of its own, so that all others of that user were started by it.
    """

    def __init__(self, answers: socket.socket, setup: dict[str, Any], tools: dict[str, Any], *, alone: bool) -> None:
        self.answers = answers
        self.root = setup["root"]
        self.max_output_bytes = setup["max_output_bytes"]
        self.cpu_seconds = setup["limits"]["cpu_seconds"]
        self.open_files = setup["limits"]["open_files"]
        self.tools = tools
        self.alone = alone
        self.environment = dict(os.environ)
        self.handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self.recursion_limit = sys.getrecursionlimit()

    def serve(self) -> None:
        """Until the socket is closed."""
        while request := receive(self.answers):
            self._limit_cpu()
            ok, content = self._call(*json.loads(request[TOKEN_BYTES:].decode()))
            flags = (OK if ok else 0) | (0 if self._tidy() else RETIRE)
            send(self.answers, request[:TOKEN_BYTES] + bytes([flags]) + content)

    def _call(self, name: str, arguments: dict[str, Any]) -> tuple[bool, bytes]:
        """Whether there is an output, and it or an error, as JSON."""
        function, check = self.tools[name]
        try:
            arguments = check(arguments)
        except ValueError as error:
            return _error(getattr(error, "error", "InvalidArgumentsError"), str(error))
        except BaseException as error:
            return _error("InvalidArgumentsError", f"the schema cannot be applied: {described(error)}")
        try:
            value = function(**arguments)
            if inspect.iscoroutine(value):
                import asyncio

                value = asyncio.run(value)
        except BaseException as error:  # SystemExit, MemoryError and all: no tool ends its worker by raising
            passed_on = type(error).__name__ in PASSED_ON and type(error).__module__ == "adapters.tools.errors"
            return (
                _error(type(error).__name__, message_of(error))
                if passed_on
                else _error("ToolRaisedError", described(error))
            )
        sys.setrecursionlimit(self.recursion_limit)  # how deep the executor's own can read
        return encode_output(value, self.max_output_bytes)

    def _limit_cpu(self) -> None:
        if self.cpu_seconds is not None:
            import resource

            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + self.cpu_seconds, hard))

    def _tidy(self) -> bool:
        """Make the process as it was before the call; returns whether it is."""
        try:
            self._end_children()
            os.chdir(self.root)
            os.umask(0o007)
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            sys.setrecursionlimit(self.recursion_limit)
            if dict(os.environ) != self.environment:
                os.environ.clear()
                os.environ.update(self.environment)
            free = os.dup(self.answers.fileno())  # the lowest number that is free
            os.close(free)
        except Exception:
            return False
        return threading.active_count() == 1 and (self.open_files is None or free <= self.open_files / 2)

    def _end_children(self) -> None:
        """Nothing that a call started sees the next one."""
        with contextlib.suppress(ChildProcessError):  # there is none: the usual case, and cheap
            while True:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    if self.alone:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(-1, signal.SIGKILL)  # all of this user, but not this process
                    listed = children()
                    if not listed and not self.alone:
                        raise OSError("a process that cannot be found; the executor ends it with this one")
                    for pid in listed:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    os.waitpid(-1, 0)


def encode_output(value: Any, max_bytes: int) -> tuple[bool, bytes]:
    """Whether it may be let through, and it or an error, as JSON."""
    if isinstance(value, str) and len(value) > max_bytes:
        return _error("OutputTooLargeError", f"output must take at most {max_bytes} bytes as JSON; it takes more.")
    try:
        content = _ENCODE(value).encode()
    except MemoryError:
        return _error("OutputTooLargeError", f"output must take at most {max_bytes} bytes as JSON; memory ran out.")
    except RecursionError:
        return _error("InvalidOutputError", "output must be something JSON can hold; it is nested too deeply.")
    except Exception as error:  # also what a value's own methods raise
        return _error("InvalidOutputError", f"output must be something JSON can hold: {described(error)}")
    if len(content) > max_bytes:
        return _error(
            "OutputTooLargeError", f"output must take at most {max_bytes} bytes as JSON; it takes {len(content)}."
        )
    return True, content


def _error(name: str, message: str) -> tuple[bool, bytes]:
    return False, json.dumps([name, message[: 2 * _MAX_MESSAGE]]).encode()


def described(error: BaseException) -> str:
    """Kind and message, of bounded length."""
    hint = (
        ". A worker may run as a user who cannot read that file: import it at the top of the tool's module"
        if isinstance(error, ImportError)
        else ""
    )
    return f"{type(error).__name__[:_MAX_MESSAGE]}: {message_of(error)}{hint}"


def message_of(error: BaseException) -> str:
    """Its message, of bounded length."""
    try:
        return str(error)[:_MAX_MESSAGE]
    except BaseException as another:
        return f"(its message raised {type(another).__name__[:_MAX_MESSAGE]})"
