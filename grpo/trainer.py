"""The trainer: a run of many iterations, with schedules, evaluations, checkpoints and signals."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from ._common.conversion import describe
from ._common.domain_checks import with_checked_arguments
from ._common.preserved import preserved_mode, preserved_random_state
from ._retrying.calls import RetriedCalls
from ._rewarding.calls import RewardCalls
from ._running.ahead import Ahead
from ._running.budget import Budget, total_of
from ._running.demonstrations import sources_of
from ._running.first_iteration import check_first_iteration
from ._running.in_progress import IterationInProgress
from ._running.interrupts import Interrupts
from ._running.progress import History, RunProgress, summary_of
from ._running.ranks import run_on_all_ranks
from ._running.restoring import load_into
from ._running.run import Run, at_least_one, opened_folder, samples_of, set_learning_rate
from ._running.safe_points import SafePoints
from ._running.state import RunState
from ._updating.requirements import settings_of_a_run
from ._updating.update_rows import UpdateRows
from .checkpoint import CheckpointFolder, require_encodable, write_checkpoint
from .engine import on_all_ranks
from .errors import ConfigError, TrainingInterrupted, warn_user
from .evaluation.advice import Advisor
from .evaluation.measurement import evaluation_metrics, measured_rows
from .learner import Learner
from .metrics import timed
from .sinks import MetricSink, Samples
from .types import ExperienceBatch, Rows

__all__ = ["GRPOTrainer"]


class GRPOTrainer(Learner):
    """Trains any policy on any reward with group-relative advantages, in runs of many iterations.

    The arguments and errors are those of `Learner`. With an engine, each rank takes its share of the states in `train`.
    """

    is_alone: ClassVar[bool] = False
    reward_calls: ClassVar[type[RewardCalls]] = RetriedCalls

    def built(self) -> None:
        """Add what a run needs."""
        self.advisor = Advisor(self.config.to_dict())
        self.interrupts = Interrupts()
        self.progress = RunProgress()
        self.in_progress = IterationInProgress(self.updates.context, self.meter)
        self.ahead = Ahead(self.config, self.collector, self.sampler, self.engine, self.interrupts, self.counters)
        self.parts.add(progress=self.progress, in_progress=self.in_progress, ahead=self.ahead)
        snapshots: dict[str, Callable[[], Any]] = {
            "replay": self.updates.replay.snapshot,
            "in_progress": self.in_progress.snapshot,
            "ahead": self.ahead.snapshot,
        }
        self.run_state = RunState(self.parts, self.config, self.engine, snapshots)
        self.safe_points = SafePoints(
            self.run_state,
            self.interrupts,
            self.engine,
            self.optimizer_step,
            self.in_progress,
            self.progress,
            self.counters,
        )
        self.updates.context.between = self.safe_points.reached
        self.samples: list[Samples] | None = None
        """Rows of the current iteration, while a sink of `train` records them. None: no sink does."""
        self.history: list[dict[str, float]] = History()
        """The metrics of each iteration of the latest call of `train`. An interrupted call leaves them here."""
        self._has_said_what_needs_a_run = False
        self._needs_a_run = settings_of_a_run(self.config)

    def __repr__(self) -> str:
        names = f"{type(self.policy).__name__}, {type(self.reward_model).__name__}"
        return f"GRPOTrainer({names}) at iteration {self.iteration}; the latest train: {summary_of(self.history)}"

    # One iteration

    @on_all_ranks
    def collect(self, states: Rows, *, more_states: Callable[[], Rows] | None = None) -> ExperienceBatch:
        """The first half of `step`: sample actions, get their rewards and scores, without gradient."""
        self.ahead.require_train("collect")
        self._say_what_needs_a_run(has_more_states=more_states is not None)
        return self._collected(states, more_states)

    @on_all_ranks
    def update(self, *batches: ExperienceBatch) -> dict[str, float]:
        """The second half of `step`: all optimizer steps on the rows of batches, from `collect` or from your own code."""
        self.ahead.require_train("update")
        return super().update(*batches)

    @on_all_ranks
    def prepared(self, *batches: ExperienceBatch) -> UpdateRows:
        """Compute advantages, and add rows of earlier iterations. An iteration that was stopped is given up."""
        self.in_progress.give_up(is_loaded=self.progress.is_loaded)
        self.progress.unrecorded = None
        return super().prepared(*batches)

    @on_all_ranks
    def improve(self, rows: UpdateRows) -> dict[str, float]:
        """Make the updates of an iteration, and return its metrics. A run can stop, and continue, between two of them."""
        self.in_progress.rows = rows
        metrics = super().improve(rows)
        if self.iteration == 1:
            has_own = self.reference_policy is None
            check_first_iteration(rows, metrics, self.updates.context, self.optimizer_step, has_own_reference=has_own)
        self.advisor.log(metrics)
        if self.samples is not None and rows.all_ranks.batch.num_rows:
            self.samples.append(samples_of(rows.given))
        self.in_progress.rows = None
        return metrics

    @on_all_ranks
    def evaluate(self, states: Rows, *, num_actions_per_state: int | None = None) -> dict[str, float]:
        """Return statistics of the rewards of newly sampled actions, without training: `measure_policy(...).metrics()` of all
        states at once, with the random numbers that come next.

        Global random generators and the policy's mode are restored. A reward model or a policy that has a state may change:
        evaluating on a bandit pulls its arms. On several ranks, the samples of all ranks count.

        Args:
            states: The states to evaluate in.
            num_actions_per_state: Samples per state. None: `config.group_size`.

        Returns:
            `eval/avg_reward` and `eval/avg_reward_std`; `eval/NAME/mean` for each named part of the reward; and
            `eval/steps_mean`, the mean number of steps, if sampling tells it.
        """
        num_actions = at_least_one("num_actions_per_state", num_actions_per_state, self.config.group_size)
        self.sampler.sync()
        with preserved_mode(self.policy), preserved_random_state():
            with self.interrupts.at_once():
                rows, _ = measured_rows(self.collector, states, num_actions)
            if self.samples is not None:
                self.samples.append(rows)
            return evaluation_metrics(rows.rewards, rows.reward_components, rows.num_steps, self.engine)

    # A run

    @with_checked_arguments
    @run_on_all_ranks
    def train(
        self,
        states: Any,
        *,
        demonstrations: Any = None,
        num_iterations: int | None = None,
        num_epochs: float | None = None,
        budget: tuple[str, int] | None = None,
        eval_states: Rows | None = None,
        evaluation: Callable[[], Mapping[str, float]] | None = None,
        eval_every: int | None = None,
        sinks: Sequence[MetricSink] = (),
        callbacks: Sequence[Any] = (),
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int | timedelta | None = None,
        keep_last: int = 3,
        resume: Literal["auto"] | None = None,
        checkpoint_async: bool = False,
        progress: bool = True,
    ) -> list[dict[str, float]]:
        """Train until `iteration` is `num_iterations`, with a progress bar, evaluations, sinks and checkpoints.

        A further call, and a call after `load_checkpoint`, go on from the trainer's iteration: `num_iterations` is the total.
        The policy ends in `train()`.

        Args:
            states: A sequence or tensor of states, an iterable, or a sampler `iteration -> states`; see `StateSource`. None:
                train on demonstrations alone, which is supervised learning. No reward is then asked for.
            demonstrations: Actions to imitate, with the weight `config.objective.demonstration_coef`: a batch of
                `ExperienceBatch.from_demonstrations`, or a function `iteration -> batch`. Each iteration has the next
                `config.num_demonstrations_per_iteration`, in shuffled epochs.
            num_iterations: The total number of iterations, those before this call included. A learning rate schedule covers
                them; `step` has no schedule.
            num_epochs: Passes over the states in total, instead of `num_iterations`. One pass takes
                `len(states) / config.num_states_per_iteration` iterations; the last iteration may begin another pass. States
                that dynamic sampling draws in addition are not counted. Without states: passes over the demonstrations.
            budget: A metric that sampling reports and its total, such as `("episodes/steps", 100_000)`, instead of
                `num_iterations`. The last iteration is the one that reaches it; what dynamic sampling leaves out counts.
                Learning rate schedules, `eval_every` and `checkpoint_every` are then counted in it, too.
            eval_states: States for evaluations, every `eval_every` iterations and after the last.
            evaluation: Returns the metrics of an evaluation, `eval/...`, in place of `evaluate(eval_states)`. The first of them
                is the score of checkpoints; larger is better.
            eval_every: Iterations between evaluations. None: ten evaluations in the run.
            sinks: Receive the metrics of every iteration, on the first rank. See `MetricSink`.
            callbacks: Called before the first and after every iteration, and may stop the run. See `grpo.callbacks`.
            checkpoint_dir: Folder for checkpoints `iteration-00000010` and so on. None: no checkpoints.
            checkpoint_every: Iterations between checkpoints, or the time between them: `timedelta(minutes=30)`. None: ten
                checkpoints in the run. The last iteration and new best evaluations are written too.
            keep_last: Number of newest checkpoints to keep. The best by its evaluation (or `rewards/mean`) is kept, too.
            resume: "auto" continues from the newest checkpoint in `checkpoint_dir`, or starts if there is none. None: start, or
                go on.
            checkpoint_async: Write checkpoints in a second thread, while training goes on. This needs memory for a copy of the
                checkpoint on the host, and a single process.
            progress: Show a progress bar.

        Returns:
            The metrics of each iteration that this call made.

        Raises:
            ConfigError: The trainer has made `num_iterations` iterations, or spent the budget, already.
            TrainingInterrupted: The process received SIGTERM or SIGINT. With `checkpoint_dir`, a checkpoint holds everything up
                to the last update. If nobody catches the exception, the process ends with exit code 143 or 130.
        """
        with (
            self._told_callbacks(),
            opened_folder(checkpoint_dir, keep_last, resume, self.engine, asynchronous=checkpoint_async) as folder,
        ):
            if folder is not None:
                self._fit_to(folder, resumes=resume is not None)
            if not self.progress.is_loaded:  # what an earlier call left unfinished is given up
                self.in_progress.rows, self.progress.unrecorded, self.ahead.pending = None, None, []
            first = 0 if self.progress.is_loaded else self.progress.num_draws
            source, given = sources_of(states, demonstrations, self.config, self.counters.data_seed, first)
            run = Run(
                config=self.config,
                progress=self.progress,
                counters=self.counters,
                clock=self.meter.clock,
                source=source,
                demonstrations=given,
                engine=self.engine,
                budget=Budget(
                    *total_of(source or given, num_iterations, num_epochs, budget),
                    self.progress,
                    self.counters,
                    self.in_progress,
                    self.ahead,
                ),
                resumes=resume is not None,
                evaluate=self._evaluation(eval_states, evaluation),
                eval_every=eval_every,
                sinks=sinks,
                callbacks=callbacks,
                folder=folder,
                checkpoint_every=checkpoint_every,
                shows_bar=progress,
            )
            self.history, self.samples = run.history, run.samples
            run.start(self, self.reward_model)
            self.engine.require_same_soon(self.parts.weights())  # other code may have changed them on one rank
            # a signal or an error leaves a checkpoint of the last safe point
            with self.safe_points.kept_in(folder), self.ahead.running():
                for _ in run.iterations():
                    metrics = self.progress.unrecorded or self._iteration(run)
                    is_due = run.record(self, metrics, run.evaluation_of(metrics))
                    if is_due:
                        run.save(self, self.state_dict())
                    self.engine.agree()  # ranks begin an iteration together, so that their safe points are the same
                    self.safe_points.reached(is_saved=is_due)
        return run.history

    def _evaluation(
        self, eval_states: Rows | None, evaluation: Callable[[], Mapping[str, float]] | None
    ) -> Callable[[], Mapping[str, float]] | None:
        """What evaluates in a run. None: nothing does."""
        if eval_states is not None and evaluation is not None:
            raise ConfigError("train: eval_states and evaluation are two ways to evaluate. Pass one of them.")
        if evaluation is None:
            return None if eval_states is None else lambda: self.evaluate(eval_states)

        def evaluated() -> Mapping[str, float]:
            self.sampler.sync()
            with preserved_mode(self.policy), preserved_random_state(), self.interrupts.at_once():
                found: Any = evaluation()
            entries = found.items() if isinstance(found, Mapping) else ()
            if not entries or not all(_is_evaluation_metric(*entry) for entry in entries):
                raise ConfigError(
                    f"evaluation must return a dict of metrics eval/... and their numbers; got {describe(found)}. Return for "
                    "example {'eval/solved': 0.5}."
                )
            return {name: float(value) for name, value in entries}

        return evaluated

    @timed
    def _iteration(self, run: Run) -> dict[str, float]:
        """One iteration of a run, or the rest of an iteration that was stopped."""
        rows = self.in_progress.rows
        if rows is None:
            rows = self.prepared(*self._sampled(run), *run.draw_demonstrations())
        done, size = run.budget.done, run.budget.size_of(rows.all_ranks.batch.metrics)
        set_learning_rate(self.optimizer, self.config, done, size, run.budget.total)
        metrics = self.improve(rows)
        self.progress.unrecorded = metrics
        self.safe_points.reached()
        return metrics

    def _sampled(self, run: Run) -> list[ExperienceBatch]:
        """The sampled rows of the next iteration of a run. Empty: it has demonstrations only."""
        if run.source is None:
            return []
        ahead = self.ahead.next_rows(run.draw, run.budget.num_to_sample)  # sampled earlier, or none
        return [self._collected(run.draw(), run.draw) if ahead is None else ahead]

    def _collected(self, states: Rows, more_states: Callable[[], Rows] | None) -> ExperienceBatch:
        with self.interrupts.at_once():
            return super().collect(states, more_states=more_states)

    def _say_what_needs_a_run(self, *, has_more_states: bool) -> None:
        """Say once, in a loop of the user's own, which settings only `train` honours."""
        found = [*self._needs_a_run]
        if self.config.dynamic_sampling_rounds and not has_more_states:
            found.append(f"dynamic_sampling_rounds={self.config.dynamic_sampling_rounds} (without more_states)")
        if found and not self._has_said_what_needs_a_run:
            self._has_said_what_needs_a_run = True
            warn_user(
                f"step() does not honour config.{', config.'.join(found)}: only train() does, because it knows the number of "
                "iterations and draws states. Call train(), pass more_states=..., or leave the settings at their defaults."
            )

    @on_all_ranks
    def save_checkpoint(self, path: str | Path) -> Path:
        """Write what an exact resume needs to the folder `path`, completely or not at all. All ranks call this method."""
        update = self.in_progress.num_planned
        return write_checkpoint(path, self.state_dict(), iteration=self.iteration, update=update, engine=self.engine)

    @on_all_ranks
    def load_checkpoint(self, path: str | Path) -> None:
        """Restore what `save_checkpoint` or `train(checkpoint_dir=...)` wrote, down to the random generators.

        A setting that differs from the saved run's gives a warning, and the new setting counts. After a checkpoint from the
        middle of an iteration, `train` continues with the next update.

        Args:
            path: One checkpoint, or a folder of checkpoints: the newest intact one is read.

        Raises:
            CheckpointError: A file is damaged, or does not fit this trainer. The message names the file or the value. The
                trainer is unchanged.
        """
        self._load(path)

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact resume needs, as `save_checkpoint` writes it. Tensors are not copied."""
        return self.run_state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, all or nothing.

        Raises:
            CheckpointError: The state does not fit. The message names what differs. The trainer is unchanged.
        """
        self.run_state.load_state_dict(state)
        self._continue_from_here()

    def _load(self, path: str | Path, *, at_least: int = 0) -> None:
        load_into(self.run_state, path, self.engine, self.policy, at_least=at_least)
        self._continue_from_here()

    def _continue_from_here(self) -> None:
        self.progress.is_loaded = True
        self.sampler.forget()
        self.sampler.sync()
        self.engine.agree()  # no rank goes on if another could not load

    def _fit_to(self, folder: CheckpointFolder, *, resumes: bool) -> None:
        """Load the newest checkpoint of a folder, and refuse a folder that is ahead of the trainer, and a trainer whose state
        no checkpoint can hold."""
        if resumes and folder.newest() is not None:
            self._load(folder.folder, at_least=self.iteration)
        folder.require_at_most(self.iteration, self.in_progress.num_planned)
        require_encodable(self.state_dict(), "the trainer's state")

    @contextmanager
    def _told_callbacks(self) -> Iterator[None]:
        """Tell the callbacks of the run in the block when a signal stops it, after its checkpoint was written."""
        try:
            yield
        except (TrainingInterrupted, KeyboardInterrupt) as error:
            self.progress.callbacks.on_interrupt(self, error)
            raise
        finally:
            self.samples = None


def _is_evaluation_metric(name: Any, value: Any) -> bool:
    """Whether a user's evaluation may return this: a name eval/..., and a real number, also as a tensor with one entry."""
    is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())
    return isinstance(name, str) and name.startswith("eval/") and is_number
