"""Write and read the safetensors format in small parts, so that no second copy of the tensors is in memory.

A file is the header's length (8 bytes, little-endian), a JSON header with the dtype, shape and place of each tensor, and the
tensors' bytes one after another.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grpo.errors import DamagedCheckpointError

from .files import CHUNK, HashingWriter, opened, read_exactly

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The dtypes that a file can hold, by their names in the format."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA = "__metadata__"
"""A key of the header that names no tensor."""

Stored: TypeAlias = Tensor | NDArray[Any]
"""What a file stores: a tensor, or an array, of which the file has the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the bytes of one tensor are in a file."""

    dtype: torch.dtype
    """The tensor's dtype."""
    shape: tuple[int, ...]
    """The tensor's shape."""
    start: int
    """Position of the first byte in the file."""
    size: int
    """Number of bytes."""


def write_tensors(file: HashingWriter, tensors: Mapping[str, Stored]) -> None:
    """Write all tensors by name. Arrays are stored as bytes."""
    names = sorted(tensors, key=lambda name: -_item_size(tensors[name]))  # larger items first: every tensor is aligned
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        value, begin = tensors[name], end
        end += value.nbytes
        code, shape = (CODES[value.dtype], list(value.shape)) if isinstance(value, Tensor) else ("U8", [value.nbytes])
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # tensors begin at a multiple of 8 bytes, as in files that the package safetensors writes
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        for chunk in chunks_of(tensors[name]):
            file.write(chunk, is_constant=_is_in_order(tensors[name]))


def _item_size(value: Stored) -> int:
    return value.element_size() if isinstance(value, Tensor) else 1


def chunks_of(value: Stored) -> Iterator[memoryview]:
    """The bytes of a tensor or an array, at most `CHUNK` at a time, in the order of its elements.

    Values in the host's memory are not copied if their elements are in order. The chunks of other values share one buffer, so
    that each chunk has to be used before the next one is asked for.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        size = 0 if _is_in_order(value) else min(value.numel(), CHUNK // value.element_size())
        copied = torch.empty(size, dtype=value.dtype)
        for piece in _pieces(value):
            if size:
                piece = copied[: piece.numel()].view(piece.shape).copy_(piece)
            yield _bytes_of(piece.reshape(-1).view(torch.uint8).numpy() if piece.numel() else np.empty(0))
    else:
        for piece in _pieces(value):
            yield _bytes_of(np.ascontiguousarray(piece))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")


def _is_in_order(value: Stored) -> bool:
    """Whether the bytes are in the host's memory as they are written, so that they are not copied."""
    if not isinstance(value, Tensor):
        return bool(value.flags.c_contiguous)
    return value.is_contiguous() and value.device.type == "cpu" and not value.is_conj() and not value.is_neg()


def _pieces(value: Any) -> Iterator[Any]:
    """Split a tensor or an array into views of at most `CHUNK` bytes, in the order of its elements."""
    is_flat = value.is_contiguous() if isinstance(value, Tensor) else value.flags.c_contiguous
    if value.nbytes > CHUNK and is_flat:
        value = value.reshape(-1)
    if value.ndim == 0 or value.nbytes <= CHUNK:
        yield value
        return
    bytes_per_entry = value.nbytes // len(value)
    if bytes_per_entry > CHUNK:
        for entry in value:
            yield from _pieces(entry)
        return
    step = CHUNK // bytes_per_entry
    for begin in range(0, len(value), step):
        yield value[begin : begin + step]


class TensorFile:
    """A file of tensors whose header fits its size. Its tensors are read one at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        with opened(folder, name) as file:
            try:
                with safe_open(folder / name, framework="numpy"):  # refuses a header that does not describe the file
                    length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                self.places = {key: _place(entry, 8 + length) for key, entry in header.items() if key != METADATA}
            except (SafetensorError, ValueError, KeyError) as error:
                raise DamagedCheckpointError(
                    f"{folder / name} is damaged: its header does not describe the file ({error}). Use another checkpoint."
                ) from error
        """Where each tensor is, by name."""

    def read(self, name: str) -> Tensor:
        """Read one tensor into new memory."""
        place = self.places[name]
        return self._values(place, place.start, place.shape)

    def read_rows(self, name: str, begin: int, end: int) -> Tensor:
        """Read the rows of one tensor from `begin` to `end` into new memory. Other rows are not read."""
        place = self.places[name]
        size_of_row = place.size // max(place.shape[0], 1)
        return self._values(place, place.start + begin * size_of_row, (end - begin, *place.shape[1:]))

    def _values(self, place: Place, start: int, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * place.dtype.itemsize
        # read and not mapped: if a mapped file is cut, the process dies by a signal
        with opened(self._folder, self._name) as file:
            data = torch.empty(size, dtype=torch.uint8)
            file.seek(start)
            if size:
                read_exactly(file, data.numpy().data, self._folder / self._name)
        return data.view(place.dtype).reshape(shape)


def _place(entry: Mapping[str, Any], start: int) -> Place:
    """Where a tensor is, by its entry in the header. Tensors begin at `start`."""
    if math.prod(max(length, 1) for length in entry["shape"]) > sys.maxsize:
        raise ValueError(f"the shape {entry['shape']} is too large")
    begin, end = entry["data_offsets"]
    return Place(dtype=DTYPES[entry["dtype"]], shape=tuple(entry["shape"]), start=start + begin, size=end - begin)
