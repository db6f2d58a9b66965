"""Checks of tensors against their annotations, for data classes and for functions that users call with tensors of their own.

An annotation such as `Float[Tensor, "N T"]` states the dtype and the shape. Axes with the same letter have the same size.
"""

import collections.abc
import numbers
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import AbstractArray, Int
from torch import Tensor

from grpo.errors import ContractError, GRPOError

from .conversion import as_tensor, describe, is_dense, require_rows

Sizes = dict[str, int]
"""The size of each axis by its letter."""

_DTYPES: Mapping[str, tuple[str, Callable[[Tensor], bool]]] = {
    "Float": ("floating-point", lambda x: x.is_floating_point() and x.element_size() > 1),
    "Int": ("integer", lambda x: not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)),
    "Real": (
        "real",
        lambda x: not (x.is_complex() or x.dtype == torch.bool or (x.is_floating_point() and x.itemsize == 1)),
    ),
    "Bool": ("bool", lambda x: x.dtype == torch.bool),
}
"""Maps a name of jaxtyping to its name in messages, and a check of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """One alternative of an annotation."""

    spelled: str
    """What a value must be, in messages."""
    holds: Callable[[str, Any, Sizes], bool]
    """Whether a value is that: (its name in messages, the value, sizes of axes). Sizes that were not known are added."""
    dims: tuple[str, ...] = ()
    """The axes of a tensor."""


def _rule_for(spelled: str, holds: Callable[[Any], bool]) -> _Rule:
    """A rule that needs the value alone."""
    return _Rule(spelled=spelled, holds=lambda _, value, __: holds(value))


_NONE = _rule_for("None", lambda value: value is None)
"""The rule of `X | None`, which is the last one."""


def as_group_ids(owner: str, value: Any) -> Int[Tensor, " N"]:
    """Convert group ids to integers [N]. Integers stay as they are; texts, tuples and the like are numbered as they appear."""
    required = f"{owner}: group_ids must be [N], one integer or text per row, at least one"
    entries = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value
    not_names = (float, complex, np.number, np.bool_, Tensor, types.NoneType)
    are_names = isinstance(entries, list | tuple) and any(not isinstance(entry, int) for entry in entries)
    if are_names and all(isinstance(x, collections.abc.Hashable) and not isinstance(x, not_names) for x in entries):
        numbers_of: dict[Any, int] = {}
        return torch.tensor([numbers_of.setdefault(entry, len(numbers_of)) for entry in entries])
    ids = as_tensor(required, value).cpu()
    if ids.dim() != 1 or len(ids) == 0 or ids.is_floating_point() or ids.is_complex():
        raise ContractError(f"{required}; got {describe(ids)}. Pass a list of integers or texts.")
    return ids.to(torch.int64)


def require_tensors(function: Callable[..., Any], **values: Any) -> None:
    """Check arguments of a function against its annotations: tensors of the right dtypes and shapes, finite numbers, names."""
    if torch.compiler.is_compiling():
        return
    rules, sizes = _rules(function), Sizes()
    for name, value in values.items():
        _require(f"{function.__name__}: ", name, value, rules[name], sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFields:
    """Base of data classes that hold tensors: every field is checked on construction against its annotation."""

    def __post_init__(self) -> None:
        """Check every field against its annotation."""
        if torch.compiler.is_compiling():
            return
        kind: Any = type(self)
        owner, sizes = f"{kind.__name__}.", Sizes()
        for name, rules in _rules(kind).items():
            value = getattr(self, name)
            if value is not None or rules[-1] is not _NONE:
                _require(owner, name, value, rules, sizes)


def require_finite_values(
    owner: str, values: Tensor, mask: Tensor | None = None, error: type[GRPOError] = ContractError
) -> None:
    """Check that a tensor has no NaN and no infinity. With a mask [N, T]: inside the mask."""
    wrong = ~values.isfinite()
    if bool((wrong if mask is None else wrong & mask.to(values.device)).any()):
        raise error(f"{owner} must be finite; got NaN or infinity. Remove these rows first.")


@cache
def _rules(owner: Any) -> dict[str, tuple[_Rule, ...]]:
    """The rules for each argument of a function, or for each field of a data class."""
    return {name: _alternatives(hint) for name, hint in get_type_hints(owner).items()}


def _alternatives(hint: Any) -> tuple[_Rule, ...]:
    """The rules of an annotation, one of which must hold: `X | None` has two."""
    return tuple(map(_rule, get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)))


def _rule(kind: Any) -> _Rule:
    if isinstance(kind, type) and issubclass(kind, AbstractArray):
        return _array_rule(kind)
    if get_origin(kind) is collections.abc.Sequence:  # rows, which may also be a tensor or an array
        return _Rule(spelled="rows", holds=_are_rows)
    if get_origin(kind) is collections.abc.Mapping:
        entries = get_args(kind)[1]
        number = _rule_for("a number", lambda value: isinstance(value, numbers.Real))  # a metric may be NaN
        rules = (number,) if entries is float else _alternatives(entries)
        return _Rule(spelled="a mapping of names", holds=partial(_is_mapping, rules))
    if get_origin(kind) is tuple and {*get_args(kind)} == {float}:
        count = len(get_args(kind))
        return _rule_for(f"{count} numbers", partial(_are_numbers, count))
    if get_origin(kind) is Literal:
        names = get_args(kind)
        return _rule_for(
            f"one of {', '.join(map(repr, names))}", lambda value: isinstance(value, str) and value in names
        )
    if get_origin(kind) is collections.abc.Callable:
        return _rule_for("a function", lambda value: callable(value) and not isinstance(value, type))
    if kind is float:
        return _rule_for("a finite number", _is_number)
    if kind is types.NoneType:
        return _NONE
    if isinstance(kind, type) and kind is not Any:
        return _rule_for(kind.__name__, lambda value: isinstance(value, kind))
    return _rule_for("anything", lambda _: True)  # Any, or an annotation of arguments that are no tensors


def _array_rule(kind: Any) -> _Rule:
    """A dense tensor of a dtype and a shape: letters, numbers, #letter (also 1), and *letter or ... (any number of axes)."""
    dtype, is_dtype = _DTYPES[kind.dtype.__name__]
    dims: list[str] = kind.dim_str.split()
    named = [dim for dim in dims if dim != "..." and not dim.startswith("*")]
    is_longer = len(named) < len(dims)
    start = len(named) if is_longer and dims[0] == "..." else 0

    def holds(_: str, value: Any, sizes: Sizes) -> bool:
        if not isinstance(value, Tensor) or not is_dense(value) or not is_dtype(value):
            return False
        if sizes.setdefault("", value.is_meta) != value.is_meta:  # with values and without cannot be mixed
            return False
        shape = value.shape
        if len(shape) != len(named) and not (is_longer and len(shape) > len(named)):
            return False
        for dim, size in zip(named, shape[len(shape) - start :] if start else shape, strict=False):
            if not _is_size(dim, size, sizes):
                return False
        return True

    return _Rule(spelled=f"a dense {dtype} tensor [{', '.join(dims)}]", holds=holds, dims=tuple(dims))


