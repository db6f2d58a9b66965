"""What one iteration tells about itself, under the metric names that sinks and plots rely on."""

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from .advantage_estimator import group_statistics
from .grouping import Groups
from .metrics import mean_and_std, reward_statistics
from .policy_update import UpdateCounts
from .types import ExperienceBatch

WITH_STD = ("ratio", "kl", "sampler_ratio")
"""Metrics of the objective that are reported as a mean and a standard deviation."""

ABSENT = {
    "train/total_loss": 0.0,
    "train/policy_loss": 0.0,
    "train/kl_penalty": 0.0,
    "train/kl_mean": 0.0,
    "train/kl_std": 0.0,
    "train/entropy_bonus": 0.0,
    "train/value_loss": 0.0,
    "train/clip_fraction": 0.0,
    "train/clip_fraction_low": 0.0,
    "train/clip_fraction_high": 0.0,
    "train/ratio_clamped_fraction": 0.0,
    "train/grad_norm": 0.0,
    "train/entropy": math.nan,
    "train/ratio_mean": math.nan,
    "train/ratio_std": math.nan,
    "rows/dropped": 0.0,
    "time/sample": 0.0,
    "time/reward": 0.0,
    "time/score": 0.0,
}
"""What stands for metrics that were not measured: 0 for a term that is not there, NaN for what was not looked at."""


def report_iteration(
    batch: ExperienceBatch,
    advantages: Tensor,
    counts: UpdateCounts,
    measured: Mapping[str, tuple[float, float]],
    groups: Groups,
    *,
    learning_rate: float,
) -> dict[str, float]:
    """Metrics by name.

    Args:
        batch: the rows, with what collecting them cost.
        advantages: [N] or [N, T], on the CPU.
        counts: what became of the updates.
        measured: mean and standard deviation of what the updates metered; overrides `learning_rate`.
        groups: made of the batch's group ids.
        learning_rate: after the iteration.
    """
    mask = batch.mask.cpu()

    def per_row(values: Tensor) -> Tensor:
        return values if values.dim() == 1 else values.where(mask, 0).sum(1)

    rewards = per_row(batch.rewards)
    lengths = mask.sum(1).numpy()
    counted = advantages if advantages.dim() == 1 else advantages[mask]
    advantages_mean, advantages_std = mean_and_std(counted.double().numpy(), ddof=0)
    metrics = {**ABSENT, "train/learning_rate": learning_rate}
    for name, (mean, std) in measured.items():
        if name in WITH_STD:
            metrics[f"train/{name}_mean"], metrics[f"train/{name}_std"] = mean, std
        else:
            metrics[f"train/{name}"] = mean
    for name, part in batch.reward_components.items():
        values = per_row(part).double().numpy()
        values = values[~np.isnan(values)]  # NaN: the part does not apply to the row
        mean, std = mean_and_std(values, ddof=1) if len(values) else (math.nan, math.nan)
        metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
    return metrics | {
        "train/advantages_mean": advantages_mean,
        "train/advantages_std": advantages_std,
        "train/num_updates": float(counts.applied),
        "train/skipped_updates": float(counts.planned - counts.applied),
        "rows/skipped_zero_advantage": float(counts.rows_skipped),
        "steps/mean": float(np.add.reduce(lengths)) / len(lengths),
        "steps/max": float(np.maximum.reduce(lengths)),
        **reward_statistics(rewards),
        **group_statistics(rewards, groups),
        **batch.metrics,
    }
