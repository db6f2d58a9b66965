"""The trainer. An iteration collects rows, estimates their advantages and updates the policy. A run has many iterations."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ._collecting.dynamic_sampling import collect_live_groups
from ._common.global_state import preserved_mode, preserved_random_state
from ._running.ahead import Ahead
from ._running.interrupts import Interrupts
from ._running.restoring import load_into
from ._running.run import Run, RunProgress, at_least_one, iterations_of, opened_folder, tells_callbacks
from ._running.safe_points import SafePoints
from ._running.state_source import StateSource
from ._running.trainer_state import capture
from ._updating.coefficients import Coefficients
from ._updating.environment import MovingReference, SamplerSync, autocast, prepare
from ._updating.loss import MeteredObjective
from ._updating.optimizer_step import OptimizerStep
from ._updating.ranks import built_on_all_ranks, on_all_ranks, run_on_all_ranks
from ._updating.report import IterationReport, evaluation_metrics, samples_of
from ._updating.requirements import (
    first_kl_coef,
    require_batch,
    require_consistent,
    require_reference,
    required_scores,
)
from ._updating.sharding import divided_weights
from ._updating.training_rows import ReplayBuffer, with_advantages
from ._updating.update_rows import UpdateRows, UpdateSetup
from .advantage_estimator import AdvantageEstimator
from .checkpoint import write_checkpoint
from .config import GRPOConfig
from .distributed import Engine, OneProcess, require_equal_weights
from .experience_collector import ExperienceCollector
from .grpo_objective import Objective
from .metrics import Meter
from .policy_base import POLICY_METHODS, HasState, refuse_near_misses, require_methods
from .reward_model_base import ComparesActions, as_reward_model
from .sinks import MetricSink, Samples
from .types import ExperienceBatch, Rows

__all__ = ["GRPOConfig", "GRPOTrainer"]


class GRPOTrainer:
    """Trains any policy on any reward with group-relative advantages.

    Args:
        config: all settings of training.
        policy: a `PolicyModel`. Optional capabilities are looked up here, once.
        reward_model: a `RewardModel`, or a plain `(states, actions) -> rewards`.
        reference_policy: a frozen copy, `copy.deepcopy(policy)`. Switches on the KL term, which keeps the policy close to it.
        optimizer: the optimizer that is stepped, or a function that builds it from the list of trained tensors, such as
            `functools.partial(torch.optim.SGD, lr=0.1)`. None: AdamW without weight decay over `policy.get_parameters()`.
        lr_scheduler: stepped once per applied update, or a function that builds it from the optimizer.
        objective: replaces `grpo_objective`: any `ObjectiveInputs -> ObjectiveOutput`.
        advantages: replaces `AdvantageEstimator`: any `ExperienceBatch -> [N] or [N, T]`. On several ranks, it gets the rows of
            its own rank only.
        group_by: maps a state to a key, such as its text. States of one iteration with equal keys share a group, so their
            rewards are compared with one another. Such states must be the same for the policy, too. Each rank and each draw of
            dynamic sampling has its own groups. None: each position of `states` has a group of its own.
        engine: joins several processes (`Replicated` or `Sharded` of `grpo.distributed`). Each rank passes its own states to
            `step`, and takes its share of the states in `train`. `batch_size` is per rank. None: one process.

    Raises:
        ProtocolError: the policy or the reward model lacks methods. The message names every missing method.
        ConfigError: settings and arguments contradict one another.
    """

    @built_on_all_ranks
    def __init__(
        self,
        *,
        config: GRPOConfig,
        policy: Any,
        reward_model: Any,
        reference_policy: Any = None,
        optimizer: torch.optim.Optimizer | Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        lr_scheduler: Any = None,
        objective: Objective | None = None,
        advantages: Callable[[ExperienceBatch], Tensor] | None = None,
        group_by: Callable[[Any], Hashable] | None = None,
        engine: Engine | None = None,
    ) -> None:
        require_methods(policy, POLICY_METHODS, "policy", "PolicyModel")
        refuse_near_misses(policy, "policy")
        refuse_near_misses(reference_policy, "reference_policy")
        refuse_near_misses(reward_model, "reward_model", (ComparesActions, HasState))
        given = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "objective": objective, "advantages": advantages}
        require_consistent(config, policy, **given, group_by=group_by)
        self.config, self.policy, self.reference_policy = config, policy, reference_policy
        self.reward_model = as_reward_model(reward_model)
        self.engine: Engine = OneProcess() if engine is None else engine
        self.data_seed = prepare(config, self.engine, policy, self.reward_model, reference_policy)
        require_reference(config, policy, reference_policy)
        require_equal_weights(self.engine, policy.get_parameters())
        has_own_loss = objective is not None
        kl_coef = first_kl_coef(config, policy, reference_policy, has_own_loss=has_own_loss)
        built = {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
        whole, equal_count = divided_weights(self.engine, policy, reference_policy, **built)

        self.collector = ExperienceCollector(
            policy=policy,
            reward_model=self.reward_model,
            group_size=config.group_size,
            reference_policy=reference_policy,
            use_reference=kl_coef > 0 and config.objective.kl_estimator != "exact",
            micro_batch_size=config.micro_batch_size,
            reward=config.reward,
            autocast=lambda: autocast(config, self.optimizer_step.device),
            waiting=self.engine.waiting,
            whole=whole,
            equal_count=equal_count,
            group_by=group_by,
            needs=required_scores(config, has_own_loss=has_own_loss),
        )
        self.advantages = AdvantageEstimator(config.advantage) if advantages is None else advantages
        self.replay = ReplayBuffer(config.replay_iterations)
        self.coefficients = Coefficients(config, kl_coef)
        self.meter = Meter()
        self.objective = MeteredObjective(config, objective, self.meter)
        self.optimizer_step = OptimizerStep(config, policy, optimizer, lr_scheduler, self.engine, self.meter)
        self.setup = UpdateSetup(config, self.collector, self.coefficients, self.engine, has_own_loss, self.data_seed)
        self.report = IterationReport(config, self.setup, self.optimizer_step, self.meter)
        self.sampler = SamplerSync(policy)
        self.moving_reference = MovingReference(config, policy, reference_policy)
        self.progress = RunProgress()
        self.interrupts = Interrupts()
        self.safe_points = SafePoints(self, self.interrupts)
        self.ahead = Ahead(self)
        self.iteration = 0
        self.samples: list[Samples] | None = None
        """Rows of the current iteration, while a sink of `train` records them. None: no sink does."""
        self.history: list[dict[str, float]] = []
        """The metrics of each iteration of the latest call of `train`. An interrupted call leaves them here."""

    # One iteration

    @on_all_ranks
    def step(self, states: Rows, *, more_states: Callable[[], Rows] | None = None) -> dict[str, float]:
        """One iteration: sample a group of actions per state, and improve the policy on them.

        Args:
            states: B states.
            more_states: returns further states for `config.dynamic_sampling_rounds`. `train` passes its own function.

        Returns:
            Metrics by name (`train/...`, `rewards/...`, `group_stats/...`, `rows/...`, `steps/...`, `time/...`). What an
            iteration did not measure is absent: without an advantage, no row is scored, and there is no ratio.

        Raises:
            ContractError: the policy broke its contract.
            RewardError: the reward model raised, or returned NaN.
            NonFiniteGradientError: `config.max_skipped_updates` updates in a row had to be skipped.
        """
        start = time.perf_counter()
        batch = self.collect(states, more_states=more_states)  # sample groups, ask for rewards, score, check
        metrics = self.update(batch)
        return {**metrics, "time/iteration": time.perf_counter() - start}

    @on_all_ranks
    def collect(self, states: Rows, *, more_states: Callable[[], Rows] | None = None) -> ExperienceBatch:
        """The first half of `step`: sample actions, get their rewards and scores, without gradient."""
        self.ahead.require_train("collect")
        self.sampler.sync()
        rounds, reward_clip = self.config.dynamic_sampling_rounds, self.config.advantage.reward_clip
        with self.interrupts.at_once():
            if rounds == 0:
                batch = self.collector.collect(states)
            else:
                batch = collect_live_groups(self.collector.collect, states, more_states, rounds, reward_clip)
        return self._complete(batch)

    @on_all_ranks
    def update(self, batch: ExperienceBatch | None) -> dict[str, float]:
        """The second half of `step`: all optimizer steps on one batch, from `collect` or from your own code.

        Args:
            batch: the rows. None: the rows of the iteration that was stopped, whose other updates are made now.
        """
        start = time.perf_counter()
        self.ahead.require_train("update")
        rows = self.prepared(batch)
        self.policy.train()
        self.safe_points.reached()
        was_stale = self.sampler.is_stale
        self.sampler.is_stale = True  # the weights may have changed, even if an update fails halfway
        for selected in rows.updates():  # epochs x updates; a group's rows stay adjacent
            weights = rows.weights(selected)  # of the whole update, on all ranks
            for attempt in rows.attempts(self.optimizer_step, self.meter):  # once, unless memory runs out
                with attempt:
                    for micro in rows.micro_batches(selected):  # planned by the policy if it can
                        # no name is given to the loss, so that a failed attempt leaves no graph in memory
                        self.optimizer_step.backward(self.objective(rows.inputs(micro, weights)).loss)
            self.optimizer_step.apply(rows.sum_of_scores())  # sync ranks, check finite, clip, step, schedule
            self.safe_points.reached()  # a run that is stopped continues from here
        self.sampler.is_stale = was_stale or self.optimizer_step.num_applied > 0
        self.sampler.sync()
        metrics = self.report(rows)
        if self.samples is not None:
            self.samples.append(samples_of(rows.given))
        if self.moving_reference.move(self.iteration + 1):
            self.replay.forget_reference()
        self.iteration += 1
        self.progress.unfinished = None
        seconds = time.perf_counter() - start
        return {**metrics, "time/update": seconds, "time/iteration": seconds}

    @on_all_ranks
    def prepared(self, batch: ExperienceBatch | None) -> UpdateRows:
        """Compute advantages, and add rows of earlier iterations. With `split_steps`, each step becomes a row."""
        if batch is None:
            return self.progress.stopped_rows()
        require_batch(batch)
        self.progress.drop_unfinished()
        batch = self._complete(batch)
        rows, all_ranks = with_advantages(batch, self.advantages, self.engine)
        is_fresh = self.collector.scores_itself and self.setup.num_updates(batch) == 1
        rows = self.replay.join(replace(rows, old_is_current=is_fresh))
        if rows.num_replayed:  # a reference that has moved has to score them again
            rows = replace(rows, batch=self._complete(rows.batch))
        self.meter.clear()
        self.optimizer_step.begin()
        self.progress.unfinished = UpdateRows(rows, self.setup, all_ranks)
        return self.progress.unfinished

    def _complete(self, batch: ExperienceBatch) -> ExperienceBatch:
        return self.collector.complete(batch, several_updates=self.setup.num_updates(batch) > 1)

    @on_all_ranks
    def evaluate(self, states: Rows, *, num_actions_per_state: int | None = None) -> dict[str, float]:
        """Return statistics of the rewards of newly sampled actions, without training.

        Global random generators and the policy's mode are restored. A reward model or a policy that has a state may change:
        evaluating on a bandit pulls its arms. On several ranks, the samples of all ranks count.

        Args:
            states: the states to evaluate in.
            num_actions_per_state: samples per state. None: `config.group_size`.

        Returns:
            `eval/avg_reward` and `eval/avg_reward_std`; `eval/NAME/mean` for each named part of the reward; and
            `eval/steps_mean`, the mean number of steps, if sampling tells it.
        """
        num_actions = at_least_one("num_actions_per_state", num_actions_per_state, self.config.group_size)
        self.sampler.sync()
        with preserved_mode(self.policy), preserved_random_state():
            with self.interrupts.at_once():
                samples = self.collector.evaluate(states, num_actions)
            if self.samples is not None:
                self.samples.append(samples)
            return evaluation_metrics(samples, self.engine)

    # A run

    @run_on_all_ranks
    def train(
        self,
        states: Any,
        *,
        num_iterations: int | None = None,
        num_epochs: float | None = None,
        eval_states: Rows | None = None,
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
        """Train for many iterations, with a progress bar, evaluations, sinks and checkpoints. The policy ends in `train()`.

        After `load_checkpoint` the next call continues the saved run: `num_iterations` counts from the run's beginning.

        Args:
            states: a sequence or tensor of states, an iterable, or a sampler `iteration -> states`; see `StateSource`.
            num_iterations: number of iterations of the whole run. A learning rate schedule covers them; `step` has no schedule.
            num_epochs: passes over the states of the whole run, instead of `num_iterations`. One pass takes
                `len(states) / config.num_states_per_iteration` iterations; the last iteration may begin another pass. States
                that dynamic sampling draws in addition are not counted.
            eval_states: states for evaluations, every `eval_every` iterations and after the last.
            eval_every: iterations between evaluations. None: ten evaluations in the run.
            sinks: receive the metrics of every iteration, on the first rank. See `MetricSink`.
            callbacks: called after every iteration, and may stop the run. See `grpo.callbacks`.
            checkpoint_dir: folder for checkpoints `iteration-00000010` and so on. None: no checkpoints.
            checkpoint_every: iterations between checkpoints, or the time between them: `timedelta(minutes=30)`. None: ten
                checkpoints in the run. The last iteration and new best evaluations are written too.
            keep_last: number of newest checkpoints to keep. The best by `eval/avg_reward` (or `rewards/mean`) is kept, too.
            resume: "auto" continues from the newest checkpoint in `checkpoint_dir`, or starts if there is none. None: start, or
                continue from the checkpoint that was loaded.
            checkpoint_async: write checkpoints in a second thread, while training goes on. This needs memory for a copy of the
                checkpoint on the host, and a single process.
            progress: show a progress bar.

        Returns:
            The metrics of each iteration that this call made.

        Raises:
            TrainingInterrupted: the process received SIGTERM or SIGINT. With `checkpoint_dir`, a checkpoint holds everything up
                to the last update. If nobody catches the exception, the process ends with exit code 143 or 130.
        """
        with (
            tells_callbacks(self),
            opened_folder(self, checkpoint_dir, keep_last, resume, asynchronous=checkpoint_async) as folder,
        ):
            source = StateSource(states, self.config.num_states_per_iteration, self.data_seed)
            num_iterations = iterations_of(source, num_iterations, num_epochs)
            run = Run(
                progress=self.progress,
                source=source,
                engine=self.engine,
                num_iterations=num_iterations,
                evaluates=eval_states is not None,
                eval_every=eval_every,
                sinks=sinks,
                callbacks=callbacks,
                folder=folder,
                checkpoint_every=checkpoint_every,
                shows_bar=progress,
            )
            self.history, self.samples = run.history, run.samples
            run.start(self)
            # a signal or an error leaves a checkpoint of the last safe point
            with self.safe_points.kept_in(folder), self.ahead.running():
                for position in run.positions():
                    self.optimizer_step.schedule(position, num_iterations)
                    metrics = self.progress.unrecorded or self._iteration(run)
                    if run.evaluation_is_due:
                        assert eval_states is not None
                        metrics = {**metrics, **self.evaluate(eval_states)}
                    is_due = run.record(self, metrics)
                    if is_due:
                        run.save(self)
                    self.engine.agree()  # ranks begin an iteration together, so that their safe points are the same
                    self.safe_points.reached(is_saved=is_due)
        return run.history

    def _iteration(self, run: Run) -> dict[str, float]:
        """One iteration of a run, or the rest of an iteration that was stopped."""
        start = time.perf_counter()
        is_new = self.progress.unfinished is None
        batch = self.ahead.next_batch(run) if is_new else None  # collected now, or sampled earlier
        metrics = {**self.update(batch), "time/iteration": time.perf_counter() - start}
        self.progress.unrecorded = metrics
        self.safe_points.reached()
        return metrics

    @on_all_ranks
    def save_checkpoint(self, path: str | Path) -> Path:
        """Write what an exact resume needs to the folder `path`, completely or not at all. All ranks call this method."""
        rows = self.progress.unfinished
        update = None if rows is None else rows.num_planned
        return write_checkpoint(path, capture(self), iteration=self.iteration, update=update, engine=self.engine)

    @on_all_ranks
    def load_checkpoint(self, path: str | Path) -> None:
        """Restore what `save_checkpoint` or `train(checkpoint_dir=...)` wrote, down to the random generators.

        A setting that differs from the saved run's gives a warning, and the new setting counts. After a checkpoint from the
        middle of an iteration, `train` continues with the next update.

        Args:
            path: one checkpoint, or a folder of checkpoints: the newest intact one is read.

        Raises:
            CheckpointError: a file is damaged, or does not fit this trainer. The message names the file or the value. The
                trainer is unchanged.
        """
        load_into(self, path)
