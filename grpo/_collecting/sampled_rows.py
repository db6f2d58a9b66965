"""The rows of an iteration between sampling and rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from grpo.types import ExperienceBatch, Rows, select_rows

from .reward_calls import Rewards


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

    def with_rewards(self, rewards: Rewards, metrics: Mapping[str, float]) -> ExperienceBatch:
        """The rows that have a reward, as a batch.

        Args:
            rewards: the rewards of the rows.
            metrics: costs of the rewards, by metric name.
        """
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
