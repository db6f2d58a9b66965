"""The trainer: one iteration is collect, estimate advantages, update; a run is many of them."""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .adaptive_coefficients import Coefficients
from .advantage_estimator import AdvantageEstimator
from .batches import gather_rewards
from .checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from .coercion import as_advantages
from .config import GRPOConfig, needed_fields, require_step_level
from .diagnosis import Diagnosis, beside_the_bar
from .distributed import Engine, OneProcess, require_equal_weights
from .dynamic_sampling import collect_live_groups
from .errors import CheckpointError, ConfigError, GRPOWarning, NonFiniteGradientError
from .experience_collector import ExperienceCollector
from .gradient_step import GradientStep, schedule_factor
from .grouping import Groups
from .grpo_objective import Objective, grpo_objective
from .iteration_report import report_iteration
from .metrics import MetricSink
from .policy_base import POLICY_METHODS, SplitsSteps, SyncsSampler, require_methods
from .policy_update import PolicyUpdate, UpdateCounts
from .random_state import preserved_random_state, seed_everything
from .reference import move_reference, require_reference, resolve_kl_coef
from .replay import RecentRows
from .reward_model_base import as_reward_model
from .state_source import StateSource
from .trainer_state import put_trainer_state, take_trainer_state
from .training_rows import TrainingRows
from .types import ExperienceBatch, Rows, select_rows

__all__ = ["GRPOConfig", "GRPOTrainer"]


