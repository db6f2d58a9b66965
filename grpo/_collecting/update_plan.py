"""Select the rows of each update and of each forward pass, as row indices."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo._common.conversion import as_tensor, require_rows
from grpo.errors import ContractError
from grpo.types import RowIndex


def epoch_of_updates(
    group_ids: Int[Tensor, " N"],
    batch_size: int | None,
    generator: torch.Generator,
    is_demonstration: Bool[Tensor, " N"] | None = None,
) -> Iterator[RowIndex]:
    """Split one pass over all rows into updates of `batch_size` rows. The last update may be smaller.

    Groups are shuffled and the rows of a group stay adjacent, so that a group can share its state's forward pass. An
    update may contain only part of a group. An update of all rows is a slice, which copies nothing. Demonstrations are divided
    evenly among the updates of the sampled rows, and do not count. If all rows are demonstrations, they count.
    """
    num_rows = len(group_ids)
    flags = torch.zeros(num_rows, dtype=torch.bool) if is_demonstration is None else is_demonstration
    counts = ~flags if not bool(flags.all()) else flags
    if batch_size is None or batch_size >= int(counts.sum()):
        yield slice(0, num_rows)
        return
    _, groups, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    place = torch.randperm(len(sizes), generator=generator)
    order = place[groups].argsort(stable=True)
    updates = order[counts[order]].split(batch_size)
    others = order[~counts[order]].tensor_split(len(updates))
    yield from map(torch.cat, zip(updates, others, strict=True))


def num_updates_per_epoch(num_rows: int, batch_size: int | None) -> int:
    """The number of updates that `epoch_of_updates` makes."""
    return 1 if batch_size is None else -(-num_rows // batch_size)


def parts_in_order(num_rows: int, size: int | None, num_halvings: int = 0) -> list[RowIndex]:
    """Rows 0..N-1 in slices of `size`, which is halved `num_halvings` times first. None: one slice of all rows."""
    step = half(size or max(num_rows, 1), num_halvings)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def half(size: int, times: int = 1) -> int:
    """Half of `size`, rounded up, `times` times."""
    return -(-size >> times)


def cut_parts(parts: Sequence[RowIndex], num_halvings: int) -> list[RowIndex]:
    """Cut each part in half, `num_halvings` times. A part of one row stays one part."""
    return [
        compose_index(part, piece) for part in parts for piece in parts_in_order(num_selected(part), None, num_halvings)
    ]


def planned_parts(owner: str, plan: Sequence[Sequence[int]], num_rows: int) -> list[RowIndex]:
    """Convert a policy's own plan of forward passes to row indices. The plan must hold every row exactly once."""
    required = f"{owner} must return every row of range({num_rows}) exactly once"
    require_rows(f"{required}: the plan", plan)
    listed = [part for part in (as_tensor(f"{required}, as lists of integers", part) for part in plan) if part.numel()]
    are_integers = all(part.dim() == 1 and not (part.is_floating_point() or part.is_complex()) for part in listed)
    rows = sorted(row for part in listed for row in part.tolist()) if are_integers else []
    if rows != list(range(num_rows)):
        raise ContractError(
            f"{required}; got {len(rows)} rows, {len(set(rows) & set(range(num_rows)))} of them distinct and in range. Put "
            "each row into one forward pass."
        )
    parts: list[RowIndex] = [part.to(torch.int64) for part in listed]
    return parts


def num_selected(index: RowIndex) -> int:
    """The number of rows that an index selects."""
    return index.stop - index.start if isinstance(index, slice) else len(index)


def compose_index(outer: RowIndex, inner: RowIndex) -> RowIndex:
    """Combine two indices: `rows[compose_index(outer, inner)]` is `rows[outer][inner]`."""
    if isinstance(outer, Tensor):
        return outer[inner]
    if isinstance(inner, Tensor):
        return inner + int(outer.start)
    return slice(outer.start + inner.start, outer.start + inner.stop)
