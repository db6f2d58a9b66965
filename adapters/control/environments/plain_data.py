"""Plain data of episode starts as values that a checkpoint can hold, and back: types, shared parts and order stay the same.

A checkpoint holds numbers, text, None, arrays, lists, tuples and dicts. Snapshots also contain complex numbers, bytes, numpy's
scalars, sets and deques, and one object may be in several places: environments change such an object in all of them at once.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from grpo.errors import ContractError

INLINE = (bool, int, float, str, type(None))
"""Types of values that are stored as they are. A tuple stays a tuple. Any other value becomes a dict with its kind."""


def pack(value: Any) -> Any:
    """Convert plain data to numbers, text, None, arrays, and lists, tuples and dicts of these. Arrays are not copied.

    Raises:
        ContractError: A value is not plain data, or is an object of a subclass, whose type would be lost.
    """
    return _Packing().packed(value)


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    return _Unpacking().value(packed)


class _Packing:
    """Numbers the objects that may be changed in place. An object that occurs again is stored as its number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def packed(self, value: Any) -> Any:
        kind = type(value)
        if kind in INLINE:
            return value
        if kind is tuple:
            return value if all(type(entry) in INLINE for entry in value) else tuple(self._all(value))
        if kind is frozenset:
            return {"frozenset": self._all(value)}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is bytes:
            return {"bytes": np.frombuffer(value, np.uint8)}
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return {"scalar": np.asarray(value)}
        if id(value) in self._numbers:
            return {"same": self._numbers[id(value)]}
        self._numbers[id(value)] = len(self._numbers)
        if kind is np.ndarray and not value.dtype.hasobject:
            return {"array": value}
        if kind is dict:
            return {"dict": [[self.packed(key), self.packed(entry)] for key, entry in value.items()]}
        if kind is list:
            return {"list": self._all(value)}
        if kind is set:
            return {"set": self._all(value)}
        if kind is deque:
            return {"deque": [value.maxlen, self._all(value)]}
        raise ContractError(
            f"An episode's start must be plain data to be saved in a checkpoint; it contains a {_qualified_name(kind)}. Use "
            "numbers, strings, numpy arrays, and dicts, lists, tuples and sets of these in the options and in what snapshot() "
            "returns, or train without checkpoint_dir."
        )

    def _all(self, values: Iterable[Any]) -> list[Any]:
        return [self.packed(entry) for entry in values]


class _Unpacking:
    """Keeps the objects that may be changed in place, in the order in which `_Packing` has numbered them."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def value(self, packed: Any) -> Any:
        if type(packed) in INLINE:
            return packed
        if type(packed) is tuple:
            return tuple(map(self.value, packed))
        ((kind, content),) = packed.items()
        match kind:
            case "frozenset":
                return frozenset(map(self.value, content))
            case "complex":
                return complex(*content)
            case "bytes":
                return content.tobytes()
            case "scalar":
                return content[()]
            case "same":
                return self._objects[content]
            case "array":
                return self._kept(content)
            case "dict":
                # an object is kept before its entries, as it was numbered before them
                found = self._kept({})
                found.update((self.value(key), self.value(entry)) for key, entry in content)
            case "list":
                found = self._kept([])
                found.extend(map(self.value, content))
            case "set":
                found = self._kept(set())
                found.update(map(self.value, content))
            case "deque":
                found = self._kept(deque(maxlen=content[0]))
                found.extend(map(self.value, content[1]))
            case _:
                raise ContractError(
                    f"Packed data cannot contain {kind!r}. Use the version of the package that packed it."
                )
        return found

    def _kept(self, value: Any) -> Any:
        self._objects.append(value)
        return value


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
