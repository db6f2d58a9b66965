"""Which rows go into which update, and which into which forward pass: index arithmetic, nothing else."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from .errors import ContractError
from .types import RowIndex


def epoch_of_updates(
    group_ids: Int[Tensor, " N"], batch_size: int | None, generator: torch.Generator
) -> Iterator[RowIndex]:
    """One pass over all rows in updates of `batch_size`; the last may be smaller.

    Groups are shuffled and their rows stay adjacent, so that a state's own work can be shared; an update may
    cut a group. One update of everything needs no order, and copies nothing.
    """
    num_rows = len(group_ids)
    if batch_size is None or batch_size >= num_rows:
        yield slice(0, num_rows)
        return
    _, groups, counts = group_ids.unique(return_inverse=True, return_counts=True)
    place = torch.randperm(len(counts), generator=generator)
    order = place[groups].argsort(stable=True)
    yield from order.split(batch_size)


def num_updates_per_epoch(num_rows: int, batch_size: int | None) -> int:
    """How many updates `epoch_of_updates` makes."""
    return 1 if batch_size is None else -(-num_rows // batch_size)


def parts_in_order(num_rows: int, size: int | None) -> list[RowIndex]:
    """Rows 0..N-1 in slices of `size`; None: all at once."""
    step = size or max(num_rows, 1)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def planned_parts(owner: str, plan: Sequence[Sequence[int]], num_rows: int) -> list[RowIndex]:
    """A policy's own plan of its forwards, as indices.

    Raises:
        ContractError: the plan does not hold every row exactly once.
    """
    parts: list[RowIndex] = [torch.as_tensor(list(part), dtype=torch.int64) for part in plan if len(part)]
    rows = sorted(int(row) for part in plan for row in part)
    if rows != list(range(num_rows)):
        raise ContractError(
            f"{owner} must return every row of range({num_rows}) exactly once; got {len(rows)} rows, "
            f"{len(set(rows) & set(range(num_rows)))} of them distinct and in range."
        )
    return parts


def num_selected(index: RowIndex) -> int:
    """How many rows an index selects."""
    return index.stop - index.start if isinstance(index, slice) else len(index)


def compose(outer: RowIndex, inner: RowIndex) -> RowIndex:
    """`rows[outer][inner]` as one index into `rows`."""
    if isinstance(outer, Tensor):
        return outer[inner]
    if isinstance(inner, Tensor):
        return inner + int(outer.start)
    return slice(outer.start + inner.start, outer.start + inner.stop)
