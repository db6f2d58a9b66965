"""The rows that an iteration trains on, with the advantages that the rewards of all ranks give them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._collecting.batches import gather_rewards
from grpo.advantage_estimator import AdvantageEstimator
from grpo.distributed import Engine
from grpo.errors import ContractError
from grpo.policy_base import SplitsSteps
from grpo.types import ExperienceBatch
from grpo.writing import as_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """What updates read: a batch, and the advantages of its rows or steps."""

    batch: ExperienceBatch
    """The rows of this rank."""
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """One per row, or one per step; on the CPU."""
    returns: Float[Tensor, "N T"] | None = None
    """What a critic is trained towards. None: there is no critic."""
    old_is_current: bool = False
    """True for a single update of rows that this policy itself sampled: the ratio is exactly 1."""
    num_replayed: int = 0
    """How many of the rows are from earlier iterations."""
    live: Bool[Tensor, " N"] | None = None
    """Rows with an advantage; the others change no gradient and are skipped before the forward pass. None: all rows count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllAdvantages:
    """The rewards of all ranks and the advantages they give, for the report."""

    batch: ExperienceBatch
    """The rows of all ranks, with their rewards."""
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """Of all ranks' rows, on the CPU."""


def with_advantages(
    batch: ExperienceBatch, advantages: Callable[[ExperienceBatch], Tensor], engine: Engine
) -> tuple[TrainingRows, AllAdvantages]:
    """This rank's rows with their advantages, and those of all ranks.

    `AdvantageEstimator` sees the rewards of all ranks. A callable of the user's sees this rank's batch only.
    """
    all_ranks, own = gather_rewards(batch, engine)
    width = batch.mask.shape[1]
    returns = None
    if isinstance(advantages, AdvantageEstimator):
        estimate = advantages.estimate(all_ranks)
        everything = as_advantages(estimate.advantages, all_ranks.mask)
        found = everything[own] if everything.dim() == 1 else everything[own, :width]
        returns = None if estimate.returns is None else estimate.returns[own, :width]
    else:
        found = as_advantages(advantages(batch), batch.mask)
        everything, _ = engine.gather(found)
    rows = TrainingRows(batch=batch, advantages=found, returns=returns)
    return rows, AllAdvantages(batch=all_ranks, advantages=everything)


def split_steps(rows: TrainingRows, policy: SplitsSteps) -> TrainingRows:
    """Every valid step as a row of its own (T = 1), row by row. Whatever has shape [N, T] is read at the mask.

    Raises:
        ContractError: the policy makes another number of rows than there are valid steps.
    """
    batch, mask = rows.batch, rows.batch.mask
    num_steps = int(mask.sum())
    states, actions = policy.split_steps(batch.states, batch.actions)
    if len(states) != num_steps or len(actions) != num_steps:
        raise ContractError(
            f"{type(policy).__name__}.split_steps must return one row per valid step = {num_steps}; "
            f"got {len(states)} states and {len(actions)} actions."
        )

    def at_mask(values: Tensor | None) -> Any:
        return None if values is None else values[mask.to(values.device)].unsqueeze(1)

    advantages = rows.advantages
    per_step = advantages if advantages.dim() == 2 else advantages.unsqueeze(1).expand(mask.shape)
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
        **{
            name: at_mask(getattr(batch, name))
            for name in ("old_log_probs", "behaviour_log_probs", "ref_log_probs", "entropy", "values")
        },
    )
    advantages = per_step[mask.to(per_step.device)]
    return replace(rows, batch=split, advantages=advantages, returns=at_mask(rows.returns))
