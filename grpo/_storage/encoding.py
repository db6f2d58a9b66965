"""Convert nested state to JSON text and tensors, the two files of a checkpoint. Checkpoints contain no pickle and no code.

Types that JSON lacks become an object with one `$...` key. `decoding` has the way back.
"""

import enum
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo._sharding.tensors import address_of, is_sharded, local
from grpo.errors import CheckpointError

from .tensor_file import CODES, METADATA, Stored

BLOCK = 2**20
"""Bytes of JSON text that are written at a time."""
SLICE = 256
"""Entries of a list that are converted at a time."""
SCALARS = (bool, int, float, str, type(None))
MAX_DEPTH = 100
"""Levels of nesting. Deeper values would exceed the limit of recursion when they are read."""
MAX_BITS = 10_000
"""Bits of an integer. Python refuses to read integers of more than 4,300 digits."""
ALLOWED = "Use tensors, arrays, numbers, strings, None, and dicts, lists and tuples of these"
PICTURE = "If it is a picture, pass adapters.llm.Picture.of(picture) in its place, which a checkpoint holds once."
ADVICE = f"{ALLOWED}, give the class to_state() and from_state(), or train without checkpoint_dir."


def encode(state: Mapping[str, Any], sink: Callable[[bytes], object]) -> dict[str, Stored]:
    """Pass the JSON text of `state` to `sink` in parts, and return the tensors and arrays that it refers to by name.

    Tensors are not copied. Equal views of one storage are stored once, and so are an array and an object with `to_state` that
    occur again.
    """
    encoder = _Encoder(sink)
    encoder.encode(state, "state")
    return encoder.tensors


def require_encodable(value: Any, where: str) -> None:
    """Raise the `CheckpointError` that saving `value` would raise. `where` names the value in the message."""
    _Encoder(len).encode(value, where)  # the text goes nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """An object that is in the text. A later occurrence refers to it."""

    value: Any
    """The object. As long as it is held, no other object has its id."""
    number: int
    """Number of objects that were complete before this one."""
    height: int
    """Levels of nesting that the object adds to its own level."""


