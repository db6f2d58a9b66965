"""One call of a reward model: its answer is checked, and answers for parts of the rows are joined."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo._common.conversion import as_rewards, describe
from grpo.errors import CallError, DeadlineError, GRPOError, RewardError
from grpo.reward_model_base import ReportsComponents, compares_actions
from grpo.types import Rows, select_rows

from .batches import join_steps

Answer = tuple[Tensor, dict[str, Tensor]]
"""Total rewards, and the named parts of the rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRows:
    """The rows of a call of a reward model."""

    states: Rows
    """N states."""
    actions: Rows
    """N actions."""
    mask: Tensor | None
    """The valid steps, [N, T]. None: they are not known."""
    group_ids: Tensor | None
    """The group of each row. None: it is not known."""

    def part(self, rows: Tensor) -> "AskedRows":
        """Some of the rows."""
        return AskedRows(
            states=select_rows(self.states, rows),
            actions=select_rows(self.actions, rows),
            mask=None if self.mask is None else self.mask[rows],
            group_ids=None if self.group_ids is None else self.group_ids[rows],
        )

    def __len__(self) -> int:
        return len(self.states)


class CheckedCall:
    """Calls a reward model once, and checks what it returns.

    Args:
        reward_model: a `RewardModel`.
        name: its name in messages.
    """

    def __init__(self, reward_model: Any, name: str) -> None:
        self._reward_model, self._name = reward_model, name
        self._reports_components = isinstance(reward_model, ReportsComponents)
        self.compares_actions = compares_actions(reward_model)
        """Whether a row's reward depends on the other rows of its group."""

    def __call__(self, rows: AskedRows, *, is_part: bool = False) -> Answer:
        """Get the total rewards and their parts with one call. The rewards of a part of one row and one step may be [1, 1]."""
        model = self._reward_model.in_groups(rows.group_ids) if self.compares_actions else self._reward_model

        def checked(owner: str, value: Any) -> Tensor:
            return as_rewards(owner, value, len(rows), one_step_is_a_step=is_part)

        components = {}
        if self._reports_components:
            parts = model.compute_components(rows.states, rows.actions)
            if not isinstance(parts, Mapping):
                raise RewardError(
                    f"{self._name}: compute_components must return a dict of rewards by name; got {describe(parts)}."
                )
            components = {name: checked(f"{self._name}[{name!r}]", part) for name, part in parts.items()}
            total = checked(self._name, model.combine(components))
        else:
            total = checked(self._name, model.compute_rewards(rows.states, rows.actions))
        if rows.mask is not None and total.dim() == 2:
            self._require_steps(total, rows.mask, is_part=is_part)
        return total, components

    def _require_steps(self, total: Tensor, mask: Tensor, *, is_part: bool) -> None:
        """Check that rewards per step have the policy's steps. A part of the rows may leave out what is masked at its end."""
        if not is_part and total.shape != mask.shape:
            raise RewardError(
                f"Rewards per step must be {list(mask.shape)}, like the policy's steps; from {self._name} got "
                f"{describe(total)}. Return one reward per step, or one per row."
            )
        needed, width = int(mask.any(0).nonzero().max()) + 1 if bool(mask.any()) else 0, total.shape[1]
        if not needed <= width <= mask.shape[1]:
            raise RewardError(
                f"{self._name} must return {needed} rewards for a row of {needed} steps, or up to {mask.shape[1]}; "
                f"got {width}. Return one reward per step."
            )

    def join(self, answers: Sequence[Answer], mask: Tensor | None) -> Answer:
        """Join the answers for parts of the rows, which are of one kind. Rewards per step are padded to the steps of the mask.

        Raises:
            RewardError: every row has one reward per step, and one step.
        """
        totals, parts = zip(*answers, strict=True)
        width = max(total.shape[-1] for total in totals) if mask is None else mask.shape[1]
        total = join_steps(totals, width)
        return as_rewards(self._name, total, len(total)), {
            name: join_steps([part[name] for part in parts], width) for name in parts[0]
        }

    def smallest_parts(self, rows: AskedRows) -> list[Tensor]:
        """The rows of each smallest part that can be rewarded by itself: a group if actions are compared, else one row."""
        if not self.compares_actions or rows.group_ids is None:
            return [*torch.arange(len(rows)).split(1)]
        counts = rows.group_ids.unique(return_counts=True)[1]
        return [*rows.group_ids.argsort(stable=True).split(counts.tolist())]


def is_failed_call(error: Exception) -> bool:
    """Whether an error is a failure of the reward model. Any other error of this package has another reason."""
    return isinstance(error, RewardError | DeadlineError | CallError) or not isinstance(error, GRPOError)


def spread(num_parts: int) -> list[int]:
    """All parts, in an order in which neighbours are far apart, so that a few parts in a row are a sample of all groups."""
    golden_ratio = (math.sqrt(5) - 1) / 2
    return sorted(range(num_parts), key=lambda part: part * golden_ratio % 1)


def kind_of(answer: Answer) -> Hashable:
    """The names of the parts, and whether there is one reward per row or one per step. Only equal kinds can be joined."""
    total, components = answer
    return total.dim(), *sorted((name, part.dim()) for name, part in components.items())
