"""Limits, start and end of the executor's workers. Everything here runs in one event loop."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapters.tools.catalogue.tools import Tool
from grpo.errors import ConfigError

from .commands import Command
from .worker_connection import Frames, LinkLostError, Worker
from .worker_main import BOOT, INSIDE, KILL, ORDER, QUIT, SPAWN

_ALLOWANCE = 65_536
"""Maximum size in bytes of a message from a worker, beyond the size of the tool's output."""
_START_SECONDS = 120.0
"""Time limit for the import of the tools' modules."""
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
    ids from this id on. No other account may have these ids. With None, workers keep the program's user and permissions."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, value in asdict(self).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"WorkerLimits.{name} must be a positive integer, or None; got {value!r}.")


class WorkerSource:
    """The executor's handle of the fork server.

    Args:
        tools: The tools that workers run, with their pickled functions.
        setup: The other settings of the fork server.
    """

    def __init__(self, tools: Sequence[tuple[Tool, bytes]], setup: dict[str, Any]) -> None:
        self._setup = setup | {
            "sys_path": [str(Path(entry).absolute()) for entry in sys.path],
            "main": _main_module(tools),
            "programs": {
                tool.name: (program, path)
                for tool, _ in tools
                if isinstance(tool.function, Command)
                and (path := shutil.which(program := tool.function.argv[0])) is not None
            },
            "tools": {tool.name: (pickled.hex(), tool.parameters) for tool, pickled in tools},
        }
        self._max_bytes = setup["max_output_bytes"] + _ALLOWANCE
        self._free: list[int] = []
        self._next_slot = 0
        self._ended: dict[int, asyncio.Future[int | None]] = {}
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._control: socket.socket | None = None
        self._frames: Frames | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.lost: str | None = None

    async def start(self) -> None:
        """Start the fork server, which imports the tools.

        Raises:
            ConfigError: The tools could not be imported.
        """
        loop = asyncio.get_running_loop()
        if self._setup["own_root"]:
            Path(self._setup["root"]).mkdir(mode=0o700, exist_ok=True)  # a tool may have removed it
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), str(Path(__file__).parents[1])],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(self._setup["root"]),
                cwd=self._setup["root"],
                start_new_session=True,  # Ctrl-C goes to the main program, which shuts the fork server down
            )
        self._ready = loop.create_future()
        frames = self._frames = Frames(self._receive, self._lose, 2**20)
        self._control = ours
        await loop.create_unix_connection(lambda: frames, sock=ours)
        frames.send(json.dumps(self._setup).encode())
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer = await self._ready
        except TimeoutError:
            self._process.kill()  # it has no workers yet
            answer = {"error": f"their modules were not imported within {_START_SECONDS:g} s"}
        if "error" in answer:
            self.close()
            raise ConfigError(f"ToolExecutor could not start its workers: {answer['error']}")

    async def spawn(self) -> tuple[Worker, list[str]]:
        """Start a worker. Returns the worker and the restrictions that could not be applied to it.

        Raises:
            LinkLostError: The fork failed.
            ConfigError: The worker reported that it cannot run.
        """
        slot = self._free.pop() if self._free else self._next_slot
        self._next_slot = max(self._next_slot, slot + 1)
        worker = Worker(slot, self, self._max_bytes)
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: worker.frames, sock=ours)
            self._order(SPAWN, slot, theirs)
        try:
            async with asyncio.timeout(_FORK_SECONDS):
                hello = json.loads(await worker.answer())
        except TimeoutError:
            hello = {"error": f"no worker came within {_FORK_SECONDS:g} s"}
        except BaseException:
            await asyncio.shield(self.kill(worker))
            raise
        if "error" in hello:
            await asyncio.shield(self.kill(worker))
            raise ConfigError(f"ToolExecutor could not start a worker: {hello['error']}.")
        return worker, hello["problems"]

    async def kill(self, worker: Worker) -> str:
        """Kill a worker with every process that it started. Returns how the worker had ended, in words."""
        worker.frames.close()
        if self.lost is not None:
            return self.lost
        ended = self._ended[worker.slot] = asyncio.get_running_loop().create_future()
        try:
            self._order(KILL, worker.slot)
        except LinkLostError as error:  # the fork server is gone, and its workers with it
            return str(error)
        status = await ended
        self._free.append(worker.slot)
        return _in_words(status)

    def close(self) -> None:
        """End the fork server, which ends its workers, and wait for it."""
        if self._control is not None and self._process is not None:
            with contextlib.suppress(OSError, LinkLostError):
                self._order(QUIT, 0)
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._lose("it was closed")
        if self._frames is not None:
            self._frames.close()

    def _order(self, kind: bytes, slot: int, *passed: socket.socket) -> None:
        if self.lost is not None or self._control is None:
            raise LinkLostError(f"the fork server is gone: {self.lost}")
        try:
            # An order is a few bytes, and the buffer holds thousands of orders, so this does not block.
            socket.send_fds(self._control, [ORDER.pack(kind, slot)], [end.fileno() for end in passed])
        except OSError as error:
            raise LinkLostError(f"the fork server is gone: {error}") from error

    def _receive(self, frame: bytes) -> None:
        answer = json.loads(frame)
        if "killed" in answer:
            ended = self._ended.pop(answer["killed"], None)
            if ended is not None and not ended.done():
                ended.set_result(answer["status"])
        elif self._ready is not None and not self._ready.done():
            self._ready.set_result(answer)

    def _lose(self, why: str) -> None:
        self.lost = self.lost or f"the fork server: {why}"
        if self._ready is not None and not self._ready.done():
            self._ready.set_result({"error": self.lost})
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(None)
        self._ended.clear()


def _main_module(tools: Sequence[tuple[Tool, bytes]]) -> tuple[str, str] | None:
    """How to import `__main__`, if a tool's function is defined there."""
    inside = [tool.name for tool, pickled in tools if b"__main__" in pickled]
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


def _environment(root: str) -> dict[str, str]:
    """Environment variables of the workers: no secrets, one thread each."""
    passed_on = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return passed_on | {"LANG": "C.UTF-8", "HOME": root, "OMP_NUM_THREADS": "1", INSIDE: "1"}


def _in_words(status: int | None) -> str:
    if status is None:
        return "how is not known"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit status {code}"
    return "killed" if -code == signal.SIGKILL else f"signal {signal.Signals(-code).name}"
