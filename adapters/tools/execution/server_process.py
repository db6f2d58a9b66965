"""The program's handle of the fork server, and what the fork server needs to know."""

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.tools.catalogue.schemas import names_path_format, slow_keyword
from adapters.tools.catalogue.tools import Tool
from grpo.errors import ConfigError

from .commands import Command
from .confinement import KINDS, readable_paths
from .confinement.process import PR_SET_DUMPABLE, prctl
from .fork_server import BOOT, INSIDE, KILL, ORDER, QUIT, REAP, SPAWN
from .worker import receive, send

_START_SECONDS = 120.0
"""Time limit for the import of the tools' modules."""
_END_SECONDS = 10.0
_HOME = str(Path(__file__).parents[1])


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
        with theirs:
            self._process = subprocess.Popen(
                KINDS[setup["kind"]].prefix(root, setup["readable"]) + command,
                pass_fds=[theirs.fileno(), parent],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=passed_on | {"LANG": "C.UTF-8", "HOME": root, "OMP_NUM_THREADS": "1", INSIDE: "1"},  # no secrets
                cwd=root,
                start_new_session=True,  # Ctrl-C goes to the main program, which shuts the fork server down
            )
        os.close(parent)
        try:
            send(self._socket, json.dumps(setup | {"parent": parent}).encode())
            answer = json.loads(receive(self._socket, deadline=time.monotonic() + _START_SECONDS))
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)  # it has no workers yet
            answer = {"error": f"their modules were not imported within {_START_SECONDS:g} s"}
        except (EOFError, OSError) as error:
            answer = {"error": f"the fork server: {error}; it may have written why, and another confinement may work"}
        if "error" in answer:
            self.close()
            raise ConfigError(f"ToolExecutor could not start its workers: {answer['error']}")

    @property
    def is_lost(self) -> bool:
        """Whether the fork server has ended."""
        return next_byte(self._socket) == b""

    def spawn(self, connection: socket.socket) -> int:
        """Start a worker with this end of its socket. Returns its number. Raises OSError if the fork server is gone."""
        with self._orders:
            slot = self._free.pop() if self._free else next(self._slots)
            socket.send_fds(self._socket, [ORDER.pack(SPAWN, slot)], [connection.fileno()])
        return slot

    def end(self, slot: int, *, has_ended: bool) -> int | None:
        """See `WorkerProcess.end`."""
        with contextlib.suppress(EOFError, OSError), self._orders:  # if the fork server is gone, so are its workers
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


def next_byte(connection: socket.socket) -> bytes | None:
    """The next byte that has arrived, which stays unread. Empty at the end of the data, and None if there is none yet."""
    try:
        connection.settimeout(None)  # otherwise `recv` waits
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def needs_worker(tool: Tool) -> bool:
    """Whether a worker executes the tool, or checks its arguments because that may be slow. Checks the tool's schema."""
    slow = slow_keyword(tool.parameters)
    if not hasattr(os, "fork") and (not tool.remote or slow is not None):
        raise ConfigError(
            f"ToolExecutor needs Unix for its worker processes, and tool {tool.name} needs a worker. It must be `remote`, and "
            "its schema must not have `pattern`, `patternProperties`, `uniqueItems` or a recursive `$ref`."
        )
    if tool.remote and slow is not None and names_path_format(tool.parameters):
        raise ConfigError(
            f'Tool {tool.name}: parameters of a remote tool must not have both "format": "path" and `{slow}`: this process '
            f"checks paths, and a check of `{slow}` could block all other calls. Remove one of the two from the schema, or "
            "leave the tool out of `allow`."
        )
    return not tool.remote or slow is not None


def setup_of(tools: Sequence[Tool], **settings: Any) -> dict[str, Any]:
    """What the fork server needs to know, as JSON values.

    Raises:
        ConfigError: Workers cannot import a function, or a `Command` does not match its tool.
    """
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
