"""The calls of one `ToolExecutor.run`, executed by threads, and how another thread ends them early."""

import itertools
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

    Other threads end a call early by `give_up`. The event `given_up` is the same for all calls of a batch.
    """

    def __init__(self, call: ToolCall, tool: Tool | ToolError, folder: str | None, given_up: threading.Event) -> None:
        self.call, self.tool, self.folder, self.given_up = call, tool, folder, given_up
        self.result = ToolResult()
        self.seconds: Callable[[], float] = lambda: 0.0
        """Seconds since the call began; 0 before."""
        self._end: Callable[[], object] | None = None
        self._ending = threading.RLock()

    def begin(self) -> None:
        begun = time.perf_counter()
        self.seconds = lambda: time.perf_counter() - begun

    def check(self) -> None:
        """Raise CancelledError if the call is given up."""
        if self.given_up.is_set():
            raise CancelledError("given up: the executor was closed, or whoever waited was interrupted.")

    def give_up(self) -> None:
        """End the call, in another thread than its own."""
        self.given_up.set()
        with self._ending:
            if self._end is not None:
                self._end()

    @contextmanager
    def ended_by(self, end: Callable[[], object]) -> Iterator[None]:
        """Within the block, `end` ends the call."""
        self._end = end
        try:
            self.check()
            yield
        finally:
            with self._ending:  # afterwards, `end` might end another call
                self._end = None

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
    """Calls that threads take one after another. `execute` runs one of them. The batch is in `running` until all have ended."""

    def __init__(self, turns: Sequence[Turn], execute: Callable[[Turn], ToolResult], running: "set[Batch]") -> None:
        self.turns, self._execute, self._running = turns, execute, running
        self.ended: Future[None] = Future()
        """The end of all calls. If a call raised, which is a defect, so does this."""
        self.ended.set_running_or_notify_cancel()  # a task that waits for it cannot cancel it
        remote = [turn for turn in turns if isinstance(turn.tool, Tool) and turn.tool.remote]
        others = [turn for turn in turns if not (isinstance(turn.tool, Tool) and turn.tool.remote)]
        self._waiting = (iter(others), len(others)), (iter(remote), len(remote))
        self._num_ended = itertools.count(1)
        self._defects: list[BaseException] = []
        if turns:
            running.add(self)
        else:
            self.ended.set_result(None)

    def start(self, num_workers: int, max_concurrency: int) -> None:
        """Start the threads: at most one for each worker, and one for each concurrent remote call."""
        for (waiting, number), at_once in zip(self._waiting, (num_workers, max_concurrency), strict=True):
            for _ in range(min(number, at_once)):
                # no ThreadPoolExecutor: Python joins its threads at exit, and a call that hangs would delay it
                threading.Thread(target=self._take, args=(waiting,), name="ToolExecutor", daemon=True).start()

    def give_up(self) -> None:
        """End all calls. Those that have not begun end at once."""
        for turn in self.turns:
            turn.give_up()
        for waiting, _ in self._waiting:
            self._take(waiting)

    def results(self) -> list[ToolResult]:
        """The results, once all calls have ended. Raises ConfigError if the calls were given up."""
        self.ended.result()
        if any(turn.given_up.is_set() for turn in self.turns):
            raise ConfigError("ToolExecutor was closed while calls ran; their results are lost.")
        return [turn.result for turn in self.turns]

    def _take(self, waiting: Iterator[Turn]) -> None:
        for turn in waiting:
            try:
                turn.result = self._execute(turn)
            except BaseException as error:
                self._defects.append(error)
            if next(self._num_ended) == len(self.turns):
                self._running.discard(self)
                if self._defects:
                    self.ended.set_exception(self._defects[0])
                else:
                    self.ended.set_result(None)
