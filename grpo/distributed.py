"""Training on several processes (ranks): engines for copies of the policy, and for parts of it.

With `Replicated`, every rank holds the whole policy. With `Sharded`, every rank holds a part of it. Every rank samples actions
for its own states, so that a group never spans two ranks. Losses are normalised by the counts of all ranks. The sum of the
ranks' gradients is therefore the gradient of the whole batch.

A rank that fails tells the others in the next exchange of values, so that all ranks raise the same error.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ._ranks.description import digest_of
from ._ranks.meetings import Meetings
from ._ranks.messages import PrintedOnce
from ._ranks.processes import SeveralProcesses
from ._ranks.shared_errors import DOING, error_for_all, problem_of, shared_by_all
from ._sharding.model import Plan, ShardedModel
from ._sharding.tensors import copy_into, in_parts, is_sharded, local, sharded_like
from .errors import ConfigError, RankError

__all__ = ["Replicated", "Sharded"]

MAX_INLINE_VALUES = 64
"""Tensors of at most so many values travel with the message that precedes every collective operation."""


class Replicated(SeveralProcesses):
    """Data parallelism over `torch.distributed`. Start the script with `torchrun` and call `init_process_group` first.

    Messages between the ranks, and tensors on the CPU, use gloo connections of their own. With the NCCL backend, tensors use
    the group. Ranks above 0 print a `GRPOWarning` or a line of the logger "grpo" only if rank 0 does not print the same.

    Args:
        group: A process group. None: all processes.
        timeout: Seconds that a rank waits for the other ranks where all ranks have to meet. Larger: ranks may differ more in
            the time they need to sample; a rank that died without closing its connections, or hangs, is noticed later.

    Raises:
        ConfigError: `torch.distributed` is not initialised, or the ranks have different timeouts.
        RankError: A rank did not build its engine within the timeout.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> trainer = GRPOTrainer(..., engine=Replicated(timeout=600))  # doctest: +SKIP
    """

    def __init__(self, group: Any = None, *, timeout: float = 60.0) -> None:
        import torch.distributed as dist  # a single process does not need it

        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                f"{type(self).__name__} needs torch.distributed: call torch.distributed.init_process_group() first, and start "
                "the script with `torchrun --nproc-per-node N script.py`."
            )
        if not 0.0 < timeout < float("inf"):
            raise ConfigError(f"{type(self).__name__}.timeout must be above 0 seconds and finite; got {timeout!r}.")
        group = dist.group.WORLD if group is None else group
        self._dist, self._group = dist, group if dist.get_backend(group) == "nccl" else None
        self._device = torch.device("cpu" if self._group is None else "cuda")
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        number = _ENGINES[group.group_name] = _ENGINES[group.group_name] + 1
        store = dist.PrefixStore(f"engine {number}", group.get_group_store())  # type: ignore[attr-defined]
        self._meetings = Meetings(store, self.rank, self.num_ranks, timeout)
        self._printed = PrintedOnce(self.rank)
        weakref.finalize(self, self._printed.close)
        self.require_same(type(self).__name__, {"timeout": timeout})

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, as a new tensor."""
        kinds, inline = self._announce("sum", values)
        if len(set(kinds)) > 1:
            raise shared_by_all(RankError(f"sum() needs one shape and dtype on all ranks. {_in_words(kinds)}"))
        if inline:
            first, *others = inline
            for other in others:  # in rank order, so that every rank gets the same bits
                first = first + other
            return first
        return self.add_up(values)

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all ranks of tensors of which all ranks know that they have the same shape and dtype."""
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
            raise shared_by_all(RankError(f"gather() needs one number of axes and one dtype. {_in_words(kinds)}"))
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
        doing = DOING.get()
        problem = None if error is None else problem_of(error)
        due, self.due = self.due, None
        message = operation, doing, problem, self._printed.said(), digest_of(due), value
        everyone = self._meetings.exchange(_place(operation, doing), message)
        places, messages = zip(*everyone, strict=True)
        operations, doings, problems, said, digests, values = zip(*messages, strict=True)
        self._printed.printed_by_first(said[0])
        shared = error_for_all(problems, error)
        if shared is not None:
            raise shared_by_all(shared)
        if len(set(zip(operations, doings, strict=True))) > 1:
            where = ", ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
            raise shared_by_all(
                RankError(
                    f"All ranks must make the same calls in the same order; {where}. If an error was caught, let every rank "
                    "continue in the same way."
                )
            )
        if len(set(digests)) > 1:
            self.require_none_differs(due or {})
        return list(values)


class Sharded(Replicated):
    """The same as `Replicated`, with the weights, gradients and optimizer states divided among the ranks by torch's FSDP2.

    A rank holds 1 / num_ranks of each tensor. Forward and backward passes gather the weights of one unit after another; see
    `HasShardUnits`. Sampling gathers all of them (`whole`), unless the policy's sampler has weights of its own. The methods of
    the policy that score, sample, read or save weights do this themselves, so all ranks call them together. `save_pretrained`
    writes on rank 0. A forward pass that runs out of memory is an error on all ranks, and is not repeated with fewer rows. A
    reference that is no module, such as `Teachers`, stays whole on every rank.

    Args:
        group: A process group. None: all processes.
        timeout: Seconds that a rank waits for the others; see `Replicated`.
        mixed_precision: A `torch.distributed.fsdp.MixedPrecisionPolicy`: the dtype in which units compute, and gradients are
            added up. None: the dtype of the weights.
        cpu_offload: Keep parts of weights, gradients and optimizer states in the host's memory, and step there. Needs less
            memory of the device, and more time.

    Raises:
        ConfigError: `torch.distributed` is not initialised, the ranks have different arguments, or torch is too old.
        RankError: A rank did not build its engine within the timeout.

    Example:
        >>> torch.distributed.init_process_group()  # doctest: +SKIP
        >>> optimizer = functools.partial(torch.optim.AdamW, lr=1e-5)  # doctest: +SKIP
        >>> trainer = GRPOTrainer(..., engine=Sharded(), optimizer=optimizer)  # doctest: +SKIP
    """

    def __init__(
        self, group: Any = None, *, timeout: float = 60.0, mixed_precision: Any = None, cpu_offload: bool = False
    ) -> None:
        super().__init__(group, timeout=timeout)
        self.divides_weights = True
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import DeviceMesh

        if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"Sharded needs torch 2.13 or newer; this is {torch.__version__}. Update torch, or use Replicated."
            )
        if not isinstance(mixed_precision, fsdp.MixedPrecisionPolicy | None):
            raise ConfigError(
                "Sharded.mixed_precision must be a torch.distributed.fsdp.MixedPrecisionPolicy or None; got "
                f"{mixed_precision!r}."
            )
        self.require_same("Sharded", {"mixed_precision": mixed_precision, "cpu_offload": cpu_offload})
        self._offloads = cpu_offload
        self._plan = Plan(
            mesh=DeviceMesh.from_group(self._dist.group.WORLD if group is None else group, self._device.type),
            precision=mixed_precision or fsdp.MixedPrecisionPolicy(),
            offload=fsdp.CPUOffloadPolicy(pin_memory=self._group is not None) if cpu_offload else fsdp.OffloadPolicy(),
            gather=self._gather_weights,
            scatter=self._sum_gradients,
            is_first=self.rank == 0,
        )
        self._models: dict[int, tuple[Any, ShardedModel]] = {}

    def divide(self, policy: Any) -> None:
        """Divide the weights of a policy, in place. The trainer calls this before it builds the optimizer."""
        if id(policy) not in self._models:
            self._models[id(policy)] = policy, ShardedModel(policy, self._plan)

    def whole(self, policy: Any) -> AbstractContextManager[None]:
        """Inside the block, this rank has all weights of a policy. All ranks enter and leave it together."""
        return self._models[id(policy)][1].whole() if id(policy) in self._models else nullcontext()

    def equal_count(self, count: int) -> int:
        """The largest count of any rank."""
        # each pass gathers weights, so a rank with fewer passes would leave the others waiting
        counts: list[int] = self.gather_objects(count)
        return max(counts)

    def accompany(self, policy: Any, loss: Callable[[], Tensor]) -> None:
        """Make a forward and a backward pass only because other ranks make one. The gradient is 0, and does not count."""
        self._models[id(policy)][1].accompany(loss)

    def part(self, tensor: Tensor) -> Tensor:
        """The rows of a divided tensor that this rank holds, in the same memory."""
        part: Tensor = local(tensor)
        return part

    def copy_into(self, target: Tensor, value: Tensor) -> None:
        """Copy a value into a tensor, in place. Into a divided tensor, a whole value is copied by its rows of this rank."""
        copy_into(target, value)

    def reached(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Whether a gradient of this rank has reached each tensor. FSDP adds zeros where it has not."""
        divided = {part for _, model in self._models.values() for part in model.take_reached()}
        return [id(tensor) in divided if is_sharded(tensor) else tensor.grad is not None for tensor in tensors]

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together. The squares of the ranks' parts are added up."""
        sharded, whole = in_parts(gradients)
        norm = super().total_norm(whole)
        if not sharded:
            return norm
        of_parts = self.sum(super().total_norm(sharded).double().square())
        return (of_parts + norm.double().square()).sqrt().to(of_parts.device, torch.float32)

    def clip_gradients(self, tensors: Sequence[Tensor], max_norm: float, total_norm: Tensor) -> None:
        """Scale the gradients, in place. One call cannot scale divided and whole tensors."""
        for kind in (True, False):
            super().clip_gradients([t for t in tensors if is_sharded(t) == kind], max_norm, total_norm)

    def divided(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """A divided tensor of this shape, of which this rank has these rows."""
        return sharded_like(rows.to("cpu" if self._offloads else self._device), shape, self._plan.mesh)

    def _gather_weights(self, gathered: Tensor, own: Tensor) -> None:
        self._require_alike("gather_weights", own)
        if self._group is None:
            self._meetings.all_gather_into(gathered, own)
        else:
            self._dist.all_gather_into_tensor(gathered, own, group=self._group)

    def _sum_gradients(self, own: Tensor, gradients: Tensor) -> None:
        self._require_alike("sum_gradients", gradients)
        if self._group is None:
            self._meetings.reduce_scatter(own, gradients)
        else:
            self._dist.reduce_scatter_tensor(own, gradients, group=self._group)

    def _require_alike(self, operation: str, values: Tensor) -> None:
        kinds = self._exchange(operation, (tuple(values.shape), values.dtype))
        if len(set(kinds)) > 1:
            raise shared_by_all(
                RankError(f"All ranks must run the same units in the same order; {operation}: {_in_words(kinds)}")
            )


_ENGINES: Counter[str] = Counter()
"""The number of engines of each process group. The engines of one group meet in the order in which they are built."""


def _padded(rows: Tensor, widest: Sequence[int]) -> Tensor:
    """The rows in the corner of a tensor of zeros of the shape `widest`. Gathering needs one shape."""
    padded = rows.new_zeros(widest)
    padded[tuple(slice(0, size) for size in rows.shape)] = rows
    return padded


def _in_words(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    of_ranks = ", ".join(f"rank {rank} passed {list(shape)} {dtype}" for rank, (shape, dtype) in enumerate(kinds))
    return f"{of_ranks}. Pass tensors of the same kind."


def _place(operation: str, doing: str) -> str:
    """Where in the program an operation is called, in words. A function inside a function has no name that helps."""
    frame = sys._getframe(1)
    while frame.f_back and _has_no_name_that_helps(frame):
        frame = frame.f_back
    caller = "" if operation == "agree" else f" in {frame.f_code.co_qualname}"
    return f"{operation}(){caller}{f' ({doing})' if doing else ''}"


def _has_no_name_that_helps(frame: FrameType) -> bool:
    is_of_engine = frame.f_globals["__name__"] in (__name__, SeveralProcesses.__module__)
    return is_of_engine or "<locals>" in frame.f_code.co_qualname
