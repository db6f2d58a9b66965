"""Awaited calls: their order, their number at a time, and what ends them. Calls in processes: `test_in_process.py`."""

import asyncio
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo._rewarding.deadlines import Call, await_all, is_async
from grpo.errors import CallError, DeadlineError
from tests.support.reward_faults import eventually

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


def test_async_functions_are_recognised(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, bool]] = [
        (echo, True),
        (functools.partial(functools.partial(echo, 1), seconds=0.0), True),
        (Judge(), True),
        (Judge, False),
        (len, False),
        (lambda: echo(1), False),
        (functools.partial(len), False),
    ]
    for function, expected in cases:
        with subtests.test(function=str(function)):
            assert is_async(function) == expected


def test_answers_come_in_the_order_of_the_calls_and_not_of_their_ends() -> None:
    assert await_all(calls_of(echo, [(n, 0.01 * (5 - n)) for n in range(5)])) == [0, 1, 2, 3, 4]
    assert await_all([]) == []
    assert await_all([Call(name="call", function=echo, keywords={"value": 7})]) == [7]


def test_at_most_max_concurrent_calls_run_at_a_time(subtests: pytest.Subtests) -> None:
    for limit, expected in [(1, 1), (2, 2), (3, 3), (64, 5)]:
        with subtests.test(limit=limit):
            now, most = [0], [0]

            async def judge(now: list[int] = now, most: list[int] = most) -> None:
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


def test_the_deadline_counts_from_the_start_of_each_call() -> None:
    """Six calls of 0.2 seconds, one at a time, with a second for each."""
    assert await_all(calls_of(echo, [(n, 0.2) for n in range(6)]), timeout=1.0, max_concurrent=1) == list(range(6))


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


def test_a_call_that_does_not_come_back_is_left_alone_and_the_next_gets_a_new_loop(subtests: pytest.Subtests) -> None:
    released = threading.Event()

    async def block() -> None:
        released.wait(60)

    async def ignore() -> None:
        while not released.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue

    for function in (block, ignore):
        with subtests.test(function=function.__name__):
            before = {thread for thread in threading.enumerate() if thread.name.startswith("awaited calls")}
            released.clear()
            try:
                with pytest.raises(
                    DeadlineError, match=r"^call 0 did not answer within 0\.1 s, and it still runs: it blocks"
                ):
                    await_all(calls_of(function), timeout=FAST)
                assert await_all(calls_of(echo, [(1,)]), timeout=60.0) == [1]
            finally:
                released.set()
            old = before or {threading.main_thread()}
            eventually(lambda old=old: len(old & {*threading.enumerate()}) <= 1, "the old thread has ended")


def test_a_loop_that_is_blocked_by_others_is_given_up() -> None:
    """No call of ours can start."""
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
    ended = threading.Event()

    async def reward(number: int) -> None:
        if number == 1:
            raise ValueError("no") from KeyError("inner")
        try:
            await hang()
        finally:
            ended.set()

    with pytest.raises(ValueError, match="no") as caught:
        await_all(calls_of(reward, [(0,), (1,)]))
    assert isinstance(caught.value.__cause__, KeyError)
    assert ended.wait(30)


def test_calls_that_try_to_exit_are_errors_and_the_loop_goes_on(subtests: pytest.Subtests) -> None:
    async def leave() -> None:
        sys.exit(3)

    async def interrupt() -> None:
        raise KeyboardInterrupt

    async def cancel() -> None:
        raise asyncio.CancelledError

    cases = [
        (leave, "call 0 raised SystemExit: 3"),
        (interrupt, "raised KeyboardInterrupt"),
        (cancel, "cancelled itself"),
    ]
    for function, message in cases:
        with subtests.test(message=message):
            with pytest.raises(CallError, match=message):
                await_all(calls_of(function))
            assert await_all(calls_of(echo, [(1,)]), timeout=60.0) == [1]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system has no such signals")
def test_an_interrupt_cancels_the_calls_and_is_raised_again(subtests: pytest.Subtests) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    try:
        for timeout in (None, 60.0):
            with subtests.test(timeout=timeout):
                ended = threading.Event()

                async def judge(ended: threading.Event = ended) -> None:
                    signal.pthread_kill(main, signal.SIGUSR1)
                    try:
                        await hang()
                    finally:
                        ended.set()

                with pytest.raises(Interrupted):
                    await_all(calls_of(judge), timeout=timeout)
                assert ended.wait(30)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_that_comes_before_the_wait_cancels_the_calls(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """The interrupt comes when the calls are handed over, after they started or before."""
    hand_over = asyncio.run_coroutine_threadsafe
    for has_started in (True, False):
        started, ended, release = threading.Event(), threading.Event(), threading.Event()

        async def judge(started: threading.Event = started, ended: threading.Event = ended) -> None:
            started.set()
            try:
                await hang()
            finally:
                ended.set()

        def interrupted(
            coroutine: Any, loop: Any, wait: bool = has_started, go: threading.Event = release, on: Any = started
        ) -> None:
            if not wait:
                loop.call_soon_threadsafe(go.wait, 30)  # the loop is busy meanwhile
            hand_over(coroutine, loop)
            assert not wait or on.wait(30)
            raise KeyboardInterrupt

        with subtests.test(has_started=has_started):
            monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                await_all(calls_of(judge))
            monkeypatch.undo()
            release.set()
            assert await_all(calls_of(echo, [(1,)]), timeout=60.0) == [1]
            assert ended.wait(30) if has_started else not started.is_set()


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
