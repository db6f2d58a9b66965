"""Select rows of a batch, join several batches, and gather the batches of all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo._common.conversion import join_steps
from grpo.engine import Engine
from grpo.errors import ContractError
from grpo.types import ExperienceBatch, Rows, select_rows

OPTIONAL = (
    *("old_log_probs", "behaviour_log_probs", "ref_log_probs", "entropy", "values", "final_values", "state_keys"),
    "observed_mask",
)
"""Names of the optional tensors of a batch."""

READ = ("values", "state_keys")
"""Names of the optional tensors of a batch that advantages read, and that the batches of all ranks have or lack."""

FILLS = {"final_values": 0.0, "behaviour_log_probs": float("nan")}
"""Values that fill a field that one batch lacks and another batch has. They mean: terminated (0), not scored (NaN)."""


def select_batch(batch: ExperienceBatch, index: Tensor) -> ExperienceBatch:
    """Return a batch with the rows at `index`, and the metrics of the whole batch."""
    names = ("states", "actions", "group_ids", "rewards", "mask", "is_demonstration", *OPTIONAL)
    present = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
    chosen: dict[str, Any] = {name: select_rows(rows, index) for name, rows in present.items()}
    components = {name: part[index] for name, part in batch.reward_components.items()}
    return replace(batch, **chosen, reward_components=components)


def join_batches(batches: Sequence[ExperienceBatch]) -> ExperienceBatch:
    """Join batches to one batch, padded to the most steps. Groups of different batches get different ids; metrics add up."""
    if len(batches) == 1:
        return batches[0]
    masks = [batch.mask for batch in batches]
    width = max(mask.shape[1] for mask in masks)
    origins = torch.arange(len(batches)).repeat_interleave(torch.tensor([len(mask) for mask in masks]))
    _, numbers = torch.cat([batch.group_ids for batch in batches]).unique(return_inverse=True)
    return ExperienceBatch(
        states=join_rows([batch.states for batch in batches]),
        actions=join_rows([batch.actions for batch in batches]),
        group_ids=(origins * len(numbers) + numbers).unique(return_inverse=True)[1],
        rewards=join_steps([batch.rewards for batch in batches], width),
        reward_components={
            name: join_steps([batch.reward_components[name] for batch in batches], width)
            for name in batches[0].reward_components
            if all(name in batch.reward_components for batch in batches)
        },
        reward_weights=batches[0].reward_weights,
        mask=join_steps([mask.to(masks[0].device) for mask in masks], width),
        **{name: join_field(name, [getattr(batch, name) for batch in batches], masks) for name in OPTIONAL},
        metrics=add_metrics([batch.metrics for batch in batches]),
    )


def apart(batches: Sequence[ExperienceBatch]) -> tuple[ExperienceBatch, list[ExperienceBatch]]:
    """The sampled rows of these batches as one batch, which may be empty, and their demonstrations as batches."""
    sampled, given = [], []
    for batch in batches:
        flags = batch.is_demonstration
        if flags is None:
            sampled.append(batch)
            continue
        given += [select_batch(batch, flags.nonzero().squeeze(1))] if bool(flags.any()) else []
        if not bool(flags.all()):
            sampled.append(replace(select_batch(batch, (~flags).nonzero().squeeze(1)), is_demonstration=None))
    if not sampled:
        sampled = [replace(select_batch(batches[0], torch.zeros(0, dtype=torch.int64)), is_demonstration=None)]
    return join_batches(sampled), given


def join_rows(parts: Sequence[Any]) -> Rows:
    """Concatenate the rows of several parts. Tensors stay one tensor and arrays one array; anything else becomes a list."""
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat([part.to(parts[0].device) for part in parts])
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return [row for part in parts for row in part]


def join_field(name: str, parts: Sequence[Tensor | None], masks: Sequence[Tensor]) -> Any:
    """Join one field of several batches, padded to the widest. None: a batch lacks the field, and `FILLS` has no value."""
    is_missing = [part is None for part in parts]
    if all(is_missing) or (any(is_missing) and name not in FILLS):
        return None
    shapes = [mask.shape[:1] if name == "final_values" else mask.shape for mask in masks]
    present = [
        torch.full(shape, FILLS[name]) if part is None else part for part, shape in zip(parts, shapes, strict=True)
    ]
    width = max((part.shape[1] for part in present if part.dim() == 2), default=0)
    return join_steps([part.to(masks[0].device) for part in present], width)


def add_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up each metric over several batches. A missing metric counts as 0."""
    names = dict.fromkeys(name for metrics in parts for name in metrics)
    return {name: sum(metrics.get(name, 0.0) for metrics in parts) for name in names}


def gather_rewards(batch: ExperienceBatch, engine: Engine) -> tuple[ExperienceBatch, slice]:
    """Gather from all ranks the fields that advantages read. Return one batch, and the positions of this rank's rows in it.

    On several ranks, the batch has no states, no actions, no log-probs and no entropy. Metrics are added up over ranks, but
    `rewards/mean_drawn` is averaged, and times are the times of this rank.
    """
    if engine.num_ranks == 1:
        return batch, slice(0, batch.num_rows)
    own = without_content(batch)
    of_ranks: list[ExperienceBatch] = engine.gather_objects(own)
    held = [
        [*(name for name in READ if getattr(other, name) is not None), *sorted(other.reward_components)]
        for other in of_ranks
    ]
    if any(names != held[0] for names in held):
        raise ContractError(
            f"Every rank's batch must hold the same fields; they hold {held}. Make the policy return the same scores on every "
            "rank, and the reward model the same parts."
        )
    num_rows = [other.num_rows for other in of_ranks]
    if 0 in num_rows and any(num_rows):
        raise ContractError(
            f"update: either every rank has sampled rows, or no rank has; they have {num_rows}. Give each rank its share of "
            "the states, or update on demonstrations alone."
        )
    all_ranks = join_batches(of_ranks)
    totals = dict(all_ranks.metrics)
    if "rewards/mean_drawn" in totals:
        totals["rewards/mean_drawn"] /= engine.num_ranks
    seconds = {name: value for name, value in batch.metrics.items() if name.startswith("time/")}
    start = sum(other.num_rows for other in of_ranks[: engine.rank])
    return replace(all_ranks, metrics={**totals, **seconds}), slice(start, start + batch.num_rows)


def without_content(batch: ExperienceBatch) -> ExperienceBatch:
    """A batch with what advantages and metrics read, on the CPU: no states, no actions, no log-probs and no entropy."""
    kept = {name: getattr(batch, name) for name in (*READ, "final_values")}
    return ExperienceBatch(
        states=(),
        actions=(),
        group_ids=batch.group_ids,
        rewards=batch.rewards,
        reward_components=batch.reward_components,
        reward_weights=batch.reward_weights,
        mask=batch.mask.cpu(),
        **{name: None if values is None else values.detach().cpu() for name, values in kept.items()},
        metrics=dict(batch.metrics),
    )
