"""Deadlines, turns, and remote tools, which run in this process."""

import asyncio
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from adapters.tools import ExecutorOptions, Tool, ToolCall, ToolCatalogue, ToolExecutor, ToolResult
from adapters.tools.catalogue.arguments import bounded_text
from adapters.tools.errors import (
    InvalidArgumentsError,
    InvalidOutputError,
    LoopBlockedError,
    OutputTooLargeError,
    ServerLostError,
    ToolError,
    ToolRaisedError,
    ToolTimeoutError,
)
from adapters.tools.execution.batches import Turn
from adapters.tools.execution.remote_tools import RemoteTools
from grpo.errors import ConfigError
from tests.support import tool_functions
from tests.support.hostile_tools import OddlySaidError
from tests.support.threads import run_together
from tests.support.tool_executors import CATALOGUE, LINUX, LONG, PATH, call, error_of, executor_of, output_of

pytestmark = LINUX


def remote(*functions: Any, **settings: Any) -> ToolExecutor:
    """An executor of remote tools, which starts no worker."""
    catalogue = ToolCatalogue([Tool.from_function(each, remote=True, description="Do it.") for each in functions])
    return ToolExecutor(catalogue, options=ExecutorOptions(**settings))


# --- deadlines and turns
@pytest.fixture(scope="module")
def executor() -> Iterator[ToolExecutor]:
    """Tools without a timeout of their own have a short one. No more than one call of each kind runs at a time."""
    nap = Tool.from_function(tool_functions.async_nap, name="patient_async_nap", timeout=LONG, remote=True)
    own = [
        Tool.from_function(tool_functions.add, name="patient_add", timeout=LONG),
        Tool.from_function(tool_functions.nap, name="patient_nap", timeout=LONG),
        nap,
        replace(nap, name="short_async_nap", timeout=0.1),
    ]
    with executor_of(CATALOGUE.with_tools(*own), max_concurrency=1, timeout=1.0) as made:
        yield made


def test_a_late_call_ends_at_its_timeout_and_the_other_calls_finish(executor: ToolExecutor) -> None:
    results = executor.run([
        call("nap", seconds=500), call("patient_add", a=1), call("short_nap", seconds=500), call("patient_add", a=2),
        call("patient_nap", seconds=1.1), call("async_nap", seconds=500), call("short_async_nap", seconds=500),
        call("patient_async_nap", seconds=1.1),
    ])  # fmt: skip
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
        try:
            await asyncio.sleep(500)
        finally:
            ended.append("cancelled")

    async def stubborn() -> None:
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
        awaited.append(number)
        return repr((number, more, counts))

    with remote(ask) as made:
        wrong = [call("ask", number="1"), call("ask"), call("ask", number=1, other=2)]
        *refused, good = made.run([*wrong, call("ask", number=2.0, more=[1.0, 2], counts={"b": 4.0})])
    assert [error_of(result) for result in refused] == [InvalidArgumentsError] * 3
    assert str(refused[0].error) == "ask: at $.number: '1' is not of type 'integer'."
    assert good.output == "(2, [1, 2], {'b': 4})", "integers come as integers"
    assert awaited == [2]


