"""The metrics of one iteration, under the names that sinks and plots rely on."""

import numpy as np

from grpo._advantages.groups import group_statistics, mean_and_std
from grpo.engine import SharesStatistics
from grpo.metrics import Meter, reward_statistics
from grpo.types import row_totals

from .optimizer_step import OptimizerStep
from .training_rows import TrainingRows
from .update_context import UpdateContext
from .update_rows import UpdateRows

WITH_STD = ("ratio", "kl", "sampler_ratio")
"""Metrics of the objective that are reported as a mean and a standard deviation."""

TERMS = (
    "train/policy_loss",
    "train/kl_penalty",
    "train/kl_mean",
    "train/kl_std",
    "train/entropy_bonus",
    "train/value_loss",
    "train/clip_fraction",
    "train/clip_fraction_low",
    "train/clip_fraction_high",
    "train/ratio_clamped_fraction",
)
"""Metrics that are 0 if `grpo_objective` has no such term. An objective of the user's reports them, or they are absent."""

ABSENT = {"train/total_loss": 0.0, "train/grad_norm": 0.0, "time/sample": 0.0, "time/reward": 0.0, "time/score": 0.0}
"""The value of each metric in an iteration that did not measure it. Other metrics, such as the ratio and the entropy, are then
absent."""


class IterationReport:
    """Reports one iteration: turns measurements into metrics, and adapts the coefficients."""

    def __init__(self, context: UpdateContext, optimizer_step: OptimizerStep, meter: Meter) -> None:
        self._coefficients, self._engine, self._collector = context.coefficients, context.engine, context.collector
        self._optimizer_step, self._meter = optimizer_step, meter
        policy = context.collector.policy
        self._sharing = policy if isinstance(policy, SharesStatistics) and context.engine.num_ranks > 1 else None
        self._defaults = ABSENT if context.has_own_loss else {**dict.fromkeys(TERMS, 0.0), **ABSENT}

    def __call__(self, rows: UpdateRows) -> dict[str, float]:
        """The metrics of an iteration by name, after its updates."""
        num_applied = self._optimizer_step.num_applied
        seen = None if self._sharing is None else self._sharing.collected_statistics()
        num_rows = rows.num_skipped, rows.data.num_replayed, rows.num_demonstrations
        own = num_rows, self._meter.totals(), self._collector.costs.of_this_rank(), seen
        of_ranks, totals, costs, seen_by = zip(*self._engine.gather_objects(own), strict=True)
        num_skipped, num_replayed, num_demonstrations = (float(sum(each)) for each in zip(*of_ranks, strict=True))
        if self._sharing is not None:
            self._sharing.share_statistics(seen_by)
        measured = self._meter.report(rows.num_planned - rows.num_dead, totals)
        defaults = self._defaults if rows.all_ranks.batch.num_rows else ABSENT  # the objective is of sampled rows
        metrics = {**defaults, "train/learning_rate": self._optimizer_step.learning_rate}
        for name, (mean, std) in measured.items():
            if name in WITH_STD:
                metrics |= {f"train/{name}_mean": mean, f"train/{name}_std": std}
            else:
                metrics[f"train/{name}"] = mean
        if "sampler_ratio" in measured:
            metrics["train/effective_sample_size"] = effective_sample_size(*measured["sampler_ratio"])
        metrics |= {
            "train/num_updates": float(num_applied),
            "train/skipped_updates": float(rows.num_planned - num_applied),
            "rows/skipped_zero_advantage": num_skipped,
            "rows/replayed": num_replayed,
            **batch_metrics(rows.all_ranks),
            **self._collector.costs.agree(costs),
            **self._coefficients.report(""),
        }
        if num_demonstrations:
            metrics["rows/demonstrations"] = num_demonstrations
        self._coefficients.follow(measured)
        metrics |= self._coefficients.report("_next")
        seconds = self._meter.seconds
        return {**metrics, "time/update": seconds, "time/iteration": seconds}


def effective_sample_size(mean: float, std: float) -> float:
    """The fraction of the steps that count, if steps have weights u of this mean and standard deviation.

    (sum u)^2 / (n sum u^2) = mean^2 / (mean^2 + std^2)

    It is 1 if all weights are equal, and 1/n if one step has all the weight.

    Source:
        Kish 1965, Survey Sampling, sec. 11.7.
    """
    return mean**2 / (mean**2 + std**2) if mean else 0.0


def batch_metrics(all_ranks: TrainingRows) -> dict[str, float]:
    """Metrics of the rewards, advantages, groups and lengths of all ranks' rows, and the costs of collecting the rows."""
    batch, advantages = all_ranks.batch, all_ranks.advantages
    if not batch.num_rows:  # demonstrations alone
        return dict(batch.metrics)
    mask = batch.mask.cpu()
    rewards = row_totals(batch.rewards, mask)
    lengths = mask.sum(1).numpy()
    counted = advantages if advantages.dim() == 1 else advantages[mask]
    advantages_mean, advantages_std = mean_and_std(counted.double().numpy(), ddof=0)
    metrics: dict[str, float] = {}
    for name, part in batch.reward_components.items():
        values = row_totals(part, mask).double().numpy()
        applicable = values[~np.isnan(values)]  # NaN: the part does not apply to the row
        metrics[f"rewards/{name}/applies"] = len(applicable) / len(values)
        if len(applicable):
            metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = mean_and_std(applicable, ddof=1)
    return metrics | {
        "train/advantages_mean": advantages_mean,
        "train/advantages_std": advantages_std,
        "steps/mean": float(np.add.reduce(lengths)) / len(lengths),
        "steps/max": float(np.maximum.reduce(lengths)),
        **reward_statistics(rewards),
        **group_statistics(rewards, batch.group_ids),
        **batch.metrics,
    }
