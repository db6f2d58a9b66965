"""Remote tools: their event loop, on a thread of its own. A tool that blocks this loop fails no other call."""

import asyncio
import json
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from typing import Any

from adapters.tools.catalogue.arguments import ArgumentChecker
from adapters.tools.catalogue.tools import Tool
from adapters.tools.errors import LoopBlockedError, ToolError, ToolRaisedError, ToolTimeoutError

from .links import ERRORS
from .worker import described, encode_output, message_of

_GRACE_SECONDS = 1.0
"""Time for a cancelled remote tool to end. After that, the executor stops waiting for it."""
_LOOK_SECONDS = 1.0
"""Time between two looks at whether the loop of the remote tools is stuck."""
_CALL: ContextVar["RemoteCall | None"] = ContextVar("remote call", default=None)
"""The call to which a task belongs. Tasks that a tool starts inherit it."""
_STUCK_SECONDS = 10.0
"""How long a call may block the loop beyond its own timeout before the loop is given up."""
_END_SECONDS = 1.0
"""Time for the thread to end when the loop is closed. A thread that a tool blocks is left behind."""


class Clock:
    """Seconds since a call started."""

    def __init__(self) -> None:
        self.read: Callable[[], float] = lambda: 0.0

    def begin(self) -> None:
        """Start now."""
        begun = time.perf_counter()
        self.read = lambda: time.perf_counter() - begun

    @property
    def seconds(self) -> float:
        """0 before the start."""
        return self.read()


class RemoteTools:
    """Awaits remote tools, and measures which of them holds their event loop. Everything here runs in the engine's loop.

    Args:
        checkers: Argument checkers by name.
        max_bytes: Size limit of one output as JSON.
        max_concurrency: Maximum number of concurrent calls.
    """

    def __init__(self, checkers: Mapping[str, ArgumentChecker], max_bytes: int, max_concurrency: int) -> None:
        self._checkers, self._max_bytes = checkers, max_bytes
        self._turns = asyncio.Semaphore(max_concurrency)
        self._loops: list[RemoteLoop] = []

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the thread of the remote tools."""
        return any(loop.is_current for loop in self._loops)

    def is_slow(self, tool: Tool) -> bool:
        """Whether a check of the tool's arguments can be slow, so that a worker has to do it."""
        return self._checkers[tool.name].is_slow

    async def call(self, tool: Tool, text: str, timeout: float, clock: Clock) -> tuple[Any, int]:
        """Check the arguments, unless `is_slow`, and await the tool. Returns the output and its size in bytes."""
        async with self._turns:
            clock.begin()
            check, arguments = self._checkers[tool.name], json.loads(text)
            arguments = check.convert(arguments) if check.is_slow else check(arguments)
            fits, content = await self._in_time(tool, arguments, timeout, clock)
        answer = json.loads(content)
        if not fits:
            raise ERRORS[answer[0]](f"{tool.name}: {answer[1]}")
        return answer, len(content)

    async def _in_time(self, tool: Tool, arguments: dict[str, Any], timeout: float, clock: Clock) -> tuple[bool, bytes]:
        """Await a tool. A call that ignores its cancellation is abandoned."""
        if not self._loops or self._loops[-1].is_stuck():
            self._loops.append(RemoteLoop())
        loop = self._loops[-1]
        call = loop.start(_outcome(tool, arguments, self._max_bytes), timeout)
        clock.read = lambda: call.seconds
        ended = asyncio.wrap_future(call.future)
        try:
            while not ended.done() and (left := timeout - call.seconds) > 0 and not loop.is_stuck():
                await asyncio.wait([ended], timeout=min(left, _LOOK_SECONDS))
        finally:
            is_late = call.seconds >= timeout
            is_blocked = not ended.done() and not is_late
            if not ended.done():
                call.cancel()
                await asyncio.wait([ended], timeout=_GRACE_SECONDS)
        if is_late:
            raise ToolTimeoutError(f"{tool.name}: no answer within {timeout:g} s; the call was cancelled.")
        if is_blocked:
            raise LoopBlockedError(
                f"{tool.name}: another remote tool blocks the event loop, so this call could not go on. A remote tool must "
                "await, and not block: make the other tool a function that runs in a worker."
            )
        fits, content, error = ended.result()
        if isinstance(error, ToolError) and type(error).__module__ == ToolError.__module__:
            # A client may raise a ToolError itself, for example when its server is gone.
            raise type(error)(f"{tool.name}: {message_of(error)}") from error
        if error is not None:
            raise ToolRaisedError(f"{tool.name}: {described(error)}") from error
        return fits, content

    def close(self) -> None:
        """End all loops."""
        for loop in self._loops:
            loop.close()


