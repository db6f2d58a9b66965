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

from .encoding import MAX_DEPTH, SCALARS
from .restorable import class_of
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
    """Stands for an object that `from_state` will make."""

    kind: type
    """The object's class."""
    state: Any
    """What `to_state` returned, with placeholders."""


def decode(text: bytes, places: Mapping[str, Place]) -> Any:
    """Return the state with placeholders for tensors, arrays and objects.

    Args:
        text: what `encode` wrote.
        places: the dtype and shape of each stored tensor by name.

    Raises:
        CheckpointError: an object's class is not imported, or is not a frozen dataclass that can be restored.
        ValueError: the text is not what `encode` writes.
    """

    return _with_placeholders(json.loads(text), places, 0)


def _with_placeholders(value: Any, places: Mapping[str, Place], depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise ValueError(f"its values are nested deeper than {MAX_DEPTH} levels")

    def inner(value: Any) -> Any:
        return _with_placeholders(value, places, depth + 1)

    match value:
        case list():
            return value if all(type(entry) in SCALARS for entry in value) else [inner(entry) for entry in value]
        case {"$tensor": str(name), **rest} if not rest:
            return SavedTensor(name=name, shape=places[name].shape, dtype=places[name].dtype)
        case {"$array": str(name), "dtype": str(dtype), "shape": list(shape), **rest} if not rest:
            return _saved_array(name, np.dtype(dtype), tuple(shape), places[name])
        case {"$object": str(name), "state": state, **rest} if not rest:
            return SavedObject(kind=class_of(name), state=inner(state))
        case {"$items": list(items), **rest} if not rest:
            return {inner(key): inner(entry) for key, entry in items}
        case {"$tuple": list(entries), **rest} if not rest:
            return tuple(inner(entry) for entry in entries)
        case dict():
            unknown = [key for key in value if key.startswith("$")]
            if unknown:
                raise ValueError(f"{unknown[0]!r} is not a marker of this version, or lacks its values")
            return {key: inner(entry) for key, entry in value.items()}
        case _:
            return value


def _saved_array(name: str, dtype: np.dtype[Any], shape: tuple[Any, ...], place: Place) -> SavedArray:
    are_counts = all(type(size) is int and size >= 0 for size in shape)
    if dtype.kind in "OV" or not are_counts or math.prod(shape) * dtype.itemsize != place.size:
        raise ValueError(f"the array {name!r} has a dtype or a shape that does not fit its bytes")
    return SavedArray(name=name, shape=shape, dtype=dtype)


def loaded(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Return `value` with every placeholder replaced. Each stored tensor is read once, with `read(name)`.

    Raises:
        CheckpointError: `from_state` of a class raised.
    """
    tensors: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        if name not in tensors:
            tensors[name] = read(name)
        return tensors[name]

    def restored(value: Any) -> Any:
        match value:
            case SavedTensor():
                return tensor(value.name)
            case SavedArray():
                # every array has bytes of its own, so that the array can take over the memory
                return (
                    read(value.name).numpy().view(value.dtype).reshape(value.shape)
                    if _has_bytes(value)
                    else _empty(value)
                )
            case SavedObject():
                return _from_state(value.kind, restored(value.state))
            case dict():
                return {restored(key): restored(entry) for key, entry in value.items()}
            case list():
                return [restored(entry) for entry in value]
            case tuple():
                return tuple(restored(entry) for entry in value)
            case _:
                return value

    return restored(value)


def _has_bytes(value: SavedArray) -> bool:
    return math.prod(value.shape) * value.dtype.itemsize > 0


def _empty(value: SavedArray) -> NDArray[Any]:
    return np.zeros(value.shape, value.dtype)


def _from_state(kind: Any, state: Any) -> Any:
    try:
        return kind.from_state(state)
    except Exception as error:
        raise CheckpointError(
            f"{kind.__name__}.from_state must accept what to_state returned; it raised {error!r}. Use the version of "
            f"{kind.__module__} that wrote the checkpoint."
        ) from error
