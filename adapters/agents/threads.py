"""Threads for code that blocks: environments, programs, and functions that speak."""

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any


class OwnThread:
    """A thread in which one environment makes all its blocking calls. A call that hangs holds up no one else."""

    def __init__(self, turns: contextlib.AbstractContextManager | None = None) -> None:
        self._turns = turns or contextlib.nullcontext()  # held during each call
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future, asyncio.AbstractEventLoop] | None]
        self._calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it has calls to make, or waits for some."""
        return self._thread is not None and self._thread.is_alive()

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in the thread, or await it if it is `async def`."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        if self._thread is None:
            # daemon: a call that hangs is given up, and must not hold up the exit
            self._thread = threading.Thread(target=self._work, daemon=True, name="environment")
            self._thread.start()
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._calls.put((lambda: function(*args, **kwargs), future, loop))
        result = await future
        return await result if inspect.isawaitable(result) else result

    async def finish(self) -> None:
        """Wait for the calls that the thread was given, and end it. A call that hangs holds up this task, so it is counted."""
        try:
            if self._thread is not None:
                await self.run(lambda: None)
        finally:
            self.end()

    def end(self) -> None:
        """End the thread after the calls that it was given."""
        self._calls.put(None)

    def _work(self) -> None:
        while (job := self._calls.get()) is not None:
            call, future, loop = job
            try:
                with self._turns:
                    result, error = call(), None
            except BaseException as raised:
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop has closed, because the call was given up; `close` may follow
                continue


def _settle(future: asyncio.Future, result: Any, error: BaseException | None) -> None:
    if future.done():  # cancelled
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # asyncio cannot carry these
        future.set_exception(RuntimeError(f"the environment raised {type(error).__name__}: {error}"))
