"""Parts of a batch, and several batches as one."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .coercion import pad_steps
from .distributed import Engine
from .errors import ContractError
from .types import ExperienceBatch, Rows, select_rows

MISSING = {"final_values": 0.0, "behaviour_log_probs": float("nan")}
"""What stands for such a field where a batch has none: a row that terminated, a step that was not scored."""

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

    device = batches[0].mask.device

    def joined(name: str) -> Any:
        parts = [getattr(batch, name) for batch in batches]
        if name in MISSING and not all(part is None for part in parts):
            parts = [_filled(part, name, batch) for part, batch in zip(parts, batches, strict=True)]
        if any(part is None for part in parts):
            return None
        return join_steps([part if name == "rewards" else part.to(device) for part in parts], width)

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

    final_values = batch.final_values
    names, numbers = batch.group_ids.unique(return_inverse=True)
    num_groups = engine.gather_objects(len(names))
    fields_of = engine.gather_objects(_fields_there(batch))
    if any(there != fields_of[0] for there in fields_of):
        raise ContractError(
            f"Every rank's batch must hold the same fields; they hold {fields_of}. Have the policy give the same scores, and "
            "the reward model the same parts, on every rank."
        )
    if any(engine.gather_objects(final_values is not None)):
        final_values = batch.rewards.new_zeros(batch.num_rows) if final_values is None else final_values
    everyone = replace(
        batch,
        group_ids=everywhere(numbers + sum(num_groups[: engine.rank])),
        rewards=everywhere(batch.rewards),
        reward_components={name: everywhere(part) for name, part in batch.reward_components.items()},
        mask=everywhere(batch.mask),
        values=everywhere(batch.values),
        final_values=everywhere(final_values),
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


def _fields_there(batch: ExperienceBatch) -> list[str]:
    there = [name for name in ("values", "state_keys") if getattr(batch, name) is not None]
    return [*there, *sorted(batch.reward_components)]


def _filled(part: Tensor | None, name: str, batch: ExperienceBatch) -> Tensor:
    if part is not None:
        return part
    shape = batch.mask.shape[:1] if name == "final_values" else batch.mask.shape
    return torch.full(shape, MISSING[name], device=batch.mask.device)


def _join_rows(parts: Sequence[Rows]) -> Rows:
    if all(isinstance(part, Tensor) for part in parts):
        first = torch.as_tensor(parts[0])
        return torch.cat([torch.as_tensor(part).to(first.device) for part in parts])
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate([np.asarray(part) for part in parts])
    return [row for part in parts for row in part]
