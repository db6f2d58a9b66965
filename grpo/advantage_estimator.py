"""Rewards into advantages: how much better than its group was each row, or each step?

A = (R - baseline) / scale. Baseline and scale are independent choices, statistics are float64 and two-pass, and a group
without differences gives exactly 0, whatever the rounding.
"""

from dataclasses import dataclass
from typing import Any, Literal, assert_never

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .errors import ConfigError
from .grouping import Groups, as_float64, is_constant
from .settings import Settings, setting
from .types import ExperienceBatch

Baseline = Literal["group_mean", "group_median", "leave_one_out", "global_mean", "none"]
Scale = Literal["none", "group", "batch"]

RELATIVE_BASELINES: tuple[Baseline, ...] = ("group_mean", "group_median", "leave_one_out")
"""Baselines that a row's own group gives: alone in its group, a row has no relative information."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(Settings):
    """How rewards become advantages."""

    credit: Literal["row", "return_to_go"] | None = None
    """For rewards per step: the row's (discounted) return for all its steps, or for each step what came from it on.
    None: `return_to_go` for rewards per step. Rewards per row always give one advantage per row."""
    baseline: Baseline = "group_mean"
    """What a reward is compared with. `leave_one_out` is the group mean without the row itself; `global_mean` is a running
    mean over earlier batches; `none` leaves the reward as it is."""
    scale: Scale = "none"
    """What the difference is divided by: nothing, or the standard deviation over the group or the batch. Dividing makes
    easy and hard states weigh alike, and lets noise in nearly constant groups weigh as much as signal elsewhere."""
    std_ddof: int = setting(1, at_least=0, at_most=1)
    """Divisor n - ddof in the standard deviation."""
    std_eps: float = setting(0.0, at_least=0.0)
    """Added to the standard deviation. Larger damps groups with small differences."""
    gamma: float = setting(1.0, at_least=0.0, at_most=1.0)
    """Discount per column, for rewards per step, masked columns included. Smaller looks less far ahead."""
    clip: float | None = setting(None, above=0.0)
    """Bound on the advantage's size; smaller tames outliers, and biases."""


def group_relative_advantages(
    rewards: Float[Tensor, " N"],
    group_ids: Int[Tensor, " N"],
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "none",
    std_ddof: int = 1,
    std_eps: float = 0.0,
    running_mean: float | None = None,
) -> Float[Tensor, " N"]:
    """One advantage per row, relative to the rows of the same group.

    A[n] = (R[n] - b[n]) / s[n], with b one of
      group_mean      mean of R over the group
      group_median    median of R over the group (the mean of the two middle values when even)
      leave_one_out   mean of R over the group's other rows, which makes A = n/(n-1) (R - mean)
      global_mean     `running_mean`; where there is none yet, the mean of this batch
      none            0
    and s one of 1, std over the group + eps, std over the batch + eps.

    Exactly 0: a group (or a scale) whose values are equal up to two units in the last place of their dtype, and a group of
    one under a baseline of its own group.

    Args:
        rewards: one number per row.
        group_ids: which rows belong together; any integers, in any order.
        baseline: see above.
        scale: see above.
        std_ddof: divisor n - ddof.
        std_eps: added to the standard deviation.
        running_mean: for `global_mean`.

    Returns:
        Advantages in the dtype of `rewards`, computed in float64.

    Example:
        >>> group_relative_advantages(torch.tensor([1., 3., 2., 0., 4.]), torch.tensor([0, 0, 1, 1, 1])).tolist()
        [-1.0, 1.0, 0.0, -2.0, 2.0]

    Source:
        Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2; without the std: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783;
        leave one out: Kool et al. 2019; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.
    """
    if not rewards.numel():
        return torch.zeros_like(rewards)
    groups = Groups.of(group_ids)
    values = groups.gather(as_float64(rewards))
    tolerance = 2 * torch.finfo(rewards.dtype).eps
    constant = groups.spread(is_constant(*groups.extremes(values), tolerance))
    means = groups.spread(groups.means(values))

    match baseline:
        case "group_mean":
            centred = values - means
        case "group_median":
            centred = values - groups.spread(groups.medians(values))
        case "leave_one_out":
            centred = (values - means) * groups.spread(groups.counts / np.maximum(groups.counts - 1, 1))
        case "global_mean":
            centred = values - (values.mean() if running_mean is None else running_mean)
        case "none":
            centred = values
        case _:
            assert_never(baseline)
    if baseline in RELATIVE_BASELINES:
        centred = np.where(constant, 0.0, centred)

    match scale:
        case "none":
            advantages = centred
        case "group":
            peak = np.abs(values - means).max() or 1.0  # squares of what is at most 1 do not overflow
            squares = groups.means(((values - means) / peak) ** 2) * groups.counts
            std = groups.spread(peak * np.sqrt(squares / np.maximum(groups.counts - std_ddof, 1)) + std_eps)
            advantages = np.where(constant, 0.0, centred / np.where(constant, 1.0, std))
        case "batch":
            if is_constant(values.min(), values.max(), tolerance):
                advantages = np.zeros_like(centred)
            else:
                deviations = values - values.mean()
                peak = np.abs(deviations).max()
                advantages = centred / (peak * (deviations / peak).std(ddof=std_ddof) + std_eps)
        case _:
            assert_never(scale)
    return torch.from_numpy(groups.scatter(advantages)).to(rewards)


