"""Mean and standard deviation of every reward since the run began."""

import math
from typing import Any

from jaxtyping import Float
from torch import Tensor

from .groups import rounding_of


class RewardMoments:
    """Mean and standard deviation of all rewards so far. Each reward has the same weight, however old it is.

    Source:
        Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares, self._rounding = 0, 0.0, 0.0, 0.0

    @property
    def mean(self) -> float | None:
        """The mean of all rewards so far. None before the first reward."""
        return self._mean if self._count else None

    @property
    def std(self) -> float:
        """The standard deviation of all n rewards so far, with divisor n. 0 for fewer than two rewards, or equal rewards."""
        std = math.sqrt(self._squares / self._count) if self._count else 0.0
        # rewards that differ by rounding are equal; dividing by such a number would make noise a signal
        return std if std > self._rounding else 0.0

    def add(self, rewards: Float[Tensor, " N"]) -> None:
        """Add the rewards of one iteration."""
        count = len(rewards)
        if not count:
            return
        exact = rewards.double()
        mean = float(exact.mean())
        total = self._count + count
        difference = mean - self._mean
        self._squares += float((exact - mean).square().sum()) + difference**2 * self._count * count / total
        self._mean += difference * count / total
        self._count = total
        self._rounding = max(self._rounding, rounding_of(rewards) * float(exact.abs().max()))

    def state_dict(self) -> dict[str, Any]:
        """Count, mean, sum of squared deviations, and the largest difference that counts as rounding."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares, "rounding": self._rounding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._count, self._mean = state["count"], state["mean"]
        self._squares, self._rounding = state["squares"], state["rounding"]
