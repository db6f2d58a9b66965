"""Remote tools: their event loop, on a thread of its own. A tool that blocks this loop fails no other call."""

import asyncio
import json
import threading
import time
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from adapters.tools.catalogue.arguments import ArgumentChecker
from adapters.tools.catalogue.tools import Tool
from adapters.tools.errors import LoopBlockedError, ToolError, ToolRaisedError, ToolTimeoutError

from .batches import Turn
from .worker import CallError, described, encode_output, message_of
from .workers import ERRORS

_GRACE_SECONDS = 1.0
"""Time for a cancelled remote tool to end. After that, the executor stops waiting for it."""
_LOOK_SECONDS = 0.05
"""Time between two looks at which call holds the loop."""
_STUCK_SECONDS = 10.0
"""How long a call may hold the loop beyond its own timeout before the loop is given up."""
_END_SECONDS = 1.0
"""Time for the threads to end when the loop is closed. A thread that a tool blocks is left behind."""
_CALL: ContextVar["RemoteCall | None"] = ContextVar("remote call", default=None)
"""The call to which a task belongs. Tasks that a tool starts inherit it."""


class RemoteTools:
    """Awaits remote tools. Everything here may be called in any thread but the loop's.

    Args:
        checkers: Argument checkers by name.
        max_bytes: Size limit of one output as JSON.
        max_concurrency: Maximum number of concurrent calls.
    """

    def __init__(self, checkers: Mapping[str, ArgumentChecker], max_bytes: int, max_concurrency: int) -> None:
        self._checkers, self._max_bytes = checkers, max_bytes
        self._turns = threading.Semaphore(max_concurrency)
        self._lock = threading.Lock()
        self._loops: list[RemoteLoop] = []

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the thread of the remote tools."""
        return any(threading.current_thread() is loop.thread for loop in self._loops)

    def is_slow(self, tool: Tool) -> bool:
        """Whether a check of the tool's arguments can be slow, so that a worker has to do it."""
        return self._checkers[tool.name].is_slow

    def call(self, tool: Tool, text: str, timeout: float, turn: Turn) -> tuple[Any, int]:
        """Check the arguments, unless `is_slow`, and await the tool. Returns the output and its size in bytes."""
        with turn.of(self._turns):
            turn.begin()
            check, arguments = self._checkers[tool.name], json.loads(text)
            arguments = check.convert(arguments) if check.is_slow else check(arguments)
            call = self._ended(tool, arguments, timeout, turn)
        if isinstance(call.error, ToolError) and type(call.error).__module__ == ToolError.__module__:
            # A client may raise a ToolError itself, for example when its server is gone.
            raise type(call.error)(f"{tool.name}: {message_of(call.error)}") from call.error
        if call.error is not None:
            raise ToolRaisedError(f"{tool.name}: {described(call.error)}") from call.error
        try:
            content = encode_output(call.output, self._max_bytes)
        except CallError as error:
            raise ERRORS[error.name](f"{tool.name}: {error}") from None
        return json.loads(content), len(content)

    def _ended(self, tool: Tool, arguments: dict[str, Any], timeout: float, turn: Turn) -> "RemoteCall":
        """Await a tool. A call that ignores its cancellation is abandoned."""
        with self._lock:
            if not self._loops or self._loops[-1].is_stuck():
                self._loops.append(RemoteLoop())
            loop = self._loops[-1]
        call = RemoteCall(loop, tool, arguments, timeout)
        turn.seconds = call.seconds
        call.start()
        try:
            with turn.ended_by(call.cancel):
                while not call.ended.is_set() and (left := timeout - call.seconds()) > 0 and not loop.is_stuck():
                    call.ended.wait(min(max(left, _LOOK_SECONDS), 1.0))
                    turn.check()
        finally:
            is_late = call.seconds() >= timeout
            is_blocked = not call.ended.is_set() and not is_late
            if not call.ended.is_set():
                call.cancel()
                call.ended.wait(_GRACE_SECONDS)
        if is_late:
            raise ToolTimeoutError(f"{tool.name}: no answer within {timeout:g} s; the call was cancelled.")
        if is_blocked:
            raise LoopBlockedError(
                f"{tool.name}: another remote tool blocks the event loop, so this call could not go on. A remote tool must "
                "await, and not block: make the other tool a function that runs in a worker."
            )
        return call

    def close(self) -> None:
        """End all loops."""
        for loop in self._loops:
            loop.close()


