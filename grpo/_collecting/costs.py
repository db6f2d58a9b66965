"""What the calls of policies and reward models cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo._rewarding.calls import RewardCalls
from grpo.metrics import add_counts_and_sums

from .batches import add_metrics
from .out_of_memory import PassSizes
from .sampling import SampleCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the calls of one rank have cost since the last report."""

    counts: Mapping[str, float]
    """Failures of the reward model, by metric name."""
    measured: Mapping[str, tuple[float, float]]
    """(count, sum) of the reward model's own metrics, by name."""
    num_repeated: int
    """How often work was repeated because memory ran out."""


class CallCosts:
    """What the calls of this rank have cost since the last report."""

    def __init__(self, asked: RewardCalls, sample: SampleCalls, scoring: PassSizes, updating: PassSizes) -> None:
        self._asked = asked
        self._repeated: tuple[SampleCalls | PassSizes, ...] = (sample, scoring, updating)

    def of_this_rank(self) -> Costs:
        """The costs since the last `agree`. An iteration that fails leaves them to the next one."""
        return Costs(
            counts=self._asked.counts,
            measured=self._asked.measured,
            num_repeated=sum(part.num_repeated for part in self._repeated),
        )

    def add(self, counts: Mapping[str, float], measured: Mapping[str, tuple[float, float]]) -> None:
        """Count failures and own metrics of a reward model that was asked elsewhere. The next report has them."""
        own = self._asked
        own.counts, own.measured = add_metrics([own.counts, counts]), add_counts_and_sums([own.measured, measured])

    def agree(self, of_ranks: Sequence[Costs]) -> dict[str, float]:
        """The costs of all ranks as metrics. The next report begins at 0."""
        self._asked.forget_counts()
        for part in self._repeated:
            part.num_repeated = 0
        measured = add_counts_and_sums(costs.measured for costs in of_ranks)
        means = {name: total / count if count else total for name, (count, total) in measured.items()}
        num_repeated = sum(costs.num_repeated for costs in of_ranks)
        return {"train/out_of_memory": float(num_repeated)} | add_metrics([costs.counts for costs in of_ranks]) | means

    def state_dict(self) -> dict[str, Any]:
        """The counts that no iteration has reported yet. How many rows fit into memory, a resumed run finds out again."""
        return {
            "num_repeated": [part.num_repeated for part in self._repeated],
            "reward_counts": dict(self._asked.counts),
            "reward_metrics": dict(self._asked.measured),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for part, num_repeated in zip(self._repeated, state["num_repeated"], strict=True):
            part.num_repeated = num_repeated
        self._asked.counts = dict(state["reward_counts"])
        self._asked.measured = dict(state["reward_metrics"])