class OddError(ToolError):
    """Made from two values, and without a message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)

    def __str__(self) -> str:
        raise RuntimeError


def test_an_error_raised_by_a_remote_tool_becomes_a_result() -> None:
    async def gone() -> None:
        """Ask a server that has ended, as the tools of an MCP server do: no fault of the call."""
        raise ServerLostError("the server ended")

    async def oddly() -> None:
        """Raise an error with an odd message."""
        raise OddlySaidError

    async def strangely() -> None:
        """Raise an error of a class of one's own."""
        raise OddError(1, 2)

    async def unsaid() -> None:
        """Raise one of the tools' own errors, whose message cannot be read."""
        raise ServerLostError(OddError(1, 2))

    schema = {"type": "object", "additionalProperties": True}
    own = [*(Tool.from_function(each, remote=True) for each in (gone, oddly, strangely, unsaid)),
           Tool.from_function(gone, name="none", remote=True, parameters=schema)]  # fmt: skip
    catalogue = ToolCatalogue([*(CATALOGUE[name] for name in ("async_raise", "async_exit", "async_nap")), *own])
    names = ("async_exit", "gone", "oddly", "strangely", "unsaid")
    calls = [call("async_raise", message="m"), *map(call, names), call("none", x=1)]
    with ToolExecutor(catalogue) as made:
        *results, last, rested = made.run([*calls, call("async_nap", seconds=0)])
    kinds = [*[ToolRaisedError] * 2, ServerLostError, *[ToolRaisedError] * 2, ServerLostError, ToolRaisedError, None]
    assert [error_of(result) for result in (*results, last, rested)] == kinds
    assert [str(result.error) for result in results] == [
        "async_raise: KeyError: 'm'", "async_exit: SystemExit: 3", "gone: the server ended", "oddly: OddlySaidError: odd",
        "strangely: OddError: (its message raised RuntimeError)", "unsaid: (its message raised RuntimeError)",
    ]  # fmt: skip
    assert "none: TypeError" in str(last.error)


async def rest(seconds: float) -> str:
    """Wait as a remote tool should."""
    for _ in range(4):
        await asyncio.sleep(seconds / 4)
    return "rested"