class GRPOTrainer:
    """Trains any policy on any reward with group-relative advantages.

    Args:
        config: every setting; see `GRPOConfig`.
        policy: a `PolicyModel`. Optional capabilities are looked up here, once.
        reward_model: a `RewardModel`, or a plain `(states, actions) -> rewards`.
        reference_policy: a frozen copy to stay close to: `copy.deepcopy(policy)`. It turns the KL term on.
        optimizer: the one that is stepped; None: AdamW without weight decay over `policy.get_parameters()`.
        lr_scheduler: stepped once per applied update.
        objective: stands in for `grpo_objective`: any `ObjectiveInputs -> ObjectiveOutput`.
        advantages: stands in for `AdvantageEstimator`: any `ExperienceBatch -> [N] or [N, T]`; given this rank's rows.
        engine: brings several processes together (`grpo.distributed.Replicated`); each rank passes its own states to `step`,
            and takes its share of them in `train`. `batch_size` is per rank. None: there is one process.

    Raises:
        ProtocolError: (a TypeError) methods are missing; all of them are named.
        ConfigError: settings and arguments that contradict one another.

    Example:
        >>> trainer = GRPOTrainer(config=GRPOConfig(), policy=policy, reward_model=reward)  # doctest: +SKIP
        >>> metrics = trainer.step(["state 1", "state 2"])  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        config: GRPOConfig,
        policy: Any,
        reward_model: Any,
        reference_policy: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        objective: Objective | None = None,
        advantages: Callable[[ExperienceBatch], Tensor] | None = None,
        engine: Engine | None = None,
    ) -> None:
        require_methods(policy, POLICY_METHODS, "policy", "PolicyModel")
        splitter = policy if isinstance(policy, SplitsSteps) else None
        if splitter is not None and objective is None:
            require_step_level(config)
        if lr_scheduler is not None and (config.lr_schedule != "constant" or config.warmup_ratio > 0):
            raise ConfigError(
                "lr_scheduler and config.lr_schedule or warmup_ratio both set the learning rate: keep one."
            )
        self.config = config
        self.policy = policy
        self.reward_model = as_reward_model(reward_model)
        self.reference_policy = reference_policy
        self.lr_scheduler = lr_scheduler
        self.iteration = 0
        self.engine: Engine = engine or OneProcess()
        drawn = int(torch.randint(2**31, ())) if config.seed is None else config.seed
        self.data_seed: int = self.engine.gather_objects(drawn)[0]
        if config.seed is not None or self.engine.num_ranks > 1:
            # ranks that draw the same numbers would sample the same actions
            seed_everything((self.data_seed + self.engine.rank) % 2**64)
        for model in (policy, self.reward_model, reference_policy):
            if config.device is not None and model is not None:
                model.to(config.device)
        parameters = policy.get_parameters()
        if advantages is not None and config.advantage.credit == "gae":
            raise ConfigError(
                "advantages=... stands in for the estimator that advantage.credit='gae' trains the critic by: keep one of them."
            )
        require_reference(config, policy, reference_policy)
        require_equal_weights(self.engine, parameters)
        kl_coef = resolve_kl_coef(config, policy, reference_policy, has_own_loss=objective is not None)
        self.coefficients = Coefficients(
            kl_coef=kl_coef,
            entropy_coef=config.objective.entropy_coef,
            kl_control=config.kl_control,
            entropy_control=config.entropy_control,
        )
        self.gradient = GradientStep(
            policy_name=type(policy).__name__,
            parameters=parameters,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            use_scaler=config.autocast_dtype == "float16",
            engine=self.engine,
        )
        self.collector = ExperienceCollector(
            policy=policy,
            reward_model=self.reward_model,
            group_size=config.group_size,
            reference_policy=reference_policy,
            use_reference=kl_coef > 0 and config.objective.kl_estimator != "exact",
            micro_batch_size=config.micro_batch_size,
            reward=config.reward,
            autocast=self._autocast,
            needs=needed_fields(config, has_own_loss=objective is not None),
        )
        self.recent = RecentRows(config.replay_iterations)
        self.advantages = advantages or AdvantageEstimator(config.advantage)
        self.policy_update = PolicyUpdate(
            config=config,
            collector=self.collector,
            gradient=self.gradient,
            objective=objective or (lambda inputs: grpo_objective(inputs, config.objective)),
            has_own_loss=objective is not None,
            splitter=splitter,
            coefficients=self.coefficients,
            seed=self.data_seed,
            engine=self.engine,
        )
        self.diagnosis = Diagnosis(config)
        self._syncer = policy if isinstance(policy, SyncsSampler) else None
        self._sampler_is_stale = True
        self.run_position = 0
        self.num_draws = 0
        self._resume_at = 0

    # One iteration

    def step(self, states: Rows, *, more_states: Callable[[], Rows] | None = None) -> dict[str, float]:
        """One iteration: sample a group of actions per state, and improve the policy on them.

        Args:
            states: B states.
            more_states: where `config.dynamic_sampling_rounds` takes further states from; `train` passes its own.

        Returns:
            Metrics by name (`train/...`, `rewards/...`, `group_stats/...`, `rows/...`, `steps/...`, `time/...`).

        Raises:
            ContractError: the policy broke its contract.
            RewardError: a reward could not be had.
            NonFiniteGradientError: `config.max_skipped_updates` updates in a row had to be skipped.
        """
        start = time.perf_counter()
        metrics = self.update(self.collect(states, more_states=more_states))
        return {**metrics, "time/iteration": time.perf_counter() - start}

    def collect(self, states: Rows, *, more_states: Callable[[], Rows] | None = None) -> ExperienceBatch:
        """The first half of `step`: sampled, rewarded and scored rows, without gradient."""
        if self._sampler_is_stale:
            self._sync_sampler()
        rounds = self.config.dynamic_sampling_rounds
        if rounds == 0:
            return self._complete(self.collector.collect(states))
        clip = self.config.advantage.reward_clip
        return self._complete(collect_live_groups(self.collector.collect, states, more_states, rounds, clip))

    def update(self, batch: ExperienceBatch) -> dict[str, float]:
        """The second half of `step`: all updates on one batch, collected here or elsewhere."""
        start = time.perf_counter()
        batch = self._complete(batch)
        everyone, groups, advantages, rows = self._training_rows(batch)
        self.policy.train()
        try:
            counts = self.policy_update.run(rows)
        except Exception:
            self._sampler_is_stale = True  # some updates may have been made before the one that failed
            raise
        self.iteration += 1
        if counts.applied:
            self._sync_sampler()
        every = self.config.reference_sync_every
        if every is not None and self.iteration % every == 0:
            parameters = self.reference_policy.get_parameters()
            move_reference(parameters, self.policy.get_parameters(), self.config.reference_mix)
            self.recent.forget_reference()
        metrics = self._report(everyone, groups, advantages, rows, counts)
        seconds = time.perf_counter() - start
        return {**metrics, "time/update": seconds, "time/iteration": seconds}

    def evaluate(self, states: Rows, *, num_actions_per_state: int | None = None) -> dict[str, float]:
        """Mean and standard deviation of the reward of freshly sampled actions; nothing is trained.

        Global random generators are left as they were. A reward model or a policy with a state of its own moves on all the
        same: an evaluation of a bandit pulls its arms. On several ranks, the samples of all of them count.

        Args:
            states: states to act in.
            num_actions_per_state: samples per state; None: `config.group_size`.
        """
        num_actions = _at_least_one("num_actions_per_state", num_actions_per_state, self.config.group_size)
        if self._sampler_is_stale:
            self._sync_sampler()
        with preserved_random_state():
            rewards, _ = self.engine.gather(self.collector.rewards_of(states, num_actions).double())
        return {"eval/avg_reward": float(rewards.mean()), "eval/avg_reward_std": float(rewards.std(correction=0))}

    # A run

    def train(
        self,
        states: Any,
        *,
        num_iterations: int,
        eval_states: Rows | None = None,
        eval_every: int | None = None,
        sinks: Sequence[MetricSink] = (),
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        keep_last: int = 3,
        progress: bool = True,
    ) -> list[dict[str, float]]:
        """Many iterations, with a progress bar, evaluations, sinks and checkpoints; the policy is left in `train()`.

        After `load_checkpoint` of a checkpoint made by a run, the next call goes on where that run was:
        `num_iterations` counts from its beginning.

        Args:
            states: a sequence or tensor of states, an iterable, or a sampler `iteration -> states`; see `StateSource`.
            num_iterations: of the whole run. A learning rate schedule runs over them; `step` alone follows none.
            eval_states: evaluated every `eval_every` iterations, and after the last.
            eval_every: None: ten times in the run.
            sinks: each is given every iteration's metrics.
            checkpoint_dir: where `iteration-00000010` and its kind are written; None: nowhere.
            checkpoint_every: None: ten times in the run. The last iteration, and one whose evaluation is the best so
                far, are written too.
            keep_last: newest checkpoints that stay, beside the best by `eval/avg_reward` (without `eval_states`, by
                `rewards/mean`).
            progress: show a progress bar.

        Returns:
            The metrics of each iteration done by this call.
        """
        num_iterations = _at_least_one("num_iterations", num_iterations, 1)
        eval_every = _at_least_one("eval_every", eval_every, num_iterations // 10)
        checkpoint_every = _at_least_one("checkpoint_every", checkpoint_every, num_iterations // 10)
        source = StateSource(states, self.config.num_states_per_iteration, self.data_seed)
        folder = None if checkpoint_dir is None else CheckpointFolder(self._of_rank(checkpoint_dir), keep_last)
        if folder is not None:
            folder.require_at_most(self.iteration)
        start, self._resume_at = self._resume_at, 0
        if start == 0:
            self.num_draws = 0
        if start >= num_iterations:
            warnings.warn(
                f"The run that was loaded is at iteration {start}, and num_iterations={num_iterations} counts from its "
                "beginning: there is nothing left to do. Raise num_iterations to go on.",
                GRPOWarning,
                stacklevel=2,
            )
        has_schedule = self.config.lr_schedule != "constant" or self.config.warmup_ratio > 0
        history: list[dict[str, float]] = []
        best = float("-inf")
        quiet = not progress or self.engine.rank > 0
        with (
            tqdm(total=num_iterations, initial=start, desc="GRPO", unit="it", disable=quiet) as bar,
            nullcontext() if quiet else beside_the_bar(),
        ):
            for position in range(start, num_iterations):
                is_last = position + 1 == num_iterations
                if has_schedule:
                    self.gradient.schedule(schedule_factor(self.config, position, num_iterations))
                try:
                    metrics = self.step(self._draw(source), more_states=lambda: self._draw(source))
                except NonFiniteGradientError:
                    self.policy_update.skipped_in_a_row = 0  # who resumes from here starts to count anew
                    if folder is not None and not folder.has(self.iteration):
                        folder.save(take_trainer_state(self), iteration=self.iteration, score=None)
                    raise
                self.run_position = position + 1
                improved = False
                if eval_states is not None and ((position + 1) % eval_every == 0 or is_last):
                    metrics |= self.evaluate(eval_states)
                    improved = metrics["eval/avg_reward"] > best
                    best = max(best, metrics["eval/avg_reward"])
                history.append(metrics)
                for sink in sinks:
                    sink.log(metrics, self.iteration)
                if folder is not None and ((position + 1) % checkpoint_every == 0 or is_last or improved):
                    score = metrics.get("eval/avg_reward" if eval_states is not None else "rewards/mean")
                    folder.save(take_trainer_state(self), iteration=self.iteration, score=score)
                bar.set_postfix(reward=f"{metrics['rewards/mean']:.3f}", refresh=False)
                bar.update()
        return history

    def save_checkpoint(self, path: str | Path) -> Path:
        """Write everything an exact resume needs to the folder `path`, all or nothing; each of several ranks to one in it."""
        return write_checkpoint(self._of_rank(path), take_trainer_state(self), iteration=self.iteration)

    def load_checkpoint(self, path: str | Path) -> None:
        """Restore what `save_checkpoint` or `train(checkpoint_dir=...)` wrote, down to the random generators.

        Args:
            path: one checkpoint, or a folder of them, of which the newest whole one is taken.

        Raises:
            CheckpointError: nothing has been changed; the file or the item at fault is named.
        """
        state = read_checkpoint(self._of_rank(path))
        iterations = self.engine.gather_objects(state["counters"]["iteration"]) if self.engine.num_ranks > 1 else []
        if len(set(iterations)) > 1:
            raise CheckpointError(
                f"Ranks would go on from different iterations, {iterations}: {path} holds other checkpoints for each. Name one "
                "that all ranks have written."
            )
        put_trainer_state(self, state)
        self._resume_at = self.run_position
        self._sync_sampler()

    # Parts

    def _of_rank(self, path: str | Path) -> Path:
        """Several ranks have a folder each: every one has random generators of its own to go on with."""
        return Path(path) if self.engine.num_ranks == 1 else Path(path) / f"rank-{self.engine.rank}"

    def _draw(self, source: StateSource) -> Rows:
        """The next states of a run; how many draws it has made is what a resumed one goes on from."""
        self.num_draws += 1
        states = source(self.num_draws - 1)
        if self.engine.num_ranks == 1:
            return states
        if len(states) < self.engine.num_ranks:
            raise ConfigError(
                f"Every one of {self.engine.num_ranks} ranks needs a state; got {len(states)}. Raise num_states_per_iteration."
            )
        own = torch.arange(len(states)).tensor_split(self.engine.num_ranks)[self.engine.rank]
        return select_rows(states, own)

    def _training_rows(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, Groups, Tensor, TrainingRows]:
        """The rewards of all ranks, their groups, the advantages they amount to, and the rows that this rank trains on."""
        everyone, own = gather_rewards(batch, self.engine)
        groups = Groups.of(everyone.group_ids)
        width = batch.mask.shape[1]
        returns = None
        if isinstance(self.advantages, AdvantageEstimator):
            estimate = self.advantages.estimate(everyone, groups)
            all_advantages = as_advantages(estimate.advantages, everyone.mask)
            advantages = all_advantages[own] if all_advantages.dim() == 1 else all_advantages[own, :width]
            returns = None if estimate.returns is None else estimate.returns[own, :width]
        else:  # the caller's sees this rank's rows alone
            advantages = as_advantages(self.advantages(batch), batch.mask)
            all_advantages, _ = self.engine.gather(advantages)
        is_fresh = self.collector.scores_itself and self.policy_update.num_updates(batch) == 1
        rows = TrainingRows(batch=batch, advantages=advantages, returns=returns, old_is_current=is_fresh)
        rows = self.recent.join(rows)
        if rows.num_replayed:  # where the reference has moved, what it says of them has been forgotten
            rows = replace(rows, batch=self._complete(rows.batch))
        return everyone, groups, all_advantages, rows

    def _report(
        self,
        everyone: ExperienceBatch,
        groups: Groups,
        advantages: Tensor,
        rows: TrainingRows,
        counts: UpdateCounts,
    ) -> dict[str, float]:
        """An iteration's metrics; the coefficients follow them."""
        num_replayed, everywhere = rows.num_replayed, None
        if self.engine.num_ranks > 1:
            everywhere = self.engine.gather_objects
            counts = replace(counts, rows_skipped=sum(everywhere(counts.rows_skipped)))
            num_replayed = sum(everywhere(num_replayed))
        measured = self.policy_update.meter.report(counts.planned - counts.dead, everywhere)
        metrics = report_iteration(
            everyone, advantages, counts, measured, groups, learning_rate=self.gradient.learning_rate
        )
        metrics |= self.coefficients.report("")
        self.coefficients.follow(measured)
        metrics |= self.coefficients.report("_next")
        metrics["rows/replayed"] = float(num_replayed)
        self.diagnosis.look(metrics, measured=measured, several_updates=counts.planned > 1)
        return metrics

    def _complete(self, batch: ExperienceBatch) -> ExperienceBatch:
        return self.collector.complete(batch, several_updates=self.policy_update.num_updates(batch) > 1)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.autocast_dtype is None:
            return nullcontext()
        dtype = torch.bfloat16 if self.config.autocast_dtype == "bfloat16" else torch.float16
        return torch.autocast(self.gradient.device.type, dtype)

    def _sync_sampler(self) -> None:
        if self._syncer is not None:
            self._syncer.sync_sampler()
        self._sampler_is_stale = False


def _at_least_one(name: str, value: int | None, default: int) -> int:
    """`value`, or where there is none the default, at least 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be >= 1; got {value}.")
    return max(default, 1) if value is None else value
