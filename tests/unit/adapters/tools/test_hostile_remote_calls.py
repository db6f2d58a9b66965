"""Calls of remote tools that mean harm: each ends as it must, and holds up none beside it."""

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.tools.arguments import bounded_text
from adapters.tools.calls import ToolCall, ToolResult
from adapters.tools.catalogue import Tool, ToolCatalogue
from adapters.tools.errors import (
    InvalidArgumentsError,
    InvalidOutputError,
    OutputTooLargeError,
    ToolError,
    ToolRaisedError,
    ToolTimeoutError,
    WorkerDiedError,
)
from adapters.tools.executor import ToolExecutor
from grpo.errors import ConfigError

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="some of them are checked by workers")]
if os.name != "posix" or os.geteuid() != 0:
    pytestmark.append(pytest.mark.filterwarnings("ignore::grpo.errors.GRPOWarning"))

BACKTRACKING = "^(a|aa)+$"


class OddError(ToolError):
    """Made from two values, and without a message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)

    def __str__(self) -> str:
        raise RuntimeError


async def echo(value: Any = None) -> Any:
    """Return what came."""
    return value


async def misbehave(how: str) -> Any:
    """Do what it says."""
    if how == "hang":
        await asyncio.sleep(60)
    if how == "be stubborn":
        for _ in range(100):
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
    if how == "raise oddly":
        raise OddError(1, 2)
    if how == "lose its server":
        raise WorkerDiedError(OddError(1, 2))
    return {"return much": "x" * 10**6, "return nan": math.nan, "return bytes": b"x", "return an object": object()}[how]


def _tool(name: str, **schema: Any) -> Tool:
    parameters = {"type": "object", "properties": {"value": schema}}
    return Tool(name=name, description=name, function=echo, parameters=parameters, remote=True)


CATALOGUE = ToolCatalogue(
    [
        Tool.from_function(misbehave, remote=True),
        _tool("echo"),
        _tool("whole", type="integer"),
        _tool("pattern", type="string", pattern=BACKTRACKING),
        _tool("keys", patternProperties={BACKTRACKING: True}),
        _tool("names", propertyNames={"pattern": BACKTRACKING}),
        _tool("unique", type="array", uniqueItems=True),
        Tool(
            name="referred", description="Refer.", function=echo, remote=True,
            parameters={
                "type": "object", "properties": {"value": {"$ref": "#/$defs/unique"}},
                "$defs": {"unique": {"items": {"uniqueItems": True}}},
            },
        ),
        _tool("no_schema", **{"$ref": "#/type/x"}),
        Tool(
            name="filter", description="Filter.", function=echo, remote=True,
            parameters={
                "type": "object", "properties": {"value": {"$ref": "#/$defs/any"}},
                "$defs": {
                    "any": {"anyOf": [*({"$ref": f"#/$defs/{name}"} for name in ("and", "or", "not")), {"type": "string"}]},
                } | {
                    name: {
                        "type": "object", "required": ["op", "of"],
                        "properties": {"op": {"const": name}, "of": {"type": "array", "items": {"$ref": "#/$defs/any"}}},
                    } for name in ("and", "or", "not")
                },
            },
        ),
    ]
)  # fmt: skip

FILTER: Any = "a"
for _ in range(14):
    FILTER = {"op": "neither", "of": [FILTER]}
OBJECTS = [{"": i} for i in range(8_000)]
CASES: list[tuple[str, Any, Any]] = [
    *(("misbehave", {"how": how}, ends) for how, ends in {
        "hang": ToolTimeoutError, "be stubborn": ToolTimeoutError, "raise oddly": ToolRaisedError,
        "lose its server": WorkerDiedError, "return much": OutputTooLargeError, "return nan": InvalidOutputError,
        "return bytes": InvalidOutputError, "return an object": InvalidOutputError, "what is not known": ToolRaisedError,
    }.items()),
    ("misbehave", {}, InvalidArgumentsError), ("misbehave", {"how": 5}, InvalidArgumentsError),
    ("misbehave", {"how": "hang", "other": 1}, InvalidArgumentsError), ("echo", {"value": math.nan}, InvalidArgumentsError),
    ("echo", {"value": 10**5000}, InvalidArgumentsError), ("echo", {"value": "x" * 10**6}, InvalidArgumentsError),
    ("whole", {"value": 2.5}, InvalidArgumentsError), ("whole", {"value": True}, InvalidArgumentsError),
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


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all calls."""
    return tmp_path_factory.mktemp("log") / "calls.jsonl"


@pytest.fixture(scope="module")
def executor(log: Path) -> Iterator[ToolExecutor]:
    with ToolExecutor(CATALOGUE, num_workers=1, timeout=0.6, log_path=log) as made:
        yield made


@pytest.mark.parametrize(
    ("tool", "arguments", "ends"), CASES, ids=[f"{tool} {bounded_text(more, 40)}" for tool, more, _ in CASES]
)
def test_it_ends_as_it_must_and_another_call_is_answered_meanwhile(
    executor: ToolExecutor, log: Path, tool: str, arguments: Any, ends: Any
) -> None:
    lines = log.read_bytes().count(b"\n")
    found: list[ToolResult] = []
    hostile = ToolCall(tool=tool, arguments=arguments)
    thread = threading.Thread(target=lambda: found.extend(executor.run([hostile])))
    start = time.perf_counter()
    thread.start()
    time.sleep(0.1)
    asked = time.perf_counter()
    [beside] = executor.run([ToolCall(tool="echo", arguments={"value": "here"})])
    assert beside.output == "here"
    assert time.perf_counter() - asked < 0.4
    if ends is ToolTimeoutError:
        assert not found  # it was under way
    thread.join(10)
    assert time.perf_counter() - start < 5
    [result] = found
    if isinstance(ends, type):
        assert type(result.error) is ends, result.error
    else:
        assert result.ok, result.error
        assert repr(result.output) == repr(ends)
    assert log.read_bytes().count(b"\n") == lines + 2


def test_paths_and_patterns_do_not_go_together() -> None:
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string", "format": "path"}, "name": {"type": "string", "pattern": "a"}},
    }
    tool = Tool(name="both", description="Both.", function=echo, remote=True, parameters=parameters)
    with pytest.raises(ConfigError, match=r'Tool both: .* both "format": "path" and `pattern`.* Leave one of them out'):
        ToolExecutor(ToolCatalogue([tool]))


def test_without_fork_remote_tools_without_patterns_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ConfigError, match=r"needs Unix .* without `pattern`"):
        ToolExecutor(CATALOGUE)
    with ToolExecutor(ToolCatalogue([CATALOGUE["echo"]])) as made:
        assert made.run([ToolCall(tool="echo", arguments={"value": 1})])[0].output == 1


def test_only_what_may_take_long_is_checked_by_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("adapters.tools.workers.WorkerSource.start", refuse)
    with ToolExecutor(CATALOGUE, allow=["echo", "whole", "misbehave"]) as made:
        assert made.run([ToolCall(tool="whole", arguments={"value": 3.0})])[0].output == 3
