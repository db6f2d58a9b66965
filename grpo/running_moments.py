"""Mean and variance of everything seen so far, as a run goes on."""

import math
from typing import Any

from torch import Tensor

from .grouping import rounding_of


class RunningMoments:
    """Mean and variance of all values seen so far.

    Source:
        Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares, self._rounding = 0, 0.0, 0.0, 0.0

    @property
    def mean(self) -> float | None:
        """None before the first value."""
        return self._mean if self._count else None

    @property
    def std(self) -> float:
        """With divisor n; 0 before the second value, and where all values are equal but for rounding."""
        std = math.sqrt(self._squares / self._count) if self._count else 0.0
        return std if std > self._rounding else 0.0

    def add(self, values: Tensor) -> None:
        """Take in more values."""
        if not values.numel():
            return
        exact = values.double()
        mean = float(exact.mean())
        total = self._count + values.numel()
        away = mean - self._mean
        self._squares += float((exact - mean).square().sum()) + away**2 * self._count * values.numel() / total
        self._mean += away * values.numel() / total
        self._count = total
        self._rounding = max(self._rounding, rounding_of(values) * float(exact.abs().max()))

    def state_dict(self) -> dict[str, Any]:
        """Count, mean, sum of squared deviations, and the difference that is rounding."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares, "rounding": self._rounding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._count, self._mean = state["count"], state["mean"]
        self._squares, self._rounding = state["squares"], state["rounding"]
