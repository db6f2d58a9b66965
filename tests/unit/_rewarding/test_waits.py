"""What a rank tells the other ranks while a reward makes it wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from grpo import RewardConfig
from grpo._rewarding.calls import RewardCalls
from grpo.errors import RewardError
from grpo.rewards import call_in_process
from tests.support.reward_faults import FakeTime

ROWS = [0, 1, 2]


class Told:
    """Takes down what is told: the seconds, the reason, and the clock before and after."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.waits: list[tuple[float, str, float, float]] = []

    @contextmanager
    def waiting(self, seconds: float, reason: str) -> Iterator[None]:
        begun = self.time.clock()
        try:
            yield
        finally:
            self.waits.append((seconds, reason, begun, self.time.clock()))


def judge_of(num_failures: int) -> Any:
    left = [num_failures]

    def judge(states: Any, actions: Any) -> list[float]:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError
        return [1.0] * len(actions)

    return judge


def ask(reward: Any, config: RewardConfig) -> list[tuple[float, str, float, float]]:
    told = Told()
    calls = RewardCalls(
        reward,
        config,
        in_process=call_in_process,
        waiting=told.waiting,
        clock=told.time.clock,
        sleep=told.time.sleep,
    )
    try:
        calls(ROWS, ROWS)
    except RewardError:
        told.waits.append((0.0, "raised", told.time.clock(), told.time.clock()))
    return told.waits


def test_each_delay_before_a_retry_is_announced_and_waited_inside() -> None:
    reason = "judge failed, and is called again later (reward.num_retries)"
    assert ask(judge_of(2), RewardConfig(num_retries=3, retry_delay=40.0)) == [
        (40.0, reason, 1000.0, 1040.0),
        (80.0, reason, 1040.0, 1120.0),
    ]


def test_each_wait_of_the_breaker_is_announced() -> None:
    """The call for all rows and three calls for single rows fail; so does the first trial, with its rows."""
    config = RewardConfig(on_failure="drop", breaker_failures=3, breaker_seconds=60.0)
    reason = "judge fails, and is called again after reward.breaker_seconds"
    assert ask(judge_of(8), config) == [(60.0, reason, 1000.0, 1060.0), (60.0, reason, 1060.0, 1120.0)]


def test_a_call_with_a_deadline_is_announced_with_the_longest_time_that_its_rows_take() -> None:
    async def judge(states: Any, actions: Any) -> list[float]:
        return [1.0] * len(actions)

    reason = "judge answers within reward.timeout=2.5 s per call"
    assert ask(judge, RewardConfig(timeout=2.5)) == [(7.5, reason, 1000.0, 1000.0)]


def test_a_call_without_a_deadline_or_a_failure_announces_nothing(subtests: pytest.Subtests) -> None:
    for num_failures, expected in [(0, []), (1, ["raised"])]:
        with subtests.test(num_failures=num_failures):
            assert [reason for _, reason, *_ in ask(judge_of(num_failures), RewardConfig())] == expected
