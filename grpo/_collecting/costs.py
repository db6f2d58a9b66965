"""What the calls of policies and reward models cost."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the calls of one rank have cost since the last report."""

    counts: Mapping[str, float]
    """Failures of the reward model, by metric name."""
    measured: Mapping[str, tuple[float, float]]
    """(count, sum) of the reward model's own metrics, by name."""
    rows_per_call: int | None
    """The most rows that a call of the sampler may have. None: memory has not run out."""
    num_halvings: int
    """How often the rows per forward pass were halved when scoring."""
    num_repeated: int
    """How often work was repeated because memory ran out."""