@pytest.mark.parametrize("blocking", ["block", "block_in_a_task"])
def test_a_remote_tool_that_blocks_fails_only_its_own_call(blocking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It blocks the loop for an hour, by a clock that stands still otherwise, once two other calls have begun."""
    now, begun, has_blocked = [0.0], [], asyncio.Event()
    clocked = partial(RemoteTools, clock=lambda: now[0])
    monkeypatch.setattr("adapters.tools.execution.executor.RemoteTools", clocked)

    async def rest() -> str:
        begun.append(1)
        await has_blocked.wait()
        await asyncio.sleep(0.01)
        return "rested"

    async def block(seconds: float) -> str:
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        now[0] += seconds
        has_blocked.set()
        return "blocked"

    async def block_in_a_task(seconds: float) -> str:
        return await asyncio.create_task(block(seconds))

    functions = (rest, block, block_in_a_task)
    tools = [Tool.from_function(each, remote=True, timeout=60.0, description="Do it.") for each in functions]
    catalogue = ToolCatalogue([*tools, Tool.from_function(tool_functions.nap, timeout=LONG)])
    with ToolExecutor(catalogue, num_workers=2) as made:
        calls = [call("rest"), call("nap", seconds=0.1), call(blocking, seconds=3600), call("rest")]
        resting, sleeping, blocked, waiting = made.run(calls)
        assert (resting.output, waiting.output) == ("rested", "rested")
        assert sleeping.ok
        assert str(blocked.error) == f"{blocking}: no answer within 60 s; the call was cancelled."
        assert output_of(made, blocking, seconds=0) == "blocked"


def test_the_time_of_many_calls_that_block_shortly_is_charged_to_each_of_them() -> None:
    """By a clock that each call moves on by 0.01 s. None waits for 0.6 s at its own cost, which would be too late."""
    now = [0.0]

    async def work() -> None:
        """Work."""
        now[0] += 0.01

    tool, remote_tools = Tool.from_function(work, remote=True), RemoteTools(1_000, 60, clock=lambda: now[0])
    turns = [Turn(call("work"), tool, None, threading.Event()) for _ in range(60)]
    run_together(*[partial(remote_tools.call, tool, {}, 0.3, turn) for turn in turns])
    remote_tools.close()
    assert [turn.seconds() for turn in turns] == pytest.approx([0.01] * 60)


def test_a_remote_tool_that_stops_the_loop_or_leaves_a_task_that_exits_ends_no_other_call() -> None:
    tasks = []

    async def stop() -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return "stopped"

    async def leave() -> str:
        tasks.append(asyncio.create_task(tool_functions.async_exit()))
        return "left"

    with remote(stop, leave, rest, timeout=LONG) as made:
        calls = [call("rest", seconds=0.1), call("stop"), call("leave"), call("stop"), call("rest", seconds=0.1)]
        results = made.run(calls)
        assert [result.output for result in results] == ["rested", "stopped", "left", "stopped", "rested"]
        assert isinstance(tasks[0].exception(), SystemExit)


def test_a_loop_that_a_remote_tool_never_gives_back_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_GRACE_SECONDS", 0.05), ("_LOOK_SECONDS", 0.05), ("_STUCK_SECONDS", 0.2)):
        monkeypatch.setattr(f"adapters.tools.execution.remote_tools.{name}", seconds)
    enough = threading.Event()

    async def hang() -> None:
        enough.wait(LONG)

    with remote(hang, rest, timeout=0.1) as made:
        hanging, resting = made.run([call("hang"), call("rest", seconds=0.05)])
        assert error_of(hanging) is ToolTimeoutError
        assert error_of(resting) is LoopBlockedError
        assert "another remote tool blocks the event loop" in str(resting.error)
        assert output_of(made, "rest", seconds=0.05) == "rested"
        enough.set()


def test_remote_outputs_are_json_of_bounded_size() -> None:
    async def give(what: str) -> Any:
        return {"long": "x" * 99, "nan": math.nan, "pair": (1, {2: 3})}[what]

    with remote(give, max_output_bytes=100) as small, remote(give, max_output_bytes=101) as enough:
        too_long, no_number, good = small.run([call("give", what=what) for what in ("long", "nan", "pair")])
        assert output_of(enough, "give", what="long") == "x" * 99
    assert error_of(too_long) is OutputTooLargeError  # 99 + 2 quotes
    assert error_of(no_number) is InvalidOutputError
    assert good.output == [1, {"2": 3}]


def test_a_remote_tool_may_await_other_calls_but_not_run_them() -> None:
    async def run() -> str:
        made.run([])
        return "unreached"

    async def wait() -> Any:
        [result] = await made.run_async([call("rest", seconds=0)])
        return result.output

    with remote(run, wait, rest, timeout=LONG) as made:
        [result] = made.run([call("run")])
        assert "await run_async" in str(result.error)
        assert output_of(made, "wait") == "rested"


# --- hostile calls of remote tools: each ends as required and delays no other call
BACKTRACKING = "^(a|aa)+$"


async def echo(value: Any = None) -> Any:
    """Return what came."""
    return value


SHORT = 0.4
"""Timeout of the calls that must not end by themselves. The others have all the time that a busy machine may take."""


def _tool(name: str, value: dict[str, Any], **definitions: Any) -> Tool:
    parameters = {"type": "object", "properties": {"value": value}, "$defs": definitions}
    return Tool(name=name, description=name, function=echo, parameters=parameters, remote=True)


ANY = {"$ref": "#/$defs/any"}
OPERATORS = {
    name: {
        "type": "object", "required": ["op", "of"],
        "properties": {"op": {"const": name}, "of": {"type": "array", "items": ANY}},
    } for name in ("and", "or", "not")
}  # fmt: skip
HOSTILE = ToolCatalogue([
    _tool("echo", {}), _tool("whole", {"type": "integer"}),
    _tool("pattern", {"type": "string", "pattern": BACKTRACKING}), _tool("no_schema", {"$ref": "#/type/x"}),
    _tool("keys", {"patternProperties": {BACKTRACKING: True}}),
    _tool("names", {"propertyNames": {"pattern": BACKTRACKING}}), _tool("unique", {"type": "array", "uniqueItems": True}),
    _tool("referred", {"$ref": "#/$defs/unique"}, unique={"items": {"uniqueItems": True}}),
    _tool("filter", ANY, **OPERATORS,
          any={"anyOf": [*({"$ref": f"#/$defs/{name}"} for name in OPERATORS), {"type": "string"}]}),
])  # fmt: skip
HOSTILE = HOSTILE.with_tools(*(replace(tool, name=f"{name}-hurried", timeout=SHORT) for name, tool in HOSTILE.items()))
FILTER: Any = "a"
for _ in range(14):
    FILTER = {"op": "neither", "of": [FILTER]}
OBJECTS = [{"": i} for i in range(8_000)]
CASES: list[tuple[str, Any, Any]] = [
    ("echo", {"value": "x" * 10**6}, InvalidArgumentsError), ("whole", {"value": True}, InvalidArgumentsError),
    ("whole", {"value": 2.0}, 2), ("whole", {"value": 10**400}, 10**400),
    ("pattern", {"value": "a" * 60 + "!"}, ToolTimeoutError), ("pattern", {"value": "b"}, InvalidArgumentsError),
    ("pattern", {"value": "aaa"}, "aaa"), ("pattern", {"value": "aaa", "other": 1}, InvalidArgumentsError),
    ("keys", {"value": {"a" * 60 + "!": 1}}, ToolTimeoutError), ("keys", {"value": {"a": 1}}, {"a": 1}),
    ("names", {"value": {"a" * 60 + "!": 1}}, ToolTimeoutError), ("names", {"value": {"b": 1}}, InvalidArgumentsError),
    ("unique", {"value": OBJECTS}, ToolTimeoutError), ("unique", {"value": [*OBJECTS[:50]] * 2}, InvalidArgumentsError),
    ("unique", {"value": [{"a": i} for i in range(20_000)]}, InvalidArgumentsError),
    ("unique", {"value": [1, True, {}]}, [1, True, {}]), ("referred", {"value": [OBJECTS]}, ToolTimeoutError),
    ("filter", {"value": FILTER}, ToolTimeoutError),
    ("filter", {"value": {"op": "not", "of": ["a"]}}, {"op": "not", "of": ["a"]}),
    ("no_schema", {"value": 1}, InvalidArgumentsError), ("no_schema", {}, None),
]  # fmt: skip


@pytest.mark.slow
def test_each_hostile_remote_call_ends_as_required_while_another_is_answered(tmp_path, subtests, monkeypatch) -> None:
    monkeypatch.setattr("adapters.tools.execution.remote_tools._GRACE_SECONDS", 0.1)
    log, num_answered = tmp_path / "calls.jsonl", 0
    found: list[ToolResult] = []
    with executor_of(HOSTILE, num_workers=4, log_path=log) as executor:
        calls = [
            ToolCall(tool=f"{tool}-hurried" if ends is ToolTimeoutError else tool, arguments=arguments)
            for tool, arguments, ends in CASES
        ]
        thread = threading.Thread(target=lambda: found.extend(executor.run(calls)))
        thread.start()
        while not found:
            assert output_of(executor, "echo", value="here") == "here"
            num_answered += not found
        thread.join()
    assert num_answered > 2, "calls beside the hostile ones were answered while these ran"
    for (tool, arguments, ends), result in zip(CASES, found, strict=True):
        with subtests.test(tool, arguments=bounded_text(arguments, 40)):
            if isinstance(ends, type):
                assert type(result.error) is ends, result.error
            else:
                assert result.ok, result.error
                assert repr(result.output) == repr(ends)
    assert log.read_bytes().count(b"\n") >= len(CASES) + num_answered


def test_a_remote_tool_with_both_paths_and_patterns_is_refused() -> None:
    both = _tool("both", {"properties": {"path": PATH, "name": {"type": "string", "pattern": "a"}}})
    with pytest.raises(ConfigError, match=r'Tool both: .* both "format": "path" and `pattern`.* Remove one of the two'):
        ToolExecutor(ToolCatalogue([both]))


def test_without_fork_only_remote_tools_without_patterns_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ConfigError, match=r"needs Unix .* must not have `pattern`"):
        ToolExecutor(HOSTILE)
    with ToolExecutor(ToolCatalogue([HOSTILE["echo"]])) as made:
        assert output_of(made, "echo", value=1) == 1


def test_quick_argument_checks_start_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.tools.execution.workers.ForkServerProcess", None)
    with ToolExecutor(HOSTILE, allow=["echo", "whole"]) as made:
        assert output_of(made, "whole", value=3.0) == 3
