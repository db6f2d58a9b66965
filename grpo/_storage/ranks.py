"""Errors that all ranks share while they write or read one checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpo.errors as errors
from grpo.distributed import Engine


@contextmanager
def same_error(engine: Engine) -> Iterator[None]:
    """Raise the same error on every rank if the block raises on one rank. All ranks leave the block together."""
    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    if engine.num_ranks == 1:
        if raised is not None:
            raise raised
        return
    described = None if raised is None else (type(raised).__name__, f"Rank {engine.rank}: {raised}")
    for found in engine.gather_objects(described):
        if found is not None:
            kind = getattr(errors, found[0], errors.RankError)
            raise kind(found[1]) from raised
