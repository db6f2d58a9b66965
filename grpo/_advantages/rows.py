"""One advantage per row: special baselines and scales, and several rewards that are each standardised."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo._common.tensors import require_finite_values, require_tensors
from grpo.errors import ConfigError, RewardError

from .groups import Floats, Groups, as_float64, batch_std

BETA_TOLERANCE = 1e-6
"""The scale `beta` takes rewards so far outside [0, 1] as rounded."""
MAX_BETA_WEIGHT = 1e6
"""Bound on 1 / density in the scale `beta`, where a group's mean is near 0 or 1."""


def length_weighted_advantages(rewards: Floats, groups: Groups, lengths: Int[Tensor, " N"] | None) -> Floats:
    """Subtract from each row's reward the mean of its group, weighted by the number of steps of each row.

    A[i] = R[i] - sum(l R) / sum(l) over the group; the plain mean if the group has no steps

    This baseline minimises the gradient's variance if the squared norm of a row's gradient is proportional to its length.

    `rewards` are sorted by group; `lengths`, l, are in the caller's order.

    Source:
        Hao et al. 2025 (OPO), arXiv:2505.23585.
    """
    if lengths is None:
        raise ConfigError(
            "baseline='length_weighted' needs lengths; got None. Pass lengths=the number of steps of each row."
        )
    weights = groups.to_group_order(as_float64(lengths))
    total = groups.means(weights)
    centred = rewards - groups.repeat(groups.means(rewards))  # keeps the digits of small differences of large rewards
    shift = groups.means(weights * centred) / np.where(total > 0, total, 1.0)
    return centred - groups.repeat(shift)


def max_at_k_advantages(rewards: Floats, groups: Groups, k: int | None) -> Floats:
    """How much each row adds to the best of k attempts, averaged over the sets of attempts that contain the row.

    A[i] = n / C(n, k) sum over subsets I of k rows of the group that contain i of (max R over I - max R over I without i)

    The mean over the group of A[i] grad log pi(i) is an unbiased estimate of the gradient of E[max of k rewards], which is
    pass@k for rewards 0 and 1. With sorted rewards R_0 <= R_1 <= ..., and j the best of the other attempts, A[i] is n / C(n, k)
    times the sum over j < i of C(j, k - 2) (R_i - R_j). A group of n < k rows is computed with k = n.

    `rewards` are sorted by group.

    Source:
        Walder & Karkhanis 2025 (PKPO), arXiv:2505.15201, eq. 33, times n for a loss that is a mean over rows.
    """
    if k is None:
        raise ConfigError("baseline='max_at_k' needs k; got None. Pass k=the number of attempts.")
    advantages = np.zeros_like(rewards)
    for start, count in zip(groups.starts, groups.counts.tolist(), strict=True):
        attempts = min(k, count)
        if attempts < 2:
            continue
        of_group = rewards[start : start + count]
        order = of_group.argsort(kind="stable")
        ways = np.array([math.comb(j, attempts - 2) / math.comb(count, attempts) for j in range(count - 1)])
        gains = np.cumsum(np.cumsum(ways) * np.diff(of_group[order]))  # R_i - R_j is a sum of steps between neighbours
        advantages[start + order[1:]] = count * gains
    return advantages


