"""Turns rewards into advantages: how much better was an action than the other actions for the same state?

A = (R - baseline) / scale

The baseline and the scale are independent choices. `_advantages` has the functions that only some settings need.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from ._advantages.groups import ABSOLUTE_BASELINES, Baseline, Floats, Groups, Scale, batch_std, group_statistics
from ._advantages.reward_moments import RewardMoments
from ._advantages.rows import beta_scale, decoupled_advantages, length_weighted_advantages, max_at_k_advantages
from ._advantages.steps import (
    Estimate,
    among_steps,
    cell_ids,
    critic_estimate,
    discounted_returns,
    finite_rewards,
    generalized_advantages,
    process_supervised_advantages,
    require_step_rewards,
    state_group_advantages,
)
from ._common.tensors import require_tensors
from .config import AdvantageConfig
from .types import ExperienceBatch, row_totals

__all__ = ["AdvantageEstimator", "group_relative_advantages", "group_relative_returns"]
__all__ += ["Baseline", "Estimate", "Scale", "decoupled_advantages", "discounted_returns", "generalized_advantages"]
__all__ += ["group_statistics", "process_supervised_advantages", "state_group_advantages"]


def group_relative_advantages(
    rewards: Real[Tensor, " N"],
    group_ids: Int[Tensor, " N"],
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "none",
    std_ddof: int = 1,
    std_eps: float = 0.0,
    lengths: Int[Tensor, " N"] | None = None,
    k: int | None = None,
    running_mean: float | None = None,
) -> Float[Tensor, " N"]:
    """One advantage per row, relative to the rows of the same group.

    A[n] = (R[n] - b[n]) / s[n], where the baseline b is one of
      group_mean       mean of R over the group                               GRPO, arXiv:2402.03300, sec. 4.1.2
      group_median     median of R over the group
      leave_one_out    mean of R over the other rows of the group             Kool et al. 2019; RLOO, arXiv:2402.14740
      length_weighted  sum(l R) / sum(l) over the group, l = lengths          OPO, arXiv:2505.23585
      max_at_k         R - b is what a row adds to the best of k attempts     PKPO, see `max_at_k_advantages`
      global_mean      running_mean; without one, mean of R over the batch
      none             0
    and the scale s is one of
      none             1                                                      Dr. GRPO, arXiv:2503.20783
      group            std of R over the group + eps                          GRPO
      batch            std of R over the batch + eps
      whiten           std of R - b over the batch + eps; A then is           REINFORCE++, arXiv:2501.03262, eq. 6 to 8
                       (R - b - mean of R - b over the batch) / s
      mean             mean of R over the group + eps; A = 0 if mean <= 0     MaxRL, arXiv:2602.02710
      beta             density of a Beta distribution at the group's mean     BNPO, see `beta_scale`

    Rewards are equal if they differ by at most two units in the last place of their dtype. A is exactly 0 in a group of equal
    rewards and in a group of one row, if b depends on the group, and wherever the std in s is 0. Statistics are float64.

    Args:
        rewards: R, one number per row.
        group_ids: The group of each row: any integers, in any order.
        baseline, scale: Names of b and s, see above.
        std_ddof: Divisor n - ddof in a std.
        std_eps: Added to a std or mean before the division. Larger: smaller advantages in groups with small differences.
        lengths: Steps of each row, for `length_weighted`.
        k: Attempts, for `max_at_k`.
        running_mean: For `global_mean`.

    Raises:
        ConfigError: The baseline needs `lengths` or `k`.
        ContractError: An argument is not a tensor of the stated shape.
        RewardError: A reward is NaN or infinite, or the scale is `beta`, and a reward is outside [0, 1].

    Example:
        >>> group_relative_advantages(torch.tensor([1., 3., 2., 0., 4.]), torch.tensor([0, 0, 1, 1, 1])).tolist()
        [-1.0, 1.0, 0.0, -2.0, 2.0]
    """
    require_tensors(group_relative_advantages, rewards=rewards, group_ids=group_ids, lengths=lengths)
    rewards = finite_rewards(rewards)
    if not len(rewards):
        return torch.zeros_like(rewards)
    groups = Groups.of(group_ids)
    R, tolerance = groups.rewards(rewards)
    # rewards of a group that differ by rounding alone are no signal, unless the baseline is not the group's
    no_signal = groups.repeat(groups.are_constant(R, tolerance)) & (baseline not in ABSOLUTE_BASELINES)
    centred = np.where(no_signal, 0.0, _minus_baseline(R, groups, baseline, lengths, k, running_mean))
    advantages = np.where(no_signal, 0.0, _over_scale(centred, R, groups, scale, tolerance, std_ddof, std_eps))
    return torch.from_numpy(groups.to_row_order(advantages)).to(rewards)


def _minus_baseline(
    R: Floats, groups: Groups, baseline: Baseline, lengths: Tensor | None, k: int | None, running_mean: float | None
) -> Floats:
    """Subtract the baseline b from the rewards R, which are sorted by group."""
    match baseline:
        case "group_mean":
            return R - groups.repeat(groups.means(R))
        case "group_median":
            return R - groups.repeat(groups.medians(R))
        case "leave_one_out":  # R - (n mean - R) / (n - 1) = n / (n - 1) (R - mean)
            n = groups.counts
            return (R - groups.repeat(groups.means(R))) * groups.repeat(n / np.maximum(n - 1, 1))  # 0 for n = 1
        case "length_weighted":
            return length_weighted_advantages(R, groups, lengths)
        case "max_at_k":
            return max_at_k_advantages(R, groups, k)
        case "global_mean":
            return R - (R.mean() if running_mean is None else running_mean)
        case "none":
            return R
        case _:
            assert_never(baseline)


def _over_scale(
    centred: Floats, R: Floats, groups: Groups, scale: Scale, tolerance: float, ddof: int, eps: float
) -> Floats:
    """Divide R - b, sorted by group, by the scale s. s is infinite where all values are equal, so that A is 0 there."""
    s: Floats | float
    rounding = tolerance * float(np.abs(R).max())
    match scale:
        case "none":
            return centred
        case "group":
            s = groups.repeat(groups.stds(R, ddof, tolerance) + eps)
        case "batch":
            s = batch_std(R, ddof, rounding) + eps
        case "whiten":  # REINFORCE++ divides by the deviation that is left after the baseline
            s = batch_std(centred, ddof, rounding) + eps
            centred = centred - centred.mean()
        case "mean":
            means = groups.means(R)
            s = groups.repeat(np.where(means > 0, means + eps, math.inf))
        case "beta":
            s = groups.repeat(beta_scale(groups.means(R), R.min(), R.max(), ddof))
        case _:
            assert_never(scale)
    return centred / s


def group_relative_returns(
    rewards: Real[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    group_ids: Int[Tensor, " N"],
    *,
    gamma: float = 1.0,
    baseline: Baseline = "group_mean",
    scale: Scale = "batch",
    std_ddof: int = 1,
    std_eps: float = 0.0,
    running_mean: float | None = None,
) -> Float[Tensor, "N T"]:
    """One advantage per step: the return from this step on, relative to the same step of the group's other rows.

    A[n,t] = (G[n,t] - b[n,t]) / s[n,t],  G[n,t] = r[n,t] + gamma G[n,t+1]

    b and s are computed as in `group_relative_advantages`, per column: from the group's rows whose step t is valid. A row that
    has ended is left out and does not count as 0. The scale `batch` is the std of G over all valid steps.

    Args:
        rewards: The rewards r, one number per step. Values outside the mask are never used.
        mask: The valid steps. Advantages outside the mask are 0.
        group_ids: The group of each row.
        gamma: Discount per column. Smaller looks less far ahead.
        baseline, scale, std_ddof, std_eps, running_mean: As in `group_relative_advantages`.

    Source:
        Shao et al. 2024, arXiv:2402.03300, sec. 4.1.3, without its normalisation of rewards before they are summed.
    """
    require_tensors(group_relative_returns, rewards=rewards, mask=mask, group_ids=group_ids)
    relative = partial(group_relative_advantages, baseline=baseline, scale=scale, std_ddof=std_ddof, std_eps=std_eps)
    returns = discounted_returns(rewards, mask, gamma)
    columns = cell_ids(group_ids, torch.arange(mask.shape[1], device=mask.device))
    return among_steps(returns, mask, columns, partial(relative, running_mean=running_mean))


class AdvantageEstimator:
    """Computes the advantages of each batch as `AdvantageConfig` says, and keeps running statistics that some settings need."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config
        self._baseline, self._reward = RewardMoments(), RewardMoments()

    def __call__(self, batch: ExperienceBatch) -> Float[Tensor, " N"] | Float[Tensor, "N T"]:
        """Return the advantages, one per row or one per step, on the CPU."""
        return self.estimate(batch).advantages

    def estimate(self, batch: ExperienceBatch) -> Estimate:
        """Return the advantages, and the critic's targets if there is a critic.

        Raises:
            ConfigError: A setting needs a field that the batch does not have.
        """
        config, gamma, mask, ids = self.config, self.config.gamma, batch.mask.cpu(), batch.group_ids.cpu()
        rewards = self._prepared(batch.rewards, mask)
        std: dict[str, Any] = {"std_ddof": config.std_ddof, "std_eps": config.std_eps}
        settings = {"baseline": config.baseline, "scale": config.scale, "running_mean": self._baseline.mean, **std}
        relative: Callable[..., Tensor] = partial(group_relative_advantages, **settings)
        one_per_row = rewards.dim() == 1 or config.several_rewards == "normalize_each"
        credit = config.credit or ("row" if one_per_row else "return_to_go")
        targets = None
        match credit:
            case "row" if config.several_rewards == "normalize_each":
                advantages = decoupled_advantages(batch.reward_components, batch.reward_weights, ids, **std)
            case "row":
                totals = rewards if rewards.dim() == 1 else discounted_returns(rewards, mask, gamma)[:, :1].sum(1)
                advantages = relative(totals, ids, lengths=mask.sum(1), k=config.k)
                if config.baseline == "global_mean":
                    self._baseline.add(totals)  # after its use: a row is not its own baseline
            case "return_to_go":
                require_step_rewards(rewards, credit, config.baseline)
                advantages = group_relative_returns(rewards, mask, ids, gamma=gamma, **settings)
                if config.baseline == "global_mean":
                    self._baseline.add(discounted_returns(rewards, mask, gamma)[mask])
            case "process_supervision":
                require_step_rewards(rewards, credit, config.baseline)
                advantages = process_supervised_advantages(
                    rewards, mask, ids, relative, gamma=gamma, baseline=config.baseline
                )
            case "gae":  # the critic is the baseline
                scaled = partial(relative, baseline="none")
                critic = critic_estimate(batch, rewards, mask, scaled, gamma=gamma, gae_lambda=config.gae_lambda)
                advantages, targets = critic.advantages, critic.returns
            case "gigpo":
                advantages = state_group_advantages(
                    rewards, mask, ids, batch.state_keys, relative, gamma=gamma, weight=config.gigpo_weight
                )
            case _:
                assert_never(credit)
        return Estimate(advantages=self._finished(advantages, ids), returns=targets)

    def _prepared(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Apply `reward_clip` and `normalize_rewards` to the rewards."""
        bound = self.config.reward_clip
        rewards = rewards if bound is None else rewards.clamp(-bound, bound)
        if self.config.normalize_rewards:
            self._reward.add(row_totals(rewards, mask))
            rewards = rewards / (self._reward.std or 1.0)  # 0 until rewards differ
        return rewards

    def _finished(self, advantages: Tensor, group_ids: Tensor) -> Tensor:
        """Apply to the advantages the settings that hold for every kind of credit."""
        config = self.config
        if config.upweight_live_groups:
            advantages = advantages * (len(advantages) / max(Groups.of(group_ids).num_live_rows(advantages), 1))
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