async def _outcome(tool: Tool, arguments: dict[str, Any], max_bytes: int) -> tuple[bool, bytes, BaseException | None]:
    """Return a remote tool's encoded output (see `encode_output`) and None, or its exception."""
    try:
        return *encode_output(await tool.function(**arguments), max_bytes), None
    except BaseException as error:  # an uncaught `SystemExit` would end the loop
        return False, b"", error


class RemoteLoop:
    """Runs the coroutines of remote tools, and measures which call holds the loop, and for how long."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._make_task)
        self._lock = threading.Lock()
        self._held = 0.0
        self._holder: RemoteCall | None = None
        self._since: float | None = None
        self._thread = threading.Thread(target=self._serve, name="ToolExecutor's remote tools", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the thread of this loop."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, Any], timeout: float) -> "RemoteCall":
        """Start a call with its time limit in seconds. May be called in any thread."""
        call = RemoteCall(self, work, timeout, self.held_by_others(None))
        context = copy_context()
        context.run(_CALL.set, call)
        self.loop.call_soon_threadsafe(call._start, context=context)
        return call

    def held_by_others(self, call: "RemoteCall | None") -> float:
        """Seconds for which all calls but `call` have held the loop since it started."""
        with self._lock:
            held = self._held - (0.0 if call is None else call.held)
            if self._since is not None and (call is None or self._holder is not call):
                held += time.perf_counter() - self._since
            return held

    def is_stuck(self) -> bool:
        """Whether a call still holds the loop long after its own timeout."""
        with self._lock:
            if self._since is None or self._holder is None:
                return False
            return time.perf_counter() - self._since > self._holder.timeout + _STUCK_SECONDS

    def close(self) -> None:
        """Cancel all tasks and stop the loop."""
        self.loop.call_soon_threadsafe(self._stop)
        if not self.is_current:
            self._thread.join(_END_SECONDS)

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
        task = asyncio.Task(self._measured(work), loop=loop, **options)
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled before its first step never starts it
        return task

    async def _measured(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._steps(work)

    @types.coroutine
    def _steps(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run a coroutine step by step. Each step holds the loop until the coroutine waits for something."""
        call = _CALL.get()
        step, sent = work.send, None
        while True:
            is_inner = self._since is not None  # an eager task runs within a step of another task
            if not is_inner:
                self._hold(call)
            try:
                awaited = step(sent)
            except StopIteration as end:
                return end.value
            finally:
                if not is_inner:
                    self._release(call)
            try:
                step, sent = work.send, (yield awaited)
            except GeneratorExit:  # the task is destroyed
                work.close()
                raise
            except BaseException as error:  # the coroutine decides what a cancellation does
                step, sent = work.throw, error

    def _hold(self, call: "RemoteCall | None") -> None:
        with self._lock:
            self._holder, self._since = call, time.perf_counter()

    def _release(self, call: "RemoteCall | None") -> None:
        with self._lock:
            assert self._since is not None
            seconds = time.perf_counter() - self._since
            self._held += seconds
            if call is not None:
                call.held += seconds
            self._holder = self._since = None


class RemoteCall:
    """A call of a remote tool that has been started."""

    def __init__(self, remote: RemoteLoop, work: Coroutine[Any, Any, Any], timeout: float, held: float) -> None:
        self.timeout = timeout
        self.held = 0.0
        """Seconds for which this call has held the loop."""
        self.future: Future[Any] = Future()
        """What the coroutine returns. A coroutine that was cancelled before its first step returns None."""
        self._remote, self._work = remote, work
        self._held_before, self._begun = held, time.perf_counter()
        self._total: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end, or to now, without the time for which other calls held the loop."""
        if self._total is not None:
            return self._total
        waited = self._remote.held_by_others(self) - self._held_before
        return time.perf_counter() - self._begun - waited

    def cancel(self) -> None:
        """Cancel the coroutine as soon as the loop is free."""
        self._remote.loop.call_soon_threadsafe(lambda: self._task.cancel())

    def _start(self) -> None:
        self._task = self._remote.loop.create_task(self._work)
        self._task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[Any]") -> None:
        self._total = self.seconds
        self.future.set_result(None if task.cancelled() else task.result())
