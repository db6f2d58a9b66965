"""What every term of the objective is made of: a loss per step, and how hard it pushes each step."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class StepLoss(NamedTuple):
    """A loss per step, unreduced, and its slopes in closed form: the derivatives that it has with respect to what it reads.

    The slope is what a variant is: minus the push that a step gets. A loss of several arguments has a slope in each, and the
    push is the sum of what they pass on to the log-probs. None: that argument is not read, or no gradient is taken through it.

    Slopes belong to the receiver, who may overwrite them.
    """

    loss: Float[Tensor, "N #T"]
    """The value, or the same for all steps of a row."""
    by_log_prob: Float[Tensor, "N #T"] | None = None
    """Slope in the step's own log-prob."""
    by_ratio: Float[Tensor, "N #T"] | None = None
    """Slope in rho, the ratio."""
    by_log_ratio: Float[Tensor, "N #T"] | None = None
    """Slope in log rho, unbounded."""
    by_row_mean: Float[Tensor, "N #T"] | None = None
    """Slope in the mean of the row's bounded log-ratios (GMPO)."""
    free: Float[Tensor, "N T"] | None = None
    """Beside `by_row_mean`: 1 where a step's log-ratio is inside its bounds, and moves that mean, else 0."""


def times(values: Float[Tensor, "N #T"], factor: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
    """values x factor, in the memory of `values` (which nobody else may need) where the product has room in it.

    What was just written is still in the cache, where fresh memory is not: that is half the time of a product.
    """
    if factor.shape[1] <= values.shape[1]:
        return values.mul_(factor)
    return torch.mul(values, factor)
