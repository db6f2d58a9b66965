"""Rewards into advantages: the settings, and the estimator that applies them to a batch."""

import math
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import torch
from jaxtyping import Float
from torch import Tensor

from .errors import ConfigError
from .group_advantages import (
    Baseline,
    Scale,
    decoupled_advantages,
    group_relative_advantages,
    group_statistics,
)
from .grouping import Groups, rounding_of
from .settings import Settings, setting
from .step_advantages import (
    discounted_returns,
    generalized_advantages,
    group_relative_returns,
    process_supervised_advantages,
    rewards_at_the_end,
    state_group_advantages,
)
from .types import ExperienceBatch

__all__ = [
    "AdvantageConfig",
    "AdvantageEstimator",
    "Baseline",
    "Estimate",
    "Scale",
    "decoupled_advantages",
    "discounted_returns",
    "generalized_advantages",
    "group_relative_advantages",
    "group_relative_returns",
    "group_statistics",
    "process_supervised_advantages",
    "state_group_advantages",
]

Credit = Literal["row", "return_to_go", "process_supervision", "gae", "gigpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(Settings):
    """How rewards become advantages."""

    credit: Credit | None = None
    """Which steps a reward is credited to. `row`: all steps of its row alike. For rewards per step: `return_to_go`, the steps
    before it; `process_supervision`, likewise, after standardising step rewards within the group. `gae`: by a critic (the
    policy gives `values`), which is trained beside the policy. `gigpo`: the row, plus what followed in the same state (the
    policy gives `state_keys`). None: `return_to_go` for rewards per step, `row` for rewards per row."""
    baseline: Baseline = "group_mean"
    """What a reward is compared with; see `group_relative_advantages`. `gae` has its own."""
    scale: Scale = "none"
    """What the difference is divided by. Dividing by the group's standard deviation makes easy and hard states weigh alike,
    and lets noise in nearly constant groups weigh as much as signal elsewhere."""
    std_ddof: int = setting(1, at_least=0, at_most=1)
    """Divisor n - ddof in the standard deviation."""
    std_eps: float = setting(0.0, at_least=0.0)
    """Added to what is divided by. Larger damps groups with small differences."""
    k: int | None = setting(None, at_least=2)
    """Attempts of the baseline `max_at_k`. Larger cares more for rare successes, and less for being right every time."""
    several_rewards: Literal["sum", "normalize_each"] = "sum"
    """Several named rewards: their weighted sum is normalised, or each is, before they are added (GDPO)."""
    gamma: float = setting(1.0, at_least=0.0, at_most=1.0)
    """Discount per column, for rewards per step, masked columns included. Smaller looks less far ahead."""
    gae_lambda: float = setting(0.95, at_least=0.0, at_most=1.0)
    """`gae`: larger trusts what followed, smaller trusts the critic."""
    gigpo_weight: float = setting(1.0, at_least=0.0)
    """`gigpo`: weight of the step's advantage among equal states, beside the row's among its group."""
    upweight_live_groups: bool = False
    """Multiply by rows / rows in groups with differences, so that dead groups do not shrink the gradient (GPG)."""
    positive_weight: float = setting(1.0, at_least=0.0)
    """Factor on advantages above 0. Smaller learns more from what went wrong, which keeps the policy varied."""
    negative_only: bool = False
    """Advantages above 0 become 0: the same as a `positive_weight` of 0."""
    clip: float | None = setting(None, above=0.0)
    """Bound on the advantage's size; smaller tames outliers, and biases."""
    reward_clip: float | None = setting(None, above=0.0)
    """Bound on a reward's size, before anything else is done with it. Metrics show rewards as they came."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of rows' total rewards: a learning rate then fits any unit of reward."""

    def __post_init__(self) -> None:
        """Check every value, and that choices do not contradict one another."""
        Settings.__post_init__(self)
        if (self.baseline == "max_at_k") != (self.k is not None):
            raise ConfigError(
                f"AdvantageConfig.k={self.k} with baseline={self.baseline!r}: 'max_at_k' needs k=the number of attempts, and "
                "the other baselines need k=None."
            )
        if self.negative_only and self.positive_weight not in (0.0, 1.0):
            raise ConfigError(
                f"AdvantageConfig.negative_only and positive_weight={self.positive_weight} contradict each other: keep one."
            )
        if self.credit == "gae" and self.scale not in ("none", "batch", "whiten"):
            raise ConfigError(
                f"AdvantageConfig.scale={self.scale!r} is over groups, which credit='gae' has not: use 'none', 'batch' or "
                "'whiten'."
            )
        if self.credit not in (None, "row") and self.baseline in ("max_at_k", "length_weighted"):
            raise ConfigError(
                f"AdvantageConfig.baseline={self.baseline!r} compares whole rows: use it with credit='row', not "
                f"{self.credit!r}."
            )
        if self.credit in ("process_supervision", "gigpo") and self.baseline == "global_mean":
            raise ConfigError(
                f"AdvantageConfig.baseline='global_mean' has no meaning under credit={self.credit!r}, which compares within "
                "groups."
            )
        if self.several_rewards == "normalize_each" and (
            self.credit not in (None, "row")
            or (self.baseline, self.scale) != ("group_mean", "none")
            or self.reward_clip is not None
            or self.normalize_rewards
        ):
            raise ConfigError(
                "AdvantageConfig.several_rewards='normalize_each' standardises each reward within its group and their sum over "
                f"the batch, and reads nothing else; got credit={self.credit!r}, baseline={self.baseline!r}, "
                f"scale={self.scale!r}, reward_clip={self.reward_clip}, normalize_rewards={self.normalize_rewards}. Set "
                "credit=None, baseline='group_mean', scale='none', reward_clip=None, normalize_rewards=False."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one batch's rewards amount to."""

    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """On the CPU."""
    returns: Float[Tensor, "N T"] | None = None
    """What a critic is trained towards; None: there is none."""


class AdvantageEstimator:
    """`AdvantageConfig` applied to a batch; remembers the running statistics that some settings need.

    Example:
        >>> estimator = AdvantageEstimator(AdvantageConfig(scale="group", std_ddof=0))
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config
        self._baseline = RunningMoments()
        self._reward = RunningMoments()

    def __call__(self, batch: ExperienceBatch) -> Float[Tensor, " N"] | Float[Tensor, "N T"]:
        """Advantages, one per row or one per step, on the CPU."""
        return self.estimate(batch).advantages

    def estimate(self, batch: ExperienceBatch, groups: Groups | None = None) -> Estimate:
        """Advantages, and where there is a critic what it is trained towards.

        Args:
            batch: the rows.
            groups: made of `batch.group_ids`; None: they are made here.

        Raises:
            ConfigError: a setting needs something that the batch has not.
        """
        config = self.config
        mask = batch.mask.cpu()
        rewards = self._prepared(batch.rewards, mask)
        credit = config.credit or ("row" if rewards.dim() == 1 else "return_to_go")
        returns = None
        match credit:
            case "row":
                advantages = self._of_rows(batch, rewards, mask, groups or Groups.of(batch.group_ids))
            case "return_to_go":
                _require_steps(rewards, credit)
                if config.baseline in ("max_at_k", "length_weighted"):
                    raise ConfigError(
                        f"advantage.baseline={config.baseline!r} compares whole rows, and these rewards are per step: set "
                        "credit='row'."
                    )
                options = {**self._options(), "running_mean": self._baseline.mean}
                advantages = group_relative_returns(rewards, mask, batch.group_ids, gamma=config.gamma, **options)
                if config.baseline == "global_mean":
                    self._baseline.add(discounted_returns(rewards, mask, config.gamma)[mask])
            case "process_supervision":
                _require_steps(rewards, credit)
                advantages = process_supervised_advantages(
                    rewards, mask, batch.group_ids, gamma=config.gamma, **self._options()
                )
            case "gae":
                returns, advantages = self._by_critic(batch, rewards, mask)
            case "gigpo":
                if batch.state_keys is None:
                    raise ConfigError(
                        "advantage.credit='gigpo' needs the state each step was taken in. Give the policy a method "
                        "state_keys(states, actions) -> [N, T] integers, or pass state_keys to ExperienceBatch.from_rows."
                    )
                advantages = state_group_advantages(
                    rewards,
                    mask,
                    batch.group_ids,
                    batch.state_keys.cpu(),
                    gamma=config.gamma,
                    weight=config.gigpo_weight,
                    **self._options(),
                )
            case _:
                assert_never(credit)
        return Estimate(advantages=self._finished(advantages, batch, mask), returns=returns)

    def _of_rows(self, batch: ExperienceBatch, rewards: Tensor, mask: Tensor, groups: Groups) -> Tensor:
        """One advantage per row."""
        config = self.config
        if config.several_rewards == "normalize_each":
            if not batch.reward_components or any(part.dim() != 1 for part in batch.reward_components.values()):
                raise ConfigError(
                    "advantage.several_rewards='normalize_each' needs several rewards by name, one number per row each: pass "
                    "WeightedRewards({'name': reward, ...}) as reward_model."
                )
            return decoupled_advantages(
                batch.reward_components,
                batch.reward_weights,
                batch.group_ids,
                std_ddof=config.std_ddof,
                std_eps=config.std_eps,
            )
        totals = rewards if rewards.dim() == 1 else discounted_returns(rewards, mask, config.gamma)[:, :1].sum(1)
        advantages = group_relative_advantages(
            totals,
            groups,
            lengths=mask.sum(1) if config.baseline == "length_weighted" else None,
            k=config.k,
            running_mean=self._baseline.mean,
            **self._options(),
        )
        if config.baseline == "global_mean":
            self._baseline.add(totals)
        return advantages

    def _by_critic(self, batch: ExperienceBatch, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns and advantages."""
        config = self.config
        if batch.values is None:
            raise ConfigError(
                "advantage.credit='gae' needs a critic's values. Return them in ActionScores.values (and final_values where "
                "rows are cut off), or set credit=None for group-relative advantages."
            )
        per_step = rewards if rewards.dim() == 2 else rewards_at_the_end(rewards, mask)
        values = batch.values.cpu()
        values = values.float() if values.element_size() < 4 else values
        final_values = None if batch.final_values is None else batch.final_values.cpu()
        advantages = generalized_advantages(
            per_step, values, mask, final_values, gamma=config.gamma, gae_lambda=config.gae_lambda
        )
        returns = torch.where(mask, advantages + values, 0.0).to(values.dtype)
        one_group = torch.zeros(int(mask.sum()), dtype=torch.int64)
        scaled = torch.zeros_like(advantages)
        scaled[mask] = group_relative_advantages(
            advantages[mask],
            one_group,
            baseline="none",
            scale=config.scale,
            std_ddof=config.std_ddof,
            std_eps=config.std_eps,
        )
        return returns, scaled.to(values.dtype)

    def _options(self) -> dict[str, Any]:
        """What every group-relative estimate is told."""
        config = self.config
        return {
            "baseline": config.baseline,
            "scale": config.scale,
            "std_ddof": config.std_ddof,
            "std_eps": config.std_eps,
        }

    def _prepared(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Rewards after their bound and their running normalisation."""
        config = self.config
        if config.reward_clip is not None:
            rewards = rewards.clamp(-config.reward_clip, config.reward_clip)
        if config.normalize_rewards:
            self._reward.add(rewards if rewards.dim() == 1 else torch.where(mask, rewards, 0.0).sum(1))
            rewards = rewards / (self._reward.std or 1.0)
        return rewards

    def _finished(self, advantages: Tensor, batch: ExperienceBatch, mask: Tensor) -> Tensor:
        """Advantages after what is done to them whatever they came from."""
        config = self.config
        if config.upweight_live_groups:
            names, groups = batch.group_ids.unique(return_inverse=True)
            live = torch.zeros(len(names), dtype=torch.bool)
            live[groups[advantages.reshape(len(mask), -1).ne(0).any(1)]] = True
            advantages = advantages * (len(mask) / max(int(live[groups].sum()), 1))
        positive_weight = 0.0 if config.negative_only else config.positive_weight
        if positive_weight != 1.0:
            advantages = torch.where(advantages > 0, positive_weight * advantages, advantages)
        return advantages if config.clip is None else advantages.clamp(-config.clip, config.clip)

    def state_dict(self) -> dict[str, Any]:
        """The running statistics."""
        return {"baseline": self._baseline.state_dict(), "reward": self._reward.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._baseline.load_state_dict(state["baseline"])
        self._reward.load_state_dict(state["reward"])


class RunningMoments:
    """Mean and variance of all values seen so far.

    Source:
        Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares, self._rounding = 0, 0.0, 0.0, 0.0

    @property
    def mean(self) -> float | None:
        """None before the first value."""
        return self._mean if self._count else None

    @property
    def std(self) -> float:
        """With divisor n; 0 before the second value, and where all values are equal but for rounding."""
        std = math.sqrt(self._squares / self._count) if self._count else 0.0
        return std if std > self._rounding else 0.0

    def add(self, values: Tensor) -> None:
        """Take in more values."""
        if not values.numel():
            return
        exact = values.double()
        mean = float(exact.mean())
        total = self._count + values.numel()
        away = mean - self._mean
        self._squares += float((exact - mean).square().sum()) + away**2 * self._count * values.numel() / total
        self._mean += away * values.numel() / total
        self._count = total
        self._rounding = max(self._rounding, rounding_of(values) * float(exact.abs().max()))

    def state_dict(self) -> dict[str, Any]:
        """Count, mean, sum of squared deviations, and the difference that is rounding."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares, "rounding": self._rounding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._count, self._mean = state["count"], state["mean"]
        self._squares, self._rounding = state["squares"], state["rounding"]


def _require_steps(rewards: Tensor, credit: str) -> None:
    if rewards.dim() == 1:
        raise ConfigError(f"advantage.credit={credit!r} needs rewards per step, [N, T]; the reward model gives [N].")
