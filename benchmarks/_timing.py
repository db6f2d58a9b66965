"""Paired, interleaved timing: what a noisy machine can still tell."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Medians of two alternatives that were timed in turn, and the median of their pairwise ratios."""

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


def time_pairs(first: Callable[[], object], second: Callable[[], object], *, repeats: int, warmup: int = 3) -> Pair:
    """Time `first` and `second` in turn, `repeats` times each; the order within a pair alternates."""
    for _ in range(warmup):
        first()
        second()
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(repeats):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            start = time.perf_counter()
            (first, second)[which]()
            times[which].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return Pair(
        first_ms=1e3 * statistics.median(times[0]),
        second_ms=1e3 * statistics.median(times[1]),
        ratio=ratio,
        low=low,
        high=high,
    )
