"""Between an `ExperienceBatch` and the samples that it is made of."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from grpo import ExperienceBatch

from .calls import ToolCall
from .samples import SampleError, Steps, ToolGroup, ToolSample
from .tasks import ToolTask


def groups_from_batch(batch: ExperienceBatch) -> list[ToolGroup]:
    """A batch, as `trainer.collect` gives it, written down: one group per group id, in the order of their first rows.

    A `ToolTask` is kept whole as the group's context, and its text is the state. A row is `done` where its final value is 0.

    Raises:
        SampleError: actions that are not `ToolCall`s, rewards per step, steps that do not begin at the first column, or no
            log-probs of what chose the actions (nor `old_log_probs`).
    """
    log_probs = batch.old_log_probs if batch.behaviour_log_probs is None else batch.behaviour_log_probs
    if log_probs is None:
        raise SampleError(
            "groups_from_batch: the batch has no behaviour_log_probs. Let the policy's sample_actions tell."
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
    """Samples from wherever they were made, ready for `trainer.update`. Group g has the id g, whatever its own is.

    `log_prob` becomes `behaviour_log_probs`: set `objective.sampler_correction` where the policy has moved on since.
    `ref_log_prob` and `value` are taken over where every sample has them; else the trainer asks its own models. The
    final value of a sample that is `done` is 0.

    Args:
        groups: groups, or what `GroupBuffer.drain` returns.
        state: what a row's state is; None: the sample's own, vectors as one tensor [N, F] of torch's default dtype. With
            `lambda group, _: ToolTask.from_dict(group.context)` tasks come back whole.

    Raises:
        SampleError: no group, or states of several kinds or lengths.
    """
    if isinstance(groups, Mapping):
        groups = [ToolGroup(id=str(key), samples=tuple(samples)) for key, samples in groups.items()]
    listed = list(groups)
    rows = [(group, sample) for group in listed for sample in group.samples]
    if not rows:
        raise SampleError("batch_from_groups needs at least one group; got none. Wait until the buffer holds some.")
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
    """Mask and values [N, T], in float64, in which Python's floats are exact."""
    mask = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.bool)
    values = torch.zeros(mask.shape, dtype=torch.float64)
    for place, row in enumerate(rows):
        mask[place, : len(row)] = True
        values[place, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return mask, values
