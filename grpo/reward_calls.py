"""Calling a reward model that may fail: retries, rows left out, and errors that name the function and its rows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .coercion import as_rewards, describe, pad_steps
from .errors import GRPOError, RewardError, RewardRaisedError
from .reward_model_base import ReportsComponents, WeightedRewards, as_reward_model, reward_name
from .settings import Settings, setting
from .types import Rows, select_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(Settings):
    """What happens when a reward cannot be had."""

    non_finite: Literal["raise", "drop", "zero"] = "raise"
    """A NaN or infinite reward: an error; its row leaves the batch and its group's statistics; or it counts as 0."""
    on_failure: Literal["raise", "drop"] = "raise"
    """The reward model raised, and raised again on every retry: an error; or the rows are asked for one by one,
    and those that still raise leave the batch."""
    num_retries: int = setting(0, at_least=0)
    """Calls made again after one that raised. Larger: outlasts longer outages, hides real bugs for longer."""
    retry_delay: float = setting(1.0, at_least=0.0)
    """Seconds before the first retry; doubles with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of the rows that have one."""

    values: Float[Tensor, " K"] | Float[Tensor, "K T"]
    """K rewards, one per kept row."""
    components: dict[str, Float[Tensor, "K *T"]]
    """Named parts, where the reward model reports them."""
    weights: dict[str, float]
    """What each part is weighed with, where that is known."""
    kept: Bool[Tensor, " N"] | None
    """Which of the N rows these are; None: all."""
    metrics: dict[str, float]
    """Rows dropped, rewards set to zero, calls made again."""