class RemoteLoop:
    """Runs remote tools. A second thread looks again and again which call holds the loop, and so measures for how long."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._make_task)
        self._calls: weakref.WeakKeyDictionary[asyncio.Task[Any], RemoteCall | None] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._held = 0.0
        self._holder: asyncio.Task[Any] | None = None
        self._since = self._looked = time.perf_counter()
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._serve, name="ToolExecutor's remote tools", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="ToolExecutor's watch", daemon=True)
        self.thread.start()
        self._watcher.start()

    def held_by_others(self, call: "RemoteCall | None") -> float:
        """Seconds for which all calls but `call` have held the loop.

        The call that holds the loop now is taken to have held it since the last look, which is right on average.
        """
        with self._lock:
            now, task = time.perf_counter(), asyncio.current_task(self.loop)
            if task is not self._holder:
                self._holder, self._since = task, now
            if task is not None:
                self._held += now - self._looked
                holder = self._calls.get(task)
                if holder is not None:
                    holder.held += now - self._looked
            self._looked = now
            return self._held - (0.0 if call is None else call.held)

    def is_stuck(self) -> bool:
        """Whether a call still holds the loop long after its own timeout."""
        task, since = self._holder, self._since
        call = None if task is None else self._calls.get(task)
        return call is not None and time.perf_counter() - since > call.timeout + _STUCK_SECONDS

    def close(self) -> None:
        """Cancel all tasks and stop the loop."""
        self._closed.set()
        self.loop.call_soon_threadsafe(self._stop)
        for thread in {self.thread, self._watcher} - {threading.current_thread()}:
            thread.join(_END_SECONDS)

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self.held_by_others(None)

    def _serve(self) -> None:
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
                self.loop.close()
            except (SystemExit, KeyboardInterrupt):  # raised in a task that a tool has left; the calls go on
                continue

    def _stop(self) -> None:
        self.loop.set_exception_handler(lambda *_: None)  # abandoned calls were already reported
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)  # after the tasks have received their cancellation

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(work, loop=loop, **options)
        self._calls[task] = _CALL.get()
        return task


class RemoteCall:
    """A call of a remote tool."""

    def __init__(self, loop: RemoteLoop, tool: Tool, arguments: dict[str, Any], timeout: float) -> None:
        self.timeout = timeout
        self.held = 0.0
        """Seconds for which this call has held the loop."""
        self.ended = threading.Event()
        self.output: Any = None
        self.error: BaseException | None = None
        self._loop, self._tool, self._arguments = loop, tool, arguments
        self._held_before, self._begun = loop.held_by_others(None), time.perf_counter()
        self._total: float | None = None

    def seconds(self) -> float:
        """Seconds from the start to the end, or to now, without the time for which other calls held the loop."""
        if self._total is not None:
            return self._total
        return time.perf_counter() - self._begun - (self._loop.held_by_others(self) - self._held_before)

    def start(self) -> None:
        """Start the call. Its tasks can be told from the tasks of other calls."""
        _CALL.set(self)
        self._loop.loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Cancel the call as soon as the loop is free."""
        self._loop.loop.call_soon_threadsafe(lambda: self._task.cancel())

    def _start(self) -> None:
        self._task = self._loop.loop.create_task(self._work())
        self._task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[Any]") -> None:
        self._total = self.seconds()
        self.ended.set()

    async def _work(self) -> None:
        try:
            self.output = await self._tool.function(**self._arguments)
        except BaseException as error:  # an uncaught `SystemExit` would end the loop
            self.error = error
