"""Failed calls of a reward model: retries, rows asked one by one, waits, what other ranks are told, and exact counts."""

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from grpo import ContractError, RewardConfig, RewardError, TrainingInterrupted, WeightedRewards
from grpo._retrying import calls as reward_calls
from grpo._retrying.calls import RetriedCalls
from grpo._retrying.part_by_part import spread
from grpo._retrying.retries import Retries, sleep_and_tell
from grpo.errors import RewardRaisedError
from tests.support.policies import TablePolicy
from tests.support.reward_faults import FakeTime, asked, calls_of, counts
from tests.support.trainers import trainer_of

ROWS = list(range(4))

OUTCOMES: dict[str, Callable[[Any], Any]] = {
    "good": lambda actions: [float(action) for action in actions],
    "raises": lambda actions: 1 / 0,
    "None": lambda actions: None,
    "text": lambda actions: "rewards",
    "words": lambda actions: ["one"] * len(actions),
    "too many": lambda actions: [0.0] * (len(actions) + 1),
    "too few": lambda actions: [0.0] * (len(actions) - 1),
    "complex": lambda actions: [1j] * len(actions),
    "nested": lambda actions: [[[0.0]]] * len(actions),
}
"""What a reward may return for some actions."""
FAILURES = [name for name in OUTCOMES if name != "good"]


class Scripted:
    """A reward whose calls have these outcomes one after another, and are good afterwards."""

    def __init__(self, *outcomes: str, rest: str = "good") -> None:
        self.outcomes = itertools.chain(outcomes, itertools.repeat(rest))
        self.asked: list[list[int]] = []

    def __call__(self, states: Any, actions: Any) -> Any:
        self.asked.append([*actions])
        return OUTCOMES[next(self.outcomes)](actions)


class Poisoned:
    def __init__(self, *rows: int, outcome: str = "raises") -> None:
        self.rows, self.outcome = {*rows}, outcome

    def __call__(self, states: Any, actions: Any) -> Any:
        return OUTCOMES["good" if self.rows.isdisjoint(actions) else self.outcome](actions)


@pytest.mark.parametrize("failure", FAILURES)
def test_every_kind_of_failure_is_an_error_or_retried_or_dropped_and_counted(failure):
    time, reward = FakeTime(), Scripted(failure)
    message = "ZeroDivisionError" if failure == "raises" else r"must return one number per row, \[N\] = \[4\]"
    with pytest.raises(RewardError, match=message) as caught:
        asked(reward, time=time)
    assert isinstance(caught.value, RewardRaisedError) == (failure == "raises")
    assert (time.slept, len(reward.asked)) == ([], 1)
    found = asked(Scripted(failure, failure), num_retries=2)
    assert (found.values.tolist(), found.metrics) == ([0, 1, 2, 3], counts(retries=2, failed_calls=2))
    found = asked(Poisoned(1, 2, outcome=failure), time=time, on_failure="drop")
    assert (found.values.tolist(), found.kept.tolist()) == ([0, 3], [True, False, False, True])
    assert (found.metrics, time.slept) == (counts(dropped=2, failed_calls=1 + 2), [])


def test_each_row_is_asked_once_and_neighbours_are_far_apart() -> None:
    for num_rows in (1, 2, 7, 64):
        assert sorted(spread(num_rows)) == list(range(num_rows))
    groups = [row // 8 for row in spread(64)]  # of 8 rows
    assert all(len(set(groups[start : start + 5])) == 5 for start in range(60))


@pytest.mark.parametrize("single_rows_only", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), TrainingInterrupted(15), ContractError("the caller's mistake")])
def test_an_error_that_is_not_the_reward_models_is_neither_retried_nor_dropped(error, single_rows_only):
    def reward(states: Any, actions: Any) -> Any:
        raise ValueError if single_rows_only and len(actions) > 1 else error

    with pytest.raises(type(error)) as caught:
        asked(reward, num_retries=3, on_failure="drop")
    assert caught.value is error