class _Encoder:
    """Writes JSON text in the order of the nested value, and collects the tensors."""

    def __init__(self, sink: Callable[[bytes], object]) -> None:
        self.tensors: dict[str, Stored] = {}
        self._sink = sink
        self._seen: dict[Any, str] = {}
        self._objects: dict[int, _Written] = {}
        self._deepest = 0
        self._parts: list[str] = []
        self._length = 0

    def encode(self, value: Any, where: str) -> None:
        try:
            self._value(value, where, (), 0)
        except RecursionError as error:
            raise _too_deep(where) from error
        self._flush()

    def _write(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)
        if self._length >= BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._parts:
            self._sink("".join(self._parts).encode())
        self._parts, self._length = [], 0

    def _value(self, value: Any, where: str, path: tuple[str, ...], depth: int) -> None:
        if isinstance(value, np.generic):
            value = value.item()
        # before scalars: an `IntEnum` is a number, and would come back as a plain one
        if isinstance(value, enum.Enum):
            raise _unknown(value, where)
        if isinstance(value, SCALARS):
            self._write(_scalar(value, where))
            return
        if depth > MAX_DEPTH:
            raise _too_deep(where)
        self._deepest = max(self._deepest, depth)
        if isinstance(value, Tensor) and is_sharded(value):
            self._write(json.dumps({"$rows_of": self._tensor(value, where, path), "shape": list(value.shape)}))
        elif isinstance(value, Tensor):
            self._write(json.dumps({"$tensor": self._tensor(value, where, path)}))
        elif isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
            name = self._array(value, path)
            self._write(json.dumps({"$array": name, "dtype": str(value.dtype), "shape": list(value.shape)}))
        elif isinstance(value, Mapping):
            self._mapping(value, where, path, depth)
        elif isinstance(value, list):
            self._entries(value, where, path, depth)
        elif isinstance(value, tuple) and not hasattr(value, "_fields"):
            self._write('{"$tuple": ')
            self._entries(value, where, path, depth)
            self._write("}")
        elif (kind := restorable_name(type(value))) is not None:
            self._object(value, kind, where, path, depth)
        else:
            raise _unknown(value, where)

    def _object(self, value: Any, kind: str, where: str, path: tuple[str, ...], depth: int) -> None:
        """Write an object's state, or a reference if the same object is in the text already.

        The state of a group is the same object in each of its rows, and rows are in the replay buffer as well.
        """
        written = self._objects.get(id(value))
        if written is not None:
            if depth + written.height > MAX_DEPTH:
                raise _too_deep(where)
            self._deepest = max(self._deepest, depth + written.height)
            self._write(json.dumps({"$same": written.number}))
            return
        above, self._deepest = self._deepest, depth
        self._write(f'{{"$object": {json.dumps(kind)}, "state": ')
        self._value(value.to_state(), f"{where}.to_state()", path, depth + 1)
        self._write("}")
        # numbered when it is complete, so that no object can refer to itself
        self._objects[id(value)] = _Written(value=value, number=len(self._objects), height=self._deepest - depth)
        self._deepest = max(self._deepest, above)

    def _entries(self, values: Sequence[Any], where: str, path: tuple[str, ...], depth: int) -> None:
        self._write("[")
        for begin in range(0, len(values), SLICE):
            part = values[begin : begin + SLICE]
            self._write(", " if begin else "")
            if all(type(entry) in SCALARS for entry in part) and not any(map(_is_long, part)):
                self._write(json.dumps(part)[1:-1])  # long lists of numbers are usual, and this is much faster
                continue
            for i, entry in enumerate(part, start=begin):
                self._write(", " if i > begin else "")
                self._value(entry, f"{where}[{i}]", (*path, str(i)), depth + 1)
        self._write("]")

    def _mapping(self, value: Mapping[Any, Any], where: str, path: tuple[str, ...], depth: int) -> None:
        is_plain = all(type(key) is str and not key.startswith("$") for key in value)
        self._write("{" if is_plain else '{"$items": [')
        for i, (key, entry) in enumerate(value.items()):
            self._write(", " if i else "")
            if is_plain:
                self._write(f"{json.dumps(key)}: ")
            else:
                self._write("[")
                self._value(key, where, (*path, "key"), depth + 1)
                self._write(", ")
            self._value(entry, f"{where}[{key!r}]", (*path, str(key)), depth + 1)
            self._write("" if is_plain else "]")
        self._write("}" if is_plain else "]}")

    def _tensor(self, value: Tensor, where: str, path: tuple[str, ...]) -> str:
        if value.layout != torch.strided or value.dtype not in CODES or value.is_meta:
            raise CheckpointError(
                f"{where} is a tensor of {value.dtype}, {value.layout}, on {value.device}, which a checkpoint cannot hold. "
                "Use a dense tensor of a usual dtype with values."
            )
        # the whole shape is a part of the identity, so that all ranks give equal names, also to no rows
        shape, value = tuple(value.shape), local(value).detach()
        identity = (
            *(address_of(value), value.device, value.dtype, shape, value.stride()),
            *(value.is_conj(), value.is_neg()),
        )
        if address_of(value) == 0 or identity not in self._seen:
            self._seen[identity] = self._store(value, path)
        return self._seen[identity]

    def _array(self, value: np.ndarray, path: tuple[str, ...]) -> str:
        # the rows of a group have the same state, and its pictures and observations may be large
        identity = ("array", value.__array_interface__["data"][0], str(value.dtype), value.shape, value.strides)
        if identity not in self._seen:
            self._seen[identity] = self._store(value, path)
        return self._seen[identity]

    def _store(self, value: Stored, path: tuple[str, ...]) -> str:
        """Keep a value under a readable name that is not in use yet."""
        readable = ".".join(path).encode("ascii", "replace").decode() or "value"
        name, number = readable, 1
        while name in self.tensors or name == METADATA:
            number += 1
            name = f"{readable}.{number}"
        self.tensors[name] = value
        return name


def _is_long(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > MAX_BITS


def _scalar(value: Any, where: str) -> str:
    if _is_long(value):
        raise CheckpointError(
            f"{where} must have at most {MAX_BITS} bits; it has {value.bit_length()}. Store it as a string or as a tensor."
        )
    return json.dumps(value)


def _unknown(value: Any, where: str) -> CheckpointError:
    is_picture = isinstance(value, bytes) or type(value).__module__.startswith("PIL.")
    advice = f"{PICTURE} {ADVICE}" if is_picture else ADVICE
    return CheckpointError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold. {advice}")


def _too_deep(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where[:100]} is nested deeper than {MAX_DEPTH} levels, or contains itself. Store it in a flatter form."
    )


def restorable_name(kind: type) -> str | None:
    """Return `module:qualname` of a class whose objects can be restored. None: the class does not qualify."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if _qualifies(kind) and _imported(name) is kind else None


def _qualifies(kind: Any) -> bool:
    """Whether a class is a frozen dataclass that defines both methods itself, so that it means to be restored."""
    if not isinstance(kind, type):
        return False
    own = vars(kind)
    is_frozen = "__dataclass_params__" in own and own["__dataclass_params__"].frozen
    return is_frozen and callable(own.get("to_state")) and isinstance(own.get("from_state"), classmethod)


def _imported(name: str) -> Any:
    """Return the class `module:qualname` if its module is imported, else None. Nothing is imported, and no code is run."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


def class_of(name: str) -> type:
    kind = _imported(name)
    if not _qualifies(kind):
        module = name.partition(":")[0]
        raise CheckpointError(
            f"The checkpoint holds a {name}, which must be a frozen dataclass with to_state() and from_state() in a module "
            f"that is already imported. Import {module} before loading."
        )
    return kind  # type: ignore[no-any-return]
