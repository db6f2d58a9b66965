"""Remote tools: their event loop, on a thread of its own. A tool that blocks this loop fails no other call."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any

from adapters.tools.catalogue.tools import Tool
from adapters.tools.errors import LoopBlockedError, ToolError, ToolRaisedError, ToolTimeoutError

from .batches import Turn
from .worker import CallError, described, encode_output, message_of
from .workers import ERRORS

_GRACE_SECONDS = 1.0
"""Time for a cancelled remote tool to end. After that, the executor stops waiting for it."""
_LOOK_SECONDS = 1.0
"""Time between two looks at whether the loop is stuck."""
_STUCK_SECONDS = 10.0
"""How long a call may hold the loop beyond its own timeout before the loop is given up."""
_END_SECONDS = 1.0
"""Time for a thread to end when the loop is closed. A thread that a tool blocks is left behind."""
_CALL: ContextVar["RemoteCall | None"] = ContextVar("remote call", default=None)
"""The call to which a step of the loop belongs. Tasks that a tool starts inherit it."""


class RemoteTools:
    """Awaits remote tools: at most `max_concurrency` at once, with outputs of at most `max_bytes` as JSON."""

    def __init__(self, max_bytes: int, max_concurrency: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._turns = threading.Semaphore(max_concurrency)
        self._lock = threading.Lock()
        self._loops: list[RemoteLoop] = []

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the thread of the remote tools."""
        return any(threading.current_thread() is loop.thread for loop in self._loops)

    def call(self, tool: Tool, arguments: dict[str, Any], timeout: float, turn: Turn) -> tuple[Any, int]:
        """Await a tool, in another thread than the loop's. Returns the output and its size in bytes."""
        with turn.of(self._turns):
            with self._lock:
                if not self._loops or self._loops[-1].is_stuck():
                    self._loops.append(RemoteLoop(self._clock))
                call = RemoteCall(self._loops[-1], tool, arguments, timeout)
            call.run(turn)
        if isinstance(call.error, ToolError) and type(call.error).__module__ == ToolError.__module__:
            # A client may raise a ToolError itself, for example when its server is gone.
            raise type(call.error)(f"{tool.name}: {message_of(call.error)}") from call.error
        if call.error is not None:
            raise ToolRaisedError(f"{tool.name}: {described(call.error)}") from call.error
        try:
            content = encode_output(call.output, self._max_bytes)
        except CallError as error:
            raise ERRORS[error.args[0]](f"{tool.name}: {error.args[1]}") from None
        return json.loads(content), len(content)

    def close(self) -> None:
        for loop in self._loops:
            loop.close()


class RemoteLoop:
    """An event loop on a thread. It measures which call holds it, and for how long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.loop = asyncio.new_event_loop()
        # measured here, because samples of the current task charged the wrong call for short blocks
        self._schedule = self.loop.call_soon
        vars(self.loop)["call_soon"] = self._call_soon  # tasks and futures schedule each of their steps with it
        self._lock = threading.Lock()
        self._held = 0.0
        self._holder: RemoteCall | None = None
        self._since: float | None = None
        self._closed = False
        self.thread = threading.Thread(target=self._serve, name="remote tools", daemon=True)
        self.thread.start()

    def time_of(self, call: "RemoteCall") -> float:
        """The clock in seconds, less all the time for which other calls than `call` have held the loop."""
        with self._lock:  # one reading, or what happens between two would be charged
            now, by_others = self.clock(), self._held - call.held
            if self._since is not None and self._holder is not call:
                by_others += now - self._since
            return now - by_others

    def is_stuck(self) -> bool:
        """Whether a call still holds the loop long after its own timeout."""
        with self._lock:
            if self._holder is None or self._since is None:
                return False
            return self.clock() - self._since > self._holder.timeout + _STUCK_SECONDS

    def close(self) -> None:
        """Cancel all tasks and stop the loop."""
        self.loop.call_soon_threadsafe(self._stop)
        if self.thread is not threading.current_thread():
            self.thread.join(_END_SECONDS)

    def _serve(self) -> None:
        while not self._closed:  # the calls go on if a tool stops the loop, or has left a task that raises one of these
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
        self.loop.close()

    def _stop(self) -> None:
        self._closed = True
        self.loop.set_exception_handler(lambda *_: None)  # abandoned calls were already reported
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)  # after the tasks have received their cancellation

    def _call_soon(
        self, step: Callable[..., object], *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        return self._schedule(self._measured, context.get(_CALL), step, arguments, context=context)

    def _measured(self, call: "RemoteCall | None", step: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        with self._lock:
            self._holder, self._since = call, (begun := self.clock())
        try:
            step(*arguments)
        finally:
            with self._lock:
                seconds = self.clock() - begun
                self._held += seconds
                if call is not None:
                    call.held += seconds
                self._holder = self._since = None


class RemoteCall:
    def __init__(self, loop: RemoteLoop, tool: Tool, arguments: dict[str, Any], timeout: float) -> None:
        self.timeout = timeout
        self.held = 0.0
        """Seconds for which this call has held the loop."""
        self.output: Any = None
        self.error: BaseException | None = asyncio.CancelledError("before it began")
        self._loop, self._tool, self._arguments = loop, tool, arguments
        self._ended = threading.Event()
        self._begun = loop.time_of(self)
        self._total: float | None = None

    def seconds(self) -> float:
        """Seconds from the start to the end, or to now, without the time for which other calls held the loop."""
        if self._total is not None:
            return self._total
        return self._loop.time_of(self) - self._begun

    def run(self, turn: Turn) -> None:
        """Run the call within its time. A tool that ignores its cancellation is abandoned."""
        turn.seconds = self.seconds
        _CALL.set(self)
        self._loop.loop.call_soon_threadsafe(self._start)
        try:
            with turn.ended_by(self._cancel):
                while not self._ended.is_set() and (left := self.timeout - self.seconds()) > 0:
                    turn.check()
                    if self._loop.is_stuck():
                        raise LoopBlockedError(
                            f"{self._tool.name}: another remote tool blocks the event loop, so this call could not go on. A "
                            "remote tool must await, and not block: make the other tool a function that runs in a worker."
                        )
                    self._ended.wait(min(left, _LOOK_SECONDS))
                turn.check()
        finally:
            is_late = self.seconds() >= self.timeout
            if not self._ended.is_set():
                self._cancel()
                self._ended.wait(_GRACE_SECONDS)
        if is_late:
            raise ToolTimeoutError(f"{self._tool.name}: no answer within {self.timeout:g} s; the call was cancelled.")

    def _cancel(self) -> None:
        self._loop.loop.call_soon_threadsafe(lambda: self._task.cancel())

    def _start(self) -> None:
        self._task = self._loop.loop.create_task(self._work())
        self._task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[Any]") -> None:
        self._total = self.seconds()
        self._ended.set()

    async def _work(self) -> None:
        try:
            self.output, self.error = await self._tool.function(**self._arguments), None
        except BaseException as error:  # an uncaught `SystemExit` would end the loop
            self.error = error
