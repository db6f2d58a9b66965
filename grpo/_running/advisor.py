"""Log advice when a run's metrics show one of the problems that `docs/debugging.md` explains. Each advice is logged once."""

import logging
import math
from collections.abc import Collection, Mapping

from grpo.config import GRPOConfig
from grpo.surrogates import traits_of

logger = logging.getLogger("grpo")

PATIENCE = 10
"""Number of consecutive iterations that must show a problem before the problem is logged."""

LOW_ENTROPY = 0.05
"""Fraction of the first iterations' entropy below which the entropy counts as collapsed."""

FAR_SAMPLER = 0.01
"""Divergence in nats per step that rounding cannot explain: in bfloat16, differences of 0.05 per step give only about 0.001."""

TINY = 1e-6
"""A metric below this value counts as 0."""


class RunAdvisor:
    """Watches the metrics of each iteration, and logs each problem once through the logger `grpo`."""

    def __init__(self, config: GRPOConfig) -> None:
        self._config = config
        self._has_bounds = traits_of(config.objective.surrogate).stopped is not None
        self._said: set[str] = set()
        self._in_a_row: dict[str, int] = {}
        self._first_entropy = self._entropy = math.nan
        self._has_clipped = False
        self._highest, self._lowest = -math.inf, math.inf

    def check(self, metrics: Mapping[str, float], *, measured: Collection[str], several_updates: bool) -> None:
        """Check one iteration's metrics. `measured` names the metrics that the loss reported. Other metrics are ignored."""
        partly = any(name.endswith("/applies") and value < 1.0 for name, value in metrics.items())
        self._count("a part of the reward is missing", partly, patience=1)
        no_advantage = metrics["train/advantages_std"] == 0.0 == metrics["train/advantages_mean"]
        dead = metrics["group_stats/zero_variance_fraction"] == 1.0
        single_rows = metrics["group_stats/avg_group_size"] == 1.0
        is_solved = self._all_are_the_highest(metrics) and not single_rows
        self._count("every reward is the highest one", is_solved, level=logging.INFO)  # a normal end
        is_dead = no_advantage and dead and not is_solved
        self._count("all groups are dead", is_dead, patience=1 if single_rows else PATIENCE)
        self._count("all advantages are 0", no_advantage and not dead, patience=1)
        if metrics["train/num_updates"] == 0 or no_advantage:
            return
        num_rows = metrics["group_stats/num_groups"] * metrics["group_stats/avg_group_size"]
        unused = not several_updates and self._config.batch_size is not None and self._config.batch_size > num_rows
        self._count("batch_size is larger than an iteration", unused, patience=1)
        loss_is_zero = abs(metrics["train/total_loss"]) < TINY < metrics["train/grad_norm"]
        loss_is_zero = "policy_loss" in measured and loss_is_zero and not several_updates
        self._count("the loss is 0", loss_is_zero, patience=1, level=logging.INFO)  # a normal situation
        clips = "clip_fraction" in measured and self._has_bounds and several_updates
        self._has_clipped = self._has_clipped or metrics.get("train/clip_fraction", 0.0) > 0.0
        self._count("nothing is ever clipped", clips and not self._has_clipped)
        penalised = "kl" in measured and metrics["train/kl_coef"] > 0
        self._count("the KL is 0", penalised and abs(metrics["train/kl_mean"]) < TINY)
        uncorrected = "sampler_divergence" in measured and self._config.loss.correction is None
        differs = uncorrected and metrics["train/sampler_divergence"] > FAR_SAMPLER
        self._count("the sampler is not the policy", differs)
        self._watch_entropy(metrics.get("train/entropy", math.nan))

    def _all_are_the_highest(self, metrics: Mapping[str, float]) -> bool:
        """Whether all rewards are the highest one so far, and there were lower ones before."""
        low, high = metrics["rewards/min"], metrics["rewards/max"]
        self._highest, self._lowest = max(self._highest, high), min(self._lowest, low)
        return self._lowest < low == high == self._highest

    def _watch_entropy(self, entropy: float) -> None:
        """Watch a moving average of the entropy, because the entropy of a single iteration may be a noisy estimate."""
        if not math.isfinite(entropy):
            return
        if math.isnan(self._first_entropy):
            self._first_entropy = self._entropy = entropy
        self._entropy += (entropy - self._entropy) / PATIENCE
        collapsed = self._first_entropy > 0.0 and self._entropy < LOW_ENTROPY * self._first_entropy
        self._count("the entropy has collapsed", collapsed, patience=1)

    def _count(self, sign: str, seen: bool, patience: int = PATIENCE, level: int = logging.WARNING) -> None:
        self._in_a_row[sign] = self._in_a_row.get(sign, 0) + 1 if seen else 0
        if self._in_a_row[sign] >= patience and sign not in self._said:
            self._said.add(sign)
            logger.log(level, "%s: %s (Logged once. docs/debugging.md explains it.)", sign, ADVICE[sign])


