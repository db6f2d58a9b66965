"""What the updates of one iteration read."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .errors import ConfigError, ContractError
from .policy_base import SplitsSteps
from .types import ExperienceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """What updates read: a batch, and how its rows (or their steps) did."""

    batch: ExperienceBatch
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    returns: Float[Tensor, "N T"] | None = None
    """What a critic is trained towards; None: there is none."""
    old_is_current: bool = False
    """One update of rows that this very policy sampled: the ratio is exactly 1."""
    num_replayed: int = 0
    """Of these rows, how many are from earlier iterations."""
    live: Bool[Tensor, " N"] | None = None
    """Rows with an advantage, where rows without one change no gradient and are not forwarded; None: all count."""


def split_steps(rows: TrainingRows, policy: SplitsSteps) -> TrainingRows:
    """Every valid step as a row of its own (T = 1), row by row; what has shape [N, T] is read at the mask.

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


def require_discrete(actions: Any) -> None:
    """Refuse real-valued actions, whose log-probs are of densities."""
    first = actions[0] if len(actions) else 0
    parts = first.tolist() if isinstance(first, Tensor) else first
    entries = np.asarray(parts, dtype=object).ravel()
    numbers = [entry.tolist() if isinstance(entry, Tensor) else entry for entry in entries]
    # floats that are whole numbers may well be classes
    if any(
        isinstance(number, float | np.floating) and not float(number).is_integer()
        for number in np.hstack(numbers or [0])
    ):
        raise ConfigError(
            "objective.surrogate='dppo_tv' compares probabilities of actions, and these actions are real numbers, which have "
            "densities. Use surrogate='clip' with continuous actions."
        )
