"""The executor's workers: what they may use, and how they are started and killed. All of it runs in one event loop."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo.errors import ConfigError

from .catalogue import Tool
from .worker_connection import Frames, Worker, WorkerLostError
from .worker_main import BOOT, INSIDE, KILL, ORDER, QUIT, SPAWN

_ALLOWANCE = 65_536
"""Bytes of a frame beyond the output's."""
_START_SECONDS = 120.0
"""For the import of the tools' modules."""
_FORK_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What one worker process, and each process that it starts, may use. None: no limit.

    Raises:
        ConfigError: a limit that is not positive.
    """

    memory_bytes: int | None = 2**30
    """Allocated beyond what the imported modules take (`RLIMIT_DATA`: of one process, without what it shares with others or
    maps from files). Larger lets tools hold more, and hostile calls too."""
    cpu_seconds: int | None = None
    """Of processor time for one call; beyond, the worker dies. Larger lets tools compute longer; the timeout holds anyhow."""
    file_bytes: int | None = 100 * 2**20
    """Of one file that is written. Larger lets a call fill more of the disk."""
    open_files: int | None = 256
    """Descriptors at once. Larger lets tools open more files and connections."""
    processes: int | None = 64
    """And threads, of one worker with all that it started; only for workers with a user id of their own. Larger lets a
    fork bomb take more of the machine until it is killed."""
    first_uid: int | None = 61_000
    """Where this program runs as root on Linux, each worker takes a user id of its own, which nobody else may have: the first
    free ones of the 1,000 from here on. None: workers keep the program's user, and what it may do."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, value in asdict(self).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"WorkerLimits.{name} must be a positive integer, or None; got {value!r}.")


class WorkerSource:
    """The fork server, from outside.

    Args:
        tools: what workers can be asked for, with their functions pickled.
        setup: the rest of what the fork server is told.
    """

    def __init__(self, tools: Sequence[tuple[Tool, bytes]], setup: dict[str, Any]) -> None:
        self._setup = setup | {
            "sys_path": [str(Path(entry).absolute()) for entry in sys.path],
            "main": _main_module(tools),
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
        """Import the tools.

        Raises:
            ConfigError: they could not be imported.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), str(Path(__file__).parent)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(self._setup["root"]),
                cwd=self._setup["root"],
                start_new_session=True,  # ctrl-c in a terminal is for the program, which ends this one in order
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
        """A new worker, and what could not be taken from it.

        Raises:
            WorkerLostError: the fork failed.
            ConfigError: the worker cannot work, and says why.
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
        """End a worker with all that it started; returns how it had ended, in words, if it had."""
        worker.frames.close()
        if self.lost is not None:
            return self.lost
        ended = self._ended[worker.slot] = asyncio.get_running_loop().create_future()
        try:
            self._order(KILL, worker.slot)
        except WorkerLostError as error:  # and with the fork server, its workers
            return str(error)
        status = await ended
        self._free.append(worker.slot)
        return _in_words(status)

    def close(self) -> None:
        """End the fork server, which ends its workers; returns when it has."""
        if self._control is not None and self._process is not None:
            with contextlib.suppress(OSError, WorkerLostError):
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
            raise WorkerLostError(f"the fork server is gone: {self.lost}")
        try:
            # A few bytes, of which there is room for thousands: this does not block.
            socket.send_fds(self._control, [ORDER.pack(kind, slot)], [end.fileno() for end in passed])
        except OSError as error:
            raise WorkerLostError(f"the fork server is gone: {error}") from error

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
            f"Tools {', '.join(inside)}: their functions are defined in a program that is no file (a notebook, or typed in), "
            "so that a worker process cannot import them. Write them into a module and import that."
        )
    return "file", str(Path(file).resolve())


def _environment(root: str) -> dict[str, str]:
    """Of workers: nothing that is secret, one thread each."""
    passed_on = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TZ") if name in os.environ}
    return passed_on | {"LANG": "C.UTF-8", "HOME": root, "OMP_NUM_THREADS": "1", INSIDE: "1"}


def _in_words(status: int | None) -> str:
    if status is None:
        return "how is not known"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit status {code}"
    return "killed" if -code == signal.SIGKILL else f"signal {signal.Signals(-code).name}"
