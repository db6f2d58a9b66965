"""Advice on a run: one table of rules, which the trainer reads while a run goes on and a report reads from its metrics.

A rule looks for one sign in the metrics of an iteration. `docs/debugging.md` explains each sign.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float64

from grpo.surrogates import SURROGATES

logger = logging.getLogger("grpo")

PATIENCE = 10
"""Number of consecutive iterations that must show a sign, unless its rule says another number."""
NUM_FIRST = 3
"""Number of iterations whose mean is the entropy, or the reward, at the beginning. A few more may be enough for a collapse."""
LOW_ENTROPY = 0.05
"""Fraction of the entropy at the beginning below which the entropy counts as collapsed."""
MANY = 0.9
"""Fraction of the rows without an advantage above which hardly anything is learned from rewards."""
MANY_CLIPPED = 0.3
"""Clip fraction above which most of the gradient is lost."""
FAR_SAMPLER = 0.01
"""Divergence in nats per step that rounding cannot explain: in bfloat16, differences of 0.05 per step give only about 0.001."""
TINY = 1e-6
"""A metric below this size counts as 0."""
LONGEST = 200
"""Number of iterations that tell whether the reward rises, at most."""
MAX_SHOWN = 6
"""Number of metrics that an advice shows, at most."""

Kind: TypeAlias = Literal["problem", "note", "normal"]


class Course:
    """What rules read: the metrics of the latest iteration, and what must be remembered of earlier ones.

    Args:
        settings: The run's settings as plain values, `GRPOConfig.to_dict()`. Empty: they are not known.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.metrics: Mapping[str, float] = {}
        self.batch_size = settings.get("batch_size")
        objective = settings.get("objective")
        surrogate = objective.get("surrogate") if isinstance(objective, Mapping) else None
        kind = SURROGATES.get(str(surrogate.get("kind"))) if isinstance(surrogate, Mapping) else None
        self.has_bounds = kind is not None and hasattr(kind, "stopped")
        """Whether the surrogate is known to have bounds that stop a gradient."""
        self.has_clipped = self.is_supervised = self._was_pulled = self._had_advantage = False
        self.highest, self.lowest = -math.inf, math.inf
        self._rewards: deque[float] = deque(maxlen=LONGEST)
        self._first_rewards: list[float] = []
        self._first_entropies: list[float] = []
        self._entropy = math.nan

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of the next iteration."""
        self.metrics = metrics
        self.has_clipped |= self("train/clip_fraction") > 0
        self.is_supervised |= self.has_demonstrations
        # Rows that nobody sampled in this iteration are a log or demonstrations. Equal advantages above 0 imitate the rows.
        imitates = self("train/advantages_std") == 0 < self("train/advantages_mean")
        self.is_supervised |= imitates or self("time/sample") == 0
        self._was_pulled |= self.is_pulled
        self._had_advantage |= not self.is_without_advantage
        self.lowest, self.highest = min(self.lowest, self("rewards/min")), max(self.highest, self("rewards/max"))
        if math.isfinite(self("rewards/mean")):
            self._rewards.append(self("rewards/mean"))
            self._first_rewards = [*self._first_rewards, self("rewards/mean")][:NUM_FIRST]
        entropy = self("train/entropy")
        if math.isfinite(entropy):
            if len(self._first_entropies) < NUM_FIRST:
                self._first_entropies.append(entropy)
                self._entropy = entropy
            self._entropy += (
                entropy - self._entropy
            ) / PATIENCE  # the entropy of one iteration may be a noisy estimate

    def __call__(self, name: str) -> float:
        """A metric of the latest iteration. NaN, which no comparison is true of: it was not measured."""
        value = self.metrics.get(name)
        return math.nan if value is None else value

    @property
    def num_rows(self) -> float:
        """The number of rows of the iteration."""
        return self("group_stats/num_groups") * self("group_stats/avg_group_size")

    @property
    def num_planned(self) -> float:
        """The number of updates of the iteration, skipped ones included."""
        return self("train/num_updates") + self("train/skipped_updates")

    @property
    def is_without_advantage(self) -> bool:
        """Whether no row has an advantage."""
        return self("train/advantages_std") == 0 == self("train/advantages_mean")

    @property
    def is_dead(self) -> bool:
        """Whether nearly no row has an advantage in groups of several rows, and nothing else could teach the policy.

        Rows are skipped before the forward pass if only an advantage could give them a gradient.
        """
        dead = self("group_stats/zero_variance_fraction")
        are_skipped = self("rows/skipped_zero_advantage") >= MANY * self.num_rows
        is_dead = dead == 1 and self.is_without_advantage and self.learns_from_rewards_only
        is_taught = self.has_demonstrations
        return dead >= MANY and (are_skipped or is_dead) and self("group_stats/avg_group_size") != 1 and not is_taught

    @property
    def has_demonstrations(self) -> bool:
        """Whether rows of the iteration were actions to imitate."""
        return self("rows/demonstrations") > 0

    @property
    def learns_from_rewards_only(self) -> bool:
        """Whether nothing but an advantage could change the policy: no KL to a reference (distillation), no other loss.

        A policy that has only ever learned from its KL may have become equal to its teacher.
        """
        is_distilled = self._was_pulled and not self._had_advantage
        has_other_loss = self.is_without_advantage and self("train/grad_norm") > TINY
        return not (self.is_pulled or is_distilled or has_other_loss)

    @property
    def is_pulled(self) -> bool:
        """Whether a KL penalty pulls the policy to a reference that differs from it."""
        return self("train/kl_coef") > 0 and abs(self("train/kl_mean")) > TINY

    @property
    def is_its_own_teacher(self) -> bool:
        """Whether a KL to a reference could teach the policy, if the reference were not the policy, and no reward ever did."""
        return self.is_dead and self("train/kl_coef") > 0 and not self._was_pulled and self.lowest == self.highest

    @property
    def is_solved(self) -> bool:
        """Whether all rewards are the highest one so far, and there were lower ones before."""
        return self.lowest < self("rewards/min") == self("rewards/max") == self.highest

    def _trend(self) -> tuple[float, float]:
        """The mean of the later half of the recent rewards less that of the earlier half, and the standard error of this
        difference. NaN before the second iteration."""
        recent = np.array(self._rewards)[-max(2 * PATIENCE, len(self._rewards) // 2) :]
        before, after = recent[: len(recent) // 2], recent[len(recent) // 2 :]
        if not len(before):
            return math.nan, math.nan
        error = math.hypot(standard_error(before), standard_error(after))
        return float(after.mean() - before.mean()), max(error, TINY * abs(float(before.mean())))

    @property
    def _recent_reward(self) -> float:
        return _mean([*self._rewards][-PATIENCE:])

    @property
    def earns_well(self) -> bool:
        """Whether the reward rises, or is within a tenth of the range of all rewards so far from the highest one."""
        change, error = self._trend()
        margin = 0.1 * (self.highest - self.lowest)
        return change > error or (margin > 0 and math.isfinite(change) and self._recent_reward >= self.highest - margin)

    @property
    def has_converged(self) -> bool:
        """Whether the reward is nearer to the highest one so far than to the reward at the beginning, and does not fall.

        The highest reward of a row is often out of reach in the mean: states differ in what can be earned, and so does luck.
        """
        change, error = self._trend()
        has_risen = self._recent_reward - _mean(self._first_rewards) > self.highest - self._recent_reward
        return has_risen and change >= -2 * error

    @property
    def has_collapsed(self) -> bool:
        """Whether a moving average of the entropy is far below the entropy at the beginning. That of a density may be negative,
        and says nothing."""
        return bool(self._first_entropies) and 0 <= self._entropy < LOW_ENTROPY * _mean(self._first_entropies)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: Float64[np.ndarray, " W"]) -> float:
    """Standard error of the mean of a series, from differences of neighbours, which a trend hardly changes.

    s^2 = mean of (x_(i+1) - x_i)^2 / 2,   error = s / sqrt(n)

    Source:
        von Neumann et al. 1941, The mean square successive difference.
    """
    return math.sqrt(float(np.square(np.diff(values)).mean()) / 2 / len(values)) if len(values) > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A rule: a sign to look for, and what to do about it."""

    sign: str
    """The sign in a few words."""
    text: str
    """Why it happens, and what to do."""
    is_seen: Callable[[Course], bool]
    """Whether the latest iteration shows the sign."""
    kind: Kind = "problem"
    """`problem`: look at it. `note`: good to know. `normal`: as it should be, although it may look odd."""
    shows: tuple[str, ...] = ()
    """The metrics to show with the advice. A `*` stands for any characters."""
    patience: int = PATIENCE
    """Number of consecutive iterations that must show the sign."""
    of_updates: bool = True
    """Whether iterations count only if rows had an advantage and an update was applied."""

    def words(self, metrics: Mapping[str, float]) -> str:
        """The text, with the metrics that it shows."""
        names = [name for name in metrics if any(fnmatchcase(name, pattern) for pattern in self.shows)]
        values = ", ".join(f"{name} is {metrics[name]:.3g}" for name in names[:MAX_SHOWN])
        return f"{self.text} Now {values}." if values else self.text


