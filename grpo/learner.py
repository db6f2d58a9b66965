"""The learner: one iteration. It samples groups of actions, compares their rewards, and updates the policy."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import torch

from ._collecting.dynamic_sampling import collect_live_groups
from ._common.protocols import AnyPolicy
from ._rewarding.calls import RewardCalls
from ._updating.coefficients import Coefficients
from ._updating.loss import MeteredObjective
from ._updating.optimizer_step import OptimizerStep
from ._updating.parts import Counters, Parts
from ._updating.preparation import autocast, prepare
from ._updating.reference import MovingReference
from ._updating.repeated import repeated_with_fewer_rows
from ._updating.report import IterationReport
from ._updating.requirements import first_kl_coef, require_consistent, required_scores
from ._updating.sampler import SamplerSync
from ._updating.update import Update
from ._updating.update_context import UpdateContext
from ._updating.update_rows import UpdateRows
from ._updating.updates import Updates
from .advantage_estimator import AdvantageEstimator
from .config import GRPOConfig
from .engine import Engine, OneProcess, built_on_all_ranks, on_all_ranks
from .experience_collector import ExperienceCollector
from .grpo_objective import Objective
from .metrics import Meter, timed
from .reward_model_base import as_reward_model
from .types import ExperienceBatch, Rows


class Learner:
    """Improves any policy on any reward, iteration by iteration. `GRPOTrainer` adds runs: schedules, checkpoints, signals.

    Args:
        config: All settings of training.
        policy: A `PolicyModel`. Optional capabilities are looked up here, once.
        reward_model: A `RewardModel`, or a plain `(states, actions) -> rewards`.
        reference_policy: A frozen copy, `copy.deepcopy(policy)`. Switches on the KL term, which keeps the policy close to it.
        optimizer: The optimizer that is stepped, or a function that builds it from the list of trained tensors, such as
            `functools.partial(torch.optim.SGD, lr=0.1)`. None: AdamW without weight decay over `policy.get_parameters()`.
        lr_scheduler: Stepped once per applied update, or a function that builds it from the optimizer.
        objective: Replaces `grpo_objective`: any `ObjectiveInputs -> ObjectiveOutput`.
        advantages: Replaces `AdvantageEstimator`: any `ExperienceBatch -> [N] or [N, T]`. It gets the rows of its own rank.
        group_by: Maps a state to a key, such as its text. States of one iteration with equal keys share a group, so their
            rewards are compared; they must be the same for the policy, too. Each rank and each draw of dynamic sampling has
            its own groups. None: each position of `states` has a group of its own.
        engine: Joins ranks, such as `Replicated`. Each rank passes its own states; `batch_size` is per rank. None: one process.

    Raises:
        ProtocolError: The policy or the reward model lacks methods. The message names every missing method.
        ConfigError: Settings and arguments contradict one another, or a setting needs `GRPOTrainer.train`.
    """

    policy: Any  # of the caller's own class
    is_alone: ClassVar[bool] = True  # nobody honours the settings that need a run
    reward_calls: ClassVar[type[RewardCalls]] = RewardCalls  # nor asks again for rewards

    @built_on_all_ranks
    def __init__(
        self,
        *,
        config: GRPOConfig,
        policy: AnyPolicy,
        reward_model: Any,
        reference_policy: Any = None,
        optimizer: torch.optim.Optimizer | Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        lr_scheduler: Any = None,
        objective: Objective | None = None,
        advantages: Callable[[ExperienceBatch], torch.Tensor] | None = None,
        group_by: Callable[[Any], Hashable] | None = None,
        engine: Engine | None = None,
    ) -> None:
        given = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "objective": objective, "advantages": advantages}
        self.engine: Engine = OneProcess() if engine is None else engine
        require_consistent(config, policy, self.engine, is_alone=self.is_alone, **given, group_by=group_by)
        self.config, self.policy, self.reference_policy = config, policy, reference_policy
        self.reward_model, has_own_loss = as_reward_model(reward_model), objective is not None
        kl_coef = first_kl_coef(config, policy, reference_policy, has_own_loss=has_own_loss)
        data_seed = prepare(config, self.engine, policy, self.reward_model, reference_policy)
        self.meter = Meter()
        self.optimizer_step = OptimizerStep(config, policy, optimizer, lr_scheduler, self.engine, self.meter)
        self.sampler = SamplerSync(policy, lambda: self.optimizer_step.num_begun)  # stale once a step has begun
        self.collector = ExperienceCollector(
            policy=policy,
            reward_model=self.reward_model,
            group_size=config.group_size,
            reference_policy=reference_policy,
            use_reference=kl_coef > 0 and config.objective.kl_estimator != "exact",  # an exact KL comes with the scores
            micro_batch_size=config.micro_batch_size,
            reward=config.reward,
            autocast=lambda: autocast(config, self.optimizer_step.device),
            before_sampling=self.sampler.sync,
            reward_calls=self.reward_calls,
            engine=self.engine,
            group_by=group_by,
            needs=required_scores(config, has_own_loss=has_own_loss),
        )
        self.advantages = AdvantageEstimator(config.advantage) if advantages is None else advantages
        self.objective = MeteredObjective(config, objective, self.meter)
        self.coefficients, self.counters = Coefficients(config, kl_coef), Counters(data_seed=data_seed)
        context = UpdateContext(config, self.collector, self.coefficients, self.engine, has_own_loss, data_seed)
        self.updates = Updates(context, self.advantages)
        self.report = IterationReport(context, self.optimizer_step, self.meter)
        self.reference = MovingReference(config, policy, reference_policy, self.engine)
        self.parts = Parts(policy, reference_policy, self.reward_model, self.engine)
        self.parts.add(counters=self.counters, advantages=self.advantages, coefficients=self.coefficients)
        self.parts.add(collector=self.collector.costs, scorer=self.collector.scorer, updates=context)
        self.parts.add(replay=self.updates.replay, optimizer_step=self.optimizer_step)
        self.parts.add(is_lasting=True, moving_reference=self.reference, **self.optimizer_step.stepped)
        self.built()

    def built(self) -> None:
        """Called at the end of the constructor. `GRPOTrainer` adds what a run needs."""

    @timed
    @on_all_ranks
    def step(self, states: Rows, *, more_states: Callable[[], Rows] | None = None) -> dict[str, float]:
        """One iteration: sample a group of actions per state, and improve the policy on them.

        Args:
            states: B states.
            more_states: Returns further states for `config.dynamic_sampling_rounds`. `train` passes its own function.

        Returns:
            Metrics by name (`train/...`, `rewards/...`, `group_stats/...`, `rows/...`, `steps/...`, `time/...`). What an
            iteration did not measure is absent: without an advantage, no row is scored, and there is no ratio.

        Raises:
            ContractError: The policy broke its contract.
            RewardError: The reward model raised, or returned NaN.
            NonFiniteGradientError: `config.max_skipped_updates` updates in a row had to be skipped.
        """
        return self.update(self.collect(states, more_states=more_states))

    @on_all_ranks
    def collect(self, states: Rows, *, more_states: Callable[[], Rows] | None = None) -> ExperienceBatch:
        """The first half of `step`: sample actions, get their rewards and scores, without gradient."""
        batch = collect_live_groups(self.collector.collect, states, more_states, self.config, is_alone=self.is_alone)
        return self.updates.completed(batch)

    @on_all_ranks
    def update(self, *batches: ExperienceBatch) -> dict[str, float]:
        """The second half of `step`: all optimizer steps on the rows of batches, from `collect` or from your own code."""
        return self.improve(self.prepared(*batches))

    @on_all_ranks
    def prepared(self, *batches: ExperienceBatch) -> UpdateRows:
        """Compute advantages, and add rows of earlier iterations. With `split_steps`, each step becomes a row."""
        self.meter.begin()
        self.optimizer_step.begin()
        return self.updates.prepared(batches)

    @on_all_ranks
    def improve(self, rows: UpdateRows) -> dict[str, float]:
        """Make the updates of an iteration, and return its metrics."""
        self.policy.train()
        for update in rows.updates():  # epochs x updates; a group's rows stay adjacent
            self.add_gradients(update)
            self.optimizer_step.apply(update.sum_of_scores())  # sum over ranks, check finite, clip, step, schedule
        return self.finished(rows)

    @repeated_with_fewer_rows  # if memory runs out
    def add_gradients(self, update: Update) -> None:
        """Add up the gradients of an update, over the forward passes that memory allows."""
        for micro in update.micro_batches():  # planned by the policy if it can
            # no name is given to the loss, so that a failed attempt leaves no graph in memory
            self.optimizer_step.backward(self.objective(update.scored(micro)))

    def finished(self, rows: UpdateRows) -> dict[str, float]:
        """End an iteration: its metrics, over all ranks. The sampler and the reference follow the policy."""
        self.sampler.sync()
        metrics = self.report(rows)
        self.counters.iteration += 1
        if self.reference.move(self.iteration):
            self.updates.replay.forget_reference()  # replayed rows were scored by the reference before
        return metrics

    @property
    def iteration(self) -> int:
        """Number of finished iterations."""
        return self.counters.iteration

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer. None: the policy has no parameters to train."""
        return self.optimizer_step.optimizer

    def state_dict(self) -> dict[str, Any]:
        """The states of all parts, down to the random generators. Tensors are not copied."""
        return self.parts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, of a learner that was built in the same way."""
        self.parts.load_state_dict(state)
        self.sampler.forget()  # its weights are those before the load
        self.sampler.sync()
