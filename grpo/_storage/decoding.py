"""Convert the JSON text and the tensors of a checkpoint back to nested state, in two steps.

`decode` checks the text and returns nested values with placeholders, and `loaded` replaces the placeholders by what the file of
tensors holds.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo.errors import CheckpointError

from .encoding import MAX_DEPTH, SCALARS, class_of
from .tensor_file import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Stands for a tensor that has not been read yet."""

    name: str
    """The tensor's name in the file of tensors."""
    shape: tuple[int, ...]
    """The tensor's shape."""
    dtype: torch.dtype
    """The tensor's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRows(SavedTensor):
    """Stands for a tensor of which the file of each rank has some rows. `shape` is the shape of the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedArray:
    """Stands for a numpy array that has not been read yet."""

    name: str
    """The name of the array's bytes in the file of tensors."""
    shape: tuple[int, ...]
    """The array's shape."""
    dtype: np.dtype[Any]
    """The array's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedObject:
    """Stands for an object that `from_state` will make. Where the object occurs again, there is the same placeholder."""

    number: int
    """Number of objects that end before this one in the text."""
    kind: type
    """The object's class."""
    state: Any
    """What `to_state` returned, with placeholders."""


def decode(text: bytes, places: Mapping[str, Place]) -> Any:
    """Return the state with placeholders for tensors, arrays and objects."""
    return _Decoder(places).value(json.loads(text), 0)


class _Decoder:
    """Goes through a value in the order of the text, and numbers the objects in it."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places
        self._objects: list[SavedObject] = []

    def value(self, value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH and isinstance(value, dict | list):
            raise ValueError(f"its values are nested deeper than {MAX_DEPTH} levels")

        def inner(value: Any) -> Any:
            return self.value(value, depth + 1)

        match value:
            case list():
                return value if all(type(entry) in SCALARS for entry in value) else [inner(entry) for entry in value]
            case {"$tensor": str(name), **rest} if not rest:
                return SavedTensor(name=name, shape=self._places[name].shape, dtype=self._places[name].dtype)
            case {"$rows_of": str(name), "shape": list(shape), **rest} if not rest:
                return _saved_rows(name, tuple(shape), self._places[name])
            case {"$array": str(name), "dtype": str(dtype), "shape": list(shape), **rest} if not rest:
                return _saved_array(name, np.dtype(dtype), tuple(shape), self._places[name])
            case {"$object": str(name), "state": state, **rest} if not rest:
                kind, state = class_of(name), inner(state)
                self._objects.append(SavedObject(number=len(self._objects), kind=kind, state=state))
                return self._objects[-1]
            case {"$same": int(number), **rest} if not rest:
                return self._same(number)
            case {"$items": list(items), **rest} if not rest:
                return {inner(key): inner(entry) for key, entry in items}
            case {"$tuple": list(entries), **rest} if not rest:
                return tuple(inner(entry) for entry in entries)
            case dict():
                # a mark of a newer version must not become a plain dict
                unknown = [key for key in value if key.startswith("$")]
                if unknown:
                    raise ValueError(f"{unknown[0]!r} is not a marker of this version, or lacks its values")
                return {key: inner(entry) for key, entry in value.items()}
            case _:
                return value

    def _same(self, number: int) -> SavedObject:
        """Return an object that occurs again. Its number is known when it is complete, so that no object contains itself."""
        if type(number) is not int or not 0 <= number < len(self._objects):
            raise ValueError(
                f"'$same' must be the number of one of the {len(self._objects)} objects before; got {number}"
            )
        return self._objects[number]


def _saved_rows(name: str, shape: tuple[Any, ...], place: Place) -> SavedRows:
    are_counts = all(type(size) is int and size >= 0 for size in shape)
    if not shape or not are_counts or place.shape[1:] != shape[1:] or place.shape[0] > shape[0]:
        raise ValueError(f"the rows of {name!r} do not fit its shape")
    return SavedRows(name=name, shape=shape, dtype=place.dtype)


def _saved_array(name: str, dtype: np.dtype[Any], shape: tuple[Any, ...], place: Place) -> SavedArray:
    are_counts = all(type(size) is int and size >= 0 for size in shape)
    if dtype.kind in "OV" or not are_counts or math.prod(shape) * dtype.itemsize != place.size:
        raise ValueError(f"the array {name!r} has a dtype or a shape that does not fit its bytes")
    return SavedArray(name=name, shape=shape, dtype=dtype)


def loaded(
    value: Any,
    read: Callable[[str], Tensor],
    objects: dict[int, Any],
    read_rows: Callable[[SavedRows], Tensor] | None = None,
) -> Any:
    """Return `value` with every placeholder replaced. Each stored tensor is read once, with `read(name)`.

    Args:
        value: What `decode` returned, or a part of it.
        read: Reads a tensor.
        read_rows: Reads a tensor that is divided among the files of the ranks. None: there is none.
        objects: The objects that were restored for other parts, by their numbers. The objects of this part are added.
    """
    return _Loader(read, objects, read_rows).value(value)


class _Loader:
    """Replaces placeholders.

    Nested functions that call themselves would be shorter, but keep the tensors until garbage is collected.
    """

    def __init__(self, read: Callable[[str], Tensor], objects: dict[int, Any], read_rows: Any) -> None:
        self._read, self._objects, self._read_rows = read, objects, read_rows
        self._tensors: dict[str, Tensor] = {}
        self._arrays: dict[SavedArray, NDArray[Any]] = {}

    def value(self, value: Any) -> Any:
        match value:
            case SavedRows():
                if value.name not in self._tensors:
                    self._tensors[value.name] = self._read_rows(value)
                return self._tensors[value.name]
            case SavedTensor():
                return self._tensor(value.name)
            case SavedArray():
                return self._array(value)
            case SavedObject():
                if value.number not in self._objects:
                    self._objects[value.number] = _from_state(value.kind, self.value(value.state))
                return self._objects[value.number]
            case dict():
                return {self.value(key): self.value(entry) for key, entry in value.items()}
            case list():
                return [self.value(entry) for entry in value]
            case tuple():
                return tuple(self.value(entry) for entry in value)
            case _:
                return value

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._read(name)
        return self._tensors[name]

    def _array(self, value: SavedArray) -> NDArray[Any]:
        if math.prod(value.shape) * value.dtype.itemsize == 0:
            return np.zeros(value.shape, value.dtype)
        if value not in self._arrays:  # what was one array is one again
            self._arrays[value] = self._read(value.name).numpy().view(value.dtype).reshape(value.shape)
        return self._arrays[value]


def _from_state(kind: Any, state: Any) -> Any:
    try:
        return kind.from_state(state)
    except Exception as error:
        raise CheckpointError(
            f"{kind.__name__}.from_state must accept what to_state returned; it raised {error!r}. Use the version of "
            f"{kind.__module__} that wrote the checkpoint."
        ) from error
