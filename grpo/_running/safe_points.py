"""Points from which a run can be continued exactly. A run that is stopped leaves a checkpoint of its last safe point."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT, SIGTERM, Signals
from typing import Any

from grpo._updating.optimizer_step import OptimizerStep
from grpo._updating.parts import Counters
from grpo.checkpoint import CheckpointFolder, require_encodable
from grpo.engine import Engine
from grpo.errors import CheckpointError, NonFiniteGradientError, RankError, TrainingInterrupted

from .in_progress import IterationInProgress
from .interrupts import Interrupts, is_interactive
from .progress import RunProgress
from .state import RunState

logger = logging.getLogger("grpo")

Place = tuple[int, int | None, bool]
"""The iteration, the number of updates in an unfinished iteration, and whether the iteration is not recorded yet."""


class SafePoints:
    """Notes, at points between two changes of the weights, everything else that changes before the next such point.

    The weights and the optimizer change only in an optimizer step, and a safe point follows each step. A checkpoint of the last
    safe point is therefore the current weights, with the noted state.
    """

    def __init__(
        self,
        run_state: RunState,
        interrupts: Interrupts,
        engine: Engine,
        optimizer_step: OptimizerStep,
        in_progress: IterationInProgress,
        progress: RunProgress,
        counters: Counters,
    ) -> None:
        self._run_state, self._interrupts, self._engine = run_state, interrupts, engine
        self._optimizer_step = optimizer_step
        self._in_progress, self._progress, self._counters = in_progress, progress, counters
        self._folder: CheckpointFolder | None = None
        self._last: dict[str, Any] | None = None
        self._last_place: Place = (0, None, False)
        self._rows_fit = False
        self._safe_place: Place | None = None
        self._first_place: Place | None = None

    def reached(self, *, is_saved: bool = False) -> None:
        """Note a safe point. Raises `TrainingInterrupted` if a signal has arrived.

        Args:
            is_saved: Whether a checkpoint holds this state, or nothing has been done yet, so that nothing can be lost.
        """
        if self._folder is not None:
            self._last, self._last_place = self._run_state.passing_state(), self._place()
            self._require_rows_fit()
            self._safe_place = self._last_place if is_saved else self._safe_place
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
                with self._engine.together():
                    self.reached()
                    if folder is not None:
                        iteration, update, _ = self._first_place = self._last_place
                        self._safe_place = self._last_place if folder.has(iteration, update) else None
                    yield
                    self._engine.agree()  # another rank may have failed after its last exchange
            except BaseException as error:
                self._stop(error, self._save_after(error))
                raise
            finally:
                self._folder = self._last = None

    def _stop(self, error: BaseException, place: str) -> None:
        """Give up what was begun when a signal came, and tell the user where the run can be continued from."""
        if isinstance(error, KeyboardInterrupt) and self._last is not None and not self._is_between_weights:
            self._run_state.put_back(self._last)
        if isinstance(error, TrainingInterrupted):
            name = Signals(error.signal_number).name
            message = f"Stopped by {name} at iteration {self._counters.iteration}. {place}"
            if error.signal_number == SIGINT and is_interactive():
                raise KeyboardInterrupt(message) from None
            if self._engine.rank == 0:  # all ranks stop at the same place
                logger.warning(message)

    @property
    def _is_between_weights(self) -> bool:
        """Whether an optimizer step failed, so that some weights may have changed and others not."""
        return self._optimizer_step.is_stepping

    def _require_rows_fit(self) -> None:
        """Refuse rows that no checkpoint can hold: in the first iteration, and not when a signal arrives."""
        rows = self._in_progress.rows
        if rows is not None and not self._rows_fit:
            require_encodable(rows.given.batch.states, "states")
            require_encodable(rows.given.batch.actions, "actions")
            self._rows_fit = True

    def _place(self) -> Place:
        return self._counters.iteration, self._in_progress.num_planned, self._progress.unrecorded is not None

    def _save_after(self, error: BaseException) -> str:
        """Write a checkpoint of the last safe point if that saves anything. Returns what to tell the user."""
        folder = self._folder
        if folder is None or self._last is None:
            return "Nothing was saved, because train() has no checkpoint_dir."
        is_shared = isinstance(error, Exception | TrainingInterrupted) or self._engine.num_ranks == 1
        if isinstance(error, CheckpointError) or not is_shared:
            return "Continue from the newest checkpoint."
        if self._is_between_weights:
            return "The optimizer failed between two weights, so only earlier checkpoints can be used."
        if isinstance(error, NonFiniteGradientError):  # a run that continues from here counts from 0 again
            self._last["parts"]["optimizer_step"]["skipped_in_a_row"] = 0
        iteration, update, _ = place = self._last_place
        if place == self._safe_place or (place == self._first_place and isinstance(error, Exception)):
            return f"Nothing after iteration {iteration} was lost."
        try:
            if len(set(self._engine.gather_objects(place))) > 1:
                return "The ranks stopped at different places. Continue from the newest checkpoint."
            path = folder.save(self._run_state.state_dict(self._last), iteration=iteration, update=update, score=None)
        except (CheckpointError, RankError) as failure:  # the disk, or a rank that does not answer
            error.add_note(f"No checkpoint was written: {failure}")
            return f"No checkpoint was written: {failure}"
        self._safe_place = place
        return f"{path} holds everything; train(..., resume='auto') continues."