RULES = (
    Advice(
        sign="a part of the reward is missing",
        kind="note",
        text="A part of the reward returned NaN, or None, for some rows, so it does not apply to them and adds nothing. "
        "rewards/NAME/applies is the fraction of rows to which a part applies. If it should be 1, look for 0/0 in the part.",
        is_seen=lambda run: any(name.endswith("/applies") and value < 1 for name, value in run.metrics.items()),
        shows=("rewards/*/applies",),
        patience=1,
        of_updates=False,
    ),
    Advice(
        sign="every reward is the highest one",
        kind="normal",
        text="All rewards are the highest one that was seen so far, so there is nothing left to learn from them. Stop, or draw "
        "harder states.",
        is_seen=lambda run: run.is_solved and run.is_without_advantage and run.learns_from_rewards_only,
        of_updates=False,
    ),
    Advice(
        sign="every group has one row",
        text="An advantage is relative to the other rows of a group, so the only row of a group has none, and nothing is "
        "learned. Use a larger group_size, give rows of the same state one group id, or use a baseline that needs no group, "
        "such as advantage.baseline='global_mean'.",
        is_seen=lambda run: (
            run("group_stats/avg_group_size") == 1
            and run.is_without_advantage
            and run.learns_from_rewards_only
            and run("rewards/min") < run("rewards/max")  # with equal rewards, no other baseline would help
        ),
        patience=1,
        of_updates=False,
    ),
    Advice(
        sign="nearly all groups are dead",
        text="Iterations have hardly anything to learn from: in nearly every group all rewards are equal, so that its rows "
        "have no advantage. Does the reward read the action? Make rewards less sparse, the task easier or harder, groups "
        "larger (group_size), or draw other states (dynamic_sampling_rounds).",
        is_seen=lambda run: run.is_dead and not run.is_solved and not run.earns_well and not run.is_its_own_teacher,
        shows=("group_stats/zero_variance_fraction",),
        of_updates=False,
    ),
    Advice(
        sign="the teacher is the policy",
        text="The KL to the reference has always been 0, and no reward has ever differed from another, so nothing teaches the "
        "policy. If a teacher is to teach it, pass the teacher as reference_policy (HFPolicy: reference_model), and let a hint "
        "change the states. If rewards are, they must differ between the actions of a state.",
        is_seen=lambda run: run.is_its_own_teacher,
        shows=("train/kl_coef", "train/kl_mean", "rewards/mean"),
        of_updates=False,
    ),
    Advice(
        sign="all advantages are 0",
        text="Rewards differ within groups, but no row has an advantage. A setting removes the differences: "
        "advantage.scale='mean' if no group's mean reward is above 0, negative_only if no reward is below its baseline, or "
        "a reward_clip that makes rewards equal.",
        is_seen=lambda run: run.is_without_advantage and run("group_stats/zero_variance_fraction") < 1,
        patience=1,
        of_updates=False,
    ),
    Advice(
        sign="batch_size is larger than an iteration",
        kind="note",
        text="All rows are in one update, so every ratio is 1, nothing is clipped, and the bounds of a surrogate have no "
        "effect. For several updates, set batch_size below the number of rows of an iteration (states x group_size).",
        is_seen=lambda run: run.num_planned == 1 and run.batch_size is not None and run.batch_size > run.num_rows,
        patience=1,
    ),
    Advice(
        sign="the loss is 0",
        kind="normal",
        text="This is normal with one update per iteration. The ratio is exactly 1 and a group's advantages sum to 0, so the "
        "loss is 0 although its gradient is not, and nothing is clipped. Watch rewards/mean and train/grad_norm instead.",
        is_seen=lambda run: (
            run.num_planned == 1
            and "train/policy_loss" in run.metrics  # a loss of the user's own need not report it
            and abs(run("train/total_loss")) < TINY < run("train/grad_norm")
        ),
        patience=1,
    ),
    Advice(
        sign="the gradient is exactly 0",
        text="In all updates of an iteration the gradient was exactly 0 although rows have advantages. Either the advantages "
        "of equal actions cancel, or every action is certain, or the trained parameters do not reach the log-probabilities. "
        "train/zero_gradients is the fraction of such updates.",
        is_seen=lambda run: (
            run("train/zero_gradients") == 1 and not run("train/clip_fraction") > 0 and not run.has_demonstrations
        ),
        patience=1,
    ),
    Advice(
        sign="nothing is ever clipped",
        kind="note",
        text="In ten iterations of several updates, no ratio has left the clip range. Either the updates are small (a larger "
        "learning_rate or num_epochs_per_update would learn more from each sample), or there is nothing to learn: see "
        "train/grad_norm.",
        is_seen=lambda run: (
            run.num_planned > 1
            and run.has_bounds
            and run("train/clip_fraction") == 0
            and not run.has_clipped
            and not run.is_supervised
            and not run.earns_well
        ),
        shows=("train/grad_norm",),
    ),
    Advice(
        sign="much of the gradient is clipped",
        text="The gradient of every step whose ratio has left the clip range is lost. Use fewer epochs per update "
        "(num_epochs_per_update) or a smaller learning_rate.",
        is_seen=lambda run: run("train/clip_fraction") > MANY_CLIPPED,
        shows=("train/clip_fraction",),
    ),
    Advice(
        sign="ratios are extreme",
        text="Some ratios of the new to the old policy were so far from 1 that they were bounded to stay finite. The policy "
        "moves too far in one iteration: lower the learning_rate or the number of epochs (num_epochs_per_update).",
        is_seen=lambda run: run("train/ratio_clamped_fraction") > 0,
        shows=("train/ratio_clamped_fraction",),
        patience=1,
    ),
    Advice(
        sign="the KL is 0",
        text="The policy equals its reference, so the KL term has no effect. If the policy is copied to the reference at every "
        "iteration, use a larger reference_sync_every or a smaller reference_mix. If the reference is frozen, the policy has "
        "not changed: see train/grad_norm and train/learning_rate.",
        is_seen=lambda run: run("train/kl_coef") > 0 and abs(run("train/kl_mean")) < TINY,
        shows=("train/kl_coef", "train/grad_norm", "train/learning_rate"),
    ),
    Advice(
        sign="the sampler is not the policy",
        text="Actions are sampled from another distribution than the policy: by their behaviour log-probs, the two differ by "
        "train/sampler_divergence nats per step. Possible causes are truncation (top_k, top_p, min_p), penalties, another "
        "engine, old weights, and dropout that is on only during updates. Set objective.sampler_correction='truncate', or "
        "sample from the policy itself.",
        is_seen=lambda run: (
            run("train/sampler_divergence") > FAR_SAMPLER
            and "train/sampler_ratio_mean" not in run.metrics  # a correction reports it
        ),
        shows=("train/sampler_divergence",),
    ),
    Advice(
        sign="the entropy has collapsed",
        text="The policy is nearly deterministic: its entropy is a twentieth of the entropy at the start, and the reward "
        "neither rises nor is nearer to its best than to where it began. Add an entropy bonus (objective.entropy_coef, "
        "entropy_control) or a KL penalty to a reference, raise the surrogate's upper bound (Clip(high=...)), or lower "
        "learning_rate.",
        is_seen=lambda run: (
            run.has_collapsed and not run.is_supervised and not run.earns_well and not run.has_converged
        ),
        shows=("train/entropy",),
    ),
)
"""All rules, in the order in which advice is given."""


