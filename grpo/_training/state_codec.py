"""Convert nested state to JSON and tensors, the two files of a checkpoint, and back. Checkpoints contain no pickle or code."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.errors import CheckpointError


def encode(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return `state` as a value for `json.dumps`, with its tensors by name. Equal views of one storage are stored once."""
    tensors: dict[str, Tensor] = {}
    return _encode(state, "state", tensors, {}), tensors


def _encode(value: Any, where: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    """Return `value` as JSON, and put its tensors into `tensors`. Types that JSON lacks become a dict with a `$...` key."""
    if isinstance(value, Tensor):
        return {"$tensor": _store(value.detach(), tensors, seen)}
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
        key = str(len(tensors))
        tensors[key] = torch.tensor(np.frombuffer(value.tobytes(), np.uint8))
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
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold. Use tensors, arrays, numbers, strings, None, "
        "and dicts, lists and tuples of these."
    )


def _store(value: Tensor, tensors: dict[str, Tensor], seen: dict[Any, str]) -> str:
    identity = (value.data_ptr(), value.device, value.dtype, tuple(value.shape), value.stride())
    if value.numel() and identity in seen:
        return seen[identity]
    key = seen[identity] = str(len(tensors))
    tensors[key] = value.cpu().contiguous().clone()
    return key


def decode(text: bytes, tensors: Mapping[str, Tensor]) -> Any:
    """Restore the state that `encode` was called with from its JSON value and tensors."""

    def restored(value: dict[str, Any]) -> Any:
        match value:
            case {"$tensor": key}:
                return tensors[key]
            case {"$array": key}:
                return np.frombuffer(tensors[key].numpy().tobytes(), value["dtype"]).reshape(value["shape"]).copy()
            case {"$items": items}:
                return dict(items)
            case {"$tuple": entries}:
                return tuple(entries)
            case _:
                return value

    return json.loads(text, object_hook=restored)
