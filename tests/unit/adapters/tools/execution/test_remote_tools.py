"""Deadlines, turns, and remote tools, which run in this process."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import (
    InvalidArgumentsError,
    InvalidOutputError,
    LoopBlockedError,
    OutputTooLargeError,
    ServerLostError,
    ToolRaisedError,
    ToolTimeoutError,
    WorkerDiedError,
)
from adapters.tools.execution.executor import ToolExecutor
from tests.support import tool_functions
from tests.support.hostile_tools import OddlySaidError
from tests.support.threads import run_together
from tests.support.tool_executors import CATALOGUE, LINUX, LONG, call, error_of, output_of

pytestmark = LINUX


def remote(*functions: Any, **settings: Any) -> ToolExecutor:
    """An executor of remote tools, which starts no worker."""
    catalogue = ToolCatalogue([Tool.from_function(each, remote=True) for each in functions])
    return ToolExecutor(catalogue, options=ExecutorOptions(**settings))


# --- deadlines and turns


@pytest.fixture(scope="module")
def executor() -> Iterator[ToolExecutor]:
    """Tools without a timeout of their own have a short one. No more than one call of each kind runs at a time."""
    own = [
        Tool.from_function(function, name=name, timeout=timeout, remote=function is tool_functions.async_nap)
        for name, function, timeout in (
            ("patient_add", tool_functions.add, LONG), ("patient_nap", tool_functions.nap, LONG),
            ("patient_async_nap", tool_functions.async_nap, LONG), ("short_async_nap", tool_functions.async_nap, 0.1),
        )
    ]  # fmt: skip
    with ToolExecutor(
        CATALOGUE.with_tools(*own), num_workers=1, options=ExecutorOptions(max_concurrency=1, timeout=1.0)
    ) as made:
        yield made


def test_a_late_call_ends_at_its_timeout_and_the_other_calls_finish(executor: ToolExecutor) -> None:
    results = executor.run(
        [
            call("nap", seconds=500), call("patient_add", a=1), call("short_nap", seconds=500), call("patient_add", a=2),
            call("patient_nap", seconds=1.1), call("async_nap", seconds=500), call("short_async_nap", seconds=500),
            call("patient_async_nap", seconds=1.1),
        ]
    )  # fmt: skip
    late = ToolTimeoutError
    assert [error_of(result) for result in results] == [late, None, late, None, None, late, late, None]
    assert str(results[0].error) == "nap: no answer within 1 s; the worker was killed."
    assert str(results[6].error) == "short_async_nap: no answer within 0.1 s; the call was cancelled."
    for place, seconds in ((0, 1.0), (2, 0.1), (4, 1.1), (5, 1.0), (6, 0.1), (7, 1.1)):
        assert seconds <= results[place].seconds < LONG


def test_waiting_for_a_turn_counts_neither_as_time_nor_toward_the_timeout(executor: ToolExecutor) -> None:
    """Eight threads take turns. All their calls together take longer than the timeout, and each single call takes less."""
    calls = [call("nap", seconds=0.15), call("async_nap", seconds=0.15)]
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(executor.run, [calls] * 8))
    elapsed = time.perf_counter() - start
    for kind in zip(*results, strict=True):
        assert all(result.ok for result in kind), kind
        assert all(result.seconds >= 0.15 for result in kind)
        assert sum(result.seconds for result in kind) <= elapsed
    assert executor.run([call("unknown")])[0].seconds == 0.0


def test_a_late_remote_tool_is_cancelled_and_abandoned_if_it_ignores_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.tools.execution.remote_tools._GRACE_SECONDS", 0.1)
    ended = []

    async def polite() -> None:
        """Wait."""
        try:
            await asyncio.sleep(500)
        finally:
            ended.append("cancelled")

    async def stubborn() -> None:
        """Wait on when cancelled."""
        while "the test" not in ended:
            try:
                await asyncio.sleep(500)
            except asyncio.CancelledError:
                ended.append("ignored")

    with remote(polite, stubborn, timeout=0.1) as made:
        assert error_of(made.run([call("polite")])[0]) is ToolTimeoutError
        assert ended == ["cancelled"]
        [result] = made.run([call("stubborn")])
        assert error_of(result) is ToolTimeoutError
        assert ended == ["cancelled", "ignored"]
        ended.append("the test")


# --- remote tools


@pytest.mark.parametrize(("settings", "limit"), [({}, 32), ({"max_concurrency": 4}, 4)])
def test_remote_calls_run_concurrently_up_to_a_limit(settings: dict[str, int], limit: int) -> None:
    now, most = 0, 0

    async def count() -> None:
        """Wait until as many calls as may be are here."""
        nonlocal now, most
        now += 1
        most = max(most, now)
        while most < limit:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        now -= 1

    with remote(count, timeout=LONG, **settings) as made:
        run_together(*[lambda: made.run([call("count")] * 20)] * 3)
    assert most == limit


def test_arguments_are_checked_before_a_remote_tool_is_awaited() -> None:
    awaited = []

    async def ask(number: int, more: list[int] = (), counts: dict[str, int] | None = None) -> str:  # type: ignore[assignment]
        """Ask."""
        awaited.append(number)
        return repr((number, more, counts))

    with remote(ask) as made:
        *refused, good = made.run(
            [
                call("ask", number="1"), call("ask"), call("ask", number=1, other=2),
                call("ask", number=2.0, more=[1.0, 2], counts={"b": 4.0}),
            ]
        )  # fmt: skip
    assert [error_of(result) for result in refused] == [InvalidArgumentsError] * 3
    assert str(refused[0].error) == "ask: at $.number: '1' is not of type 'integer'."
    assert good.output == "(2, [1, 2], {'b': 4})", "integers come as integers"
    assert awaited == [2]


def test_integral_floats_reach_workers_as_integers(executor: ToolExecutor) -> None:
    assert repr(output_of(executor, "patient_add", a=2.0, b=3)) == "5"


def test_an_error_raised_by_a_remote_tool_becomes_a_result() -> None:
    async def gone() -> None:
        """Ask a server that has ended, as the tools of an MCP server do: no fault of the call."""
        raise WorkerDiedError("the server ended")

    schema = {"type": "object", "additionalProperties": True}
    catalogue = ToolCatalogue(
        [
            CATALOGUE["async_raise"], CATALOGUE["async_exit"], CATALOGUE["async_nap"],
            Tool.from_function(gone, remote=True), Tool.from_function(gone, name="none", remote=True, parameters=schema),
        ]
    )  # fmt: skip
    with ToolExecutor(catalogue) as made:
        results = made.run(
            [call("async_raise", message="m"), call("async_exit"), call("async_nap", seconds=0), call("gone"),
             call("none", x=1)]
        )  # fmt: skip
    assert [error_of(result) for result in results] == [
        ToolRaisedError, ToolRaisedError, None, WorkerDiedError, ToolRaisedError,
    ]  # fmt: skip
    assert [str(results[place].error) for place in (0, 1, 3)] == [
        "async_raise: KeyError: 'm'", "async_exit: SystemExit: 3", "gone: the server ended",
    ]  # fmt: skip
    assert "none: TypeError" in str(results[4].error)


def test_a_message_that_is_an_odd_text_becomes_a_plain_one() -> None:
    async def oddly() -> None:
        """Raise an error with an odd message."""
        raise OddlySaidError

    with remote(oddly) as made:
        [result] = made.run([call("oddly")])
    assert str(result.error) == "oddly: OddlySaidError: odd"


async def block(seconds: float) -> str:
    """Block the loop of the remote tools."""
    time.sleep(seconds)
    return "blocked"


async def block_in_a_task(seconds: float) -> str:
    """Block the loop in a task of its own."""
    return await asyncio.create_task(block(seconds))


async def rest(seconds: float) -> str:
    """Wait as a remote tool should."""
    for _ in range(4):
        await asyncio.sleep(seconds / 4)
    return "rested"


@pytest.mark.parametrize("blocking", ["block", "block_in_a_task"])
def test_a_remote_tool_that_blocks_fails_only_its_own_call(blocking: str) -> None:
    tools = [Tool.from_function(each, remote=True, timeout=0.5) for each in (block, block_in_a_task, rest)]
    catalogue = ToolCatalogue([*tools, Tool.from_function(tool_functions.nap, timeout=0.5)])
    with ToolExecutor(catalogue, num_workers=2) as made:
        assert output_of(made, "rest", seconds=0) == "rested"
        calls = [call("rest", seconds=0.2), call("nap", seconds=0.1), call(blocking, seconds=1.0)]
        resting, sleeping, blocked, waiting = made.run([*calls, call("rest", seconds=0.2)])
        assert (resting.output, waiting.output) == ("rested", "rested")
        assert sleeping.ok
        assert str(blocked.error) == f"{blocking}: no answer within 0.5 s; the call was cancelled."
        assert output_of(made, blocking, seconds=0) == "blocked"


def test_the_time_of_many_calls_that_block_shortly_is_charged_to_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each call moves on by 0.01 s. None waits for 0.6 s at its own cost, which would be too late."""
    now = [0.0]

    async def work() -> None:
        """Work."""
        now[0] += 0.01

    monkeypatch.setattr("adapters.tools.execution.remote_tools.time", SimpleNamespace(perf_counter=lambda: now[0]))
    with remote(work, timeout=0.3) as made:
        results = made.run([call("work")] * 60)
    assert [result.seconds for result in results] == pytest.approx([0.01] * 60)


