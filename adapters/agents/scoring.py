"""Scores of conversations: each sampled token in the context in which it was sampled."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.llm import Completion, HFPolicy, Picture
from grpo import ActionScores
from grpo.arguments import describe
from grpo.errors import ContractError

from .conversations import Conversation, Segment, observed_mask, step_mask


def score_conversations(
    policy: HFPolicy, actions: Sequence[Conversation], *, with_observations: bool = False
) -> ActionScores:
    """Score the sampled tokens of N conversations: log-probs [N, T], and entropies and values if the policy computes them.

    A conversation can have several contexts, which are called segments here. The language model scores each segment as a row of
    its own. The scores are then joined: a conversation's T steps are the sampled tokens of its segments, in order.

    Args:
        policy: The language model.
        actions: The conversations.
        with_observations: Whether to score the other tokens after the first sampled one, too, in the same passes.
    """
    if with_observations:
        require_observations_of_text(actions)
    prompts, completions, row_of_segment = _segments(policy, actions)
    sampled = [completion.sampled or () for completion in completions]
    if with_observations:  # all tokens of a completion count then
        completions = [replace(completion, sampled=None) for completion in completions]
    parts = [
        (part, policy.score_actions([prompts[i] for i in part], [completions[i] for i in part]))
        for part in _passes(policy, prompts, completions)
    ]
    if not parts:  # no conversation has a step
        nothing = torch.zeros(0, 0)
        critic = {} if policy.value_head is None else {"values": nothing, "final_values": torch.zeros(0)}
        parts = [([], ActionScores(log_probs=nothing, mask=nothing.bool(), **critic))]
    mask = step_mask(actions, mask_truncated=policy.options.mask_truncated).to(parts[0][1].mask.device)
    are_steps = [
        scores.mask & _flags([sampled[i] for i in part], scores.mask) if with_observations else scores.mask
        for part, scores in parts
    ]
    joined: dict[str, Any] = {}
    if with_observations:
        places = observed_mask(actions, mask_truncated=policy.options.mask_truncated).to(mask.device)
        seen = [
            (part, scores.log_probs, scores.mask & ~are) for (part, scores), are in zip(parts, are_steps, strict=True)
        ]
        joined = {"observed_log_probs": _on_steps(seen, len(completions), places), "observed_mask": places}
    for name in (field.name for field in fields(ActionScores)):
        values = [(part, getattr(scores, name), are) for (part, scores), are in zip(parts, are_steps, strict=True)]
        if name == "mask" or any(value is None for _, value, _ in values):
            continue
        if name == "final_values":
            joined[name] = _of_last_segments(values, row_of_segment, len(actions))
        else:
            joined[name] = _on_steps(values, len(completions), mask)
    return ActionScores(mask=mask, **joined)


def reference_log_probs(policy: HFPolicy, actions: Sequence[Conversation]) -> Float[Tensor, "N T"]:
    """Log-probs of the steps under the reference of the language model."""
    prompts, completions, _ = _segments(policy, actions)
    values = []
    for part in _passes(policy, prompts, completions):
        some = [completions[i] for i in part]
        log_probs = policy.reference_log_probabilities([prompts[i] for i in part], some)
        sampled = [() if policy.options.mask_truncated and one.is_truncated else one.sampled or () for one in some]
        values.append((part, log_probs, _flags(sampled, log_probs)))
    mask = step_mask(actions, mask_truncated=policy.options.mask_truncated)
    if not values:
        return torch.zeros(mask.shape)
    return _on_steps(values, len(completions), mask.to(values[0][1].device))


def plan_passes(policy: HFPolicy, actions: Sequence[Conversation]) -> list[Sequence[int]]:
    """Rows of each forward pass, within the language model's `max_tokens_per_forward` positions."""
    prompts, rows = [], []
    for action in actions:
        if not isinstance(action, Conversation):
            raise ContractError(
                f"AgentPolicy: actions must be Conversations; got {describe(action)}. Pass what it generated, or make "
                "demonstrations of scripts with demonstrations(states, scripts)."
            )
        segments = action.segments
        begin = segments[0].token_ids[: segments[0].num_context_tokens] if segments else (0,)
        prompts.append(_prompt_of(policy, segments[0]) if segments else _prompt(policy, begin, ()))
        length = sum(len(segment.token_ids) for segment in segments) - len(begin)
        before = [token for segment in segments for token in segment.token_ids[: min(segment.forks, default=0)]]
        shared = tuple(before[len(begin) :])  # until the first fork
        tokens = (*shared, *(0,) * (length - len(shared)))
        forks = (len(shared),) if shared else ()
        rows.append(Completion(token_ids=tokens, text="", finish_reason="end", forks=forks))
    return policy.plan_micro_batches(prompts, rows)


def require_observations_of_text(actions: Sequence[Conversation]) -> None:
    """Refuse conversations whose observations have pictures: no language model foresees a picture."""
    rows = [
        row
        for row, action in enumerate(actions)
        if any(len(part.pictures) > part.num_first_pictures for part in action.segments)
    ]
    if rows:
        raise ContractError(
            f"AgentPolicy(observations=True) needs observations of text; those of the conversations {rows[:8]} have pictures. "
            "Leave observations=True out."
        )


