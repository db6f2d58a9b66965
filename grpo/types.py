"""The data that flows from the sampler to the loss: one frozen class per stage.

Axis letters mean the same in every file: B states, G actions per state, N rows in all, T steps (decisions) per row,
padded on the right. A row is one (state, action) pair. A group is the rows of one state.

Four kinds of log-probabilities never share a name:

- `behaviour_log_probs`: under the distribution that sampled the action (truncation and penalties included);
- `old_log_probs`: under the policy before this iteration's updates;
- `log_probs`: under the policy now, with gradient;
- `ref_log_probs`: under the reference policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._common.conversion import (
    as_log_probs,
    as_mask,
    as_rewards,
    as_state_keys,
    require_lengths,
    require_like_mask,
    require_rows,
)
from ._common.rows import RowIndex, Rows, repeat_rows, select_rows
from ._common.tensors import TensorFields, as_group_ids, require_finite_values
from .errors import ContractError, RewardError

__all__ = ["CONTINUES", "ActionScores", "ExperienceBatch", "ObjectiveInputs", "ObjectiveOutput", "SampledActions"]
__all__ += ["RowIndex", "Rows", "repeat_rows", "row_totals", "select_rows", "zero_outside"]

CONTINUES = -(2**63)
"""State key of a step that continues the decision of the step before it: a turn of many tokens is one decision."""


def zero_outside(values: Tensor, mask: Bool[Tensor, "N T"]) -> Tensor:
    """Set values outside the mask to 0, and keep the gradient. Values are replaced, not multiplied, because NaN x 0 is NaN."""
    return torch.where(mask, values, 0.0)


def row_totals(rewards: Float[Tensor, "N *T"], mask: Bool[Tensor, "N T"] | None) -> Float[Tensor, " N"]:
    """One reward per row: rewards per step are added up over the row's valid steps. No mask: all steps are valid."""
    if rewards.dim() == 1:
        return rewards
    return (rewards if mask is None else zero_outside(rewards, mask.to(rewards.device))).sum(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionScores(TensorFields):
    """Scores of N given actions, from one forward pass of the policy."""

    log_probs: Float[Tensor, "N T"]
    """log pi(step | all steps before it), with gradient if the policy is being trained."""
    mask: Bool[Tensor, "N T"]
    """True at steps that the policy decided; False at padding and at steps that the policy did not decide."""
    entropy: Float[Tensor, "N T"] | None = None
    """Exact entropy of each step's distribution, with gradient. None: the policy does not compute it."""
    values: Float[Tensor, "N T"] | None = None
    """The critic's estimate of the return from each step on, with gradient. None: there is no critic."""
    final_values: Float[Tensor, " N"] | None = None
    """The critic's value after a row's last step: 0 if the row terminated, V(next state) if it was truncated. None: all 0."""
    kl: Float[Tensor, "N T"] | None = None
    """Exact KL of each step's distribution to the policy's own reference, with gradient. None: not computed."""
    auxiliary_loss: Float[Tensor, "N T"] | None = None
    """A loss of the policy's own, such as a regulariser, with gradient and coefficient. It is weighted as the step is."""
    observed_log_probs: Float[Tensor, "N O"] | None = None
    """Log-probs of what the environment answered, such as O tokens of tools, with gradient. None: not computed."""
    observed_mask: Bool[Tensor, "N O"] | None = None
    """True at observations, False at padding. They are no steps, and have no place in [N, T]. None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledActions(TensorFields):
    """G actions for each of B states, with what the sampler knows about them. The rows of a state are adjacent."""

    actions: Any
    """`actions[b][g]`: one sequence of G actions per state, or a tensor or array [B, G, ...]."""
    mask: Bool[Tensor, "N T"]
    """True at steps that the policy decided."""
    behaviour_log_probs: Float[Tensor, "N T"] | None = None
    """Log-probs under the distribution that sampled each step. NaN: the step was not scored."""
    scores: ActionScores | None = None
    """The scores that `score_actions` would return before any update. None: the sampler does not know them."""
    observed_mask: Bool[Tensor, "N O"] | None = None
    """The `observed_mask` that scoring will return. None: there are no observations, or the sampler does not know."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Costs and counts of the sampling, by metric name; they are added up over rounds and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceBatch(TensorFields):
    """The rows of one iteration. `ExperienceCollector.complete` returns a copy with the scores that training reads."""

    states: Rows
    """N states, one per row: the state of a group is repeated for each of its rows."""
    actions: Rows
    """N actions."""
    group_ids: Int[Tensor, " N"]
    """The group of each row, as an integer. Rows with the same number were sampled for the same state."""
    rewards: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """One reward per row, or one per step, on the CPU and in the reward model's precision."""
    reward_components: Mapping[str, Float[Tensor, "N *T"]] = field(default_factory=dict)
    """The named parts of the reward before weighting. Empty: the reward model has no parts."""
    mask: Bool[Tensor, "N T"]
    """True at steps that the policy decided."""
    old_log_probs: Float[Tensor, "N T"] | None = None
    """Log-probs before this iteration's updates. None: not scored, or the policy has not changed since."""
    behaviour_log_probs: Float[Tensor, "N T"] | None = None
    """Log-probs under the distribution that sampled each step. None: the policy itself sampled."""
    ref_log_probs: Float[Tensor, "N T"] | None = None
    """Log-probs under the reference policy. None: not scored, or there is no reference, or the KL coefficient is 0."""
    entropy: Float[Tensor, "N T"] | None = None
    """Exact entropy at collection. None: not scored, or no selection of steps needs it."""
    values: Float[Tensor, "N T"] | None = None
    """The critic's values at collection. None: not scored, or there is no critic."""
    final_values: Float[Tensor, " N"] | None = None
    """The critic's value after a row's last step: 0 if the row terminated, V(next state) if it was truncated. None: all 0."""
    state_keys: Int[Tensor, "N T"] | None = None
    """The state in which each step was taken, as an integer that is equal for equal states of a group. `CONTINUES`: the step
    continues the decision of the step before it. For `credit="gigpo"`."""
    observed_mask: Bool[Tensor, "N O"] | None = None
    """True at observations, which the policy scores beside its steps. None: not known, or no setting needs it."""
    is_demonstration: Bool[Tensor, " N"] | None = None
    """True at rows to imitate, on the CPU. Nobody sampled them, and nothing reads their rewards. None: there are none."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each of `reward_components`. The weight of a missing name is 1."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Costs and counts of the collection (rows dropped, calls repeated), by metric name."""

    @property
    def num_rows(self) -> int:
        """N, the number of rows."""
        return self.mask.shape[0]

    @property
    def total_rewards(self) -> Float[Tensor, " N"]:
        """One reward per row: rewards per step are added up over the row's valid steps."""
        return row_totals(self.rewards, self.mask)

    @classmethod
    def from_rows(
        cls,
        states: Rows,
        actions: Rows,
        rewards: Any,
        group_ids: Any,
        behaviour_log_probs: Tensor | None = None,
        mask: Any = None,
        state_keys: Any = None,
    ) -> "ExperienceBatch":
        """Make a batch from rollouts of your own, ready for `trainer.update`.

        Args:
            states: N states, one per row.
            actions: N actions.
            rewards: [N], or [N, T] for rewards per step; anything `torch.as_tensor` takes.
            group_ids: [N] integers, texts, or other hashable values; rows with equal ids were sampled for the same state.
            behaviour_log_probs: [N] or [N, T], the log-probs that the actions were sampled with, for
                `objective.sampler_correction`. None: the policy itself sampled.
            mask: [N, T] bool, the policy's own steps. None: one step per row, or every step of `behaviour_log_probs`.
            state_keys: [N, T] integers, for `advantage.credit="gigpo"`. None: the policy's `state_keys` is called, if any.

        Raises:
            ContractError: Lengths or shapes do not agree.
            RewardError: A reward is not a finite number.
        """
        owner = "ExperienceBatch.from_rows"
        group_ids = as_group_ids(owner, group_ids)
        count = len(group_ids)
        require_rows(f"{owner}: states", states)
        require_rows(f"{owner}: actions", actions)
        require_lengths(owner, count, states=states, actions=actions)
        rewards = as_rewards(f"{owner}: rewards", rewards, count)
        per_step = {"rewards per step": rewards} if rewards.dim() == 2 else {}
        if behaviour_log_probs is not None:
            behaviour_log_probs = as_log_probs(f"{owner}: behaviour_log_probs", behaviour_log_probs, count)
            per_step["behaviour_log_probs"] = behaviour_log_probs
        if state_keys is not None:
            per_step["state_keys"] = state_keys = as_state_keys(owner, state_keys)
        mask = as_mask(owner, mask, (count, 1) if behaviour_log_probs is None else behaviour_log_probs.shape)
        require_like_mask(owner, mask, **per_step)
        rewards = rewards if rewards.dim() == 1 else zero_outside(rewards, mask.cpu())  # padding may be NaN
        require_finite_values(f"{owner}: rewards", rewards, error=RewardError)
        return cls(
            states=states,
            actions=actions,
            group_ids=group_ids,
            rewards=rewards,
            mask=mask,
            behaviour_log_probs=behaviour_log_probs,
            state_keys=state_keys,
        )

    @classmethod
    def from_demonstrations(cls, states: Rows, actions: Rows, mask: Any = None) -> "ExperienceBatch":
        """Make a batch of actions to imitate, for `train(demonstrations=...)` and `update`.

        Args:
            states: N states, one per row.
            actions: N actions, as the policy returns them.
            mask: [N, T] bool, the policy's own steps. None: an update asks the policy, which scores the rows once more if it
                has several steps per row.

        Raises:
            ContractError: Lengths or shapes do not agree, or there are no rows.
        """
        owner = "ExperienceBatch.from_demonstrations"
        require_rows(f"{owner}: states", states)
        require_rows(f"{owner}: actions", actions)
        require_lengths(owner, count := len(states), actions=actions)
        if count == 0:
            raise ContractError(f"{owner}: there must be a row to imitate; got none.")
        return cls(
            states=states,
            actions=actions,
            group_ids=torch.arange(count),
            rewards=torch.zeros(count),
            mask=as_mask(owner, mask, (count, 0)),  # no column: the steps are not known
            is_demonstration=torch.ones(count, dtype=torch.bool),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInputs(TensorFields):
    """Everything a loss may read about the rows of one micro-batch. Values outside the mask are never used."""

    log_probs: Float[Tensor, "N T"]
    """Log-probs under the current policy, with gradient."""
    old_log_probs: Float[Tensor, "N T"] | None
    """Log-probs before this iteration's updates. None: the current policy is the old one, and the ratio is exactly 1."""
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """How much better a row (or a step) did than its baseline. Without gradient."""
    mask: Bool[Tensor, "N T"]
    """True at steps that the policy decided."""
    weights: Float[Tensor, "N T"]
    """The weight of each step. The policy's loss is the sum of per-step losses times these weights (see `step_weights`)."""
    entropy: Float[Tensor, "N T"] | None = None
    """Exact entropy of each step, with gradient. None: the policy does not compute it."""
    entropy_weights: Float[Tensor, "N T"] | None = None
    """The weight of each step in the entropy term. None: the entropy term uses the field `weights`."""
    ref_log_probs: Float[Tensor, "N T"] | None = None
    """Log-probs of the same steps under the reference policy. None: there is no reference."""
    behaviour_log_probs: Float[Tensor, "N T"] | None = None
    """Log-probs under the distribution that sampled. NaN: not scored, so the ratio is 1. None: the policy itself sampled."""
    kl: Float[Tensor, "N T"] | None = None
    """Exact KL to the policy's own reference, with gradient. None: the policy does not compute it."""
    auxiliary_loss: Float[Tensor, "N T"] | None = None
    """The policy's own loss per step, with gradient. None: there is none."""
    keep: Bool[Tensor, "N T"] | None = None
    """Steps that the surrogate counts, chosen over the update; other terms count all. None: chosen among these rows."""
    selected: Bool[Tensor, "N T"] | None = None
    """Steps that the surrogate's own `select` chose over the whole update. None: `grpo_objective` chooses among these rows."""
    kl_coef: float | None = None
    """The current (adaptive) KL coefficient. None: the configured coefficient."""
    entropy_coef: float | None = None
    """The current (adaptive) entropy coefficient. None: the configured coefficient."""
    values: Float[Tensor, "N T"] | None = None
    """The critic's current values, with gradient. None: there is no critic."""
    old_values: Float[Tensor, "N T"] | None = None
    """The critic's values at collection. None: there is no critic."""
    returns: Float[Tensor, "N T"] | None = None
    """The returns that the critic is trained on. None: there is no value loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput(TensorFields):
    """The result of a loss: a scalar to differentiate, and metrics."""

    loss: Float[Tensor, ""]
    """The loss of this micro-batch. The losses of an update's micro-batches add up to the update's loss."""
    metrics: Mapping[str, Float[Tensor, "3"]]
    """Maps a name to (count, sum, sum of squares), detached. The trainer adds these up and reports mean and standard deviation.

    A count of 0 marks a loss term. A loss term is summed over the micro-batches of an update, and averaged over updates.
    """
