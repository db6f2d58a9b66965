"""The data that flows from the sampler to the loss: one frozen class per stage.

Axis letters mean the same in every file: B states, G actions per state, N rows in all, T steps (decisions) per row,
padded on the right. A row is one (state, action) pair. A group is the rows of one state.

Four kinds of log-probabilities never share a name:

- `behaviour_log_probs`: under the distribution that sampled the action (truncation and penalties included);
- `old_log_probs`: under the policy before this iteration's updates;
- `log_probs`: under the policy now, with gradient;
- `ref_log_probs`: under the reference policy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from .errors import ContractError, RewardError
from .writing import as_log_probs, as_mask, as_rewards, as_state_keys, describe, require_lengths

Rows: TypeAlias = Sequence[Any] | Tensor | NDArray[Any]
"""States or actions, one per row: a list, or a tensor or array with the rows on its first axis. Opaque to the core."""

RowIndex: TypeAlias = Tensor | slice
"""Which rows: an int64 tensor on the CPU, or a slice (which copies nothing)."""


def select_rows(rows: Rows, index: RowIndex) -> Rows:
    """The rows at `index`. Tensors and arrays keep their type; anything else becomes a list."""
    if isinstance(index, slice):
        chosen: Rows = rows[index]
        return chosen
    if isinstance(rows, Tensor):
        return rows[index.to(rows.device)]
    if isinstance(rows, np.ndarray):
        picked: Rows = rows[index.numpy()]
        return picked
    return [rows[i] for i in index.tolist()]


def repeat_rows(states: Rows, times: int) -> Rows:
    """Each state `times` times in a row: state 0's copies first. A list holds the same object, not copies of it."""
    if isinstance(states, Tensor):
        return states.repeat_interleave(times, dim=0)
    if isinstance(states, np.ndarray):
        return states.repeat(times, axis=0)
    return [state for state in states for _ in range(times)]


def zero_outside(values: Tensor, mask: Bool[Tensor, "N T"]) -> Tensor:
    """Values with 0 outside the mask, gradient kept. NaN x 0 is NaN, so masked positions are replaced, not multiplied."""
    return torch.where(mask, values, 0.0)


