"""How per-step losses become one number: every normaliser of the GRPO family is a choice of step weights."""

from collections.abc import Callable
from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo._common.checks import require_count
from grpo._common.conversion import widest_float
from grpo._common.tensors import require_tensors
from grpo.errors import ConfigError

Aggregation = Literal["row_mean", "step_mean", "fixed_length", "row_sum", "group_mean"]


def step_weights(
    mask: Bool[Tensor, "N T"],
    aggregation: Aggregation,
    *,
    fixed_length: int | None = None,
    group_ids: Int[Tensor, " N"] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "N T"]:
    """The weight w[n,t] of each step in the loss sum(l w).

      row_mean      mask / (len_n N)            each row counts the same (GRPO, arXiv:2402.03300)
      step_mean     mask / sum(mask)            each step counts the same (DAPO, arXiv:2503.14476)
      fixed_length  mask / (N L)                no length bias (Dr. GRPO, arXiv:2503.20783)
      row_sum       mask / N                    a row's loss is the sum over its steps (RLOO, arXiv:2402.14740)
      group_mean    mask / (len_group B)        each group counts the same, and so does each step within a group

    N includes rows without a valid step. The weights are computed once per update from the whole update's mask, so
    micro-batches and ranks add up exactly.

    Args:
        mask: The valid steps of the whole update.
        fixed_length: L, for `fixed_length`.
        group_ids: For `group_mean`; a group's rows must be on one rank.
        reduce: Sums a count tensor over ranks; None: there is one rank.

    Returns:
        Weights in float64 (float32 on devices without it), 0 outside the mask.

    Raises:
        ConfigError: The aggregation needs `fixed_length` or `group_ids`.

    Example:
        >>> step_weights(torch.tensor([[True, True], [True, False]]), "row_mean").tolist()
        [[0.25, 0.25], [0.5, 0.0]]
    """
    require_tensors(step_weights, mask=mask, aggregation=aggregation, group_ids=group_ids)
    dtype = widest_float(mask.device)
    lengths = mask.sum(1, keepdim=True).to(dtype)

    def total(count: int | Tensor) -> Tensor:
        local = torch.as_tensor(count, dtype=dtype, device=mask.device)
        return local if reduce is None else reduce(local)

    num_rows = mask.shape[0]
    divisors: Tensor
    match aggregation:
        case "row_mean":
            divisors = lengths * total(num_rows)
        case "step_mean":
            divisors = total(lengths.sum())
        case "fixed_length":
            if fixed_length is None:
                raise ConfigError(
                    "step_weights: aggregation='fixed_length' needs fixed_length=L; got None. Pass the length to divide by."
                )
            require_count("step_weights: fixed_length", fixed_length)
            divisors = total(num_rows) * fixed_length
        case "row_sum":
            divisors = total(num_rows)
        case "group_mean":
            if group_ids is None:
                raise ConfigError(
                    "step_weights: aggregation='group_mean' needs group_ids; got None. Pass the group of each row."
                )
            names, groups = group_ids.to(mask.device).unique(return_inverse=True)
            steps = lengths.new_zeros(len(names), 1).index_add_(0, groups, lengths)
            divisors = steps[groups] * total(len(names))
        case _:
            assert_never(aggregation)
    return torch.where(mask, 1.0 / divisors, 0.0)
