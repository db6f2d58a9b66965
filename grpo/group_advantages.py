"""One advantage per row: how much better than the other rows of its group? A = (R - baseline) / scale.

Baseline and scale are independent choices, statistics are float64 and two-pass, and a group without differences gives
exactly 0, whatever the rounding.
"""

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias, assert_never

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from .errors import ConfigError, RewardError
from .grouping import Groups, as_float64, is_constant, rounding_of

Baseline = Literal["group_mean", "group_median", "leave_one_out", "global_mean", "length_weighted", "max_at_k", "none"]
Scale = Literal["none", "group", "batch", "whiten", "beta", "mean"]

Floats: TypeAlias = NDArray[np.float64]

ABSOLUTE_BASELINES: tuple[Baseline, ...] = ("global_mean", "none")
"""Baselines that a row's own group does not give. Under the others, a row alone in its group has no relative information."""

MAX_BETA_WEIGHT = 1e6
"""Bound on 1 / density in the scale `beta`, where a group's mean is near 0 or 1."""


def group_relative_advantages(
    rewards: Float[Tensor, " N"],
    group_ids: Int[Tensor, " N"] | Groups,
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

    A[n] = (R[n] - b[n]) / s[n], with b one of
      group_mean       mean of R over the group
      group_median     median of R over the group (the mean of the two middle values when even)
      leave_one_out    mean of R over the group's other rows, which makes A = n/(n-1) (R - mean)
      length_weighted  sum(l R) / sum(l) over the group: the optimal one where a row's gradient grows with its length
      max_at_k         for the best of k attempts instead of the mean one, see `max_at_k_advantages`
      global_mean      `running_mean`; where there is none yet, the mean of this batch
      none             0
    and s one of
      none             1
      group            std of R over the group + eps
      batch            std of R over the batch + eps
      whiten           std of R - b over the batch + eps, after its mean over the batch is subtracted
      mean             mean of R over the group + eps; A = 0 where the mean is not above 0 (maximum likelihood)
      beta             density of a Beta distribution at the group's mean, see `beta_scale`

    Exactly 0: a group (or a scale) whose values are equal up to two units in the last place of their dtype, and a group of
    one, under a baseline of its own group.

    Args:
        rewards: one number per row.
        group_ids: which rows belong together; any integers, in any order (or the `Groups` made of them).
        baseline: see above.
        scale: see above.
        std_ddof: divisor n - ddof.
        std_eps: added to the divisor.
        lengths: steps per row, for `length_weighted`.
        k: attempts, for `max_at_k`.
        running_mean: for `global_mean`.

    Returns:
        Advantages in the dtype of `rewards`, computed in float64.

    Raises:
        ConfigError: a baseline without what it needs.
        RewardError: rewards outside [0, 1] under the scale `beta`.

    Example:
        >>> group_relative_advantages(torch.tensor([1., 3., 2., 0., 4.]), torch.tensor([0, 0, 1, 1, 1])).tolist()
        [-1.0, 1.0, 0.0, -2.0, 2.0]

    Source:
        Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2; without the std: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783;
        leave one out: Kool et al. 2019; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740; length_weighted: Hao et al. 2025 (OPO),
        arXiv:2505.23585; whiten: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, eq. 6 to 8; mean: Tajwar et al. 2026
        (MaxRL), arXiv:2602.02710.
    """
    weights = None if lengths is None else as_float64(lengths)
    advantages = _relative(
        as_float64(rewards),
        rounding_of(rewards),
        group_ids if isinstance(group_ids, Groups) else Groups.of(group_ids),
        baseline,
        scale,
        std_ddof,
        std_eps,
        weights,
        k,
        running_mean,
    )
    return torch.from_numpy(advantages).to(rewards)


def _relative(
    rewards: Floats,
    tolerance: float,
    groups: Groups,
    baseline: Baseline,
    scale: Scale,
    std_ddof: int,
    std_eps: float,
    weights: Floats | None = None,
    k: int | None = None,
    running_mean: float | None = None,
) -> Floats:
    """`group_relative_advantages` in float64; `tolerance` is the relative difference that is rounding."""
    if not rewards.size:
        return rewards
    values = groups.gather(rewards)
    weights = None if weights is None else groups.gather(weights)
    constant = groups.spread(is_constant(*groups.extremes(values), tolerance))
    dead = constant if baseline not in ABSOLUTE_BASELINES else np.zeros_like(constant)
    centred = np.where(dead, 0.0, _centre(values, groups, baseline, weights, k, running_mean))
    return groups.scatter(_rescale(centred, values, groups, constant, dead, scale, tolerance, std_ddof, std_eps))


def _centre(
    values: Floats,
    groups: Groups,
    baseline: Baseline,
    weights: Floats | None,
    k: int | None,
    running_mean: float | None,
) -> Floats:
    """R - b, in the groups' order."""
    match baseline:
        case "group_mean":
            return values - groups.spread(groups.means(values))
        case "group_median":
            return values - groups.spread(groups.medians(values))
        case "leave_one_out":
            factors = groups.counts / np.maximum(groups.counts - 1, 1)
            return (values - groups.spread(groups.means(values))) * groups.spread(factors)
        case "length_weighted":
            if weights is None:
                raise ConfigError("baseline='length_weighted' needs lengths=..., the steps of each row.")
            off_mean: Floats = values - groups.spread(groups.means(values))
            totals = groups.means(weights)
            shift = groups.means(weights * off_mean) / np.where(totals > 0, totals, 1.0)
            return off_mean - groups.spread(shift)
        case "max_at_k":
            if k is None:
                raise ConfigError("baseline='max_at_k' needs k=..., the number of attempts.")
            return max_at_k_advantages(values, groups, k)
        case "global_mean":
            return values - (values.mean() if running_mean is None else running_mean)
        case "none":
            return values
        case _:
            assert_never(baseline)


def _rescale(
    centred: Floats,
    values: Floats,
    groups: Groups,
    constant: NDArray[np.bool_],
    dead: NDArray[np.bool_],
    scale: Scale,
    tolerance: float,
    std_ddof: int,
    std_eps: float,
) -> Floats:
    """(R - b) / s, in the groups' order; rows of dead groups, which are 0, stay 0."""
    match scale:
        case "none":
            return centred
        case "group":
            off_mean: Floats = values - groups.spread(groups.means(values))
            peak = np.abs(off_mean).max() or 1.0  # squares of what is at most 1 do not overflow
            squares = groups.means((off_mean / peak) ** 2) * groups.counts
            std: Floats = groups.spread(peak * np.sqrt(squares / np.maximum(groups.counts - std_ddof, 1)) + std_eps)
            return np.where(constant, 0.0, centred / np.where(constant, 1.0, std))
        case "batch":
            return centred / _std(values, tolerance * float(np.abs(values).max()), std_ddof, std_eps)
        case "whiten":
            spread = _std(centred, tolerance * float(np.abs(values).max()), std_ddof, std_eps)
            return np.where(dead, 0.0, (centred - float(centred.mean())) / spread)
        case "mean":
            means: Floats = groups.spread(groups.means(values))
            positive = means > 0
            return np.where(positive, centred / np.where(positive, means + std_eps, 1.0), 0.0)
        case "beta":
            return centred / groups.spread(beta_scale(groups.means(values), values.min(), values.max(), std_ddof))
        case _:
            assert_never(scale)


def _std(values: Floats, rounding: float, ddof: int, eps: float) -> float:
    """Standard deviation + eps over all values; infinite where they differ by no more than rounding: all is 0 then."""
    if values.max() - values.min() <= rounding:
        return math.inf
    deviations = values - values.mean()
    peak = float(np.abs(deviations).max())
    return peak * float((deviations / peak).std(ddof=ddof)) + eps


def max_at_k_advantages(values: Floats, groups: Groups, k: int) -> Floats:
    """How much each row adds to the best of k attempts, on average over the attempts that it could be among.

    A[i] = n / C(n, k) sum over subsets I of k rows of the group that contain i of (max R over I - max R over I without i)

    The mean over the group of A[i] grad log pi(i) is an unbiased estimate of the gradient of E[max of k rewards]: pass@k where
    rewards are 0 and 1. With the values sorted, R_0 <= R_1 <= ..., and j the best of the others: the sum over j < i of
    C(j, k - 2) (R_i - R_j). A group of fewer than k rows is taken with k = n.

    Source:
        Walder & Karkhanis 2025 (PKPO), arXiv:2505.15201, eq. 33, times n for a loss that is a mean over rows.
    """
    advantages = np.zeros_like(values)
    for start, count in zip(groups.starts, groups.counts.tolist(), strict=True):
        attempts = min(k, count)
        if attempts < 2:
            continue
        here = slice(start, start + count)
        order = values[here].argsort(kind="stable")
        ways = np.array([math.comb(j, attempts - 2) / math.comb(count, attempts) for j in range(count - 1)])
        gains = np.cumsum(np.cumsum(ways) * np.diff(values[here][order]))  # sums of the steps from R_j up to R_i
        advantages[start + order[1:]] = count * gains
    return advantages


def beta_scale(means: Floats, lowest: float, highest: float, ddof: int) -> Floats:
    """The density of Beta(1 + a/3, 1 + b/3) at each group's mean reward, Beta(a, b) being fitted to these means by moments.

    a = c m, b = c (1 - m), c = m (1 - m) / v - 1, with m and v the mean and variance of the groups' means. Dividing by it makes
    the gradient's variance smallest where rewards are 0 or 1. At a = b = 0 it is 1; at a = b = 3/2 it is the group's std, up
    to a factor. 1 where there is one group, or no variance to fit; infinite at a mean of 0 or 1, where all rewards are equal.

    Args:
        means: [B] mean reward of each group.
        lowest: of all rewards.
        highest: of all rewards.
        ddof: divisor n - ddof in v.

    Raises:
        RewardError: rewards outside [0, 1].

    Source:
        Xiao et al. 2025 (BNPO), arXiv:2506.02864; parameters are at least 1 and 1/density at most 1e6 as in its code.
    """
    if lowest < 0.0 or highest > 1.0:
        raise RewardError(
            f"advantage.scale='beta' is for rewards in [0, 1]; got {lowest:.4g} to {highest:.4g}. Map them to [0, 1], or use "
            "scale='group'."
        )
    variance = means.var(ddof=ddof) if len(means) > ddof else 0.0
    if variance <= 0.0:
        return np.ones_like(means)
    mean = means.mean()
    fitted = max(mean * (1.0 - mean) / variance - 1.0, 0.0)
    alpha, beta = 1.0 + fitted * mean / 3.0, 1.0 + fitted * (1.0 - mean) / 3.0
    log_norm = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_density = (alpha - 1.0) * np.log(means) + (beta - 1.0) * np.log1p(-means) - log_norm
    inside = (means > 0.0) & (means < 1.0)
    density: Floats = np.where(inside, np.exp(np.where(inside, log_density, 0.0)), math.inf)
    return np.maximum(density, 1.0 / MAX_BETA_WEIGHT)


def decoupled_advantages(
    components: Mapping[str, Float[Tensor, " N"]],
    weights: Mapping[str, float],
    group_ids: Int[Tensor, " N"],
    *,
    std_ddof: int = 1,
    std_eps: float = 0.0,
) -> Float[Tensor, " N"]:
    """Several rewards, each standardised within its groups, then added, then whitened over the batch.

    A[n] = (S[n] - mean S) / (std S + eps),  S[n] = sum_k w_k (R_k[n] - mean of its group) / (std of its group + eps)

    A weighted sum that is normalised afterwards cannot tell which part of it differed; here each part has its say.

    Args:
        components: name -> rewards. NaN: the part does not apply to the row, is left out of its group's mean and std, and
            adds 0.
        weights: name -> w; a name that is missing weighs 1.
        group_ids: which rows belong together.
        std_ddof: divisor n - ddof.
        std_eps: added to each standard deviation.

    Source:
        Liu et al. 2026 (GDPO), arXiv:2601.05242.
    """
    parts = []
    live = np.zeros(len(group_ids), dtype=np.bool_)
    for name, rewards in components.items():
        applies = ~np.isnan(as_float64(rewards))
        part = np.zeros(len(group_ids))
        if applies.any():
            index = torch.from_numpy(np.flatnonzero(applies))
            of_part, ids = rewards[index], group_ids[index]
            part[applies] = weights.get(name, 1.0) * _relative(
                as_float64(of_part), rounding_of(of_part), Groups.of(ids), "group_mean", "group", std_ddof, std_eps
            )
            live[applies] |= live_rows(of_part, ids)
        parts.append(part)
    dtype = min((rewards.dtype for rewards in components.values()), key=lambda dtype: dtype.itemsize)
    total: Floats = np.sum(parts, axis=0)
    rounding = len(parts) * torch.finfo(dtype).eps * float(np.abs(parts).max())
    whitened = (total - float(total.mean())) / _std(total, rounding, std_ddof, std_eps)
    return torch.from_numpy(np.where(live, whitened, 0.0)).to(dtype)


def live_rows(rewards: Float[Tensor, "N *T"], group_ids: Int[Tensor, " N"]) -> NDArray[np.bool_]:
    """Rows whose group has differences; with rewards per step (0 off the mask), on any step."""
    groups = Groups.of(group_ids)
    low, high = groups.extremes(groups.gather(as_float64(rewards)))
    differ = ~is_constant(low, high, rounding_of(rewards))
    live: NDArray[np.bool_] = groups.scatter(groups.spread(differ if differ.ndim == 1 else differ.any(1)))
    return live


def group_statistics(rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"] | Groups) -> dict[str, float]:
    """Number of groups, their mean size, and the fraction without differences (groups of one included)."""
    groups = group_ids if isinstance(group_ids, Groups) else Groups.of(group_ids)
    num_groups = len(groups.counts)
    low, high = groups.extremes(groups.gather(as_float64(rewards)))
    num_constant = float(np.count_nonzero(is_constant(low, high, rounding_of(rewards))))
    return {
        "group_stats/num_groups": float(num_groups),
        "group_stats/avg_group_size": len(rewards) / num_groups,
        "group_stats/zero_variance_fraction": num_constant / num_groups,
    }
