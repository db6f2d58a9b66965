"""The supervisor: it waits for the order or the death of its parent, and then kills and reaps all processes below it."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from .worker import LENGTH, NamedCall, work

END_SECONDS = 0.25
"""How long the supervisor may take to kill and reap the processes below it."""
KEPT_SIGNALS = {
    *(signal.SIGKILL, signal.SIGSTOP),  # nobody can handle them
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT),  # faults
}
"""Signals whose handlers a process keeps."""
PR_SET_CHILD_SUBREAPER = 36
"""The option of `prctl` by which orphans become children of this process."""


def supervise(calls: Sequence[NamedCall], random_state: Any, answers: int, status: int, order: int) -> NoReturn:
    """Fork the worker, report its end, wait for the order or the death of the parent, and end all processes below."""
    try:
        os.setpgid(0, 0)  # interrupts from the terminal reach the parent only
        if prctl := _prctl():
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whatever loses its parent becomes a child of this process
        os.write(status, LENGTH.pack(os.getpid()))
        _restore_signals()
        worker = os.fork()
        if worker == 0:
            work(calls, random_state, answers, (status, order))
        os.close(answers)
        wakeup, wakeup_end = os.pipe()
        os.set_blocking(wakeup_end, False)
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only signals with a handler are written to the pipe
        try:
            _report_end(worker, status, order, wakeup)
        finally:
            _end_all_below()
    finally:
        os._exit(0)


def _report_end(worker: int, status: int, order: int, wakeup: int) -> None:
    """Report the end of the worker, and return when the parent orders it, or dies."""
    is_running = True
    while True:
        if is_running and (ended := os.waitpid(worker, os.WNOHANG))[0]:
            is_running = False
            os.write(status, str(ended[1]).encode())
        if order in wait([order, wakeup]):
            return
        os.read(wakeup, 1 << 10)


def _restore_signals() -> None:
    """Give signals their default action. No handler of the parent runs here, in Python or in C, such as SDL's for SIGTERM.

    What is ignored stays ignored, and `faulthandler` goes on to show where a fault was.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - KEPT_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # Python knows no handler that was set in C, so all are set anew
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _end_all_below() -> None:
    """Kill and reap all processes below this one. Without `/proc`, the parent kills the group of this process instead."""
    deadline = time.monotonic() + END_SECONDS
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for process in _below(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.001)


def _below(ancestor: int) -> Iterator[int]:
    """The ids of all processes below a process, from `/proc`."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # the process has ended
            _, parent = stat.read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    waiting = children.get(ancestor, [])
    while waiting:
        process = waiting.pop()
        yield process
        waiting += children.get(process, [])


@cache
def _prctl() -> Any:
    """Linux's `prctl`, or None."""
    return getattr(ctypes.CDLL(None), "prctl", None)
