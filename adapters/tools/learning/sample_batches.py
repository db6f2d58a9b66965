"""Conversion between an `ExperienceBatch` and groups of `ToolSample`s."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from adapters.tools.catalogue.calls import ToolCall
from grpo import ExperienceBatch

from .records import Steps
from .samples import SampleError, ToolGroup, ToolSample
from .tasks import ToolTask


def groups_from_batch(batch: ExperienceBatch) -> list[ToolGroup]:
    """Convert a batch from `trainer.collect` to one group per group id, in the order of the groups' first rows.

    A `ToolTask` is stored as the group's context, and its text becomes the state. A row is `done` if its final value is 0.

    Raises:
        SampleError: An action is not a `ToolCall`, rewards are per step, a row's steps do not start at the first column, or the
            batch has neither `behaviour_log_probs` nor `old_log_probs`.
    """
    log_probs = batch.old_log_probs if batch.behaviour_log_probs is None else batch.behaviour_log_probs
    if log_probs is None:
        raise SampleError(
            "groups_from_batch: the batch has no behaviour_log_probs. Return them from the policy's sample_actions."
        )
    if batch.rewards.dim() != 1:
        raise SampleError(f"groups_from_batch: rewards must be one per row, [N]; got {list(batch.rewards.shape)}.")
    lengths = batch.mask.sum(1)
    if not torch.equal(batch.mask, torch.arange(batch.mask.shape[1], device=lengths.device) < lengths.unsqueeze(1)):
        raise SampleError("groups_from_batch: the mask must be True from the first column on, without holes.")
    final_values = torch.zeros(batch.num_rows) if batch.final_values is None else batch.final_values
    members: dict[int, list[ToolSample]] = {}
    contexts: dict[int, Mapping[str, Any]] = {}
    for row, (group, length) in enumerate(zip(batch.group_ids.tolist(), lengths.tolist(), strict=True)):
        state: Any = batch.states[row]
        call: Any = batch.actions[row]
        if not isinstance(call, ToolCall):
            raise SampleError(f"groups_from_batch: actions must be ToolCalls; got {call!r:.120}.")
        contexts.setdefault(group, state.to_dict() if isinstance(state, ToolTask) else {})
        final_value = final_values[row].item()
        sample = ToolSample(
            state=_plain(state),
            tool=call.tool,
            arguments=call.arguments,
            log_prob=_row(log_probs, row, length),
            ref_log_prob=None if batch.ref_log_probs is None else _row(batch.ref_log_probs, row, length),
            reward=batch.rewards[row].item(),
            value=None if batch.values is None else _row(batch.values, row, length),
            done=final_value == 0.0,
            final_value=final_value or None,
        )
        members.setdefault(group, []).append(sample)
    return [ToolGroup(id=group, context=contexts[group], samples=tuple(found)) for group, found in members.items()]


def batch_from_groups(
    groups: Iterable[ToolGroup] | Mapping[Hashable, Sequence[ToolSample]],
    *,
    state: Callable[[ToolGroup, ToolSample], Any] | None = None,
) -> ExperienceBatch:
    """Convert samples from any source to a batch for `trainer.update`. Groups are renumbered from 0.

    `log_prob` becomes `behaviour_log_probs`. Set `objective.sampler_correction` if the policy has changed since the samples
    were drawn. `ref_log_prob` and `value` are used if every sample has them; otherwise the trainer computes them with its own
    models. The final value of a sample that is `done` is 0.

    Args:
        groups: Groups, or the return value of `GroupBuffer.drain`.
        state: Maps (group, sample) to the row's state. None uses the sample's own state; vectors become one tensor [N, F] of
            torch's default dtype. Use `lambda group, _: ToolTask.from_dict(group.context)` to restore tasks.

    Raises:
        SampleError: There is no group, or states differ in kind or length.
    """
    if isinstance(groups, Mapping):
        groups = [ToolGroup(id=str(key), samples=tuple(samples)) for key, samples in groups.items()]
    listed = list(groups)
    rows = [(group, sample) for group in listed for sample in group.samples]
    if not rows:
        raise SampleError("batch_from_groups needs at least one group; got none. Wait until the buffer holds a group.")
    samples = [sample for _, sample in rows]
    mask, log_probs = _padded([sample.log_prob for sample in samples])
    batch = ExperienceBatch.from_rows(
        states=_states(samples) if state is None else [state(group, sample) for group, sample in rows],
        actions=[sample.call for sample in samples],
        rewards=[sample.reward for sample in samples],
        group_ids=[place for place, group in enumerate(listed) for _ in group.samples],
        behaviour_log_probs=log_probs,
        mask=mask,
    )
    references = [sample.ref_log_prob for sample in samples if sample.ref_log_prob is not None]
    if len(references) == len(samples):
        batch = replace(batch, ref_log_probs=_padded(references)[1])
    values = [sample.value for sample in samples if sample.value is not None]
    if len(values) == len(samples):
        final_values = torch.tensor(
            [0.0 if sample.done else sample.final_value for sample in samples], dtype=torch.float64
        )
        batch = replace(batch, values=_padded(values)[1], final_values=final_values)
    return batch


def _plain(state: Any) -> Any:
    if isinstance(state, Tensor | np.ndarray):
        return state.tolist()
    return state.text if isinstance(state, ToolTask) else state


def _states(samples: Sequence[ToolSample]) -> Float[Tensor, "N F"] | list[str]:
    texts = [sample.state for sample in samples if isinstance(sample.state, str)]
    lengths = {len(sample.state) for sample in samples if not isinstance(sample.state, str)}
    if len(texts) == len(samples):
        return texts
    if texts or len(lengths) > 1:
        raise SampleError(
            "batch_from_groups: states must all be texts, or all vectors of one length; got "
            f"{len(texts)} texts and vectors of {sorted(lengths)} numbers."
        )
    return torch.tensor([sample.state for sample in samples])


def _row(values: Float[Tensor, "N T"], row: int, length: int) -> Steps:
    return tuple(values[row, :length].tolist())


def _padded(rows: Sequence[Steps]) -> tuple[Bool[Tensor, "N T"], Float64[Tensor, "N T"]]:
    """Mask and padded values [N, T]. float64 represents Python's floats exactly."""
    mask = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.bool)
    values = torch.zeros(mask.shape, dtype=torch.float64)
    for place, row in enumerate(rows):
        mask[place, : len(row)] = True
        values[place, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return mask, values
