"""Read tensors of which the file of each rank has some rows, for any number of ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo._sharding.tensors import own_rows
from grpo.engine import Engine
from grpo.errors import DamagedCheckpointError

from .decoding import SavedRows
from .tensor_file import TensorFile


class DividedTensors:
    """The rows of all ranks, joined in rank order, and divided anew if the engine divides weights.

    Args:
        files: The files of tensors of all ranks that wrote the checkpoint.
        engine: Joins the ranks that read. None: this process reads whole tensors.
    """

    def __init__(self, files: Sequence[TensorFile], engine: Engine | None) -> None:
        self._files, self._engine = files, engine

    def read(self, saved: SavedRows) -> Tensor:
        """Read the whole tensor, or the rows of this rank as a divided tensor."""
        if self._engine is None or not self._engine.divides_weights:
            return self._rows(saved, slice(0, saved.shape[0]))
        rows = own_rows(saved.shape[0], self._engine.rank, self._engine.num_ranks)
        return self._engine.divided(self._rows(saved, rows), saved.shape)

    def _rows(self, saved: SavedRows, wanted: slice) -> Tensor:
        parts, first = [], 0
        for file in self._files:
            place = file.places.get(saved.name)
            if place is None or place.shape[1:] != saved.shape[1:] or place.dtype != saved.dtype:
                raise DamagedCheckpointError(f"A rank has no rows of {saved.name!r}. Use another checkpoint.")
            begin, end = max(wanted.start, first), min(wanted.stop, first + place.shape[0])
            if begin < end:
                parts.append(file.read_rows(saved.name, begin - first, end - first))
            first += place.shape[0]
        if first != saved.shape[0]:
            raise DamagedCheckpointError(
                f"The ranks have {first} rows of {saved.name!r}, which has {saved.shape[0]}. Use another checkpoint."
            )
        return torch.cat(parts) if parts else torch.empty((0, *saved.shape[1:]), dtype=saved.dtype)
