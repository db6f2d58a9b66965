"""Correcting for a sampler that is not quite the policy: another engine, another precision, truncated or older."""

from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .divergence import MAX_LOG_RATIO

SamplerCorrection = Literal["none", "truncate", "mask"]


def sampler_weights(
    old_log_probs: Float[Tensor, "N T"],
    behaviour_log_probs: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    correction: SamplerCorrection,
    low: float | None = None,
    high: float | None = None,
) -> Float[Tensor, "N T"]:
    """Importance weights from what sampled each step to the policy before this iteration's updates.

    u[n,t] = exp(old_log_probs - behaviour_log_probs)
      none      1
      truncate  clip(u, low, high)         bounded bias for bounded variance
      mask      u if low <= u <= high else 0

    E_behaviour[u f] = E_old[f], so that without bounds the policy gradient is the one its own samples would give.

    Args:
        old_log_probs: no gradient is taken through it.
        behaviour_log_probs: under the distribution actually drawn from; NaN: unscored, weight 1.
        mask: valid steps; elsewhere the weight is 1, whatever the inputs hold.
        correction: see above.
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
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    match correction:
        case "none":
            return torch.ones_like(ratio)
        case "truncate":
            return ratio if low is None and high is None else ratio.clamp(low, high)
        case "mask":
            inside = torch.ones_like(mask)
            if low is not None:
                inside = inside & (ratio >= low)
            if high is not None:
                inside = inside & (ratio <= high)
            return torch.where(inside, ratio, 0.0)
        case _:
            assert_never(correction)
