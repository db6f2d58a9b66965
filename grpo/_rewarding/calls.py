"""Call a reward model, and handle its failures: retry, drop rows, and raise errors that name the function and its rows."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NoReturn, assert_never

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

from .answers import AskedRows, CheckedCall, is_failed_call, kind_of, spread
from .missing import Kept, causes_of, with_each, without_missing
from .retries import Retries

MISTAKES = (TypeError, NameError, AttributeError, KeyError, ImportError)
"""Errors of the program. If the first calls raise nothing else, waiting does not help."""
NUM_TRIALS = 3
"""Number of failed trials in a row after which training stops."""
SECONDS_WITHOUT_ANSWER = 60.0
"""How long rows are asked one by one while none of them answers and the breaker is open."""
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


class _OutageError(RewardError):
    """Every row failed when it was asked by itself, or the breaker opened during retries. `RewardCalls` handles this error."""


class RewardCalls:
    """Asks a reward model for rewards, and handles its failures as `RewardConfig` says.

    Args:
        reward_model: A `RewardModel`, or a plain `(states, actions) -> rewards`.
        config: What to do when a call of the reward model fails, or returns NaN or infinity.
        in_process: Makes calls in another process, for `config.timeout`. None: nobody does.
        waiting: Tells the other ranks that this process waits. None: there are no other ranks.
        clock: Returns seconds.
        sleep: Waits for some seconds.

    Raises:
        ConfigError: `config.timeout` is set, and the reward model cannot run in another process.
    """

    def __init__(
        self,
        reward_model: Any,
        config: RewardConfig,
        *,
        in_process: CallsInProcess | None = None,
        waiting: Waiting | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.reward_model = as_reward_model(reward_model)
        self.config = config
        self._name = reward_name(self.reward_model)
        self._call = CheckedCall(
            self.reward_model, timeout=config.timeout, max_concurrent=config.max_concurrent, in_process=in_process
        )
        self._clock, self.sleep = clock, sleep
        self._waiting = waiting or OneProcess().waiting
        pause = partial(self._pause, reason=f"{self._name} fails, and is called again after reward.breaker_seconds")
        self._retries = Retries(self._name, config, clock=self._clock, sleep=pause)
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
        """The rewards of N rows. Rewards per step are set to 0 outside `mask`, if the valid steps are known.

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
        rewards, kept = self._ask_with_breaker(rows)
        if not bool(kept.any()):
            raise RewardError(
                f"{self._name} must give at least one row a reward; it lost those of all {len(kept)} rows. Look at what it "
                "depends on, such as a server or a worker."
            )
        self.counts["rows/dropped"] += int((~kept).sum())
        if rewards.values.dim() == 2 and mask is not None:
            rewards = replace(rewards, values=zero_outside(rewards.values, mask.cpu()[kept]))
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

    def _ask_with_breaker(self, rows: AskedRows) -> Kept:
        """Get the rewards, and the rows that have them. Wait while the breaker is open."""
        num_trials = 0
        while True:
            is_trial = self._retries.is_open
            self._retries.wait()
            try:
                return self._ask(rows, () if is_trial else self._retries.delays())
            except RewardError as error:
                if not is_trial and not isinstance(error, _OutageError):
                    raise
                num_trials += is_trial
                if num_trials == NUM_TRIALS:
                    raise RewardError(
                        f"{error} These were the last of {self._retries.num_failed} failed calls in a row, with "
                        f"{NUM_TRIALS} trials {self.config.breaker_seconds:g} s apart (reward.breaker_seconds)."
                    ) from error.__cause__ or error

    def _ask(self, rows: AskedRows, delays: Iterable[float]) -> Kept:
        """Get the rewards with a call for all rows, or else as `on_failure` says."""
        try:
            rewards = self._ask_all_rows(rows, delays)
            kept = ~self._lost_rows(rewards)
            return with_each(rewards, lambda values: values[kept]), kept
        except _OutageError:
            raise
        except RewardError as failure:
            match self.config.on_failure:
                case "raise":
                    raise
                case "drop":
                    return self._ask_part_by_part(rows, failure)
                case _:
                    assert_never(self.config.on_failure)

    def _ask_all_rows(self, rows: AskedRows, delays: Iterable[float]) -> Rewards:
        """Get the rewards with one call for all rows, with a retry after each delay."""
        left = iter(delays)
        for num_calls in count(1):
            try:
                return self._attempt(rows)
            except Exception as error:
                if not is_failed_call(error):
                    raise
                delay = None if self._only_mistakes else next(left, None)
                if delay is None:
                    self._raise_for(error, len(rows), num_calls)
                if self._retries.is_open:  # trials take the place of the retries that are left
                    raise _OutageError(str(error)) from error
            self._pause(delay, f"{self._name} failed, and is called again later (reward.num_retries)")
            self.counts["rewards/retries"] += 1
        raise AssertionError  # count() never ends

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
                # waiting does not help against an error of the program, so that the breaker does not count it
                if not self._only_mistakes:
                    self._retries.fail(error)
            raise
        self._only_mistakes = False
        self._retries.succeed()
        self.measured = add_counts_and_sums([self.measured, rewards.metrics])
        return rewards

    def _limited(self, num_rows: int) -> AbstractContextManager[object]:
        """A block for a call that ends by its deadline. At worst, the rows are awaited one after another."""
        if (timeout := self.config.timeout) is None:
            return nullcontext()
        return self._waiting(timeout * num_rows, f"{self._name} answers within reward.timeout={timeout:g} s per call")

    def _pause(self, seconds: float, reason: str) -> None:
        with self._waiting(seconds, reason):
            self.sleep(seconds)

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

    def _ask_part_by_part(self, rows: AskedRows, failure: RewardError) -> Kept:
        """Get the rewards with one call per row, or per group if the reward compares actions. A failed call gives none."""
        parts = self._call.smallest_parts(rows)
        answers: dict[int, Rewards] = {}
        lost = torch.zeros(len(rows), dtype=torch.bool)
        last: Exception = failure
        start = self._clock()
        for place in spread(len(parts)):
            try:
                answers[place] = self._attempt(rows.part(parts[place]), is_part=True)
                lost[parts[place]] = self._lost_rows(answers[place])
            except Exception as error:  # on_failure="drop" leaves the rows out; the caller counts them as dropped
                if not is_failed_call(error):
                    raise
                last = error
            if not answers and self._retries.is_open and self._clock() - start >= SECONDS_WITHOUT_ANSWER:
                break  # parts that hang one after another
        if self._only_mistakes:
            raise failure
        if not answers:
            what = "group" if self._call.compares_actions else "row"
            raise _OutageError(
                f"{failure} When the rows were asked {what} by {what}, {self._name} failed for every one of {len(rows)} rows, "
                f"the last time with {type(last).__name__}: {last}"
            ) from last
        self._retries.succeed()  # rows that fail at the end do not make the next iteration wait
        kinds = Counter(map(kind_of, answers.values()))
        answers = {place: answer for place, answer in answers.items() if kind_of(answer) == kinds.most_common(1)[0][0]}
        self.counts["rewards/failed_calls"] += kinds.total() - len(answers)  # parts unlike the others
        answered = torch.cat([parts[place] for place in sorted(answers)])
        joined = self._call.join([answers[place] for place in sorted(answers)], rows.mask)
        answered, order = answered.sort()
        is_left = ~lost[answered]
        kept = torch.zeros(len(rows), dtype=torch.bool).index_fill_(0, answered[is_left], True)
        return with_each(joined, lambda values: values[order[is_left]]), kept

    def _lost_rows(self, rewards: Rewards) -> Bool[Tensor, " N"]:
        """Mark the rows whose reward was lost, and count them by reason."""
        lost = torch.zeros(len(rewards.values), dtype=torch.bool)
        for name, rows in rewards.lost.items():
            self.counts[name] = self.counts.get(name, 0.0) + int(rows.sum())
            lost |= rows
        return lost
