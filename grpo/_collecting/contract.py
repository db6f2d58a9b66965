"""The checks on what a policy returns, made before training reads the values. A failed check raises a ContractError."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo._common.conversion import are_rows, as_float32, describe, has_values, pad_steps
from grpo.errors import ContractError
from grpo.types import ActionScores, Rows, SampledActions

SCORES = ("log_probs", "entropy", "values", "kl", "auxiliary_loss", "final_values", "observed_log_probs")
"""The tensors of `ActionScores` that hold numbers."""
IMPOSSIBLE = (
    "A sampled action cannot have probability 0: mask logits with torch.finfo(dtype).min, not -inf, and score the action that "
    "was sampled."
)
UNREACHABLE = (
    "Where the reference gives an action of the policy the probability 0, the KL is infinite: bound the reference's log-probs "
    "from below, for example with log_probs.clamp(min=-30)."
)
NOT_A_NUMBER = "Where logits are -inf, p log p is 0 times infinity: mask logits with torch.finfo(dtype).min."
FINITE = {
    "old_log_probs": IMPOSSIBLE,
    "behaviour_log_probs": IMPOSSIBLE,
    "ref_log_probs": UNREACHABLE,
    "entropy": NOT_A_NUMBER,
    "values": "Look for 0/0 or an overflow in the critic.",
}
"""Fields that must be finite at every sampled step, and what to do. NaN in `behaviour_log_probs` means "not scored"."""


def check_scores(owner: str, scores: Any, num_rows: int) -> ActionScores:
    """Check that `scores` are those of N rows, on one device. `ActionScores` itself checks shapes and dtypes.

    Returns:
        The scores, in float32 if they were in half precision: the gradient of a loss in float16 is lost where it is below 6e-8,
        before the loss scale can raise it.
    """
    if not isinstance(scores, ActionScores):
        raise ContractError(
            f"{owner} must return ActionScores; got {describe(scores)}. Return ActionScores(log_probs=..., mask=...)."
        )
    if not has_values(scores.log_probs) or len(scores.log_probs) != num_rows:
        raise ContractError(
            f"{owner}: log_probs must be [N, T] with N = {num_rows}; got {describe(scores.log_probs)}. Return one row per "
            "(state, action) pair, and one column per step."
        )
    device = scores.log_probs.device
    if (scores.observed_log_probs is None) != (scores.observed_mask is None):
        raise ContractError(
            f"{owner} must return observed_log_probs and observed_mask together; got one of them. Return True in the mask "
            "where there is an observation, and False at padding."
        )
    for field in ("mask", "observed_mask", *SCORES):
        value = getattr(scores, field)
        if value is not None and value.device != device:
            raise ContractError(
                f"{owner}: {field} must be on {device}, as log_probs is; got {value.device}. Return both on one device."
            )
    given = {name: value for name in SCORES if (value := getattr(scores, name)) is not None}
    raised = {name: as_float32(value) for name, value in given.items()}
    return scores if all(raised[name] is given[name] for name in given) else replace(scores, **raised)


def check_sampled(owner: str, sampled: Any, num_rows: int) -> SampledActions:
    """Check that `sampled` has N rows, on one device. `SampledActions` itself checks shapes and dtypes.

    Returns:
        The sampled actions, with scores and log-probs in float32 if they were in half precision.
    """
    if not isinstance(sampled, SampledActions):
        raise ContractError(
            f"{owner} must return SampledActions; got {describe(sampled)}. Return SampledActions(actions=..., mask=...)."
        )
    device = sampled.mask.device
    if not has_values(sampled.mask) or len(sampled.mask) != num_rows:
        raise ContractError(
            f"{owner}: mask must be bool [N, T] with N = {num_rows}; got {describe(sampled.mask)}. Return True at the steps "
            "that the policy decided."
        )
    behaviour = sampled.behaviour_log_probs
    if behaviour is not None and behaviour.device != device:
        raise ContractError(
            f"{owner}: behaviour_log_probs must be on {device}, as mask is; got {behaviour.device}. Return both on one device."
        )
    scores = sampled.scores
    if scores is not None:
        scores = check_scores(f"{owner}: scores", scores, num_rows)
        if scores.mask.device != device:
            raise ContractError(
                f"{owner}: scores must be on {device}, as mask is; got {scores.mask.device}. Return both on one device."
            )
        if scores.mask is not sampled.mask and not torch.equal(scores.mask, sampled.mask):
            raise ContractError(
                f"{owner}: scores.mask must equal mask; they differ. Return the same mask twice: True at the steps that the "
                "policy decided."
            )
    behaviour = None if behaviour is None else as_float32(behaviour)
    is_same = scores is sampled.scores and behaviour is sampled.behaviour_log_probs
    return sampled if is_same else replace(sampled, behaviour_log_probs=behaviour, scores=scores)


def flatten_actions(owner: str, actions: Any, num_states: int, num_actions: int) -> Rows:
    """Flatten actions [B][G] to N = B G rows, first the actions of state 0. Every state must have G actions."""
    required = f"{owner} must return {num_actions} actions for each of {num_states} states"
    if isinstance(actions, Tensor | np.ndarray):
        if not are_rows(actions) or actions.shape[:2] != (num_states, num_actions):
            raise ContractError(f"{required}, [B, G, ...]; got {describe(actions)}. Return one action per sample.")
        return actions.reshape(num_states * num_actions, *actions.shape[2:])
    if not are_rows(actions) or not all(map(are_rows, actions)):
        raise ContractError(f"{required}, as {num_states} lists; got {describe(actions)}. Return a list of lists.")
    counts = [len(group) for group in actions]
    if counts != [num_actions] * num_states:
        raise ContractError(
            f"{required}; got {len(counts)} groups of {sorted(set(counts))} actions. Return one list of actions per state."
        )
    return [action for group in actions for action in group]


def fit_state_keys(owner: str, keys: Any, mask: Bool[Tensor, "N T"]) -> Int[Tensor, "N T"]:
    """Pad or cut integer `keys` to the width of `mask`. Columns that have no valid step need no keys."""
    num_rows, width = mask.shape
    is_integer = isinstance(keys, Tensor) and has_values(keys) and not (keys.is_floating_point() or keys.is_complex())
    if not is_integer or keys.dim() != 2 or len(keys) != num_rows or bool(mask[:, keys.shape[1] :].any()):
        raise ContractError(
            f"{owner} must return integers {[num_rows, width]}, like the mask; got {describe(keys)}. "
            "Return one integer per row and step."
        )
    return pad_steps(keys[:, :width], width, 0)


def require_same_steps(
    owner: str, scored: Bool[Tensor, "N t"] | None, expected: Bool[Tensor, "N T"], what: str = "steps"
) -> None:
    """Check that the policy scored the steps (or observations) of the batch, and no other. `scored` may omit columns that have
    no valid step."""
    width = expected.shape[1]
    found = torch.zeros_like(expected) if scored is None else scored.to(expected.device)
    if found.shape[1] > width or not torch.equal(pad_steps(found, width, False), expected):
        raise ContractError(
            f"{owner} must score the batch's {what}, but the masks differ: the policy scored "
            f"{'none' if scored is None else describe(scored)}, and the batch has {describe(expected)}. Give "
            "ExperienceBatch.from_rows the mask of the policy's decisions, leave out that of demonstrations, and score the "
            f"same {what} every time."
        )


def require_finite(owner: str, mask: Bool[Tensor, "N T"], fields: Mapping[str, Tensor | None]) -> None:
    """Check that log-probs, the exact entropy and values among `fields` are finite at every sampled step."""
    for name, remedy in FINITE.items():
        values = fields.get(name)
        if values is None:
            continue
        wrong = values.isinf() if name == "behaviour_log_probs" else ~values.isfinite()
        rows = (wrong & mask.to(values.device)).any(1).nonzero().squeeze(1).tolist()
        if rows:
            raise ContractError(f"{owner}: {name} of sampled steps must be finite; rows {rows[:16]} are not. {remedy}")
