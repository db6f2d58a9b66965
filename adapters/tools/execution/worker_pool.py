"""A pool of running workers. Each call takes the next free worker."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from adapters.tools.errors import (
    InvalidArgumentsError,
    InvalidOutputError,
    OutputTooLargeError,
    PathOutsideRootError,
    ServerLostError,
    ToolRaisedError,
    ToolTimeoutError,
    WorkerDiedError,
    WorkerLostError,
)
from grpo.errors import ConfigError

from .worker_calls import OK, RETIRE
from .worker_connection import LinkLostError, Worker
from .workers import WorkerSource

ERRORS = {
    kind.__name__: kind
    for kind in (
        InvalidArgumentsError,
        PathOutsideRootError,
        OutputTooLargeError,
        InvalidOutputError,
        ServerLostError,
        ToolRaisedError,
        WorkerLostError,
    )
}
"""Errors that a worker may report, by name."""


class WorkerPool:
    """A pool of workers that are started on demand.

    Args:
        source: Creates a fork server: the first one, and a replacement if a fork server died.
        num_workers: Maximum number of concurrent workers.
    """

    def __init__(self, source: Callable[[], WorkerSource], num_workers: int) -> None:
        self._make_source = source
        self._source: WorkerSource | None = None
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(num_workers)
        self._idle: list[Worker] = []
        self.problems: list[str] = []

    async def start(self) -> None:
        """Start the fork server and one worker.

        Raises:
            ConfigError: The worker processes cannot import the tools' modules, or cannot read the folder.
        """
        self._idle.append(await self._spawn())

    def close(self) -> None:
        """End the workers and the fork server."""
        for worker in self._idle:
            worker.frames.close()
        if self._source is not None:
            self._source.close()

    async def call(self, request: bytes, timeout: float, begin: Callable[[], None]) -> tuple[Any, int]:
        """Run a call on the next free worker. Returns the output and its size in bytes.

        Args:
            request: The tool's name and the arguments, as JSON.
            timeout: Time limit in seconds, starting when `begin` is called.
            begin: Called when a worker is available.

        Raises:
            ToolError: The call failed.
        """
        async with self._turns:
            worker = await self._worker()
            begin()
            try:
                async with asyncio.timeout(timeout):
                    flags, content = await worker.ask(request)
                answer = json.loads(content)
                if not flags & OK and not (isinstance(answer, list) and len(answer) == 2 and answer[0] in ERRORS):
                    raise LinkLostError("it reported an error of an unknown type")
            except TimeoutError:
                await asyncio.shield(worker.source.kill(worker))
                raise ToolTimeoutError(f"no answer within {timeout:g} s; the worker was killed.") from None
            except (LinkLostError, ValueError, RecursionError) as error:
                status = await asyncio.shield(worker.source.kill(worker))
                if status == "signal SIGXCPU":
                    raise ToolTimeoutError(
                        "the call used more processor time than WorkerLimits.cpu_seconds; the worker was killed."
                    ) from None
                kind = WorkerLostError if _is_from_outside(str(error), status) else WorkerDiedError
                raise kind(f"the worker ended during the call: {error} ({status}).") from None
            except BaseException:  # the call was cancelled
                await asyncio.shield(worker.source.kill(worker))
                raise
            if flags & RETIRE:
                await worker.source.kill(worker)
            else:
                self._idle.append(worker)
        if flags & OK:
            return answer, len(content)
        raise ERRORS[answer[0]](str(answer[1]))

    async def _worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.fit:
                return worker
            await asyncio.shield(worker.source.kill(worker))
        try:
            return await self._spawn()
        except (LinkLostError, ConfigError) as error:
            raise WorkerLostError(f"no worker could be started: {error}") from error

    async def _spawn(self) -> Worker:
        async with self._starting:
            if self._source is None or self._source.lost is not None:
                if self._source is not None:
                    self._source.close()
                source = self._make_source()
                self._source = source
                await source.start()
        worker, self.problems = await self._source.spawn()
        return worker


def _is_from_outside(error: str, status: str) -> bool:
    """Whether a worker ended for a reason outside its call: it was killed or terminated, or the fork server is gone."""
    ended_itself = status.startswith("exit status") or (status.startswith("signal") and status != "signal SIGTERM")
    return error.startswith(("it ended", "the fork server")) and not ended_itself
