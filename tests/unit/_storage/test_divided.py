"""Tensors whose rows are in the files of several ranks are read whole, or divided among other ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo._ranks.processes import SeveralProcesses
from grpo._storage.decoding import SavedRows, decode
from grpo._storage.files import new_file
from grpo._storage.opening import DividedTensors
from grpo._storage.tensor_file import Place, TensorFile, write_tensors
from grpo.engine import OneProcess
from grpo.errors import DamagedCheckpointError

WHOLE = torch.arange(21).reshape(7, 3)


class Dividing(SeveralProcesses):
    """An engine that divides, of which the test sees one rank. A divided tensor is its rows here."""

    divides_weights = True

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    def divided(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        assert tuple(shape) == tuple(WHOLE.shape)
        return rows

    def unused(self, *arguments: Any) -> Any:
        raise AssertionError

    gather_objects = agree = divide = whole = equal_count = accompany = sum_gradients = unused


def files_of(folder: Path, sizes: Sequence[int], tensor: Tensor = WHOLE) -> list[TensorFile]:
    files = []
    for rank, rows in enumerate(tensor.split(list(sizes))):
        with new_file(folder / f"{rank}.safetensors") as file:
            write_tensors(file, {"other": torch.ones(2), "w": rows})
        files.append(TensorFile(folder, f"{rank}.safetensors"))
    return files


def saved(shape: tuple[int, ...] = (7, 3), dtype: torch.dtype = torch.int64) -> SavedRows:
    return SavedRows(name="w", shape=shape, dtype=dtype)


@pytest.mark.parametrize("sizes", [[7], [4, 3], [3, 3, 1], [2, 2, 2, 1], [1, 1, 1, 1, 1, 1, 1, 0]])
def test_rows_of_any_number_of_ranks_are_divided_among_any_number(sizes: list[int], tmp_path: Path) -> None:
    files = files_of(tmp_path, sizes)
    for engine in (None, OneProcess()):
        assert torch.equal(DividedTensors(files, engine).read(saved()), WHOLE)
    for num_ranks in (1, 2, 3, 4, 8):
        engines = [Dividing(rank, num_ranks) for rank in range(num_ranks)]
        parts = [DividedTensors(files, engine).read(saved()) for engine in engines]
        chunks = list(WHOLE.chunk(num_ranks))
        for part, chunk in zip(parts, chunks + [WHOLE[:0]] * (num_ranks - len(chunks)), strict=True):
            assert torch.equal(part, chunk)
            assert part.dtype == WHOLE.dtype


def test_rows_that_are_not_those_of_one_tensor_are_damage(tmp_path: Path) -> None:
    files = files_of(tmp_path, [4, 3])
    for shape, dtype in (((8, 3), torch.int64), ((6, 3), torch.int64)):
        with pytest.raises(DamagedCheckpointError, match=rf"have 7 rows of 'w', which has {shape[0]}"):
            DividedTensors(files, None).read(saved(shape, dtype))
    for shape, dtype in (((7, 2), torch.int64), ((7, 3), torch.float32), ((7,), torch.int64)):
        with pytest.raises(DamagedCheckpointError, match="A rank has no rows of 'w'"):
            DividedTensors(files, None).read(saved(shape, dtype))
    with pytest.raises(DamagedCheckpointError, match="A rank has no rows of 'x'"):
        DividedTensors(files, None).read(SavedRows(name="x", shape=(7, 3), dtype=torch.int64))


def test_text_about_rows_is_checked() -> None:
    places = {"w": Place(dtype=torch.float32, shape=(4, 3), start=0, size=48)}
    assert decode(b'{"$rows_of": "w", "shape": [7, 3]}', places) == SavedRows(
        name="w", shape=(7, 3), dtype=torch.float32
    )
    assert decode(b'{"$rows_of": "w", "shape": [4, 3]}', places).shape == (4, 3)
    for shape in ("[]", "[3, 3]", "[7, 2]", "[7]", "[7, 3, 1]", "[-7, 3]", "[7.0, 3]", "[true, 3]", '["7", 3]'):
        with pytest.raises(ValueError, match="do not fit its shape"):
            decode(f'{{"$rows_of": "w", "shape": {shape}}}'.encode(), places)
    with pytest.raises(KeyError):
        decode(b'{"$rows_of": "x", "shape": [7, 3]}', places)
    with pytest.raises(ValueError, match="not a marker of this version"):
        decode(b'{"$rows_of": "w", "shape": [7, 3], "more": 1}', places)
