"""The program's side of the workers: their limits, the pool from which calls take them, and the process that forks them."""

import contextlib
import itertools
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from adapters.tools import errors
from adapters.tools.catalogue.tools import Tool
from grpo.arguments import Settings, setting
from grpo.errors import ConfigError

from .batches import Turn
from .commands import Command
from .confinement import KINDS, readable_paths
from .confinement.process import PR_SET_DUMPABLE, prctl
from .folder_limits import Watch
from .fork_server import BOOT, INSIDE, KILL, ORDER, QUIT, REAP, SPAWN
from .worker import OK, REPORTED, RETIRE, TOKEN_BYTES, PartOfFrameError, receive, send

ERRORS: dict[str, type[errors.ToolError]] = {name: getattr(errors, name) for name in REPORTED}

_OF_EARLIER_CALLS = (PartOfFrameError, ValueError, RecursionError, ConnectionResetError, BrokenPipeError)
"""What `WorkerProcess.ask` raises if a worker sent data that does not answer the request, or ended before it read the request:
Linux resets a connection with unread data."""
_ALLOWANCE = 65_536
"""Maximum size in bytes of a message from a worker, beyond the size of the tool's output."""
_START_SECONDS = 120.0
"""Time limit for the import of the tools' modules."""
_FORK_SECONDS = 30.0
_MOST_SECONDS = 1e6
"""A socket cannot have a much longer timeout."""
_END_SECONDS = 10.0
_HOME = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits(Settings):
    """Resource limits of one worker process and of each process that it starts. None sets no limit.

    Raises:
        ConfigError: A limit is not a positive integer.
    """

    memory_bytes: int | None = setting(2**30, at_least=1)
    """Memory of one process in bytes, beyond the memory of the imported modules (`RLIMIT_DATA`, without shared memory and file
    mappings). A larger limit lets tools, and hostile calls, use more memory."""
    cpu_seconds: int | None = setting(None, at_least=1)
    """Processor time of one call in seconds. A worker that uses more is killed. The executor's timeout applies in any case."""
    file_bytes: int | None = setting(100 * 2**20, at_least=1)
    """Size of one written file in bytes. A larger limit lets a call fill more of the disk."""
    open_files: int | None = setting(256, at_least=1)
    """Number of open file descriptors. A larger limit lets tools open more files and connections."""
    processes: int | None = setting(64, at_least=1)
    """Number of processes and threads of one worker with everything that it started. It applies only to workers with their own
    user id. A larger limit lets a fork bomb use more of the machine until it is killed."""
    first_uid: int | None = setting(61_000, at_least=1)
    """First user id for workers, if this program runs as root on Linux. Each worker takes the first free of the 999 user
    ids from this id on; the next id belongs to the processes that end workers. No other account may have these 1,000 ids.
    With None, workers keep the program's user."""


