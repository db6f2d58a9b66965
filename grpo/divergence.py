"""KL to the reference and entropy: estimates per step [N, T], differentiated by autograd.

With x = log pi(step) - log pi_ref(step), each `kl_*` estimates KL(pi || ref) from the sampled step alone. An estimator with the
right value may have a wrong gradient, so each docstring states the estimator's expected gradient over on-policy steps.
"""

from typing import Literal, assert_never

from jaxtyping import Float
from torch import Tensor

from ._common.tensors import require_tensors
from ._objective.ratios import MAX_LOG_RATIO

SampledKL = Literal["k1", "k2", "k3", "k3_weighted"]
KLEstimator = Literal["k1", "k2", "k3", "k3_weighted", "exact"]
EntropyEstimator = Literal["exact", "score_function"]


def kl_k1(x: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """k1 = x: unbiased, with high variance; may be negative.

    Gradient: **zero** in expectation, since E[grad log pi] = 0. Report it; do not train on it.

    Source:
        Schulman 2020, "Approximating KL Divergence".
    """
    require_tensors(kl_k1, x=x)
    return x


def kl_k2(x: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """k2 = x^2 / 2: biased, with low variance.

    Gradient: E[x grad log pi], which is exactly the gradient of KL(pi || ref).

    Source:
        Schulman 2020, "Approximating KL Divergence".
    """
    require_tensors(kl_k2, x=x)
    return 0.5 * x.square()


def kl_k3(x: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """k3 = exp(-x) + x - 1: unbiased, never negative, with low variance near the reference.

    Gradient: the gradient of KL(ref || pi), which keeps every action alive that the reference takes. x is clamped to at least
    -20, so a step that is more than e^20 times likelier under the reference has no gradient.

    Example:
        >>> import torch
        >>> kl_k3(torch.tensor([[0.0, 1.0]])).tolist()  # exp(-1) + 1 - 1 = 0.3679
        [[0.0, 0.3678794503211975]]

    Source:
        Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, eq. 4.
    """
    require_tensors(kl_k3, x=x)
    x = x.clamp(min=-MAX_LOG_RATIO)
    return (-x).expm1() + x  # exp(-x) - 1 would lose its digits near x = 0


def kl_k3_weighted(x: Float[Tensor, "N T"], ratio: Float[Tensor, "N #T"]) -> Float[Tensor, "N T"]:
    """rho k3, with rho = pi / pi_old: unbiased also for steps that an older policy sampled.

    Gradient: exactly the gradient of KL(pi || ref), if rho is the step's own ratio.

    Source:
        DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, sec. 3.1.
    """
    require_tensors(kl_k3_weighted, x=x, ratio=ratio)
    return ratio * kl_k3(x)


def estimate_kl(estimator: SampledKL, x: Float[Tensor, "N T"], ratio: Float[Tensor, "N #T"]) -> Float[Tensor, "N T"]:
    """Estimate KL(pi || ref) per step with the estimator of the given name."""
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


def score_function_entropy(log_probs: Float[Tensor, "N T"], ratio: Float[Tensor, "N #T"]) -> Float[Tensor, "N T"]:
    """h = -rho sg(log pi): an estimate of the entropy whose gradient is right in expectation.

    H = -E_old[rho log pi], so grad H = -E_old[rho (log pi + 1) grad log pi], and the 1 vanishes in expectation. The plain
    -log pi has the right value and a gradient of **zero** in expectation, so it has no effect as a bonus.

    `grpo_objective` multiplies h by the weights of the sampler correction. E_old is then that of the sampler's distribution.

    Args:
        log_probs: Log-probs of the sampled steps.
        ratio: The ratio rho = pi / pi_old of each step, not of the row.

    Source:
        Williams 1992, "Simple statistical gradient-following algorithms", with f = -log pi.
    """
    require_tensors(score_function_entropy, log_probs=log_probs, ratio=ratio)
    return -ratio * log_probs.detach()  # the gradient is that of the ratio alone
