"""The rows that an iteration trains on, with advantages. Rows of earlier iterations can be added, and rows split into steps."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._collecting.batches import OPTIONAL, gather_rewards, join_batches, join_field, join_rows
from grpo._common.conversion import as_advantages, describe, join_steps, require_rows
from grpo.advantage_estimator import AdvantageEstimator
from grpo.engine import Engine
from grpo.errors import ContractError
from grpo.policy_base import SplitsSteps
from grpo.types import ExperienceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """The rows that updates read: a batch, and the advantages of its rows or steps."""

    batch: ExperienceBatch
    """The rows, with their rewards."""
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """The advantages, one per row or one per step, on the CPU."""
    returns: Float[Tensor, "N T"] | None = None
    """The returns that the critic is trained on. None: there is no critic."""
    old_is_current: bool = False
    """True if there is a single update and the sampler returned no scores: the current policy is then the old policy, and the
    ratio is 1."""
    num_replayed: int = 0
    """Number of rows from earlier iterations."""
    live: Bool[Tensor, " N"] | None = None
    """Rows with an advantage. The other rows change no gradient and are skipped before the forward pass. None: all rows
    count."""

    @property
    def advantages_per_step(self) -> Float[Tensor, "N T"]:
        """The advantage of each step. If advantages are per row, each step has the advantage of its row."""
        advantages = self.advantages
        return advantages if advantages.dim() == 2 else advantages.unsqueeze(1).expand(self.batch.mask.shape)

    @property
    def is_sampled(self) -> Bool[Tensor, " N"]:
        """True at rows that were sampled; False at demonstrations."""
        flags = self.batch.is_demonstration
        return torch.ones(self.batch.num_rows, dtype=torch.bool) if flags is None else ~flags

    @property
    def num_demonstrations(self) -> int:
        """The number of demonstrations."""
        flags = self.batch.is_demonstration
        return 0 if flags is None else int(flags.sum())

    def with_demonstrations(self, given: Sequence[ExperienceBatch]) -> "TrainingRows":
        """These rows, followed by demonstrations. What only sampled rows have is 0 there, and is never read."""
        if not given:
            return self
        batch, num_given = self.batch, sum(part.num_rows for part in given)
        width = max(part.mask.shape[1] for part in (batch, *given))
        new_ids = torch.arange(num_given) + (int(batch.group_ids.max()) + 1 if batch.num_rows else 0)
        present = [part for part in (batch, *given) if part.num_rows]

        def followed(values: Tensor | None) -> Any:
            if values is None:
                return None
            columns = (0, width - values.shape[1]) if values.dim() == 2 else ()
            return torch.nn.functional.pad(values, (*columns, 0, num_given))

        joined = replace(
            batch,
            states=join_rows([part.states for part in present]),
            actions=join_rows([part.actions for part in present]),
            group_ids=torch.cat([batch.group_ids, new_ids]),
            rewards=followed(batch.rewards),
            reward_components={name: followed(part) for name, part in batch.reward_components.items()},
            mask=join_steps([part.mask.to(given[0].mask.device) for part in (batch, *given)], width),
            is_demonstration=torch.arange(batch.num_rows + num_given) >= batch.num_rows,
            **{name: followed(getattr(batch, name)) for name in OPTIONAL if name != "observed_mask"},
            observed_mask=join_field(
                "observed_mask", [part.observed_mask for part in present], [part.mask for part in present]
            ),
        )
        return replace(
            self,
            batch=joined,
            advantages=followed(self.advantages),
            returns=followed(self.returns),
        )

    def state_dict(self) -> dict[str, Any]:
        """All fields by name. No tensor is copied."""
        return _fields(self) | {"batch": _fields(self.batch)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "TrainingRows":
        """Return the rows that `state_dict` described."""
        return cls(**{**state, "batch": ExperienceBatch(**state["batch"])})


def with_advantages(
    batch: ExperienceBatch, advantages: Callable[[ExperienceBatch], Tensor], engine: Engine
) -> tuple[TrainingRows, TrainingRows]:
    """Compute advantages. Return this rank's rows for training, and the rows of all ranks for metrics.

    `AdvantageEstimator` reads the rewards of all ranks. A user's own callable gets this rank's batch only.
    """
    all_ranks, own = gather_rewards(batch, engine)
    width = batch.mask.shape[1]
    returns = None
    if not all_ranks.num_rows:
        found = everything = torch.zeros(0)
    elif isinstance(advantages, AdvantageEstimator):
        estimate = advantages.estimate(all_ranks)
        everything = as_advantages(estimate.advantages, all_ranks.mask)
        found = everything[own] if everything.dim() == 1 else everything[own, :width]
        returns = None if estimate.returns is None else estimate.returns[own, :width]
    else:
        found = as_advantages(advantages(batch), batch.mask)
        everything, _ = engine.gather(found)
    rows = TrainingRows(batch=batch, advantages=found, returns=returns)
    return rows, TrainingRows(batch=all_ranks, advantages=everything)


def split_steps(rows: TrainingRows, policy: SplitsSteps) -> TrainingRows:
    """Turn every valid step into a row with T = 1. Steps are in order, row by row."""
    batch, mask, flags = rows.batch, rows.batch.mask, rows.batch.is_demonstration
    num_steps = int(mask.sum())
    owner = f"{type(policy).__name__}.split_steps"
    split_rows: Any = policy.split_steps(batch.states, batch.actions)
    if not isinstance(split_rows, tuple) or len(split_rows) != 2:
        raise ContractError(
            f"{owner} must return (states, actions); got {describe(split_rows)}. Return a tuple of two."
        )
    states, actions = split_rows
    for name, rows_of_steps in (("states", states), ("actions", actions)):
        require_rows(f"{owner}: {name}", rows_of_steps)
    if len(states) != num_steps or len(actions) != num_steps:
        raise ContractError(
            f"{owner} must return one row per valid step = {num_steps}; got {len(states)} states and {len(actions)} actions."
        )

    def at_mask(values: Tensor | None) -> Any:
        return None if values is None else values[mask.to(values.device)].unsqueeze(1)

    split = replace(
        batch,
        states=states,
        actions=actions,
        group_ids=torch.arange(num_steps),
        rewards=torch.zeros(num_steps, dtype=batch.rewards.dtype),
        reward_components={},
        mask=torch.ones(num_steps, 1, dtype=torch.bool, device=mask.device),
        final_values=None,
        state_keys=None,
        observed_mask=None,
        is_demonstration=None if flags is None else flags.repeat_interleave(mask.sum(1).cpu()),
        **{
            name: at_mask(getattr(batch, name))
            for name in ("old_log_probs", "behaviour_log_probs", "ref_log_probs", "entropy", "values")
        },
    )
    advantages = at_mask(rows.advantages_per_step).squeeze(1)
    return replace(rows, batch=split, advantages=advantages, returns=at_mask(rows.returns))


class ReplayBuffer:
    """The rows of the last `limit` iterations, with the advantages they had. Older rows are dropped.

    The ratio of a replayed row compares the policy with the policy at its collection, so clipping bounds how far the policy has
    moved since then, for any number of iterations.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._recent: deque[TrainingRows] = deque(maxlen=limit)

    def join(self, rows: TrainingRows) -> TrainingRows:
        """Return `rows` followed by the kept rows of earlier iterations, newest first. Keep `rows` for later iterations."""
        if self._limit == 0 or not rows.batch.num_rows:  # demonstrations alone
            return rows
        iterations = [rows, *reversed(self._recent)]
        self._recent.append(rows)
        if len(iterations) == 1:
            return rows
        batch = join_batches([part.batch for part in iterations])
        width = batch.mask.shape[1]
        returns = [part.returns for part in iterations if part.returns is not None]
        per_step = any(part.advantages.dim() == 2 for part in iterations)
        advantages = [part.advantages_per_step if per_step else part.advantages for part in iterations]
        return replace(
            rows,
            batch=batch,
            advantages=join_steps(advantages, width),
            returns=join_steps(returns, width) if len(returns) == len(iterations) else None,
            old_is_current=False,
            num_replayed=batch.num_rows - rows.batch.num_rows,
        )

    def forget_reference(self) -> None:
        """Drop the reference log-probs of the kept rows, because the reference policy has changed."""
        kept = [replace(rows, batch=replace(rows.batch, ref_log_probs=None)) for rows in self._recent]
        self._recent = deque(kept, maxlen=self._limit)

    def state_dict(self) -> dict[str, Any]:
        """All kept rows."""
        return {"rows": [rows.state_dict() for rows in self._recent]}

    def snapshot(self) -> dict[str, Any]:
        """The same, because rows never change."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._recent.clear()
        self._recent.extend(map(TrainingRows.from_state_dict, state["rows"]))


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
