"""What the loss tells about itself, computed beside it and without a synchronisation."""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from .metrics import moments, total
from .objective_steps import Steps
from .surrogates import clip_bounds

CLIP_METRICS = ("clip_fraction_low", "clip_fraction_high", "clip_fraction", "ratio_clamped_fraction")
"""Fractions of steps whose ratio is past a bound its advantage pushes towards, and past what `exp` is given."""


def objective_metrics(
    shares: dict[str, Float[Tensor, ""]],
    spread: dict[str, Float[Tensor, "N T"]],
    steps: Steps,
    counted: Bool[Tensor, "N T"] | None,
) -> tuple[tuple[str, ...], Float64[Tensor, "M 3"]]:
    """All metrics as rows (count, sum, sum of squares) of one float64 tensor: one transfer when they are read.

    Args:
        shares: terms of the loss.
        spread: values that are averaged, 0 off the mask.
        steps: the rows.
        counted: those steps whose surrogate counts; None: all.

    Returns:
        The names, and the rows.
    """
    count = steps.count
    zero = torch.zeros_like(count)
    cells = {name: (zero, share, zero) for name, share in shares.items()}
    cells |= {name: (count, *moments(values)) for name, values in spread.items()}
    if counted is not None:
        kept = torch.count_nonzero(counted & steps.mask).double()
        cells["kept_fraction"] = (count, kept, kept)
    if steps.inputs.old_log_probs is None:  # the ratio is 1: nothing is clipped, and nothing need be counted
        cells["ratio"] = (count, count, count)
        cells |= dict.fromkeys(CLIP_METRICS, (count, zero, zero))
    else:
        cells["ratio"] = _ratio_moments(steps)
        low, high = _stopped_steps(steps) or (zero, zero)
        beyond = zero if steps.ratio.beyond is None else _over_steps(steps.ratio.beyond, steps)
        for name, number in zip(CLIP_METRICS, (low, high, low + high, beyond), strict=True):
            cells[name] = (count, number, number)
    return tuple(cells), torch.stack([cell for row in cells.values() for cell in row]).view(-1, 3)


def _ratio_moments(steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
    """Count, sum and sum of squares of the ratio over valid steps; off the mask it is 1, or the row's."""
    count = steps.count
    off_one = steps.ratio.value - 1.0  # the square of what is nearly 1 would lose what differs
    if off_one.shape == steps.mask.shape:
        sum_off, squares_off = moments(off_one)
    else:
        sum_off, squares_off = _over_steps(off_one, steps), _over_steps(off_one.square(), steps)
    return count, sum_off + count, squares_off + 2.0 * sum_off + count


def _over_steps(values: Float[Tensor, "N #T"], steps: Steps) -> Tensor:
    """The sum over valid steps of values that are 0 off the mask, or that are one per row."""
    if values.shape == steps.mask.shape:
        return total(values)
    return (values.squeeze(1).double() * steps.lengths).sum()


def _stopped_steps(steps: Steps) -> tuple[Tensor, Tensor] | None:
    """How many steps are past the lower, and past the upper bound that their advantage pushes towards; None: no bounds.

    Off the mask a step's ratio is 1, inside every bound.
    """
    config, advantages = steps.config, steps.advantages
    if config.surrogate == "dppo_tv":
        moved = steps.log_probs.exp() - steps.sampled_log_probs.exp()
        low, high = (advantages < 0) & (moved < -config.tv_limit), (advantages > 0) & (moved > config.tv_limit)
        return torch.count_nonzero(low).double(), torch.count_nonzero(high).double()
    if config.surrogate not in ("clip", "clip_cov", "cispo", "gmpo"):
        return None
    lowest, highest = clip_bounds(advantages, config.clip_low, config.clip_high)
    ratio = (steps.step_ratio if config.surrogate == "gmpo" else steps.ratio).value
    ratio, lowest, highest = torch.broadcast_tensors(ratio, lowest, highest) if ratio.shape[1] == 1 else (ratio, lowest, highest)
    # compared into floats: a comparison into booleans takes four times as long
    too_low = torch.lt(ratio, lowest, out=torch.empty_like(ratio))
    too_high = torch.gt(ratio, highest, out=torch.empty_like(ratio))
    return _over_steps(too_low, steps), _over_steps(too_high, steps)
