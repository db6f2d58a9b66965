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
    rows_per_call: int | None
    """The most rows that a call of the sampler may have. None: memory has not run out."""
    num_halvings: int
    """How often the rows per forward pass were halved when scoring."""
    num_repeated: int
    """How often work was repeated because memory ran out."""


class CallCosts:
    """What the calls of this rank have cost since the last report, and how many rows fit into memory.

    Args:
        asked: the calls of the reward model.
        sample: the calls that sample.
        scoring: forward passes without gradient.
        updating: forward passes of updates.
    """

    def __init__(self, asked: RewardCalls, sample: SampleCalls, scoring: PassSizes, updating: PassSizes) -> None:
        self._asked, self._sample, self._scoring, self._updating = asked, sample, scoring, updating

    def of_this_rank(self) -> Costs:
        """The costs since the last `agree`. An iteration that fails leaves them to the next one."""
        return Costs(
            counts=self._asked.counts,
            measured=self._asked.measured,
            rows_per_call=self._sample.rows_per_call,
            num_halvings=self._scoring.num_halvings,
            num_repeated=sum(part.num_repeated for part in (self._sample, self._scoring, self._updating)),
        )

    def add(self, counts: Mapping[str, float], measured: Mapping[str, tuple[float, float]]) -> None:
        """Count failures and own metrics of a reward model that was asked elsewhere. The next report has them."""
        own = self._asked
        own.counts, own.measured = add_metrics([own.counts, counts]), add_counts_and_sums([own.measured, measured])

    def agree(self, of_ranks: Sequence[Costs]) -> dict[str, float]:
        """The costs of all ranks as metrics. From here on, all ranks make calls of the fewest rows that any rank came to."""
        self._asked.forget_counts()
        for part in (self._sample, self._scoring, self._updating):
            part.num_repeated = 0
        sizes = [costs.rows_per_call for costs in of_ranks if costs.rows_per_call is not None]
        self._sample.rows_per_call = min(sizes, default=None)
        self._scoring.num_halvings = max(costs.num_halvings for costs in of_ranks)  # updates agree in every attempt
        measured = add_counts_and_sums(costs.measured for costs in of_ranks)
        means = {name: total / count if count else total for name, (count, total) in measured.items()}
        num_repeated = sum(costs.num_repeated for costs in of_ranks)
        return {"train/out_of_memory": float(num_repeated)} | add_metrics([costs.counts for costs in of_ranks]) | means

    def state_dict(self) -> dict[str, Any]:
        """The numbers of rows that fit into memory, and the counts that no iteration has reported yet."""
        return {
            "rows_per_sample_call": self._sample.rows_per_call,
            "num_halvings": [self._scoring.num_halvings, self._updating.num_halvings],
            "num_repeated": [self._sample.num_repeated, self._scoring.num_repeated, self._updating.num_repeated],
            "reward_counts": dict(self._asked.counts),
            "reward_metrics": dict(self._asked.measured),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, so that a resumed run makes the same forward passes."""
        self._sample.rows_per_call = state["rows_per_sample_call"]
        self._scoring.num_halvings, self._updating.num_halvings = state["num_halvings"]
        self._sample.num_repeated, self._scoring.num_repeated, self._updating.num_repeated = state["num_repeated"]
        self._asked.counts = dict(state["reward_counts"])
        self._asked.measured = dict(state["reward_metrics"])
