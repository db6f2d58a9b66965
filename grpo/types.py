"""The data that flows from the sampler to the loss, and the one place that selects rows.

Axis letters, the same everywhere: B states, G actions per state, N rows in all, T steps (decisions) per row,
padded on the right. A row is one (state, action) pair; a group is the rows of one state.

Four kinds of log-probabilities never share a name:

- `behaviour_log_probs`: under the distribution the action was really drawn from (truncation, penalties included);
- `old_log_probs`: under the policy as it was before this iteration's updates;
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

from .coercion import as_log_probs, as_rewards, describe, require_lengths
from .errors import ContractError, RewardError

Rows: TypeAlias = Sequence[Any] | Tensor | NDArray[Any]
"""States or actions, one per row: a list, or a tensor or array whose first axis is the rows. Opaque to the core."""

RowIndex: TypeAlias = Tensor | slice
"""Which rows: an int64 tensor on the CPU, or a slice (which copies nothing)."""


def select_rows(rows: Rows, index: RowIndex) -> Rows:
    """The rows at `index`, as the same kind of container: tensors and arrays stay what they are, the rest is a list."""
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
    """Each state `times` times in a row: state 0's copies first. Lists hold the same object, not copies of it."""
    if isinstance(states, Tensor):
        return states.repeat_interleave(times, dim=0)
    if isinstance(states, np.ndarray):
        return states.repeat(times, axis=0)
    return [state for state in states for _ in range(times)]


