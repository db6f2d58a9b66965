"""Work beside the updates: tasks that a second thread does in order."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")


class Task(Future[Result]):
    """One piece of work, done once, in any thread: a future that knows its work."""

    def __init__(self, work: Callable[[], Result]) -> None:
        super().__init__()
        self.seconds = 0.0
        """How long the work took."""
        self._work: Callable[[], Result] | None = work

    @classmethod
    def of(cls, result: Result) -> "Task[Result]":
        """A task that is done already."""
        task = cls(lambda: result)
        task.set_result(result)
        return task

    def run(self) -> None:
        """Do the work, and keep its result or its error. An interrupt of this thread is raised at once."""
        work, self._work = self._work, None  # it may hold rows
        assert work is not None
        start = time.perf_counter()
        try:
            result = work()
        except Exception as error:
            self.seconds = time.perf_counter() - start  # first, because whoever waits for the task reads it
            self.set_exception(error)
        else:
            self.seconds = time.perf_counter() - start
            self.set_result(result)


class Background:
    """Does tasks one after another, in a thread that ends with the process.

    Args:
        name: The name of the thread.
        in_order: Do each task at once, in the thread that submits it. The results are the same.
    """

    def __init__(self, name: str, *, in_order: bool) -> None:
        self._name, self._in_order = name, in_order
        self._tasks: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Task[Any] | None = None
        self._is_closed = False

    def submit(self, task: Task[Any]) -> None:
        """Do a task after those that were submitted before."""
        if self._in_order:
            task.run()
            return
        if self._thread is None:
            # no ThreadPoolExecutor: Python joins its threads at exit, and would wait for a reward model that hangs
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._last = task
        self._tasks.put(task)

    def wait(self) -> None:
        """Wait until every task is done."""
        if self._last is not None:
            wait([self._last])

    def close(self, *, drops: bool, waits: bool) -> None:
        """End the thread after the tasks that were submitted.

        Args:
            drops: Begin none of the tasks that have not begun.
            waits: Return when the thread has ended.
        """
        self._is_closed = drops
        self._tasks.put(None)
        if waits and self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None and not self._is_closed:
            try:
                task.run()
            except BaseException as error:  # the thread that waits for the task raises it
                task.set_exception(error)
