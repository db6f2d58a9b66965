"""What a rank tells the other ranks while a reward makes it wait, and how long it waits."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from grpo import RewardConfig
from grpo._retrying.calls import RetriedCalls
from grpo._retrying.retries import Retries, sleep_and_tell
from grpo.errors import RewardError
from tests.support.policies import TablePolicy
from tests.support.reward_faults import FakeTime
from tests.support.trainers import trainer_of

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
    calls = RetriedCalls(reward, config, waiting=told.waiting, clock=told.time.clock, sleep=told.time.sleep)
    try:
        calls(ROWS, ROWS)
    except RewardError:
        told.waits.append((0.0, "raised", told.time.clock(), told.time.clock()))
    return told.waits


def test_each_delay_before_a_retry_is_announced_and_waited_inside() -> None:
    reason = "judge failed, and is called again later (reward.num_retries)"
    expected = [(40.0, reason, 1000.0, 1040.0), (80.0, reason, 1040.0, 1120.0)]
    assert ask(judge_of(2), RewardConfig(num_retries=3, retry_delay=40.0)) == expected


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


@pytest.mark.parametrize(("num_failures", "expected"), [(0, []), (1, ["raised"])])
def test_a_call_without_a_deadline_or_a_failure_announces_nothing(num_failures, expected):
    assert [reason for _, reason, *_ in ask(judge_of(num_failures), RewardConfig())] == expected


def breaker_of(time: FakeTime, num_failures: int = 3, seconds: float = 60.0) -> Retries:
    config = RewardConfig(breaker_failures=num_failures, breaker_seconds=seconds)
    return Retries("judge", config, clock=time.clock, sleep=time.sleep)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_retries": 0}, []),
        ({"num_retries": 3}, [1, 2, 4]),
        ({"num_retries": 3, "retry_delay": 0.5}, [0.5, 1, 2]),
        ({"num_retries": 20}, [1, 2, 4, 8, 16, 32, 64, 128, 45]),  # 255 + 45 = 300
        ({"num_retries": 9, "max_retry_seconds": 7.0}, [1, 2, 4]),
        ({"num_retries": 9, "max_retry_seconds": 7.5}, [1, 2, 4, 0.5]),
        ({"num_retries": 9, "max_retry_seconds": 0.0}, []),
        ({"num_retries": 3, "retry_delay": 0.0, "max_retry_seconds": 0.0}, [0, 0, 0]),
        ({"num_retries": 5000, "retry_delay": 0.0}, [0] * 5000),
        ({"num_retries": 2, "retry_delay": 1e300, "max_retry_seconds": 10.0}, [10]),
    ],
)
def test_delays_double_and_add_up_to_the_budget(settings, expected):
    retries = Retries("judge", RewardConfig(**settings), clock=FakeTime().clock, sleep=FakeTime().sleep)
    assert [*retries.delays()] == expected


@pytest.mark.parametrize(("passed", "left"), [(0.0, 60.0), (20.0, 40.0), (60.0, 0.0), (1000.0, 0.0)])
def test_open_it_waits_for_what_is_left_since_the_last_failure(passed, left):
    time = FakeTime()
    breaker = breaker_of(time, 2)
    breaker.fail(ValueError())
    time.now += 100.0  # the first failure does not count
    breaker.fail(ValueError())
    time.now += passed
    breaker.wait()
    assert time.slept == [left]
    assert breaker.is_open  # until a trial succeeds


def test_it_says_how_long_it_waits_and_why(caplog: pytest.LogCaptureFixture) -> None:
    time = FakeTime()
    breaker = breaker_of(time, 2, 90.0)
    breaker.fail(KeyError("first"))
    breaker.fail(TimeoutError("the judge is away"))
    time.now += 30.0
    breaker.wait()
    message = (
        "judge failed 2 times in a row. Training waits 60.0 s (reward.breaker_seconds=90) before the next trial. "
        "It raised last: TimeoutError: the judge is away"
    )
    assert caplog.record_tuples == [("grpo", logging.WARNING, message)]


def test_a_run_waits_aloud_every_30_seconds(caplog: pytest.LogCaptureFixture):
    slept: list[float] = []
    sleep_and_tell(75.0, "judge", "ValueError: " + "x" * 500, slept.append)
    assert slept == [30.0, 30.0, 15.0]
    raised = "It raised last: ValueError: " + "x" * 188  # 200 characters
    assert caplog.messages == [f"judge is called again in {left} s. {raised}" for left in (45, 15)]
    sleep_and_tell(30.0, "judge", "ValueError", slept.append)
    assert (slept[3:], len(caplog.records)) == ([30.0], 2)
    assert trainer_of(TablePolicy()).collector.ask_for_rewards.sleep is sleep_and_tell


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_retries": 2, "retry_delay": 40.0}, [("first", 10), ("second", 50), ("second", 20)]),
        ({"on_failure": "drop", "breaker_failures": 2, "breaker_seconds": 45.0}, [("second", 15)]),
    ],
)
def test_the_line_of_a_wait_names_the_function_and_its_last_error(settings, expected, caplog):
    time, errors = FakeTime(), iter(["first", "second"])

    def judge(states: Any, actions: Any) -> list[float]:
        if error := next(errors, None):
            raise ConnectionError(error)
        return [1.0] * len(actions)

    sleep = partial(sleep_and_tell, sleep=time.sleep)
    RetriedCalls(judge, RewardConfig(**settings), clock=time.clock, sleep=sleep)([0], [0])
    lines = [line for line in caplog.messages if "is called again in" in line]
    assert lines == [f"judge is called again in {s} s. It raised last: ConnectionError: {text}" for text, s in expected]
