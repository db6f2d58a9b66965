"""How far the policy is from its reference, and how spread out it is: per-step estimates [N, T], unreduced.

With x = log pi(step) - log pi_ref(step), each `kl_*` estimates KL(pi || ref) from the sampled step alone, and gives the
slope of that estimate. What they are as *loss terms* differs from what they are as numbers: see each gradient note (on-policy,
in expectation over steps).
"""

from typing import Literal, assert_never

import torch
from jaxtyping import Float
from torch import Tensor

from .masking import reads_at_once
from .step_loss import StepLoss

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded by this before exp: exp(20) = 5e8 is beyond every clip bound and far from overflow."""

SampledKL = Literal["k1", "k2", "k3", "k3_weighted"]
KLEstimator = Literal["k1", "k2", "k3", "k3_weighted", "exact"]


def may_exceed_bounds(log_ratio: Float[Tensor, "N #T"]) -> bool:
    """Whether some log-ratio may be beyond +-20, or be no number. Where to look would be to wait for a device: True."""
    if not reads_at_once(log_ratio) or not log_ratio.numel():
        return True
    low, high = torch.aminmax(log_ratio.detach())
    return not (low.item() >= -MAX_LOG_RATIO and high.item() <= MAX_LOG_RATIO)


def kl_k1(x: Float[Tensor, "N T"]) -> StepLoss:
    """k1 = x: unbiased, of high variance, may be negative. Slope: 1.

    Gradient: **zero** in expectation, since E[grad log pi] = 0. Report it; do not train on it.

    Source:
        Schulman 2020, "Approximating KL Divergence".
    """
    return StepLoss(x, by_log_prob=torch.ones_like(x))


def kl_k2(x: Float[Tensor, "N T"]) -> StepLoss:
    """k2 = x^2 / 2: biased as a number, low variance. Slope: x.

    Gradient: E[x grad log pi], which is exactly that of KL(pi || ref).

    Source:
        Schulman 2020, "Approximating KL Divergence".
    """
    return StepLoss(0.5 * x.square(), by_log_prob=x)


def kl_k3(x: Float[Tensor, "N T"]) -> StepLoss:
    """k3 = exp(-x) + x - 1: unbiased, never negative, low variance near the reference. Slope: 1 - exp(-x).

    Gradient: that of KL(ref || pi), which keeps every action alive that the reference takes. Where the reference finds a
    step e^20 times likelier than the policy, both value and slope stop: the one stays, the other is 0.

    Source:
        Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, eq. 4.
    """
    if not may_exceed_bounds(x):
        grown = x.neg().expm1()
        return StepLoss(grown + x, by_log_prob=-grown)
    bounded = x.clamp(min=-MAX_LOG_RATIO)
    grown = torch.expm1(-bounded)
    return StepLoss(grown + bounded, by_log_prob=-grown * (x >= -MAX_LOG_RATIO))


def kl_k3_weighted(x: Float[Tensor, "N T"], ratio: Float[Tensor, "N #T"]) -> StepLoss:
    """rho k3, with rho = pi / pi_old: unbiased also for steps that an older policy sampled.

    Slopes: rho (1 - exp(-x)) in x, and k3 in rho. Gradient: exactly that of KL(pi || ref), where rho is the step's own ratio.

    Source:
        DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, sec. 3.1.
    """
    k3 = kl_k3(x)
    assert k3.by_log_prob is not None
    return StepLoss(ratio * k3.loss, by_log_prob=ratio * k3.by_log_prob, by_ratio=k3.loss)


def estimate_kl(estimator: SampledKL, x: Float[Tensor, "N T"], ratio: Float[Tensor, "N #T"]) -> StepLoss:
    """The chosen estimate of KL(pi || ref) per step."""
    match estimator:
        case "k1":
            return kl_k1(x)
        case "k2":
            return kl_k2(x)
        case "k3":
            return kl_k3(x)
        case "k3_weighted":
            return kl_k3_weighted(x, ratio)
        case _:
            assert_never(estimator)


def score_function_entropy(log_probs: Float[Tensor, "N T"], ratio: Float[Tensor, "N #T"]) -> StepLoss:
    """h = -rho log pi, of slope -log pi in rho and none in log pi: an entropy whose gradient is right in expectation.

    H = -E_old[rho log pi], so grad H = -E_old[rho (log pi + 1) grad log pi], and the 1 vanishes in expectation. The plain
    -log pi has the right value and a gradient of **zero** in expectation: as a bonus it does nothing.

    Args:
        log_probs: of the sampled steps.
        ratio: rho = pi / pi_old, of each step alone.

    Source:
        Williams 1992, "Simple statistical gradient-following algorithms", with f = -log pi.
    """
    by_ratio = -log_probs
    return StepLoss(ratio * by_ratio, by_ratio=by_ratio)
