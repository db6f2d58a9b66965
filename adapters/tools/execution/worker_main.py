"""The fork server of `ToolExecutor`. It imports the tools once and forks the workers.

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
import shutil
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from ..catalogue.arguments import ArgumentChecker, RefusedArgumentsError  # noqa: TID252  # `BOOT` loads this file in another package
from .worker_calls import Worker, described, receive, send
from .worker_process import (
    LINUX,
    PR_SET_CHILD_SUBREAPER,
    children,
    confine_process,
    make_root,
    prctl,
    take_user,
    why_not_user,
)

BOOT = """
import sys, types
package = types.ModuleType("tool_worker")
package.__path__ = [sys.argv[2]]
sys.modules["tool_worker"] = package
from tool_worker.execution.worker_main import main
main(int(sys.argv[1]))
"""
"""Code that starts the fork server. Its arguments are the control socket's descriptor and the folder of `adapters.tools`."""
ORDER = struct.Struct(">cI")
"""Format of an order to the fork server: the kind, then the worker's number (its slot). `SPAWN` also passes a socket."""
SPAWN, KILL, QUIT = b"s", b"k", b"q"
INSIDE = "MODEL_AGNOSTIC_GRPO_TOOL_WORKER"
"""Environment variable that the fork server sets. While it is set, creating an executor raises ConfigError, so that importing
a tool's module cannot start workers that import the module again."""

_SOCKET = 3
_NUM_UIDS = 1000