def group_relative_returns(
    rewards: Float[Tensor, "N T"],
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
    """One advantage per step: the return from there on, relative to the group's members that have such a step.

    A[n,t] = (G[n,t] - b[n,t]) / s,  G[n,t] = r[n,t] + gamma G[n,t+1]

    The baseline of step t is over the group's rows whose column t is valid: a member that has ended is left out, not
    counted as 0, and one that is alone gets 0. `batch` is the std of G over all valid steps.

    Args:
        rewards: one number per step; off-mask values are never used.
        mask: the valid steps.
        group_ids: which rows belong together.
        gamma: discount per step.
        baseline: as in `group_relative_advantages`, per column.
        scale: as there; `group` is the std over one group's column.
        std_ddof: divisor n - ddof.
        std_eps: added to the standard deviation.
        running_mean: for `global_mean`.

    Returns:
        Advantages, 0 off the mask.

    Source:
        Shao et al. 2024, arXiv:2402.03300, sec. 4.1.3, without its normalisation of rewards before they are summed.
    """
    returns = discounted_returns(rewards, mask, gamma)
    num_steps = mask.shape[1]
    _, numbers = group_ids.to(mask.device).unique(return_inverse=True)
    cells = numbers.unsqueeze(1) * num_steps + torch.arange(num_steps, device=mask.device)
    advantages = torch.zeros_like(returns)
    advantages[mask] = group_relative_advantages(
        returns[mask],
        cells[mask],
        baseline=baseline,
        scale=scale,
        std_ddof=std_ddof,
        std_eps=std_eps,
        running_mean=running_mean,
    )
    return advantages


def discounted_returns(rewards: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], gamma: float) -> Float[Tensor, "N T"]:
    """G[n,t] = r[n,t] + gamma G[n,t+1], with rewards off the mask taken as 0.

    Example:
        >>> discounted_returns(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), 0.5).tolist()
        [[1.75, 1.5, 1.0]]

    Source:
        Sutton & Barto 2018, eq. 3.9.
    """
    clean = torch.where(mask, rewards, 0.0)
    if gamma == 1.0:
        return clean.flip(1).cumsum(1).flip(1)
    columns = list(clean.unbind(1))
    for t in reversed(range(len(columns) - 1)):
        columns[t] = columns[t] + gamma * columns[t + 1]
    return torch.stack(columns, dim=1)


def group_statistics(rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"]) -> dict[str, float]:
    """Number of groups, their mean size, and the fraction without differences (groups of one included)."""
    groups = Groups.of(group_ids)
    low, high = groups.extremes(groups.gather(as_float64(rewards)))
    return {
        "group_stats/num_groups": float(len(groups.counts)),
        "group_stats/avg_group_size": len(group_ids) / len(groups.counts),
        "group_stats/zero_variance_fraction": float(is_constant(low, high, 2 * torch.finfo(rewards.dtype).eps).mean()),
    }


class AdvantageEstimator:
    """`AdvantageConfig` applied to a batch; remembers the running mean that `global_mean` needs.

    Example:
        >>> estimator = AdvantageEstimator(AdvantageConfig(scale="group", std_ddof=0))
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config
        self._count = 0
        self._mean = 0.0

    def __call__(self, batch: ExperienceBatch) -> Float[Tensor, " N"] | Float[Tensor, "N T"]:
        """Advantages [N] for rewards per row, or [N, T] for returns to go, on the CPU."""
        config = self.config
        mask = batch.mask.cpu()
        options: dict[str, Any] = {
            "baseline": config.baseline,
            "scale": config.scale,
            "std_ddof": config.std_ddof,
            "std_eps": config.std_eps,
            "running_mean": self._mean if self._count else None,
        }
        rewards = batch.rewards
        if rewards.dim() == 1 and config.credit == "return_to_go":
            raise ConfigError(
                "advantage.credit='return_to_go' needs rewards per step, [N, T]; the reward model gives [N]."
            )
        if rewards.dim() == 2 and config.credit == "row":
            rewards = discounted_returns(rewards, mask, config.gamma)[:, 0]
        if rewards.dim() == 1:
            advantages = group_relative_advantages(rewards, batch.group_ids, **options)
            if config.baseline == "global_mean":
                self._remember(rewards)
        else:
            advantages = group_relative_returns(rewards, mask, batch.group_ids, gamma=config.gamma, **options)
            if config.baseline == "global_mean":
                self._remember(discounted_returns(rewards, mask, config.gamma)[mask])
        return advantages if config.clip is None else advantages.clamp(-config.clip, config.clip)

    def _remember(self, values: Tensor) -> None:
        if values.numel():
            self._count += values.numel()
            self._mean += (float(values.double().sum()) - values.numel() * self._mean) / self._count

    def state_dict(self) -> dict[str, Any]:
        """The running mean and how many values it has seen."""
        return {"count": self._count, "mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._count, self._mean = state["count"], state["mean"]
