"""The rows of an iteration that a separate sampler samples beside updates."""

import time
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from grpo._collecting.contract import check_sampled, flatten_actions, require_finite
from grpo._collecting.sampled_rows import SampledRows
from grpo.errors import ContractError
from grpo.experience_collector import ExperienceCollector
from grpo.policy_base import BeginsSampling
from grpo.types import Rows, SampledActions, repeat_rows


def begun_rows(collector: ExperienceCollector, states: Rows) -> Callable[[], SampledRows] | None:
    """Begin to sample rows for a later iteration. Return the function that samples, in any thread.

    None: the policy cannot sample beside an update.
    """
    policy, size = collector.policy, collector.group_size
    work = policy.begin_sampling(states, size) if isinstance(policy, BeginsSampling) else None
    if work is None:
        return None
    return partial(_sampled_with, type(policy).__name__, work, states, collector.groups_of(states), size)


def _sampled_with(
    name: str, work: Callable[[], SampledActions], states: Rows, groups: Int[Tensor, " B"], group_size: int
) -> SampledRows:
    """The rows that a function of `BeginsSampling` samples, in any thread."""
    start, owner = time.perf_counter(), f"{name}.begin_sampling"
    with torch.no_grad():
        sampled = check_sampled(owner, work(), len(states) * group_size)
    if sampled.behaviour_log_probs is None:
        raise ContractError(
            f"{owner}: the function must return behaviour_log_probs; got None. The policy changes before the rows are used, so "
            "the log-probs cannot be computed later. Return them in SampledActions."
        )
    known = {"behaviour_log_probs": sampled.behaviour_log_probs}
    require_finite(name, sampled.mask, known)
    if sampled.observed_mask is not None:
        known["observed_mask"] = sampled.observed_mask
    return SampledRows(
        states=repeat_rows(states, group_size),
        actions=flatten_actions(owner, sampled.actions, len(states), group_size),
        group_ids=groups.repeat_interleave(group_size),
        mask=sampled.mask,
        known=known,
        metrics={**sampled.metrics, "time/sample": time.perf_counter() - start, "time/score": 0.0},
    )
