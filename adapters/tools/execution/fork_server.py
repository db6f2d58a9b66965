"""The fork server of `ToolExecutor`. It imports the tools once, and forks and ends the workers.

    executor --- control socket ---> fork server --- fork ---> worker 0, 1, ...
        `------------- one socket for each worker --------------'

The fork server and the workers send JSON and no pickles, because the executor does not trust them.

This module and its imports are loaded as a separate package (`BOOT`), so that neither `adapters.tools` nor the user's
`__main__` is imported, unless the tools import them.
"""

import contextlib
import gc
import inspect
import json
import os
import pickle
import runpy
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..catalogue.arguments import ArgumentChecker, RefusedArgumentsError  # noqa: TID252  # `BOOT` loads this file in another package
from .confinement import confine
from .confinement.process import NUM_UIDS, PR_SET_CHILD_SUBREAPER, children, prctl
from .worker import Worker, described, enter, receive, remove_folder, send

BOOT = """
import sys, types
package = types.ModuleType("tool_worker")
package.__path__ = [sys.argv[2]]
sys.modules["tool_worker"] = package
from tool_worker.execution.fork_server import main
main(int(sys.argv[1]))
"""
"""Code that starts the fork server. Its arguments are the control socket's descriptor and the folder of `adapters.tools`."""
ORDER = struct.Struct(">cI")
"""Format of an order to the fork server: the kind, then the worker's number (its slot). `SPAWN` also passes a socket."""
SPAWN, KILL, REAP, QUIT = b"s", b"k", b"r", b"q"
"""`KILL` ends a worker. `REAP` first gives a worker whose socket has ended a moment to end by itself."""
INSIDE = "MODEL_AGNOSTIC_GRPO_TOOL_WORKER"
"""Environment variable of the fork server. While it is set, creating an executor raises ConfigError, so that importing a tool's
module cannot start workers that import the module again."""

_SOCKET = 3
_REAP_SECONDS = 0.5


