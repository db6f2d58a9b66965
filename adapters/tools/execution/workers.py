"""The pool of workers, from which each call takes one, and the limits of workers."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from adapters.tools import errors
from grpo.errors import ConfigError

from .batches import Turn
from .server_process import ForkServerProcess, next_byte
from .worker import OK, REPORTED, RETIRE, TOKEN_BYTES, PartOfFrameError, receive, send

ERRORS: dict[str, type[errors.ToolError]] = {name: getattr(errors, name) for name in REPORTED}
"""Errors that a worker may report, by name."""

_ALLOWANCE = 65_536
"""Maximum size in bytes of a message from a worker, beyond the size of the tool's output."""
_FORK_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Resource limits of one worker process and of each process that it starts. None sets no limit.

    Raises:
        ConfigError: A limit is not a positive integer.
    """

    memory_bytes: int | None = 2**30
    """Memory of one process in bytes, beyond the memory of the imported modules (`RLIMIT_DATA`, without shared memory and file
    mappings). A larger limit lets tools, and hostile calls, use more memory."""
    cpu_seconds: int | None = None
    """Processor time of one call in seconds. A worker that uses more is killed. The executor's timeout applies in any case."""
    file_bytes: int | None = 100 * 2**20
    """Size of one written file in bytes. A larger limit lets a call fill more of the disk."""
    open_files: int | None = 256
    """Number of open file descriptors. A larger limit lets tools open more files and connections."""
    processes: int | None = 64
    """Number of processes and threads of one worker with everything that it started. It applies only to workers with their own
    user id. A larger limit lets a fork bomb use more of the machine until it is killed."""
    first_uid: int | None = 61_000
    """First user id for workers, if this program runs as root on Linux. Each worker takes the first free of the 1,000 user
    ids from this id on. No other account may have these ids. With None, workers keep the program's user."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, value in asdict(self).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"WorkerLimits.{name} must be a positive integer, or None; got {value!r}.")


class WorkerPool:
    """Workers that are started on demand. Each call takes the next free worker. `setup` comes from `setup_of`."""

    def __init__(self, setup: dict[str, Any], num_workers: int) -> None:
        self._setup = setup
        self._server: ForkServerProcess | None = None
        self._starting = threading.Lock()
        self._turns = threading.Semaphore(num_workers)
        self._idle: list[WorkerProcess] = []

    def start(self) -> list[str]:
        """Start a worker. Returns the restrictions that could not be applied to it. Raises ConfigError if it cannot run."""
        self._idle.append(self._spawn())
        return self._idle[0].problems

    def close(self) -> None:
        """End the workers and the fork server."""
        for worker in self._idle:
            worker.socket.close()
        if self._server is not None:
            self._server.close()

    def call(self, request: bytes, timeout: float, turn: Turn) -> tuple[Any, int]:
        """Run a call on the next free worker. Returns the output and its size in bytes, or raises a ToolError.

        A worker may send data that does not answer the call. If earlier calls ran on that worker, the data may be theirs, so
        the call runs again on a new worker. The timeout in seconds starts when a worker is available.
        """
        with turn.of(self._turns):
            answer = self._ask(self._idle_worker(), request, timeout, turn)
            if answer is None:
                answer = self._ask(None, request, timeout, turn)
        assert answer is not None
        is_output, value, size = answer
        if is_output:
            return value, size
        raise ERRORS[value[0]](str(value[1]))

    def _ask(
        self, worker: "WorkerProcess | None", request: bytes, timeout: float, turn: Turn
    ) -> tuple[int, Any, int] | None:
        """Run a call, on a new worker if it is None. Returns None if an earlier call may have made the answer invalid."""
        is_new = worker is None
        try:
            worker = worker or self._spawn()
        except (ConfigError, EOFError, OSError) as error:
            raise errors.WorkerLostError(f"no worker could be started: {error}") from error
        turn.begin()
        try:
            with turn.ended_by(worker.shut):
                flags, value, size = worker.ask(request, timeout)
        except BaseException as error:
            is_late = isinstance(error, TimeoutError)
            has_ended = isinstance(error, EOFError | OSError) and not is_late
            status = worker.end(has_ended=has_ended)
            turn.check()
            if not is_new and isinstance(error, PartOfFrameError | ValueError | RecursionError):
                return None
            if is_late:
                raise errors.ToolTimeoutError(f"no answer within {timeout:g} s; the worker was killed.") from None
            raise _died(worker, error, status, has_ended=has_ended) from None
        if flags & RETIRE:
            worker.end()
        else:
            self._idle.append(worker)
        return flags & OK, value, size

    def _idle_worker(self) -> "WorkerProcess | None":
        with contextlib.suppress(IndexError):
            while True:
                worker = self._idle.pop()
                if worker.is_quiet:
                    return worker
                worker.end()
        return None

    def _spawn(self) -> "WorkerProcess":
        with self._starting:
            if self._server is not None and self._server.is_lost:
                self._server.close()
                self._server = None
            self._server = self._server or ForkServerProcess(self._setup)
        return WorkerProcess(self._server, self._setup["max_output_bytes"] + _ALLOWANCE)


class WorkerProcess:
    """A new worker process, which runs one call at a time.

    Raises:
        EOFError, OSError: The fork failed.
        ConfigError: The worker reported that it cannot run.
    """

    def __init__(self, server: ForkServerProcess, max_bytes: int) -> None:
        self.server, self._max_bytes = server, max_bytes
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._slot = server.spawn(theirs)
        try:
            hello = json.loads(receive(self.socket, deadline=time.monotonic() + _FORK_SECONDS))
            if "error" in hello:
                raise ConfigError(f"ToolExecutor could not start a worker: {hello['error']}.")
        except BaseException:
            self.end()
            raise
        self.problems: list[str] = hello["problems"]

    @property
    def is_quiet(self) -> bool:
        """Whether the worker runs, and has sent nothing that nobody asked for."""
        return next_byte(self.socket) is None

    def ask(self, request: bytes, timeout: float) -> tuple[int, Any, int]:
        """Send a request as JSON. Returns the flags, the output or the error, and its size in bytes.

        Raises:
            ValueError, RecursionError: The worker sent data that does not answer this request.
            EOFError, OSError: The worker has ended, or there is no answer within `timeout` (see `receive`).
        """
        deadline = time.monotonic() + timeout
        token = os.urandom(TOKEN_BYTES)
        self.socket.settimeout(timeout)
        send(self.socket, token + request)
        frame = receive(self.socket, self._max_bytes, deadline)
        if frame[:TOKEN_BYTES] != token or len(frame) == TOKEN_BYTES:
            raise ValueError("it sent data that does not answer this call")
        flags, content = frame[TOKEN_BYTES], frame[TOKEN_BYTES + 1 :]
        answer = json.loads(content)
        if not flags & OK and not (isinstance(answer, list) and len(answer) == 2 and answer[0] in REPORTED):
            raise ValueError("it reported an error of an unknown type")
        return flags, answer, len(content)

    def shut(self) -> None:
        """End the wait of `ask` in another thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self, *, has_ended: bool = False) -> int | None:
        """End the worker with every process that it started.

        `has_ended` gives it a moment to end by itself. Returns its wait status, or None if it did not end by itself.
        """
        self.socket.close()
        return self.server.end(self._slot, has_ended=has_ended)


def _died(worker: WorkerProcess, error: BaseException, status: int | None, *, has_ended: bool) -> errors.ToolError:
    """The error of a call whose worker ended. The call is lost if something else ended the worker."""
    how = "it did not end by itself"
    kind: type[errors.ToolError] = errors.WorkerDiedError
    if worker.server.is_lost:
        how, kind = "the fork server ended too", errors.WorkerLostError
    elif status is not None:
        code = os.waitstatus_to_exitcode(status)
        how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        if code == -signal.SIGXCPU:
            how, kind = "it used more processor time than WorkerLimits.cpu_seconds", errors.ToolTimeoutError
        elif has_ended and code in (-signal.SIGKILL, -signal.SIGTERM):
            how, kind = "killed", errors.WorkerLostError
    return kind(f"the worker ended during the call: {error} ({how}).")
