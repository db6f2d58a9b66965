"""What the trainer asks of the processes of a run: two protocols, and the engine of a single process."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


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

    def agree(self, error: BaseException | None = None) -> None:
        """Raise the same error on every rank if any rank passes an error. Ranks in another operation raise it there."""

    def waiting(self, seconds: float, reason: str) -> AbstractContextManager[None]:
        """Inside the block, at most for so many seconds, the other ranks know that this rank is late, and wait for it.

        Args:
            seconds: the longest time that this rank waits for something else.
            reason: what it waits for, as a sentence without a full stop. The other ranks log it.
        """


@runtime_checkable
class ShardsWeights(Engine, Protocol):
    """An engine that divides the weights of policies among the ranks. The trainer looks for these methods once."""

    def shard(self, policy: Any) -> None:
        """Divide the weights of a policy, in place. All ranks call this with equal weights."""

    def whole(self, policy: Any) -> AbstractContextManager[None]:
        """Inside the block, this rank has all weights of a policy. All ranks enter and leave it together."""

    def equal_count(self, count: int) -> int:
        """The largest count of any rank. All ranks run as many forward passes, because each of them gathers weights."""

    def accompany(self, policy: Any, loss: Callable[[], Tensor]) -> None:
        """Make a forward and a backward pass only because other ranks make one. The gradient is 0, and does not count."""

    def divided(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """A divided tensor of this shape, of which this rank has these rows."""

    def take_reached(self) -> set[int]:
        """The ids of the divided parameters that a gradient of this rank has reached since the last call."""


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

    def agree(self, error: BaseException | None = None) -> None:
        """Raise `error`, if there is one."""
        if error is not None:
            raise error

    def waiting(self, seconds: float, reason: str) -> AbstractContextManager[None]:
        """Do nothing: nobody waits for this process."""
        return nullcontext()
