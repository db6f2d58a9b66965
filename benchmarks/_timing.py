"""Paired, interleaved timing for noisy machines."""

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def keep_freed_memory() -> bool:
    """Make the allocator keep freed memory, for both sides of a comparison. Returns whether that worked (glibc only).

    Otherwise, depending on the heap's layout, the allocator may return the memory of freed tensors to the system and request it
    again. This changes either side by a tenth from run to run.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(M_MMAP_THRESHOLD, 2**25))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Median times of two alternatives that ran in turn, and the median of their pairwise ratios."""

    first_ms: float
    second_ms: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.first_ms:9.2f} ms {self.second_ms:9.2f} ms   "
            f"ratio {self.ratio:.2f} (quartiles {self.low:.2f} to {self.high:.2f})"
        )


def time_pairs(
    first: Callable[[], object],
    second: Callable[[], object],
    *,
    repeats: int,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Pair:
    """Time `first` and `second` in turn, `repeats` times each; the order within a pair alternates."""
    for _ in range(warmup):
        first()
        second()
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(repeats):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            start = clock()
            (first, second)[which]()
            times[which].append(clock() - start)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return Pair(
        first_ms=1e3 * statistics.median(times[0]),
        second_ms=1e3 * statistics.median(times[1]),
        ratio=ratio,
        low=low,
        high=high,
    )
