"""One way to ask any policy how likely given actions are, whatever it implements, and the checks on its answer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from .coercion import as_log_probs, describe, pad_steps
from .errors import ContractError
from .policy_base import ScoresActions, ScoresGroups
from .types import ActionScores, RowIndex, Rows, run_bounds, select_rows

Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a policy computes."""


class Scorer:
    """Scores rows by the best means a policy offers: by group, by row with masks, or its plain log-probabilities.

    Args:
        policy: a `PolicyModel`; what else it can do is looked up here, once.
        autocast: the context in which the policy computes.
    """

    def __init__(self, policy: Any, autocast: Autocast = nullcontext) -> None:
        self._policy = policy
        self._autocast = autocast
        self._name = type(policy).__name__
        self.one_step_device: torch.device | None = None
        """Where the log-probs are, once a plain policy has shown that it decides once per row; None: not known."""
        self._score: Callable[[Rows, Rows, Tensor], ActionScores]
        if isinstance(policy, ScoresGroups):
            self._score = self._by_group
        elif isinstance(policy, ScoresActions):
            self._score = self._by_row
        else:
            self._score = self._plain

    def __call__(self, states: Rows, actions: Rows, group_ids: Int[Tensor, " N"]) -> ActionScores:
        """Scores of N rows, with gradient unless it is switched off.

        Raises:
            ContractError: the policy's answer has a wrong shape, dtype or device.
        """
        with self._autocast():
            return self._score(states, actions, group_ids)

    def _by_group(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        scores = self._policy.score_groups(*_gather_groups(states, actions, group_ids))
        return check_scores(f"{self._name}.score_groups", scores, len(group_ids))

    def _by_row(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        return check_scores(f"{self._name}.score_actions", self._policy.score_actions(states, actions), len(group_ids))

    def _plain(self, states: Rows, actions: Rows, group_ids: Tensor) -> ActionScores:
        raw = self._policy.get_log_probabilities(states, actions)
        log_probs = as_log_probs(f"{self._name}.get_log_probabilities", raw, len(group_ids))
        self.one_step_device = log_probs.device if raw.dim() == 1 else None
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))


def check_scores(owner: str, scores: Any, num_rows: int) -> ActionScores:
    """`scores` if its tensors have the shapes, dtypes and device of the contract.

    Raises:
        ContractError: naming the field.
    """
    if not isinstance(scores, ActionScores):
        raise ContractError(f"{owner} must return ActionScores; got {describe(scores)}.")
    shape = scores.log_probs.shape
    if scores.log_probs.dim() != 2 or shape[0] != num_rows:
        raise ContractError(f"{owner}: log_probs must be [N, T] with N = {num_rows}; got {describe(scores.log_probs)}.")
    if scores.mask.dtype != torch.bool:
        raise ContractError(f"{owner}: mask must be bool; got {describe(scores.mask)}. Return mask.bool().")
    for field in ("log_probs", "mask", "entropy", "values", "kl", "final_values"):
        value = getattr(scores, field)
        if value is None:
            continue
        expected = shape[:1] if field == "final_values" else shape
        if value.shape != expected or value.device != scores.log_probs.device:
            raise ContractError(
                f"{owner}: {field} must be {list(expected)} on {scores.log_probs.device}, as log_probs is; "
                f"got {describe(value)} on {value.device}."
            )
        if field != "mask" and not value.is_floating_point():
            raise ContractError(f"{owner}: {field} must be floating; got {describe(value)}.")
    return scores


def _gather_groups(states: Rows, actions: Rows, group_ids: Int[Tensor, " N"]) -> tuple[Rows, Any]:
    """Each run of adjacent rows with one group id as one state and its actions; equal runs of a tensor stay one."""
    bounds = run_bounds(group_ids.numpy())
    sizes = bounds[1:] - bounds[:-1]
    if isinstance(actions, Tensor | np.ndarray) and (sizes == sizes[0]).all():
        size = int(sizes[0])
        return states[::size], actions.reshape(len(sizes), size, *actions.shape[1:])
    grouped = [actions[start:stop] for start, stop in pairwise(bounds.tolist())]
    return select_rows(states, torch.from_numpy(bounds[:-1])), grouped


def score_in_parts(
    score: Callable[[Rows, Rows, Tensor], ActionScores],
    states: Rows,
    actions: Rows,
    group_ids: Int[Tensor, " N"],
    parts: Sequence[RowIndex],
) -> ActionScores:
    """Scores of all N rows without gradient, one forward per part, padded to the longest."""
    with torch.no_grad():
        scored = [score(select_rows(states, part), select_rows(actions, part), group_ids[part]) for part in parts]
    if len(scored) == 1 and isinstance(parts[0], slice):
        return scored[0]
    width = max(scores.log_probs.shape[1] for scores in scored)
    everyone = torch.arange(len(group_ids))
    order = torch.cat([everyone[part] for part in parts]).argsort().to(scored[0].mask.device)

    def together(name: str) -> Any:
        values = [getattr(scores, name) for scores in scored]
        if name == "final_values" and any(value is not None for value in values):  # None says that all rows terminated
            values = [
                s.log_probs.new_zeros(len(s.mask)) if v is None else v for s, v in zip(scored, values, strict=True)
            ]
        if any(value is None for value in values):
            return None
        return torch.cat([pad_steps(value, width, 0) if value.dim() == 2 else value for value in values])[order]

    return ActionScores(**{field.name: together(field.name) for field in fields(ActionScores)})


def fit_steps(owner: str, values: Float[Tensor, "N t"], width: int) -> Float[Tensor, "N T"]:
    """Values per step padded on the right to the batch's number of steps.

    Raises:
        ContractError: they have more steps than the batch.
    """
    if values.shape[1] > width:
        raise ContractError(f"{owner} must give at most the batch's {width} steps; got {describe(values)}.")
    return pad_steps(values, width, 0.0)
