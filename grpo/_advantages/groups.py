"""Group the rows of a batch, compute statistics of each group, and find the rows that have an advantage.

Statistics are float64, two-pass, and computed by numpy on the host: the tensors are small, and not every device has float64.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

Credit = Literal["row", "return_to_go", "process_supervision", "gae", "gigpo"]
Baseline = Literal["group_mean", "group_median", "leave_one_out", "global_mean", "length_weighted", "max_at_k", "none"]
Scale = Literal["none", "group", "batch", "whiten", "beta", "mean"]

ABSOLUTE_BASELINES: tuple[Baseline, ...] = ("global_mean", "none")
"""Baselines that do not depend on the row's group. Under the other baselines, the only row of a group has advantage 0."""

Floats: TypeAlias = NDArray[np.float64]
ScalarT = TypeVar("ScalarT", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a batch and their statistics. Group order means: sorted by group, so that a group's rows are adjacent."""

    order: NDArray[np.int64] | slice
    """[N] row indices, sorted by group. A slice of all rows if the rows are already sorted by group."""
    starts: NDArray[np.int64]
    """[B] the index in `order` at which each group starts."""
    counts: NDArray[np.int64]
    """[B] the number of rows of each group."""

    @classmethod
    def of(cls, group_ids: Int[Tensor, " N"]) -> "Groups":
        """Build the groups from the group id of each row. Ids can be any integers, in any order."""
        ids = group_ids.cpu().numpy()
        order = ids.argsort(kind="stable") if (ids[1:] < ids[:-1]).any() else slice(None)
        bounds = run_bounds(ids[order])
        return cls(order, bounds[:-1], bounds[1:] - bounds[:-1])

    def to_group_order(self, values: NDArray[ScalarT]) -> NDArray[ScalarT]:
        """Sort values by group. `values` has one value per row, in the caller's order."""
        return values[self.order]

    def rewards(self, rewards: Float[Tensor, "N *T"]) -> tuple[Floats, float]:
        """Return float64 rewards sorted by group, and the relative difference between rewards that counts as rounding."""
        return self.to_group_order(as_float64(rewards)), rounding_of(rewards)

    def to_row_order(self, values: NDArray[ScalarT]) -> NDArray[ScalarT]:
        """Undo `to_group_order`: put one value per row, sorted by group, back into the caller's order."""
        in_rows = np.empty_like(values)
        in_rows[self.order] = values
        return in_rows

    def repeat(self, per_group: NDArray[ScalarT]) -> NDArray[ScalarT]:
        """Repeat the value of each group for each row of the group. The result is sorted by group."""
        return np.repeat(per_group, self.counts)

    def means(self, values: Floats) -> Floats:
        """[B] mean of each group. `values` are sorted by group, as `to_group_order` returns them."""
        sums: Floats = np.add.reduceat(values, self.starts)
        return sums / self.counts

    def medians(self, values: Floats) -> Floats:
        """[B] median of each group: the mean of the two middle values if the number of rows is even."""
        ordered = values[np.lexsort((values, self.repeat(np.arange(len(self.counts)))))]
        lower: Floats = ordered[self.starts + (self.counts - 1) // 2]
        upper: Floats = ordered[self.starts + self.counts // 2]
        return (lower + upper) / 2

    def stds(self, values: Floats, ddof: int, tolerance: float) -> Floats:
        """[B] standard deviation of each group with divisor n - ddof; infinite for a constant group."""
        deviations = values - self.repeat(self.means(values))
        peaks = np.maximum.reduceat(np.abs(deviations), self.starts)
        scales = np.where(peaks > 0.0, peaks, 1.0)  # squares of numbers up to 1 do not overflow, and the largest is 1
        squares = self.means((deviations / self.repeat(scales)) ** 2) * self.counts
        stds = scales * np.sqrt(squares / np.maximum(self.counts - ddof, 1))
        return np.where(self.are_constant(values, tolerance), math.inf, stds)

    def are_constant(self, values: Floats, tolerance: float) -> NDArray[np.bool_]:
        """[B] True if a group's values differ by at most `tolerance` times the largest magnitude; [B, T] for values [N, T]."""
        low, high = np.minimum.reduceat(values, self.starts), np.maximum.reduceat(values, self.starts)
        constant: NDArray[np.bool_] = high - low <= tolerance * np.maximum(np.abs(low), np.abs(high))
        return constant

    def num_live_rows(self, advantages: Float[Tensor, "N *T"]) -> int:
        """Return the number of rows in groups that have at least one advantage other than 0."""
        in_group_order = self.to_group_order(has_advantage(advantages).cpu().numpy())
        return int(self.counts[np.logical_or.reduceat(in_group_order, self.starts)].sum())


def run_bounds(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return the start of each run of equal neighbours, followed by the length: [4, 4, 7, 4] -> [0, 2, 3, 4]."""
    return np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1], [True]]))


def as_float64(values: Tensor) -> Floats:
    """Copy a tensor to a float64 numpy array."""
    return values.detach().cpu().double().numpy()


def rounding_of(values: Tensor) -> float:
    """The relative difference that counts as rounding: two units in the last place of the dtype."""
    return 2 * torch.finfo(values.dtype).eps


def mean_and_std(values: Floats, ddof: int) -> tuple[float, float]:
    """Mean, and standard deviation with divisor n - ddof (0 for a single value)."""
    mean = float(np.add.reduce(values)) / values.size
    deviations = values - mean
    scale = float(np.abs(deviations).max()) or 1.0  # squares of numbers up to 1 do not overflow
    squares = float(np.add.reduce(np.square(deviations / scale)))
    return mean, scale * math.sqrt(squares / max(values.size - ddof, 1))


def batch_std(values: Floats, ddof: int, rounding: float) -> float:
    """Standard deviation with divisor n - ddof. It is infinite if all values differ by at most `rounding`."""
    if values.max() - values.min() <= rounding:
        return math.inf
    return mean_and_std(values, ddof)[1]


def live_rows(rewards: Float[Tensor, "N *T"], group_ids: Int[Tensor, " N"]) -> NDArray[np.bool_]:
    """[N] True for rows of groups with different rewards. Rewards per step (0 outside the mask) differ if any step differs."""
    groups = Groups.of(group_ids)
    constant = groups.are_constant(*groups.rewards(rewards)).reshape(len(groups.counts), -1)
    return groups.to_row_order(groups.repeat(~np.logical_and.reduce(constant, axis=1)))


def has_advantage(advantages: Float[Tensor, "N *T"]) -> Bool[Tensor, " N"]:
    """[N] True for rows with an advantage other than 0 at any step."""
    return advantages != 0 if advantages.dim() == 1 else (advantages != 0).any(1)


def group_statistics(rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"]) -> dict[str, float]:
    """Return the number of groups, their mean size, and the fraction of groups with equal rewards or a single row."""
    groups = Groups.of(group_ids)
    num_groups = len(groups.counts)
    return {
        "group_stats/num_groups": float(num_groups),
        "group_stats/avg_group_size": len(rewards) / num_groups,
        "group_stats/zero_variance_fraction": int(groups.are_constant(*groups.rewards(rewards)).sum()) / num_groups,
    }
