"""Awaited calls with a deadline that really ends. Functions that do not await need a process (`CallsInProcess`)."""

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from grpo._common.calls import Call
from grpo.config import MAX_CONCURRENT
from grpo.errors import CallError, DeadlineError

WAIT_SECONDS = 0.2
"""Longest wait at a time. A signal that comes right before a wait starts is handled after it."""
GRACE_SECONDS = 0.5
"""How long after its deadline a cancelled call may go on before its event loop is given up."""


def is_async(function: Any) -> bool:
    """Whether the function is `async def`, also inside `functools.partial` or as `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def await_all(
    calls: Sequence[Call], *, timeout: float | None = None, max_concurrent: int = MAX_CONCURRENT
) -> list[Any]:
    """Await calls of `async def` functions together, and return their answers in the order of `calls`.

    The calls are awaited in an event loop that runs in a thread for as long as the process, so clients that the functions keep
    open stay usable. This also works inside a running event loop. A call that fails cancels the others.

    Args:
        calls: The calls.
        timeout: Seconds per call, from the moment at which it starts. It is cancelled then. If it goes on nevertheless, because
            it blocks without awaiting or ignores the cancellation, it is left alone in its thread, and the next calls get a new
            event loop. None: no deadline.
        max_concurrent: Largest number of calls at the same time. Larger is faster, and puts more load on servers.

    Raises:
        DeadlineError: A call did not answer in time. The message names it.
        CallError: A call tried to exit, or cancelled itself.

    Example:
        >>> async def double(number): return 2 * number
        >>> await_all([Call(name="double", function=double, arguments=(n,)) for n in (1, 2)])
        [2, 4]
    """
    background = _background_loop()
    watch = _Watch(calls, timeout)
    try:
        future = asyncio.run_coroutine_threadsafe(_await_together(calls, watch, max_concurrent), background.loop)
        while not concurrent.futures.wait([future], min(watch.seconds_left(), WAIT_SECONDS)).done:
            if watch.seconds_left() == 0.0:
                background.give_up()
                raise DeadlineError(
                    f"{watch.oldest()} did not answer within {timeout:g} s, and it still runs: it blocks its event loop, or it "
                    "ignores that it was cancelled. Await inside it, or make it a plain function, whose process is killed."
                )
        return future.result()
    except BaseException:  # an interrupt, too, also one that comes before `future` has a value
        with contextlib.suppress(RuntimeError):  # the loop was given up, and has closed
            background.loop.call_soon_threadsafe(watch.cancel)
        raise


class _Watch:
    """Knows since when each call of `await_all` runs. The event loop's thread writes, and the waiting thread reads."""

    def __init__(self, calls: Sequence[Call], timeout: float | None) -> None:
        self.timeout = timeout
        self._calls = calls
        self._started: dict[int, float] = {}
        self._last_change = time.monotonic()
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    def begin(self) -> None:
        """Note the task that awaits the calls. Raise CancelledError if `cancel` came before it."""
        self._task = asyncio.current_task()
        if self._is_cancelled:
            raise asyncio.CancelledError

    def cancel(self) -> None:
        """Cancel the calls, in the event loop's thread."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def start(self, index: int) -> None:
        """Note that a call starts."""
        self._started[index] = self._last_change = time.monotonic()

    def end(self, index: int) -> None:
        """Note that a call has ended."""
        del self._started[index]
        self._last_change = time.monotonic()

    def seconds_left(self) -> float:
        """Seconds until the oldest call is too late, and at least 0. Infinity: there is no deadline."""
        if self.timeout is None:
            return math.inf
        since = min(list(self._started.values()), default=self._last_change)  # no call runs: none could start
        return max(0.0, since + self.timeout + GRACE_SECONDS - time.monotonic())

    def oldest(self) -> str:
        """The name of the call that runs for the longest time."""
        return self._calls[min(list(self._started), key=lambda index: self._started.get(index, 0.0), default=0)].name


async def _await_together(calls: Sequence[Call], watch: _Watch, max_concurrent: int) -> list[Any]:
    """The answers of all calls in order. The first error cancels the other calls, and is raised."""
    watch.begin()
    limit = asyncio.Semaphore(max_concurrent)

    async def answer(index: int, call: Call) -> Any:
        async with limit:
            watch.start(index)
            try:
                return await _awaited(call, watch.timeout)
            finally:
                watch.end(index)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(index, call)) for index, call in enumerate(calls)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return [task.result() for task in tasks]


async def _awaited(call: Call, timeout: float | None) -> Any:
    """The answer of one call, which is cancelled at its deadline."""
    deadline = asyncio.timeout(timeout)
    try:
        async with deadline:
            return await call()
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop's thread
        raise CallError(f"{call.name} raised {type(error).__name__}: {error}. Raise another exception.") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise CallError(f"{call.name} cancelled itself. Raise another exception.") from error
    except Exception as error:
        if deadline.expired():
            raise DeadlineError(f"{call.name} did not answer within {timeout:g} s") from error
        raise


class _BackgroundLoop:
    """An event loop in a daemon thread. It belongs to the process that made it, because a fork copies no thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._process_id = os.getpid()
        self._is_given_up = False
        name = f"awaited calls of process {self._process_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether this process can await in this loop."""
        return self._process_id == os.getpid() and self._thread.is_alive() and not self._is_given_up

    def give_up(self) -> None:
        """Never use this loop again. It ends when the call that blocks it comes back."""
        self._is_given_up = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        try:
            with torch.no_grad():  # each thread has a mode of its own
                self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.close()


_loops: list[_BackgroundLoop] = []
"""The event loop in use, if there is one."""


def _background_loop() -> _BackgroundLoop:
    """The event loop of this process, in its thread."""
    if not _loops or not _loops[0].is_usable:
        _loops[:] = [_BackgroundLoop()]
    return _loops[0]
