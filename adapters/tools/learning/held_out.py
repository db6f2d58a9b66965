"""What training changes on requests that it did not learn from, and how many requests would show it."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from grpo.arguments import require_integers
from grpo.errors import ConfigError

VISIBLE = 0.05
"""A difference that an estimate should show: five points of accuracy."""

FEWEST = 5
"""Requests that must change for a clear difference. Five of five change in one direction by chance in one case of 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A cross-validated estimate of what training changes. Each request is scored before and after a training without it.

    Example:
        >>> HeldOut.of([0, 0, 1, 1], [1, 0, 1, 1]).gain
        0.25
    """

    before: float
    """Mean score before training, such as the share of the requests with the right tool."""
    after: float
    """Mean score after training."""
    error: float
    """Standard error of `after - before`, from the differences request by request. Never 0, because few requests may all stay
    as they were by chance."""
    num_requests: int
    """Number of requests."""

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> "HeldOut":
        """The estimate from scores from 0 to 1 before and after training, in the same order.

        With N differences d, the error is that of N + 2 requests:

            error^2 = ((sum d^2 + 1) / (N + 2) - (sum d / (N + 2))^2) / (N + 2)

        For scores of 0 and 1 this adds half a request to each combination of a score before and a score after.

        Source:
            Agresti & Min 2005, Simple Improved Confidence Intervals for Comparing Matched Proportions, Statistics in Medicine
            24, 729-740.
        """
        differences = [float(new) - float(old) for old, new in zip(before, after, strict=True)]
        count = len(differences) + 2
        mean_square = (sum(each * each for each in differences) + 1) / count
        error = math.sqrt((mean_square - (sum(differences) / count) ** 2) / count)
        return cls(before=fmean(before), after=fmean(after), error=error, num_requests=len(differences))

    @property
    def gain(self) -> float:
        """`after - before`."""
        return self.after - self.before

    @property
    def is_clear(self) -> bool:
        """Whether the gain, or the loss, is at least two standard errors and five requests."""
        return abs(self.gain) >= max(2 * self.error, FEWEST / self.num_requests)

    @property
    def requests_needed(self) -> int:
        """Number of requests at which a difference of 0.05 is clear: num_requests (2 error / 0.05)^2, and at least 5 / 0.05."""
        return max(math.ceil(self.num_requests * (2 * self.error / VISIBLE) ** 2), round(FEWEST / VISIBLE))

    def __str__(self) -> str:
        """One line, with the number of requests that are needed if the estimate cannot tell."""
        found = f"held out: {self.before:.3f} before, {self.after:.3f} after ({self.gain:+.3f} +- {self.error:.3f}"
        found += f", {self.num_requests} requests)"
        if self.is_clear or self.requests_needed <= self.num_requests:
            return found
        return f"{found}; a difference of {VISIBLE} shows from about {self.requests_needed} requests on"


def folds(keys: Sequence[Hashable], num_folds: int, seed: int, *, owner: str) -> list[list[int]]:
    """Divide places into at most `num_folds` parts of about equal size. Places with equal keys are in the same part.

    Raises:
        ConfigError: There are fewer than two different keys, or `num_folds` is below 2.
    """
    require_integers(owner, 2, num_folds=num_folds)
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    if len(places) < 2:
        raise ConfigError(f"{owner} needs at least two different requests to hold some out; got {len(places)}.")
    different = list(places)
    Random(seed).shuffle(different)
    count = min(num_folds, len(different))
    return [[place for key in different[part::count] for place in places[key]] for part in range(count)]