def run_bounds(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Where runs of equal neighbours begin, and the end: [4, 4, 7, 4] -> [0, 2, 3, 4]."""
    changes = np.flatnonzero(ids[1:] != ids[:-1])
    bounds = np.empty(len(changes) + 2, dtype=np.int64)
    bounds[0], bounds[-1] = 0, len(ids)
    np.add(changes, 1, out=bounds[1:-1])
    return bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionScores:
    """What one forward pass of the policy says about N given actions."""

    log_probs: Float[Tensor, "N T"]
    """log pi(step | everything before it), with gradient when the policy trains."""
    mask: Bool[Tensor, "N T"]
    """True where the policy decided; False for padding and for steps that were not the policy's."""
    entropy: Float[Tensor, "N T"] | None = None
    """Exact entropy of the distribution each step was drawn from, with gradient; None: the policy cannot tell."""
    values: Float[Tensor, "N T"] | None = None
    """A critic's estimate of what is still to come at each step, with gradient; None: there is no critic."""
    final_values: Float[Tensor, " N"] | None = None
    """The critic's value of where a row stopped: 0 where it terminated, V(next state) where it was cut off. None: all 0."""
    kl: Float[Tensor, "N T"] | None = None
    """Exact divergence of each step's distribution from the policy's own reference, with gradient; None: cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledActions:
    """G actions for each of B states, with what the sampler knows about them. Rows are group-major."""

    actions: Any
    """`actions[b][g]`: one sequence of G actions per state, or a tensor or array [B, G, ...]."""
    mask: Bool[Tensor, "N T"]
    """True where the policy decided."""
    behaviour_log_probs: Float[Tensor, "N T"] | None = None
    """Under the distribution actually drawn from; NaN where a step was not scored."""
    scores: ActionScores | None = None
    """What `score_actions` would return before any update; None: the sampler does not know."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Costs and counts of the sampling, by metric name; they are added up over rounds and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceBatch:
    """One iteration's rows, complete: nothing in it is filled in later, and None means that there is none."""

    states: Rows
    """N states: a group's state stands once per row."""
    actions: Rows
    """N actions."""
    group_ids: Int[Tensor, " N"]
    """Which rows were sampled for the same state; any integers."""
    rewards: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """One reward per row, or one per step. On the CPU, in the precision the reward model gave."""
    reward_components: Mapping[str, Float[Tensor, "N *T"]] = field(default_factory=dict)
    """The named parts of the reward before they are weighted, where the reward model tells them."""
    mask: Bool[Tensor, "N T"]
    """True where the policy decided."""
    old_log_probs: Float[Tensor, "N T"] | None = None
    """None: the policy has not changed since, so the current log-probs are the old ones."""
    behaviour_log_probs: Float[Tensor, "N T"] | None = None
    """None: the sampler did not tell, and is taken to be the policy itself."""
    ref_log_probs: Float[Tensor, "N T"] | None = None
    """None: there is no reference, or its coefficient is zero."""
    entropy: Float[Tensor, "N T"] | None = None
    """At collection, where a selection of steps needs it."""
    values: Float[Tensor, "N T"] | None = None
    """A critic's, at collection."""
    final_values: Float[Tensor, " N"] | None = None
    """0 where a row terminated, the critic's value of what followed where it was cut off; None: all 0."""
    state_keys: Int[Tensor, "N T"] | None = None
    """Equal numbers within a group mark steps taken in the same state, for `credit="gigpo"`."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """What each of `reward_components` is weighed with; empty: 1."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What collecting cost and what it left out, by metric name."""

    @property
    def num_rows(self) -> int:
        """N."""
        return self.mask.shape[0]

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
            behaviour_log_probs: [N] or [N, T], under whatever sampled the actions. Set
                `objective.sampler_correction` to correct for the difference.
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
        if behaviour_log_probs is not None:
            behaviour_log_probs = as_log_probs(f"{owner}: behaviour_log_probs", behaviour_log_probs, count)
        if mask is None:
            shape = (count, 1) if behaviour_log_probs is None else behaviour_log_probs.shape
            mask = torch.ones(shape, dtype=torch.bool)
        mask = torch.as_tensor(mask)
        state_keys = None if state_keys is None else torch.as_tensor(state_keys)
        if state_keys is not None and (state_keys.dim() != 2 or state_keys.is_floating_point()):
            raise ContractError(f"{owner}: state_keys must be integers [N, T], like mask; got {describe(state_keys)}.")
        if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != count:
            raise ContractError(f"{owner}: mask must be bool [N, T] with N = {count}; got {describe(mask)}.")
        rewards = as_rewards(f"{owner}: rewards", rewards, count)
        per_step = {"rewards per step": rewards, "behaviour_log_probs": behaviour_log_probs, "state_keys": state_keys}
        for name, values in per_step.items():
            if values is not None and values.dim() == 2 and values.shape != mask.shape:
                raise ContractError(f"{owner}: {name} must be like mask, {list(mask.shape)}; got {describe(values)}.")
        if rewards.dim() == 2:
            rewards = torch.where(mask.cpu(), rewards, 0.0)
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
    """All that a loss may look at, for the rows of one micro-batch."""

    log_probs: Float[Tensor, "N T"]
    """With gradient."""
    old_log_probs: Float[Tensor, "N T"] | None
    """None: the current policy is the old one, and the ratio is exactly 1."""
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """How much better a row (or a step) did than its baseline; no gradient."""
    mask: Bool[Tensor, "N T"]
    """True where the policy decided. What other tensors hold off the mask is never used."""
    weights: Float[Tensor, "N T"]
    """The aggregation: the loss is the sum of per-step losses times these, 0 off the mask (see `step_weights`)."""
    entropy: Float[Tensor, "N T"] | None = None
    """Exact entropy, with gradient."""
    entropy_weights: Float[Tensor, "N T"] | None = None
    """The entropy term's own aggregation; None: `weights`."""
    ref_log_probs: Float[Tensor, "N T"] | None = None
    """Log-probs of the same steps under the reference policy."""
    behaviour_log_probs: Float[Tensor, "N T"] | None = None
    """Under the distribution actually drawn from; NaN: unscored, ratio 1."""
    kl: Float[Tensor, "N T"] | None = None
    """Exact divergence from the policy's own reference, with gradient."""
    keep: Bool[Tensor, "N T"] | None = None
    """Steps whose surrogate counts, chosen from the whole update; it touches no other term. None: chosen from these rows."""
    penalised: Bool[Tensor, "N T"] | None = None
    """Steps that KL-Cov pulls back, chosen from the whole update. None: chosen from these rows."""
    kl_coef: float | None = None
    """The current (adaptive) coefficient; overrides the configured one. None: the configured one."""
    entropy_coef: float | None = None
    """Likewise."""
    values: Float[Tensor, "N T"] | None = None
    """A critic's values now, with gradient."""
    old_values: Float[Tensor, "N T"] | None = None
    """And at collection."""
    returns: Float[Tensor, "N T"] | None = None
    """What the critic is trained towards; None: there is no value loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """A scalar to differentiate, and what to report about it."""

    loss: Float[Tensor, ""]
    """Sum over this micro-batch; adding the micro-batches of an update gives the update's loss."""
    metrics: Mapping[str, Float[Tensor, "3"]]
    """Name -> detached (count, sum, sum of squares), which add over micro-batches, updates and ranks.

    A count of 0 marks a share of the update's total (a loss term): shares add up, and are averaged over updates.
    """
