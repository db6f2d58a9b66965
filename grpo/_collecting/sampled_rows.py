"""The rows of an iteration between sampling and rewards."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo._common.conversion import describe
from grpo._rewarding.calls import KeptRewards
from grpo.errors import ConfigError
from grpo.types import ExperienceBatch, Rows, select_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """N rows without rewards."""

    states: Rows
    """N states, one per row."""
    actions: Rows
    """N actions."""
    group_ids: Int[Tensor, " N"]
    """The group of each row."""
    mask: Bool[Tensor, "N T"]
    """True at steps that the policy decided."""
    known: Mapping[str, Tensor]
    """What sampling tells about the rows: fields of `ExperienceBatch`, by name."""
    metrics: Mapping[str, float]
    """Costs and counts of the sampling, by metric name."""

    def with_rewards(self, rewards: KeptRewards, metrics: Mapping[str, float]) -> ExperienceBatch:
        """The rows that have a reward, as a batch."""
        states, actions, group_ids, mask, known = self.states, self.actions, self.group_ids, self.mask, dict(self.known)
        if rewards.kept is not None:  # rows without a reward leave the batch
            kept = rewards.kept.nonzero().squeeze(1)
            states, actions = select_rows(states, kept), select_rows(actions, kept)
            group_ids, mask = group_ids[kept], mask[kept]
            known = {name: values[kept] for name, values in known.items()}
        return ExperienceBatch(
            states=states,
            actions=actions,
            group_ids=group_ids,
            rewards=rewards.values,
            reward_components=rewards.components,
            reward_weights=rewards.weights,
            mask=mask,
            metrics={**self.metrics, **metrics},
            **known,
        )

    def state_dict(self) -> dict[str, Any]:
        """All fields by name. No tensor is copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def groups_of(states: Rows, group_by: Callable[[Any], Hashable] | None) -> Int[Tensor, " B"]:
    """The group of each state: its position, or the position of the first state with the same key."""
    if group_by is None:
        return torch.arange(len(states))
    first: dict[Hashable, int] = {}
    keys = [group_by(states[position]) for position in range(len(states))]
    for position, key in enumerate(keys):
        if isinstance(key, Tensor | np.ndarray) or not isinstance(key, Hashable):
            raise ConfigError(
                f"group_by must return a hashable value, such as a text or a number; got {describe(key)} for state "
                f"{position}. Return str(...), tuple(...) or .item()."
            )
        first.setdefault(key, position)
    return torch.tensor([first[key] for key in keys])
