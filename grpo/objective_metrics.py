"""What the loss tells about itself, computed beside it and without a synchronisation."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .divergence import MAX_LOG_RATIO
from .metrics import moments, total
from .objective_config import ObjectiveConfig
from .ratios import bounded_exp
from .surrogates import clip_bounds

CLIP_METRICS = ("clip_fraction_low", "clip_fraction_high", "clip_fraction", "ratio_clamped_fraction")
"""Fractions of steps whose ratio is past a bound its advantage pushes towards, and past what `exp` is given."""


def objective_metrics(
    *,
    shares: dict[str, Tensor],
    spread: dict[str, Tensor],
    ratio: Float[Tensor, "N #T"] | None,
    log_ratio: Float[Tensor, "N #T"],
    step_log_ratio: Float[Tensor, "N T"],
    moved: Float[Tensor, "N T"] | None,
    advantages: Float[Tensor, "N #T"],
    mask: Bool[Tensor, "N T"],
    counted: Bool[Tensor, "N T"] | None,
    config: ObjectiveConfig,
) -> dict[str, Float[Tensor, "3"]]:
    """All metrics as rows (count, sum, sum of squares) of one float64 tensor: one transfer when they are read.

    Args:
        shares: terms of the loss.
        spread: [N, T] values that are averaged, 0 off the mask.
        ratio: at the ratio level; None where it is 1 by construction: then nothing is clipped, and nothing need be counted.
        log_ratio: its logarithm.
        step_log_ratio: per step, 0 off the mask.
        moved: pi - pi_old per step, where the surrogate bounds that instead of the ratio.
        advantages: decide which bound counts.
        mask: the valid steps.
        counted: those whose surrogate counts; None: all.
        config: the bounds.
    """
    count = torch.count_nonzero(mask).double()
    zero = torch.zeros_like(count)

    def over_steps(values: Tensor) -> Tensor:
        """The sum over valid steps of values that are 0 off the mask, or that are one per row."""
        if values.shape == mask.shape:
            return total(values)
        return (values.squeeze(1).double() * torch.count_nonzero(mask, dim=1)).sum()

    cells = {name: (zero, share.detach().double(), zero) for name, share in shares.items()}
    cells |= {name: (count, *moments(values.detach())) for name, values in spread.items()}
    if counted is not None:
        kept = torch.count_nonzero(counted & mask).double()
        cells["kept_fraction"] = (count, kept, kept)
    if ratio is not None:
        off_one = ratio.detach() - 1.0  # the square of what is nearly 1 would lose what differs
        sum_off, squares_off = over_steps(off_one), over_steps(off_one.square())
        cells["ratio"] = (count, sum_off + count, squares_off + 2.0 * sum_off + count)
        too_low, too_high = _stopped_steps(ratio.detach(), step_log_ratio.detach(), moved, advantages, config)
        clamped = log_ratio.detach().abs().gt_(MAX_LOG_RATIO)
        parts = [zero if steps is None else over_steps(steps) for steps in (too_low, too_high)]
        for name, number in zip(CLIP_METRICS, (*parts, parts[0] + parts[1], over_steps(clamped)), strict=True):
            cells[name] = (count, number, number)
    rows = torch.stack([cell for row in cells.values() for cell in row]).view(-1, 3).unbind(0)
    metrics = dict(zip(cells, rows, strict=True))
    if ratio is None:
        metrics["ratio"] = count.expand(3)
        metrics |= dict.fromkeys(CLIP_METRICS, torch.stack([count, zero, zero]))
    return metrics


def _stopped_steps(
    ratio: Tensor, step_log_ratio: Tensor, moved: Tensor | None, advantages: Tensor, config: ObjectiveConfig
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """1 for steps past the lower, and past the upper bound that their advantage pushes towards, else 0; None: no bounds.

    Off the mask a step's ratio is 1, inside every bound.
    """
    if moved is not None:
        low, high = (advantages < 0) & (moved < -config.tv_limit), (advantages > 0) & (moved > config.tv_limit)
        return low.to(moved.dtype), high.to(moved.dtype)
    if config.surrogate not in ("clip", "clip_cov", "cispo", "gmpo"):
        return None, None
    lowest, highest = clip_bounds(advantages, config.clip_low, config.clip_high)
    at_steps = bounded_exp(step_log_ratio) if config.surrogate == "gmpo" else ratio
    if at_steps.shape[1] == 1 < advantages.shape[1]:
        at_steps = at_steps.expand_as(advantages)
    return at_steps.clone().lt_(lowest), at_steps.clone().gt_(highest)