def test_a_remote_tool_that_stops_the_loop_ends_no_call() -> None:
    async def stop() -> str:
        """Stop the loop."""
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return "stopped"

    with remote(stop, rest, timeout=LONG) as made:
        results = made.run([call("rest", seconds=0.05), call("stop"), call("stop")])
    assert [result.output for result in results] == ["rested", "stopped", "stopped"]


def test_a_loop_that_a_remote_tool_never_gives_back_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.tools.execution.remote_tools._GRACE_SECONDS", 0.05)
    monkeypatch.setattr("adapters.tools.execution.remote_tools._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("adapters.tools.execution.remote_tools._STUCK_SECONDS", 0.2)
    enough = threading.Event()

    async def hang() -> None:
        """Block without an end."""
        enough.wait(LONG)

    with remote(hang, rest, timeout=0.1) as made:
        hanging, resting = made.run([call("hang"), call("rest", seconds=0.05)])
        assert error_of(hanging) is ToolTimeoutError
        assert error_of(resting) is LoopBlockedError
        assert "another remote tool blocks the event loop" in str(resting.error)
        assert output_of(made, "rest", seconds=0.05) == "rested"
        enough.set()


def test_a_server_that_dies_in_mid_run_loses_its_own_calls_and_no_others() -> None:
    """The calls that wait for the server end at once, and those after it, while other tools go on."""
    alive = asyncio.Event()

    async def ask(number: int) -> int:
        """Ask a server, which dies at the third question."""
        if number == 3:
            alive.set()
        if number > 0:
            await alive.wait()
            raise ServerLostError("the connection was closed")
        return number

    catalogue = ToolCatalogue(
        [Tool.from_function(ask, remote=True, timeout=LONG), Tool.from_function(rest, remote=True), CATALOGUE["add"]]
    )
    with ToolExecutor(catalogue, num_workers=1) as made:
        assert output_of(made, "ask", number=0) == 0
        calls = [call("ask", number=1), call("rest", seconds=0.05), call("ask", number=2), call("add", a=1)]
        results = made.run([*calls, call("ask", number=3), call("rest", seconds=0.05), call("ask", number=4)])
        lost = ServerLostError
        assert [error_of(result) for result in results] == [lost, None, lost, None, lost, None, lost]
        assert {str(result.error) for result in results if not result.ok} == {"ask: the connection was closed"}
        assert made.run([call("ask", number=5), call("add", a=2)])[1].output == 3


def test_a_task_left_running_by_a_remote_tool_ends_no_other_call() -> None:
    tasks = []

    async def leave() -> None:
        """Start something that leaves the program."""
        tasks.append(asyncio.create_task(tool_functions.async_exit()))

    with remote(leave, tool_functions.async_nap) as made:
        results = made.run([call("leave"), call("async_nap", seconds=0.1), call("async_nap", seconds=0.1)])
        assert all(result.ok for result in results)
        assert isinstance(tasks[0].exception(), SystemExit)


def test_remote_outputs_are_json_of_bounded_size() -> None:
    async def long() -> str:
        """Return much."""
        return "x" * 99

    async def nan() -> float:
        """Return NaN."""
        return math.nan

    async def pair() -> Any:
        """Return a tuple and a dict."""
        return (1, {2: 3})

    with remote(long, nan, pair, max_output_bytes=100) as small, remote(long, max_output_bytes=101) as enough:
        too_long, no_number, good = small.run([call("long"), call("nan"), call("pair")])
        assert output_of(enough, "long") == "x" * 99
    assert error_of(too_long) is OutputTooLargeError  # 99 + 2 quotes
    assert error_of(no_number) is InvalidOutputError
    assert good.output == [1, {"2": 3}]


def test_calling_run_within_a_remote_tool_is_refused() -> None:
    async def inner() -> str:
        """Call the executor that calls this."""
        made.run([])
        return "unreached"

    with remote(inner, timeout=LONG) as made:
        [result] = made.run([call("inner")])
    assert "await run_async" in str(result.error)


def test_a_remote_tool_may_await_other_calls() -> None:
    async def inner() -> Any:
        """Call the executor that calls this."""
        [result] = await made.run_async([call("rest", seconds=0)])
        return result.output

    with remote(inner, rest, timeout=LONG) as made:
        assert output_of(made, "inner") == "rested"