class Advisor:
    """Reads the metrics of a run, iteration by iteration, and gives each advice once.

    Args:
        settings: The run's settings as plain values, `GRPOConfig.to_dict()`. Rules that need a setting are silent without it.

    Example:
        >>> advisor = Advisor({})
        >>> [advice.sign for advice in advisor.read({"rewards/style/applies": 0.5})]
        ['a part of the reward is missing']
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._course = Course(settings)
        self._in_a_row = dict.fromkeys((rule.sign for rule in RULES), 0)
        self._given: set[str] = set()

    def read(self, metrics: Mapping[str, float]) -> list[Advice]:
        """The advice that the next iteration's metrics give for the first time."""
        run = self._course
        run.follow(metrics)
        is_updated = run("train/num_updates") != 0 and not run.is_without_advantage
        new = []
        for rule in RULES:
            if rule.of_updates and not is_updated:
                continue
            self._in_a_row[rule.sign] = self._in_a_row[rule.sign] + 1 if rule.is_seen(run) else 0
            if self._in_a_row[rule.sign] >= rule.patience and rule.sign not in self._given:
                self._given.add(rule.sign)
                new.append(rule)
        return new

    def log(self, metrics: Mapping[str, float]) -> None:
        """Read an iteration's metrics, and log the advice that they give for the first time through the logger `grpo`."""
        for rule in self.read(metrics):
            level = logging.INFO if rule.kind == "normal" else logging.WARNING
            words = rule.words(metrics)
            logger.log(level, "%s: %s (Logged once. docs/debugging.md explains it.)", rule.sign, words)

    def is_over(self, rule: Advice) -> bool:
        """Whether the sign of an advice is no longer seen. A sign that a single iteration shows is never over."""
        return rule.patience > 1 and self._in_a_row[rule.sign] < rule.patience


def advice_on(history: Iterable[Mapping[str, float]], settings: Mapping[str, Any]) -> list[Advice]:
    """The advice that a whole run gives, without signs that were over at its end.

    Args:
        history: The metrics of each iteration, as `GRPOTrainer.train` returns them.
        settings: As in `Advisor`.

    Example:
        >>> iteration = {"train/kl_coef": 0.1, "train/kl_mean": 0.0, "train/num_updates": 1.0, "train/grad_norm": 0.5}
        >>> [advice.sign for advice in advice_on([iteration] * 10, {})]
        ['the KL is 0']
    """
    advisor = Advisor(settings)
    given = [rule for metrics in history for rule in advisor.read(metrics)]
    return [rule for rule in RULES if rule in given and not advisor.is_over(rule)]
