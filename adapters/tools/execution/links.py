"""The executor's ends of its sockets, to the workers and to the fork server. Everything here runs in one event loop."""

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
from pathlib import Path
from typing import Any

from adapters.tools import errors
from adapters.tools.catalogue.tools import Tool
from grpo.errors import ConfigError

from .commands import Command
from .confinement import confinement_of, readable_paths
from .confinement.process import PR_SET_DUMPABLE, prctl
from .fork_server import BOOT, INSIDE, KILL, ORDER, QUIT, REAP, SPAWN
from .worker import LENGTH, OK, REPORTED, TOKEN_BYTES

ERRORS: dict[str, type[errors.ToolError]] = {name: getattr(errors, name) for name in REPORTED}
"""Errors that a worker may report, by name."""

_ALLOWANCE = 65_536
"""Maximum size in bytes of a message from a worker, beyond the size of the tool's output."""
_START_SECONDS = 120.0
"""Time limit for the import of the tools' modules."""
_FORK_SECONDS = 30.0
_END_SECONDS = 10.0


class LinkLostError(Exception):
    """A socket cannot be used any more. `has_ended`: the other side closed it, and did not send invalid data."""

    def __init__(self, message: str, *, has_ended: bool = False) -> None:
        super().__init__(message)
        self.has_ended = has_ended


class Link:
    """One socket, whose data is frames of bounded size. A frame is read when it is asked for."""

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._max_bytes = max_bytes
        self._data = bytearray()

    @property
    def has_unread_data(self) -> bool:
        """Whether a part of a frame has been read."""
        return bool(self._data)

    @property
    def has_ended(self) -> bool:
        """Whether this side or the other side has closed the socket."""
        return self._next_byte() == b""

    @property
    def is_quiet(self) -> bool:
        """Whether the socket is open, and the other side has sent nothing that nobody asked for."""
        return self._next_byte() is None and not self._data

    def _next_byte(self) -> bytes | None:
        """The next byte that has arrived, which stays unread. Empty at the end of the data, and None if there is none yet."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    async def answer(self, content: bytes | None = None) -> bytes:
        """Write a frame, unless it is None, and wait for a frame.

        Raises:
            LinkLostError: The other side has ended, or has sent a frame that is too long, or more than one.
        """
        loop, size = asyncio.get_running_loop(), LENGTH.size
        try:
            if content is not None:
                await loop.sock_sendall(self.socket, LENGTH.pack(len(content)) + content)
            while len(self._data) < size:
                part = await loop.sock_recv(self.socket, 65_536)
                if not part:
                    raise LinkLostError("it ended", has_ended=True)
                self._data += part
                if len(self._data) >= LENGTH.size:
                    size = LENGTH.size + LENGTH.unpack_from(self._data)[0]
                if size > self._max_bytes:
                    raise LinkLostError(f"it wrote a frame of {size} bytes; at most {self._max_bytes} are read")
        except OSError as error:
            raise LinkLostError(f"it ended: {error}", has_ended=True) from error
        if len(self._data) > size:
            raise LinkLostError("it wrote without having been asked")
        frame = bytes(self._data[LENGTH.size :])
        self._data.clear()
        return frame


class Worker:
    """The executor's handle of one worker process, which runs one call at a time."""

    def __init__(self, slot: int, server: "ForkServerLink", link: Link) -> None:
        self.slot = slot
        self.server = server
        self.link = link
        self.is_new = True

    async def ask(self, request: bytes) -> tuple[int, bytes, Any]:
        """Send a request as JSON. Returns the flags, and the output or error as JSON and as a value.

        Raises:
            LinkLostError: The worker is lost, or its answer does not belong to this request.
        """
        token = os.urandom(TOKEN_BYTES)
        frame = await self.link.answer(token + request)
        flags, content = frame[TOKEN_BYTES : TOKEN_BYTES + 1], frame[TOKEN_BYTES + 1 :]
        if frame[:TOKEN_BYTES] != token or not flags:
            raise LinkLostError("it sent data that does not answer this call")
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise LinkLostError(f"it sent data that cannot be read: {error}") from error
        if not flags[0] & OK and not (isinstance(answer, list) and len(answer) == 2 and answer[0] in ERRORS):
            raise LinkLostError("it reported an error of an unknown type")
        return flags[0], content, answer

    async def kill(self, *, has_ended: bool = False) -> int | None:
        """End the worker with every process that it started.

        `has_ended` gives it a moment to end by itself. Returns its wait status, or None if it did not end by itself.
        """
        self.link.socket.close()
        return await asyncio.shield(self.server.end(self.slot, has_ended=has_ended))


