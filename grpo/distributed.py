"""Training on several processes (ranks): the `Engine` protocol, and engines for one process and for data parallelism.

Every rank holds the whole policy and samples actions for its own states, so that a group never spans two ranks. Losses
are normalised by the counts of all ranks. The sum of the ranks' gradients is therefore the gradient of the whole batch.

A rank that fails tells the others in the next exchange of values, so that all ranks raise the same error.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ._ranks.equality import differing_values, differing_weights, fingerprints, printed
from ._ranks.meetings import Meetings
from ._ranks.messages import PrintedOnce
from ._ranks.shared_errors import error_for_all, is_shared, mark_as_shared, problem_of
from .errors import ConfigError, RankError, TrainingInterrupted

MAX_INLINE_VALUES = 64
"""Tensors of at most so many values travel with the message that precedes every collective operation."""


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


class Replicated:
    """Data parallelism over `torch.distributed`. Start the script with `torchrun` and call `init_process_group` first.

    Messages between the ranks, and tensors on the CPU, use gloo connections of their own. With the NCCL backend, tensors use
    the group. Ranks above 0 print a `GRPOWarning` or a line of the logger "grpo" only if rank 0 does not print the same.

    Args:
        group: a process group. None: all processes.
        timeout: seconds that a rank waits for the other ranks where all ranks have to meet. Larger: ranks may differ more in
            the time they need to sample; a rank that died without closing its connections, or hangs, is noticed later.

    Raises:
        ConfigError: `torch.distributed` is not initialised, or the ranks have different timeouts.
        RankError: a rank did not build its engine within the timeout.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> trainer = GRPOTrainer(..., engine=Replicated(timeout=600))  # doctest: +SKIP
    """

    def __init__(self, group: Any = None, *, timeout: float = 60.0) -> None:
        import torch.distributed as dist  # a single process does not need it

        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "Replicated needs torch.distributed: call torch.distributed.init_process_group() first, and start the "
                "script with `torchrun --nproc-per-node N script.py`."
            )
        if not 0.0 < timeout < float("inf"):
            raise ConfigError(f"Replicated.timeout must be above 0 seconds and finite; got {timeout!r}.")
        group = dist.group.WORLD if group is None else group
        self._dist, self._group = dist, group if dist.get_backend(group) == "nccl" else None
        self._device = torch.device("cpu" if self._group is None else "cuda")
        self.rank: int = dist.get_rank(group)
        """The number of this process, from 0."""
        self.num_ranks: int = dist.get_world_size(group)
        """The number of processes."""
        number = _ENGINES[group.group_name] = _ENGINES[group.group_name] + 1
        store = dist.PrefixStore(f"engine {number}", group.get_group_store())  # type: ignore[attr-defined]
        self._meetings = Meetings(store, self.rank, self.num_ranks, timeout)
        self._printed = PrintedOnce(self.rank)
        weakref.finalize(self, self._printed.close)
        require_same_on_all_ranks(self, "Replicated", {"timeout": timeout})

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, as a new tensor."""
        kinds, inline = self._announce("sum", values)
        if len(set(kinds)) > 1:
            raise _on_all_ranks(RankError(f"sum() needs one shape and dtype on all ranks. {_in_words(kinds)}"))
        if inline:
            first, *others = inline
            for other in others:  # in rank order, so that every rank gets the same bits
                first = first + other
            return first
        total = values.to(self._device, copy=True)
        if self._group is None:
            self._meetings.all_reduce(total)
        else:
            self._dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of all ranks in rank order, padded to the widest, and the index of this rank's first row."""
        kinds, parts = self._announce("gather", rows)
        if len({(len(shape), dtype) for shape, dtype in kinds}) > 1:
            raise _on_all_ranks(RankError(f"gather() needs one number of axes and one dtype. {_in_words(kinds)}"))
        shapes = [shape for shape, _ in kinds]
        widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        parts = parts or self._gathered(_padded(rows, widest))
        all_ranks = torch.cat([_padded(part, widest)[: shape[0]] for part, shape in zip(parts, shapes, strict=True)])
        return all_ranks.to(rows.device), sum(shape[0] for shape in shapes[: self.rank])

    def gather_objects(self, value: Any) -> list[Any]:
        """One value per rank, in rank order. Values are pickled, but only between the processes of one run."""
        return self._exchange("gather_objects", value)

    def agree(self, error: BaseException | None = None) -> None:
        """Meet all ranks. If any rank passes an error, every rank raises the same error.

        The error of the lowest rank decides. An error of `grpo.errors` keeps its type, and any other error becomes a
        `RankError`. A `TrainingInterrupted` is raised on all ranks if no rank has an error.
        """
        self._exchange("agree", None, error)

    def waiting(self, seconds: float, reason: str) -> AbstractContextManager[None]:
        """Inside the block, at most for so many seconds, the others wait without a timeout, and log the reason.

        They still notice within the timeout if this rank ends or hangs.
        """
        return self._meetings.busy(seconds, reason)

    def _announce(
        self, operation: str, values: Tensor
    ) -> tuple[list[tuple[tuple[int, ...], torch.dtype]], list[Tensor]]:
        """Tell all ranks the shape and dtype of a tensor. Return what they told, and their tensors if all are small."""
        is_small = values.numel() <= MAX_INLINE_VALUES and values.device.type == "cpu"
        told = self._exchange(operation, (tuple(values.shape), values.dtype, values.tolist() if is_small else None))
        kinds = [(shape, dtype) for shape, dtype, _ in told]
        if any(numbers is None for _, _, numbers in told):
            return kinds, []
        return kinds, [torch.tensor(numbers, dtype=dtype).reshape(shape) for shape, dtype, numbers in told]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have the same shape."""
        sent = own.to(self._device, torch.uint8 if own.dtype == torch.bool else own.dtype)
        if self._group is None:
            parts = self._meetings.all_gather(sent)
        else:
            parts = [torch.empty_like(sent) for _ in range(self.num_ranks)]
            self._dist.all_gather(parts, sent, group=self._group)
        return [part.to(own.dtype) for part in parts]

    def _exchange(self, operation: str, value: Any, error: BaseException | None = None) -> list[Any]:
        """Send one object to all ranks, with what this rank is doing. Every operation begins with this."""
        doing = _DOING.get()
        problem = None if error is None else problem_of(error)
        message = operation, doing, problem, self._printed.said(), value
        everyone = self._meetings.exchange(_place(operation, doing), message)
        places, messages = zip(*everyone, strict=True)
        operations, doings, problems, said, values = zip(*messages, strict=True)
        self._printed.printed_by_first(said[0])
        shared = error_for_all(problems, error)
        if shared is not None:
            raise _on_all_ranks(shared)
        if len(set(zip(operations, doings, strict=True))) > 1:
            where = ", ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
            raise _on_all_ranks(
                RankError(
                    f"All ranks must make the same calls in the same order; {where}. If an error was caught, let every rank "
                    "continue in the same way."
                )
            )
        return list(values)


_ENGINES: Counter[str] = Counter()
"""The number of engines of each process group. The engines of one group meet in the order in which they are built."""

_DOING: ContextVar[str] = ContextVar("doing", default="")
"""What the trainer is doing, for messages. Ranks that do different things must not exchange values."""


@contextmanager
def same_error(engine: Engine, doing: str = "") -> Iterator[None]:
    """If an `Exception` or a `TrainingInterrupted` leaves the block on one rank, every rank raises the same error.

    The other ranks raise it in their next operation of the engine. A block that ends well exchanges nothing. Blocks can be
    nested: an error that all ranks raise is passed on.

    Args:
        engine: joins the ranks.
        doing: what the block does, in words. It must be the same on all ranks.
    """
    token = _DOING.set(doing or _DOING.get())
    try:
        yield
    except (Exception, TrainingInterrupted) as error:
        if not is_shared(error):
            engine.agree(error)
        raise
    finally:
        _DOING.reset(token)


def require_same_on_all_ranks(engine: Engine, owner: str, values: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` that names each value that is not the same on all ranks. Values are compared by their `repr`."""
    if engine.num_ranks == 1:
        return
    differing = differing_values(engine.gather_objects(printed(values)))
    if differing:
        error = ConfigError(f"{owner} needs the same arguments on all ranks; {differing}. Pass the same values.")
        raise _on_all_ranks(error)


