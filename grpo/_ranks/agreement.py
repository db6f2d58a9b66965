"""What all ranks do together, whatever their engine is: they raise the same errors, and start from equal values and weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from grpo.errors import ConfigError, TrainingInterrupted

from .equality import differing_values, differing_weights, fingerprints, printed
from .shared_errors import is_shared, mark_as_shared

DOING: ContextVar[str] = ContextVar("doing", default="")
"""What the trainer is doing, for messages. Ranks that do different things must not exchange values."""


@contextmanager
def same_error(engine: Any, doing: str = "") -> Iterator[None]:
    """If an `Exception` or a `TrainingInterrupted` leaves the block on one rank, every rank raises the same error.

    The other ranks raise it in their next operation of the engine. A block that ends well exchanges nothing. Blocks can be
    nested: an error that all ranks raise is passed on.

    Args:
        engine: joins the ranks.
        doing: what the block does, in words. It must be the same on all ranks.
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


def require_same_on_all_ranks(engine: Any, owner: str, values: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` that names each value that is not the same on all ranks. Values are compared by their `repr`."""
    if engine.num_ranks == 1:
        return
    differing = differing_values(engine.gather_objects(printed(values)))
    if differing:
        error = ConfigError(f"{owner} needs the same arguments on all ranks; {differing}. Pass the same values.")
        raise on_all_ranks(error)


def require_equal_weights(engine: Any, parameters: dict[str, Tensor]) -> None:
    """Raise a ConfigError if the ranks start from different parameters, because training would never make them equal."""
    if engine.num_ranks == 1:
        return
    differing = differing_weights(engine.gather_objects(fingerprints(parameters)))
    if differing:
        error = ConfigError(
            f"Ranks must start from the same weights; {differing}. Build the policy after torch.manual_seed(the same number), "
            "or load the same file on every rank."
        )
        raise on_all_ranks(error)


def on_all_ranks(error: BaseException) -> BaseException:
    """Note that every rank raises this error, and return it."""
    mark_as_shared(error)
    return error