class OwnError(KeyError):
    """Cannot be sent by another process, because it cannot be made from its text alone."""

    def __init__(self, text: str, column: str = "") -> None:
        super().__init__(text, column, 0)


@pytest.mark.parametrize("mistake", [TypeError, NameError, AttributeError, KeyError, ModuleNotFoundError, OwnError])
@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize(
    "called", ["reward", "reward in a process", "judge", "judge in time", "part", "part in a process"]
)
def test_an_error_of_the_program_in_the_first_call_is_raised_at_once(mistake, on_failure, called):
    """Of a plain function and of an `async def`, with and without a time limit, and of a part of a sum."""

    def reward(states: Any, actions: Any) -> Any:
        raise mistake("no such column")

    async def judge(states: Any, actions: Any) -> Any:
        raise mistake("no such column")

    what, _, limit = called.partition(" in ")
    models = {
        "reward": reward,
        "judge": judge,
        "part": WeightedRewards({"a": lambda states, actions: [0.0] * len(actions), "b": reward}),
    }
    time = FakeTime()
    limits = {"timeout": 20.0} if limit else {}
    calls = calls_of(models[what], time, on_failure=on_failure, num_retries=5, retry_delay=1.0, **limits)
    for _ in range(2):  # a second try does not wait either
        with pytest.raises(RewardRaisedError, match=r" raised .*no such column.*error of the program") as caught:
            calls(ROWS, ROWS)
        assert isinstance(caught.value.__cause__, mistake if mistake is not OwnError else KeyError)
    assert time.slept == []