def _passes(policy: HFPolicy, prompts: list[dict[str, Any]], completions: list[Completion]) -> list[Sequence[int]]:
    return policy.plan_micro_batches(prompts, completions) if prompts else []


def _prompt(
    policy: HFPolicy, token_ids: Sequence[int], pictures: Sequence[Picture], later: Sequence[int] = ()
) -> dict[str, Any]:
    """A prompt with exactly these tokens. Without a mask, padding tokens at its ends would be left out.

    Args:
        policy: The language model.
        token_ids: The tokens.
        pictures: The pictures of the prompt, and of what follows.
        later: Token ids of what follows, if there are pictures in it.
    """
    if pictures:
        if policy.picture_reader is None:
            raise ContractError(
                "Conversations with pictures need the processor with which they were held; the policy has a tokenizer. Pass "
                "the processor to HFPolicy."
            )
        return {policy.options.prompt_column: policy.picture_reader.prompt(token_ids, pictures, later)}
    return {policy.options.prompt_column: list(token_ids), "attention_mask": [True] * len(token_ids)}


def _prompt_of(policy: HFPolicy, segment: Segment, *, with_later: bool = True) -> dict[str, Any]:
    """The prompt of a segment: all before its first sampled token. A picture behind this token is read in a pass over the whole
    row, so the prompt has it, too, unless `with_later` is False."""
    begin = segment.num_context_tokens
    count = len(segment.pictures) if with_later else segment.num_first_pictures
    later = segment.token_ids[begin:] if count > segment.num_first_pictures else ()
    return _prompt(policy, segment.token_ids[:begin], segment.pictures[:count], later)


def _segments(
    policy: HFPolicy, actions: Sequence[Conversation]
) -> tuple[list[dict[str, Any]], list[Completion], list[int]]:
    """The segments of all rows as prompts and completions of the language model, and the row of each segment.

    The prompt of a segment ends before its first sampled token. The completion has all other tokens.
    """
    prompts, completions, rows = [], [], []
    mask_truncated = policy.options.mask_truncated
    for row, action in enumerate(actions):
        # the value after the end is bootstrapped only if a message was truncated, because only then the policy would have gone
        # on; mask_truncated applies to every conversation that ended for lack of room
        is_cut = action.ended_by == "length" and (mask_truncated or any(turn.is_truncated for turn in action.turns))
        for segment in action.segments:
            begin = segment.num_context_tokens
            # masked tokens are not forwarded
            prompts.append(_prompt_of(policy, segment, with_later=not (is_cut and mask_truncated)))
            completions.append(
                Completion(
                    token_ids=segment.token_ids[begin:],
                    text="",
                    finish_reason="length" if is_cut else "end",
                    sampled=segment.sampled[begin:],
                    forks=tuple(fork - begin for fork in segment.forks),
                )
            )
            rows.append(row)
    return prompts, completions, rows


def _flags(rows: Sequence[Sequence[bool]], like: Tensor) -> Bool[Tensor, "S W"]:
    """The flags of each row as a tensor of the shape and on the device of `like`, False on the right."""
    flags = torch.zeros(like.shape, dtype=torch.bool)
    for row, own in zip(flags, rows, strict=True):
        row[: len(own)] = torch.tensor(own[: len(row)])
    return flags.to(like.device)


def _on_steps(
    parts: Sequence[tuple[Sequence[int], Tensor, Tensor]], num_segments: int, mask: Tensor
) -> Float[Tensor, "N T"]:
    """Values per step of N rows, from values per token of their segments.

    Args:
        parts: One entry per forward pass: the indices of its S segments, their values [S, W], and which of their tokens were
            sampled, [S, W].
        num_segments: Number of segments in all passes together.
        mask: The steps of each row, [N, T]. A masked row has no sampled values in `parts`.
    """
    flat: list[Tensor] = [torch.empty(0)] * num_segments
    for part, values, sampled in parts:
        counts = sampled.sum(1).tolist()
        for segment, of_segment in zip(part, values[sampled].split(counts), strict=True):
            flat[segment] = of_segment
    steps = torch.cat(flat) if flat else torch.empty(0)
    places = mask.flatten().nonzero().squeeze(1)
    return steps.new_zeros(mask.numel()).index_copy(0, places, steps).view(mask.shape)


def _of_last_segments(
    parts: Sequence[tuple[Sequence[int], Tensor, Tensor]], row_of_segment: Sequence[int], num_rows: int
) -> Float[Tensor, " N"]:
    """The value of each row's last segment. It is 0 for a row without segments."""
    values = torch.cat([value for _, value, _ in parts])
    place_of = {segment: place for place, segment in enumerate(i for part, _, _ in parts for i in part)}
    last = {row: place_of[segment] for segment, row in enumerate(row_of_segment)}
    chosen = values[torch.tensor([last[row] for row in sorted(last)], dtype=torch.int64)]
    rows = torch.tensor(sorted(last), dtype=torch.int64, device=values.device)
    return values.new_zeros(num_rows).index_copy(0, rows, chosen)
