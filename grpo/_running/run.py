"""A run of many iterations: which states it draws, when it evaluates, what it records, and where its checkpoints go."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm import TqdmWarning, tqdm

from grpo._common.checks import require_count
from grpo._updating.parts import Counters
from grpo.callbacks import Callbacks, RunningTrainer
from grpo.checkpoint import CheckpointFolder, require_encodable
from grpo.config import GRPOConfig
from grpo.engine import Engine
from grpo.errors import ConfigError, warn_user
from grpo.sinks import GuardedSinks, MetricSink, Samples, run_settings
from grpo.types import Rows, select_rows

from .history import History
from .progress import RunProgress
from .silent_parts import SilentParts
from .state_source import StateSource

logger = logging.getLogger("grpo")


@dataclass(eq=False, kw_only=True)
class Run:
    """One call of `train`."""

    config: GRPOConfig
    """The settings of the trainer."""
    progress: RunProgress
    """The progress of the run. This call updates it."""
    counters: Counters
    """The number of finished iterations."""
    source: StateSource
    """Returns the states of an iteration."""
    engine: Engine
    """Joins the ranks. Each rank takes its share of the states."""
    num_iterations: int
    """The total number of iterations, those before this call included."""
    resumes: bool
    """Whether a checkpoint folder may hold the whole run already. There is then nothing left to do, which is no error."""
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
    history: list[dict[str, float]] = field(default_factory=History)
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
        self._since_saved = Stopwatch()
        self._bar: Any = None
        self._is_stopped = False
        self._silent_parts = SilentParts()
        self.samples: list[Samples] | None = [] if self._sinks.take_samples else None
        """The rows of the current iteration that sinks record. None: no sink records rows."""
        is_done = self._is_done()  # before a loaded run counts as continued
        self.progress.begin(callbacks)
        ended_by = callbacks.ended_by()
        if ended_by is not None:
            self._is_stopped = True
            warn_user(
                f"{ended_by} has ended the run already, so there is nothing left to do. Leave it out, or raise its "
                "patience, to continue."
            )
        if is_done:
            warn_user(f"{self._where}, so there is nothing left to do. Raise num_iterations to continue.")
        if self.progress.num_iterations not in (None, self.num_iterations) and self._has_schedule:
            warn_user(
                f"num_iterations was {self.progress.num_iterations} and is {self.num_iterations}, and config.lr_schedule="
                f"{self.config.lr_schedule!r} and warmup_ratio={self.config.warmup_ratio} cover the total, so the "
                "learning rate jumps. Pass the total of the whole run from the start if it should not."
            )
        self.progress.num_iterations = self.num_iterations

    @property
    def position(self) -> int:
        """Number of iterations that are finished and recorded."""
        return self.counters.iteration - (self.progress.unrecorded is not None)

    @property
    def _has_schedule(self) -> bool:
        return self.config.lr_schedule != "constant" or self.config.warmup_ratio > 0

    @property
    def _where(self) -> str:
        return (
            f"train: num_iterations={self.num_iterations} is the total, and the trainer is at iteration {self.position}"
        )

    def _is_done(self) -> bool:
        """Whether the trainer has made all iterations."""
        is_done = self.position >= self.num_iterations
        if is_done and not self.resumes:
            raise ConfigError(
                f"{self._where}. Pass a larger total: num_iterations={self.position + self.num_iterations} makes "
                f"{self.num_iterations} further iterations."
            )
        return is_done

    def positions(self) -> Iterator[int]:
        """Iterate over the positions (from 0) of the remaining iterations, with a progress bar."""
        start, total = self.position, self.num_iterations
        hides = not self.shows_bar or self.engine.rank > 0
        bar = tqdm(total=total, initial=start, desc="GRPO", unit="it", disable=hides)
        with bar as self._bar, nullcontext() if hides else beside_the_bar():
            while self.position < total and not self._is_stopped:
                yield self.position

    def start(self, policy: object, reward_model: object) -> None:
        """Tell the sinks what is run."""
        settings = run_settings(self.config, policy, reward_model) | {"num_iterations": self.num_iterations}
        self._sinks.start(settings, self.position + 1)

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
        done = self.counters.iteration
        return done % every == 0 or done == self.num_iterations

    def record(self, trainer: RunningTrainer, metrics: dict[str, float]) -> bool:
        """Record the metrics of the iteration that has ended, and ask the callbacks. Returns whether a checkpoint is due."""
        score = metrics.get("eval/avg_reward", -math.inf)
        improved = score > self.progress.best_score
        is_due = self.folder is not None and (improved or self._checkpoint_is_due())
        self.progress.best_score = score if improved else self.progress.best_score
        is_last = self.counters.iteration == self.num_iterations
        self._sinks.log(
            metrics, self.counters.iteration, self.samples or (), always=is_last or "eval/avg_reward" in metrics
        )
        if self.samples is not None:
            self.samples.clear()
        self.history.append(metrics)
        if self.engine.rank == 0:
            self._silent_parts.see(metrics)
        try:
            self._ask_callbacks(trainer, metrics)
        except BaseException:
            self.history.pop()  # a resumed run records the iteration again
            raise
        self._bar.set_postfix(reward=f"{metrics['rewards/mean']:.3f}", refresh=False)
        self._bar.update()
        self.progress.unrecorded = None
        return is_due or (self._is_stopped and self.folder is not None)

    def _ask_callbacks(self, trainer: RunningTrainer, metrics: dict[str, float]) -> None:
        """Call the callbacks. The run stops if one of them says so, on any rank."""
        if not self.callbacks:
            return
        of_ranks = self.engine.gather_objects(self.progress.callbacks.on_iteration(trainer, metrics))
        names = sorted({name for of_rank in of_ranks for name in of_rank})
        self._is_stopped = bool(names)
        is_last = self.counters.iteration == self.num_iterations
        if names and not is_last and self.engine.rank == 0:
            logger.warning("Stopped by %s after iteration %d.", " and ".join(names), self.counters.iteration)

    def _checkpoint_is_due(self) -> bool:
        if not isinstance(self._checkpoint_every, timedelta):
            return self._is_due(self._checkpoint_every)
        # the clocks of ranks differ, so the first rank decides for all
        of_ranks = self.engine.gather_objects(self._since_saved.has_reached(self._checkpoint_every))
        return bool(of_ranks[0]) or self.counters.iteration == self.num_iterations

    def save(self, trainer: RunningTrainer, state: Mapping[str, Any]) -> None:
        """Write a checkpoint. Its score is the last evaluation or, without evaluations, the mean reward."""
        assert self.folder is not None
        score = self.history[-1].get("eval/avg_reward" if self.evaluates else "rewards/mean")
        path = self.folder.save(state, iteration=self.counters.iteration, score=score)
        self._since_saved.restart()
        self.progress.callbacks.on_checkpoint(trainer, path)


class Stopwatch:
    """Measures the time since it was made, or restarted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        self._began = self._clock()

    def has_reached(self, length: timedelta) -> bool:
        """Whether at least this time has passed."""
        return self._clock() - self._began >= length.total_seconds()


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


@contextmanager
def opened_folder(
    path: str | Path | None, keep_last: int, resume: str | None, engine: Engine, *, asynchronous: bool
) -> Iterator[CheckpointFolder | None]:
    """Lock the folder of a run's checkpoints. Yields None without a path."""
    resumes = isinstance(resume, str) and resume == "auto"
    if not (resumes or resume is None) or (resumes and path is None):
        raise ConfigError(
            f"resume must be None, or 'auto' with a checkpoint_dir; got resume={resume!r}, checkpoint_dir={path!r}."
        )
    if path is None:
        yield None
        return
    with CheckpointFolder(path, keep_last, engine, asynchronous=asynchronous) as folder:
        yield folder
