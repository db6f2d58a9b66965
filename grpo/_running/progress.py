"""The progress of a run, and the metrics of its iterations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.callbacks import Callbacks


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """The progress of a run. A checkpoint holds it, and the next call of `train` continues from it."""

    total: int | None = None
    """The total of the latest call of `train`, the work of earlier calls included. None: there was none."""
    unit: str | None = None
    """The metric that the total counts. None: iterations."""
    counts: dict[str, float] = field(default_factory=dict)
    """The sums of the metrics that totals have counted, over the iterations of all such calls."""
    num_draws: int = 0
    """How often states were drawn."""
    best_score: float = -math.inf
    """The best evaluation so far."""
    unrecorded: dict[str, float] | None = None
    """The metrics of an iteration after its updates, before it is evaluated and recorded. None: there is no such iteration."""
    callbacks: Callbacks = field(default_factory=lambda: Callbacks([]))
    """The callbacks of the run."""
    loaded_callbacks: Mapping[str, Any] = field(default_factory=dict)
    """The states of the callbacks of the run that was loaded."""
    is_loaded: bool = False
    """Whether a checkpoint was loaded and no run has continued from it yet."""

    def begin(self, callbacks: Callbacks) -> None:
        """Begin a call of `train`. After a checkpoint was loaded, the callbacks continue, too."""
        self.callbacks = callbacks
        if self.is_loaded:
            callbacks.load_state_dict(self.loaded_callbacks)
        self.is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """What a run continues from."""
        return {
            "total": self.total,
            "unit": self.unit,
            "counts": dict(self.counts),
            "num_draws": self.num_draws,
            "best_score": self.best_score,
            "unrecorded": self.unrecorded,
            "callbacks": self.loaded_callbacks if self.is_loaded else self.callbacks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.total, self.unit, self.counts = state["total"], state["unit"], dict(state["counts"])
        self.num_draws = state["num_draws"]
        self.best_score, self.unrecorded = state["best_score"], state["unrecorded"]
        self.loaded_callbacks = state["callbacks"]


SHOWN = ("rewards/mean", "eval/avg_reward")
"""The metrics in the line, where they were measured."""


class History(list[dict[str, float]]):
    """The metrics of each iteration, the oldest first. A notebook shows a line of it, and not all numbers."""

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """IPython's name of the method."""
        printer.text(summary_of(self))


def summary_of(history: Sequence[Mapping[str, float]]) -> str:
    """The number of iterations, and the first and the last value of the most important metrics."""
    measured = {name: [metrics[name] for metrics in history if name in metrics] for name in SHOWN}
    changes = [f"{name} {values[0]:.3g} -> {values[-1]:.3g}" for name, values in measured.items() if values]
    return ", ".join([f"{len(history)} iterations", *changes])
