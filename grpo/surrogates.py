"""Per-step policy losses, unreduced, and their slopes.

Each takes ratios rho = pi / pi_old ([N, T], or [N, 1] for one per row), log-probabilities where its gradient goes through
them, and advantages (broadcast over steps), and returns a loss per step with its slope in what it goes through; only
`grpo_objective` sums. At rho = 1 each pushes as REINFORCE does, by -A: they differ in what they do once the policy has moved.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import hardshrink

from .ratios import bounded_exp, mean_over_steps
from .step_loss import StepLoss, times

Surrogate = Literal["clip", "none", "cispo", "sapo", "gmpo", "vespo", "dro", "dppo_tv", "kl_cov", "clip_cov"]

ROUNDING = 1e-6
"""Log-ratios up to this are those of two forwards of the same policy, not of a policy that has moved."""

MIN_LOG_VESPO_WEIGHT = math.log(1e-8)
"""VESPO's importance weights are bounded below by this before their powers are taken."""


def clipped_surrogate(
    ratio: Float[Tensor, "N #T"],
    advantages: Float[Tensor, "N #T"],
    *,
    clip_low: float,
    clip_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> StepLoss:
    """Per-step PPO surrogate, clipped to a trust region.

    l[n,t] = -min(rho[n,t] A[n,t], clip(rho[n,t], 1 - low, 1 + high) A[n,t])

    Slope in rho: -A inside the region, and exactly 0 once the step has already moved past the bound its advantage pushes
    towards: above 1 + high for A > 0, below 1 - low for A < 0. Two further bounds hold where A < 0 and the ratio is large,
    where the loss above has no bound: `delta` replaces the unclipped rho by min(rho, delta), and `dual_clip` bounds the loss
    by -c A.

    Args:
        ratio: pi / pi_old.
        advantages: how much better than its baseline; [N, 1] or [N, T].
        clip_low: distance below 1; larger lets bad actions become rarer within one iteration, 1 is no lower bound.
        clip_high: distance above 1; larger lets good actions become more likely within one iteration.
        delta: absolute bound on the unclipped ratio, above 1 + high; smaller forgets more of what went badly wrong.
        dual_clip: c > 1, the same idea as a bound on the loss.

    Example:
        >>> ratio, advantages = torch.tensor([[1.5, 1.5], [0.5, 0.5]]), torch.tensor([[1.0, -1.0], [1.0, -1.0]])
        >>> clipped = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2)
        >>> clipped.loss.tolist(), clipped.by_ratio.tolist()
        ([[-1.2000000476837158, 1.5], [-0.5, 0.800000011920929]], [[-0.0, 1.0], [-1.0, 0.0]])

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; separate bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 8;
        delta: Prime Intellect 2025 (INTELLECT-2), arXiv:2505.07291;
        dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    low, high = clip_bounds(advantages, clip_low, clip_high)
    beyond = min(bound for bound in (delta, dual_clip, math.inf) if bound is not None)
    if beyond < math.inf:
        high = torch.where(advantages < 0, beyond, high)
    clipped = torch.minimum(torch.maximum(ratio, low), high)
    moves = clipped.clone().eq_(ratio)
    return StepLoss(times(clipped, -advantages), by_ratio=times(moves, -advantages))


def clip_bounds(
    advantages: Float[Tensor, "N #T"], clip_low: float, clip_high: float
) -> tuple[Float[Tensor, "N #T"], Float[Tensor, "N #T"]]:
    """Between which ratios PPO's minimum follows the ratio: from 1 - low where A < 0, up to 1 + high where A > 0.

    min(rho A, clip(rho, 1 - low, 1 + high) A) = A clip(rho, lowest, highest) with the bound that A pushes towards, and none on
    the other side: one clamp in place of two products and a minimum, and the slope is 0 wherever the clamp has moved rho.
    """
    lowest = _either(advantages < 0, 1.0 - clip_low, -math.inf, advantages.dtype)
    highest = _either(advantages > 0, 1.0 + clip_high, math.inf, advantages.dtype)
    return lowest, highest


def reinforce_surrogate(log_probs: Float[Tensor, "N T"], advantages: Float[Tensor, "N #T"]) -> StepLoss:
    """l[n,t] = -A[n,t] log_probs[n,t], of slope -A[n,t]: the policy gradient without an importance weight.

    Source:
        Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
    """
    return StepLoss(-advantages * log_probs, by_log_prob=-advantages)


def cispo_surrogate(
    ratio: Float[Tensor, "N #T"],
    log_probs: Float[Tensor, "N T"],
    advantages: Float[Tensor, "N #T"],
    *,
    clip_low: float,
    clip_high: float,
) -> StepLoss:
    """CISPO: a bounded importance weight on REINFORCE, so that every step keeps a gradient.

    l[n,t] = -sg(clip(rho[n,t], 1 - low, 1 + high)) A[n,t] log_probs[n,t]

    Slope in log_probs: -clip(rho[n,t], 1 - low, 1 + high) A[n,t], never 0 but with A.

    Args:
        ratio: pi / pi_old.
        log_probs: log pi.
        advantages: how much better than its baseline.
        clip_low: distance below 1; 1 is no lower bound, as in the paper.
        clip_high: distance above 1, not the bound itself: a bound of 5 is clip_high=4.

    Source:
        MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5.
    """
    push = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    push = times(push, -advantages)
    return StepLoss(push * log_probs, by_log_prob=push)


def sapo_surrogate(
    ratio: Float[Tensor, "N #T"],
    advantages: Float[Tensor, "N #T"],
    *,
    temperature_pos: float,
    temperature_neg: float,
) -> StepLoss:
    """SAPO: a smooth gate in place of a hard clip.

    l[n,t] = -(4 / tau) sigmoid(tau (rho[n,t] - 1)) A[n,t],  tau = temperature_pos where A > 0, else temperature_neg

    Slope in rho, with s for the sigmoid: -4 s (1 - s) A, which is -A at rho = 1 and falls off on both sides.

    Args:
        ratio: pi / pi_old.
        advantages: how much better than its baseline.
        temperature_pos: larger lets good actions move less far.
        temperature_neg: larger lets bad actions move less far.

    Source:
        Gao et al. 2025 (SAPO), arXiv:2511.20347.
    """
    tau = _either(advantages > 0, temperature_pos, temperature_neg, ratio.dtype)
    gate = (tau * ratio).sub_(tau).sigmoid_()
    by_ratio: Tensor = torch.ops.aten.sigmoid_backward.default(-4.0 * advantages, gate)  # -4 A s (1 - s), in one pass
    return StepLoss(times(gate, advantages * (-4.0 / tau)), by_ratio=by_ratio)


def gmpo_surrogate(
    log_ratio: Float[Tensor, "N T"],
    advantages: Float[Tensor, "N #T"],
    mask: Bool[Tensor, "N T"],
    *,
    clip_low: float,
    clip_high: float,
) -> StepLoss:
    """GMPO: the geometric mean over a row's steps of their clipped ratios, which single outliers hardly move.

    l[n,t] = -A[n,t] exp(mean over steps s of c[n,s]),
      c = min(x, log(1 + high)) where A > 0, max(x, log(1 - low)) where A <= 0,  x = log_probs - old_log_probs

    Slope in the row's mean: l itself. A step moves that mean by 1 / (number of steps) where c = x, and not where it is bounded.

    Args:
        log_ratio: x per step, 0 off the mask.
        advantages: how much better than its baseline.
        mask: the valid steps.
        clip_low: distance of the bound below 1; the paper's exp(-0.4) is 0.33.
        clip_high: distance of the bound above 1; the paper's exp(0.4) is 0.49.

    Source:
        Zhao et al. 2025 (GMPO), arXiv:2507.20673.
    """
    low = math.log1p(-clip_low) if clip_low < 1.0 else -math.inf
    pessimistic = torch.where(advantages > 0, log_ratio.clamp(max=math.log1p(clip_high)), log_ratio.clamp(min=low))
    mean = bounded_exp(mean_over_steps(pessimistic, mask))
    free = (pessimistic == log_ratio) & mask
    return StepLoss(-advantages * mean.value, by_row_mean=-advantages * mean.slope, free=free.to(log_ratio.dtype))


def vespo_surrogate(
    log_weight: Float[Tensor, "N 1"],
    log_probs: Float[Tensor, "N T"],
    advantages: Float[Tensor, "N #T"],
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> StepLoss:
    """VESPO: REINFORCE under a smooth kernel of the row's importance weight w, in place of a clip.

    l[n,t] = -sg(phi(w[n])) A[n,t] log_probs[n,t],  phi(w) = w^k exp(lambda (1 - w)),  so that phi(1) = 1

    Slope in log_probs: -phi(w[n]) A[n,t].

    Args:
        log_weight: log w, the sum over the row's steps of log_probs - old_log_probs (plus log-weights that correct for the
            sampler).
        log_probs: log pi.
        advantages: how much better than its baseline.
        k_pos: where A >= 0; larger discounts rows more that have become rarer.
        lambda_pos: where A >= 0; larger discounts rows more that have become more likely.
        k_neg: `k_pos` where A < 0.
        lambda_neg: `lambda_pos` where A < 0.

    Source:
        Shen et al. 2026 (VESPO), arXiv:2602.10693.
    """
    log_w = log_weight.clamp(min=MIN_LOG_VESPO_WEIGHT)
    good = advantages >= 0
    k = _either(good, k_pos, k_neg, log_w.dtype)
    rate = _either(good, lambda_pos, lambda_neg, log_w.dtype)
    push = -(rate + k * log_w - rate * log_w.exp()).exp() * advantages
    return StepLoss(push * log_probs, by_log_prob=push)


def dro_surrogate(
    log_ratio: Float[Tensor, "N #T"],
    log_probs: Float[Tensor, "N T"],
    advantages: Float[Tensor, "N #T"],
    *,
    beta: float,
) -> StepLoss:
    """DRO per step: REINFORCE with a quadratic pull towards the old policy instead of an importance weight.

    l[n,t] = -A[n,t] log_probs[n,t] + beta / 2 (log rho[n,t])^2

    Slopes: -A[n,t] in log_probs, and beta log rho[n,t] in log rho.

    Args:
        log_ratio: log rho.
        log_probs: log pi.
        advantages: how much better than its baseline.
        beta: larger stays closer to the policy that sampled.

    Source:
        Richemond et al. 2024 (DRO), arXiv:2405.19107, eq. 4, per step instead of per row, anchored to the old policy instead of
        a reference, and without its learned value.
    """
    loss = -advantages * log_probs + 0.5 * beta * log_ratio.square()
    return StepLoss(loss, by_log_prob=-advantages, by_log_ratio=beta * log_ratio)


def dppo_tv_surrogate(
    ratio: Float[Tensor, "N #T"],
    log_probs: Float[Tensor, "N T"],
    sampled_log_probs: Float[Tensor, "N T"],
    advantages: Float[Tensor, "N #T"],
    *,
    tv_limit: float,
) -> StepLoss:
    """DPPO with binary total variation: a step leaves the loss when its *probability* has moved too far, not its ratio.

    l[n,t] = -m[n,t] rho[n,t] A[n,t],  m = 0 where pi - mu > limit and A > 0, and where mu - pi > limit and A < 0, else 1

    with mu the probability the step was sampled with. Slope in rho: -m[n,t] A[n,t].

    The paper's ratio is pi / mu as well: with a sampler that is not the policy, correct for it (`sampler_correction`). For
    probabilities alone: a density may be larger than 1, and a difference of densities is no distance.

    Args:
        ratio: pi / pi_old.
        log_probs: log pi of the sampled steps.
        sampled_log_probs: log mu.
        advantages: how much better than its baseline.
        tv_limit: larger lets a step's probability move further.

    Source:
        Qi et al. 2026 (DPPO), arXiv:2602.04879, eq. 12 and 13.
    """
    moved = log_probs.exp() - sampled_log_probs.exp()
    stopped = torch.where(advantages > 0, moved > tv_limit, (advantages < 0) & (moved < -tv_limit))
    by_ratio = torch.where(stopped, 0.0, -advantages)
    return StepLoss(ratio * by_ratio, by_ratio=by_ratio)


def kl_cov_surrogate(
    ratio: Float[Tensor, "N #T"],
    log_ratio: Float[Tensor, "N #T"],
    advantages: Float[Tensor, "N #T"],
    penalised: Bool[Tensor, "N T"],
    *,
    coef: float,
) -> StepLoss:
    """KL-Cov: no clip, but a pull back on the few steps that would cost the most entropy.

    l[n,t] = -rho[n,t] A[n,t] + coef |log rho[n,t]| where penalised, -rho[n,t] A[n,t] elsewhere

    Slopes: -A[n,t] in rho, and in log rho coef sign(log rho[n,t]) where penalised: full, however little it is off 0.

    Args:
        ratio: pi / pi_old.
        log_ratio: log rho.
        advantages: how much better than its baseline.
        penalised: the steps of largest covariance, see `grpo.selection.largest_covariances`.
        coef: larger holds those steps closer.

    Source:
        Cui et al. 2025, arXiv:2505.22617.
    """
    moved = torch.where(penalised, hardshrink(log_ratio, ROUNDING), 0.0)  # the sign of what is rounding would push too
    return StepLoss(-ratio * advantages + coef * moved.abs(), by_ratio=-advantages, by_log_ratio=coef * moved.sign())


def _either(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """One of two numbers, not rounded on the way to the default dtype, as `torch.where` does with plain floats."""
    if dtype == torch.get_default_dtype():
        return torch.where(condition, yes, no)
    return torch.where(condition, yes, torch.full((), no, dtype=dtype, device=condition.device))
