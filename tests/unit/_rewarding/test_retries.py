"""How long the delays before retries are, when the breaker opens, how long it makes a call wait, and what closes it."""

import logging

import pytest

from grpo import RewardConfig
from grpo._rewarding.retries import Retries
from tests.support.reward_faults import FakeTime


def breaker_of(time: FakeTime, num_failures: int = 3, seconds: float = 60.0) -> Retries:
    config = RewardConfig(breaker_failures=num_failures, breaker_seconds=seconds)
    return Retries("judge", config, clock=time.clock, sleep=time.sleep)


def test_delays_double_and_add_up_to_the_budget(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, float], list[float]]] = [
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
    ]
    for settings, expected in cases:
        retries = Retries("judge", RewardConfig(**settings), clock=FakeTime().clock, sleep=FakeTime().sleep)
        with subtests.test(settings=settings):
            assert [*retries.delays()] == expected


def test_open_it_waits_for_what_is_left_since_the_last_failure(subtests: pytest.Subtests) -> None:
    for passed, left in [(0.0, 60.0), (20.0, 40.0), (60.0, 0.0), (1000.0, 0.0)]:
        with subtests.test(passed=passed):
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
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("grpo", logging.WARNING)
    assert record.getMessage() == (
        "judge failed 2 times in a row. Training waits 60.0 s (reward.breaker_seconds=90) before the next trial. "
        "It raised last: TimeoutError: the judge is away"
    )
