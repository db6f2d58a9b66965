"""How a run is doing, in a few numbers: a sink that counts, and averages what is recent.

`metrics.Meter` averages within one iteration, and `running_moments.RunningMoments` weighs everything ever seen alike; here what
is older weighs less.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError

AVERAGED = {
    "reward": "rewards/mean",
    "loss": "train/total_loss",
    "kl": "train/kl_mean",
    "entropy": "train/entropy",
}
"""Name -> the metric that is averaged under it."""


class RunningStatistics:
    """Counts of iterations, updates and samples, moving averages, and recent rewards. A `MetricSink`: pass it to `train`.

    The average of x_1 ... x_n is m_n / w_n with

        m_n = decay m_(n-1) + (1 - decay) x_n,  w_n = decay w_(n-1) + (1 - decay),  m_0 = w_0 = 0

    that is, sum over i of decay^(n-i) x_i over the sum of the weights: after one value it is that value, not pulled to 0.
    A value that was not measured (NaN, or no such metric) leaves its average, or count, as it is. Samples are all that were
    drawn: with `dynamic_sampling_rounds` also those that nothing was learned from, at the mean size of the groups that stayed.

    Args:
        decay: what a value's weight is multiplied with by each later one. Larger is smoother, and later.
        history: mean rewards that are kept, one per iteration. Larger reaches further back.

    Raises:
        ConfigError: a decay outside [0, 1), or a history below 1.

    Example:
        >>> statistics = RunningStatistics(decay=0.5)
        >>> statistics.log({"rewards/mean": 1.0}, iteration=1)
        >>> statistics.log({"rewards/mean": 4.0}, iteration=2)
        >>> statistics.averages["reward"]  # (0.5 * 1 + 4) / (0.5 + 1)
        3.0

    Source:
        Kingma & Ba 2015, arXiv:1412.6980, sec. 3, for the correction by the sum of the weights.
    """

    def __init__(self, *, decay: float = 0.99, history: int = 1_000) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"RunningStatistics.decay must be in [0, 1); got {decay!r}.")
        if history < 1:
            raise ConfigError(f"RunningStatistics.history must be >= 1; got {history!r}.")
        self.decay = decay
        self.history = history
        self.reset()

    def reset(self) -> None:
        """As at the start."""
        self.num_iterations = 0
        self.num_updates = 0
        self.num_samples = 0
        self._moments = dict.fromkeys(AVERAGED, (0.0, 0.0))
        self._rewards: deque[float] = deque(maxlen=self.history)

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Take one iteration's metrics, as `train`, `step` and `update` of the trainer give them."""
        self.num_iterations += 1
        self.num_updates += round(_measured(metrics, "train/num_updates"))
        # rows of all ranks, those of groups that dynamic sampling left out too; replayed ones were counted when they were new
        groups = "group_stats/num_drawn" if "group_stats/num_drawn" in metrics else "group_stats/num_groups"
        self.num_samples += round(_measured(metrics, groups) * _measured(metrics, "group_stats/avg_group_size"))
        for name, metric in AVERAGED.items():
            value = metrics.get(metric, math.nan)
            if math.isfinite(value):
                total, weight = self._moments[name]
                self._moments[name] = (
                    self.decay * total + (1.0 - self.decay) * value,
                    self.decay * weight + (1.0 - self.decay),
                )
        if math.isfinite(reward := metrics.get(AVERAGED["reward"], math.nan)):
            self._rewards.append(reward)

    def close(self) -> None:
        """Nothing to close."""

    @property
    def averages(self) -> dict[str, float | None]:
        """Of reward, loss, KL and entropy; None: never measured."""
        return {name: total / weight if weight else None for name, (total, weight) in self._moments.items()}

    @property
    def reward_history(self) -> list[float]:
        """Mean rewards of the last iterations, oldest first."""
        return list(self._rewards)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "decay": self.decay,
            "history": self.history,
            "num_iterations": self.num_iterations,
            "num_updates": self.num_updates,
            "num_samples": self.num_samples,
            "moments": {name: list(pair) for name, pair in self._moments.items()},
            "rewards": list(self._rewards),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunningStatistics":
        """What `to_dict` described, which goes on where that one was.

        Raises:
            ConfigError: keys that are not those of `to_dict`.
        """
        expected = {*cls().to_dict()}
        if set(values) != expected or set(values["moments"]) != set(AVERAGED):
            raise ConfigError(
                f"RunningStatistics.from_dict needs {', '.join(sorted(expected))}, with moments of {', '.join(AVERAGED)}; "
                f"got {', '.join(sorted(values))}. Pass what to_dict() returned."
            )
        restored = cls(decay=values["decay"], history=values["history"])
        restored.num_iterations = values["num_iterations"]
        restored.num_updates = values["num_updates"]
        restored.num_samples = values["num_samples"]
        restored._moments = {name: (total, weight) for name, (total, weight) in values["moments"].items()}
        restored._rewards.extend(values["rewards"])
        return restored


def _measured(metrics: Mapping[str, float], name: str) -> float:
    value = metrics.get(name, 0.0)
    return value if math.isfinite(value) else 0.0
