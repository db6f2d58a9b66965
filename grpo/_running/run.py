"""A run of many iterations: which states it draws, when it evaluates, what it records, and where its checkpoints go."""

import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm import TqdmWarning, tqdm

from grpo._common.checks import require_count
from grpo._updating.update_rows import UpdateRows
from grpo.callbacks import Callbacks
from grpo.checkpoint import CheckpointFolder, require_encodable
from grpo.distributed import Engine
from grpo.errors import ConfigError, ContractError, TrainingInterrupted, warn_user
from grpo.sinks import GuardedSinks, MetricSink, Samples, run_settings
from grpo.types import Rows, select_rows

from .pending import Pending
from .restoring import load_into
from .state_source import StateSource
from .trainer_state import capture

logger = logging.getLogger("grpo")


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """The progress of a run. A checkpoint holds it, and the next call of `train` continues from it."""

    position: int = 0
    """Number of completed iterations of the run."""
    num_draws: int = 0
    """How often states were drawn."""
    best_score: float = -math.inf
    """The best evaluation so far."""
    unfinished: UpdateRows | None = None
    """The rows of the current iteration, while its updates are not finished. None: no updates are under way."""
    ahead: list[Pending] = field(default_factory=list)
    """The iterations after the current one that are sampled already, in order."""
    unrecorded: dict[str, float] | None = None
    """The metrics of an iteration after its updates, before it is evaluated and recorded. None: there is no such iteration."""
    callbacks: Callbacks = field(default_factory=lambda: Callbacks([]))
    """The callbacks of the run."""
    loaded_callbacks: Mapping[str, Any] = field(default_factory=dict)
    """The states of the callbacks of the run that was loaded."""
    is_loaded: bool = False
    """Whether a checkpoint was loaded and no run has continued from it yet."""

    def begin(self, callbacks: Callbacks) -> None:
        """Begin a run: continue where the loaded run stopped, or start at iteration 0."""
        self.callbacks = callbacks
        if self.is_loaded:
            callbacks.load_state_dict(self.loaded_callbacks)
        else:
            self.position, self.num_draws, self.best_score = 0, 0, -math.inf
            self.unfinished = self.unrecorded = None
            self.ahead = []
        self.is_loaded = False

    def stopped_rows(self) -> UpdateRows:
        """The rows of the iteration that was stopped. A ContractError if there is none."""
        if self.unfinished is None:
            raise ContractError("update(None) needs an iteration that was stopped, and there is none. Pass a batch.")
        return self.unfinished

    def drop_unfinished(self) -> None:
        """Forget an iteration that is not finished or not recorded, and warn if updates of a checkpoint are left out."""
        if self.unfinished is not None and self.is_loaded:
            warn_user(
                f"The checkpoint was written after update {self.unfinished.num_planned} of an iteration, and the other updates "
                "of this iteration are left out now. Call train() after load_checkpoint() to finish the iteration first."
            )
        self.unfinished = self.unrecorded = None


