"""Conversion between an `ExperienceBatch` and groups of `ToolSample`s."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adapters.tools.catalogue.calls import ToolCall
from grpo import ExperienceBatch

from .records import SampleError, Steps, ToolGroup, ToolSample
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
        raise SampleError("groups_from_batch needs behaviour_log_probs. Return them from the policy's sample_actions.")
    if batch.rewards.dim() != 1 or bool((batch.mask[:, 1:] > batch.mask[:, :-1]).any()):
        raise SampleError(
            "groups_from_batch: rewards must be one per row, [N], and the mask must be True from the first column on, without "
            f"holes; got rewards {list(batch.rewards.shape)} and the mask {batch.mask.tolist()!r:.120}."
        )
    found: dict[int, tuple[dict[str, Any], list[ToolSample]]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        task: Any = batch.states[row]
        context = task.to_dict() if isinstance(task, ToolTask) else {}
        found.setdefault(group, (context, []))[1].append(_sample(batch, log_probs, row))
    return [ToolGroup(id=group, context=context, samples=tuple(rows)) for group, (context, rows) in found.items()]


def _sample(batch: ExperienceBatch, log_probs: Float[Tensor, "N T"], row: int) -> ToolSample:
    def steps(values: Float[Tensor, "N T"] | None) -> Any:
        return None if values is None else values[row, batch.mask[row]].tolist()

    state: Any = batch.states[row]
    call: Any = batch.actions[row]
    if not isinstance(call, ToolCall):
        raise SampleError(f"groups_from_batch: actions must be ToolCalls; got {call!r:.120}.")
    if isinstance(state, Tensor | np.ndarray):
        state = state.tolist()
    final_value = 0.0 if batch.final_values is None else batch.final_values[row].item()
    return ToolSample(
        state=state.text if isinstance(state, ToolTask) else state,
        tool=call.tool,
        arguments=call.arguments,
        log_prob=steps(log_probs),
        ref_log_prob=steps(batch.ref_log_probs),
        reward=batch.rewards[row].item(),
        value=steps(batch.values),
        done=final_value == 0.0,
        final_value=final_value or None,
    )


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
    rows = [(number, group, sample) for number, group in enumerate(groups) for sample in group.samples]
    if not rows:
        raise SampleError("batch_from_groups needs at least one group; got none. Wait until the buffer holds a group.")
    samples = [sample for _, _, sample in rows]
    values = _padded([sample.value for sample in samples])
    final_values = torch.tensor([sample.final_value or 0.0 for sample in samples], dtype=torch.float64)
    batch = ExperienceBatch.from_rows(
        states=_states(samples) if state is None else [state(group, sample) for _, group, sample in rows],
        actions=[sample.action for sample in samples],
        rewards=[sample.reward for sample in samples],
        group_ids=[number for number, _, _ in rows],
        behaviour_log_probs=_padded([sample.log_prob for sample in samples]),
        mask=pad_sequence([torch.ones(len(sample.log_prob), dtype=torch.bool) for sample in samples], batch_first=True),
    )
    return replace(
        batch,
        ref_log_probs=_padded([sample.ref_log_prob for sample in samples]),
        values=values,
        final_values=None if values is None else final_values,
    )


def _states(samples: Sequence[ToolSample]) -> Float[Tensor, "N F"] | list[Any]:
    states = [sample.state for sample in samples]
    kinds = {"text" if isinstance(state, str) else f"{len(state)} numbers" for state in states}
    if len(kinds) > 1:
        raise SampleError(
            f"batch_from_groups: states must all be texts, or all vectors of one length; got {sorted(kinds)}."
        )
    return states if kinds == {"text"} else torch.tensor(states)


def _padded(rows: Sequence[Steps | None]) -> Float64[Tensor, "N T"] | None:
    """None if a row has no values. float64 represents Python's floats exactly."""
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows if row is not None]
    return pad_sequence(tensors, batch_first=True) if len(tensors) == len(rows) else None
