"""Values of a saved state that cannot take the place of the present ones. A hash shows damage, and no wrong value."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from grpo._common.conversion import describe

from .decoding import SavedTensor

LARGEST = 2**64
"""No integer in a state is as large. Seeds are the largest ones."""


def unlike(where: str, present: Any, saved: Any, *, may_lack: bool = True) -> Iterator[str]:
    """Name each saved value of another kind than the present one: no number, no dict, no text, or an absurdly large integer.

    Args:
        where: The name of the state.
        present: The present state. What is None, or an object of another class, is not compared.
        saved: The state in a checkpoint, with or without placeholders.
        may_lack: Whether None may stand in place of a number.
    """
    if isinstance(present, Mapping) and isinstance(saved, Mapping):
        for name in present.keys() & saved.keys():
            yield from unlike(f"{where}.{name}", present[name], saved[name], may_lack=may_lack)
    elif isinstance(present, list | tuple) and isinstance(saved, list | tuple):
        for place, (one, other) in enumerate(zip(present, saved, strict=False)):
            yield from unlike(f"{where}[{place}]", one, other, may_lack=may_lack)
    elif not _is_like(present, saved, may_lack):
        yield f"{where}={describe(saved)} in place of {describe(present)}"


def _is_like(present: Any, saved: Any, may_lack: bool) -> bool:
    match present:
        case bool() | None:
            return True
        case int() | float():
            if saved is None:
                return may_lack
            is_number = isinstance(saved, float | Tensor | SavedTensor) or type(saved) is int
            return is_number and not (isinstance(saved, int) and abs(saved) >= LARGEST)
        case str():
            return saved is None or isinstance(saved, str)
        case Mapping():
            return saved is None or isinstance(saved, Mapping)
        case list() | tuple():
            return saved is None or isinstance(saved, list | tuple)
        case _:
            return True
