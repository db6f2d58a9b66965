"""Call a reward model, and handle what it returns: rows without a reward leave the batch, and errors name function and rows."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo._common.conversion import reward_name
from grpo.config import RewardConfig
from grpo.engine import CallsInProcess, OneProcess
from grpo.errors import ConfigError, DeadlineError, RewardError, RewardRaisedError, RewardTimeoutError
from grpo.metrics import add_counts_and_sums
from grpo.reward_model_base import Rewards, as_reward_model
from grpo.types import Rows, zero_outside

from .answers import AskedRows, CheckedCall, is_failed_call
from .missing import Kept, causes_of, with_each, without_missing

MISTAKES = (TypeError, NameError, AttributeError, KeyError, ImportError)
"""Errors of the program. If the first calls raise nothing else, waiting does not help."""
Waiting = Callable[[float, str], AbstractContextManager[object]]
"""Takes a number of seconds and a reason, and returns a block in which this process may wait for so long."""
COUNTED = ("rows/dropped", "rewards/zeroed", "rewards/retries", "rewards/failed_calls", "rewards/timeouts")
"""Metrics that add up over a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRewards:
    """The rewards of K of N rows. The other rows have no reward and are removed from the batch."""

    values: Float[Tensor, " K"] | Float[Tensor, "K T"]
    """One reward per kept row, or one per step of a kept row."""
    components: Mapping[str, Float[Tensor, "K *T"]]
    """The named parts of the reward. Empty: the reward model reports no parts."""
    weights: Mapping[str, float]
    """The weight of each part. Empty: the weights are not known."""
    kept: Bool[Tensor, " N"] | None
    """True for the K kept rows. None: all N rows are kept."""
    metrics: dict[str, float]
    """`RewardCalls.counts` after the call."""