def row_totals(rewards: Float[Tensor, "N *T"], mask: Bool[Tensor, "N T"] | None) -> Float[Tensor, " N"]:
    """One reward per row: rewards per step are added up over the row's valid steps. No mask: all steps are valid."""
    if rewards.dim() == 1:
        return rewards
    return (rewards if mask is None else zero_outside(rewards, mask.to(rewards.device))).sum(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionScores:
    """What one forward pass of the policy says about N given actions."""

    log_probs: Float[Tensor, "N T"]
    """log pi(step | all steps before it), with gradient when the policy trains."""
    mask: Bool[Tensor, "N T"]
    """True where the policy decided; False for padding and for steps that were not the policy's."""
    entropy: Float[Tensor, "N T"] | None = None
    """Exact entropy of each step's distribution, with gradient. None: the policy does not compute it."""
    values: Float[Tensor, "N T"] | None = None
    """A critic's estimate of the return from each step on, with gradient. None: there is no critic."""
    final_values: Float[Tensor, " N"] | None = None
    """The critic's value where a row stopped: 0 where it terminated, V(next state) where it was truncated. None: all 0."""
    kl: Float[Tensor, "N T"] | None = None
    """Exact KL of each step's distribution to the policy's own reference, with gradient. None: not computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledActions:
    """G actions for each of B states, with what the sampler knows about them. Rows are group-major."""

    actions: Any
    """`actions[b][g]`: one sequence of G actions per state, or a tensor or array [B, G, ...]."""
    mask: Bool[Tensor, "N T"]
    """True where the policy decided."""
    behaviour_log_probs: Float[Tensor, "N T"] | None = None
    """Under the distribution that sampled the step. NaN: the step was not scored."""
    scores: ActionScores | None = None
    """What `score_actions` would return before any update. None: the sampler does not know."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Costs and counts of the sampling, by metric name; they are added up over rounds and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceBatch:
    """One iteration's rows. `ExperienceCollector.complete` returns a copy with the scores that training reads."""

    states: Rows
    """N states: a group's state stands once per row."""
    actions: Rows
    """N actions."""
    group_ids: Int[Tensor, " N"]
    """Rows with the same number were sampled for the same state. Any integers."""
    rewards: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """One reward per row, or one per step. On the CPU, in the reward model's precision."""
    reward_components: Mapping[str, Float[Tensor, "N *T"]] = field(default_factory=dict)
    """The named parts of the reward before weighting. Empty: the reward model has no parts."""
    mask: Bool[Tensor, "N T"]
    """True where the policy decided."""
    old_log_probs: Float[Tensor, "N T"] | None = None
    """None: not scored, or the policy has not changed since, so the current log-probs are the old ones."""
    behaviour_log_probs: Float[Tensor, "N T"] | None = None
    """None: the policy itself was the sampler."""
    ref_log_probs: Float[Tensor, "N T"] | None = None
    """None: not scored, or there is no reference, or its coefficient is 0."""
    entropy: Float[Tensor, "N T"] | None = None
    """Exact entropy at collection. None: not scored, or no selection of steps needs it."""
    values: Float[Tensor, "N T"] | None = None
    """A critic's values at collection. None: not scored, or there is no critic."""
    final_values: Float[Tensor, " N"] | None = None
    """0 where a row terminated, the critic's value of the next state where it was truncated. None: all 0."""
    state_keys: Int[Tensor, "N T"] | None = None
    """Equal numbers within a group mark steps taken in the same state, for `credit="gigpo"`."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each of `reward_components`; a missing name weighs 1."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What collecting cost and what it left out, by metric name."""

    @property
    def num_rows(self) -> int:
        """N."""
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
        """A batch from rollouts made elsewhere, ready for `trainer.update`.

        Args:
            states: N states, one per row.
            actions: N actions.
            rewards: [N], or [N, T] for rewards per step; anything `torch.as_tensor` takes.
            group_ids: [N] integers; rows with the same number were sampled for the same state.
            behaviour_log_probs: [N] or [N, T]; `objective.sampler_correction` corrects for the difference.
            mask: [N, T] bool, the policy's own steps; None: one step per row, or every step of `behaviour_log_probs`.
            state_keys: [N, T] integers, for `advantage.credit="gigpo"`; None: the policy is asked, if it can tell.

        Raises:
            ContractError: lengths or shapes that do not agree.
            RewardError: rewards that are not finite numbers.
        """
        owner = "ExperienceBatch.from_rows"
        group_ids = torch.as_tensor(group_ids, dtype=torch.int64).cpu()
        if group_ids.dim() != 1 or len(group_ids) == 0:
            raise ContractError(
                f"{owner}: group_ids must be [N], one number per row, at least one; got {describe(group_ids)}."
            )
        count = len(group_ids)
        require_lengths(owner, count, states=states, actions=actions)
        rewards = as_rewards(f"{owner}: rewards", rewards, count)
        per_step = {"rewards per step": rewards if rewards.dim() == 2 else None}
        if behaviour_log_probs is not None:
            behaviour_log_probs = as_log_probs(f"{owner}: behaviour_log_probs", behaviour_log_probs, count)
            per_step["behaviour_log_probs"] = behaviour_log_probs
        if state_keys is not None:
            per_step["state_keys"] = state_keys = as_state_keys(owner, state_keys)
        mask = as_mask(owner, mask, (count, 1) if behaviour_log_probs is None else behaviour_log_probs.shape)
        for name, values in per_step.items():
            if values is not None and values.shape != mask.shape:
                raise ContractError(f"{owner}: {name} must be like mask, {list(mask.shape)}; got {describe(values)}.")
        rewards = rewards if rewards.dim() == 1 else zero_outside(rewards, mask.cpu())
        if not rewards.isfinite().all():
            raise RewardError(f"{owner}: rewards must be finite; drop such rows before.")
        return cls(
            states=states,
            actions=actions,
            group_ids=group_ids,
            rewards=rewards,
            mask=mask,
            behaviour_log_probs=behaviour_log_probs,
            state_keys=state_keys,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInputs:
    """Everything a loss may read, for the rows of one micro-batch. Values outside the mask are never used."""

    log_probs: Float[Tensor, "N T"]
    """Under the policy now, with gradient."""
    old_log_probs: Float[Tensor, "N T"] | None
    """Before this iteration's updates. None: the current policy is the old one, and the ratio is exactly 1."""
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """How much better a row (or a step) did than its baseline; no gradient."""
    mask: Bool[Tensor, "N T"]
    """True where the policy decided."""
    weights: Float[Tensor, "N T"]
    """The aggregation: the loss is the sum of per-step losses times these weights (see `step_weights`)."""
    entropy: Float[Tensor, "N T"] | None = None
    """Exact entropy, with gradient. None: the policy gives none."""
    entropy_weights: Float[Tensor, "N T"] | None = None
    """The entropy term's own aggregation. None: `weights`."""
    ref_log_probs: Float[Tensor, "N T"] | None = None
    """Log-probs of the same steps under the reference policy. None: there is no reference."""
    behaviour_log_probs: Float[Tensor, "N T"] | None = None
    """Under the distribution that sampled the steps. NaN: not scored, ratio 1. None: the policy was the sampler."""
    kl: Float[Tensor, "N T"] | None = None
    """Exact KL to the policy's own reference, with gradient. None: the policy gives none."""
    keep: Bool[Tensor, "N T"] | None = None
    """Steps that the surrogate counts, chosen over the whole update; other terms count all. None: chosen from these rows."""
    selected: Bool[Tensor, "N T"] | None = None
    """Steps that the surrogate's own `select` chose over the whole update. None: chosen from these rows."""
    kl_coef: float | None = None
    """The current (adaptive) KL coefficient. None: the configured one."""
    entropy_coef: float | None = None
    """The current (adaptive) entropy coefficient. None: the configured one."""
    values: Float[Tensor, "N T"] | None = None
    """A critic's values now, with gradient. None: there is no critic."""
    old_values: Float[Tensor, "N T"] | None = None
    """A critic's values at collection. None: there is no critic."""
    returns: Float[Tensor, "N T"] | None = None
    """What the critic is trained towards. None: there is no value loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """A scalar to differentiate, and what to report about it."""

    loss: Float[Tensor, ""]
    """Sum over this micro-batch. The micro-batches of an update add up to the update's loss."""
    metrics: Mapping[str, Float[Tensor, "3"]]
    """Name -> detached (count, sum, sum of squares), which add up over micro-batches, updates and ranks.

    A count of 0 marks a share of the update's total (a loss term): shares add up, and are averaged over updates.
    """
