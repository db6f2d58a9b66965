"""A device without float64, such as Apple's MPS, imitated on the CPU: its tensors say "mps", and have no gradient."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("mps")
MOVES = (Tensor.to, Tensor.cpu, Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__)
"""Operations whose tensors may be on two devices."""


class OnDevice(Tensor):
    """A tensor that is on the CPU, and whose device reads "mps"."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        found = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE
        )
        found.held = held
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise AssertionError(f"{function} was called outside the block")


class _OnCPU(TorchFunctionMode):
    """Runs every operation on the CPU. Its result is on the device if its tensors are, or if it is moved there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_flatten((args, kwargs))[0]
        tensors = [value for value in given if isinstance(value, Tensor)]
        is_on_device = any(isinstance(value, OnDevice) for value in tensors)
        if is_on_device and getattr(function, "__self__", None) is Tensor.device:
            return DEVICE
        strangers = [value for value in tensors if not isinstance(value, OnDevice) and value.dim() > 0]
        if is_on_device and strangers and function not in MOVES:
            raise RuntimeError(f"Expected all tensors to be on the same device; {function} got mps and cpu")
        devices = [torch.device(value) for value in given if isinstance(value, torch.device) or value in ("cpu", "mps")]
        if function is Tensor.cpu:
            devices = [torch.device("cpu")]
        elif function is Tensor.to and len(tensors) > 1:
            devices = [DEVICE if isinstance(tensors[1], OnDevice) else torch.device("cpu")]
        elif function in (Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__):
            is_on_device = isinstance(args[0], OnDevice)
        if devices:
            is_on_device = devices[0] == DEVICE
        result = function(*tree_map(_cpu, args), **tree_map(_cpu, kwargs))
        return tree_map(_on_device, result) if is_on_device else result


def _cpu(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.held
    return torch.device("cpu") if value == DEVICE else value


def _on_device(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dtype in (torch.float64, torch.complex128):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
    return OnDevice(value)


@contextmanager
def imitated_device() -> Iterator[torch.device]:
    """Inside the block, "mps" is a device without float64 whose tensors do not mix with those of the CPU."""
    with _OnCPU():
        yield DEVICE
