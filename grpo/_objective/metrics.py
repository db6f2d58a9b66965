"""The metrics that the loss reports, computed on the device without waiting for it, for many micro-batches at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._common.conversion import widest_float
from grpo.types import zero_outside

from .ratios import MAX_LOG_RATIO, RatioLevel
from .steps import Steps

Moments = dict[str, Float[Tensor, "3"]]
"""Name -> (count, sum, sum of squares), which add up over micro-batches, updates and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """What the metrics of a micro-batch are computed from. `Meter` computes the metrics of many micro-batches together."""

    terms: Mapping[str, Float[Tensor, ""]]
    """The terms of the loss."""
    per_step: Mapping[str, Tensor | float]
    """Values per step, values per row (which count once for each step of the row), or a single number for all steps."""
    mask: Bool[Tensor, "N T"]
    """The valid steps."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is equal for micro-batches that can be measured together."""
        per_step = (
            (name, value if isinstance(value, float) else value.shape[1]) for name, value in self.per_step.items()
        )
        return self.mask.shape[1], self.mask.device, *self.terms, *per_step

    def moments(self) -> Moments:
        """Return (count, sum, sum of squares) of each metric.

        Example:
            >>> values = {"ratio": 1.0, "entropy": torch.tensor([[1.0, 3.0, 9.0]])}
            >>> found = Measured(terms={}, per_step=values, mask=torch.tensor([[True, True, False]])).moments()
            >>> {name: values.tolist() for name, values in found.items()}
            {'entropy': [2.0, 4.0, 10.0], 'ratio': [2.0, 2.0, 2.0]}
        """
        return _moments_of([self])[0]


class MeasuredLoss(NamedTuple):
    """A loss, and what its metrics are computed from."""

    loss: Float[Tensor, ""]
    measured: Measured


def measured_steps(
    terms: Mapping[str, Float[Tensor, ""]],
    steps: Steps,
    level: RatioLevel,
    stopped: tuple[Bool[Tensor, "N #T"], Bool[Tensor, "N #T"]] | None,
    others: Mapping[str, Float[Tensor, "N #T"] | Bool[Tensor, "N #T"] | None],
) -> Measured:
    """Collect the terms of the loss and the metrics per step, detached.

    Every result has `ratio`, `ratio_clamped_fraction` (steps whose log-ratio was clamped), and `clip_fraction_low`,
    `clip_fraction_high` and `clip_fraction` (steps whose gradient the surrogate has stopped). The result has `sampler_ratio` if
    there is a sampler correction, `selected_fraction` if the surrogate selects steps, and every value in `others` (`entropy`,
    `kl`, `kept_fraction`).

    Args:
        terms: The terms of the loss.
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
    per_step = {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in found.items()
        if value is not None
    }
    return Measured(terms={name: term.detach() for name, term in terms.items()}, per_step=per_step, mask=steps.mask)


def all_moments(added: Sequence[Mapping[str, Tensor] | Measured]) -> list[Mapping[str, Float[Tensor, "3"]]]:
    """Return (count, sum, sum of squares) of each metric, by micro-batch. Micro-batches of one kind are measured together."""
    found: dict[int, Mapping[str, Tensor]] = {}
    waiting: dict[Any, dict[int, Measured]] = {}
    for place, each in enumerate(added):
        if isinstance(each, Measured):
            waiting.setdefault(each.kind, {})[place] = each
        else:
            found[place] = each
    for alike in waiting.values():
        found |= zip(alike, _moments_of([*alike.values()]), strict=True)
    return [found[place] for place in range(len(added))]


def _moments_of(measured: Sequence[Measured]) -> list[Moments]:
    """Return the moments of micro-batches of one kind.

    A term of the loss is (0, value, 0). A count of 0 tells `Meter` to sum the term over micro-batches, not average it.
    """
    first, size = measured[0], len(measured)
    dtype = widest_float(first.mask.device)
    names = [name for name, value in first.per_step.items() if isinstance(value, Tensor)]
    constants = {name: value for name, value in first.per_step.items() if not isinstance(value, Tensor)}
    mask = _joined([each.mask for each in measured])
    columns = [mask, *(_joined([each.per_step[name] for each in measured]) for name in names)]
    table = torch.stack([values.to(dtype).expand(mask.shape) for values in columns])
    table = zero_outside(table, mask).flatten(1)
    sizes = [each.mask.numel() for each in measured]
    powers = torch.stack([table, table.square()])
    # one sum per micro-batch, so that the last digit does not depend on what is measured together
    sums = torch.stack([part.sum(2) for part in powers.split(sizes, 2)], dim=2)
    count = sums[0, 0]
    moments = torch.stack([count.expand_as(sums[0]), *sums], dim=2)[1:]
    if first.terms:
        terms = torch.stack([term for each in measured for term in each.terms.values()]).to(dtype).view(size, -1).T
        zeros = torch.zeros_like(terms)
        moments = torch.cat([torch.stack([zeros, terms, zeros], dim=2), moments])
    if constants:
        moments = torch.cat([moments, count.unsqueeze(1) * _powers(tuple(constants.values()), dtype, count.device)])
    names = [*first.terms, *names, *constants]
    return [dict(zip(names, each.unbind(), strict=True)) for each in moments.unbind(1)]


def _joined(values: list[Any]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(values)


@lru_cache(maxsize=64)
def _powers(constants: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Float[Tensor, "C 1 3"]:
    """1, c and c^2 of each constant, made without a copy from the host, which would wait for the device."""
    powers = [torch.full((), power, dtype=dtype, device=device) for c in constants for power in (1.0, c, c * c)]
    return torch.stack(powers).view(-1, 1, 3)
