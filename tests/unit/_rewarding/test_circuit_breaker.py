"""When the breaker opens, how long it makes a call wait, and what closes it."""

import logging

import pytest

from grpo._rewarding.circuit_breaker import CircuitBreaker
from tests.support.reward_faults import FakeTime


def breaker_of(time: FakeTime, num_failures: int = 3, seconds: float = 60.0) -> CircuitBreaker:
    return CircuitBreaker(name="judge", num_failures=num_failures, seconds=seconds, clock=time.clock, sleep=time.sleep)


def test_it_opens_after_exactly_the_given_number_of_failures_in_a_row(subtests: pytest.Subtests) -> None:
    for num_failures in (1, 2, 5):
        with subtests.test(num_failures=num_failures):
            time = FakeTime()
            breaker = breaker_of(time, num_failures)
            for number in range(num_failures + 2):
                assert breaker.num_failed == number
                assert breaker.is_open == (number >= num_failures)
                breaker.fail(ValueError())


def test_a_success_closes_it_and_starts_the_count_anew() -> None:
    breaker = breaker_of(FakeTime())
    for successes_between in (2, 3):
        for _ in range(successes_between):
            breaker.fail(ValueError())
        assert breaker.is_open == (successes_between == 3)
        breaker.succeed()
        assert not breaker.is_open
        assert breaker.num_failed == 0


def test_closed_it_does_not_wait() -> None:
    time = FakeTime()
    breaker = breaker_of(time)
    breaker.fail(ValueError())
    breaker.fail(ValueError())
    breaker.wait()
    assert time.slept == []


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


def test_without_a_clock_of_its_own_it_measures_real_time() -> None:
    breaker = CircuitBreaker(name="judge", num_failures=1, seconds=0.0)
    breaker.fail(ValueError())
    breaker.wait()
    assert breaker.is_open
