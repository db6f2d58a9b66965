"""What happens when memory runs out: the work is repeated with half the rows per forward pass, and gives the same result."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from grpo.engine import Engine, OneProcess
from grpo.types import RowIndex

from .update_plan import half, num_selected

Result = TypeVar("Result")

LOGGER = logging.getLogger("grpo")
"""Receives one warning per new size."""


class PassSizes:
    """Repeats work that ran out of memory, with half the rows in each forward pass. The halvings stay for the rest of the run.

    Args:
        work: What is repeated, in messages: "an update".
        engine: Joins the ranks. If it divides weights, all ranks make as many forward passes, and work is not repeated, because
            other ranks wait in the failed forward pass. None: one process.
    """

    def __init__(self, work: str, engine: Engine | None = None) -> None:
        self.num_halvings = 0
        """How often the rows of each forward pass have been halved."""
        self.num_repeated = 0
        """How often memory ran out in this process and the work was repeated."""
        self._work, self._engine = work, engine or OneProcess()
        self._largest = self._current = 0

    def passes(self, parts: Sequence[RowIndex]) -> Iterator[RowIndex]:
        """Yield the rows of each forward pass. If memory runs out, the size of the last yielded part is known."""
        sizes = [num_selected(part) for part in parts]
        self._largest = max(sizes, default=0)
        for part, self._current in zip(parts, sizes, strict=True):
            yield part
        self._current = 0

    def num_missing(self, num_passes: int) -> int:
        """The number of forward passes that this rank makes only because other ranks make more than it needs."""
        return self._engine.equal_count(num_passes) - num_passes

    def repeat(
        self, work: Callable[[], Result], put_back: Callable[[], None] | None = None, *, together: bool = False
    ) -> Result:
        """Repeat work until memory suffices, and return its result. The work reads its sizes from `num_halvings` and `passes`.

        Before a repetition, torch's global random generators are put back to where they were before the first attempt.

        Args:
            work: Makes all forward passes, from the first one on.
            put_back: Drops what the failed attempt has left behind, except random numbers. None: it leaves nothing behind.
            together: Whether all ranks repeat the work if memory ran out on one rank.
        """
        restore_generators = _generators_of_torch()
        while True:
            self._current = 0
            results: list[Result] = []
            try:
                results.append(work())
            except torch.OutOfMemoryError as error:
                if not self.accept(error):
                    raise
            # from here on, the frames of an error no longer hold the tensors of its forward pass
            ran_out = not results
            if not any(self._engine.gather_objects(ran_out) if together else [ran_out]):
                return results[0]
            if put_back is not None:
                put_back()
            restore_generators()
            release_cached_memory()
            self.num_halvings += 1

    def accept(self, error: torch.OutOfMemoryError) -> bool:
        """Return whether fewer rows per forward pass can help. If not, the error gets a note that says what to do."""
        if self._current == 0:  # memory ran out outside the forward passes
            return False
        if self._engine.divides_weights:
            error.add_note(
                f"grpo: {self._work} ran out of memory. With divided weights it is not repeated with fewer rows per forward "
                "pass. Lower micro_batch_size, or the policy's own limit."
            )
            return False
        if self._current == 1:
            error.add_note(one_row_too_many(self._work))
            return False
        warn_of_new_size(self._work, self._largest, half(self._largest))
        self.num_repeated += 1
        return True


def warn_of_new_size(work: str, num_rows: int, num_rows_next: int) -> None:
    """Log that memory ran out, and the number of rows per forward pass from now on."""
    LOGGER.warning(
        "%s ran out of memory with up to %d rows per forward pass. It is repeated, and from now on has at most %d.",
        work.capitalize(),
        num_rows,
        num_rows_next,
    )


def one_row_too_many(work: str) -> str:
    """The note of an error that fewer rows per forward pass cannot prevent."""
    return (
        f"grpo: {work} ran out of memory in a forward pass of a single row, so fewer rows per forward pass cannot help. Make "
        "the rows shorter (fewer tokens or steps), use a smaller model or a lower precision (autocast_dtype='bfloat16'), or "
        "free the memory that other objects and processes hold."
    )


def release_cached_memory() -> None:
    """Return unused memory of CUDA's cache to the device, so that blocks of other sizes fit."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _generators_of_torch() -> Callable[[], None]:
    """Return a function that puts torch's global generators (CPU and CUDA) back to where they are now."""
    # not those of Python and numpy: reading them takes 30 microseconds, in each update, and a forward pass draws from torch
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore
