"""Files of tensors: the safetensors format, written and read in parts, with every header checked before a tensor is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo._storage import tensor_file as module
from grpo._storage.files import FileRecord, new_file, require_hash, require_size
from grpo._storage.tensor_file import CHUNK, DTYPES, TensorFile, write_tensors
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
            assert torch.equal(
                found.view(torch.uint8) if found.dim() else found, value.view(torch.uint8) if value.dim() else value
            )


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5, dtype=torch.float16), "c": torch.ones(1)}
    write(tmp_path, tensors | {"d": torch.ones(3, dtype=torch.complex64)})
    for name, place in TensorFile(tmp_path, NAME).places.items():
        assert place.start % place.dtype.itemsize == 0, name


LARGE = CHUNK // 4 + 3
"""Elements of a float32 tensor of slightly more than one chunk."""


def test_large_tensors_of_every_layout_are_written_in_the_order_of_their_elements(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    numbers = torch.arange(2 * LARGE, dtype=torch.float32)
    array = np.arange(2 * LARGE, dtype=np.float32)
    cases = {
        "contiguous": numbers,
        "matrix": numbers.view(2, LARGE),
        "transposed": numbers.view(2, LARGE).t(),
        "rows larger than a chunk, transposed": numbers.view(LARGE, 2).t(),
        "every second": numbers[::2],
        "expanded": numbers[:2].expand(LARGE, 2),
        "column": numbers.view(LARGE, 2)[:, 1],
        "three axes": numbers[: 2 * 3 * 1000].view(2, 1000, 3).transpose(0, 2),
        "conjugate": torch.complex(numbers, numbers).conj(),
    }
    for case, value in cases.items():
        with subtests.test(case=case):
            record = write(tmp_path, {"before": torch.ones(1), "x": value, "z": torch.ones(1)})
            require_hash(tmp_path, NAME, record)
            assert torch.equal(TensorFile(tmp_path, NAME).read("x"), value.resolve_conj())
    for case, value in {"array": array, "every second": array[::2], "transposed": array.reshape(2, LARGE).T}.items():
        with subtests.test(array=case):
            record = write(tmp_path, {"x": value})
            require_hash(tmp_path, NAME, record)
            found = TensorFile(tmp_path, NAME).read("x").numpy().view(np.float32).reshape(value.shape)
            np.testing.assert_array_equal(found, value)


def test_no_piece_is_larger_than_a_chunk(subtests: pytest.Subtests) -> None:
    numbers = torch.zeros(3 * LARGE)
    for value in (numbers, numbers.view(3, LARGE).t(), numbers.view(LARGE, 3).t(), numbers[:5], numbers[: CHUNK // 4]):
        with subtests.test(shape=value.shape):
            sizes = [len(chunk) for chunk in module.chunks_of(value)]
            assert sum(sizes) == value.nbytes
            assert max(sizes) <= CHUNK
            assert len(sizes) >= -(-value.nbytes // CHUNK)


def test_contiguous_tensors_are_not_copied() -> None:
    value = torch.zeros(LARGE)
    chunks = list(module.chunks_of(value))
    value.fill_(1.0)
    assert np.frombuffer(chunks[1], np.float32).tolist() == [1.0] * 3


# Headers


def write_raw(folder: Path, header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / NAME).write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_header_written_by_hand_is_accepted(tmp_path: Path) -> None:
    """This shows that the headers below are refused because of what they change."""
    write_raw(
        tmp_path, {"__metadata__": {"x": "y"}, "a": entry(shape=[2], offsets=[8, 16]), "b": entry("U8", [8], [0, 8])}
    )
    assert {name: place.start % 8 for name, place in TensorFile(tmp_path, NAME).places.items()}.keys() == {"a", "b"}
    assert TensorFile(tmp_path, NAME).read("a").tolist() == [0.0, 0.0]


def test_headers_that_do_not_describe_the_file_are_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """The safetensors package reads the header. It does not know that a shape of 2**64 values fits no tensor."""
    one = {"x": entry()}
    text = json.dumps(one).encode()
    cases: list[tuple[Any, int | None, str]] = [
        ([], None, "invalid JSON"),
        (b"\xff", None, "invalid UTF-8"),
        ({"x": entry(offsets=[0, 15])}, None, "invalid shape"),
        ({"x": entry(offsets=[1, 17])}, None, "invalid offset"),
        ({"x": entry(shape=[2, 1], offsets=[0, 8])}, None, "not fully covered"),
        ({"x": entry("F4", [32])}, None, "F4"),
        ({**one, "y": entry(shape=[0, 2**62, 4], offsets=[16, 16])}, None, "is too large"),
        (text, len(text) + 17, "header"),
        (text, 2**64 - 1, "header"),
    ]
    write_raw(tmp_path, one)
    assert TensorFile(tmp_path, NAME).read("x").shape == (2, 2)
    for header, length, message in cases:
        with subtests.test(header=str(header)[:60], message=message):
            write_raw(tmp_path, header, length=length)
            with pytest.raises(DamagedCheckpointError, match=rf"{NAME} is damaged: its header .*({message})"):
                TensorFile(tmp_path, NAME)
    for size in range(8):
        with subtests.test(size=size):
            (tmp_path / NAME).write_bytes(b"\0" * size)
            with pytest.raises(DamagedCheckpointError, match=f"{NAME} is damaged: its header"):
                TensorFile(tmp_path, NAME)


def test_a_file_that_has_changed_since_it_was_opened_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"x": torch.ones(1000)})
    file = TensorFile(tmp_path, NAME)
    data = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(data[:-1])
    with pytest.raises(DamagedCheckpointError, match=rf"{NAME} became shorter while it was read"):
        file.read("x")
    (tmp_path / NAME).unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"{NAME} is missing"):
        file.read("x")
