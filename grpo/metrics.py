"""Metrics: add them up, compute statistics of rewards, and average them over a whole run."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ._advantages.groups import mean_and_std
from ._objective.metrics import Measured, all_moments

Args = ParamSpec("Args")

Totals: TypeAlias = dict[str, tuple[float, float, float]]
"""Metric name -> (count, sum, sum of squares)."""

MAX_WAITING = 2**12
"""Largest number of steps of a micro-batch whose metrics are computed at the end of the iteration, together with others."""


class Meter:
    """Adds up (count, sum, sum of squares) per metric on the device, and copies all totals to the host at once.

    A count of 0 marks a metric as a loss term. Loss terms are summed over the micro-batches of an update and averaged over
    updates. Other metrics are averaged over their counts.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._added: list[Mapping[str, Tensor] | Measured] = []
        self._values: dict[str, tuple[int, float]] = {}
        self._start = self.clock()

    def add(self, moments: Mapping[str, Float[Tensor, "3"]] | Measured) -> None:
        """Add the moments of one micro-batch, or what they are computed from. The device is not synchronised."""
        # small micro-batches wait: it takes longer to start the operations than to run them
        waits = not isinstance(moments, Measured) or moments.mask.numel() <= MAX_WAITING
        self._added += [moments] if waits else all_moments([moments])

    def add_value(self, name: str, value: float) -> None:
        """Add one number that is on the host already. `report` returns the mean of such numbers."""
        count, total = self._values.get(name, (0, 0.0))
        self._values[name] = (count + 1, total + value)

    def totals(self) -> Totals:
        """The totals of this rank, which are copied to the host."""
        state = self.state_dict()
        moments = [] if state["moments"] is None else state["moments"].tolist()
        return _added_up(zip(state["names"], moments, strict=True))

    def report(self, num_updates: int, of_ranks: Sequence[Totals] | None = None) -> dict[str, tuple[float, float]]:
        """Return (mean, standard deviation) of each metric, and empty the meter. Loss terms are averaged over the updates.

        Args:
            num_updates: Number of updates.
            of_ranks: The `totals` of all ranks. None: there is one rank.
        """
        result = {name: (total / count, 0.0) for name, (count, total) in self._values.items()}
        parts = [self.totals()] if of_ranks is None else of_ranks
        totals = _added_up(item for of_rank in parts for item in of_rank.items())
        for name, (count, total, squares) in totals.items():
            # a count of 0 marks a loss term: it is summed within an update and averaged over updates
            mean = total / (count or num_updates or 1)
            variance = squares / count - mean**2 if count else 0.0
            result[name] = (mean, math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else variance)
        self.clear()
        return result

    def begin(self) -> None:
        """Begin an iteration: forget everything that was added, and start the clock."""
        self.clear()
        self._start = self.clock()

    @property
    def seconds(self) -> float:
        """Seconds since `begin`."""
        return self.clock() - self._start

    def clear(self) -> None:
        """Forget everything that was added."""
        self._added, self._values = [], {}

    def restore_point(self) -> Callable[[], None]:
        """Return a function that forgets everything that is added from now on."""
        num_added, values = len(self._added), {**self._values}

        def restore() -> None:
            del self._added[num_added:]
            self._values = {**values}

        return restore

    def copy(self) -> "Meter":
        """A meter with the same content. The device is not synchronised."""
        copied = Meter(self.clock)
        copied._added, copied._values = [*self._added], {**self._values}
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Everything that was added, in the order in which it was added, so that sums are the same to the last bit."""
        rows = [row for moments in all_moments(self._added) for row in moments.items()]
        names, values = [name for name, _ in rows], [value for _, value in rows]
        return {"names": names, "moments": torch.stack(values) if values else None, "values": {**self._values}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        moments = () if state["moments"] is None else state["moments"]
        self.begin()
        self._added = [{name: row} for name, row in zip(state["names"], moments, strict=True)]
        self._values = dict(state["values"])


def _added_up(parts: Iterable[tuple[str, Sequence[float]]]) -> Totals:
    totals: Totals = {}
    for name, (count, total, squares) in parts:
        so_far = totals.get(name, (0.0, 0.0, 0.0))
        totals[name] = (so_far[0] + count, so_far[1] + total, so_far[2] + squares)
    return totals


def timed(
    method: Callable[Concatenate[Any, Args], dict[str, float]],
) -> Callable[Concatenate[Any, Args], dict[str, float]]:
    """Add the seconds that a learner's method takes to the metrics that it returns, as `time/iteration`."""

    @wraps(method)
    def measured(self: Any, /, *args: Args.args, **kwargs: Args.kwargs) -> dict[str, float]:
        start = self.meter.clock()
        return {**method(self, *args, **kwargs), "time/iteration": self.meter.clock() - start}

    return measured


QUANTILES = {"max": 1.0, "min": 0.0, "median": 0.5, "q25": 0.25, "q75": 0.75}
"""Maps the name of a statistic of rewards to its quantile: 0.25 for the first quartile."""


def add_counts_and_sums(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Add up the (count, sum) of each name, as in `Rewards.metrics`.

    Example:
        >>> add_counts_and_sums([{"a": (1, 2.0)}, {"a": (3, 0.5), "b": (0, 1.0)}])
        {'a': (4.0, 2.5), 'b': (0.0, 1.0)}
    """
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (count, value) in part.items():
            known_count, known_value = total.get(name, (0.0, 0.0))
            total[name] = (known_count + count, known_value + value)
    return total


def reward_statistics(rewards: Float[Tensor, " N"]) -> dict[str, float]:
    """Mean, standard deviation (n - 1), extremes and quartiles of the rewards, under their metric names."""
    mean, std = mean_and_std(rewards.double().numpy(), ddof=1)
    places = np.array(list(QUANTILES.values())) * (len(rewards) - 1)
    quantiles = np.interp(places, np.arange(len(rewards)), np.sort(rewards.numpy())).tolist()
    named = {f"rewards/{name}": value for name, value in zip(QUANTILES, quantiles, strict=True)}
    return {"rewards/mean": mean, "rewards/std": std, **named}
