"""Probability ratios: how much more likely each step has become, at the level of steps or of whole rows."""

from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo.types import zero_outside

RatioLevel = Literal["step", "row", "row_sum", "row_step", "none"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: exp(20) = 5e8 is beyond every clip bound and far from overflow."""


def log_ratio_at_level(x: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], level: RatioLevel) -> Float[Tensor, "N #T"]:
    """The logarithm of the ratio that a surrogate uses, from x[n,t] = log_probs - old_log_probs.

      step      x[n,t]                                PPO, GRPO
      row       mean of x over the row's steps        GSPO: one ratio per row, the geometric mean over its steps
      row_sum   sum of x over the row's steps         the importance weight of the whole row
      row_step  value of `row`, gradient of `step`    GSPO-token: for advantages that differ within a row
      none      value 0, gradient of `step`           no importance weight: REINFORCE

    Returns:
        [N, T], or [N, 1] for one ratio per row. Not clamped.

    Source:
        Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 7, and eq. 14 for `row_step`.
    """
    match level:
        case "step":
            return x
        case "row":
            return mean_over_steps(x, mask)
        case "row_sum":
            return x.sum(1, keepdim=True)
        case "row_step":
            return zero_outside(mean_over_steps(x.detach(), mask), mask) + (x - x.detach())
        case "none":
            return x - x.detach()
        case _:
            assert_never(level)


def bounded_exp(log_ratio: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
    """exp of a log-ratio that is clamped to +-20 first. Clamped log-ratios have no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mean_over_steps(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N 1"]:
    """Mean over each row's valid steps of values that are 0 outside the mask; 0 for a row without valid steps."""
    return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def past_bounds(
    rho: Float[Tensor, "N #T"], advantages: Float[Tensor, "N #T"], low: float, high: float
) -> tuple[Bool[Tensor, "N #T"], Bool[Tensor, "N #T"]]:
    """Find the ratios outside the clip range on the side of the advantage: < 1 - low where A < 0, > 1 + high where A > 0."""
    return (advantages < 0) & (rho < 1 - low), (advantages > 0) & (rho > 1 + high)


def either(condition: Bool[Tensor, "N #T"], yes: float, no: float, *, like: Tensor) -> Float[Tensor, "N #T"]:
    """torch.where for two Python numbers, in the dtype of `like`. torch.where itself would round the numbers to float32."""
    return torch.where(condition, torch.full_like(like, yes), no)