@pytest.mark.parametrize("first", [[1.0], ConnectionError("away")])
def test_an_error_of_the_program_is_a_failure_like_others_after_a_success_or_an_outage(first):
    time, answers = FakeTime(), iter([first])

    def reward(states: Any, actions: Any) -> Any:
        answer = next(answers, KeyError("lost"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    calls = calls_of(reward, time, on_failure="drop")
    if isinstance(first, list):
        calls([0], [0])
    with pytest.raises(RewardError, match="3 trials 60 s apart"):
        calls([0], [0])
    assert time.slept == [60.0] * 3


def test_one_row_with_an_error_of_the_program_is_dropped() -> None:
    def reward(states: Any, actions: Any) -> list[float]:
        return [{0: 0.0, 1: 1.0, 3: 3.0}[action] for action in actions]

    assert asked(reward, on_failure="drop").values.tolist() == [0.0, 1.0, 3.0]


def test_a_success_between_failures_keeps_the_breaker_closed() -> None:
    time = FakeTime()
    calls = calls_of(Scripted(*["raises"] * 4, "good", *["raises"] * 4), time)
    for expected in [*[False] * 4, True, *[False] * 4, True]:
        if expected:
            calls(ROWS, ROWS)
        else:
            with pytest.raises(RewardRaisedError):
                calls(ROWS, ROWS)
    assert time.slept == []


@pytest.mark.parametrize("failed_trials", [0, 1, 2, 3])
def test_two_failed_trials_are_survived_and_three_are_an_error(failed_trials):
    time, reward = FakeTime(), Scripted(*["raises"] * (5 + failed_trials))
    calls = calls_of(reward, time, num_retries=4, breaker_seconds=7.0)
    with pytest.raises(RewardRaisedError, match="in 5 call"):
        calls(ROWS, ROWS)
    assert time.slept == [0.0] * 4  # between retries the breaker does not wait
    time.slept.clear()
    if failed_trials < 3:
        assert calls(ROWS, ROWS).metrics == counts(retries=4, failed_calls=5 + failed_trials)
        assert time.slept == [7.0] * (failed_trials + 1)
    else:
        message = r"These were the last of 8 failed calls in a row, with 3 trials 7 s apart"
        with pytest.raises(RewardError, match=message) as caught:
            calls(ROWS, ROWS)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert time.slept == [7.0] * 3
    assert len(reward.asked) == min(5 + failed_trials + 1, 8)


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
def test_trials_take_the_place_of_the_retries_that_are_left(on_failure):
    """Five failures open the breaker. Delays before them: 1, 2, 4, 8."""
    time, reward = FakeTime(), Scripted(*["raises"] * 5)
    found = asked(reward, time=time, num_retries=20, retry_delay=1.0, on_failure=on_failure)
    assert (found.metrics, time.slept) == (counts(retries=4, failed_calls=5), [1, 2, 4, 8, 60])
    assert reward.asked == [ROWS] * 6


def test_rubbish_in_every_trial_is_the_cause_of_the_error() -> None:
    with pytest.raises(RewardError, match=r"got NoneType None.*These were the last of 8 failed calls") as caught:
        asked(Scripted(rest="None"), breaker_failures=1, on_failure="drop", num_rows=1)
    assert isinstance(caught.value.__cause__, RewardError)


@pytest.mark.parametrize(("num_rows", "rounds_before_the_wait"), [(1, 3), (2, 2), (4, 1), (16, 1)])
def test_an_outage_of_every_row_is_waited_out_and_drops_nothing(num_rows, rounds_before_the_wait):
    """Each round asks for all rows and for each of them. Five failures open the breaker, which opens at the next round."""
    failed = (num_rows + 1) * (rounds_before_the_wait + 2)  # and two failed trials
    time, reward = FakeTime(), Scripted(*["raises"] * failed)
    found = asked(reward, num_rows, time=time, on_failure="drop")
    assert (found.values.tolist(), found.metrics) == (list(range(num_rows)), counts(failed_calls=failed))
    assert time.slept == [60.0] * 3


def test_an_outage_that_does_not_end_is_an_error_that_names_the_cause() -> None:
    time, reward = FakeTime(), Scripted(rest="raises")
    message = r"Scripted raised ZeroDivisionError.* rows 0 to 3.*failed for every one of 4 rows.*3 trials 60 s apart"
    with pytest.raises(RewardError, match=message) as caught:
        asked(reward, time=time, on_failure="drop", num_retries=2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert time.slept == [0.0, 0.0, 60.0, 60.0, 60.0]
    assert len(reward.asked) == (3 + 4) + 3 * (1 + 4)  # a trial has no retries


def test_a_trial_in_which_one_row_succeeds_closes_the_breaker() -> None:
    """Five failures, then a trial: the call for all rows fails, and rows 0 and 3 succeed."""
    time = FakeTime()
    reward = Scripted(*["raises"] * 5, "raises", "good", "raises", "raises", "good")
    found = asked(reward, time=time, on_failure="drop")
    assert found.values.tolist() == [action for (action,) in (reward.asked[6], reward.asked[9])]
    assert time.slept == [60.0]


def test_rows_that_hang_one_after_another_are_given_up_after_a_minute() -> None:
    """Each call takes 15 seconds. After the fourth row a minute has passed without an answer, and the breaker is open."""
    time, hangs = FakeTime(), iter([True] * 5)
    asked_for: list[int] = []

    def hanging(states: Any, actions: Any) -> Any:
        asked_for.append(len(actions))
        if next(hangs, False):
            time.now += 15.0
            raise TimeoutError
        return OUTCOMES["good"](actions)

    found = asked(hanging, 16, time=time, on_failure="drop")
    assert (asked_for, time.slept, found.metrics) == ([16, 1, 1, 1, 1, 16], [60.0], counts(failed_calls=5))


def test_rows_go_on_after_a_minute_if_one_has_answered() -> None:
    time = FakeTime()

    def slow(states: Any, actions: Any) -> Any:
        time.now += 100.0
        if len(actions) > 1 or actions[0] != 0:
            raise TimeoutError
        return [0.0]

    found = asked(slow, 16, time=time, on_failure="drop")
    assert (found.metrics, time.slept) == (counts(dropped=15, failed_calls=16), [])


def test_rows_that_fail_at_the_end_do_not_make_the_next_call_wait() -> None:
    """Row 0 is asked first. The fifteen rows after it fail, and five failures in a row open the breaker."""
    time = FakeTime()
    calls = calls_of(Poisoned(*range(1, 16)), time, on_failure="drop")
    for _ in range(2):
        assert calls(range(16), [*range(16)]).values.tolist() == [0]
    assert (spread(16)[0], time.slept) == (0, [])


def test_rows_go_on_for_a_minute_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second before the limit is up, the last row answers."""
    assert reward_calls.SECONDS_WITHOUT_ANSWER == 60.0
    time, last = FakeTime(), spread(8)[-1]

    def slow(states: Any, actions: Any) -> Any:
        time.now += 59.0 / 7
        if [*actions] != [last]:
            raise TimeoutError
        return [1.0]

    assert asked(slow, 8, time=time, on_failure="drop").metrics == counts(dropped=7, failed_calls=8)


def test_counts_of_a_call_that_raises_are_reported_by_the_next() -> None:
    calls = calls_of(Scripted("raises", "raises", "None", "text", "good"), num_retries=1)
    for _ in range(2):
        with pytest.raises(RewardError):
            calls(ROWS, ROWS)
    # and are kept for a further call when asked to
    expected = counts(retries=2, failed_calls=4)
    assert calls(ROWS, ROWS, keep_counts=True).metrics == calls(ROWS, ROWS).metrics == expected
    assert calls(ROWS, ROWS).metrics == counts()


def test_rows_that_were_dropped_before_the_call_raised_are_counted() -> None:
    """Row 1 raises, and row 2 has no finite reward in the first call."""
    first = iter([math.nan])

    def reward(states: Any, actions: Any) -> Any:
        if 1 in actions:
            raise ValueError
        return [next(first, 0.0) if action == 2 else 0.0 for action in actions]

    calls = calls_of(reward, on_failure="drop")
    with pytest.raises(RewardError, match="must return finite numbers"):
        calls(ROWS, ROWS)
    assert calls(ROWS, ROWS).metrics == counts(dropped=2, failed_calls=4)


def test_counts_of_an_interrupted_call_are_kept() -> None:
    errors = iter([ValueError(), KeyboardInterrupt()])

    def reward(states: Any, actions: Any) -> Any:
        if error := next(errors, None):
            raise error
        return OUTCOMES["good"](actions)

    calls = calls_of(reward, num_retries=1)
    with pytest.raises(KeyboardInterrupt):
        calls(ROWS, ROWS)
    assert calls(ROWS, ROWS).metrics == counts(retries=1, failed_calls=1)


WEIGHT = torch.ones(4, requires_grad=True)
CALLED_IN: list[int] = []


def network(states: Any, actions: Any) -> Any:
    CALLED_IN.append(os.getpid())
    return WEIGHT * 2


async def judge(states: Any, actions: Any) -> Any:
    return WEIGHT * 2


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (network, {}),
        (network, {"timeout": 10.0}),  # in another process
        (judge, {}),
        (judge, {"timeout": 10.0}),
        (WeightedRewards({"a": network, "b": judge}, {"a": 1.0, "b": 0.0}), {}),
    ],
)
def test_reward_networks_compute_no_gradients_wherever_they_are_called(model, settings):
    assert asked(model, **settings).values.tolist() == [2.0] * 4
    assert {*CALLED_IN} == {os.getpid()}


def test_a_reward_with_a_gradient_is_refused() -> None:
    def differentiable(states: Any, actions: Any) -> Any:
        with torch.enable_grad():
            return WEIGHT * 2

    with pytest.raises(RewardError, match=r"^differentiable must .*without a gradient"):
        asked(differentiable)


THREE_ROWS = [0, 1, 2]


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
        calls(THREE_ROWS, THREE_ROWS)
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
