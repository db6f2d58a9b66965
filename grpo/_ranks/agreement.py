"""Errors that all ranks raise together, whatever their engine is."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from grpo.errors import TrainingInterrupted

from .shared_errors import is_shared

DOING: ContextVar[str] = ContextVar("doing", default="")
"""What the trainer is doing, for messages. Ranks that do different things must not exchange values."""


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
