"""Awaited calls: their order, their number at a time, and what ends them. Calls in processes: `test_in_process.py`."""

import asyncio
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from adapters.llm.completions import Completion
from adapters.llm.rewards.completion_rewards import CompletionRewards
from grpo import RewardConfig, WeightedRewards
from grpo._retrying.calls import RetriedCalls
from grpo._rewarding.deadlines import Call, await_all, is_async
from grpo.errors import CallError, DeadlineError, RewardRaisedError, RewardTimeoutError
from tests.support.clocks import skipping_clock
from tests.support.reward_faults import asked, children, counts, eventually

FAST = 0.1


def calls_of(function: Callable[..., Any], arguments: Sequence[Any] = ((),)) -> list[Call]:
    return [Call(name=f"call {n}", function=function, arguments=given) for n, given in enumerate(arguments)]


async def echo(value: int, seconds: float = 0.0) -> int:
    await asyncio.sleep(seconds)
    return value


async def hang() -> None:
    await asyncio.sleep(3600)


class Judge:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (echo, True),
        (functools.partial(functools.partial(echo, 1), seconds=0.0), True),
        (Judge(), True),
        (Judge, False),
        (len, False),
        (lambda: echo(1), False),
        (functools.partial(len), False),
    ],
)
def test_async_functions_are_recognised(function, expected):
    assert is_async(function) == expected


def test_answers_come_in_the_order_of_the_calls_and_not_of_their_ends() -> None:
    assert await_all(calls_of(echo, [(n, 0.01 * (5 - n)) for n in range(5)])) == [0, 1, 2, 3, 4]
    assert await_all([]) == []
    assert await_all([Call(name="call", function=echo, keywords={"value": 7})]) == [7]


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (2, 2), (3, 3), (64, 5)])
def test_at_most_max_concurrent_calls_run_at_a_time(limit, expected):
    now, most = [0], [0]

    async def judge() -> None:
        now[0] += 1
        most[0] = max(most[0], now[0])
        await asyncio.sleep(0.005)
        now[0] -= 1

    await_all(calls_of(judge, [()] * 5), max_concurrent=limit)
    assert most == [expected]


def test_all_calls_run_in_one_loop_for_good_which_works_inside_another() -> None:
    async def loop() -> int:
        return id(asyncio.get_running_loop())

    async def notebook() -> list[int]:
        return await_all(calls_of(loop, [()] * 2))

    assert len({*await_all(calls_of(loop, [()] * 2)), *asyncio.run(notebook())}) == 1


def test_a_call_that_hangs_is_cancelled_and_named() -> None:
    with pytest.raises(DeadlineError, match=r"^slow did not answer within 0\.1 s$") as caught:
        await_all([Call(name="quick", function=echo, arguments=(1,)), Call(name="slow", function=hang)], timeout=FAST)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_the_deadline_counts_from_the_start_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six calls of 40 seconds by an imitated clock, one at a time, with 80 seconds for each."""
    skip = skipping_clock(monkeypatch)

    async def slow(value: int) -> int:
        skip(40.0)
        return await echo(value, 0.01)

    assert await_all(calls_of(slow, [(n,) for n in range(6)]), timeout=80.0, max_concurrent=1) == list(range(6))


def test_a_call_that_turns_its_cancellation_into_an_error_has_missed_its_deadline() -> None:
    async def client() -> None:
        try:
            await hang()
        except asyncio.CancelledError:
            raise ConnectionError from None

    with pytest.raises(DeadlineError, match="call 0 did not answer") as caught:
        await_all(calls_of(client), timeout=FAST)
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_a_timeout_error_of_the_function_is_its_own() -> None:
    async def client() -> None:
        raise TimeoutError("server busy")

    with pytest.raises(TimeoutError, match="server busy") as caught:
        await_all(calls_of(client), timeout=60.0)
    assert not isinstance(caught.value, DeadlineError)


@pytest.mark.parametrize("ignores_its_cancellation", [False, True])
def test_a_call_that_does_not_come_back_is_left_alone_and_the_next_gets_a_new_loop(ignores_its_cancellation):
    released = threading.Event()

    async def judge() -> None:
        if not ignores_its_cancellation:
            released.wait(60)
        while not released.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)

    before = {thread for thread in threading.enumerate() if thread.name.startswith("awaited calls")}
    try:
        with pytest.raises(DeadlineError, match=r"^call 0 did not answer within 0\.1 s, and it still runs: it blocks"):
            await_all(calls_of(judge), timeout=FAST)
        assert await_all(calls_of(echo, [(1,)]), timeout=60.0) == [1]
    finally:
        released.set()
    old = before or {threading.main_thread()}
    eventually(lambda: len(old & {*threading.enumerate()}) <= 1, "the old thread has ended")


def test_a_loop_that_is_blocked_by_others_is_given_up() -> None:
    released = threading.Event()

    async def leave_a_blocker() -> None:
        asyncio.get_running_loop().call_later(0.01, released.wait, 60)

    await_all(calls_of(leave_a_blocker))
    time.sleep(0.1)
    try:
        with pytest.raises(DeadlineError, match="call 0 did not answer"):
            await_all(calls_of(echo, [(1,)]), timeout=FAST)
        assert await_all(calls_of(echo, [(1,)]), timeout=60.0) == [1]
    finally:
        released.set()


def test_an_error_cancels_the_other_calls() -> None:
    waiting = Waiting()

    async def broken() -> None:
        raise ValueError("no") from KeyError("inner")

    with pytest.raises(ValueError, match="no") as caught:
        await_all([Call(name="waiting", function=waiting), Call(name="broken", function=broken)])
    assert isinstance(caught.value.__cause__, KeyError)
    assert waiting.ended.wait(30)


@pytest.mark.parametrize(("error", "message"), [
    (SystemExit(3), "call 0 raised SystemExit: 3"), (KeyboardInterrupt(), "raised KeyboardInterrupt"),
    (asyncio.CancelledError(), "cancelled itself"),
])  # fmt: skip
def test_calls_that_try_to_exit_are_errors_and_the_loop_goes_on(error, message):
    async def leave() -> None:
        raise error

    with pytest.raises(CallError, match=message):
        await_all(calls_of(leave))
    assert await_all(calls_of(echo, [(1,)]), timeout=60.0) == [1]


class Waiting:
    def __init__(self, at_start: Callable[[], Any] = lambda: None) -> None:
        self.started, self.ended, self.at_start = threading.Event(), threading.Event(), at_start

    async def __call__(self) -> None:
        self.started.set()
        self.at_start()
        try:
            await hang()
        finally:
            self.ended.set()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system has no such signals")
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_an_interrupt_cancels_the_calls_and_is_raised_again(timeout):
    class Interrupted(BaseException): ...

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before, main = signal.signal(signal.SIGUSR1, interrupt), threading.get_ident()
    judge = Waiting(lambda: signal.pthread_kill(main, signal.SIGUSR1))
    try:
        with pytest.raises(Interrupted):
            await_all(calls_of(judge), timeout=timeout)
        assert judge.ended.wait(30)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("has_started", [True, False])
def test_an_interrupt_that_comes_before_the_wait_cancels_the_calls(monkeypatch, has_started):
    """The interrupt comes when the calls are handed over, after they started or before."""
    hand_over, release, judge = asyncio.run_coroutine_threadsafe, threading.Event(), Waiting()

    def interrupted(coroutine: Any, loop: Any) -> None:
        if not has_started:
            loop.call_soon_threadsafe(release.wait, 30)  # the loop is busy meanwhile
        hand_over(coroutine, loop)
        assert not has_started or judge.started.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        await_all(calls_of(judge))
    monkeypatch.undo()
    release.set()
    assert await_all(calls_of(echo, [(1,)]), timeout=60.0) == [1]
    assert judge.ended.wait(30) if has_started else not judge.started.is_set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # later Pythons warn of a fork beside threads
def test_a_forked_process_awaits_in_a_loop_of_its_own() -> None:
    assert await_all(calls_of(echo, [(1,)])) == [1]
    child = os.fork()
    if not child:  # the child has no thread that runs the parent's loop
        status = 2
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # end a child that waits forever
            (status,) = await_all(calls_of(echo, [(1,)]))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


# A reward that never answers: whatever it is, the call ends at its deadline, and leaves no process


released = threading.Event()
"""Ends the call that blocks."""


def ones(states: Any, actions: Any) -> list[float]:
    return [1.0] * len(actions)


async def awaits(states: Any, actions: Any) -> None:
    await asyncio.sleep(3600)


async def blocks(states: Any, actions: Any) -> None:
    released.clear()
    released.wait(60)


def sleeps(states: Any, actions: Any) -> None:
    time.sleep(3600)


def sleeps_for_bb(completion: str) -> float:
    return time.sleep(3600 if completion == "bb" else 0) or 1.0


async def awaits_for_bb(completion: str) -> float:
    return await asyncio.sleep(3600 if completion == "bb" else 0) or 1.0


class SlowJudge(torch.nn.Linear):
    def compute_rewards(self, states: Any, actions: Any) -> None:
        time.sleep(3600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: awaits, "awaits"),
        (lambda: blocks, "blocks"),
        (lambda: sleeps, "sleeps"),
        (lambda: SlowJudge(1, 1), "SlowJudge.compute_rewards"),
        (lambda: WeightedRewards({"ones": ones, "slow": sleeps}), "sleeps"),
        (lambda: WeightedRewards({"ones": ones, "slow": awaits}), "awaits"),
        (lambda: WeightedRewards({"inner": WeightedRewards({"slow": SlowJudge(1, 1)})}), "SlowJudge.compute_rewards"),
        (lambda: CompletionRewards(sleeps_for_bb), "sleeps_for_bb at row 1"),
        (lambda: CompletionRewards(awaits_for_bb), "awaits_for_bb at row 1"),
        (lambda: CompletionRewards(sleeps), "sleeps"),
        (lambda: CompletionRewards({"model": SlowJudge(1, 1)}), "SlowJudge.compute_rewards"),
    ],
)
def test_a_reward_that_never_answers_ends_at_its_deadline_and_leaves_no_process(make, name):
    actions = [Completion(token_ids=(1,), text=text, finish_reason="end") for text in ("a", "bb", "ccc")]
    before, calls = children(), RetriedCalls(make(), RewardConfig(timeout=0.2))
    message = rf"exceeded reward\.timeout=0\.2: {name} did not answer within 0\.2 s.* for rows 0 to 2, in 1 call"
    with pytest.raises(RewardTimeoutError, match=message) as caught:
        calls(["p"] * 3, actions)
    released.set()
    assert isinstance(caught.value.__cause__, DeadlineError)
    assert children() == before


def test_timeouts_are_counted_retried_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call hangs, and a call with row 2 alone. The call after the first raises."""
    asked_for, skip = [], skipping_clock(monkeypatch)

    async def reward(states: Any, actions: Any) -> list[float]:
        asked_for.append(len(actions))
        if len(asked_for) == 1 or [*actions] == [2]:
            skip(90.0)
            await asyncio.sleep(3600)
        return [1.0] * len(actions) if len(asked_for) > 2 else 1 / 0

    found = asked(reward, timeout=60.0, num_retries=1, on_failure="drop")
    assert found.kept.tolist() == [True, True, False, True]
    assert found.metrics == counts(timeouts=2, failed_calls=3, retries=1, dropped=1)


def test_a_timeout_of_the_function_itself_is_no_timeout() -> None:
    errors = [TimeoutError("server busy")] * 2

    def reward(states: Any, actions: Any) -> list[float]:
        if errors:
            raise errors.pop()
        return ones(states, actions)

    with pytest.raises(RewardRaisedError, match="reward raised TimeoutError: server busy") as caught:
        asked(reward, timeout=60.0)  # another process has its own list
    assert not isinstance(caught.value, RewardTimeoutError)
    errors.pop()
    assert asked(reward, timeout=None, num_retries=1).metrics == counts(failed_calls=1, retries=1)
