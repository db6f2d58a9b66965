"""Several processes as one: what an engine has to bring together, and the two that are here.

Every rank has the whole policy, samples for its own states (groups stay whole on a rank), and adds its gradient to that of the
others. Losses are normalised by the counts of all ranks, so the sum of the gradients is the gradient of the whole.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .errors import ConfigError


@runtime_checkable
class Engine(Protocol):
    """What the trainer asks of several processes. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Which process this is, from 0."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of tensors of one shape, on every rank."""
        ...

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of all ranks, one rank after the other, padded to the widest; and where this rank's begin."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Small values of any kind, one per rank."""
        ...


class OneProcess:
    """There is nobody else."""

    rank = 0
    num_ranks = 1

    def sum(self, values: Tensor) -> Tensor:
        """`values`."""
        return values

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """`rows`, from 0."""
        return rows, 0

    def gather_objects(self, value: Any) -> list[Any]:
        """`[value]`."""
        return [value]


class Replicated:
    """Data parallelism over `torch.distributed`: run under `torchrun`, after `init_process_group`.

    Args:
        group: a process group; None: all processes.

    Raises:
        ConfigError: `torch.distributed` is not initialised.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> trainer = GRPOTrainer(..., engine=Replicated())  # doctest: +SKIP
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist  # not needed by those who have one process

        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "Replicated needs torch.distributed: call torch.distributed.init_process_group() first, and start the "
                "script with `torchrun --nproc-per-node N script.py`."
            )
        self._dist, self._group = dist, group
        self._device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")

    @property
    def rank(self) -> int:
        """Which process this is, from 0."""
        return int(self._dist.get_rank(self._group))

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return int(self._dist.get_world_size(self._group))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, as a new tensor."""
        total = values.to(self._device, copy=True)
        self._dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """Sizes first: tensors of unequal shapes would be gathered as uninitialised memory."""
        own = rows.to(self._device, torch.uint8 if rows.dtype == torch.bool else rows.dtype)
        shapes: list[tuple[int, ...]] = self.gather_objects(tuple(rows.shape))
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        padded = own.new_zeros(largest)
        padded[tuple(slice(0, size) for size in rows.shape)] = own
        parts = [torch.empty_like(padded) for _ in shapes]
        self._dist.all_gather(parts, padded, group=self._group)
        together = torch.cat([part[: shape[0]] for part, shape in zip(parts, shapes, strict=True)])
        return together.to(rows.device, rows.dtype), sum(shape[0] for shape in shapes[: self.rank])

    def gather_objects(self, value: Any) -> list[Any]:
        """One per rank; pickled between the processes of one run, never from outside."""
        values: list[Any] = [None] * self.num_ranks
        self._dist.all_gather_object(values, value, group=self._group)
        return values


def require_equal_weights(engine: Engine, parameters: dict[str, Tensor]) -> None:
    """Every rank starts from the same policy.

    Raises:
        ConfigError: they differ, which no later step would mend.
    """
    if engine.num_ranks == 1:
        return
    sums = [(name, _fingerprint(value)) for name, value in parameters.items()]
    everyone = engine.gather_objects(sums)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            differing = [a[0] for a, b in zip(theirs, everyone[0], strict=False) if a != b] or ["their number"]
            raise ConfigError(
                f"Ranks must start from the same weights; rank {rank} differs from rank 0 in {', '.join(differing[:3])}. Build "
                "the policy after torch.manual_seed(the same number), or load the same file on every rank."
            )


def _fingerprint(values: Tensor) -> float:
    """A sum in which every place has a weight of its own."""
    flat = values.detach().flatten().double().cpu()
    return float((flat * torch.arange(1, len(flat) + 1)).sum())
