"""The calls of one `ToolExecutor.run`, executed by threads, and how another thread ends them early."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager

from adapters.tools.catalogue.calls import ToolCall, ToolResult
from adapters.tools.catalogue.tools import Tool
from adapters.tools.errors import ToolError
from grpo.errors import ConfigError

_LOOK_SECONDS = 0.1
"""How often a call that waits for its turn looks whether it is given up."""


class Turn:
    """A call that one thread executes. Other threads end it early: they set the event `given_up`, and call `end`.

    `tool` is the call's tool, or the error if the call has none.
    """

    def __init__(self, call: ToolCall, tool: Tool | ToolError, folder: str | None, given_up: threading.Event) -> None:
        self.call, self.tool, self.folder = call, tool, folder
        self.seconds: Callable[[], float] = float
        """Seconds since the call began; 0 before."""
        self.end: Callable[[], object] = bool
        self._given_up = given_up

    def begin(self) -> None:
        """Start the clock."""
        begun = time.perf_counter()
        self.seconds = lambda: time.perf_counter() - begun

    def check(self) -> None:
        """Raise CancelledError if the call is given up."""
        if self._given_up.is_set():
            raise CancelledError("given up: the executor was closed, or whoever waited was interrupted.")

    @contextmanager
    def ended_by(self, end: Callable[[], object]) -> Iterator[None]:
        """Within the block, a call that is given up is ended by `end`."""
        self.end = end
        try:
            self.check()
            yield
        finally:
            self.end = bool

    @contextmanager
    def of(self, turns: threading.Semaphore) -> Iterator[None]:
        """Wait for one of these turns, and hold it within the block."""
        while not turns.acquire(timeout=_LOOK_SECONDS):
            self.check()
        try:
            self.check()
            yield
        finally:
            turns.release()


class Batch:
    """Calls of which each is executed by `execute`, in one of several threads. `given_up` is the event of all `turns`."""

    def __init__(self, turns: list[Turn], given_up: threading.Event, execute: Callable[[Turn], ToolResult]) -> None:
        self.future: Future[list[ToolResult]] = Future()
        """The results, or an error if calls were given up."""
        self.future.set_running_or_notify_cancel()  # a task that waits for it cannot cancel it
        self.given_up = given_up
        self._turns, self._execute = turns, execute
        remote = [isinstance(turn.tool, Tool) and turn.tool.remote for turn in turns]
        self._waiting = [[i for i, its in enumerate(remote) if its is kind] for kind in (False, True)]
        self._next = [iter(waiting) for waiting in self._waiting]
        self._results: list[ToolResult] = [ToolResult()] * len(turns)
        self._num_left = len(turns)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        if not turns:
            self.future.set_result([])

    def start(self, num_workers: int, max_concurrency: int) -> None:
        """Start the threads: at most one for each worker, and one for each concurrent remote call."""
        for waiting, take, at_once in zip(self._waiting, self._next, (num_workers, max_concurrency), strict=True):
            for _ in range(min(at_once, len(waiting))):
                threading.Thread(target=self._take, args=(take,), name="ToolExecutor", daemon=True).start()

    def give_up(self) -> None:
        """End all calls. Those that have not begun end at once."""
        self.given_up.set()
        for turn in self._turns:
            turn.end()
        for waiting in self._next:
            self._take(waiting)

    def _take(self, waiting: Iterator[int]) -> None:
        """Execute waiting calls until none is left."""
        for i in waiting:
            try:
                self._results[i] = self._execute(self._turns[i])
            except BaseException as error:  # a CancelledError, or a defect
                self._error = error
            with self._lock:
                self._num_left -= 1
                is_last = self._num_left == 0
            if is_last and self.given_up.is_set():
                said = "ToolExecutor was closed while calls ran; their results are lost."
                self.future.set_exception(ConfigError(said))
            elif is_last and self._error is not None:
                self.future.set_exception(self._error)
            elif is_last:
                self.future.set_result(self._results)
