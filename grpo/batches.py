"""Parts of a batch, and several batches as one."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .coercion import pad_steps
from .distributed import Engine
from .types import ExperienceBatch, Rows, select_rows

SCORED = ("old_log_probs", "behaviour_log_probs", "ref_log_probs", "entropy", "values", "final_values", "state_keys")
"""Fields that may be missing: several batches have one together where each of them has it."""


def select_batch(batch: ExperienceBatch, index: Tensor) -> ExperienceBatch:
    """The rows at `index`; what collecting them cost stays with them."""

    def of(value: Any) -> Any:
        return value[index.to(value.device)] if isinstance(value, Tensor) else value

    tensors = {field.name: of(getattr(batch, field.name)) for field in fields(batch)}
    return replace(
        batch,
        **tensors
        | {
            "states": select_rows(batch.states, index),
            "actions": select_rows(batch.actions, index),
            "reward_components": {name: of(part) for name, part in batch.reward_components.items()},
        },
    )


def join_batches(batches: Sequence[ExperienceBatch]) -> ExperienceBatch:
    """All rows, one batch after the other, padded to the widest; group ids are made distinct. Costs and counts add up."""
    if len(batches) == 1:
        return batches[0]
    width = max(batch.mask.shape[1] for batch in batches)

    def joined(name: str) -> Any:
        parts = [getattr(batch, name) for batch in batches]
        return None if any(part is None for part in parts) else join_steps(parts, width)

    groups: list[Tensor] = []
    num_groups = 0
    for batch in batches:
        names, numbers = batch.group_ids.unique(return_inverse=True)
        groups.append(numbers + num_groups)
        num_groups += len(names)
    return ExperienceBatch(
        states=_join_rows([batch.states for batch in batches]),
        actions=_join_rows([batch.actions for batch in batches]),
        group_ids=torch.cat(groups),
        rewards=joined("rewards"),
        reward_components={
            name: join_steps([batch.reward_components[name] for batch in batches], width)
            for name in batches[0].reward_components
            if all(name in batch.reward_components for batch in batches)
        },
        reward_weights=batches[0].reward_weights,
        mask=joined("mask"),
        **{name: joined(name) for name in SCORED},
        metrics={
            name: sum(batch.metrics.get(name, 0.0) for batch in batches)
            for name in dict.fromkeys(name for batch in batches for name in batch.metrics)
        },
    )


def gather_rewards(batch: ExperienceBatch, engine: Engine) -> tuple[ExperienceBatch, slice]:
    """What advantages are made of, from all ranks, and which rows are this rank's; states and actions stay where they are."""
    if engine.num_ranks == 1:
        return batch, slice(0, batch.num_rows)
    start = 0

    def everywhere(values: Tensor | None) -> Any:
        nonlocal start
        if values is None:
            return None
        together, start = engine.gather(values)
        return together

    names, numbers = batch.group_ids.unique(return_inverse=True)
    num_groups = engine.gather_objects(len(names))
    everyone = replace(
        batch,
        group_ids=everywhere(numbers + sum(num_groups[: engine.rank])),
        rewards=everywhere(batch.rewards),
        reward_components={name: everywhere(part) for name, part in batch.reward_components.items()},
        mask=everywhere(batch.mask),
        values=everywhere(batch.values),
        final_values=everywhere(batch.final_values),
        state_keys=everywhere(batch.state_keys),
        metrics=_add_up(engine.gather_objects(dict(batch.metrics)), dict(batch.metrics)),
    )
    return everyone, slice(start, start + batch.num_rows)


def _add_up(all_metrics: Sequence[dict[str, float]], own: dict[str, float]) -> dict[str, float]:
    """Counts are added up over ranks and means averaged; seconds are this rank's."""
    total = {name: sum(metrics.get(name, 0.0) for metrics in all_metrics) for name in own}
    means = {name: value / len(all_metrics) for name, value in total.items() if name == "rewards/mean_drawn"}
    return {**total, **means, **{name: value for name, value in own.items() if name.startswith("time/")}}


def join_steps(parts: Sequence[Tensor], width: int) -> Tensor:
    """[N] or [N, t] tensors as one of all rows; new columns are 0, False or unscored alike."""
    return torch.cat([pad_steps(part, width, 0) if part.dim() == 2 else part for part in parts])


def _join_rows(parts: Sequence[Rows]) -> Rows:
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat([torch.as_tensor(part) for part in parts])
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate([np.asarray(part) for part in parts])
    return [row for part in parts for row in part]
