"""Ask a reward model with the patience of a run: retry, wait for a service that is down, and drop rows that fail."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any, ClassVar, assert_never

import torch

from grpo._processes.calls import call_in_process
from grpo._rewarding.answers import AskedRows, is_failed_call
from grpo._rewarding.calls import RewardCalls, Waiting
from grpo._rewarding.missing import Kept, with_each
from grpo.config import RewardConfig
from grpo.engine import CallsInProcess
from grpo.errors import RewardError
from grpo.reward_model_base import Rewards

from .part_by_part import joined, kind_of, smallest_parts, spread
from .retries import Retries, sleep_and_tell

NUM_TRIALS = 3
"""Number of failed trials in a row after which training stops."""
SECONDS_WITHOUT_ANSWER = 60.0
"""How long rows are asked one by one while none of them answers and the breaker is open."""


class _OutageError(RewardError):
    """Every row failed when it was asked by itself, or the breaker opened during retries. `RetriedCalls` handles this error."""


class RetriedCalls(RewardCalls):
    """Asks a reward model for rewards, and handles its failures as `RewardConfig` says.

    Args:
        reward_model: A `RewardModel`, or a plain `(states, actions) -> rewards`.
        config: What to do when a call of the reward model fails, or returns NaN or infinity.
        waiting: Tells the other ranks that this process waits. None: there are no other ranks.
        clock: Returns seconds.
        sleep: Waits for some seconds, given the name of the function and its last error. The default also logs them.

    Raises:
        ConfigError: `config.timeout` is set, and the reward model cannot run in another process.
    """

    in_process: ClassVar[CallsInProcess | None] = staticmethod(call_in_process)

    def __init__(
        self,
        reward_model: Any,
        config: RewardConfig,
        *,
        waiting: Waiting | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float, str, str], None] = sleep_and_tell,
    ) -> None:
        super().__init__(reward_model, config, waiting=waiting)
        self._clock, self.sleep = clock, sleep
        pause = partial(self._pause, reason=f"{self._name} fails, and is called again after reward.breaker_seconds")
        self._retries = Retries(self._name, config, clock=clock, sleep=pause)

    def _require_supported(self, config: RewardConfig) -> None:
        """Every setting is supported."""

    def _ask(self, rows: AskedRows) -> Kept:
        """Get the rewards, and the rows that have them. Wait while the breaker is open."""
        num_trials = 0
        while True:
            is_trial = self._retries.is_open
            self._retries.wait()
            try:
                return self._ask_once(rows, () if is_trial else self._retries.delays())
            except RewardError as error:
                if not is_trial and not isinstance(error, _OutageError):
                    raise
                num_trials += is_trial
                if num_trials == NUM_TRIALS:
                    raise RewardError(
                        f"{error} These were the last of {self._retries.num_failed} failed calls in a row, with "
                        f"{NUM_TRIALS} trials {self.config.breaker_seconds:g} s apart (reward.breaker_seconds)."
                    ) from error.__cause__ or error

    def _ask_once(self, rows: AskedRows, delays: Iterable[float]) -> Kept:
        """Get the rewards with a call for all rows, or else as `on_failure` says."""
        try:
            return self._without_lost(self._ask_all_rows(rows, delays))
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
        """Make one call. The breaker counts it if it fails."""
        try:
            rewards = super()._attempt(rows, is_part=is_part)
        except Exception as error:
            # waiting does not help against an error of the program, so that the breaker does not count it
            if is_failed_call(error) and not self._only_mistakes:
                self._retries.fail(error)
            raise
        self._retries.succeed()
        return rewards

    def _pause(self, seconds: float, reason: str) -> None:
        with self._waiting(seconds, reason):
            self.sleep(seconds, self._name, self._retries.last_error)

    def _ask_part_by_part(self, rows: AskedRows, failure: RewardError) -> Kept:
        """Get the rewards with one call per row, or per group if the reward compares actions. A failed call gives none."""
        parts = smallest_parts(rows, compares_actions=self._call.compares_actions)
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
        whole = joined(self._name, [answers[place] for place in sorted(answers)], rows.mask)
        answered, order = answered.sort()
        is_left = ~lost[answered]
        kept = torch.zeros(len(rows), dtype=torch.bool).index_fill_(0, answered[is_left], True)
        return with_each(whole, lambda values: values[order[is_left]]), kept
