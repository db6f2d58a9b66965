"""Rewards into advantages: `AdvantageConfig` applied to a batch."""

from dataclasses import dataclass
from typing import Any, assert_never

import torch
from jaxtyping import Float
from torch import Tensor

from .advantage_config import AdvantageConfig
from .errors import ConfigError
from .group_advantages import (
    Baseline,
    Scale,
    decoupled_advantages,
    group_relative_advantages,
    group_statistics,
)
from .grouping import Groups
from .running_moments import RunningMoments
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


def _require_steps(rewards: Tensor, credit: str) -> None:
    if rewards.dim() == 1:
        raise ConfigError(f"advantage.credit={credit!r} needs rewards per step, [N, T]; the reward model gives [N].")