@dataclass(eq=False, kw_only=True)
class Run:
    """One call of `train`."""

    progress: RunProgress
    """The progress of the run. This call updates it."""
    source: StateSource
    """Returns the states of an iteration."""
    engine: Engine
    """Combines several ranks. Each rank takes its share of the states."""
    num_iterations: int
    """Number of iterations of the whole run."""
    evaluates: bool
    """Whether there are states to evaluate."""
    eval_every: int | None
    """Iterations between evaluations. None: ten evaluations in the run."""
    sinks: Sequence[MetricSink]
    """Receivers of every iteration's metrics. Only those of the first rank are called."""
    callbacks: Sequence[Any]
    """Called after every iteration."""
    folder: CheckpointFolder | None
    """The folder to write checkpoints to. None: no checkpoints."""
    checkpoint_every: int | timedelta | None
    """Iterations, or time, between checkpoints. None: ten checkpoints in the run."""
    shows_bar: bool
    """Show a progress bar, on the first rank."""
    history: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each iteration that this call has made."""

    def __post_init__(self) -> None:
        require_count("num_iterations", self.num_iterations)
        sinks = GuardedSinks(self.sinks)
        self._sinks = sinks if self.engine.rank == 0 else GuardedSinks([])
        callbacks = Callbacks(self.callbacks)
        if not self.evaluates:
            callbacks.require_evaluations()
        self._eval_every = at_least_one("eval_every", self.eval_every, self.num_iterations // 10)
        every = self.checkpoint_every
        if isinstance(every, timedelta) and every <= timedelta(0):
            raise ConfigError(f"checkpoint_every must be longer than 0; got {every}.")
        self._checkpoint_every: int | timedelta = (
            every
            if isinstance(every, timedelta)
            else at_least_one("checkpoint_every", every, self.num_iterations // 10)
        )
        if self.folder is not None and self.source.first is not None:
            require_encodable(self.source.first, "states[0]")
        if self.folder is not None:
            require_encodable(callbacks.state_dict(), "callbacks")
        self._saved_at = time.monotonic()
        self._bar: Any = None
        self._is_stopped = False
        self.samples: list[Samples] | None = [] if self._sinks.take_samples else None
        """The rows of the current iteration that sinks record. None: no sink records rows."""
        self.progress.begin(callbacks)
        ended_by = callbacks.ended_by()
        if ended_by is not None:
            self._is_stopped = True
            warn_user(
                f"{ended_by} has ended the loaded run already, so there is nothing left to do. Leave it out, or raise its "
                "patience, to continue."
            )
        if self.progress.position >= self.num_iterations:
            warn_user(
                f"The loaded run is at iteration {self.progress.position}, and num_iterations={self.num_iterations} includes "
                "the iterations before loading, so there is nothing left to do. Raise num_iterations to continue."
            )

    def positions(self) -> Iterator[int]:
        """Iterate over the positions (from 0) of the remaining iterations, with a progress bar."""
        start, total = self.progress.position, self.num_iterations
        hides = not self.shows_bar or self.engine.rank > 0
        bar = tqdm(total=total, initial=start, desc="GRPO", unit="it", disable=hides)
        with bar as self._bar, nullcontext() if hides else beside_the_bar():
            for position in range(start, total):
                if self._is_stopped:
                    break
                yield position

    def start(self, trainer: Any) -> None:
        """Tell the sinks what is run."""
        is_recorded = self.progress.unrecorded is None  # else the resumed run first records the iteration that is done
        settings = run_settings(trainer) | {"num_iterations": self.num_iterations}
        self._sinks.start(settings, trainer.iteration + is_recorded)

    def draw(self) -> Rows:
        """Draw the next states, and return this rank's share of them."""
        states = self.source(self.progress.num_draws)
        self.progress.num_draws += 1
        num_ranks = self.engine.num_ranks
        if num_ranks == 1:
            return states
        if len(states) < num_ranks:
            raise ConfigError(
                f"Every one of {num_ranks} ranks needs a state; got {len(states)}. Raise num_states_per_iteration."
            )
        return select_rows(states, torch.arange(len(states)).tensor_split(num_ranks)[self.engine.rank])

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the current iteration ends with an evaluation."""
        return self.evaluates and self._is_due(self._eval_every)

    def _is_due(self, every: int) -> bool:
        done = self.progress.position + 1
        return done % every == 0 or done == self.num_iterations

    def record(self, trainer: Any, metrics: dict[str, float]) -> bool:
        """Record an iteration's metrics, count the iteration, and ask the callbacks. Returns whether a checkpoint is due."""
        score = metrics.get("eval/avg_reward", -math.inf)
        improved = score > self.progress.best_score
        is_due = self.folder is not None and (improved or self._checkpoint_is_due())
        self.progress.best_score = score if improved else self.progress.best_score
        is_last = self.progress.position + 1 == self.num_iterations
        self._sinks.log(metrics, trainer.iteration, self.samples or (), always=is_last or "eval/avg_reward" in metrics)
        if self.samples is not None:
            self.samples.clear()
        self.history.append(metrics)
        try:
            self._ask_callbacks(trainer, metrics)
        except BaseException:
            self.history.pop()  # a resumed run records the iteration again
            raise
        self._bar.set_postfix(reward=f"{metrics['rewards/mean']:.3f}", refresh=False)
        self._bar.update()
        self.progress.position += 1
        self.progress.unrecorded = None
        return is_due or (self._is_stopped and self.folder is not None)

    def _ask_callbacks(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Call the callbacks. The run stops if one of them says so, on any rank."""
        if not self.callbacks:
            return
        of_ranks = self.engine.gather_objects(self.progress.callbacks.on_iteration(trainer, metrics))
        names = sorted({name for of_rank in of_ranks for name in of_rank})
        self._is_stopped = bool(names)
        is_last = self.progress.position + 1 == self.num_iterations
        if names and not is_last and self.engine.rank == 0:
            logger.warning("Stopped by %s after iteration %d.", " and ".join(names), trainer.iteration)

    def _checkpoint_is_due(self) -> bool:
        if not isinstance(self._checkpoint_every, timedelta):
            return self._is_due(self._checkpoint_every)
        seconds = time.monotonic() - self._saved_at
        of_ranks = self.engine.gather_objects(seconds >= self._checkpoint_every.total_seconds())
        return bool(of_ranks[0]) or self.progress.position + 1 == self.num_iterations

    def save(self, trainer: Any) -> None:
        """Write a checkpoint. Its score is the last evaluation or, without evaluations, the mean reward."""
        assert self.folder is not None
        score = self.history[-1].get("eval/avg_reward" if self.evaluates else "rewards/mean")
        path = self.folder.save(capture(trainer), iteration=trainer.iteration, score=score)
        self._saved_at = time.monotonic()
        self.progress.callbacks.on_checkpoint(trainer, path)


@contextmanager
def tells_callbacks(trainer: Any) -> Iterator[None]:
    """Tell the callbacks of the run in the block when a signal stops it, after its checkpoint was written."""
    try:
        yield
    except (TrainingInterrupted, KeyboardInterrupt) as error:
        trainer.progress.callbacks.on_interrupt(trainer, error)
        raise
    finally:
        trainer.samples = None


@contextmanager
def opened_folder(
    trainer: Any, path: str | Path | None, keep_last: int, resume: str | None, *, asynchronous: bool
) -> Iterator[CheckpointFolder | None]:
    """Lock the folder of a run's checkpoints, and load its newest checkpoint if `resume` says so. Yields None without a path.

    Raises:
        ConfigError: `resume` has another value than None or "auto", or there is no folder to resume from.
        CheckpointError: another process writes to the folder, the folder is ahead of the trainer or behind it, or a checkpoint
            could not hold the trainer's state.
    """
    resumes = isinstance(resume, str) and resume == "auto"
    if not (resumes or resume is None) or (resumes and path is None):
        raise ConfigError(
            f"resume must be None, or 'auto' with a checkpoint_dir; got resume={resume!r}, checkpoint_dir={path!r}."
        )
    if path is None:
        yield None
        return
    with CheckpointFolder(path, keep_last, trainer.engine, asynchronous=asynchronous) as folder:
        if resume is not None and folder.newest() is not None:
            load_into(trainer, folder.folder, at_least=trainer.iteration)
        rows = trainer.progress.unfinished
        folder.require_at_most(trainer.iteration, None if rows is None else rows.num_planned)
        require_encodable(capture(trainer), "the trainer's state")
        yield folder


def iterations_of(source: StateSource, num_iterations: int | None, num_epochs: float | None) -> int:
    """The number of iterations of a run, from its iterations or its passes over the states. Exactly one of them is given."""
    if (num_iterations is None) == (num_epochs is None):
        given = f"num_iterations={num_iterations!r}, num_epochs={num_epochs!r}"
        raise ConfigError(f"train needs either num_iterations or num_epochs; got {given}. Pass exactly one of them.")
    return (
        source.num_iterations(num_epochs) if num_epochs is not None else require_count("num_iterations", num_iterations)
    )


def at_least_one(name: str, value: int | None, default: int) -> int:
    """Return `value`, or the default (at least 1) if `value` is None. Refuse anything else but an integer from 1."""
    return max(default, 1) if value is None else require_count(name, value)


def beside_the_bar() -> AbstractContextManager[None]:
    """Print log lines above the progress bar."""
    with warnings.catch_warnings():  # on import, tqdm asks for notebook widgets, which are not needed here
        warnings.simplefilter("ignore", TqdmWarning)
        from tqdm.contrib.logging import logging_redirect_tqdm
    root = logging.getLogger()
    redirected: AbstractContextManager[None] = logging_redirect_tqdm([root if root.handlers else logger])
    return redirected
