"""When a second thread may fork, and what its calls may change in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

keeps_generators: ContextVar[bool] = ContextVar("keeps_generators", default=False)
"""Whether calls in other processes leave the global random generators of this process as they are. A second thread sets this,
because the first thread draws from the generators at the same time."""


class ForkGate:
    """Keeps other threads from forking while the thread that closed the gate computes.

    A fork copies every lock that another thread holds at this moment, such as the lock of torch's random generator, and nobody
    releases the copy. So a thread that computes closes the gate, and opens it where it holds no lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed_by: int | None = None
        self._num_waiting = 0
        self.num_forks = 0
        """Number of forks so far, in any thread."""

    @contextmanager
    def passed(self) -> Iterator[None]:
        """A fork, in the block. It waits until the gate is open. The thread that closed the gate may always fork."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: self._closed_by in (None, threading.get_ident()))
                self.num_forks += 1
                yield
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside the block, only this thread forks, except in blocks of `opened`."""
        before = self._closed_by
        self._set(threading.get_ident())
        try:
            yield
        finally:
            self._set(before)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside the block, every thread may fork. Does nothing if this thread has not closed the gate."""
        before = self._closed_by
        if before != threading.get_ident():
            yield
            return
        self._set(None)
        try:
            yield
        finally:
            self._set(before)

    def let_pass(self) -> None:
        """Let the threads that wait for the gate fork now. Does nothing if this thread has not closed the gate."""
        if self._closed_by != threading.get_ident() or not self._num_waiting:
            return
        with self.opened(), self._changed:
            self._changed.wait_for(lambda: not self._num_waiting)

    def wait_for_fork(self, seconds: float) -> None:
        """Open the gate until another thread has forked, at most for so many seconds."""
        with self.opened(), self._changed:
            num_forks = self.num_forks
            self._changed.wait_for(lambda: self.num_forks > num_forks, seconds)

    def _set(self, owner: int | None) -> None:
        with self._changed:
            self._closed_by = owner
            self._changed.notify_all()


fork_gate = ForkGate()
"""The gate of this process."""


class Turns:
    """A lock. Other threads may fork while a thread waits for it, because the thread that holds it may have to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Only one thread is in the block."""
        is_held = False
        try:
            with fork_gate.opened():
                is_held = self._lock.acquire()
            yield
        finally:
            if is_held:
                self._lock.release()
