"""The rows that sinks record, and the metrics of an evaluation."""

import math

import torch
from torch import Tensor

from grpo._updating.training_rows import TrainingRows
from grpo.engine import Engine
from grpo.experience_collector import ExperienceCollector
from grpo.sinks import Samples
from grpo.types import Rows, row_totals, select_rows, zero_outside


def evaluated(collector: ExperienceCollector, states: Rows, num_actions_per_state: int) -> Samples:
    """Sample actions and ask for their rewards. Rows without a reward are left out."""
    row_states, row_actions, group_ids, mask, rewards = collector.sample_with_rewards(states, num_actions_per_state)
    kept = torch.arange(len(group_ids)) if rewards.kept is None else rewards.kept.nonzero().squeeze(1)
    return Samples(
        kind="eval",
        states=select_rows(row_states, kept),
        actions=select_rows(row_actions, kept),
        group_ids=group_ids[kept],
        # rewards are already 0 outside the mask
        rewards=row_totals(rewards.values, None),
        reward_components={name: row_totals(part, None) for name, part in rewards.components.items()},
        num_steps=None if mask is None else mask.cpu().sum(1)[kept],
    )


def samples_of(rows: TrainingRows) -> Samples:
    """The new rows of an iteration as sinks record them."""
    batch, mask = rows.batch, rows.batch.mask
    new = slice(0, batch.num_rows - rows.num_replayed)
    advantages = rows.advantages
    if advantages.dim() == 2:
        advantages = zero_outside(advantages, mask.to(advantages.device)).sum(1) / mask.sum(1).clamp(min=1).cpu()
    return Samples(
        kind="train",
        states=select_rows(batch.states, new),
        actions=select_rows(batch.actions, new),
        group_ids=batch.group_ids[new],
        rewards=batch.total_rewards[new],
        reward_components={name: row_totals(part, mask)[new] for name, part in batch.reward_components.items()},
        advantages=advantages[new],
        num_steps=mask.sum(1)[new],
    )


def evaluation_metrics(samples: Samples, engine: Engine) -> dict[str, float]:
    """Metrics of an evaluation, over the rows of all ranks."""

    def of_all_ranks(values: Tensor) -> Tensor:
        return engine.gather(values.double().cpu())[0]

    rewards = of_all_ranks(samples.rewards)
    metrics = {"eval/avg_reward": float(rewards.mean()), "eval/avg_reward_std": float(rewards.std(correction=0))}
    for name, values in samples.reward_components.items():
        mean = float(of_all_ranks(values).nanmean())  # NaN: the part does not apply to the row
        if not math.isnan(mean):
            metrics[f"eval/{name}/mean"] = mean
    if samples.num_steps is not None:
        metrics["eval/steps_mean"] = float(of_all_ranks(samples.num_steps).mean())
    return metrics
