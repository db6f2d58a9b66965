"""Values as text that is equal on all ranks if the values are: without addresses and process numbers."""

import dataclasses
import types
from collections.abc import Mapping
from enum import Enum
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from grpo._sharding.tensors import is_sharded

MAX_LENGTH = 120
"""A longer text of a part is cut, and its hash follows."""
MAX_ENTRIES = 1_000
"""Further entries of a collection are only counted."""
MAX_DEPTH = 6
"""A value that is nested more deeply is described by its class."""
CHUNK = 2**16
"""Number of values that are hashed at a time. Their words fit into a processor's cache."""
# as signed numbers, the first two are those of SplitMix64 (Steele et al. 2014); any odd numbers with many bits would do
_ODD = -7046029254386353131, -4658895280553007687, 7919


def kind_of(value: Any) -> str | None:
    """The name of a function, or of the class of another object."""
    return None if value is None else str(getattr(value, "__qualname__", type(value).__qualname__))


def described(value: Any, depth: int = 0) -> str:
    """Describe a value so that equal values have equal texts in all processes.

    A tensor is described by its shape, its dtype, and a hash of its values; a divided tensor by shape and dtype. A function is
    described by its name, its code, and the values of its defaults, its closure and its `partial`. An object with `settings()`
    is described by these, and a dataclass by its fields. Any other object is described by its `repr`, or by its class if the
    `repr` may differ between processes.
    """
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype}{list(value.shape)} {_short_hash(np.ascontiguousarray(value).tobytes())}"
    if depth > MAX_DEPTH:
        return str(kind_of(value))
    parts = _parts_of(value)
    if parts is not None:
        return f"{kind_of(value)}({', '.join(f'{name}={_short(part, depth)}' for name, part in parts.items())})"
    if isinstance(value, Mapping):
        entries = [f"{_short(key, depth)}: {_short(part, depth)}" for key, part in islice(value.items(), MAX_ENTRIES)]
        return f"{{{', '.join(entries)}}} of {len(value)}"
    if isinstance(value, set | frozenset):
        texts = sorted(_short(part, depth) for part in value)[:MAX_ENTRIES]  # processes have other orders
        return f"{type(value).__name__}({', '.join(texts)}) of {len(value)}"
    if isinstance(value, list | tuple):
        texts = [_short(part, depth) for part in islice(value, MAX_ENTRIES)]
        return f"{type(value).__name__}({', '.join(texts)}) of {len(value)}"
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, type | torch.nn.Module):
        return str(kind_of(value))
    text = repr(value)
    return str(kind_of(value)) if text[:1] == "<" or " at 0x" in text else text


def settings_of(value: Any) -> Mapping[str, Any] | None:
    """What an object itself says must be equal on all ranks. None: it says nothing."""
    own = None if isinstance(value, type) else getattr(value, "settings", None)
    found = own() if callable(own) else None
    return found if isinstance(found, Mapping) else None


def digest_of(texts: Mapping[str, str] | None) -> str:
    """A hash of texts by name, or nothing if there are none."""
    return _short_hash(repr(sorted(texts.items())).encode()) if texts else ""


def _parts_of(value: Any) -> Mapping[str, Any] | None:
    """The values that a callable, a dataclass or a scheduler holds, by name. None: it is something else."""
    if callable(value) and (settings := settings_of(value)) is not None:
        return settings
    if isinstance(value, partial):
        return {"function": value.func, **{f"args[{n}]": part for n, part in enumerate(value.args)}, **value.keywords}
    if isinstance(value, types.MethodType):
        return {"self": value.__self__} | _parts_of_function(value.__func__)
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, LRScheduler):
        return {name: part for name, part in vars(value).items() if name != "optimizer"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def _parts_of_function(function: Any) -> dict[str, Any]:
    if not isinstance(function, types.FunctionType):
        return {}
    code, defaults = function.__code__, function.__defaults__ or ()
    parts: dict[str, Any] = {"code": _short_hash(repr(_fixed(code)).encode())}
    parts |= zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    parts |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            parts[name] = cell.cell_contents
        except ValueError:  # the name is bound later
            parts[name] = "not bound"
    return parts


def _fixed(code: types.CodeType) -> tuple[Any, ...]:
    """What a function computes: instructions, names and constants, without its place in a file."""
    constants = [_fixed(one) if isinstance(one, types.CodeType) else described(one) for one in code.co_consts]
    return code.co_code, code.co_names, constants


def _short(value: Any, depth: int) -> str:
    text = described(value, depth + 1)
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH // 2]}... {_short_hash(text.encode())}"


def _short_hash(data: bytes) -> str:
    return sha256(data).hexdigest()[:12]


def _of_tensor(tensor: Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if is_sharded(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        return kind
    return f"{kind} {tensor.item()!r}" if tensor.numel() == 1 else f"{kind} {_hash_of(tensor):016x}"


def _hash_of(tensor: Tensor) -> int:
    """A hash of the bits of all values and of their order, computed where the tensor is."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    place = torch.arange(2 * min(CHUNK, tensor.numel()) + 1, device=tensor.device) * _ODD[0]
    for number, part in enumerate(tensor.detach().resolve_conj().resolve_neg().flatten().split(CHUNK)):
        octets = part.view(torch.uint8)
        if len(octets) % 8 or octets.storage_offset() % 8:
            octets = torch.cat([octets, octets.new_zeros(-len(octets) % 8)])
        words = octets.view(torch.int64)
        # a sum of the words alone would not notice values that change places, nor signs that do
        mixed = words + place[: len(words)] + number * _ODD[2]
        mixed = (mixed ^ (mixed >> 29)) * _ODD[1]
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total) % 2**64
