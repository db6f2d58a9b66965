"""Rows brought together group by group, and the statistics of a group."""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from .types import run_bounds

ScalarT = TypeVar("ScalarT", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows brought together group by group, so that a group's statistics are those of a run of neighbours.

    In numpy: what is small here is the tensor, not the number of operations, and numpy's cost a third of torch's.
    """

    order: NDArray[np.int64] | None
    """[N] which row stands at each place; None: groups are together already, which is the usual case."""
    starts: NDArray[np.int64]
    """[B] the first place of each group."""
    counts: NDArray[np.int64]
    """[B] rows of each group."""

    @classmethod
    def of(cls, group_ids: Int[Tensor, " N"]) -> "Groups":
        """The groups of rows with these ids: any integers, in any order."""
        ids = group_ids.cpu().numpy()
        order: NDArray[np.int64] | None = None
        if (ids[1:] < ids[:-1]).any():
            order = ids.argsort(kind="stable")
            ids = ids[order]
        bounds = run_bounds(ids)
        return cls(order, bounds[:-1], bounds[1:] - bounds[:-1])

    def gather(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows in their groups' order."""
        return values if self.order is None else values[self.order]

    def scatter(self, values: NDArray[Any]) -> NDArray[Any]:
        """Rows back in the caller's order."""
        if self.order is None:
            return values
        back = np.empty_like(values)
        back[self.order] = values
        return back

    def spread(self, per_group: NDArray[ScalarT]) -> NDArray[ScalarT]:
        """One value per group, for each of its rows."""
        return np.repeat(per_group, self.counts)

    def means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[B]."""
        sums: NDArray[np.float64] = np.add.reduceat(values, self.starts)
        return sums / self.counts

    def medians(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[B]: sorted by group, then by value, the middle rows stand at known places."""
        ordered = values[np.lexsort((values, self.spread(np.arange(len(self.counts)))))]
        medians: NDArray[np.float64] = (
            ordered[self.starts + (self.counts - 1) // 2] + ordered[self.starts + self.counts // 2]
        ) / 2
        return medians

    def extremes(self, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[B] and [B]: smallest and largest."""
        return np.minimum.reduceat(values, self.starts), np.maximum.reduceat(values, self.starts)


def is_constant(low: Any, high: Any, tolerance: float) -> Any:
    """Whether values between `low` and `high` differ by no more than `tolerance` times the largest of them."""
    return high - low <= tolerance * np.maximum(np.abs(low), np.abs(high))


def as_float64(values: Tensor) -> NDArray[np.float64]:
    """On the host: statistics are small, and not every device has float64."""
    return values.detach().cpu().double().numpy()


def rounding_of(values: Tensor) -> float:
    """Relative differences up to this are rounding: two units in the last place."""
    return 2 * torch.finfo(values.dtype).eps
