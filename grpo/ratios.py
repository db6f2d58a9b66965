"""How much likelier each step has become: probability ratios at the level of steps or of whole rows."""

from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import hardtanh

from .divergence import MAX_LOG_RATIO

RatioLevel = Literal["step", "row", "row_sum", "row_step", "none"]


def log_ratio_at_level(
    log_ratio: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], level: RatioLevel
) -> Float[Tensor, "N #T"]:
    """The logarithm of the ratio that the surrogate uses, from x[n,t] = log_probs - old_log_probs.

      step      x[n,t]                               PPO, GRPO
      row       mean of x over the row's steps       GSPO: one ratio per row, as its geometric mean over steps
      row_sum   sum of x over the row's steps        the importance weight of the whole row
      row_step  value of `row`, gradient of `step`   GSPO-token: for advantages that differ within a row
      none      value 0, gradient of `step`          no importance weight: REINFORCE

    Args:
        log_ratio: x, 0 off the mask.
        mask: the valid steps.
        level: see above.

    Returns:
        [N, T], or [N, 1] for one ratio per row; with gradient.

    Source:
        Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 7, and eq. 14 for `row_step`.
    """
    match level:
        case "step":
            return log_ratio
        case "row":
            return mean_over_steps(log_ratio, mask)
        case "row_sum":
            return log_ratio.sum(1, keepdim=True)
        case "row_step":
            return torch.where(mask, mean_over_steps(log_ratio, mask), 0.0).detach() + (log_ratio - log_ratio.detach())
        case "none":
            return log_ratio - log_ratio.detach()
        case _:
            assert_never(level)


def bounded_exp(log_ratio: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
    """exp of a log-ratio that is bounded to +-20 first; beyond the bounds the gradient is 0."""
    # hardtanh is a clamp with a backward pass of a fifth of the time
    return hardtanh(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mean_over_steps(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N 1"]:
    """Mean over each row's valid steps of values that are 0 off the mask; 0 for a row without steps."""
    return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
