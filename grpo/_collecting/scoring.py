"""Scores of given actions from any policy or reference, whichever scoring methods it implements."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo._advantages.groups import run_bounds
from grpo._common.conversion import as_log_probs, describe, pad_steps
from grpo._common.protocols import require_methods
from grpo.errors import ConfigError, ContractError
from grpo.policy_base import POLICY_METHODS, ScoresActions, ScoresGroups, ScoresReference
from grpo.types import ActionScores, ExperienceBatch, RowIndex, Rows, select_rows

from .batches import join_field
from .contract import check_scores, require_finite
from .out_of_memory import PassSizes

Autocast = Callable[[], AbstractContextManager[Any]]
"""A function that returns the context manager in which a policy computes, such as `torch.autocast`."""

Plan = Callable[[int], list[RowIndex]]
"""A function that returns the rows of each forward pass, after the rows per forward pass were halved a number of times."""

ScoreRows = Callable[[Rows, Rows, Tensor], ActionScores]
"""A function that maps the states, actions and group ids of N rows to the scores of the rows."""


class Scorer:
    """Scores rows by the best method that a policy has: `score_groups`, else `score_actions`, else its plain log-probs."""

    def __init__(self, policy: Any, autocast: Autocast = nullcontext) -> None:
        self._policy, self._autocast = policy, autocast
        self._name = type(policy).__name__
        self.one_step_device: torch.device | None = None
        """The device of the log-probs, once a plain policy has returned one log-prob per row. None: not known."""
        self._score: ScoreRows = self._plain
        if isinstance(policy, ScoresGroups):
            self._score = self._by_group
        elif isinstance(policy, ScoresActions):
            self._score = self._by_row

    def __call__(self, states: Rows, actions: Rows, group_ids: Int[Tensor, " N"]) -> ActionScores:
        """Score N rows, with gradient unless gradients are disabled. Check the shapes and dtypes of the scores."""
        with self._autocast():
            return self._score(states, actions, group_ids)

    def state_dict(self) -> dict[str, Any]:
        """Whether a plain policy returns one log-prob per row."""
        return {"decides_once_per_row": self.one_step_device is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, so that a resumed run makes the same forward passes."""
        devices = (value.device for value in self._policy.get_parameters().values())
        self.one_step_device = next(devices, torch.device("cpu")) if state["decides_once_per_row"] else None

    def _by_group(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        scores = self._policy.score_groups(*_rows_by_group(states, actions, group_ids))
        return check_scores(f"{self._name}.score_groups", scores, len(group_ids))

    def _by_row(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        return check_scores(f"{self._name}.score_actions", self._policy.score_actions(states, actions), len(group_ids))

    def _plain(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        raw = self._policy.get_log_probabilities(states, actions)
        scores = _all_steps(f"{self._name}.get_log_probabilities", raw, len(group_ids))
        self.one_step_device = raw.device if raw.dim() == 1 else None
        return scores


class ReferenceScorer:
    """Scores rows under the reference: a separate policy, or the trained policy's own `reference_log_probabilities`.

    Args:
        policy: The policy that is trained.
        reference_policy: A frozen `PolicyModel`. None: ask `policy.reference_log_probabilities`.
        autocast: Returns the context manager in which the reference computes.
    """

    def __init__(self, policy: Any, reference_policy: Any, autocast: Autocast) -> None:
        self._reference = reference_policy
        self._autocast = autocast
        self._score: ScoreRows
        if reference_policy is not None:
            require_methods(reference_policy, POLICY_METHODS, "reference_policy", "PolicyModel")
            self._name = f"reference {type(reference_policy).__name__}"
            self._score = Scorer(reference_policy, autocast)
        elif isinstance(policy, ScoresReference):
            self._name = f"{type(policy).__name__}.reference_log_probabilities"
            self._policy = policy
            self._score = self._ask_policy
        else:
            raise ConfigError(
                f"A KL term needs a reference, and {type(policy).__name__} has no reference_log_probabilities(). "
                "Pass reference_policy=copy.deepcopy(policy)."
            )

    def __call__(self, batch: ExperienceBatch, plan: Plan, sizes: PassSizes) -> Float[Tensor, "N T"]:
        """Return log pi_ref of every step of the batch, without gradient, with one forward pass per part of the plan."""
        if self._reference is not None:
            self._reference.eval()
        scores = score_in_parts(self._score, batch.states, batch.actions, batch.group_ids, plan, sizes)
        width, scored = batch.mask.shape[1], scores.mask.to(batch.mask.device)
        if scored.shape[1] > width or bool((batch.mask & ~pad_steps(scored, width, False)).any()):
            raise ContractError(
                f"{self._name} must score every step that the policy decided, and at most {list(batch.mask.shape)}; "
                f"got {describe(scores.mask)}. Return one log-prob per step, not their sum."
            )
        log_probs = pad_steps(scores.log_probs, width, 0.0)
        require_finite(self._name, batch.mask, {"ref_log_probs": log_probs})
        return log_probs

    def _ask_policy(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        with self._autocast():
            return _all_steps(self._name, self._policy.reference_log_probabilities(states, actions), len(group_ids))


def score_in_parts(
    score: ScoreRows, states: Rows, actions: Rows, group_ids: Int[Tensor, " N"], plan: Plan, sizes: PassSizes
) -> ActionScores:
    """Score all N rows without gradient, with one forward pass per part of the plan. Scores are padded to the most steps.

    If memory runs out, the parts are halved and all rows are scored again. Where all ranks make equally many passes, a rank
    with fewer parts scores its first row again.
    """

    def scored_part(part: RowIndex) -> ActionScores:
        return score(select_rows(states, part), select_rows(actions, part), group_ids[part])

    @torch.no_grad()
    def all_parts() -> tuple[list[RowIndex], list[ActionScores]]:
        parts = plan(sizes.num_halvings)
        num_missing = sizes.num_missing(len(parts))
        scored = [scored_part(part) for part in sizes.passes(parts)]
        for _ in range(num_missing):
            scored_part(slice(0, 1))
        return parts, scored

    parts, scored = sizes.repeat(all_parts)
    if len(scored) == 1 and isinstance(parts[0], slice):
        return scored[0]
    rows = torch.arange(len(group_ids))
    return join_scores(scored, torch.cat([rows[part] for part in parts]).argsort())


def join_scores(scored: Sequence[ActionScores], order: Int[Tensor, " N"] | None = None) -> ActionScores:
    """Join the scores of several parts, padded to the most steps. Row n of the result is row `order[n]` of the joined parts.

    Without `order`, rows stay in the order of the parts.
    """
    masks = [scores.mask for scores in scored]
    order = None if order is None else order.to(masks[0].device)

    def joined(name: str) -> Any:
        values = join_field(name, [getattr(scores, name) for scores in scored], masks)
        return values if values is None or order is None else values[order]

    return ActionScores(**{field.name: joined(field.name) for field in fields(ActionScores)})


def batch_fields(scores: ActionScores | None, needs: Collection[str]) -> dict[str, Tensor]:
    """Copy the scores that training reads: the log-probs, and the fields in `needs`. Keys are fields of `ExperienceBatch`.

    The scores are copied because a critic may return a view of its weights, which training changes in place.
    """
    if scores is None:
        return {}
    read: dict[str, Tensor | None] = {"old_log_probs": scores.log_probs}
    if "entropy" in needs:
        read["entropy"] = scores.entropy
    if "values" in needs:
        read |= {"values": scores.values, "final_values": scores.final_values}
    if "observed_mask" in needs:
        read["observed_mask"] = scores.observed_mask
    return {name: values.detach().clone() for name, values in read.items() if values is not None}


def _all_steps(owner: str, raw: Any, num_rows: int) -> ActionScores:
    """Convert plain log-probs [N] or [N, T] to scores in which the policy decided every step."""
    log_probs = as_log_probs(owner, raw, num_rows)
    return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))


def _rows_by_group(states: Rows, actions: Rows, group_ids: Int[Tensor, " N"]) -> tuple[Rows, Any]:
    """Return one state, and its actions, per run of adjacent rows of a group. Actions of equally long runs stay one tensor."""
    bounds = run_bounds(group_ids.numpy())
    sizes = bounds[1:] - bounds[:-1]
    if isinstance(actions, Tensor | np.ndarray) and (sizes == sizes[0]).all():
        size = int(sizes[0])
        return states[::size], actions.reshape(len(sizes), size, *actions.shape[1:])
    grouped = [actions[start:stop] for start, stop in pairwise(bounds.tolist())]
    return select_rows(states, torch.from_numpy(bounds[:-1])), grouped
