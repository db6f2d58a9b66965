"""Correcting for a sampler that is not quite the policy: another engine, another precision, truncated or older."""

from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from .ratios import bounded_exp, mean_over_steps

SamplerCorrection = Literal["none", "truncate", "mask"]
SamplerRatioLevel = Literal["step", "row"]


def sampler_weights(
    old_log_probs: Float[Tensor, "N T"],
    behaviour_log_probs: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    correction: SamplerCorrection,
    level: SamplerRatioLevel = "step",
    low: float | None = None,
    high: float | None = None,
) -> Float[Tensor, "N #T"]:
    """Importance weights from what sampled each step to the policy before this iteration's updates.

    u[n,t] = exp(old_log_probs - behaviour_log_probs), or one weight per row: u[n] = exp(the sum of these over its steps)
      none      1
      truncate  clip(u, low, high)         bounded bias for bounded variance
      mask      u if low <= u <= high else 0

    E_behaviour[u f] = E_old[f], so that without bounds the policy gradient is the one its own samples would give.

    Args:
        old_log_probs: no gradient is taken through it.
        behaviour_log_probs: under the distribution actually drawn from; NaN: unscored, weight 1.
        mask: valid steps; elsewhere the weight is 1, whatever the inputs hold.
        correction: see above.
        level: a weight per step is biased and of low variance; one per row is exact where nothing bounds it.
        low: smallest weight; None: no bound.
        high: largest weight; None: no bound. Larger corrects more, and lets single steps weigh more.

    Example:
        >>> old, behaviour = torch.tensor([[0.8, 0.1]]).log(), torch.tensor([[0.2, 0.2]]).log()
        >>> everywhere = torch.ones(1, 2, dtype=torch.bool)
        >>> sampler_weights(old, behaviour, everywhere, correction="truncate", high=3.0).round(decimals=2).tolist()
        [[3.0, 0.5]]

    Source:
        Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (truncated importance
        sampling); truncation: Ionides 2008.
    """
    scored = mask & ~behaviour_log_probs.isnan()
    log_ratio = torch.where(scored, old_log_probs.detach() - behaviour_log_probs, 0.0)
    match level:
        case "step":
            pass
        case "row":
            log_ratio = log_ratio.sum(1, keepdim=True)
        case _:
            assert_never(level)
    ratio = bounded_exp(log_ratio).value
    match correction:
        case "none":
            return torch.ones_like(ratio)
        case "truncate":
            return ratio if low is None and high is None else ratio.clamp(low, high)
        case "mask":
            inside = torch.ones_like(ratio, dtype=torch.bool)
            if low is not None:
                inside = inside & (ratio >= low)
            if high is not None:
                inside = inside & (ratio <= high)
            return torch.where(inside, ratio, 0.0)
        case _:
            assert_never(correction)


def sampler_divergence(
    old_log_probs: Float[Tensor, "N T"], behaviour_log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
) -> Float64[Tensor, "3"]:
    """How far the policy is from what sampled: KL(behaviour || old) per step, as (count, sum, sum of squares).

    D = mean over scored steps of behaviour_log_probs[n,t] - old_log_probs[n,t]

    Rounding changes it in second order only, a truncation that keeps the share m of the policy in first order: by -log m.

    Args:
        old_log_probs: before this iteration's updates; no gradient is taken through it.
        behaviour_log_probs: under the distribution actually drawn from; NaN: unscored, not counted.
        mask: the valid steps.

    Example:
        >>> everywhere = torch.ones(1, 2, dtype=torch.bool)
        >>> old, behaviour = torch.tensor([[0.5, 0.4]]).log(), torch.tensor([[0.5, 0.5]]).log()
        >>> [round(value, 3) for value in sampler_divergence(old, behaviour, everywhere).tolist()]
        [2.0, 0.223, 0.05]
    """
    scored = mask & ~behaviour_log_probs.isnan()
    gap = torch.where(scored, behaviour_log_probs - old_log_probs.detach(), 0.0).double()
    return torch.stack([scored.sum(dtype=torch.float64), gap.sum(), gap.square().sum()])


def on_policy_rows(
    log_probs: Float[Tensor, "N T"],
    sampled_log_probs: Float[Tensor, "N T"],
    advantages: Float[Tensor, "N #T"],
    mask: Bool[Tensor, "N T"],
    threshold: float,
) -> Bool[Tensor, "N #T"]:
    """Rows near enough to what sampled them to learn from; those with A >= 0 always are.

    m[n,t] = A[n,t] >= 0 or mean over steps of (sampled_log_probs - log_probs) <= threshold

    A bad row that the policy has moved away from already says little about the policy, and pushes it further.

    Args:
        log_probs: now; no gradient is taken through it.
        sampled_log_probs: under what sampled the steps, or before this iteration's updates; NaN: unscored, no difference.
        advantages: how much better than its baseline.
        mask: the valid steps.
        threshold: larger keeps rows that are further off.

    Source:
        DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, sec. 3.1, eq. 9.
    """
    known = mask & ~sampled_log_probs.isnan()
    distance = torch.where(known, sampled_log_probs - log_probs.detach(), 0.0)
    return (advantages >= 0) | (mean_over_steps(distance, mask) <= threshold)
