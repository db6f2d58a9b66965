"""States -> a batch of experience: sample a group per state, ask for rewards, score, check everything.

Every rule a policy or a reward model can break is checked here, before anything is trained.
"""

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .coercion import as_log_probs, describe, pad_steps
from .errors import ConfigError, ContractError
from .policy_base import (
    POLICY_METHODS,
    KeysStates,
    PlansMicroBatches,
    SamplesWithScores,
    ScoresReference,
    require_methods,
)
from .reward_calls import RewardCalls, RewardConfig
from .scoring import Autocast, Scorer, check_scores, fit_steps, score_in_parts
from .types import ActionScores, ExperienceBatch, RowIndex, Rows, SampledActions, repeat_rows, select_rows
from .update_plan import num_selected, parts_in_order, planned_parts


class ExperienceCollector:
    """Samples groups of actions from a policy and has them rewarded.

    Args:
        policy: a `PolicyModel`; its optional capabilities are looked up here, once.
        reward_model: a `RewardModel` or a plain `(states, actions) -> rewards`.
        group_size: actions per state. Larger: better baselines, fewer states for the same work.
        reference_policy: a frozen `PolicyModel` to score as the reference.
        use_reference: score a reference at all; without `reference_policy` the policy's own `ScoresReference` is asked.
        micro_batch_size: rows per scoring forward; None: all at once.
        reward: what to do when a reward cannot be had.
        autocast: the context in which policy and reference compute.
        needs: fields of the batch that training needs whatever the number of updates: "old_log_probs", "entropy", "values",
            "state_keys".

    Raises:
        ProtocolError: methods are missing; all of them are named.
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
        needs: Collection[str] = (),
    ) -> None:
        require_methods(policy, POLICY_METHODS, "policy", "PolicyModel")
        self.policy = policy
        self.group_size = group_size
        self.micro_batch_size = micro_batch_size
        self.scorer = Scorer(policy, autocast)
        self._reward_calls = RewardCalls(reward_model, reward or RewardConfig())
        self._policy_name = type(policy).__name__
        self._sampler = policy if isinstance(policy, SamplesWithScores) else None
        self._planner = policy if isinstance(policy, PlansMicroBatches) else None
        self._needs = frozenset(needs)
        self._keyer = policy if "state_keys" in needs and isinstance(policy, KeysStates) else None
        self._autocast = autocast
        self._reference = _Reference(policy, reference_policy, autocast) if use_reference else None

    @property
    def scores_itself(self) -> bool:
        """Scores before any update come from the very policy that is trained, not from a sampler."""
        return self._sampler is None

    def collect(self, states: Rows) -> ExperienceBatch:
        """Sample `group_size` actions per state and have them rewarded; no gradient.

        Raises:
            ContractError: no states, a wrong number of actions, or scores of the wrong shape.
            RewardError: see `RewardConfig`.
        """
        clock = _Clock()
        row_states, row_actions, sampled = self.sample(states, self.group_size)
        clock.lap("time/sample")
        group_ids = torch.arange(len(states)).repeat_interleave(self.group_size)
        if sampled is None:
            scores, mask = self._find_steps(row_states, row_actions, group_ids)
            known = {} if scores is None else self._stored(scores)
        else:
            known = {} if sampled.scores is None else self._stored(sampled.scores)
            if sampled.behaviour_log_probs is not None:
                known["behaviour_log_probs"] = sampled.behaviour_log_probs
            mask = sampled.mask
        _require_finite(
            self._policy_name,
            mask,
            old_log_probs=known.get("old_log_probs"),
            behaviour_log_probs=known.get("behaviour_log_probs"),
        )
        clock.lap("time/score")
        with torch.no_grad():
            rewards = self._reward_calls(row_states, row_actions, mask)
        clock.lap("time/reward")
        if rewards.kept is not None:
            kept = rewards.kept.nonzero().squeeze(1)
            row_states, row_actions = select_rows(row_states, kept), select_rows(row_actions, kept)
            group_ids, mask = group_ids[kept], mask[kept]
            known = {name: value[kept] for name, value in known.items()}
        return ExperienceBatch(
            states=row_states,
            actions=row_actions,
            group_ids=group_ids,
            rewards=rewards.values,
            reward_components=rewards.components,
            reward_weights=rewards.weights,
            mask=mask,
            metrics={**({} if sampled is None else sampled.metrics), **rewards.metrics, **clock.laps},
            **known,
        )

    def complete(self, batch: ExperienceBatch, *, several_updates: bool) -> ExperienceBatch:
        """Add what training on `batch` needs and it lacks: scores before any update, reference log-probs, keys of states.

        Raises:
            ContractError: log-probs of sampled steps that are not finite, or steps that disagree with the batch's mask.
        """
        clock = _Clock()
        additions: dict[str, Any] = {}
        needs = self._needs | {"old_log_probs"} if several_updates else self._needs
        if not needs and self._sampler is None and batch.old_log_probs is not None:
            batch = replace(batch, old_log_probs=None)  # they only served to find the steps: old is current here
        if any(getattr(batch, name) is None for name in needs - {"state_keys"}):
            self.policy.eval()
            scores = self._score(batch.states, batch.actions, batch.group_ids)
            _require_same_steps(f"{self._policy_name}: the steps scored", scores.mask, batch.mask)
            additions |= {
                name: value if value.dim() == 1 else fit_steps(self._policy_name, value, batch.mask.shape[1])
                for name, value in self._stored(scores).items()
            }
        if self._reference is not None and batch.ref_log_probs is None:
            everything = slice(0, batch.num_rows)
            additions["ref_log_probs"] = self._reference(
                batch, self.plan_parts(batch.states, batch.actions, everything)
            )
        if self._keyer is not None and batch.state_keys is None:
            additions["state_keys"] = self._keys(self._keyer, batch)
        if additions:
            additions = {name: values.to(batch.mask.device) for name, values in additions.items()}
            clock.lap("time/score", batch.metrics.get("time/score", 0.0))
            log_probs = {name: additions[name] for name in ("old_log_probs", "ref_log_probs") if name in additions}
            _require_finite(self._policy_name, batch.mask, **log_probs)
            batch = replace(batch, **additions, metrics={**batch.metrics, **clock.laps})
        return batch

    def _stored(self, scores: ActionScores) -> dict[str, Tensor]:
        """Of the scores before any update, what training will read."""
        stored: dict[str, Tensor | None] = {"old_log_probs": scores.log_probs}
        if "entropy" in self._needs:
            stored["entropy"] = scores.entropy
        if "values" in self._needs:
            stored |= {"values": scores.values, "final_values": scores.final_values}
        # copies, since a critic may return a view of its parameters, which move
        return {name: value.detach().clone() for name, value in stored.items() if value is not None}

    def _keys(self, keyer: KeysStates, batch: ExperienceBatch) -> Tensor:
        keys: Any = keyer.state_keys(batch.states, batch.actions)
        num_rows, width = batch.mask.shape
        is_integer = isinstance(keys, Tensor) and not (keys.is_floating_point() or keys.is_complex())
        if not is_integer or keys.dim() != 2 or len(keys) != num_rows or bool(batch.mask[:, keys.shape[1] :].any()):
            raise ContractError(
                f"{self._policy_name}.state_keys must return integers {[num_rows, width]}, like the steps; "
                f"got {describe(keys)}."
            )
        return pad_steps(keys[:, :width], width, 0)  # where the longest row has left the batch, keys may be narrower

    def sample(self, states: Rows, num_actions_per_state: int) -> tuple[Rows, Rows, SampledActions | None]:
        """Row states and row actions, group-major, and what the sampler told with them."""
        num_states = len(states)
        if num_states == 0:
            raise ContractError("No states to act in: pass at least one.")
        self.policy.eval()
        with torch.no_grad(), self._autocast():
            if self._sampler is not None:
                owner = f"{self._policy_name}.sample_actions"
                sampled = self._sampler.sample_actions(states, num_actions_per_state)
                if not isinstance(sampled, SampledActions):
                    raise ContractError(f"{owner} must return SampledActions; got {describe(sampled)}.")
                _check_sampled(owner, sampled, num_states * num_actions_per_state)
                actions: Any = sampled.actions
            else:
                owner, sampled = f"{self._policy_name}.generate_actions", None
                actions = self.policy.generate_actions(states, num_actions_per_state)
        return (
            repeat_rows(states, num_actions_per_state),
            _flatten_actions(owner, actions, num_states, num_actions_per_state),
            sampled,
        )

    def rewards_of(self, states: Rows, num_actions_per_state: int) -> Tensor:
        """Rewards per row of freshly sampled actions, for evaluation."""
        row_states, row_actions, sampled = self.sample(states, num_actions_per_state)
        with torch.no_grad():
            rewards = self._reward_calls(row_states, row_actions, None if sampled is None else sampled.mask).values
        return rewards if rewards.dim() == 1 else rewards.sum(1)

    def plan_parts(self, states: Rows, actions: Rows, selected: RowIndex) -> list[RowIndex]:
        """Positions within `selected` that go into each forward: the policy's own plan, else `micro_batch_size` in order."""
        count = num_selected(selected)
        if self._planner is None or count == 0:
            return parts_in_order(count, self.micro_batch_size)
        plan = self._planner.plan_micro_batches(select_rows(states, selected), select_rows(actions, selected))
        return planned_parts(f"{self._policy_name}.plan_micro_batches", plan, count)

    def _score(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        parts = self.plan_parts(states, actions, slice(0, len(group_ids)))
        return score_in_parts(self.scorer, states, actions, group_ids, parts)

    def _find_steps(self, states: Rows, actions: Rows, group_ids: Tensor) -> tuple[ActionScores | None, Tensor]:
        """Which steps count, for a sampler that does not say: what one scoring pass gives, and the mask.

        A plain policy that has shown one log-prob per row needs no pass.
        """
        if self.scorer.one_step_device is not None:
            return None, torch.ones(len(group_ids), 1, dtype=torch.bool, device=self.scorer.one_step_device)
        scores = self._score(states, actions, group_ids)
        return scores, scores.mask


class _Clock:
    """Seconds spent, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, before: float = 0.0) -> None:
        now = time.perf_counter()
        self.laps[name] = before + now - self._last
        self._last = now


class _Reference:
    """Log-probs of a batch's rows under the reference: a policy of its own, or the policy's `ScoresReference`."""

    def __init__(self, policy: Any, reference_policy: Any, autocast: Autocast) -> None:
        self._policy = reference_policy
        self._autocast = autocast
        if reference_policy is not None:
            require_methods(reference_policy, POLICY_METHODS, "reference_policy", "PolicyModel")
            self._name = f"reference {type(reference_policy).__name__}"
            self._score: Callable[[Rows, Rows, Tensor], ActionScores] = Scorer(reference_policy, autocast)
        elif isinstance(policy, ScoresReference):
            self._name = f"{type(policy).__name__}.reference_log_probabilities"
            self._capability = policy
            self._score = self._ask_policy
        else:
            raise ConfigError(
                f"{type(policy).__name__} has no reference_log_probabilities(); pass reference_policy=..."
            )

    def __call__(self, batch: ExperienceBatch, parts: list[RowIndex]) -> Tensor:
        if self._policy is not None:
            self._policy.eval()
        scores = score_in_parts(self._score, batch.states, batch.actions, batch.group_ids, parts)
        log_probs = fit_steps(self._name, scores.log_probs, batch.mask.shape[1])
        scored = pad_steps(scores.mask, batch.mask.shape[1], False)
        if bool((batch.mask & ~scored.to(batch.mask.device)).any()):
            raise ContractError(
                f"{self._name} must score every step the policy decided, {list(batch.mask.shape)}; "
                f"got {describe(scores.mask)}. "
                "Return log-probs of the same steps, not their sum."
            )
        return log_probs

    def _ask_policy(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        with self._autocast():
            raw = self._capability.reference_log_probabilities(states, actions)
        log_probs = as_log_probs(self._name, raw, len(group_ids))
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))


def _check_sampled(owner: str, sampled: SampledActions, num_rows: int) -> None:
    shape, device = sampled.mask.shape, sampled.mask.device
    if sampled.mask.dtype != torch.bool or sampled.mask.dim() != 2 or shape[0] != num_rows:
        raise ContractError(f"{owner}: mask must be bool [N, T] with N = {num_rows}; got {describe(sampled.mask)}.")
    behaviour = sampled.behaviour_log_probs
    if behaviour is not None and (behaviour.shape != shape or behaviour.device != device):
        raise ContractError(
            f"{owner}: behaviour_log_probs must be {list(shape)} on {device}, as mask is; "
            f"got {describe(behaviour)} on {behaviour.device}."
        )
    if sampled.scores is not None:
        scores = check_scores(f"{owner}: scores", sampled.scores, num_rows)
        if scores.mask.device != device:
            raise ContractError(f"{owner}: scores must be on {device}, as mask is; got {scores.mask.device}.")
        if scores.mask is not sampled.mask and not torch.equal(scores.mask, sampled.mask):
            raise ContractError(f"{owner}: scores.mask must equal mask: both say which steps the policy decided.")


def _flatten_actions(owner: str, actions: Any, num_states: int, num_actions: int) -> Rows:
    """[B][G] as N rows, group-major.

    Raises:
        ContractError: not G actions for each of B states.
    """
    required = f"{owner} must return {num_actions} actions for each of {num_states} states"
    if isinstance(actions, Tensor | np.ndarray):
        if actions.shape[:2] != (num_states, num_actions):
            raise ContractError(f"{required}, [B, G, ...]; got {describe(actions)}.")
        return actions.reshape(num_states * num_actions, *actions.shape[2:])
    try:
        counts = [len(group) for group in actions]
    except TypeError as error:
        raise ContractError(f"{required}, as {num_states} lists; got {describe(actions)}.") from error
    if counts != [num_actions] * num_states:
        raise ContractError(f"{required}; got {len(counts)} groups of {sorted(set(counts))} actions.")
    return [action for group in actions for action in group]


def _require_same_steps(owner: str, found: Tensor, expected: Tensor) -> None:
    found, width = found.to(expected.device), found.shape[1]
    if width > expected.shape[1] or not torch.equal(found, expected[:, :width]) or bool(expected[:, width:].any()):
        raise ContractError(
            f"{owner} are not the batch's own: the masks differ (scored {describe(found)}, batch {describe(expected)}). "
            "Give ExperienceBatch.from_rows the mask of the policy's decisions, and score the same steps every time."
        )


def _require_finite(owner: str, mask: Tensor, **log_probs: Tensor | None) -> None:
    """Every log-prob of a sampled step is a number (behaviour log-probs may be NaN: unscored); one transfer for all."""
    bad = {}
    for field, values in log_probs.items():
        if values is not None:
            wrong = values.isinf() if field == "behaviour_log_probs" else ~values.isfinite()
            bad[field] = (wrong & mask.to(values.device)).any(1)
    if bad and bool(torch.stack(list(bad.values())).any()):
        field, rows = next((name, rows.nonzero().squeeze(1).tolist()) for name, rows in bad.items() if rows.any())
        raise ContractError(
            f"{owner}: {field} of sampled steps must be finite; rows {rows[:16]} are not. A sampled action cannot have "
            "probability 0: mask logits with torch.finfo(dtype).min, not -inf, and score the action that was sampled."
        )
