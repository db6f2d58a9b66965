"""The process as its parent sees it: it is started, gives answers, and is ended.

There are two forks. The supervisor waits for an order of its parent, or for its parent's death. The worker, below it, makes the
calls. So nothing is left over, even if a function hangs, starts processes of its own, or the parent is killed.
"""

import contextlib
import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import wait
from typing import Any, ClassVar

import numpy as np
import torch

from grpo._common.global_state import restore_random_state
from grpo._rewarding.deadlines import WAIT_SECONDS
from grpo.errors import CallError, DeadlineError, GRPOError

from .supervisor import END_SECONDS, supervise
from .worker import LENGTH, NamedCall, flush

START_SECONDS = 0.5
"""How long the process may take to start and to send the state of its generators, beyond the time of a call."""


class ForkRefusedError(GRPOError):
    """A process was to be started by a thread that must not fork. A run asks again in the thread that may."""


class Process:
    """One process for a few calls. Call `end` afterwards, whatever happened. A second `end` completes an interrupted one."""

    num_started: ClassVar[int] = 0
    """How many of them this process has started."""
    only_thread: ClassVar[int | None] = None
    """The id of the only thread that may start one, because it computes while others ask for rewards. None: any thread."""

    def __init__(self) -> None:
        self._ends: set[int] = set()
        self._watched: list[int] = []
        self._supervisor: int | None = None
        self._received = bytearray()
        self._end_of_worker = ""

    def run(self, calls: Sequence[NamedCall], timeout: float) -> list[Any]:
        """Make the calls one after another, and return their answers. Each call has `timeout` seconds."""
        self._start(calls)
        answers: list[Any] = []
        error = None
        try:
            self._receive(calls[0][0], timeout, START_SECONDS)  # the worker is ready
            for name, _ in calls:
                answer, links = self._receive(name, timeout)
                if links:
                    error = _joined(links)
                    break
                answers.append(answer)
            random_state = self._receive(calls[len(answers) - 1][0], timeout, START_SECONDS)
        except (DeadlineError, CallError):
            _advance_generators()  # their state in the worker is not known, and a repeated call must draw other numbers
            raise
        restore_random_state(random_state)
        if error is not None:
            raise error
        return answers

    def end(self) -> None:
        """Kill and reap the supervisor and all processes below it."""
        if not self._ends:
            return
        if self._supervisor is None:  # an interrupt came before the result of the fork was known
            header = os.read(self._status, LENGTH.size)
            self._supervisor = LENGTH.unpack(header)[0] if header else 0
        if self._supervisor:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._order, b"!")
            _reap(self._supervisor)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # if the supervisor was killed itself
                os.killpg(self._supervisor, signal.SIGKILL)
            self._supervisor = 0
        self._close(*self._ends)

    def _start(self, calls: Sequence[NamedCall]) -> None:
        """Fork the supervisor. Signals are blocked meanwhile, because the child must not run the handlers of this process."""
        if Process.only_thread not in (None, threading.get_ident()):
            raise ForkRefusedError(
                "call_in_process must be called in the thread that trains, because a fork would copy the locks that this "
                "thread holds. Ask in a plain reward function, or set iterations_ahead=0."
            )
        Process.num_started += 1
        self._answers, answers_end = self._pipe()
        self._status, status_end = self._pipe()
        order_end, self._order = self._pipe()
        self._watched = [self._answers, self._status]
        flush()  # the worker would write the same text again
        random_state = random.getstate()  # the module draws a new seed in every fork
        own_id, own_mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
                self._supervisor = os.fork()
        finally:
            if os.getpid() != own_id:
                self._close(self._answers, self._status, self._order)
                supervise(calls, random_state, answers_end, status_end, order_end)
            self._close(answers_end, status_end, order_end)
            signal.pthread_sigmask(signal.SIG_SETMASK, own_mask)

    def _receive(self, name: str, timeout: float, start_seconds: float = 0.0) -> Any:
        """The next message of the worker."""
        deadline = time.monotonic() + timeout + start_seconds
        is_late = False
        while (part := self._next_message()) is None:
            if is_late:  # an answer of which only a part has come is late, too
                raise DeadlineError(f"{name} did not answer within {timeout:g} s")
            seconds = deadline - time.monotonic()
            is_late = seconds <= 0
            ready = wait(self._watched, 0.0 if self._end_of_worker else min(max(seconds, 0.0), WAIT_SECONDS))
            if self._answers in ready:
                read = os.read(self._answers, 1 << 16)
                self._received += read
                if not read:  # closed by the worker, which may still run
                    self._watched.remove(self._answers)
            elif ready:
                read = os.read(self._status, 64)
                status = read.removeprefix(LENGTH.pack(self._supervisor or 0))
                if status or not read:  # the worker may have sent answers since `wait` looked
                    self._watched.remove(self._status)
                    self._end_of_worker = _end_of(status.decode())
            elif self._end_of_worker:
                raise CallError(f"{name} gave no answer: its process ended {self._end_of_worker}.")
        return pickle.loads(part)  # from a fork of this process

    def _next_message(self) -> bytes | None:
        """The first message among the received bytes. None: it is not complete."""
        start = LENGTH.size
        if len(self._received) < start:
            return None
        end = start + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message = bytes(self._received[start:end])
        del self._received[:end]
        return message

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._ends.update(ends)
        return ends

    def _close(self, *ends: int) -> None:
        for end in ends:
            self._ends.discard(end)
            os.close(end)


def _reap(supervisor: int) -> None:
    """Wait for the end of the supervisor, and kill it if it is stopped or hangs."""
    deadline = time.monotonic() + 2 * END_SECONDS
    with contextlib.suppress(ChildProcessError):  # a handler of SIGCHLD was faster
        while os.waitpid(supervisor, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(supervisor, signal.SIGKILL)
                os.kill(supervisor, signal.SIGKILL)
                os.waitpid(supervisor, 0)
                return
            time.sleep(0.001)


def _end_of(status: str) -> str:
    """How the worker ended, in words."""
    if not status:
        return "together with its supervisor"
    code = os.waitstatus_to_exitcode(int(status))
    return f"with exit code {code}" if code >= 0 else f"by signal {-code}"


def _advance_generators() -> None:
    random.random()
    np.random.random()  # noqa: NPY002 - users draw from the global generator
    torch.rand(1)


def _joined(links: Sequence[Exception]) -> Exception:
    """The first exception, with the others as its causes."""
    for error, cause in pairwise(links):
        error.__cause__ = cause
    return links[0]