class ForkServerLink:
    """The executor's handle of the fork server. `tools` have their pickled functions; `setup` has the other settings."""

    def __init__(self, tools: Sequence[tuple[Tool, bytes]], setup: dict[str, Any]) -> None:
        programs = {tool.name: tool.function.argv[0] for tool, _ in tools if isinstance(tool.function, Command)}
        paths = {
            tool: (program, path) for tool, program in programs.items() if (path := shutil.which(program)) is not None
        }
        self._home = str(Path(__file__).parents[1])
        homes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
        self._setup = setup | {
            "sys_path": [str(Path(entry).absolute()) for entry in sys.path],
            "python": [sys.executable, *(p for p in sys.path if any(Path(p).is_relative_to(home) for home in homes))],
            "readable": readable_paths([*setup["readable"], self._home, *(path for _, path in paths.values())]),
            "main": _main_module(tools),
            "programs": paths,
            "tools": {tool.name: (pickled.hex(), tool.parameters) for tool, pickled in tools},
        }
        self._max_bytes = setup["max_output_bytes"] + _ALLOWANCE
        self._orders = asyncio.Lock()
        self._free: list[int] = []
        self._num_slots = 0
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the fork server has ended, or has not been started."""
        return self._link is None or self._link.has_ended

    async def start(self) -> None:
        """Start the fork server, which imports the tools.

        Raises:
            ConfigError: The tools could not be imported.
        """
        root = self._setup["root"]
        if self._setup["own_root"]:
            Path(root).mkdir(mode=0o700, exist_ok=True)  # a tool may have removed it
        ours, theirs = socket.socketpair()
        self._link = Link(ours, 2**20)
        parent = os.open(Path(root).parent, getattr(os, "O_PATH", os.O_RDONLY))
        command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), self._home]
        if self._setup["kind"] == "user" and self._setup["no_own_users"] is not None:
            prctl(PR_SET_DUMPABLE, 0)  # nothing else keeps the workers from this program's memory and environment
        with theirs:
            self._process = subprocess.Popen(
                [*confinement_of(self._setup["kind"]).prefix(root, self._setup["readable"]), *command],
                pass_fds=[theirs.fileno(), parent],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(root),
                cwd=root,
                start_new_session=True,  # Ctrl-C goes to the main program, which shuts the fork server down
            )
        os.close(parent)
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer = json.loads(await self._link.answer(json.dumps(self._setup | {"parent": parent}).encode()))
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)  # it has no workers yet
            answer = {"error": f"their modules were not imported within {_START_SECONDS:g} s"}
        except LinkLostError as error:
            hint = "; bwrap may have written why, and confinement='landlock' mounts nothing"
            answer = {"error": f"the fork server: {error}{hint if self._setup['kind'] == 'bubblewrap' else ''}"}
        if "error" in answer:
            self.close()
            raise ConfigError(f"ToolExecutor could not start its workers: {answer['error']}")

    async def spawn(self) -> tuple[Worker, list[str]]:
        """Start a worker. Returns the worker and the restrictions that could not be applied to it.

        Raises:
            LinkLostError: The fork failed.
            ConfigError: The worker reported that it cannot run.
        """
        if not self._free:
            self._free.append(self._num_slots)
            self._num_slots += 1
        ours, theirs = socket.socketpair()
        worker = Worker(self._free.pop(), self, Link(ours, self._max_bytes))
        try:
            with theirs:
                self._order(SPAWN, worker.slot, theirs)
            async with asyncio.timeout(_FORK_SECONDS):
                hello = json.loads(await worker.link.answer())
        except TimeoutError:
            hello = {"error": f"no worker came within {_FORK_SECONDS:g} s"}
        except BaseException:
            await worker.kill()
            raise
        if "error" in hello:
            await worker.kill()
            raise ConfigError(f"ToolExecutor could not start a worker: {hello['error']}.")
        return worker, hello["problems"]

    async def end(self, slot: int, *, has_ended: bool) -> int | None:
        """See `Worker.kill`."""
        assert self._link is not None
        try:
            async with self._orders:
                self._order(REAP if has_ended else KILL, slot)
                status: int | None = json.loads(await self._link.answer())
        except LinkLostError:  # the fork server is gone, and its workers with it
            self._link.socket.close()
            return None
        self._free.append(slot)
        return status

    def close(self) -> None:
        """End the fork server, which ends its workers, and wait for it."""
        if self._link is None or self._process is None:
            return
        with contextlib.suppress(LinkLostError):
            self._order(QUIT, 0)
        with contextlib.suppress(OSError):
            self._link.socket.shutdown(socket.SHUT_RDWR)
        if not self._orders.locked():  # otherwise `end` waits for an answer, and closes the socket
            self._link.socket.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _order(self, kind: bytes, slot: int, *passed: socket.socket) -> None:
        assert self._link is not None
        try:
            # An order is a few bytes, and the buffer holds thousands of orders, so this does not block.
            socket.send_fds(self._link.socket, [ORDER.pack(kind, slot)], [end.fileno() for end in passed])
        except OSError as error:
            raise LinkLostError(f"the fork server is gone: {error}") from error


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
