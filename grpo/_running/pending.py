"""An iteration that waits for its rewards."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from grpo._collecting.sampled_rows import SampledRows
from grpo._rewarding.calls import KeptRewards, RewardCalls
from grpo.errors import CheckpointError

from .background import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedRewards:
    """The rewards of an iteration, and what asking for them cost."""

    rewards: KeptRewards
    """The rewards."""
    counts: Mapping[str, float]
    """Failures of the calls, by metric name."""
    measured: Mapping[str, tuple[float, float]]
    """(count, sum) of the reward model's own metrics, by name."""
    seconds: float
    """How long the calls took."""

    def state_dict(self) -> dict[str, Any]:
        """All fields by name. No tensor is copied."""
        return _fields(self) | {"rewards": _fields(self.rewards)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "CollectedRewards":
        """Return the rewards that `state_dict` described."""
        measured = {name: (count, total) for name, (count, total) in state["measured"].items()}
        return cls(**{**state, "rewards": KeptRewards(**state["rewards"]), "measured": measured})


class Pending:
    """An iteration between its sampling and its updates."""

    def __init__(self, rows: Task[SampledRows], ask: Callable[[SampledRows], CollectedRewards]) -> None:
        self.rows = rows
        """The rows."""
        self._ask = ask
        self.answer = self.question()
        """Their rewards."""
        self.waited = 0.0
        """Seconds for which the thread that updates the policy has waited for the rows and the rewards."""

    def question(self) -> Task[CollectedRewards]:
        """A new task that asks for the rewards."""
        return Task(lambda: self._ask(self.rows.result()))

    def state_dict(self) -> dict[str, Any]:
        """The rows, and their rewards if they are there. Waits while the rows are being sampled."""
        if (error := self.rows.exception()) is not None:
            raise CheckpointError(
                "An iteration that a checkpoint must hold could not be sampled. Continue from an earlier checkpoint."
            ) from error
        is_answered = self.answer.done() and self.answer.exception() is None
        answer = self.answer.result().state_dict() if is_answered else None
        return {"rows": self.rows.result().state_dict(), "answer": answer}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], ask: Callable[[SampledRows], CollectedRewards]) -> "Pending":
        """Return the iteration that `state_dict` described. Rewards that were not there have to be asked for again."""
        pending = cls(Task.of(SampledRows(**state["rows"])), ask)
        if state["answer"] is not None:
            pending.answer = Task.of(CollectedRewards.from_state_dict(state["answer"]))
        return pending


def asked(calls: RewardCalls, ask: Callable[[RewardCalls], KeptRewards]) -> CollectedRewards:
    """Ask for rewards, and take the counts of the calls with the answer. After an error, the next answer has them."""
    start = time.perf_counter()
    rewards = ask(calls)
    counts, measured = dict(calls.counts), dict(calls.measured)
    calls.forget_counts()
    return CollectedRewards(rewards=rewards, counts=counts, measured=measured, seconds=time.perf_counter() - start)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
