"""A run of many iterations: which states it draws, when it evaluates, what it records, and where its checkpoints go."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import TqdmWarning, tqdm

from grpo._collecting.batches import select_batch
from grpo._common.checks import require_count
from grpo._updating.parts import Counters
from grpo._updating.training_rows import TrainingRows
from grpo.callbacks import Callbacks, RunningTrainer
from grpo.checkpoint import CheckpointFolder, require_encodable
from grpo.config import GRPOConfig
from grpo.engine import Engine
from grpo.errors import ConfigError, warn_user
from grpo.sinks import GuardedSinks, MetricSink, Samples, run_settings
from grpo.types import ExperienceBatch, Rows, row_totals, select_rows, zero_outside

from .budget import Budget
from .demonstrations import DemonstrationSource
from .progress import History, RunProgress
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
    clock: Callable[[], float]
    """Returns seconds."""
    source: StateSource | None
    """Returns the states of an iteration. None: there are demonstrations only."""
    demonstrations: DemonstrationSource | None
    """Returns the demonstrations of an iteration. None: there are none."""
    engine: Engine
    """Joins the ranks. Each rank takes its share of the states."""
    budget: Budget
    """When the run ends, and how far it is."""
    resumes: bool
    """Whether a checkpoint folder may hold the whole run already. There is then nothing left to do, which is no error."""
    evaluate: Callable[[], Mapping[str, float]] | None
    """Evaluates the policy. None: nothing does."""
    eval_every: int | None
    """Iterations, or units of the budget, between evaluations. None: ten evaluations in the run."""
    sinks: Sequence[MetricSink]
    """Receivers of every iteration's metrics. Only those of the first rank are called."""
    callbacks: Sequence[Any]
    """Called after every iteration."""
    folder: CheckpointFolder | None
    """The folder to write checkpoints to. None: no checkpoints."""
    checkpoint_every: int | timedelta | None
    """Iterations, units of the budget, or time between checkpoints. None: ten checkpoints in the run."""
    shows_bar: bool
    """Show a progress bar, on the first rank."""
    history: list[dict[str, float]] = field(default_factory=History)
    """The metrics of each iteration that this call has made."""

    def __post_init__(self) -> None:
        sinks = GuardedSinks(self.sinks)
        self._sinks = sinks if self.engine.rank == 0 else GuardedSinks([])
        callbacks = Callbacks(self.callbacks)
        if self.evaluate is None:
            callbacks.require_evaluations()
        budget = self.budget
        self._eval_every = at_least_one("eval_every", self.eval_every, budget.total // 10)
        every = self.checkpoint_every
        if isinstance(every, timedelta) and every <= timedelta(0):
            raise ConfigError(f"checkpoint_every must be longer than 0; got {every}.")
        self._checkpoint_every: int | timedelta = (
            every if isinstance(every, timedelta) else at_least_one("checkpoint_every", every, budget.total // 10)
        )
        if self.folder is not None and self.source is not None and self.source.first is not None:
            require_encodable(self.source.first, "states[0]")
        if self.folder is not None:
            require_encodable(callbacks.state_dict(), "callbacks")
        self._saved_at = self.clock()
        self._bar: Any = None
        self._is_stopped = self._asks_callbacks = False
        self._score = math.nan
        self._silent_parts = SilentParts()
        self.samples: list[Samples] | None = [] if self._sinks.take_samples else None
        """The rows of the current iteration that sinks record. None: no sink records rows."""
        is_done = self._is_done()  # before a loaded run counts as continued
        self.progress.begin(callbacks)
        if is_done:
            warn_user(f"{self._where}, so there is nothing left to do. Raise {budget.name} to continue.")
        unit, total = self.progress.unit, self.progress.total
        has_schedule = self.config.lr_schedule != "constant" or self.config.warmup_ratio > 0
        if total is not None and (unit, total) != (budget.unit, budget.total) and has_schedule:
            now = budget.total if unit == budget.unit else f"{budget.name}={budget.total}"
            warn_user(
                f"{unit or 'num_iterations'} was {total} and is {now}, and config.lr_schedule={self.config.lr_schedule!r} "
                f"and warmup_ratio={self.config.warmup_ratio} cover the total, so the learning rate jumps. Pass the total of "
                "the whole run from the start if it should not."
            )
        self.progress.unit, self.progress.total = budget.unit, budget.total

    @property
    def _where(self) -> str:
        at = f"iteration {self.budget.done}" if self.budget.unit is None else f"{self.budget.done:.0f}"
        return f"train: {self.budget.name}={self.budget.total} is the total, and the trainer is at {at}"

    def _is_done(self) -> bool:
        """Whether the trainer has made all iterations."""
        is_done, total = self.budget.is_over, self.budget.total
        if is_done and not self.resumes:
            raise ConfigError(
                f"{self._where}. Pass a larger total: {self.budget.name}={self.budget.done + total:.0f} makes {total} further "
                f"{(self.budget.unit or 'iterations').rpartition('/')[2]}."
            )
        return is_done

    def iterations(self) -> Iterator[None]:
        """Yield once for each remaining iteration, with a progress bar."""
        budget, hides = self.budget, not self.shows_bar or self.engine.rank > 0
        unit = "it" if budget.unit is None else f" {budget.unit.rpartition('/')[2]}"
        name = "Supervised" if self.source is None else "GRPO"
        bar = tqdm(total=budget.total, initial=round(budget.done), desc=name, unit=unit, disable=hides)
        with bar as self._bar, nullcontext() if hides else beside_the_bar():
            while not (budget.is_over or self._is_stopped):
                yield

    def start(self, trainer: RunningTrainer, reward_model: object) -> None:
        """Tell the sinks what is run, and the callbacks that it begins."""
        settings = run_settings(self.config, trainer.policy, reward_model) | {self.budget.name: self.budget.total}
        self._sinks.start(settings, self.budget.position + 1)
        self._asks_callbacks = any(self.engine.gather_objects(bool(self.callbacks)))  # one rank may have them alone
        names = self._of_all_ranks(self.progress.callbacks.on_start(trainer))
        self._is_stopped = bool(names)
        if names:
            warn_user(
                f"{' and '.join(names)} has ended the run already, so there is nothing left to do. Leave it out, or let it "
                "stop later, to continue."
            )

    def draw(self) -> Rows:
        """Draw the next states, and return this rank's share of them."""
        assert self.source is not None
        states = self.source(self.progress.num_draws)
        self.progress.num_draws += 1
        if self.engine.num_ranks == 1:
            return states
        return select_rows(states, self._share_of(len(states), "a state", "num_states_per_iteration"))

    def draw_demonstrations(self) -> list[ExperienceBatch]:
        """This rank's share of the iteration's demonstrations. Empty: there are none."""
        if self.demonstrations is None:
            return []
        drawn = self.demonstrations(self.counters.iteration)
        if self.engine.num_ranks == 1:
            return [drawn]
        share = self._share_of(drawn.num_rows, "a demonstration", "num_demonstrations_per_iteration")
        return [select_batch(drawn, share)]

    def _share_of(self, count: int, what: str, setting: str) -> Tensor:
        """This rank's share of `count` rows, as positions."""
        num_ranks = self.engine.num_ranks
        if count < num_ranks:
            raise ConfigError(f"Every one of {num_ranks} ranks needs {what}; got {count}. Raise {setting}.")
        return torch.arange(count).tensor_split(num_ranks)[self.engine.rank]

    def evaluation_of(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The metrics of the evaluation with which an iteration ends. Empty: it ends without one."""
        if self.evaluate is None or not self.budget.passes(self._eval_every, metrics):
            return {}
        return self.evaluate()

    def record(self, trainer: RunningTrainer, metrics: dict[str, float], evaluation: Mapping[str, float]) -> bool:
        """Record an iteration and its evaluation, if there was one, and ask the callbacks. Returns whether a checkpoint is
        due. The first metric of the evaluation is its score."""
        self._score = score = next(iter(evaluation.values()), math.nan)
        improved = score > self.progress.best_score  # False for NaN, an iteration without an evaluation
        is_last = self.budget.ends_with(metrics)
        is_due = self.folder is not None and (improved or self._checkpoint_is_due(metrics))
        if improved:
            self.progress.best_score = score
        done, after = self.budget.done, self.budget.after(metrics)
        metrics = {**metrics, **evaluation, **self.budget.as_metric(after)}
        self._sinks.log(metrics, self.counters.iteration, self.samples or (), always=is_last or bool(evaluation))
        if self.samples is not None:
            self.samples.clear()
        self.history.append(metrics)
        if self.engine.rank == 0:
            self._silent_parts.see(metrics)
        try:
            self._ask_callbacks(trainer, metrics, is_last=is_last)
        except BaseException:
            self.history.pop()  # a resumed run records the iteration again
            raise
        shown = {"reward": "rewards/mean", "demonstration_loss": "train/demonstration_loss"}
        values = {label: f"{metrics[name]:.3f}" for label, name in shown.items() if name in metrics}
        self._bar.set_postfix(values, refresh=False)
        self._bar.update(round(after) - round(done))
        self.budget.record(after)
        return is_due or (self._is_stopped and self.folder is not None)

    def _ask_callbacks(self, trainer: RunningTrainer, metrics: dict[str, float], *, is_last: bool) -> None:
        """Call the callbacks. The run stops if one of them says so, on any rank."""
        names = self._of_all_ranks(self.progress.callbacks.on_iteration(trainer, metrics))
        self._is_stopped = bool(names)
        if names and not is_last and self.engine.rank == 0:
            logger.warning("Stopped by %s after iteration %d.", " and ".join(names), self.counters.iteration)

    def _of_all_ranks(self, names: list[str]) -> list[str]:
        """The names of callbacks on all ranks. If no rank has a callback, the ranks need not meet."""
        of_ranks = self.engine.gather_objects(names) if self._asks_callbacks else []
        return sorted({name for of_rank in of_ranks for name in of_rank})

    def _checkpoint_is_due(self, metrics: Mapping[str, float]) -> bool:
        if not isinstance(self._checkpoint_every, timedelta):
            return self.budget.passes(self._checkpoint_every, metrics)
        # the clocks of ranks differ, so the first rank decides for all
        has_passed = self.clock() - self._saved_at >= self._checkpoint_every.total_seconds()
        return bool(self.engine.gather_objects(has_passed)[0]) or self.budget.ends_with(metrics)

    def save(self, trainer: RunningTrainer, state: Mapping[str, Any]) -> None:
        """Write a checkpoint. Its score is the last evaluation or, without evaluations, the mean reward."""
        assert self.folder is not None
        score = self._score if self.evaluate is not None else self.history[-1].get("rewards/mean")
        path = self.folder.save(state, iteration=self.counters.iteration, score=score)
        self._saved_at = self.clock()
        self.progress.callbacks.on_checkpoint(trainer, path)


def set_learning_rate(optimizer: Any, config: GRPOConfig, done: float, size: float, total: int) -> None:
    """Set every learning rate for an iteration of `size` that begins after `done` of `total`, as the schedule says."""
    if optimizer is None or (config.lr_schedule == "constant" and config.warmup_ratio == 0):
        return
    factor = config.learning_rate_factor(done, total, size)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def samples_of(rows: TrainingRows) -> Samples:
    """The new rows of an iteration as sinks record them."""
    batch, mask = rows.batch, rows.batch.mask
    new = slice(0, int(rows.is_sampled.sum()) - rows.num_replayed)  # replayed rows and demonstrations are after them
    advantages = rows.advantages
    if advantages.dim() == 2:
        advantages = zero_outside(advantages, mask.to(advantages.device)).sum(1) / mask.sum(1).clamp(min=1).cpu()
    return Samples(
        kind="train",
        states=select_rows(batch.states, new),
        actions=select_rows(batch.actions, new),
        group_ids=batch.group_ids[new],
        rewards=batch.total_rewards[new],
        reward_components={name: row_totals(part, mask)[new] for name, part in batch.reward_components.items()},
        advantages=advantages[new],
        num_steps=mask.sum(1)[new],
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
