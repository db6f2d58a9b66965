"""Errors as ranks tell one another, and the one error that all ranks raise."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo import errors
from grpo.errors import GRPOError, RankError, TrainingInterrupted

ErrorT = TypeVar("ErrorT", bound=BaseException)

DOING: ContextVar[str] = ContextVar("doing", default="")
"""What the trainer is doing, for messages. Ranks that do different things must not exchange values."""

_TYPES = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, GRPOError)}
"""The errors that travel under their own name. The others become a `RankError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a rank tells the others about its error."""

    kind: str
    """The name of a type in `grpo.errors`."""
    said: str
    """What the error says, as the end of a sentence that begins with the rank."""
    signal_number: int | None = None
    """The signal that interrupted the rank. None: the rank has an error."""


def problem_of(error: BaseException) -> Problem:
    """Describe an error for the other ranks. A type that `grpo.errors` lacks travels as its nearest base class there."""
    if isinstance(error, TrainingInterrupted):
        said = f" was stopped by signal {error.signal_number}"
        return Problem(kind="TrainingInterrupted", said=said, signal_number=error.signal_number)
    try:
        text = str(error)
    except Exception as failure:  # an error that cannot be printed must still reach the other ranks
        text = f"(its message cannot be shown: {type(failure).__name__})"
    for kind in type(error).__mro__:
        if _TYPES.get(kind.__name__) is kind:
            return Problem(kind=kind.__name__, said=f": {text}")
    return Problem(kind="RankError", said=f" raised {type(error).__name__}: {text}")


def error_for_all(problems: Sequence[Problem | None], own: BaseException | None) -> BaseException | None:
    """Return the error that every rank raises, or None if no rank has a problem.

    The lowest rank with an error decides. Interrupts count only if no rank has an error. If all ranks have the same error of
    this package, each raises its own.

    Args:
        problems: One per rank. None: the rank is well.
        own: The error of this rank. It becomes the cause.
    """
    found = {rank: problem for rank, problem in enumerate(problems) if problem is not None}
    failed = {rank: problem for rank, problem in found.items() if problem.signal_number is None}
    if not found:
        return None
    if not failed:
        number = next(iter(found.values())).signal_number
        assert number is not None
        return _raised_from(TrainingInterrupted(number), own)
    (first, decisive), *others = failed.items()
    if isinstance(own, GRPOError) and len(failed) == len(problems) and len(set(failed.values())) == 1:
        return own
    text = f"Rank {first}{decisive.said}"
    for rank, problem in others:
        text += f" (Rank {rank} failed, too, with the same error.)" if problem == decisive else _also(rank, problem)
    return _raised_from(_TYPES.get(decisive.kind, RankError)(text), own)


def _also(rank: int, problem: Problem) -> str:
    kind = f" ({problem.kind})" if problem.said.startswith(":") else ""
    return f" (Rank {rank} failed, too{kind}: {problem.said.removeprefix(':').strip()})"


def _raised_from(error: BaseException, own: BaseException | None) -> BaseException:
    error.__cause__ = own
    return error


def shared_by_all(error: ErrorT) -> ErrorT:
    """Note that every rank raises this error, so that nobody has to share it again, and return it."""
    vars(error)["is_shared_by_ranks"] = True
    return error


def is_shared(error: BaseException) -> bool:
    """Whether every rank raises this error already."""
    return "is_shared_by_ranks" in vars(error)


@contextmanager
def same_error(engine: Any, doing: str = "") -> Iterator[None]:
    """If an `Exception` or a `TrainingInterrupted` leaves the block on one rank, every rank raises the same error.

    The other ranks raise it in their next operation of the engine. A block that ends well exchanges nothing. Blocks can be
    nested: an error that all ranks raise is passed on.

    Args:
        engine: Joins the ranks.
        doing: What the block does, in words. It must be the same on all ranks.
    """
    token = DOING.set(doing or DOING.get())
    try:
        yield
    except (Exception, TrainingInterrupted) as error:
        if not is_shared(error):
            engine.agree(error)
        raise
    finally:
        DOING.reset(token)