def beta_scale(means: Floats, lowest: float, highest: float, ddof: int) -> Floats:
    """The density of Beta(1 + a/3, 1 + b/3) at each group's mean reward. Beta(a, b) has the moments of the group means.

    a = c m, b = c (1 - m), c = m (1 - m) / v - 1, with m and v the mean and variance of the group means

    Dividing by the density minimises the gradient's variance for rewards 0 and 1. With a = b = 0 the density is 1. With
    a = b = 3/2 the density is proportional to the group's std. The scale is 1 if there is one group, or no variance to
    fit. The scale is infinite at a group mean of 0 or 1, where all rewards of the group are equal.

    `means` are [B]; `lowest` and `highest` are the extreme rewards of the batch; v has divisor B - ddof.

    Source:
        Xiao et al. 2025 (BNPO), arXiv:2506.02864; the bounds (parameters >= 1, 1/density <= 1e6) are from its code.
    """
    if lowest < -BETA_TOLERANCE or highest > 1.0 + BETA_TOLERANCE:
        raise RewardError(
            f"advantage.scale='beta' is for rewards in [0, 1]; got {lowest:.4g} to {highest:.4g}. Map them to [0, 1], or use "
            "scale='group'."
        )
    means = means.clip(0.0, 1.0)
    variance = means.var(ddof=ddof) if len(means) > ddof else 0.0
    if variance <= 0.0:
        return np.ones_like(means)
    mean = means.mean()
    fitted = max(mean * (1.0 - mean) / variance - 1.0, 0.0)
    alpha, beta = 1.0 + fitted * mean / 3.0, 1.0 + fitted * (1.0 - mean) / 3.0
    log_norm = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    inside = (means > 0.0) & (means < 1.0)
    m = np.where(inside, means, 0.5)
    density = np.exp((alpha - 1.0) * np.log(m) + (beta - 1.0) * np.log1p(-m) - log_norm)
    return np.where(inside, np.maximum(density, 1.0 / MAX_BETA_WEIGHT), math.inf)


def decoupled_advantages(
    components: Mapping[str, Float[Tensor, "N *T"]],
    weights: Mapping[str, float],
    group_ids: Int[Tensor, " N"],
    *,
    std_ddof: int = 1,
    std_eps: float = 0.0,
) -> Float[Tensor, " N"]:
    """Several rewards: each is standardised within its groups, then they are added, then the sum is whitened over the batch.

    A[n] = (S[n] - mean S) / (std S + eps),  S[n] = sum_k w_k (R_k[n] - mean of its group) / (std of its group + eps)

    A weighted sum that is standardised once is dominated by the reward with the largest differences. Here the weights alone
    decide how much each reward counts. A is exactly 0 where every reward is constant in the row's group.

    Args:
        components: Name -> rewards, one per row. NaN: the reward does not apply to the row. The mean and std of its group leave
            the row out, and the row adds 0.
        weights: Name -> w. The weight of a missing name is 1.
        group_ids: Which rows belong together.
        std_ddof: Divisor n - ddof.
        std_eps: Added to each standard deviation.

    Source:
        Liu et al. 2026 (GDPO), arXiv:2601.05242.
    """
    require_tensors(decoupled_advantages, group_ids=group_ids, components=components, weights=weights)
    if not components or any(rewards.dim() != 1 for rewards in components.values()):
        raise ConfigError(
            "advantage.several_rewards='normalize_each' needs several rewards by name, one number per row each: pass "
            "WeightedRewards({'name': reward, ...}) as reward_model."
        )
    for name, rewards in components.items():
        require_finite_values(f"components[{name!r}]", rewards.nan_to_num(0.0, math.inf, -math.inf), error=RewardError)
    parts = np.zeros((len(components), len(group_ids)))
    live = np.zeros(len(group_ids), dtype=np.bool_)
    for part, (name, rewards) in zip(parts, components.items(), strict=True):
        rows = np.flatnonzero(~np.isnan(as_float64(rewards)))
        if not rows.size:
            continue
        groups = Groups.of(group_ids[rows])
        values, tolerance = groups.rewards(rewards[rows])
        stds = groups.stds(values, std_ddof, tolerance)  # infinite in a constant group
        standardised = (values - groups.repeat(groups.means(values))) / groups.repeat(stds + std_eps)
        part[rows] = weights.get(name, 1.0) * groups.to_row_order(standardised)
        live[rows] |= groups.to_row_order(groups.repeat(np.isfinite(stds)))
    dtype = min((rewards.dtype for rewards in components.values()), key=lambda dtype: dtype.itemsize)
    total: Floats = parts.sum(axis=0)
    rounding = len(parts) * torch.finfo(dtype).eps * float(np.abs(parts).max())
    whitened = (total - total.mean()) / (batch_std(total, std_ddof, rounding) + std_eps)
    return torch.from_numpy(np.where(live, whitened, 0.0)).to(dtype)
