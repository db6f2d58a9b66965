"""SIGTERM and SIGINT during a run: they raise `TrainingInterrupted` where the run can be continued from."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from grpo.errors import TrainingInterrupted

DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that Python itself installs. Any other handler belongs to the user and stays."""


class Interrupts:
    """Handles the first SIGTERM or SIGINT of a run. Only Python's default handlers are replaced, and only in the main thread.

    The first signal raises `TrainingInterrupted` at once inside `at_once()`, else at the next `check()`. A second signal ends
    the process at once. In an interactive session, a second SIGINT raises `KeyboardInterrupt` at once and the process stays.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The number of the first signal. None: no signal has arrived."""
        self._raises_at_once = False
        self._replaced: dict[int, Any] = {}

    @contextmanager
    def handled(self, *signals: signal.Signals) -> Iterator[None]:
        """Handle these signals inside the block, and restore the previous handlers after it."""
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in signals}
            self._replaced = {number: handler for number, handler in found.items() if handler in DEFAULT_HANDLERS}
        try:
            for number in self._replaced:
                signal.signal(number, self._handle)
            yield
            self.check()  # a signal that came after the last place to stop
        finally:
            for number, handler in self._replaced.items():
                signal.signal(number, handler)
            self._replaced, self.received = {}, None

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside the block, a signal raises `TrainingInterrupted` between any two instructions."""
        self._raises_at_once = True
        try:
            self.check()
            yield
        finally:
            self._raises_at_once = False

    def check(self) -> None:
        """Raise `TrainingInterrupted` if a signal has arrived. Call this where the run can be continued from."""
        if self.received is not None:
            raise TrainingInterrupted(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked child, such as a worker, does not train
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = number
        for replaced in self._replaced:
            stays = replaced == signal.SIGINT and is_interactive()
            signal.signal(replaced, signal.default_int_handler if stays else signal.SIG_DFL)
        if self._raises_at_once:
            raise TrainingInterrupted(number)


def is_interactive() -> bool:
    """Whether a person works in this process: a notebook, IPython or the Python prompt. They set `sys.ps1`."""
    return hasattr(sys, "ps1")
