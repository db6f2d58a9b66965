"""What a checkpoint gives back: the round trip, and a comparison of values and types to the last bit."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.checkpoint import read_checkpoint, write_checkpoint


def through_checkpoint(value: Any, folder: Path) -> Any:
    """Write a value to a checkpoint, and read it back."""
    return read_checkpoint(write_checkpoint(folder / "checkpoint", {"value": value}, iteration=1))["value"]


def assert_same(found: Any, expected: Any, where: str = "value") -> None:
    """Equal values of equal types at any depth. NaN equals NaN, and 0.0 differs from -0.0 and from 0."""
    assert type(found) is type(expected), where
    if is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name), f"{where}.{field.name}")
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        as_bytes = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
        assert torch.equal(*as_bytes), where
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), (
            where
        )
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), where
        for key, key_found in zip(expected, found, strict=True):
            assert_same(key_found, key, f"{where}'s key {key!r}")
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple | deque):
        assert len(found) == len(expected), where
        assert not isinstance(expected, deque) or found.maxlen == expected.maxlen, where
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    elif isinstance(expected, float):
        assert (math.isnan(found) and math.isnan(expected)) or repr(found) == repr(expected), where
    else:
        assert found == expected, where
