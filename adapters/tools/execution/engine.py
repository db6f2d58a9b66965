"""The executor's event loop: scheduling, timeouts and results. No tool runs in this loop, so that deadlines are met."""

import asyncio
import itertools
import json
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from adapters.tools.catalogue.arguments import ArgumentChecker, RefusedArgumentsError, encode_arguments
from adapters.tools.catalogue.calls import ToolCall, ToolResult
from adapters.tools.catalogue.tools import Tool
from adapters.tools.errors import ToolError
from grpo.errors import ConfigError, GRPOWarning

from .call_log import CallLog
from .links import ERRORS, ForkServerLink
from .remote_tools import Clock, RemoteTools
from .worker import remove_folder
from .workers import WorkerPool

Given = tuple[ToolCall, Tool | ToolError, str | None]
"""A call, its tool or the error if it has none, and the name of its folder."""

CLEAN_UP_SECONDS = 10.0
"""Time for cancelled work to end when the executor is closed."""


class Waiting:
    """Somebody who waits for work in the loop. It exists before the work, so that an interrupt at any moment ends the work."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        """The result of the work."""
        self.ended = threading.Event()
        """Whether no work is left in the loop."""
        self.ended.set()

    def begin(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> None:
        """Begin the work in the loop. Work that is given up already takes its first step, in which it notes its end."""
        task = loop.create_task(work)
        task.add_done_callback(self._end)
        self.future.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))

    def give_up(self) -> None:
        """Cancel the work, and give it time to clean up."""
        self.future.cancel()
        self.ended.wait(CLEAN_UP_SECONDS)

    def _end(self, task: "asyncio.Task[Any]") -> None:
        error = None
        if task.cancelled():
            self.future.cancel()
        else:
            error = task.exception()
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(task.result()) if error is None else self.future.set_exception(error)
        self.ended.set()


class Engine:
    """Schedules all calls in one event loop on one thread. See `ToolExecutor` for the arguments that it has too.

    Args:
        make_server: Creates the fork server of the workers.
        checkers: Argument checkers of the remote tools. If a checker `is_slow`, a worker checks the arguments instead, by
            a call of a substitute tool with the same name and schema.
        fresh_in: Folder in which each call in a worker gets an empty folder. None gives it none.
        log: Log of the calls, or None. A cancelled call is logged too, with the error `CancelledError`.
    """

    def __init__(
        self,
        make_server: Callable[[], ForkServerLink],
        checkers: Mapping[str, ArgumentChecker],
        *,
        num_workers: int,
        max_output_bytes: int,
        max_concurrency: int,
        timeout: float,
        fresh_in: Path | None,
        log: CallLog | None,
    ) -> None:
        self._num_workers = num_workers
        self._max_concurrency = max_concurrency
        self._timeout = timeout
        self._fresh_in = fresh_in
        self._log = log
        self._loop = asyncio.new_event_loop()
        self._pool = WorkerPool(make_server, num_workers)
        self._remote = RemoteTools(checkers, max_output_bytes, max_concurrency)
        self._runs: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ToolExecutor", daemon=True)
        self._lock = threading.Lock()
        self._closing = False
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the engine's thread, or the thread of the remote tools."""
        return threading.current_thread() is self._thread or self._remote.is_current

    def submit(self, work: Coroutine[Any, Any, Any], waiting: "Waiting") -> "Future[Any]":
        """Run a coroutine in the loop. Returns the future of `waiting`, which gets the result.

        Raises:
            ConfigError: The executor is closed or closing.
        """
        with self._lock:
            if not self._closing:
                waiting.ended.clear()
                self._loop.call_soon_threadsafe(waiting.begin, self._loop, work)
                return waiting.future
        work.close()
        raise ConfigError("ToolExecutor is closed. Create another executor.")

    async def start(self) -> list[str]:
        """Start the first worker. Returns the restrictions that could not be applied to it."""
        await self._pool.start()
        return self._pool.problems

    async def run(self, calls: list[Given]) -> list[ToolResult]:
        """Run all calls."""
        results = [ToolResult()] * len(calls)
        remote = [isinstance(tool, Tool) and tool.remote for _, tool, _ in calls]
        turns = {kind: iter([i for i, its in enumerate(remote) if its is kind]) for kind in (False, True)}

        async def take(mine: Iterator[int]) -> None:
            for i in mine:
                results[i] = await self._result(*calls[i])

        task = asyncio.current_task()
        assert task is not None
        self._runs.add(task)
        try:
            async with asyncio.TaskGroup() as group:
                for kind, at_once in ((False, self._num_workers), (True, self._max_concurrency)):
                    for _ in range(min(at_once, remote.count(kind))):
                        group.create_task(take(turns[kind]))
        except BaseException:
            for i in itertools.chain(*turns.values()):  # calls that have not started
                self._give_up(calls[i][0], 0.0)
            raise
        finally:
            self._runs.discard(task)
        return results

    async def _result(self, call: ToolCall, tool: Tool | ToolError, folder: str | None) -> ToolResult:
        clock = Clock()
        size = 0
        try:
            if isinstance(tool, ToolError):
                raise tool
            try:
                text = encode_arguments(call.arguments)
                output, size = await (
                    self._await(tool, text, clock) if tool.remote else self._ask(tool, text, clock, folder)
                )
            except RefusedArgumentsError as error:
                raise ERRORS[error.error](f"{tool.name}: {error}") from None
            result = ToolResult(output=output, seconds=clock.seconds)
        except ToolError as error:
            result = ToolResult(error=error, seconds=clock.seconds)
        except asyncio.CancelledError:
            self._give_up(call, clock.seconds)
            raise
        if self._log is not None:
            self._log.write(call, result.error, result.seconds, size)
        return result

    def _give_up(self, call: ToolCall, seconds: float) -> None:
        if self._log is not None:
            given_up = asyncio.CancelledError("given up: the executor was closed, or whoever waited was interrupted.")
            self._log.write(call, given_up, seconds)

    async def _ask(self, tool: Tool, text: str, clock: "Clock", folder: str | None = None) -> tuple[Any, int]:
        """Run a call in a worker."""
        fresh = None if self._fresh_in is None or folder is not None else self._fresh_in / f"call-{os.urandom(8).hex()}"
        folder = folder if fresh is None else fresh.name
        try:
            return await self._pool.call(
                f'["{tool.name}",{text},{json.dumps(folder)}]'.encode(), self._timeout_of(tool), clock.begin
            )
        except ToolError as error:
            raise type(error)(f"{tool.name}: {error}") from None
        finally:
            if fresh is not None:
                await asyncio.shield(asyncio.to_thread(_remove, fresh))

    async def _await(self, tool: Tool, text: str, clock: "Clock") -> tuple[Any, int]:
        """Await a remote tool. A worker checks its arguments first if that can be slow: here, it would block the loop."""
        if self._remote.is_slow(tool):
            await self._ask(tool, text, clock)
        return await self._remote.call(tool, text, self._timeout_of(tool), clock)

    def _timeout_of(self, tool: Tool) -> float:
        return tool.timeout if tool.timeout is not None else self._timeout

    def close(self) -> None:
        """Cancel the running calls, end the workers, and stop the loop."""
        with self._lock:
            self._closing = True
        if threading.current_thread() is self._thread:  # garbage collected in the engine's own thread
            self._pool.close()
            self._loop.stop()
            return
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(2 * CLEAN_UP_SECONDS)
        finally:
            self._remote.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLEAN_UP_SECONDS)
        self._loop.close()

    async def _end(self) -> None:
        runs = list(self._runs)
        for task in runs:
            task.cancel()
        if runs:
            await asyncio.wait(runs, timeout=CLEAN_UP_SECONDS / 2)
        self._pool.close()
        await self._loop.shutdown_default_executor()


def _remove(folder: Path) -> None:
    """Remove a call's folder. The call has its result in any case."""
    try:
        remove_folder(str(folder))
    except OSError as error:
        warnings.warn(f"ToolExecutor could not remove the folder of a call: {error}.", GRPOWarning, stacklevel=2)
