"""Nested state as JSON and tensors, and back: what a checkpoint's two files hold. No pickle, and no code."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import CheckpointError


def encode(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """A value for `json.dumps`, and the tensors it refers to by name; a storage that is met twice is kept once.

    Raises:
        CheckpointError: naming the place of what is no tensor, array, number, string, None, dict, list or tuple.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, "state", tensors, {}), tensors


def _encode(value: Any, where: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    """JSON for `value`; tensors go to `tensors`, each storage once. Keys that JSON has not are spelled with a `$`."""
    if isinstance(value, Tensor):
        return {"$tensor": _store(value.detach(), tensors, seen)}
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
        data = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0)
        key = str(len(tensors))
        tensors[key] = data
        return {"$array": key, "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return _encode(value.item(), where, tensors, seen)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        items = [[key, _encode(entry, f"{where}[{key!r}]", tensors, seen)] for key, entry in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(items)
        return {"$items": [[_encode(key, where, tensors, seen), entry] for key, entry in items]}
    if isinstance(value, list | tuple):
        entries = [_encode(entry, f"{where}[{i}]", tensors, seen) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"$tuple": entries}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold. Give tensors, arrays, numbers, strings, None, "
        "and dicts, lists and tuples of these."
    )


def _store(value: Tensor, tensors: dict[str, Tensor], seen: dict[Any, str]) -> str:
    identity = (value.data_ptr(), value.device, value.dtype, tuple(value.shape), value.stride())
    if value.numel() and identity in seen:
        return seen[identity]
    key = seen[identity] = str(len(tensors))
    tensors[key] = value.cpu().contiguous().clone()
    return key


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    readers: dict[str, Callable[[], Any]] = {
        "$tensor": lambda: tensors[value["$tensor"]],
        "$array": lambda: _array(tensors[value["$array"]], value["dtype"], value["shape"]),
        "$items": lambda: {decode(key, tensors): decode(entry, tensors) for key, entry in value["$items"]},
        "$tuple": lambda: tuple(decode(entry, tensors) for entry in value["$tuple"]),
    }
    for tag, read in readers.items():
        if tag in value:
            return read()
    return {key: decode(entry, tensors) for key, entry in value.items()}


def _array(data: Tensor, dtype: str, shape: list[int]) -> NDArray[Any]:
    return np.frombuffer(data.numpy().tobytes(), dtype=dtype).reshape(shape).copy()