class WorkerPool:
    """Workers that are started on demand. Each call takes the next free worker. `setup` comes from `setup_of`."""

    def __init__(self, setup: dict[str, Any], num_workers: int) -> None:
        self._setup = setup
        self._server: ForkServerProcess | None = None
        self._starting = threading.Lock()
        self._turns = threading.Semaphore(num_workers)
        self._idle: list[WorkerProcess] = []
        self._is_closed = False

    def start(self) -> list[str]:
        """Start a worker. Returns the restrictions that could not be applied to it. Raises ConfigError if it cannot run."""
        self._idle.append(self._spawn())
        return self._idle[0].problems

    def close(self) -> None:
        """End the workers and the fork server."""
        self._is_closed = True
        for worker in self._idle:
            worker.socket.close()
        if self._server is not None:
            self._server.close()

    def call(self, request: bytes, timeout: float, turn: Turn, watching: Callable[[], Watch]) -> tuple[Any, int]:
        """Run a call on the next free worker. Returns the output and its size in bytes, or raises a ToolError.

        If an earlier call is to blame for a failure (`_OF_EARLIER_CALLS`), the call runs on a new worker. The timeout in
        seconds starts when a worker is available. `watching()` is called then, and what it returns is called while the worker
        works, and at the end. Both may raise a ToolError.
        """
        with turn.of(self._turns):
            watch = watching()
            return self._ask(self._idle_worker(), request, timeout, turn, watch)

    def _ask(
        self, worker: "WorkerProcess | None", request: bytes, timeout: float, turn: Turn, watch: Watch
    ) -> tuple[Any, int]:
        try:
            worker = worker or self._spawn()
        except (ConfigError, EOFError, OSError) as error:
            raise errors.WorkerLostError(f"no worker could be started: {error}") from error
        is_new, worker.is_new = worker.is_new, False
        turn.begin()
        try:
            with turn.ended_by(worker.shut):
                flags, value, size = worker.ask(request, timeout, watch)
        except BaseException as error:
            is_late = isinstance(error, TimeoutError)
            has_ended = isinstance(error, EOFError | OSError) and not is_late and not turn.given_up.is_set()
            status = worker.end(has_ended=has_ended)
            turn.check()
            if not is_new and isinstance(error, _OF_EARLIER_CALLS):
                return self._ask(None, request, timeout, turn, watch)
            if isinstance(error, errors.ToolError):
                raise
            if is_late:
                raise errors.ToolTimeoutError(f"no answer within {timeout:g} s; the worker was killed.") from None
            raise _died(worker, error, status, has_ended=has_ended) from None
        if flags & RETIRE:
            worker.end()
        else:
            self._idle.append(worker)
        watch(True)
        if flags & OK:
            return value, size
        raise ERRORS[value[0]](str(value[1]))

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
            if self._is_closed:  # while the fork server started
                self._server.close()
                raise EOFError("the executor was closed")
        return WorkerProcess(self._server, self._setup["max_output_bytes"] + _ALLOWANCE)


class WorkerProcess:
    """A new worker process, which runs one call at a time. Raises EOFError, OSError or ConfigError if it cannot be started."""

    def __init__(self, server: "ForkServerProcess", max_bytes: int) -> None:
        self.server, self.is_new, self._max_bytes = server, True, max_bytes
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
        return _next_byte(self.socket) is None

    def ask(self, request: bytes, timeout: float, watch: "Watch") -> tuple[int, Any, int]:
        """Send a request as JSON. Returns the flags, the output or the error, and its size in bytes.

        Raises:
            ToolError: `watch`, which is called again and again, has raised it.
            ValueError, RecursionError: The worker sent data that does not answer this request.
            EOFError, OSError: The worker has ended, or there is no answer within `timeout` (see `receive`).
        """
        timeout = min(timeout, _MOST_SECONDS)
        deadline = time.monotonic() + timeout
        token = os.urandom(TOKEN_BYTES)
        self.socket.settimeout(timeout)
        send(self.socket, token + request)
        frame = receive(self.socket, self._max_bytes, deadline, partial(watch, False))
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
        """End the worker with every process that it started. Returns its wait status, or None if it did not end by itself.

        `has_ended` gives it a moment to do so.
        """
        self.socket.close()
        return self.server.end(self._slot, has_ended=has_ended)


