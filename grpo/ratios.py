"""How much likelier each step has become: probability ratios at the level of steps or of whole rows."""

from typing import Literal, NamedTuple, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .divergence import MAX_LOG_RATIO, may_exceed_bounds

RatioLevel = Literal["step", "row", "row_sum", "row_step", "none"]


class Ratio(NamedTuple):
    """rho = exp(x) of a log-ratio x that is bounded to +-20 first."""

    value: Float[Tensor, "N #T"]
    slope: Float[Tensor, "N #T"]
    """d rho / dx: rho, and 0 beyond the bounds."""
    beyond: Float[Tensor, "N #T"] | None = None
    """1 where x is beyond the bounds, else 0; None: nowhere."""


def bounded_exp(log_ratio: Float[Tensor, "N #T"]) -> Ratio:
    """exp of a log-ratio that is bounded to +-20 first; beyond the bounds the slope is 0."""
    if not may_exceed_bounds(log_ratio):
        value = log_ratio.exp()
        return Ratio(value, value)
    value = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    beyond = (log_ratio.abs() > MAX_LOG_RATIO).to(value.dtype)
    return Ratio(value, value * (1.0 - beyond), beyond)


def log_ratio_at_level(
    log_ratio: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], level: RatioLevel
) -> Float[Tensor, "N #T"]:
    """The logarithm of the ratio that the surrogate uses, from x[n,t] = log_probs - old_log_probs.

      step      x[n,t]                               PPO, GRPO
      row       mean of x over the row's steps       GSPO: one ratio per row, as its geometric mean over steps
      row_sum   sum of x over the row's steps        the importance weight of the whole row
      row_step  value of `row`, slope of `step`      GSPO-token: for advantages that differ within a row
      none      value 0, slope of `step`             no importance weight: REINFORCE

    Args:
        log_ratio: x, 0 off the mask.
        mask: the valid steps.
        level: see above.

    Returns:
        [N, T], or [N, 1] for one ratio per row.

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
            return torch.where(mask, mean_over_steps(log_ratio, mask), 0.0)
        case "none":
            return torch.zeros_like(log_ratio)
        case _:
            assert_never(level)


def slope_by_steps(slope: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], level: RatioLevel) -> Float[Tensor, "N T"]:
    """What slopes in the log-ratios of a level are in the log-ratio x of each step: `log_ratio_at_level`, backwards.

      step, row_step, none   s[n,t]
      row                    sum of s over the row's steps, divided by their number, at each of them
      row_sum                sum of s over the row's steps, at each of them

    Args:
        slope: s, the weighted slope of each step's loss, 0 off the mask.
        mask: the valid steps.
        level: that of the log-ratio s is a slope in.

    Example:
        >>> everywhere = torch.ones(1, 2, dtype=torch.bool)
        >>> slope_by_steps(torch.tensor([[1.0, 2.0]]), everywhere, "row").tolist()
        [[1.5, 1.5]]
    """
    match level:
        case "step" | "row_step" | "none":
            return slope
        case "row":
            return torch.where(mask, mean_over_steps(slope, mask), 0.0)
        case "row_sum":
            return torch.where(mask, slope.sum(1, keepdim=True), 0.0)
        case _:
            assert_never(level)


def mean_over_steps(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N 1"]:
    """Mean over each row's valid steps of values that are 0 off the mask; 0 for a row without steps."""
    return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
