"""Threads that take turns as often as the interpreter lets them."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

NUM_THREADS = 8


def run_together(*works: Callable[[], object]) -> None:
    """Run each function in its own thread, all starting together, and raise what they raise."""
    ready = threading.Barrier(len(works))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(works)) as threads:
            for running in [threads.submit(lambda work=work: (ready.wait(), work())) for work in works]:
                running.result()
    finally:
        sys.setswitchinterval(before)


def run_beside(work: Callable[[int], object], *others: Callable[[], object]) -> None:
    """Call `work` in eight threads, with their numbers, and repeat each other function in its own thread until they end."""
    running = set(range(NUM_THREADS))

    def worked(thread: int) -> None:
        try:
            work(thread)
        finally:
            running.discard(thread)

    def repeated(other: Callable[[], object]) -> None:
        while running:
            other()

    run_together(
        *(partial(worked, number) for number in range(NUM_THREADS)), *(partial(repeated, one) for one in others)
    )