class RewardCalls:
    """Asks a reward model for rewards, and counts what fails. A failed call is an error, except in a run, which has patience.

    Args:
        reward_model: A `RewardModel`, or a plain `(states, actions) -> rewards`.
        config: What to do when a reward is NaN or infinite, and the limits of a call.
        waiting: Tells the other ranks that this process waits. None: there are no other ranks.

    Raises:
        ConfigError: `config` asks for what only a run does (retries, dropped rows after a failed call, another process for
            `timeout`), or the reward model cannot run in another process.
    """

    in_process: ClassVar[CallsInProcess | None] = None  # nobody makes calls in another process

    def __init__(self, reward_model: Any, config: RewardConfig, *, waiting: Waiting | None = None) -> None:
        self._require_supported(config)
        self.reward_model = as_reward_model(reward_model)
        self.config = config
        self._name = reward_name(self.reward_model)
        self._call = CheckedCall(
            self.reward_model, timeout=config.timeout, max_concurrent=config.max_concurrent, in_process=self.in_process
        )
        self._waiting = waiting or OneProcess().waiting
        self._only_mistakes = True
        """Whether each call so far has raised an error of the program."""
        self.counts = dict.fromkeys(COUNTED, 0.0)
        """Failures, by metric name, that have not been reported yet."""
        self.measured: dict[str, tuple[float, float]] = {}
        """(count, sum) of the reward model's own metrics, by name, that have not been reported yet."""

    def __call__(
        self,
        states: Rows,
        actions: Rows,
        mask: Bool[Tensor, "N T"] | None = None,
        *,
        group_ids: Int[Tensor, " N"] | None = None,
        keep_counts: bool = False,
    ) -> KeptRewards:
        """The rewards of N rows. Rewards per step are set to 0 outside `mask`, if the valid steps are known. Only infinite ones
        stay in a row without a valid step: the row has no reward, and there is no step to say so.

        Args:
            states: N states.
            actions: N actions.
            mask: The valid steps. None: they are not known.
            group_ids: The group of each row, for a reward model that compares the actions of a group. None: not known.
            keep_counts: Go on counting. If False, the next call counts from 0, unless this call raises.

        Raises:
            ConfigError: The reward model compares actions, and there are no group ids.
            RewardError: The reward model raised (the error is chained), returned a wrong shape, or returned NaN or infinity,
                and `config` does not allow it.
        """
        # before every call: rewards of a network with dropout on are noisy, and nothing says so
        self.reward_model.eval()
        if self._call.compares_actions and group_ids is None:
            raise ConfigError(
                f"{self._name} compares the actions of a group, so the call needs group_ids=...; got None."
            )
        rows = AskedRows(states=states, actions=actions, mask=None if mask is None else mask.cpu(), group_ids=group_ids)
        rewards, kept = self._ask(rows)
        num_kept = int(kept.sum())
        if not num_kept:
            raise RewardError(
                f"{self._name} must give at least one row a reward; it lost those of all {len(kept)} rows. Look at what it "
                "depends on, such as a server or a worker."
            )
        self.counts["rows/dropped"] += len(kept) - num_kept
        if rewards.values.dim() == 2 and mask is not None:
            own = mask.cpu()[kept]
            is_fault = rewards.values.isinf() & ~own.any(1, keepdim=True)
            rewards = replace(rewards, values=zero_outside(rewards.values, own | is_fault))
        if not bool(rewards.values.isfinite().all()):
            try:
                rewards, kept = without_missing(self._name, (rewards, kept), self.config, self.counts)
            except RewardError as error:
                raise RewardError(" ".join([str(error), *causes_of(self.reward_model, states, actions)])) from None
        metrics = dict(self.counts)
        if not keep_counts:
            self.forget_counts()
        return KeptRewards(
            values=rewards.values,
            components=rewards.components,
            weights=rewards.weights,
            kept=None if bool(kept.all()) else kept,
            metrics=metrics,
        )

    def forget_counts(self) -> None:
        """Count from 0 again, because the counts have been reported."""
        self.counts = dict.fromkeys(COUNTED, 0.0)
        self.measured = {}

    def _require_supported(self, config: RewardConfig) -> None:
        """Refuse settings that need the patience of a run."""
        if config.num_retries > 0 or config.on_failure != "raise":
            raise ConfigError(
                f"reward.num_retries={config.num_retries} and reward.on_failure={config.on_failure!r}: only GRPOTrainer asks "
                "again for rewards. Use GRPOTrainer, or set num_retries=0 and on_failure='raise'."
            )

    def _ask(self, rows: AskedRows) -> Kept:
        """Get the rewards, and the rows that have them."""
        try:
            return self._without_lost(self._attempt(rows))
        except Exception as error:
            if not is_failed_call(error):
                raise
            self._raise_for(error, len(rows), num_calls=1)

    def _attempt(self, rows: AskedRows, *, is_part: bool = False) -> Rewards:
        """Make one call, and count it if it fails."""
        try:
            with self._limited(len(rows)):
                rewards = self._call(rows, is_part=is_part)
        except Exception as error:
            if is_failed_call(error):
                self.counts["rewards/failed_calls"] += 1
                self.counts["rewards/timeouts"] += isinstance(error, DeadlineError)
                self._only_mistakes &= isinstance(error, MISTAKES)
            raise
        self._only_mistakes = False
        self.measured = add_counts_and_sums([self.measured, rewards.metrics])
        return rewards

    def _limited(self, num_rows: int) -> AbstractContextManager[object]:
        """A block for a call that ends by its deadline. At worst, the rows are awaited one after another."""
        if (timeout := self.config.timeout) is None:
            return nullcontext()
        return self._waiting(timeout * num_rows, f"{self._name} answers within reward.timeout={timeout:g} s per call")

    def _raise_for(self, error: Exception, num_rows: int, num_calls: int) -> NoReturn:
        """Raise a RewardError for the last failed call for all rows."""
        if isinstance(error, RewardError):
            raise error
        kind, what = RewardRaisedError, f"{self._name} raised {type(error).__name__}: {error}"
        if isinstance(error, DeadlineError):
            kind, what = RewardTimeoutError, f"{self._name} exceeded reward.timeout={self.config.timeout:g}: {error}"
        remedy = "Fix the reward, or set reward.num_retries or reward.on_failure='drop'."
        if self._only_mistakes:
            remedy = "Fix the reward: this is an error of the program, and no call has succeeded yet."
        raise kind(f"{what} for rows 0 to {num_rows - 1}, in {num_calls} call(s). {remedy}") from error

    def _without_lost(self, rewards: Rewards) -> Kept:
        """The rewards of the rows that have one, and a mask of these rows."""
        if not rewards.lost:
            return rewards, torch.ones(len(rewards.values), dtype=torch.bool)
        kept = ~self._lost_rows(rewards)
        return with_each(rewards, lambda values: values[kept]), kept

    def _lost_rows(self, rewards: Rewards) -> Bool[Tensor, " N"]:
        """Mark the rows whose reward was lost, and count them by reason."""
        lost = torch.zeros(len(rewards.values), dtype=torch.bool)
        for name, rows in rewards.lost.items():
            self.counts[name] = self.counts.get(name, 0.0) + int(rows.sum())
            lost |= rows
        return lost