class ForkServer:
    """Forks workers, and ends workers with every process that they started, as the socket `control` orders.

    `setup` has the settings of `workers.setup_of`. Its functions are imported here, once for all workers.
    """

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self.control, self.setup = control, setup
        self.functions = load_functions(setup)
        self.checkers = {
            name: ArgumentChecker(self.functions[name], schema, setup["root"])
            for name, (_, schema) in setup["tools"].items()
        }
        for checker in self.checkers.values():
            with contextlib.suppress(RefusedArgumentsError):
                checker({})  # libraries read files at first use; a worker's user might not be able to
        self.workers: dict[int, int] = {}
        self.uids: dict[int, int] = {}
        self.locks: list[socket.socket] = []
        self._make_root()

    def serve(self) -> None:
        """Carry out orders until `QUIT`, or until the executor is gone. Its folder is then removed here."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of a worker become children of this process, which reaps them
        kind = None
        while kind != QUIT:
            data, passed, _, _ = socket.recv_fds(self.control, ORDER.size, 1)
            if not data:
                break
            kind, slot = ORDER.unpack(data)
            if kind == SPAWN and passed:
                self._spawn(slot, socket.socket(fileno=passed[0]))
            elif kind in (KILL, REAP):
                send(self.control, json.dumps(self._end(slot, _REAP_SECONDS if kind == REAP else 0.0)).encode())
        for slot in list(self.workers):
            self._end(slot)
        if self.setup["own_root"] and kind != QUIT:  # nobody is left to report errors to
            with contextlib.suppress(OSError):
                remove_folder(self.setup["root"])
            with contextlib.suppress(OSError):  # bubblewrap has mounted the folder: it is removed from its real parent
                os.rmdir(Path(self.setup["root"]).name, dir_fd=self.setup["parent"])

    def _make_root(self) -> None:
        """Create the executor's folder if it is missing, for the workers' group if they have user ids of their own."""
        if self.setup["own_root"]:
            root = Path(self.setup["root"])
            root.mkdir(mode=0o700, exist_ok=True)
            if self.setup["no_own_users"] is None:
                os.chown(root, 0, self._uid(0))
                root.chmod(0o2770)

    def _spawn(self, slot: int, connection: socket.socket) -> None:
        """Fork a worker. A failure closes the socket, which tells the executor."""
        with connection, contextlib.suppress(OSError):  # no user id, no memory, or too many processes
            self._make_root()  # a tool may have removed it
            user = (self._uid(slot), self._uid(0)) if self.setup["no_own_users"] is None else None
            pid = os.fork()
            if pid == 0:
                try:
                    self._become_worker(connection, user)
                finally:
                    os._exit(70)
            self.workers[slot] = pid

    def _uid(self, slot: int) -> int:
        """A user id that no other executor uses. A socket's name marks the id as used until this process ends."""
        if slot in self.uids:
            return self.uids[slot]
        first = self.setup["limits"]["first_uid"]
        for uid in range(first, first + NUM_UIDS - 1):  # the last one is for `_kill_user`
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with contextlib.suppress(OSError):  # another executor uses this id
                lock.bind(f"\0model-agnostic-grpo tool worker {uid}")
                self.locks.append(lock)
                self.uids[slot] = uid
                return uid
            lock.close()
        raise OSError(
            f"other executors use all {NUM_UIDS - 1} user ids from {first} on; close one, or change WorkerLimits.first_uid"
        )

    def _become_worker(self, connection: socket.socket, user: tuple[int, int] | None) -> None:
        for held in (self.control, *self.locks):
            held.detach()  # closed by number below, so Python must not close it again
        os.dup2(connection.detach(), _SOCKET)
        os.closerange(_SOCKET + 1, os.sysconf("SC_OPEN_MAX"))
        answers = socket.socket(fileno=_SOCKET)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.close(null)
        try:
            enter(self.setup, None)
            problems = confine(self.setup, user)
        except BaseException as error:
            send(answers, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            return
        send(answers, json.dumps({"problems": problems}).encode())
        Worker(answers, self.setup, self.functions, self.checkers).serve()

    def _end(self, slot: int, seconds: float = 0.0) -> int | None:
        """See `WorkerProcess.end`. The worker has `seconds` to end by itself."""
        pid = self.workers.pop(slot, None)
        if pid is None:  # the fork had failed
            return None
        until = time.monotonic() + seconds
        while not (has_ended := _has_ended(pid)) and time.monotonic() < until:
            time.sleep(0.0005)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if slot in self.uids:
            _kill_user(self.uids[slot], self.setup["limits"]["first_uid"] + NUM_UIDS - 1)
        status = os.waitpid(pid, 0)[1]
        until = time.monotonic() + 1.0
        while (strays := set(children()) - set(self.workers.values())) and time.monotonic() < until:
            for stray in strays:
                os.kill(stray, signal.SIGKILL)
                os.waitpid(stray, os.WNOHANG)
            time.sleep(0.0005)
        return status if has_ended else None


def _has_ended(pid: int) -> bool:
    """Whether a child has ended. It is not reaped yet, so that its number stays its own."""
    if not hasattr(os, "waitid"):  # not Linux
        return True
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_user(uid: int, spare: int) -> None:
    """Kill all processes of a user at once, from a child process whose effective user this is.

    Its other ids are those of a user without processes. Signals go by these, so no process of the user can stop it.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(spare, uid, spare)
            if uid > 0 and os.getresuid() == (spare, uid, spare):
                os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def load_functions(setup: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Import the functions. A failed import raises a RuntimeError that names the tool."""
    sys.path[:] = setup["sys_path"]
    if setup["main"] is not None:  # the program's `__main__`, whose `if __name__ == "__main__":` block must not run
        kind, where = setup["main"]
        run = runpy.run_module if kind == "module" else runpy.run_path
        module = types.ModuleType("__mp_main__")
        module.__dict__.update(run(where, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    functions: dict[str, Callable[..., Any]] = {}
    for name, (function, _) in setup["tools"].items():
        try:
            functions[name] = pickle.loads(bytes.fromhex(function))
        except BaseException as error:
            raise RuntimeError(f"tool {name} cannot be imported: {described(error)}") from error
    if any(inspect.iscoroutinefunction(function) for function in functions.values()):
        import asyncio  # noqa: F401  # here once, because a worker's user might not be able to
    return functions


def main(descriptor: int) -> None:
    """Import the tools and serve the executor's orders."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a program that ignores it passes that on
    control = socket.socket(fileno=descriptor)
    try:
        server = ForkServer(control, json.loads(receive(control, 2**33)))
    except BaseException as error:  # an import may raise anything; the executor reports it
        with contextlib.suppress(OSError):  # the executor is gone
            send(control, json.dumps({"error": described(error)}).encode())
        return
    gc.collect()
    gc.freeze()  # memory pages that the collector does not touch stay shared
    send(control, json.dumps({"ready": os.getpid()}).encode())
    server.serve()
