"""Call a reward model, and handle its failures: retry, drop rows, and raise errors that name the function and its rows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo.config import RewardConfig
from grpo.errors import GRPOError, RewardError, RewardRaisedError
from grpo.reward_model_base import ReportsComponents, WeightedRewards, as_reward_model
from grpo.types import Rows, select_rows, zero_outside
from grpo.writing import as_rewards, describe, reward_name

from .batches import join_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """The rewards of K of N rows. The other rows have no reward and are removed from the batch."""

    values: Float[Tensor, " K"] | Float[Tensor, "K T"]
    """One reward per kept row, or one per step of a kept row."""
    components: dict[str, Float[Tensor, "K *T"]]
    """The named parts of the reward. Empty: the reward model reports no parts."""
    weights: dict[str, float]
    """The weight of each part. Empty: the weights are not known."""
    kept: Bool[Tensor, " N"] | None
    """True for the K kept rows. None: all N rows are kept."""
    metrics: dict[str, float]
    """The numbers of rows dropped, of rewards set to 0 and of retries."""


class RewardCalls:
    """Asks a reward model for rewards, and handles its failures as `RewardConfig` says.

    Args:
        reward_model: a `RewardModel`, or a plain `(states, actions) -> rewards`.
        config: what to do when the reward model raises, or returns NaN or infinity.
    """

    def __init__(self, reward_model: Any, config: RewardConfig) -> None:
        self.reward_model = as_reward_model(reward_model)
        self.config = config
        self._name = reward_name(self.reward_model)
        self._reports_components = isinstance(self.reward_model, ReportsComponents)
        self._weights = self.reward_model.weights if isinstance(self.reward_model, WeightedRewards) else {}
        self._num_retried = self._num_zeroed = 0

    def __call__(self, states: Rows, actions: Rows, mask: Bool[Tensor, "N T"] | None = None) -> Rewards:
        """The rewards of N rows. Rewards per step are set to 0 outside `mask`, if the valid steps are known.

        Raises:
            RewardError: the reward model raised (the error is chained), returned a wrong shape, or returned NaN or infinity,
                and `config` does not allow it.
        """
        self._num_retried = self._num_zeroed = 0
        self.reward_model.eval()
        kept = torch.ones(len(states), dtype=torch.bool)
        try:
            total, components = self._ask(states, actions)
        except RewardRaisedError as error:
            if self.config.on_failure == "raise":
                raise
            total, components, kept = self._ask_row_by_row(states, actions, mask, error)
        if total.dim() == 2 and mask is not None:
            mask = mask.cpu()[kept]
            if total.shape != mask.shape:
                raise RewardError(
                    f"Rewards per step must be {list(mask.shape)}, like the policy's steps; from {self._name} got "
                    f"{describe(total)}. Return one reward per step, or one per row."
                )
            total = zero_outside(total, mask)
        if not bool(total.isfinite().all()):
            total, components, kept = self._without_non_finite(total, components, kept)
        num_dropped = len(kept) - len(total)
        return Rewards(
            values=total,
            components=components,
            weights=self._weights,
            kept=kept if num_dropped else None,
            metrics={
                "rows/dropped": float(num_dropped),
                "rewards/zeroed": float(self._num_zeroed),
                "rewards/retries": float(self._num_retried),
            },
        )

    def _ask(self, states: Rows, actions: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """Get the total rewards and their parts with one call for all rows. Retry up to `num_retries` times if it raises."""
        while True:
            try:
                return self._call(states, actions)
            except GRPOError:
                raise
            except Exception as error:
                if self._num_retried == self.config.num_retries:
                    raise RewardRaisedError(
                        f"{self._name} raised {type(error).__name__}: {error} for rows 0 to {len(states) - 1}, in "
                        f"{self._num_retried + 1} call(s). Fix the reward, or set reward.num_retries or "
                        "reward.on_failure='drop'."
                    ) from error
                time.sleep(self.config.retry_delay * 2**self._num_retried)
                self._num_retried += 1

    def _call(self, states: Rows, actions: Rows, *, is_single: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Get the total rewards and their parts with one call. The rewards of a single row of one step may be [1, 1]."""

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
        """Get the total rewards and their parts with one call per row, and mark the rows whose call did not raise."""
        answers, kept = [], torch.zeros(len(states), dtype=torch.bool)
        for row in range(len(states)):
            one = slice(row, row + 1)
            try:
                answers.append(self._call(select_rows(states, one), select_rows(actions, one), is_single=True))
                kept[row] = True
            except GRPOError:  # a wrong shape is always an error
                raise
            except Exception as last:  # on_failure="drop" leaves the row out; the caller counts it as dropped
                error.__cause__ = last
        if not answers:
            raise RewardError(
                f"{self._name} raised for every one of {len(states)} rows. Fix the reward."
            ) from error.__cause__
        totals, parts = zip(*answers, strict=True)
        width = self._common_width(totals, None if mask is None else mask.cpu()[kept])
        components = {name: join_steps([part[name] for part in parts], width) for name in parts[0]}
        return join_steps(totals, width), components, kept

    def _common_width(self, totals: Sequence[Tensor], mask: Tensor | None) -> int:
        """Return the number of steps to which the step rewards of each row are padded. One reward per row is not padded."""
        if len({total.dim() for total in totals}) > 1:
            raise RewardError(
                f"{self._name} must return one reward per row, or one per step; for some rows it returned one number, and for "
                "others one per step. Return the same kind for every row."
            )
        widths = [total.shape[-1] for total in totals]
        if mask is None or totals[0].dim() == 1:
            return max(widths)
        for width, row in zip(widths, mask, strict=True):
            needed = int(row.nonzero().max()) + 1 if bool(row.any()) else 0
            if not needed <= width <= mask.shape[1]:
                raise RewardError(
                    f"{self._name} must return {needed} rewards for a row of {needed} steps, or up to {mask.shape[1]}; "
                    f"got {width}. Return one reward per step."
                )
        return mask.shape[1]

    def _without_non_finite(
        self, total: Tensor, components: dict[str, Tensor], kept: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Apply `config.non_finite` to NaN and infinite rewards. `kept` marks which of the N rows `total` has."""
        count = len(kept)
        finite = total.isfinite() if total.dim() == 1 else total.isfinite().all(1)
        match self.config.non_finite:
            case "raise":
                rows = kept.nonzero().squeeze(1)[~finite].tolist()
                shown = total[~finite][:4].tolist()
                parts = [name for name, part in components.items() if not bool(part[~finite].isfinite().all())]
                whose = f", from {', '.join(parts)}" if parts else ""
                raise RewardError(
                    f"{self._name} must return finite numbers; got {shown} at rows {rows[:16]}"
                    f"{' ...' if len(rows) > 16 else ''} of {count}{whose}. "
                    f"Fix the reward, or set reward.non_finite to 'drop' or 'zero'."
                )
            case "drop":
                if not finite.any():
                    raise RewardError(
                        f"{self._name}: no row of {count} has a reward, so there is nothing to learn from. Fix the reward."
                    )
                components = {name: part[finite] for name, part in components.items()}
                return total[finite], components, kept.masked_scatter(kept, finite)
            case "zero":
                self._num_zeroed = int((~finite).sum())
                components = {
                    name: part.index_put((~finite,), part[~finite].nan_to_num(0.0, 0.0, 0.0))
                    for name, part in components.items()
                }
                return total.nan_to_num(0.0, 0.0, 0.0), components, kept
            case _:
                assert_never(self.config.non_finite)
