"""Training on several processes (ranks): the `Engine` protocol, and engines for one process and for data parallelism.

Every rank holds the whole policy and samples actions for its own states, so that a group never spans two ranks. Losses
are normalised by the counts of all ranks. The sum of the ranks' gradients is therefore the gradient of the whole batch.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .errors import ConfigError


@runtime_checkable
class Engine(Protocol):
    """Combines values of several ranks for the trainer. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    @property
    def num_ranks(self) -> int:
        """The number of processes."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, returned on every rank. All ranks pass tensors of the same shape."""

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of all ranks in rank order, padded to the widest, and the index of this rank's first row."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather one small object from each rank, in rank order."""


class OneProcess:
    """The engine of a single process: every operation returns its argument."""

    rank = 0
    num_ranks = 1

    def sum(self, values: Tensor) -> Tensor:
        """Return `values` unchanged: there is one process."""
        return values

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return `rows` unchanged, and 0 as the index of the first row."""
        return rows, 0

    def gather_objects(self, value: Any) -> list[Any]:
        """Return `[value]`: there is one process."""
        return [value]


class Replicated:
    """Data parallelism over `torch.distributed`. Start the script with `torchrun` and call `init_process_group` first.

    Args:
        group: a process group. None: all processes.

    Raises:
        ConfigError: `torch.distributed` is not initialised.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> trainer = GRPOTrainer(..., engine=Replicated())  # doctest: +SKIP
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist  # a single process does not need it

        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "Replicated needs torch.distributed: call torch.distributed.init_process_group() first, and start the "
                "script with `torchrun --nproc-per-node N script.py`."
            )
        self._dist, self._group = dist, group
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self.rank: int = dist.get_rank(group)
        """The number of this process, from 0."""
        self.num_ranks: int = dist.get_world_size(group)
        """The number of processes."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, as a new tensor."""
        total = values.to(self._device, copy=True)
        self._dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of all ranks in rank order, padded to the widest, and the index of this rank's first row."""
        own = rows.to(self._device, torch.uint8 if rows.dtype == torch.bool else rows.dtype)
        shapes: list[tuple[int, ...]] = self.gather_objects(tuple(rows.shape))
        padded = own.new_zeros([max(sizes) for sizes in zip(*shapes, strict=True)])  # `all_gather` needs one shape
        padded[tuple(slice(0, size) for size in rows.shape)] = own
        parts = [torch.empty_like(padded) for _ in shapes]
        self._dist.all_gather(parts, padded, group=self._group)
        all_ranks = torch.cat([part[: shape[0]] for part, shape in zip(parts, shapes, strict=True)])
        return all_ranks.to(rows.device, rows.dtype), sum(shape[0] for shape in shapes[: self.rank])

    def gather_objects(self, value: Any) -> list[Any]:
        """One value per rank, in rank order. Values are pickled, but only between the processes of one run."""
        values: list[Any] = [None] * self.num_ranks
        self._dist.all_gather_object(values, value, group=self._group)
        return values


def require_equal_weights(engine: Engine, parameters: dict[str, Tensor]) -> None:
    """Raise a ConfigError if the ranks start from different parameters, because training would never make them equal."""
    if engine.num_ranks == 1:
        return
    first, *others = engine.gather_objects([(name, _fingerprint(value)) for name, value in parameters.items()])
    for rank, found in enumerate(others, start=1):
        if found != first:
            differing = [a[0] for a, b in zip(found, first, strict=False) if a != b] or ["their number"]
            raise ConfigError(
                f"Ranks must start from the same weights; rank {rank} differs from rank 0 in {', '.join(differing[:3])}. Build "
                "the policy after torch.manual_seed(the same number), or load the same file on every rank."
            )


def _fingerprint(values: Tensor) -> float:
    """The sum of all values, each weighted by its position, so that swapped values are found."""
    flat = values.detach().flatten().double().cpu()
    return float((flat * torch.arange(1, len(flat) + 1)).sum())