class ForkServer:
    """Forks workers, and ends workers with every process that they started.

    Args:
        control: Socket for orders from the executor.
        setup: Settings from `workers.WorkerSource`.
        tools: (function, checker) by tool name.
    """

    def __init__(self, control: socket.socket, setup: dict[str, Any], tools: dict[str, Any]) -> None:
        self.control = control
        self.setup = setup
        self.tools = tools
        self.workers: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.uids: dict[int, int] = {}
        self.locks: list[socket.socket] = []
        self.may_drop = LINUX and os.geteuid() == 0 and setup["limits"]["first_uid"] is not None
        if self.may_drop:
            self._prepare_users()

    def _prepare_users(self) -> None:
        """Give the executor's folder to the workers' group. Workers keep this user if root may not do what they need."""
        user = (self._uid(0), self._uid(0))
        reason = why_not_user(user)
        if reason is None and self.setup["own_root"]:
            try:
                make_root(self.setup["root"], user)
            except OSError as error:
                reason = f"cannot give the tools' folder to group {user[1]} ({error.strerror})"
        if reason is not None:
            self.may_drop = False
            self.setup["no_own_users"] = (
                f"root {reason}; give the program the capabilities CAP_CHOWN, CAP_KILL, CAP_SETGID and CAP_SETUID for workers "
                "with user ids of their own"
            )

    def serve(self) -> None:
        """Carry out orders until `QUIT`, or until the executor is gone.

        If the executor is gone, also remove the folder that the executor created.
        """
        told = False
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of a worker become children of this process, which reaps them
        while order := self._order():
            (kind, slot), connection = order
            if kind == SPAWN and connection is not None:
                self._spawn(slot, connection)
            elif kind == KILL:
                send(self.control, json.dumps({"killed": slot, "status": self._end(slot)}).encode())
            elif kind == QUIT:
                told = True
                break
        for slot in list(self.workers):
            self._end(slot)
        if self.setup["own_root"] and not told:
            shutil.rmtree(self.setup["root"], ignore_errors=True)  # nobody is left to report errors to

    def _order(self) -> tuple[Any, socket.socket | None] | None:
        data, passed = b"", []
        while len(data) < ORDER.size:
            part, descriptors, _, _ = socket.recv_fds(self.control, ORDER.size - len(data), 1)
            if not part:
                return None
            data += part
            passed += descriptors
        return ORDER.unpack(data), socket.socket(fileno=passed[0]) if passed else None

    def _spawn(self, slot: int, connection: socket.socket) -> None:
        """Fork a worker. A failure closes the socket, which tells the executor."""
        with connection:
            user = (self._uid(slot), self._uid(0)) if self.may_drop else None
            with contextlib.suppress(OSError):  # no memory, or too many processes
                pid = os.fork()
                if pid == 0:
                    try:
                        self._become_worker(connection, user)
                    finally:
                        os._exit(70)
                self.workers[slot] = pid

    def _uid(self, slot: int) -> int:
        """A user id that no other executor uses. A socket's name marks the id as used until this process ends."""
        if slot not in self.uids:
            first = self.setup["limits"]["first_uid"]
            for uid in range(first, first + _NUM_UIDS):
                lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                try:
                    lock.bind(f"\0model-agnostic-grpo tool worker {uid}")
                except OSError:
                    lock.close()
                    continue
                self.locks.append(lock)
                self.uids[slot] = uid
                break
            else:
                raise RuntimeError(
                    f"other executors use all {_NUM_UIDS} user ids from {first} on; close one, or change WorkerLimits.first_uid"
                )
        return self.uids[slot]

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
            problems = confine_process(self.setup, user)
        except BaseException as error:
            send(answers, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            return
        send(answers, json.dumps({"problems": problems}).encode())
        Worker(answers, self.setup, self.tools, alone=user is not None and os.getresuid() == (user[0],) * 3).serve()

    def _end(self, slot: int) -> int | None:
        """Kill the worker with this number, and every process that it started. Returns its status from `os.waitpid`."""
        pid = self.workers.pop(slot, None)
        if pid is None:
            return self.ended.pop(slot, None)
        _kill_group(pid)
        if slot in self.uids:
            self._kill_user(self.uids[slot])
        status = os.waitpid(pid, 0)[1]
        until = time.monotonic() + 1.0
        while (strays := self._strays()) and time.monotonic() < until:
            if slot not in self.uids:
                for stray in strays:
                    os.kill(stray, signal.SIGKILL)
            time.sleep(0.0005)
        return status

    def _strays(self) -> list[int]:
        """Reap ended children. Returns children that are not workers."""
        known = {pid: slot for slot, pid in self.workers.items()}
        with contextlib.suppress(ChildProcessError, AttributeError):  # some systems have no `waitid`
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in known:  # kill its group before reaping it, after which the id can be reused
                    _kill_group(found.si_pid)
                    slot = known[found.si_pid]
                    if slot in self.uids:
                        self._kill_user(self.uids[slot])
                    self.ended[slot] = os.waitpid(found.si_pid, 0)[1]
                    del self.workers[slot]
                else:
                    os.waitpid(found.si_pid, 0)
        return [pid for pid in children() if pid not in self.workers.values()]

    def _kill_user(self, uid: int) -> None:
        """Kill all processes of a user at once, from a child process that takes the user's id."""
        for _ in range(10):  # a process of the user may kill the child first
            pid = os.fork()
            if pid == 0:
                try:
                    take_user((uid, uid))
                    if uid > 0 and os.getresuid() == (uid, uid, uid):
                        os.kill(-1, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                finally:
                    os._exit(0)
            if os.waitpid(pid, 0)[1] == 0:
                return


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def load_tools(setup: dict[str, Any]) -> dict[str, Any]:
    """Import the functions, once for all workers."""
    sys.path[:] = setup["sys_path"]
    if setup["main"] is not None:
        _import_main(*setup["main"])
    tools: dict[str, Any] = {}
    for name, (function, parameters) in setup["tools"].items():
        try:
            tools[name] = _loaded(bytes.fromhex(function)), None
        except BaseException as error:
            raise RuntimeError(f"tool {name} cannot be imported: {described(error)}") from error
        checker = ArgumentChecker(tools[name][0], parameters, setup["root"])
        with contextlib.suppress(RefusedArgumentsError):
            checker({})  # libraries read files at first use; a worker's user might not be able to
        tools[name] = tools[name][0], checker
    if any(inspect.iscoroutinefunction(function) for function, _ in tools.values()):
        import asyncio  # noqa: F401
    return tools


def _loaded(pickled: bytes) -> Callable[..., Any]:
    """Unpickle a function, which is imported by its name, or a callable object."""
    return pickle.loads(pickled)


def _import_main(kind: str, where: str) -> None:
    """Import the executor's `__main__` as `__mp_main__`, so that its `if __name__ == "__main__":` block does not run."""
    run = runpy.run_module if kind == "module" else runpy.run_path
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(run(where, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def main(descriptor: int) -> None:
    """Import the tools and serve the executor's orders."""
    control = socket.socket(fileno=descriptor)
    received = receive(control)
    if received is None:
        return
    setup = json.loads(received)
    try:
        tools = load_tools(setup)
        server = ForkServer(control, setup, tools)
    except BaseException as error:  # an import may raise anything; the executor reports it
        send(control, json.dumps({"error": f"{described(error)}"}).encode())
        return
    gc.collect()
    gc.freeze()  # memory pages that the collector does not touch stay shared
    send(control, json.dumps({"ready": os.getpid()}).encode())
    server.serve()