def require_equal_weights(engine: Engine, parameters: dict[str, Tensor]) -> None:
    """Raise a ConfigError if the ranks start from different parameters, because training would never make them equal."""
    if engine.num_ranks == 1:
        return
    differing = differing_weights(engine.gather_objects(fingerprints(parameters)))
    if differing:
        error = ConfigError(
            f"Ranks must start from the same weights; {differing}. Build the policy after torch.manual_seed(the same number), "
            "or load the same file on every rank."
        )
        raise _on_all_ranks(error)


def _padded(rows: Tensor, widest: Sequence[int]) -> Tensor:
    """The rows in the corner of a tensor of zeros of the shape `widest`. Gathering needs one shape."""
    padded = rows.new_zeros(widest)
    padded[tuple(slice(0, size) for size in rows.shape)] = rows
    return padded


def _in_words(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    of_ranks = ", ".join(f"rank {rank} passed {list(shape)} {dtype}" for rank, (shape, dtype) in enumerate(kinds))
    return f"{of_ranks}. Pass tensors of the same kind."


def _on_all_ranks(error: BaseException) -> BaseException:
    mark_as_shared(error)
    return error


def _place(operation: str, doing: str) -> str:
    """Where in the program an operation is called, in words. A function inside a function has no name that helps."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_globals["__name__"] == __name__ or "<locals>" in frame.f_code.co_qualname):
        frame = frame.f_back
    caller = "" if operation == "agree" else f" in {frame.f_code.co_qualname}"
    return f"{operation}(){caller}{f' ({doing})' if doing else ''}"
