"""Tensors of which each rank holds some rows (the `DTensor`s of `torch.distributed.tensor`), seen as ordinary tensors."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only some rows of the tensor."""
    return hasattr(tensor, "device_mesh")  # asking for the class would import torch.distributed.tensor, which is slow


def local(tensor: Any) -> Any:
    """The rows that this rank holds, in the same memory. An ordinary tensor is returned unchanged."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor


def address_of(tensor: Tensor) -> int:
    """The address of the first value that this rank holds. A part without rows has one, too, if it belongs to a weight."""
    tensor = local(tensor)
    if tensor.numel():
        return tensor.data_ptr()
    return tensor.untyped_storage().data_ptr()


def own_rows(num_rows: int, rank: int, num_ranks: int) -> slice:
    """The rows of a rank: each rank has as many as `torch.chunk` gives it, so that the last ranks may have none."""
    size = -(-num_rows // num_ranks)
    return slice(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


def in_parts(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Divide tensors into the rows of those that are sharded, and those that this rank holds whole."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tensor in tensors:
        parts[not is_sharded(tensor)].append(local(tensor))
    return parts


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor, in place. Into a sharded tensor, a whole value is copied by its rows of this rank."""
    if is_sharded(target) and not is_sharded(value):
        mesh: Any = target.device_mesh  # type: ignore[attr-defined]
        value = value[own_rows(len(value), mesh.get_local_rank(), mesh.size())] if value.dim() else value
    local(target).copy_(local(value))


def sharded_like(rows: Tensor, shape: Sequence[int], mesh: Any) -> Tensor:
    """A sharded tensor of this shape, of which this rank has these rows."""
    from torch.distributed.tensor import DTensor, Shard

    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    whole: Tensor = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)
    return whole
