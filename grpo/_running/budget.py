"""How far a run is, and when it ends: counted in iterations, or in a metric such as environment steps."""

from collections.abc import Mapping
from typing import Any

from grpo._common.checks import require_count
from grpo._common.conversion import describe
from grpo._common.names import nearest_name
from grpo._updating.parts import Counters
from grpo.errors import ConfigError

from .ahead import Ahead
from .demonstrations import DemonstrationSource
from .in_progress import IterationInProgress
from .progress import RunProgress
from .state_source import StateSource


class Budget:
    """The total of a run, and how much of it is done.

    With a metric as the unit, the run ends with the first iteration that reaches the total. With iterations sampled ahead,
    those that are sampled by then are made, too: whether iteration n exists is decided by the iterations up to n - 1 - K,
    which are finished whenever n is sampled. The same run has the same iterations at any timing.

    Args:
        total: The total number of iterations, or the total of the metric, earlier calls of `train` included.
        unit: The metric. None: iterations.
        progress: The progress of the run.
        counters: The number of finished iterations.
        in_progress: The iteration whose updates are being made.
        ahead: The iterations that are sampled already.
    """

    def __init__(
        self,
        total: int,
        unit: str | None,
        progress: RunProgress,
        counters: Counters,
        in_progress: IterationInProgress,
        ahead: Ahead,
    ) -> None:
        self.name = "num_iterations" if unit is None else unit
        """The name of the total."""
        self.total, self.unit = require_count(self.name, total), unit
        self._progress, self._counters, self._in_progress, self._ahead = progress, counters, in_progress, ahead

    @property
    def position(self) -> int:
        """Number of iterations that are finished and recorded."""
        # an iteration counts in `iteration` after its updates, and is evaluated and recorded later
        return self._counters.iteration - (self._progress.unrecorded is not None)

    @property
    def done(self) -> float:
        """How much of the total the recorded iterations have done."""
        return self.position if self.unit is None else self._progress.counts.get(self.unit, 0.0)

    @property
    def is_over(self) -> bool:
        """Whether no iteration is left to make."""
        # what was sampled already counts in a metric, so it is used up
        has_begun = self._ahead.pending or self._in_progress.rows or self._progress.unrecorded
        return self.done >= self.total and (self.unit is None or not has_begun)

    @property
    def num_to_sample(self) -> int:
        """Number of iterations, the next one included, that may be sampled now."""
        if self.unit is None:
            return self.total - self.position
        # how far an iteration goes is known only when its rows are there
        return self._ahead.num_ahead + 1 if self.done < self.total else 0

    def size_of(self, metrics: Mapping[str, float]) -> float:
        """How much of the total an iteration does.

        Raises:
            ConfigError: The iteration lacks the metric.
        """
        if self.unit is not None and not metrics.get(self.unit, 0.0) > 0:
            remedy = nearest_name(self.unit, sorted(metrics)) if metrics else "Nothing is sampled: pass num_iterations."
            raise ConfigError(
                f"train: budget={self.unit, self.total} counts a metric of every iteration, above 0; got "
                f"{metrics.get(self.unit)}. {remedy}"
            )
        return 1 if self.unit is None else metrics[self.unit]

    def after(self, metrics: Mapping[str, float]) -> float:
        """How much of the total is done after an iteration that is not recorded yet."""
        return self.done + self.size_of(metrics)

    def ends_with(self, metrics: Mapping[str, float]) -> bool:
        """Whether the run ends with an iteration that is not recorded yet."""
        return self.after(metrics) >= self.total and (self.unit is None or not self._ahead.pending)

    def passes(self, every: int, metrics: Mapping[str, float]) -> bool:
        """Whether an iteration that is not recorded yet reaches a multiple of `every`, or is the last."""
        return self.after(metrics) // every > self.done // every or self.ends_with(metrics)

    def as_metric(self, done: float) -> dict[str, float]:
        """What is done, under the name `episodes/total_steps` if `episodes/steps` is counted."""
        group, separator, name = (self.unit or "").rpartition("/")
        return {} if self.unit is None else {f"{group}{separator}total_{name}": done}

    def record(self, done: float) -> None:
        """End an iteration, after which so much is done."""
        self._progress.unrecorded = None
        if self.unit is not None:
            self._progress.counts[self.unit] = done


def total_of(
    source: StateSource | DemonstrationSource | None, num_iterations: int | None, num_epochs: float | None, budget: Any
) -> tuple[int, str | None]:
    """The total of a run and its unit, from the one of the three arguments that is given."""
    given = {"num_iterations": num_iterations, "num_epochs": num_epochs, "budget": budget}
    if sum(value is not None for value in given.values()) != 1:
        named = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(f"train needs num_iterations, num_epochs or budget; got {named}. Pass exactly one of them.")
    if num_epochs is not None:
        assert source is not None
        return source.num_iterations(num_epochs), None
    if budget is None:
        return require_count("num_iterations", num_iterations), None
    if not isinstance(budget, tuple) or len(budget) != 2 or not isinstance(budget[0], str):
        raise ConfigError(
            f'budget must be a metric and its total, ("episodes/steps", 100_000); got {describe(budget)}.'
        )
    return require_count(f"budget: {budget[0]}", budget[1]), budget[0]
