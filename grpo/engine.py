"""`Engine`: what the algorithm needs from the other processes of a run. `OneProcess` is the engine of a single process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ._common.calls import Call
from ._common.names import require_arguments
from ._common.protocols import require_methods

Args = ParamSpec("Args")
Result = TypeVar("Result")


@runtime_checkable
class Engine(Protocol):
    """Joins the processes (ranks) of a run. Every rank makes the same calls in the same order."""

    rank: int
    """The number of this process, from 0."""
    num_ranks: int
    """The number of processes."""
    divides_weights: bool
    """Whether each rank holds only a part of the weights. A forward pass then needs all ranks at the same time."""

    # Values

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, returned on every rank. All ranks pass tensors of the same shape."""

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of all ranks, in rank order, and the index of this rank's first row among them.

        Rows that are narrower than the widest are padded on the right.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather one small object from each rank, in rank order."""

    # Errors

    def agree(self, error: BaseException | None = None) -> None:
        """Raise the same error on every rank if any rank passes an error. All ranks call this at the same place.

        A rank that is in another operation of the engine meanwhile, such as `sum`, raises the error in that operation.
        """

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """If an error leaves the block on one rank, every rank raises the same error.

        Args:
            doing: What the block does, in words, for messages. All ranks pass the same words.
        """

    def waiting(self, seconds: float, reason: str) -> AbstractContextManager[None]:
        """Tell the other ranks that this rank is late, so that they keep waiting for it. This ends with the block.

        Args:
            seconds: The other ranks keep waiting for at most this time.
            reason: What this rank waits for, as a sentence without a full stop. The other ranks log it.
        """

    def require_same(self, owner: str, values: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` that names values that are not the same on all ranks. Functions are compared by their code and
        the values in it, tensors bit by bit, and other values by `repr`."""

    def require_same_soon(self, values: Mapping[str, Any]) -> None:
        """The same as `require_same`, but in the next exchange of the ranks, which then raises a `RankError`."""

    def require_same_arguments(self, owner: str, arguments: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` that names arguments of a learner's constructor that are not the same on all ranks: as
        `require_same` does it, and policies by their class and `settings()`."""

    def require_equal_weights(self, policy: Any, reference_policy: Any) -> None:
        """Raise a `ConfigError` if the ranks have different weights, because training would never make them equal."""

    # Weights and gradients

    def divide(self, policy: Any) -> None:
        """Divide the weights of a policy among the ranks, in place. Before, all ranks have equal weights.

        An engine whose ranks hold whole weights does nothing.
        """

    def whole(self, policy: Any) -> AbstractContextManager[None]:
        """Inside the block, this rank has all weights of a policy. All ranks enter and leave it together."""

    def part(self, tensor: Tensor) -> Tensor:
        """The values of a tensor that this rank holds, in the same memory."""

    def copy_into(self, target: Tensor, value: Tensor) -> None:
        """Copy a value into a tensor, in place. If the tensor is divided and the value is whole, copy this rank's rows."""

    def divided(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """A divided tensor of this shape, of which this rank has these rows."""

    def equal_count(self, count: int) -> int:
        """The number of forward passes that every rank makes, given the number that this rank needs.

        With divided weights, it is the largest number that any rank needs. Otherwise, it is `count`.
        """

    def accompany(self, policy: Any, loss: Callable[[], Tensor]) -> None:
        """Make a pass whose gradient is 0, because other ranks make a pass and need this rank's part of the weights for it."""

    def sum_gradients(self, tensors: Sequence[Tensor], value: Tensor) -> Tensor:
        """Add up the gradients of these tensors over all ranks, in place, and return the sum of `value` over all ranks.

        A rank without a gradient for a tensor adds zeros. A tensor without a gradient on any rank keeps none.
        """

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together, as a scalar on their device."""

    def clip_gradients(self, tensors: Sequence[Tensor], max_norm: float, total_norm: Tensor) -> None:
        """Scale the gradients of these tensors, in place, so that their norm is at most `max_norm`."""


@runtime_checkable
class SharesStatistics(Protocol):
    """A policy that collects statistics while it samples, such as the means of observations. Those of all ranks count."""

    def collected_statistics(self) -> Any:
        """Return what this rank has collected since the last call of `share_statistics`. It is pickled."""

    def share_statistics(self, of_ranks: Sequence[Any]) -> None:
        """Add the statistics of all ranks, in rank order, and forget those of this rank. Called when an iteration ends."""


@runtime_checkable
class CallsInProcess(Protocol):
    """Makes calls one after another in another process, which is killed after `timeout` seconds per call."""

    def __call__(self, calls: Sequence[Call], *, timeout: float) -> list[Any]:
        """The answers in order. Raises `DeadlineError`, `CallError`, or what a call raised."""


ENGINE_METHODS = [name for name in vars(Engine) if callable(vars(Engine)[name]) and not name.startswith("_")]
"""The methods of an engine."""


class OneProcess:
    """The engine of a single process: every operation returns its argument, or does nothing."""

    rank: int = 0
    num_ranks: int = 1
    divides_weights: bool = False

    def sum(self, values: Tensor) -> Tensor:
        """Return `values` unchanged."""
        return values

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return `rows` unchanged, and 0 as the index of the first row."""
        return rows, 0

    def gather_objects(self, value: Any) -> list[Any]:
        """Return `[value]`."""
        return [value]

    def agree(self, error: BaseException | None = None) -> None:
        """Raise `error`, if there is one."""
        if error is not None:
            raise error

    def together(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """A block that does nothing: no other rank hears of an error or waits for this one, and all weights are here."""
        return nullcontext()

    waiting = whole = together

    def require_same(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no rank to compare with, to share weights with, or to make a pass for."""

    require_same_soon = require_same_arguments = require_equal_weights = divide = accompany = require_same

    def part(self, tensor: Tensor) -> Tensor:
        """Return `tensor` unchanged: one process holds all values."""
        return tensor

    def copy_into(self, target: Tensor, value: Tensor) -> None:
        """Copy a value into a tensor, in place."""
        target.copy_(value)

    def divided(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """Return `rows`: one process holds all of them."""
        return rows

    def equal_count(self, count: int) -> int:
        """Return `count`: each rank makes its own number of passes."""
        return count

    def sum_gradients(self, tensors: Sequence[Tensor], value: Tensor) -> Tensor:
        """Return `value` unchanged."""
        return value

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together, as a scalar on their device."""
        return get_total_norm(gradients)

    def clip_gradients(self, tensors: Sequence[Tensor], max_norm: float, total_norm: Tensor) -> None:
        """Scale the gradients of these tensors, in place, so that their norm is at most `max_norm`."""
        clip_grads_with_norm_(tensors, max_norm, total_norm)


@runtime_checkable
class HasEngine(Protocol):
    """An object whose methods all ranks call together."""

    engine: Engine

    @property
    def iteration(self) -> int:
        """Number of finished iterations."""


Owner = TypeVar("Owner", bound=HasEngine)


def on_all_ranks(
    method: Callable[Concatenate[Owner, Args], Result],
) -> Callable[Concatenate[Owner, Args], Result]:
    """Make a method raise the same error on every rank, if it raises an error on any rank."""

    @wraps(method)
    def shared(owner: Owner, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with owner.engine.together(f"{method.__name__} in iteration {owner.iteration + 1}"):
            return method(owner, *args, **kwargs)

    return shared


def built_on_all_ranks(construct: Callable[Args, None]) -> Callable[Args, None]:
    """Make a constructor raise the same error on every rank, if it raises an error on any rank.

    It also raises an error if its arguments are not the same on all ranks.
    """

    @wraps(construct)
    def shared(*args: Args.args, **kwargs: Args.kwargs) -> None:
        given: dict[str, Any] = dict(kwargs)
        engine: Engine = OneProcess() if given.get("engine") is None else given["engine"]
        require_methods(engine, ENGINE_METHODS, "engine", "Engine")
        name = type(args[0]).__name__
        with engine.together(f"{name}()"):
            require_arguments(name, construct, args, given)
            engine.require_same_arguments(name, given)
            construct(*args, **kwargs)

    return shared
