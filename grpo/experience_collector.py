"""Collect experience: sample a group of actions per state, check the actions, get their rewards, and score them."""

import time
from collections.abc import Callable, Collection, Hashable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ._collecting.contract import fit_state_keys, require_finite, require_same_steps
from ._collecting.costs import CallCosts
from ._collecting.out_of_memory import PassSizes
from ._collecting.sampled_rows import SampledRows, groups_of
from ._collecting.sampling import SampleCalls
from ._collecting.scoring import Autocast, ReferenceScorer, Scorer, batch_fields, score_in_parts
from ._collecting.update_plan import cut_parts, num_selected, parts_in_order, planned_parts
from ._common.conversion import pad_steps
from ._common.protocols import require_methods
from ._rewarding.calls import KeptRewards, RewardCalls
from .config import RewardConfig
from .engine import Engine, OneProcess
from .policy_base import POLICY_METHODS, KeysStates, PlansMicroBatches
from .types import ActionScores, ExperienceBatch, RowIndex, Rows, SampledActions, select_rows


class ExperienceCollector:
    """Collects the rows of an iteration: `collect` samples actions and gets rewards, `complete` adds missing scores.

    Args:
        policy: A `PolicyModel`. Its optional capabilities are looked up here, once.
        reward_model: A `RewardModel`, or a plain `(states, actions) -> rewards`.
        group_size: Actions per state (G). Larger: better baselines, fewer states for the same work.
        reference_policy: A frozen `PolicyModel` to score as the reference. None: ask the policy's own `ScoresReference`.
        use_reference: Whether to score a reference.
        micro_batch_size: Rows per forward pass when scoring. None: all rows at once.
        reward: What to do when the reward model raises, or returns NaN or infinity.
        autocast: Returns a context manager in which policy and reference compute.
        before_sampling: Called before actions are sampled. It brings a separate sampler up to date.
        reward_calls: Asks for rewards. A run passes a class that retries.
        engine: Joins the ranks. None: one process.
        group_by: Maps a state to a key; equal keys share a group. None: each position of `states` has a group of its own.
        needs: The optional batch fields that training reads: any of "old_log_probs", "entropy", "values", "state_keys" and
            "observed_mask".

    Raises:
        ProtocolError: A policy or the reward model lacks methods. The error names all of them.
        ConfigError: `use_reference` is set, but there is no reference.
    """

    def __init__(
        self,
        *,
        policy: Any,
        reward_model: Any,
        group_size: int,
        reference_policy: Any = None,
        use_reference: bool = False,
        micro_batch_size: int | None = None,
        reward: RewardConfig | None = None,
        autocast: Autocast = nullcontext,
        before_sampling: Callable[[], None] = lambda: None,
        reward_calls: type[RewardCalls] = RewardCalls,
        engine: Engine | None = None,
        group_by: Callable[[Any], Hashable] | None = None,
        needs: Collection[str] = (),
    ) -> None:
        require_methods(policy, POLICY_METHODS, "policy", "PolicyModel")
        self.policy, self.group_size, self.micro_batch_size = policy, group_size, micro_batch_size
        self.scorer = Scorer(policy, autocast)
        engine = engine or OneProcess()
        self.sample = SampleCalls(policy, autocast, engine, before_sampling)
        """Samples actions: `sample(states, num_actions_per_state)`."""
        self.scoring, self.updating = PassSizes("scoring", engine), PassSizes("an update", engine)
        """Rows per forward pass, halved when memory runs out: in passes without gradient, and in updates."""
        self._name, self._needs = type(policy).__name__, frozenset(needs)
        self._planner = policy if isinstance(policy, PlansMicroBatches) else None
        self._keyer = policy if "state_keys" in needs and isinstance(policy, KeysStates) else None
        self.scores_itself = self.sample.sampler is None
        """True: the scores before any update come from scoring the policy. False: they come from its `sample_actions`."""
        self._reference = ReferenceScorer(policy, reference_policy, autocast) if use_reference else None
        self._group_by = group_by
        self.reward_model = reward_model
        self.ask_for_rewards = reward_calls(reward_model, reward or RewardConfig(), waiting=engine.waiting)
        self._turns = Lock()
        self.costs = CallCosts(self.ask_for_rewards, self.sample, self.scoring, self.updating)
        """What the calls of policy and reward model have cost since the last report."""

    def collect(self, states: Rows) -> ExperienceBatch:
        """Sample `group_size` actions per state and ask for their rewards; no gradient.

        Raises:
            ContractError: There are no states, or the policy returned a wrong number of actions or wrong scores.
            RewardError: The reward model raised or returned NaN, and `RewardConfig` does not allow it.
        """
        rows = self.sample_rows(states)
        start = time.perf_counter()
        rewards = self.rewards_of(rows.states, rows.actions, rows.mask, rows.group_ids)
        return rows.with_rewards(rewards, {"time/reward": time.perf_counter() - start})

    def sample_rows(self, states: Rows, *, ahead: bool = False) -> SampledRows:
        """The first half of `collect`: sample `group_size` actions per state.

        Args:
            states: B states.
            ahead: Whether the policy changes before the rows are used. The rows then have the log-probs under the policy that
                sampled them, and no other scores, because `complete` scores them when they are used.
        """
        start = time.perf_counter()
        row_states, row_actions, sampled = self.sample(states, self.group_size)
        group_ids = self.groups_of(states).repeat_interleave(self.group_size)

        sampled_at = time.perf_counter()
        if sampled is None:
            sampled = self._find_steps(row_states, row_actions, group_ids)
        known = {} if ahead else batch_fields(sampled.scores, self._needs)  # scored again when they are used
        if sampled.behaviour_log_probs is not None:
            known["behaviour_log_probs"] = sampled.behaviour_log_probs
        elif ahead:
            scores = sampled.scores or self._score(row_states, row_actions, group_ids)
            require_same_steps(self._name, scores.mask, sampled.mask)
            behaviour = pad_steps(scores.log_probs.detach().clone(), sampled.mask.shape[1], 0.0)
            known["behaviour_log_probs"] = behaviour.to(sampled.mask.device)
        if sampled.observed_mask is not None:
            known["observed_mask"] = sampled.observed_mask
        require_finite(self._name, sampled.mask, known)
        times = {"time/sample": sampled_at - start, "time/score": time.perf_counter() - sampled_at}
        return SampledRows(
            states=row_states,
            actions=row_actions,
            group_ids=group_ids,
            mask=sampled.mask,
            known=known,
            metrics={**sampled.metrics, **times},
        )

    def rewards_of(
        self, states: Rows, actions: Rows, mask: Tensor | None, group_ids: Tensor, ask: RewardCalls | None = None
    ) -> KeptRewards:
        """Ask for the rewards of N rows; mask None: the steps are not known. Two threads never ask at the same time."""
        with self._turns:
            return (ask or self.ask_for_rewards)(states, actions, mask, group_ids=group_ids, keep_counts=True)

    def groups_of(self, states: Rows) -> Int[Tensor, " B"]:
        """The group of each state: its position, or the position of the first state with the same key of `group_by`."""
        return groups_of(states, self._group_by)

    def complete(self, batch: ExperienceBatch, *, several_updates: bool) -> ExperienceBatch:
        """Add the fields that training reads and `batch` lacks: scores before any update, reference log-probs, state keys.

        Raises:
            ContractError: Log-probs or exact entropies of sampled steps are not finite, or the policy scores other steps than
                the batch has.
        """
        start = time.perf_counter()
        needs = self._needs | {"old_log_probs"} if several_updates else self._needs
        if not needs and self.scores_itself and batch.old_log_probs is not None:
            # scored only to find the steps; with one update, the current policy is the old policy
            batch = replace(batch, old_log_probs=None)
        found: dict[str, Any] = {}
        if any(getattr(batch, name) is None for name in needs - {"state_keys"}):
            found |= self._score_batch(batch)
        if self._reference is not None and batch.ref_log_probs is None:
            plan = partial(self.plan_parts, batch.states, batch.actions, None)
            found["ref_log_probs"] = self._reference(batch, plan, self.scoring)
        if self._keyer is not None and batch.state_keys is None:
            keys = self._keyer.state_keys(batch.states, batch.actions)
            found["state_keys"] = fit_state_keys(f"{self._name}.state_keys", keys, batch.mask)
        if not found:
            return batch
        found = {name: values.to(batch.mask.device) for name, values in found.items()}
        require_finite(self._name, batch.mask, found)
        seconds = batch.metrics.get("time/score", 0.0) + time.perf_counter() - start
        return replace(batch, **found, metrics={**batch.metrics, "time/score": seconds})

    def with_steps(self, given: ExperienceBatch) -> ExperienceBatch:
        """Demonstrations with the steps that the policy decides, and the observations among them, if they are not known."""
        if given.mask.shape[1] and ("observed_mask" not in self._needs or given.observed_mask is not None):
            return given
        self.policy.eval()
        found = self._find_steps(given.states, given.actions, given.group_ids)
        return replace(given, mask=found.mask, observed_mask=found.observed_mask)

    def plan_parts(
        self, states: Rows, actions: Rows, selected: RowIndex | None = None, num_halvings: int = 0
    ) -> list[RowIndex]:
        """Return the rows of each forward pass, as positions within `selected`, from the policy's plan or else in order.

        Args:
            states: The states of all rows.
            actions: The actions of all rows.
            selected: The rows to plan for. None: all rows.
            num_halvings: How often to halve `micro_batch_size`, or each part of the policy's plan.
        """
        selected = slice(0, len(states)) if selected is None else selected
        count = num_selected(selected)
        if self._planner is None or count == 0:
            return parts_in_order(count, self.micro_batch_size, num_halvings)
        plan = self._planner.plan_micro_batches(select_rows(states, selected), select_rows(actions, selected))
        return cut_parts(planned_parts(f"{self._name}.plan_micro_batches", plan, count), num_halvings)

    def _find_steps(self, states: Rows, actions: Rows, group_ids: Tensor) -> SampledActions:
        """Find the steps of each row by scoring the actions. A policy that returns log-probs [N] is scored only once."""
        device = self.scorer.one_step_device
        if device is not None:
            return SampledActions(actions=actions, mask=torch.ones(len(group_ids), 1, dtype=torch.bool, device=device))
        scores = self._score(states, actions, group_ids)
        return SampledActions(actions=actions, mask=scores.mask, scores=scores, observed_mask=scores.observed_mask)

    def _score_batch(self, batch: ExperienceBatch) -> dict[str, Tensor]:
        """Score the batch before any update. Scores are padded to the width of the batch's mask."""
        self.policy.eval()  # dropout here would make the first ratio differ from 1
        scores = self._score(batch.states, batch.actions, batch.group_ids)
        require_same_steps(self._name, scores.mask, batch.mask)
        return {
            name: pad_steps(values, batch.mask.shape[1], 0.0) if values.shape == scores.mask.shape else values
            for name, values in batch_fields(scores, self._needs).items()
        }

    def _score(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        plan = partial(self.plan_parts, states, actions, None)
        return score_in_parts(self.scorer, states, actions, group_ids, plan, self.scoring)
