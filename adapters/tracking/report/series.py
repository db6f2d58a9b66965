"""What a series of numbers over iterations says: its thinned form for a chart, its level, and whether it changed."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from grpo.evaluation.advice import standard_error

MAX_POINTS = 160
"""Number of points of a line in a chart. Each point is a mean, if there are more iterations."""

WINDOW = 0.1
"""Fraction of the run at its beginning, and at its end, whose means are compared."""

NOISE = 3.0
"""Standard errors by which two means must differ to count as different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The mean of a series at the beginning and at the end of a run."""

    first: float
    """The mean over the first tenth of the measured iterations."""
    last: float
    """The mean over the last tenth."""
    window: int
    """Number of iterations in a tenth."""
    is_clear: bool
    """Whether the means differ by more than three standard errors."""

    @property
    def difference(self) -> float:
        """`last - first`."""
        return self.last - self.first


def change_of(values: Float64[np.ndarray, " I"]) -> Change | None:
    """Compare the beginning and the end of a series. None: fewer than two numbers were measured."""
    measured = values[np.isfinite(values)]
    if len(measured) < 2:
        return None
    # a mean of fewer than five iterations is mostly noise
    window = max(round(WINDOW * len(measured)), min(5, len(measured) // 2))
    first, last = measured[:window], measured[-window:]
    error = math.hypot(standard_error(first), standard_error(last))
    difference = abs(float(last.mean() - first.mean()))
    scale = max(abs(float(first.mean())), abs(float(last.mean())))
    return Change(
        first=float(first.mean()),
        last=float(last.mean()),
        window=window,
        # where all values are equal, the error is 0, and rounding is no change
        is_clear=window > 1 and difference > max(NOISE * error, 1e-6 * scale),
    )


def thinned(
    x: Float64[np.ndarray, " I"], columns: list[Float64[np.ndarray, " I"]], max_points: int = MAX_POINTS
) -> tuple[Float64[np.ndarray, " P"], list[Float64[np.ndarray, " P"]], int]:
    """Replace a long series by means over neighbouring iterations.

    Iterations at which the first column was not measured are left out.

    Returns:
        The mean iteration of each point, the mean of each column, and the largest number of iterations behind a point.
    """
    measured = np.isfinite(columns[0])
    x, columns = x[measured], [column[measured] for column in columns]
    if len(x) <= max_points:
        return x, columns, 1
    starts = np.linspace(0, len(x), max_points + 1).astype(int)[:-1]
    counts = np.diff(np.append(starts, len(x)))
    means = [np.add.reduceat(column, starts) / counts for column in [x, *columns]]
    return means[0], means[1:], int(counts.max())


def share_of(values: Float64[np.ndarray, " I"], last: float = 1.0) -> float:
    """The mean over the last fraction of the measured iterations. NaN: nothing was measured."""
    measured = values[np.isfinite(values)]
    return float(measured[-max(round(last * len(measured)), 1) :].mean()) if len(measured) else math.nan


def longest_streak(seen: np.ndarray) -> int:
    """The largest number of neighbouring places that are true."""
    longest = current = 0
    for one in seen.tolist():
        current = current + 1 if one else 0
        longest = max(longest, current)
    return longest
