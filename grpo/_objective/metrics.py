"""The metrics that the loss reports, computed on the device without waiting for it."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._common.conversion import widest_float
from grpo.types import zero_outside

from .ratios import MAX_LOG_RATIO, RatioLevel
from .steps import Steps

Moments = dict[str, Float[Tensor, "3"]]
"""Name -> (count, sum, sum of squares), which add up over micro-batches, updates and ranks."""


def shares(terms: Mapping[str, Float[Tensor, ""]]) -> Moments:
    """Return each loss term as (0, value, 0). A count of 0 tells `Meter` to sum the term over micro-batches, not average it."""
    values = torch.stack([term.detach() for term in terms.values()])
    values = values.to(widest_float(values.device))
    return dict(zip(terms, torch.nn.functional.pad(values.unsqueeze(1), (1, 1)).unbind(0), strict=True))


def step_moments(
    steps: Steps,
    level: RatioLevel,
    stopped: tuple[Bool[Tensor, "N #T"], Bool[Tensor, "N #T"]] | None,
    others: Mapping[str, Float[Tensor, "N #T"] | Bool[Tensor, "N #T"] | None],
) -> Moments:
    """Return (count, sum, sum of squares) of each metric of the loss over the valid steps.

    Every result has `ratio`, `ratio_clamped_fraction` (steps whose log-ratio was clamped), and `clip_fraction_low`,
    `clip_fraction_high` and `clip_fraction` (steps whose gradient the surrogate has stopped). The result has `sampler_ratio` if
    there is a sampler correction, `selected_fraction` if the surrogate selects steps, and every value in `others` (`entropy`,
    `kl`, `kept_fraction`). A value per row counts once for each step of the row.

    Args:
        steps: The rows.
        level: The level of the ratio.
        stopped: Steps stopped at the lower and at the upper bound. None: there are no bounds, or no ratio differs from 1.
        others: Further values by name. A value of None is left out.
    """
    found: dict[str, Tensor | float | None] = {"ratio": 1.0, "ratio_clamped_fraction": 0.0}
    if not steps.old_is_current:
        found["ratio"] = steps.ratio(level)
        found["ratio_clamped_fraction"] = steps.log_ratio(level).abs() > MAX_LOG_RATIO
    found |= dict.fromkeys(("clip_fraction_low", "clip_fraction_high", "clip_fraction"), 0.0)
    if stopped is not None:
        low, high = stopped
        found |= {"clip_fraction_low": low, "clip_fraction_high": high, "clip_fraction": low | high}
    found |= {"sampler_ratio": steps.sampler_weights, "selected_fraction": steps.selected, **others}
    return moments({name: value for name, value in found.items() if value is not None}, steps.mask)


def moments(values: Mapping[str, Tensor | float], mask: Bool[Tensor, "N T"]) -> Moments:
    """Return (count, sum, sum of squares) over the valid steps of values per step, values per row, or a single number.

    Example:
        >>> found = moments({"ratio": 1.0, "entropy": torch.tensor([[1.0, 3.0, 9.0]])}, torch.tensor([[True, True, False]]))
        >>> {name: values.tolist() for name, values in found.items()}
        {'entropy': [2.0, 4.0, 10.0], 'ratio': [2.0, 2.0, 2.0]}
    """
    per_step = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    constants = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    dtype = widest_float(mask.device)
    count = mask.sum(dtype=dtype)
    table = torch.stack([value.detach().to(dtype).expand(mask.shape) for value in per_step.values()])
    table = zero_outside(table, mask).flatten(1)
    rows = [*torch.stack([count.expand(len(table)), table.sum(1), table.square().sum(1)], dim=1).unbind(0)]
    by_constant = {c: torch.stack([count, c * count, c * c * count]) for c in dict.fromkeys(constants.values())}
    rows += [by_constant[c] for c in constants.values()]
    return dict(zip([*per_step, *constants], rows, strict=True))