def _is_size(dim: str, size: int, sizes: Sizes) -> bool:
    """Whether an axis may have a size."""
    if dim.isdigit():
        return size == int(dim)
    return (dim[0] == "#" and size == 1) or sizes.setdefault(dim.lstrip("#"), size) == size


def _is_number(value: Any) -> bool:
    number = value.item() if isinstance(value, np.number) else value
    is_real = isinstance(number, int | float) and not isinstance(number, bool)
    return is_real and abs(number) <= sys.float_info.max


def _are_numbers(count: int, value: Any) -> bool:
    is_sequence = isinstance(value, tuple | list) and len(value) == count
    return is_sequence and all(isinstance(number, numbers.Real) for number in value)


def _are_rows(name: str, value: Any, _: Sizes) -> bool:
    require_rows(name, value)
    return True


def _is_mapping(rules: tuple[_Rule, ...], name: str, value: Any, sizes: Sizes) -> bool:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    for key, entry in value.items():
        _require(name, f"[{key!r}]", entry, rules, sizes)
    return True


def _require(owner: str, name: str, value: Any, rules: tuple[_Rule, ...], sizes: Sizes) -> None:
    for rule in rules:
        if rule.holds(owner + name, value, sizes):
            return
    required = " or ".join(_with_sizes(rule, sizes) for rule in rules)
    raise ContractError(f"{owner}{name} must be {required}; got {describe(value)}. Convert it first.")


def _with_sizes(rule: _Rule, sizes: Sizes) -> str:
    known = [str(sizes.get(dim, dim)) for dim in rule.dims]
    return rule.spelled + (f" = [{', '.join(known)}]" if known != [*rule.dims] else "")
