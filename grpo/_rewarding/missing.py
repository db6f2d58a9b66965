"""Rows without a finite reward: training stops, or they leave the batch, or their reward is 0, as `RewardConfig` says."""

from collections.abc import Callable, MutableMapping
from typing import Any, Literal, NoReturn, assert_never

import torch
from jaxtyping import Bool
from torch import Tensor

from grpo.config import RewardConfig
from grpo.errors import RewardError
from grpo.reward_model_base import Rewards
from grpo.types import Rows

MOST_CAUSES = 3
"""Number of explanations in an error."""
Kept = tuple[Rewards, Tensor]
"""The rewards of K rows, and a mask of the K rows among all N rows."""


def without_missing(name: str, found: Kept, config: RewardConfig, counts: MutableMapping[str, float]) -> Kept:
    """Apply `config.not_applicable` to rows to which no part applies, and `config.non_finite` to other rows without a reward.

    Args:
        name: The name of the reward model in messages.
        found: The rewards, and which of the N rows they belong to.
        config: What happens to the rows.
        counts: Counts of dropped rows and of rewards set to 0, which are raised.

    Raises:
        RewardError: A setting is "raise" and such a row exists, or no row is left.
    """
    rewards, kept = found
    # in this order: None is meant, and infinity is a fault, so that each has a setting of its own
    unanswered = _unanswered(rewards)
    rule = config.non_finite if config.not_applicable is None else config.not_applicable
    if rule == "raise" and config.not_applicable is not None and bool(unanswered.any()):
        _raise_for_unanswered(name, rewards, kept, unanswered)
    if bool(unanswered.any()) and rule != "raise":
        found = _without(name, found, unanswered, rule, counts)
    missing = _any_step(~found[0].values.isfinite())
    if not bool(missing.any()):
        return found
    if config.non_finite == "raise":
        _raise_for_missing(name, found, missing, is_unanswered=bool(unanswered.any()) and rule == "raise")
    return _without(name, found, missing, config.non_finite, counts)


def causes_of(reward_model: Any, states: Rows, actions: Rows) -> list[str]:
    """Why rows of these have no reward, in sentences, if the reward model has a method `explain_missing` that knows."""
    explain = getattr(reward_model, "explain_missing", None)
    return [] if explain is None else [*explain(states, actions)][:MOST_CAUSES]


def with_each(rewards: Rewards, change: Callable[[Tensor], Tensor]) -> Rewards:
    """The same rewards, after a change of the values and of each part. What was lost and measured is left out."""
    parts = {name: change(part) for name, part in rewards.components.items()}
    return Rewards(values=change(rewards.values), components=parts, weights=rewards.weights)


def _unanswered(rewards: Rewards) -> Bool[Tensor, " K"]:
    """The rows whose reward is missing only because every part is NaN, at every step whose reward is missing."""
    missing = ~rewards.values.isfinite()
    if not rewards.components:
        return torch.zeros(len(missing), dtype=torch.bool)
    is_absent = torch.stack([part.isnan() for part in rewards.components.values()]).all(0)
    is_explained = is_absent | ~missing
    return _any_step(missing) & ~_any_step(~is_explained)


def _any_step(marks: Tensor) -> Bool[Tensor, " K"]:
    return marks if marks.dim() == 1 else marks.any(1)


def _without(
    name: str,
    found: Kept,
    rows: Bool[Tensor, " K"],
    rule: Literal["drop", "zero"],
    counts: MutableMapping[str, float],
) -> Kept:
    """Leave out these rows, or set what is not finite in them to 0."""
    rewards, kept = found
    match rule:
        case "drop":
            if bool(rows.all()):
                raise RewardError(
                    f"{name}: no row of {len(kept)} has a reward, so there is nothing to learn from. Fix the reward. If single "
                    "states may have none, raise num_states_per_iteration, or set reward.non_finite to 'zero'."
                )
            counts["rows/dropped"] += int(rows.sum())
            return with_each(rewards, lambda values: values[~rows]), kept.masked_scatter(kept, ~rows)
        case "zero":
            counts["rewards/zeroed"] += int(rows.sum())
            return with_each(
                rewards, lambda values: values.index_put((rows,), values[rows].nan_to_num(0.0, 0.0, 0.0))
            ), kept
        case _:
            assert_never(rule)


def _raise_for_missing(name: str, found: Kept, missing: Bool[Tensor, " K"], *, is_unanswered: bool) -> NoReturn:
    rewards, kept = found
    shown = rewards.values[missing][:4].tolist()
    parts = [key for key, part in rewards.components.items() if not bool(part[missing].isfinite().all())]
    whose = f", from {', '.join(parts)}" if parts else ""
    raise RewardError(
        f"{name} must return finite numbers; got {shown} at {_rows(kept, missing)}{whose}. "
        "Fix the reward, or set reward.non_finite to 'drop' or 'zero'."
        + (" For rows to which no part applies, set reward.not_applicable." if is_unanswered else "")
    )


def _raise_for_unanswered(
    name: str, rewards: Rewards, kept: Bool[Tensor, " N"], unanswered: Bool[Tensor, " K"]
) -> NoReturn:
    raise RewardError(
        f"{name} must give each row a reward; no part applies to {_rows(kept, unanswered)}, because "
        f"{', '.join(rewards.components)} returned None or NaN there. "
        "Return a number, or set reward.not_applicable to 'drop' or 'zero'."
    )


def _rows(kept: Bool[Tensor, " N"], chosen: Bool[Tensor, " K"]) -> str:
    rows = kept.nonzero().squeeze(1)[chosen].tolist()
    return f"rows {rows[:16]}{' ...' if len(rows) > 16 else ''} of {len(kept)}"
