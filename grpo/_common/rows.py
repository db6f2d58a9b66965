"""Rows of any kind: states and actions are lists, tensors or arrays, and nobody looks inside."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Rows: TypeAlias = Sequence[Any] | Tensor | NDArray[Any]
"""States or actions, one per row: a list, or a tensor or array with the rows on its first axis. The core never looks inside."""

RowIndex: TypeAlias = Tensor | slice
"""Selects rows: an int64 tensor on the CPU, or a slice (which copies nothing)."""


def select_rows(rows: Rows, index: RowIndex) -> Rows:
    """The rows at `index`. Tensors and arrays keep their type; anything else becomes a list."""
    if isinstance(index, slice):
        has_slices = isinstance(rows, list | tuple | Tensor | np.ndarray)  # a Sequence need not have them
        return rows[index] if has_slices else [rows[i] for i in range(len(rows))[index]]
    if isinstance(rows, Tensor):
        return rows[index.to(rows.device)]
    if isinstance(rows, np.ndarray):
        return rows[index.numpy()]  # type: ignore[no-any-return]
    return [rows[i] for i in index.tolist()]


def repeat_rows(states: Rows, times: int) -> Rows:
    """Repeat each state `times` times: first state 0, then state 1, and so on. In a list, the copies are the same object."""
    if isinstance(states, Tensor):
        return states.repeat_interleave(times, dim=0)
    if isinstance(states, np.ndarray):
        return states.repeat(times, axis=0)
    return [state for state in states for _ in range(times)]
