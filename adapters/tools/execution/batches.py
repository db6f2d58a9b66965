"""The calls of one `ToolExecutor.run`, executed by threads, and how another thread ends them early."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager

from adapters.tools.catalogue.calls import ToolCall, ToolResult
from adapters.tools.catalogue.tools import Tool
from adapters.tools.errors import ToolError
from grpo.errors import ConfigError

_LOOK_SECONDS = 0.1
"""How often a call that waits for its turn looks whether it is given up."""


class Turn:
    """A call that one thread executes. `tool` is its tool, or the error if it has none.

    Other threads end a call early: they set the event `given_up`, which is the same for all calls of a batch, and call `end`.
    """

    def __init__(self, call: ToolCall, tool: Tool | ToolError, folder: str | None, given_up: threading.Event) -> None:
        self.call, self.tool, self.folder, self.given_up = call, tool, folder, given_up
        self.result = ToolResult()
        self.seconds: Callable[[], float] = lambda: 0.0
        """Seconds since the call began; 0 before."""
        self.end: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """Start the clock."""
        begun = time.perf_counter()
        self.seconds = lambda: time.perf_counter() - begun

    def check(self) -> None:
        """Raise CancelledError if the call is given up."""
        if self.given_up.is_set():
            raise CancelledError("given up: the executor was closed, or whoever waited was interrupted.")

    @contextmanager
    def ended_by(self, end: Callable[[], object]) -> Iterator[None]:
        """Within the block, `end` ends the call."""
        self.end = end
        try:
            self.check()
            yield
        finally:
            self.end = lambda: None

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
    """Calls that threads take one after another. `execute` runs one of them. `running` holds the end of each running thread."""

    def __init__(
        self, turns: Sequence[Turn], execute: Callable[[Turn], ToolResult], running: "set[Future[None]]"
    ) -> None:
        self.turns, self._execute, self._running = turns, execute, running
        self.threads: list[Future[None]] = []
        """The end of each thread of this batch."""
        remote = [turn for turn in turns if isinstance(turn.tool, Tool) and turn.tool.remote]
        others = [turn for turn in turns if not (isinstance(turn.tool, Tool) and turn.tool.remote)]
        self._waiting = (iter(others), len(others)), (iter(remote), len(remote))

    def start(self, num_workers: int, max_concurrency: int) -> None:
        """Start the threads: at most one for each worker, and one for each concurrent remote call."""
        for (waiting, number), at_once in zip(self._waiting, (num_workers, max_concurrency), strict=True):
            for _ in range(min(number, at_once)):
                ended: Future[None] = Future()
                ended.set_running_or_notify_cancel()  # a task that waits for it cannot cancel it
                threading.Thread(target=self._take, args=(waiting, ended), name="ToolExecutor", daemon=True).start()
                self.threads.append(ended)
                self._running.add(ended)
                ended.add_done_callback(self._running.discard)

    def give_up(self) -> None:
        """End all calls. Those that have not begun end at once."""
        for turn in self.turns:
            turn.given_up.set()
            turn.end()
        for waiting, _ in self._waiting:
            self._take(waiting, Future())

    def results(self) -> list[ToolResult]:
        """The results, once all threads have ended. Raises ConfigError if the calls were given up."""
        for ended in self.threads:
            ended.result()
        if any(turn.given_up.is_set() for turn in self.turns):
            raise ConfigError("ToolExecutor was closed while calls ran; their results are lost.")
        return [turn.result for turn in self.turns]

    def _take(self, waiting: Iterator[Turn], ended: "Future[None]") -> None:
        try:
            for turn in waiting:
                turn.result = self._execute(turn)
            ended.set_result(None)
        except BaseException as error:  # a defect, which whoever waits gets
            ended.set_exception(error)