class ForkServerProcess:
    """The program's handle of a new fork server. Raises ConfigError if the fork server cannot import the tools."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._orders = threading.Lock()
        self._free: list[int] = []
        self._slots = itertools.count()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_START_SECONDS)
        root = setup["root"]
        if setup["own_root"]:
            Path(root).mkdir(mode=0o700, exist_ok=True)  # a tool may have removed it
        parent = os.open(Path(root).parent, getattr(os, "O_PATH", os.O_RDONLY))
        if setup["kind"] == "user" and setup["no_own_users"] is not None:
            prctl(PR_SET_DUMPABLE, 0)  # nothing else keeps the workers from this program's memory and environment
        passed_on = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TZ") if name in os.environ}
        command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), _HOME]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    KINDS[setup["kind"]].prefix(root, setup["readable"]) + command,
                    pass_fds=[theirs.fileno(), parent],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=passed_on
                    | {"LANG": "C.UTF-8", "HOME": root, "OMP_NUM_THREADS": "1", INSIDE: "1"},  # no secrets
                    cwd=root,
                    start_new_session=True,  # Ctrl-C goes to the main program, which shuts the fork server down
                )
        finally:
            os.close(parent)
        try:
            send(self._socket, json.dumps(setup | {"parent": parent}).encode())
            answer = json.loads(receive(self._socket, deadline=time.monotonic() + _START_SECONDS))
            if "error" in answer:
                raise ConfigError(f"ToolExecutor could not start its workers: {answer['error']}")
        except BaseException as error:  # includes an interrupt, while the modules are imported
            os.killpg(self._process.pid, signal.SIGKILL)  # it has no workers yet
            self.close()
            if not isinstance(error, EOFError | OSError):
                raise
            reason = f"the fork server: {error}; it may have written why, and another confinement may work"
            if isinstance(error, TimeoutError):
                reason = f"their modules were not imported within {_START_SECONDS:g} s"
            raise ConfigError(f"ToolExecutor could not start its workers: {reason}") from error

    @property
    def is_lost(self) -> bool:
        """Whether the fork server has ended."""
        return _next_byte(self._socket) == b""

    def spawn(self, connection: socket.socket) -> int:
        """Start a worker with this end of its socket. Returns its number. Raises OSError if the fork server is gone."""
        with self._orders:
            slot = self._free.pop() if self._free else next(self._slots)
            socket.send_fds(self._socket, [ORDER.pack(SPAWN, slot)], [connection.fileno()])
        return slot

    def end(self, slot: int, *, has_ended: bool) -> int | None:
        """See `WorkerProcess.end`."""
        # if the fork server is gone, so are its workers
        with contextlib.suppress(EOFError, OSError, ValueError), self._orders:
            self._socket.settimeout(None)
            self._socket.sendall(ORDER.pack(REAP if has_ended else KILL, slot))
            status: int | None = json.loads(receive(self._socket))
            self._free.append(slot)
            return status
        return None

    def close(self) -> None:
        """End the fork server, which ends its workers, and wait for it."""
        with contextlib.suppress(OSError):
            self._socket.sendall(ORDER.pack(QUIT, 0))
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a wait for an answer, in another thread
        with self._orders:
            self._socket.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _next_byte(connection: socket.socket) -> bytes | None:
    """The next byte that has arrived, which stays unread. Empty at the end of the data, and None if there is none yet."""
    try:
        connection.settimeout(None)  # otherwise `recv` waits
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


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


def setup_of(tools: Sequence[Tool], **settings: Any) -> dict[str, Any]:
    """What the fork server needs to know, as JSON. Raises ConfigError if workers cannot import a function."""
    functions = {tool.name: _pickled(tool) for tool in tools}
    programs = [shutil.which(tool.function.argv[0]) for tool in tools if isinstance(tool.function, Command)]
    readable = [*map(os.fspath, settings["readable"]), _HOME, *(path for path in programs if path is not None)]
    homes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return settings | {
        "sys_path": [str(Path(entry).absolute()) for entry in sys.path],
        "python": [sys.executable, *(p for p in sys.path if any(Path(p).is_relative_to(home) for home in homes))],
        "readable": readable_paths(readable),
        "main": _main_module([name for name, function in functions.items() if b"__main__" in function]),
        "tools": {tool.name: (functions[tool.name].hex(), tool.parameters) for tool in tools},
    }


def _pickled(tool: Tool) -> bytes:
    """The tool's function, for the fork server."""
    if tool.remote:
        return pickle.dumps("".format)  # accepts any arguments and returns a text; the worker only checks the arguments
    function = tool.function
    if isinstance(function, Command):
        if function.names != set(tool.properties):
            raise ConfigError(
                f"Tool {tool.name}: Command.argv must name exactly the parameters of the schema, {sorted(tool.properties)}; "
                f"got {sorted(function.names)}. Change argv or the schema."
            )
        program, *rest = function.argv  # the workers' user may find another program of that name
        function = replace(function, argv=[shutil.which(program) or program, *rest])
    try:
        return pickle.dumps(function)
    except Exception as error:  # pickle's errors, or anything that an object's own methods raise
        raise ConfigError(
            f"Tool {tool.name}: workers must be able to import its function by name; the import fails: {error}. Define the "
            "function at the top level of a module, or make the tool `remote` with an `async def`."
        ) from error


def _main_module(inside: list[str]) -> tuple[str, str] | None:
    """How to import `__main__`, if tools' functions are defined there."""
    if not inside:
        return None
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise ConfigError(
            f"Tools {', '.join(inside)}: a worker process cannot import their functions, which are defined in a notebook or an "
            "interactive session. Move the functions to a module, and import them."
        )
    return "file", str(Path(file).resolve())
