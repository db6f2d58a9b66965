"""The metrics of a run's iterations, and the line that a notebook shows of them."""

from collections.abc import Mapping, Sequence
from typing import Any

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
