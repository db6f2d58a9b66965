"""Metrics: add them up, compute statistics of rewards, and average them over a whole run."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from typing import Any, ParamSpec, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ._advantages.groups import mean_and_std
from .errors import ConfigError

Args = ParamSpec("Args")

Totals: TypeAlias = dict[str, tuple[float, float, float]]
"""Metric name -> (count, sum, sum of squares)."""


class Meter:
    """Adds up (count, sum, sum of squares) per metric on the device, and copies all totals to the host at once.

    A count of 0 marks a metric as a loss term. Loss terms are summed over the micro-batches of an update and averaged over
    updates. Other metrics are averaged over their counts.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._moments: list[Tensor] = []
        self._values: dict[str, tuple[int, float]] = {}
        self._start = time.perf_counter()

    def add(self, moments: Mapping[str, Float[Tensor, "3"]]) -> None:
        """Add the moments of one micro-batch. The device is not synchronised."""
        self._names.extend(moments)
        self._moments.extend(moments.values())

    def add_value(self, name: str, value: float) -> None:
        """Add one number that is on the host already. `report` returns the mean of such numbers."""
        count, total = self._values.get(name, (0, 0.0))
        self._values[name] = (count + 1, total + value)

    def totals(self) -> Totals:
        """The totals of this rank, which are copied to the host."""
        moments = torch.stack(self._moments).tolist() if self._moments else []
        return _added_up(zip(self._names, moments, strict=True))

    def report(self, num_updates: int, of_ranks: Sequence[Totals] | None = None) -> dict[str, tuple[float, float]]:
        """Return (mean, standard deviation) of each metric, and empty the meter. Loss terms are averaged over the updates.

        Args:
            num_updates: number of updates.
            of_ranks: the `totals` of all ranks. None: there is one rank.
        """
        result = {name: (total / count, 0.0) for name, (count, total) in self._values.items()}
        parts = [self.totals()] if of_ranks is None else of_ranks
        totals = _added_up(item for of_rank in parts for item in of_rank.items())
        for name, (count, total, squares) in totals.items():
            mean = total / (count or num_updates or 1)
            variance = squares / count - mean**2 if count else 0.0
            result[name] = (mean, math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else variance)
        self.clear()
        return result

    def begin(self) -> None:
        """Begin an iteration: forget everything that was added, and start the clock."""
        self.clear()
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since `begin`."""
        return time.perf_counter() - self._start

    def clear(self) -> None:
        """Forget everything that was added."""
        self._names, self._moments, self._values = [], [], {}

    def restore_point(self) -> Callable[[], None]:
        """Return a function that forgets everything that is added from now on."""
        num_moments, values = len(self._moments), {**self._values}

        def restore() -> None:
            del self._names[num_moments:], self._moments[num_moments:]
            self._values = {**values}

        return restore

    def copy(self) -> "Meter":
        """A meter with the same content. The device is not synchronised."""
        copied = Meter()
        copied._names, copied._moments, copied._values = [*self._names], [*self._moments], {**self._values}
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Everything that was added, in the order in which it was added, so that sums are the same to the last bit."""
        moments = torch.stack(self._moments) if self._moments else None
        return {"names": [*self._names], "moments": moments, "values": {**self._values}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        moments = state["moments"]
        self.begin()
        self._names, self._moments = list(state["names"]), [] if moments is None else list(moments)
        self._values = dict(state["values"])


def _added_up(parts: Iterable[tuple[str, Sequence[float]]]) -> Totals:
    totals: Totals = {}
    for name, (count, total, squares) in parts:
        so_far = totals.get(name, (0.0, 0.0, 0.0))
        totals[name] = (so_far[0] + count, so_far[1] + total, so_far[2] + squares)
    return totals


def timed(method: Callable[Args, dict[str, float]]) -> Callable[Args, dict[str, float]]:
    """Add the seconds that a method takes to the metrics that it returns, as `time/iteration`."""

    @wraps(method)
    def measured(*args: Args.args, **kwargs: Args.kwargs) -> dict[str, float]:
        start = time.perf_counter()
        return {**method(*args, **kwargs), "time/iteration": time.perf_counter() - start}

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


AVERAGED = {"reward": "rewards/mean", "loss": "train/total_loss", "kl": "train/kl_mean", "entropy": "train/entropy"}
"""Maps the name of an average in `RunningStatistics` to the metric that is averaged."""


@dataclass(kw_only=True)
class RunningStatistics:
    """Counts, moving averages and recent rewards of a run. A `MetricSink`: pass it to `train(sinks=[...])`.

    The average of x_1 ... x_n is m_n / w_n with

        m_n = decay m_(n-1) + (1 - decay) x_n,  w_n = decay w_(n-1) + (1 - decay),  m_0 = w_0 = 0

    This equals sum_i decay^(n-i) x_i / sum_i decay^(n-i), so the first average is x_1 and is not biased towards 0.
    A missing or NaN metric leaves its average or count unchanged.

    Raises:
        ConfigError: `decay` is outside [0, 1), or `history` is below 1.

    Example:
        >>> statistics = RunningStatistics(decay=0.5)
        >>> statistics.log({"rewards/mean": 1.0}, iteration=1)
        >>> statistics.log({"rewards/mean": 4.0}, iteration=2)
        >>> statistics.averages["reward"]  # (0.5 * 1 + 4) / (0.5 + 1)
        3.0

    Source:
        Kingma & Ba 2015, arXiv:1412.6980, sec. 3, for dividing by the sum of the weights.
    """

    decay: float = 0.99
    """Factor by which a value's weight shrinks with each later value. Larger: smoother averages, which react more slowly."""
    history: int = 1_000
    """Number of mean rewards to keep, one per iteration. Larger: `reward_history` reaches further back."""
    num_iterations: int = 0
    """Number of logged iterations."""
    num_updates: int = 0
    """Number of updates that changed the weights."""
    num_samples: int = 0
    """Number of sampled rows on all ranks. A group that dynamic sampling left out counts with the mean size of kept groups."""
    moments: dict[str, list[float]] = field(default_factory=lambda: {name: [0.0, 0.0] for name in AVERAGED})
    """Maps the name of an average to (m_n, w_n), its weighted sum and the sum of its weights."""
    rewards: list[float] = field(default_factory=list)
    """Mean rewards of the last `history` iterations, oldest first."""

    def __post_init__(self) -> None:
        """Check `decay` and `history`."""
        if not 0.0 <= self.decay < 1.0:
            raise ConfigError(f"RunningStatistics.decay must be in [0, 1); got {self.decay!r}.")
        if self.history < 1:
            raise ConfigError(f"RunningStatistics.history must be >= 1; got {self.history!r}.")

    def reset(self) -> None:
        """Forget everything that was logged. `decay` and `history` do not change."""
        vars(self).update(vars(RunningStatistics(decay=self.decay, history=self.history)))

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Add the metrics of one iteration, as the trainer's `train`, `step` and `update` return them."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.num_iterations += 1
        self.num_updates += round(finite.get("train/num_updates", 0.0))
        groups = "group_stats/num_drawn" if "group_stats/num_drawn" in metrics else "group_stats/num_groups"
        self.num_samples += round(finite.get(groups, 0.0) * finite.get("group_stats/avg_group_size", 0.0))
        for name, metric in AVERAGED.items():
            if metric in finite:
                total, weight = self.moments[name]
                new = 1.0 - self.decay
                self.moments[name] = [self.decay * total + new * finite[metric], self.decay * weight + new]
        if AVERAGED["reward"] in finite:
            self.rewards = [*self.rewards, finite[AVERAGED["reward"]]][-self.history :]

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    @property
    def averages(self) -> dict[str, float | None]:
        """Moving averages of reward, loss, KL and entropy. None: the metric was never measured."""
        return {name: total / weight if weight else None for name, (total, weight) in self.moments.items()}

    @property
    def reward_history(self) -> list[float]:
        """Mean rewards of the last `history` iterations, oldest first."""
        return list(self.rewards)

    def to_dict(self) -> dict[str, Any]:
        """Convert settings, counts, averages and rewards to plain values for JSON and `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunningStatistics":
        """Make statistics from a dict that `to_dict` wrote, and continue from them.

        Raises:
            ConfigError: `values` has other keys than a dict from `to_dict`.
        """
        expected = {one.name for one in fields(cls)}
        if set(values) != expected or set(values["moments"]) != set(AVERAGED):
            raise ConfigError(
                f"RunningStatistics.from_dict needs {', '.join(sorted(expected))}, with moments of {', '.join(AVERAGED)}; "
                f"got {', '.join(sorted(values))}. Pass what to_dict() returned."
            )
        return cls(**deepcopy(dict(values)))
