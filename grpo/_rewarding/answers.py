"""One call of a reward model within limits, and the check of its answer."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from grpo._common.conversion import as_rewards, describe, reward_name
from grpo.engine import CallsInProcess
from grpo.errors import CallError, DeadlineError, GRPOError, RewardError
from grpo.reward_model_base import Rewards
from grpo.types import Rows, select_rows

from .parts import ask, compares_actions, require_killable


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


def checked(owner: str, answer: Any, num_rows: int, *, one_step_is_a_step: bool = False) -> Rewards:
    """What a reward model returned, as the `Rewards` of N rows.

    Raises:
        RewardError: The answer, or a part of it, is not one number per row or per step.
    """
    if not isinstance(answer, Rewards):
        return Rewards(values=as_rewards(owner, answer, num_rows, one_step_is_a_step=one_step_is_a_step))
    values = as_rewards(owner, answer.values, num_rows, one_step_is_a_step=one_step_is_a_step)
    return replace(answer, values=values)  # the parts have the shape of the values


class CheckedCall:
    """Asks a reward model once, within limits, and checks what it returns.

    Args:
        reward_model: A `RewardModel`.
        timeout: Seconds per call of each part. None: no deadline.
        max_concurrent: Largest number of calls that are awaited at the same time.
        in_process: Makes calls in another process. None: nobody does.

    Raises:
        ConfigError: `timeout` is given, and a part cannot run in another process.
    """

    def __init__(
        self, reward_model: Any, *, timeout: float | None, max_concurrent: int, in_process: CallsInProcess | None
    ) -> None:
        require_killable(reward_model, timeout, has_processes=in_process is not None)
        self._reward_model, self._name = reward_model, reward_name(reward_model)
        self._ask = partial(ask, timeout=timeout, max_concurrent=max_concurrent, in_process=in_process)
        self.compares_actions = compares_actions(reward_model)
        """Whether a row's reward depends on the other rows of its group."""

    def __call__(self, rows: AskedRows, *, is_part: bool = False) -> Rewards:
        """Get the rewards of rows. The rewards of a part of one row and one step may be [1, 1]."""
        model = self._reward_model.in_groups(rows.group_ids) if self.compares_actions else self._reward_model
        answer = self._ask(model, rows.states, rows.actions)
        found = checked(self._name, answer, len(rows), one_step_is_a_step=is_part)
        if rows.mask is not None and found.values.dim() == 2:
            self._require_steps(found.values, rows.mask, is_part=is_part)
        return found

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


def is_failed_call(error: Exception) -> bool:
    """Whether an error is a failure of the reward model. Any other error of this package has another reason."""
    return isinstance(error, RewardError | DeadlineError | CallError) or not isinstance(error, GRPOError)
