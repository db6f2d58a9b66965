"""Files of tensors: the safetensors format, written and read in parts, with every header checked before a tensor is read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo._ranks.processes import SeveralProcesses
from grpo._storage import tensor_file as module
from grpo._storage.decoding import SavedRows, decode
from grpo._storage.files import FileRecord, new_file, require_hash, require_size
from grpo._storage.opening import DividedTensors
from grpo._storage.tensor_file import CHUNK, DTYPES, Place, TensorFile, write_tensors
from grpo.engine import OneProcess
from grpo.errors import DamagedCheckpointError

pytestmark = pytest.mark.usefixtures("without_type_checks")

NAME = "tensors.safetensors"


def write(folder: Path, tensors: dict[str, Any]) -> FileRecord:
    (folder / NAME).unlink(missing_ok=True)
    with new_file(folder / NAME) as file:
        write_tensors(file, tensors)
    return file.record()


def of_every_dtype() -> dict[str, torch.Tensor]:
    numbers = torch.tensor([[0.0, 1.0, 3.0], [2.0, 100.0, 7.0]])
    return {str(dtype): numbers.to(dtype) for dtype in DTYPES.values()}


def test_files_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    """Each side reads what the other has written, and the hash is that of the file."""
    tensors = of_every_dtype() | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), 'ü "\\': torch.ones(2)}
    record = write(tmp_path, tensors)
    require_size(tmp_path, NAME, record)
    require_hash(tmp_path, NAME, record)
    theirs = load_file(tmp_path / NAME)
    assert theirs.keys() == tensors.keys()
    save_file(tensors, tmp_path / "theirs")
    ours = TensorFile(tmp_path, "theirs")
    assert ours.places.keys() == tensors.keys()
    for name, value in tensors.items():
        for found in (theirs[name], ours.read(name), TensorFile(tmp_path, NAME).read(name)):
            assert (found.dtype, found.shape) == (value.dtype, value.shape), name
            assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5, dtype=torch.float16), "c": torch.ones(1)}
    write(tmp_path, tensors | {"d": torch.ones(3, dtype=torch.complex64)})
    for name, place in TensorFile(tmp_path, NAME).places.items():
        assert place.start % place.dtype.itemsize == 0, name


LARGE = CHUNK // 4 + 3
"""Elements of a float32 tensor of slightly more than one chunk."""


NUMBERS, ARRAY = torch.arange(2 * LARGE, dtype=torch.float32), np.arange(2 * LARGE, dtype=np.float32)
LAYOUTS: dict[str, Any] = {
    "contiguous": NUMBERS,
    "matrix": NUMBERS.view(2, LARGE),
    "transposed": NUMBERS.view(2, LARGE).t(),
    "rows larger than a chunk, transposed": NUMBERS.view(LARGE, 2).t(),
    "every second": NUMBERS[::2],
    "expanded": NUMBERS[:2].expand(LARGE, 2),
    "column": NUMBERS.view(LARGE, 2)[:, 1],
    "three axes": NUMBERS[: 2 * 3 * 1000].view(2, 1000, 3).transpose(0, 2),
    "conjugate": torch.complex(NUMBERS, NUMBERS).conj(),
    "array": ARRAY,
    "every second of an array": ARRAY[::2],
    "transposed array": ARRAY.reshape(2, LARGE).T,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_tensors_of_every_layout_are_written_in_the_order_of_their_elements(layout, tmp_path: Path) -> None:
    value = LAYOUTS[layout]
    require_hash(tmp_path, NAME, write(tmp_path, {"before": torch.ones(1), "x": value, "z": torch.ones(1)}))
    found = TensorFile(tmp_path, NAME).read("x")
    if isinstance(value, torch.Tensor):
        assert torch.equal(found, value.resolve_conj())
    else:
        np.testing.assert_array_equal(found.numpy().view(np.float32).reshape(value.shape), value)


@pytest.mark.parametrize("of", [
    lambda t: t, lambda t: t.view(3, LARGE).t(), lambda t: t.view(LARGE, 3).t(), lambda t: t[:5],
    lambda t: t[: CHUNK // 4],
])  # fmt: skip
def test_no_piece_is_larger_than_a_chunk(of):
    value = of(torch.zeros(3 * LARGE))
    sizes = [len(chunk) for chunk in module.chunks_of(value)]
    assert sum(sizes) == value.nbytes
    assert max(sizes) <= CHUNK
    assert len(sizes) >= -(-value.nbytes // CHUNK)


def test_contiguous_tensors_are_not_copied() -> None:
    value = torch.zeros(LARGE)
    chunks = list(module.chunks_of(value))
    value.fill_(1.0)
    assert np.frombuffer(chunks[1], np.float32).tolist() == [1.0] * 3


def write_raw(folder: Path, header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / NAME).write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_header_written_by_hand_is_accepted(tmp_path: Path) -> None:
    """This shows that the headers below are refused because of what they change."""
    entries = {"a": entry(shape=[2], offsets=[8, 16]), "b": entry("U8", [8], [0, 8])}
    write_raw(tmp_path, {"__metadata__": {"x": "y"}, **entries})
    assert TensorFile(tmp_path, NAME).places.keys() == {"a", "b"}
    assert TensorFile(tmp_path, NAME).read("a").tolist() == [0.0, 0.0]
    write_raw(tmp_path, ONE)
    assert TensorFile(tmp_path, NAME).read("x").shape == (2, 2)


ONE = {"x": entry()}
TEXT = json.dumps(ONE).encode()


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        ([], None, "invalid JSON"),
        (b"\xff", None, "invalid UTF-8"),
        ({"x": entry(offsets=[0, 15])}, None, "invalid shape"),
        ({"x": entry(offsets=[1, 17])}, None, "invalid offset"),
        ({"x": entry(shape=[2, 1], offsets=[0, 8])}, None, "not fully covered"),
        ({"x": entry("F4", [32])}, None, "F4"),
        ({**ONE, "y": entry(shape=[0, 2**62, 4], offsets=[16, 16])}, None, "is too large"),
        (TEXT, len(TEXT) + 17, "header"),
        (TEXT, 2**64 - 1, "header"),
    ],
)
def test_headers_that_do_not_describe_the_file_are_refused(tmp_path: Path, header, length, message):
    """The safetensors package reads the header. It does not know that a shape of 2**64 values fits no tensor."""
    write_raw(tmp_path, header, length=length)
    with pytest.raises(DamagedCheckpointError, match=rf"{NAME} is damaged: its header .*({message})"):
        TensorFile(tmp_path, NAME)


@pytest.mark.parametrize("size", range(8))
def test_a_file_that_is_shorter_than_the_length_of_its_header_is_refused(tmp_path: Path, size):
    (tmp_path / NAME).write_bytes(b"\0" * size)
    with pytest.raises(DamagedCheckpointError, match=f"{NAME} is damaged: its header"):
        TensorFile(tmp_path, NAME)


def test_a_file_that_has_changed_since_it_was_opened_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"x": torch.ones(1000)})
    file = TensorFile(tmp_path, NAME)
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match=rf"{NAME} became shorter while it was read"):
        file.read("x")
    (tmp_path / NAME).unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"{NAME} is missing"):
        file.read("x")


# Tensors whose rows are in the files of several ranks are read whole, or divided among other ranks


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


SAVED = SavedRows(name="w", shape=(7, 3), dtype=torch.int64)


@pytest.mark.parametrize("sizes", [[7], [4, 3], [3, 3, 1], [2, 2, 2, 1], [1, 1, 1, 1, 1, 1, 1, 0]])
def test_rows_of_any_number_of_ranks_are_divided_among_any_number(sizes: list[int], tmp_path: Path) -> None:
    files = files_of(tmp_path, sizes)
    for engine in (None, OneProcess()):
        assert torch.equal(DividedTensors(files, engine).read(SAVED), WHOLE)
    for num_ranks in (1, 2, 3, 4, 8):
        engines = [Dividing(rank, num_ranks) for rank in range(num_ranks)]
        parts = [DividedTensors(files, engine).read(SAVED) for engine in engines]
        chunks = list(WHOLE.chunk(num_ranks))
        for part, chunk in zip(parts, chunks + [WHOLE[:0]] * (num_ranks - len(chunks)), strict=True):
            assert torch.equal(part, chunk)
            assert part.dtype == WHOLE.dtype


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("w", (8, 3), torch.int64, "have 7 rows of 'w', which has 8"),
        ("w", (6, 3), torch.int64, "have 7 rows of 'w', which has 6"),
        ("w", (7, 2), torch.int64, "A rank has no rows of 'w'"),
        ("w", (7, 3), torch.float32, "A rank has no rows of 'w'"),
        ("w", (7,), torch.int64, "A rank has no rows of 'w'"),
        ("x", (7, 3), torch.int64, "A rank has no rows of 'x'"),
    ],
)
def test_rows_that_are_not_those_of_one_tensor_are_damage(tmp_path: Path, name, shape, dtype, message):
    with pytest.raises(DamagedCheckpointError, match=message):
        DividedTensors(files_of(tmp_path, [4, 3]), None).read(SavedRows(name=name, shape=shape, dtype=dtype))


PLACES = {"w": Place(dtype=torch.float32, shape=(4, 3), start=0, size=48)}


def test_text_about_rows_tells_their_tensor() -> None:
    for num_rows in (7, 4):
        expected = SavedRows(name="w", shape=(num_rows, 3), dtype=torch.float32)
        assert decode(b'{"$rows_of": "w", "shape": [%d, 3]}' % num_rows, PLACES) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        *(
            (f'{{"$rows_of": "w", "shape": {shape}}}', pytest.raises(ValueError, match="do not fit its shape"))
            for shape in ("[]", "[3, 3]", "[7, 2]", "[7]", "[7, 3, 1]", "[-7, 3]", "[7.0, 3]", "[true, 3]", '["7", 3]')
        ),
        ('{"$rows_of": "x", "shape": [7, 3]}', pytest.raises(KeyError)),
        ('{"$rows_of": "w", "shape": [7, 3], "more": 1}', pytest.raises(ValueError, match="not a marker of this")),
    ],
)
def test_text_about_rows_is_checked(text, error):
    with error:
        decode(text.encode(), PLACES)
