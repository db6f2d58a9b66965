"""Sample actions with any policy, in as few calls as memory allows."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from grpo._common.conversion import join_steps, require_rows
from grpo._common.global_state import capture_random_state, restore_random_state
from grpo.engine import Engine, OneProcess
from grpo.errors import ContractError
from grpo.policy_base import SamplesWithScores
from grpo.types import ActionScores, Rows, SampledActions, repeat_rows, select_rows

from .batches import add_metrics, join_field, join_rows
from .contract import check_sampled, flatten_actions
from .out_of_memory import one_row_too_many, release_cached_memory, warn_of_new_size
from .scoring import Autocast, join_scores
from .update_plan import half

SampledCall = tuple[Rows, SampledActions | None]
"""The actions of N rows, and the result of `sample_actions`, or None if the policy has no such method."""

WORK = "sampling"
"""Sampling, in messages."""


class SampleCalls:
    """Samples by the best method that a policy has: `sample_actions`, else `generate_actions`.

    A call that runs out of memory is repeated as two calls, with half the states each or, for one state, half the actions.
    Later calls keep to that number of rows.

    Args:
        policy: A `PolicyModel`. Its capability is looked up here, once.
        autocast: Returns the context manager in which the policy computes.
        engine: Gives this rank all weights while a policy samples with them. None: one process.
        before_sampling: Called before each call. It brings a separate sampler up to date.
    """

    def __init__(
        self,
        policy: Any,
        autocast: Autocast = nullcontext,
        engine: Engine | None = None,
        before_sampling: Callable[[], None] = lambda: None,
    ) -> None:
        self.sampler = policy if isinstance(policy, SamplesWithScores) else None
        """The policy, if it samples with scores."""
        self.rows_per_call: int | None = None
        """The most rows of a call. None: all rows in one call, because memory has not run out."""
        self.num_repeated = 0
        """How often memory ran out in this process and a call was repeated."""
        self._policy, self._autocast, self._name = policy, autocast, type(policy).__name__
        self._before_sampling = before_sampling
        samples_itself = getattr(policy, "samples_itself", True)  # False: its sampler has weights of its own
        self._whole = partial((engine or OneProcess()).whole, policy) if samples_itself else nullcontext

    def __call__(self, states: Rows, num_actions_per_state: int) -> tuple[Rows, Rows, SampledActions | None]:
        """Sample actions in evaluation mode. Return the states and actions of N rows, state by state.

        The third value is the result of `sample_actions`, or None if the policy has no such method.
        """
        require_rows("states", states)
        if len(states) == 0:
            raise ContractError("No states to act in: pass at least one.")
        self._before_sampling()
        # dropout in sampling would make the first ratio differ from 1
        self._policy.eval()
        with torch.no_grad(), self._autocast(), self._whole():
            actions, sampled = _joined(self._sample(states, num_actions_per_state))
        return repeat_rows(states, num_actions_per_state), actions, sampled

    def _sample(self, states: Rows, num_actions: int) -> list[SampledCall]:
        """Sample in one call, or else in halves, which are cut further as needed."""
        if self.rows_per_call is None or len(states) * num_actions <= self.rows_per_call:
            random_state = capture_random_state()
            try:
                return [self._call(states, num_actions)]
            except torch.OutOfMemoryError as error:
                self._accept(error, len(states), num_actions)
            # only here has the error released the tensors of the failed call
            release_cached_memory()
            restore_random_state(random_state)
        if len(states) == 1:
            first = half(num_actions)
            return self._sample(states, first) + self._sample(states, num_actions - first)
        order = torch.arange(len(states))
        middle = half(len(states))
        return [
            *self._sample(select_rows(states, order[:middle]), num_actions),
            *self._sample(select_rows(states, order[middle:]), num_actions),
        ]

    def _call(self, states: Rows, num_actions: int) -> SampledCall:
        if self.sampler is None:
            owner, sampled = f"{self._name}.generate_actions", None
            actions = self._policy.generate_actions(states, num_actions)
        else:
            owner = f"{self._name}.sample_actions"
            sampled = self.sampler.sample_actions(states, num_actions)
            sampled = check_sampled(owner, sampled, len(states) * num_actions)
            actions = sampled.actions
        return flatten_actions(owner, actions, len(states), num_actions), sampled

    def _accept(self, error: torch.OutOfMemoryError, num_states: int, num_actions: int) -> None:
        """Halve the rows per call. Raise the error if the call had a single row."""
        if num_states * num_actions == 1:
            error.add_note(one_row_too_many(WORK))
            raise error
        self.rows_per_call = half(num_states) * num_actions if num_states > 1 else half(num_actions)
        self.num_repeated += 1
        warn_of_new_size(WORK, num_states * num_actions, self.rows_per_call)


def _joined(parts: Sequence[SampledCall]) -> SampledCall:
    """Join the samples of several calls, padded to the most steps. Metrics add up."""
    if len(parts) == 1:
        return parts[0]
    rows = join_rows([actions for actions, _ in parts])
    several = [sampled for _, sampled in parts if sampled is not None]
    if not several:
        return rows, None
    masks = [sampled.mask for sampled in several]
    scores = [sampled.scores for sampled in several if sampled.scores is not None]
    joined: ActionScores | None = join_scores(scores) if len(scores) == len(several) else None
    return rows, replace(
        several[0],
        actions=rows,
        mask=join_steps(masks, max(mask.shape[1] for mask in masks)) if joined is None else joined.mask,
        behaviour_log_probs=join_field(
            "behaviour_log_probs", [sampled.behaviour_log_probs for sampled in several], masks
        ),
        observed_mask=join_field("observed_mask", [sampled.observed_mask for sampled in several], masks),
        scores=joined,
        metrics=add_metrics([sampled.metrics for sampled in several]),
    )