ADVICE = {
    "a part of the reward is missing": (
        "a part of the reward returned NaN, or None, for some rows, so it does not apply to them and adds nothing. "
        "rewards/NAME/applies is the fraction of rows to which a part applies. If it should be 1, look for 0/0 in the part."
    ),
    "the loss is 0": (
        "this is normal with one update per iteration. The ratio is exactly 1 and a group's advantages sum to 0, so the loss "
        "is 0 although its gradient is not, and nothing is clipped. Watch rewards/mean and train/grad_norm instead."
    ),
    "nothing is ever clipped": (
        "in ten iterations of several updates, no ratio has left the clip range. Either the updates are small (a larger "
        "learning_rate or num_epochs_per_update would learn more from each sample), or there is nothing to learn: see "
        "train/grad_norm."
    ),
    "the KL is 0": (
        "the policy equals its reference, so the KL term has no effect. If the policy is copied to the reference at every "
        "iteration, use a larger reference_sync_every or a smaller reference_mix. If the reference is frozen, the policy has "
        "not changed: see train/grad_norm and train/learning_rate."
    ),
    "every reward is the highest one": (
        "all rewards are the highest one that was seen so far, so there is nothing left to learn from them. Stop, or draw "
        "harder states."
    ),
    "all groups are dead": (
        "iterations have nothing to learn from: in every group all rewards are equal, or there is only one row. Make rewards "
        "less sparse, the task easier or harder, groups larger (group_size), or draw other states (dynamic_sampling_rounds). "
        "group_stats/zero_variance_fraction is the fraction of such groups."
    ),
    "all advantages are 0": (
        "rewards differ within groups, but no row has an advantage. A setting removes the differences: "
        "advantage.scale='mean' if no group's mean reward is above 0, negative_only if no reward is below its baseline, or "
        "a reward_clip that makes rewards equal."
    ),
    "batch_size is larger than an iteration": (
        "all rows are in one update, so every ratio is 1, nothing is clipped, and the bounds of a surrogate have no effect. "
        "For several updates, set batch_size below the number of rows of an iteration (states x group_size)."
    ),
    "the sampler is not the policy": (
        "actions are sampled from another distribution than the policy: by their behaviour log-probs, the two differ by "
        "train/sampler_divergence nats per step. Possible causes are truncation (top_k, top_p, min_p), penalties, another "
        "engine, old weights, and dropout that is on only during updates. Set objective.sampler_correction='truncate', or "
        "sample from the policy itself."
    ),
    "the entropy has collapsed": (
        "the policy is nearly deterministic: its entropy is a twentieth of the entropy at the start. If this is too early, add "
        "an entropy bonus (objective.entropy_coef, entropy_control) or a KL penalty to a reference, raise the surrogate's "
        "upper bound (Clip(high=...)), or lower learning_rate."
    ),
}
