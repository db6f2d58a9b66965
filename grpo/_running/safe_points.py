"""Points from which a run can be continued exactly. A run that is stopped leaves a checkpoint of its last safe point."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT, SIGTERM, Signals
from typing import Any

from grpo._rewarding.gate import fork_gate
from grpo.checkpoint import CheckpointFolder, require_encodable
from grpo.distributed import same_error
from grpo.errors import CheckpointError, NonFiniteGradientError, RankError, TrainingInterrupted

from .interrupts import Interrupts, is_interactive
from .restoring import put_passing
from .trainer_state import capture, passing_state

logger = logging.getLogger("grpo")


class SafePoints:
    """Notes, at points between two changes of the weights, everything else that changes before the next such point.

    The weights and the optimizer change only in an optimizer step, and a safe point follows each step. A checkpoint of the last
    safe point is therefore the current weights, with the noted state.

    Args:
        trainer: the trainer whose state is noted.
        interrupts: the signals that stop a run at a safe point.
    """

    def __init__(self, trainer: Any, interrupts: Interrupts) -> None:
        self._trainer, self._interrupts = trainer, interrupts
        self._folder: CheckpointFolder | None = None
        self._last: dict[str, Any] | None = None
        self._rows_fit = False
        self._safe_place: tuple[int, int | None, bool] | None = None
        self._first_place: tuple[int, int | None, bool] | None = None

    def reached(self, *, is_saved: bool = False) -> None:
        """Note a safe point. Raises `TrainingInterrupted` if a signal has arrived.

        Args:
            is_saved: whether a checkpoint holds this state, or nothing has been done yet, so that nothing can be lost.
        """
        fork_gate.let_pass()
        if self._folder is not None:
            self._last = passing_state(self._trainer)
            self._require_rows_fit()
            self._safe_place = self._place() if is_saved else self._safe_place
        self._interrupts.check()

    @contextmanager
    def kept_in(self, folder: CheckpointFolder | None) -> Iterator[None]:
        """Inside the block, signals stop the run, and whatever stops it leaves a checkpoint of the last safe point in `folder`.

        Without a folder, a SIGINT still stops the run only where policy and optimizer are consistent.
        """
        signals = (SIGINT,) if folder is None else (SIGINT, SIGTERM)
        with self._interrupts.handled(*signals):
            self._folder = folder
            try:
                with same_error(self._trainer.engine):
                    self.reached()
                    if folder is not None:
                        iteration, update, _ = self._first_place = self._place()
                        self._safe_place = self._place() if folder.has(iteration, update) else None
                    yield
                    self._trainer.engine.agree()  # another rank may have failed after its last exchange
            except BaseException as error:
                self._stop(error, self._save_after(error))
                raise
            finally:
                self._folder = self._last = None

    def _stop(self, error: BaseException, place: str) -> None:
        """Give up what was begun when a signal came, and tell the user where the run can be continued from."""
        if isinstance(error, KeyboardInterrupt) and self._last is not None and not self._is_between_weights:
            put_passing(self._trainer, capture(self._trainer, self._last))
        if isinstance(error, TrainingInterrupted):
            name = Signals(error.signal_number).name
            message = f"Stopped by {name} at iteration {self._trainer.iteration}. {place}"
            if error.signal_number == SIGINT and is_interactive():
                raise KeyboardInterrupt(message) from None
            if self._trainer.engine.rank == 0:  # all ranks stop at the same place
                logger.warning(message)

    @property
    def _is_between_weights(self) -> bool:
        """Whether an optimizer step failed, so that some weights may have changed and others not."""
        stepping: bool = self._trainer.optimizer_step.is_stepping
        return stepping

    def _require_rows_fit(self) -> None:
        """Refuse rows that no checkpoint can hold: in the first iteration, and not when a signal arrives."""
        rows = self._trainer.progress.unfinished
        if rows is not None and not self._rows_fit:
            require_encodable(rows.given.batch.states, "states")
            require_encodable(rows.given.batch.actions, "actions")
            self._rows_fit = True

    def _place(self) -> tuple[int, int | None, bool]:
        """The iteration, the number of updates in an unfinished iteration, and whether the iteration is not recorded yet."""
        assert self._last is not None
        unfinished = self._last["unfinished"]
        update = None if unfinished is None else unfinished["rows"]["num_planned"]
        return self._last["counters"]["iteration"], update, self._last["unrecorded"] is not None

    def _save_after(self, error: BaseException) -> str:
        """Write a checkpoint of the last safe point if that saves anything. Returns what to tell the user."""
        trainer, folder = self._trainer, self._folder
        if folder is None or self._last is None:
            return "Nothing was saved, because train() has no checkpoint_dir."
        is_shared = isinstance(error, Exception | TrainingInterrupted) or trainer.engine.num_ranks == 1
        if isinstance(error, CheckpointError) or not is_shared:
            return "Continue from the newest checkpoint."
        if self._is_between_weights:
            return "The optimizer failed between two weights, so only earlier checkpoints can be used."
        if isinstance(error, NonFiniteGradientError):  # a run that continues from here counts from 0 again
            self._last["counters"]["skipped_in_a_row"] = 0
        iteration, update, _ = place = self._place()
        if place == self._safe_place or (place == self._first_place and isinstance(error, Exception)):
            return f"Nothing after iteration {iteration} was lost."
        try:
            if len(set(trainer.engine.gather_objects(place))) > 1:
                return "The ranks stopped at different places. Continue from the newest checkpoint."
            path = folder.save(capture(trainer, self._last), iteration=iteration, update=update, score=None)
        except (CheckpointError, RankError) as failure:  # the disk, or a rank that does not answer
            error.add_note(f"No checkpoint was written: {failure}")
            return f"No checkpoint was written: {failure}"
        self._safe_place = place
        return f"{path} holds everything; train(..., resume='auto') continues."