class RewardCalls:
    """A reward model with the failure policy of `RewardConfig`.

    Args:
        reward_model: a `RewardModel`, or a plain `(states, actions) -> rewards`.
        config: what to do when it fails.
    """

    def __init__(self, reward_model: Any, config: RewardConfig) -> None:
        self.reward_model = as_reward_model(reward_model)
        self.config = config
        self._name = reward_name(self.reward_model)
        self._reports_components = isinstance(self.reward_model, ReportsComponents)
        self._weights = self.reward_model.weights if isinstance(self.reward_model, WeightedRewards) else {}
        self._num_retried = 0

    def __call__(self, states: Rows, actions: Rows, mask: Bool[Tensor, "N T"] | None = None) -> Rewards:
        """Rewards of N rows.

        Args:
            states: N states.
            actions: N actions.
            mask: which steps count, where that is known: what rewards per step hold elsewhere is not looked at.

        Raises:
            RewardError: the reward model raised (chained), returned the wrong shape, or a number that is not finite,
                and `config` does not say otherwise.
        """
        self._num_retried = 0
        self.reward_model.eval()
        count = len(states)
        kept = None
        try:
            total, components = self._ask(states, actions)
        except RewardRaisedError as error:
            if self.config.on_failure == "raise":
                raise
            total, components, kept = self._ask_row_by_row(states, actions, mask, error)
        if total.dim() == 2 and mask is not None:
            total = _on_mask(self._name, total, mask if kept is None else mask[kept.to(mask.device)])
        if bool(total.isfinite().all()):
            return self._rewards(total, components, kept, count, num_zeroed=0)
        return self._mend(total, components, torch.ones(count, dtype=torch.bool) if kept is None else kept)

    def _mend(self, total: Tensor, components: dict[str, Tensor], kept: Tensor) -> Rewards:
        """What `config.non_finite` says of rewards that are not finite; `kept` says whose rows they are."""
        count = len(kept)
        finite = total.isfinite() if total.dim() == 1 else total.isfinite().all(1)
        match self.config.non_finite:
            case "raise":
                rows = kept.nonzero().squeeze(1)[~finite].tolist()
                shown = [total[i].tolist() for i in (~finite).nonzero().squeeze(1)[:4].tolist()]
                parts = [name for name, part in components.items() if not bool(part[~finite].isfinite().all())]
                whose = f", from {', '.join(parts)}" if parts else ""
                raise RewardError(
                    f"{self._name} must return finite numbers; got {shown} at rows {rows[:16]}"
                    f"{' ...' if len(rows) > 16 else ''} of {count}{whose}. "
                    f"Mend the reward, or set reward.non_finite to 'drop' or 'zero'."
                )
            case "drop":
                if not finite.any():
                    raise RewardError(
                        f"{self._name}: no row of {count} has a reward, so there is nothing to learn from."
                    )
                kept = kept.masked_scatter(kept, finite)
                components = {name: part[finite] for name, part in components.items()}
                return self._rewards(total[finite], components, kept, count, num_zeroed=0)
            case "zero":
                mended = total.nan_to_num(0.0, 0.0, 0.0)
                components = {
                    name: part.masked_scatter(~finite, part[~finite].nan_to_num(0.0, 0.0, 0.0))
                    for name, part in components.items()
                }
                return self._rewards(mended, components, kept, count, num_zeroed=int((~finite).sum()))
            case _:
                assert_never(self.config.non_finite)

    def _rewards(
        self, total: Tensor, components: dict[str, Tensor], kept: Tensor | None, count: int, *, num_zeroed: int
    ) -> Rewards:
        metrics = {
            "rows/dropped": float(count - len(total)),
            "rewards/zeroed": float(num_zeroed),
            "rewards/retries": float(self._num_retried),
        }
        return Rewards(
            values=total,
            components=components,
            weights=self._weights,
            kept=kept if len(total) < count else None,
            metrics=metrics,
        )

    def _ask(self, states: Rows, actions: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """One call for all rows, made again `num_retries` times if it raises."""
        for attempt in range(self.config.num_retries + 1):
            try:
                return self._call(states, actions)
            except GRPOError:
                raise
            except Exception as error:
                if attempt < self.config.num_retries:
                    self._num_retried += 1
                    time.sleep(self.config.retry_delay * 2**attempt)
                    continue
                raise RewardRaisedError(
                    f"{self._name} raised {type(error).__name__}: {error} for rows 0 to {len(states) - 1}, in {attempt + 1} "
                    "call(s). Mend it, or set reward.num_retries or reward.on_failure='drop'."
                ) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _call(self, states: Rows, actions: Rows, *, is_single: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Total and components; a single row of one step may be [1, 1]."""

        def checked(owner: str, value: Any) -> Tensor:
            return as_rewards(owner, value, len(states), one_step_is_a_step=is_single)

        if not self._reports_components:
            return checked(self._name, self.reward_model.compute_rewards(states, actions)), {}
        components = {
            name: checked(f"{self._name}[{name!r}]", part)
            for name, part in self.reward_model.compute_components(states, actions).items()
        }
        return checked(self._name, self.reward_model.combine(components)), components

    def _ask_row_by_row(
        self, states: Rows, actions: Rows, mask: Tensor | None, error: RewardRaisedError
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Rows that raise alone too are left out; what is returned in a wrong shape is an error still."""
        answers, kept = [], torch.zeros(len(states), dtype=torch.bool)
        for row in range(len(states)):
            one = slice(row, row + 1)
            try:
                answers.append(self._call(select_rows(states, one), select_rows(actions, one), is_single=True))
                kept[row] = True
            except GRPOError:
                raise
            except Exception as last:  # counted by the caller as dropped: that is what on_failure="drop" asks for
                error.__cause__ = last
        if not answers:
            raise RewardError(f"{self._name} raised for every one of {len(states)} rows.") from error.__cause__
        totals, parts = zip(*answers, strict=True)
        width = self._common_width(totals, None if mask is None else mask[kept.to(mask.device)].cpu())
        return _join(totals, width), {name: _join([part[name] for part in parts], width) for name in parts[0]}, kept

    def _common_width(self, totals: Sequence[Tensor], mask: Tensor | None) -> int:
        """How many steps rows asked for one by one are padded to; 0 for one number per row."""
        if len({total.dim() for total in totals}) > 1:
            raise RewardError(f"{self._name} gave one number for some rows, and one per step for others: choose one.")
        if totals[0].dim() == 1:
            return 0
        widths = [total.shape[1] for total in totals]
        if mask is None:
            return max(widths)
        decided = [int(row.nonzero().max()) + 1 if bool(row.any()) else 0 for row in mask]
        for width, needed in zip(widths, decided, strict=True):
            if not needed <= width <= mask.shape[1]:
                raise RewardError(
                    f"{self._name} must give a row of {needed} steps as many rewards, or up to {mask.shape[1]}; got {width}."
                )
        return mask.shape[1]


def _on_mask(owner: str, rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards per step, 0 off the mask."""
    if rewards.shape != mask.shape:
        raise RewardError(
            f"Rewards per step must be {list(mask.shape)}, like the policy's steps; from {owner} got {describe(rewards)}."
        )
    return torch.where(mask.to(rewards.device), rewards, 0.0)


def _join(parts: Sequence[Tensor], width: int) -> Tensor:
    """Rows asked for one by one, as one tensor; rewards per step are padded to `width`."""
    return torch.cat([pad_steps(part, width, 0.0) if part.dim() == 2 else part for part in parts])
