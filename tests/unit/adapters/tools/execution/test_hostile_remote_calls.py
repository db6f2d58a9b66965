"""Hostile calls of remote tools: each ends as required and delays no other call."""

import asyncio
import contextlib
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.catalogue.arguments import bounded_text
from adapters.tools.catalogue.calls import ToolCall, ToolResult
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import (
    InvalidArgumentsError,
    InvalidOutputError,
    OutputTooLargeError,
    ToolError,
    ToolRaisedError,
    ToolTimeoutError,
    WorkerDiedError,
)
from adapters.tools.execution.executor import ToolExecutor
from grpo.errors import ConfigError
from tests.support.tool_executors import LINUX, LONG

pytestmark = LINUX  # some of them are checked by workers

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
        for _ in range(4):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(LONG)
    if how == "raise oddly":
        raise OddError(1, 2)
    if how == "lose its server":
        raise WorkerDiedError(OddError(1, 2))
    return {"return much": "x" * 10**6, "return nan": math.nan, "return bytes": b"x", "return an object": object()}[how]


SHORT = 0.4
"""Timeout of the calls that must not end by themselves. The others have all the time that a busy machine may take."""


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

CATALOGUE = CATALOGUE.with_tools(
    *(replace(tool, name=f"{name}-hurried", timeout=SHORT) for name, tool in CATALOGUE.items())
)

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


@pytest.mark.slow
def test_each_hostile_remote_call_ends_as_required_while_another_is_answered(
    tmp_path: Path, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.tools.execution.remote_tools._GRACE_SECONDS", 0.1)
    log = tmp_path / "calls.jsonl"
    beside, num_answered = ToolCall(tool="echo", arguments={"value": "here"}), 0
    found: list[ToolResult] = []
    with ToolExecutor(CATALOGUE, num_workers=4, options=ExecutorOptions(timeout=LONG, log_path=log)) as executor:
        calls = [
            ToolCall(tool=f"{tool}-hurried" if ends is ToolTimeoutError else tool, arguments=arguments)
            for tool, arguments, ends in CASES
        ]
        thread = threading.Thread(target=lambda: found.extend(executor.run(calls)))
        thread.start()
        while not found:
            [result] = executor.run([beside])
            assert result.output == "here"
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
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string", "format": "path"}, "name": {"type": "string", "pattern": "a"}},
    }
    tool = Tool(name="both", description="Both.", function=echo, remote=True, parameters=parameters)
    with pytest.raises(ConfigError, match=r'Tool both: .* both "format": "path" and `pattern`.* Remove one of the two'):
        ToolExecutor(ToolCatalogue([tool]))


def test_without_fork_only_remote_tools_without_patterns_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ConfigError, match=r"needs Unix .* must not have `pattern`"):
        ToolExecutor(CATALOGUE)
    with ToolExecutor(ToolCatalogue([CATALOGUE["echo"]])) as made:
        assert made.run([ToolCall(tool="echo", arguments={"value": 1})])[0].output == 1


def test_quick_argument_checks_start_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("adapters.tools.execution.workers.ForkServerProcess.__init__", refuse)
    with ToolExecutor(CATALOGUE, allow=["echo", "whole", "misbehave"]) as made:
        assert made.run([ToolCall(tool="whole", arguments={"value": 3.0})])[0].output == 3
