"""What the loss tells about itself, computed beside it and without a synchronisation."""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from .metrics import Number, StepSums, as_tensor
from .objective_config import ObjectiveConfig
from .objective_steps import Steps
from .surrogates import clip_bounds

CLIP_METRICS = ("clip_fraction_low", "clip_fraction_high", "clip_fraction", "ratio_clamped_fraction")
"""Fractions of steps whose ratio is past a bound its advantage pushes towards, and past what `exp` is given."""

SPREAD = ("kl", "entropy", "sampler_ratio")
"""What is reported with mean and deviation, where there is such a thing."""

BOUNDED = ("clip", "clip_cov", "cispo", "gmpo", "dppo_tv")
"""The surrogates that stop at a bound."""


def observe(
    sums: StepSums, spread: Mapping[str, Float[Tensor, "N T"]], steps: Steps, counted: Bool[Tensor, "N T"] | None
) -> None:
    """Add up what is reported of some rows.

    Args:
        sums: where to.
        spread: values of which mean and deviation are reported, 0 off the mask.
        steps: the rows.
        counted: those steps whose surrogate counts; None: all.
    """
    sums.add_counts("steps", steps.on_mask.integers)
    for name, values in spread.items():
        sums.add_moments(name, values)
    if counted is not None:
        sums.add("kept", (counted & steps.mask).to(steps.dtype))
    if steps.inputs.old_log_probs is None:  # the ratio is 1: nothing is clipped, and nothing need be counted
        return
    ratio = steps.loss_ratio.value
    scratch = torch.empty_like(ratio)  # memory that was just written is in the cache
    off_one = torch.sub(ratio, 1.0, out=scratch)  # the square of what is nearly 1 would lose what differs
    if off_one.shape == steps.mask.shape:
        sums.add_moments("ratio_off_one", off_one)
    else:
        sums.add_row_moments("ratio_off_one", off_one, steps.on_mask.integers)
    beyond = steps.loss_ratio.beyond
    sums.add("beyond", None if beyond is None else _per_step(beyond, steps))
    if steps.config.surrogate in BOUNDED:
        for name, stopped in zip(("too_low", "too_high"), _stopped_steps(steps, scratch), strict=True):
            sums.add(name, stopped)


def objective_metrics(
    sums: Mapping[str, Number], shares: Mapping[str, Number], config: ObjectiveConfig, device: torch.device
) -> dict[str, Float64[Tensor, "3"]]:
    """All metrics as (count, sum, sum of squares): rows of one tensor, for one transfer when they are read.

    Args:
        sums: of all rows.
        shares: the terms of the loss.
        config: the bounds.
        device: where the metrics are to be.
    """
    count = sums["steps"]
    zero = 0.0 * count
    cells = {name: (zero, share, zero) for name, share in shares.items()}
    cells |= {name: (count, sums[name], sums[f"{name} squared"]) for name in SPREAD if name in sums}
    if "kept" in sums:
        cells["kept_fraction"] = (count, sums["kept"], sums["kept"])
    if "ratio_off_one" not in sums:
        cells["ratio"] = (count, count, count)
        cells |= dict.fromkeys(CLIP_METRICS, (count, zero, zero))
    else:
        off = sums["ratio_off_one"]
        cells["ratio"] = (count, off + count, sums["ratio_off_one squared"] + 2.0 * off + count)
        low, high = (sums["too_low"], sums["too_high"]) if config.surrogate in BOUNDED else (zero, zero)
        for name, number in zip(CLIP_METRICS, (low, high, low + high, sums["beyond"]), strict=True):
            cells[name] = (count, number, number)
    rows = as_tensor([cell for row in cells.values() for cell in row], device).view(-1, 3).unbind(0)
    return dict(zip(cells, rows, strict=True))


def _per_step(values: Float[Tensor, "N #T"], steps: Steps) -> Float[Tensor, "N T"]:
    """What is one per row, at each of its steps."""
    return values if values.shape == steps.mask.shape else steps.on_mask(values)


def _stopped_steps(steps: Steps, scratch: Float[Tensor, "N #T"]) -> Iterator[Float[Tensor, "N T"]]:
    """1 for steps past the lower, then for those past the upper bound that their advantage pushes towards, else 0.

    Off the mask a step's ratio is 1, inside every bound. Each is to be read before the next is asked for.
    """
    config, advantages = steps.config, steps.advantages
    if config.surrogate == "dppo_tv":
        moved = steps.log_probs.exp() - steps.sampled_log_probs.exp()
        yield ((advantages < 0) & (moved < -config.tv_limit)).to(moved.dtype)
        yield ((advantages > 0) & (moved > config.tv_limit)).to(moved.dtype)
        return
    lowest, highest = clip_bounds(advantages, config.clip_low, config.clip_high)
    ratio = (steps.step_ratio if config.surrogate == "gmpo" else steps.ratio).value
    # compared into floats: a comparison into booleans takes four times as long
    shape = lowest.shape if ratio.shape[1] == 1 else ratio.shape
    found = scratch if scratch.shape == shape else ratio.new_empty(shape)
    yield _per_step(torch.lt(ratio, lowest, out=found), steps)
    yield _per_step(torch.gt(ratio, highest, out=found), steps)
