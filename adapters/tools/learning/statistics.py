"""Statistics of a whole run: counts, moving averages and recent rewards."""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from grpo.errors import ConfigError

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
