"""Tools of a real MCP server made with the official SDK: its list of tools, many calls, and training on calls."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mcp import MCPError

from adapters.tools import ExecutorOptions
from adapters.tools.catalogue.calls import ToolCall, ToolResult
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import (
    InvalidArgumentsError,
    OutputTooLargeError,
    ServerLostError,
    ToolNotAllowedError,
    ToolRaisedError,
    ToolTimeoutError,
)
from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.mcp_tools import MCPServer
from adapters.tools.learning.rewards import ToolRewards
from adapters.tools.policy.policy import ToolSelectionPolicy
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from tests.support.mcp_servers import REAL, ask, by_hand, by_name
from tests.support.threads import run_together
from tests.support.tool_executors import LONG, soon


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, Tool]]:
    with MCPServer(REAL) as server:
        yield by_name(server)


# --- what a server offers


def test_each_tool_of_the_server_is_a_remote_tool(tools: dict[str, Tool]) -> None:
    assert list(tools) == [
        "add",
        "weather",
        "paint",
        "slow",
        "waits",
        "fail",
        "refuse",
        "picture",
        "variable",
        "place",
        "die",
    ]
    assert all(tool.remote and tool.category == "testing" for tool in tools.values())
    assert tools["add"].description == "Add two numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]
    assert list(ToolCatalogue(tools.values())) == list(tools)


def test_enumerations_are_found_behind_references_and_beside_null(tools: dict[str, Tool]) -> None:
    choices = {choice.name: choice.values for choice in tools["paint"].choices}
    assert choices == {"colour": ("red", "blue"), "shade": ("light", "dark"), "finish": ("matt", "gloss", None)}
    assert [choice.values for choice in tools["weather"].choices] == [("celsius", "fahrenheit")]


def test_a_call_returns_the_text_structure_or_image_summary_of_the_server(
    tools: dict[str, Tool], subtests: pytest.Subtests
) -> None:
    for name, arguments, output in (
        ("add", {"a": 1.5, "b": 2}, "3.5"),
        ("weather", {"city": "Oslo", "unit": "fahrenheit"}, {"city": "Oslo", "degrees": 68.0}),
        ("paint", {"colour": "red", "shade": "dark", "finish": None}, "dark red, plain"),
        ("picture", {}, "look:\n[image image/png, 5 bytes]"),
    ):
        with subtests.test(name):
            assert ask(tools[name], **arguments) == output


def test_a_failing_tool_raises_the_servers_message(tools: dict[str, Tool], subtests: pytest.Subtests) -> None:
    for name, arguments, text in (
        ("refuse", {}, r"^not today$"),
        ("fail", {"reason": "no paper"}, r"^Error executing tool fail"),
        ("add", {"a": 1}, r"(?s)^Error executing tool add: .*Field required"),
    ):
        with subtests.test(name):
            with pytest.raises(ToolRaisedError, match=text):
                ask(tools[name], **arguments)
            assert ask(tools["add"], a=1, b=1) == "2"


def test_a_text_that_is_no_unicode_is_refused_and_the_session_goes_on(tools: dict[str, Tool]) -> None:
    """Half of a pair of code units cannot be sent, and trying to send it would end the session."""
    with pytest.raises(InvalidArgumentsError, match="texts for an MCP server must be valid Unicode"):
        ask(tools["fail"], reason="\ud800")
    assert ask(tools["add"], a=1, b=1) == "2"


def test_an_error_of_the_server_is_not_taken_for_a_lost_server(
    tools: dict[str, Tool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers may use the code -32000 for errors of their own. The SDK uses it for a connection that has ended."""
    server = tools["add"].function.func.__self__  # type: ignore[attr-defined]
    for message, kind in (("no such city", ToolRaisedError), ("Connection closed", ServerLostError)):

        async def answer(*_: Any, message: str = message) -> Any:
            raise MCPError(code=-32000, message=message)

        with monkeypatch.context() as patch:
            patch.setattr(server._client, "call_tool", answer)
            with pytest.raises(kind, match=message if kind is ToolRaisedError else "the connection to MCP server"):
                ask(tools["add"], a=1, b=1)
    assert ask(tools["add"], a=1, b=1) == "2"


# --- many calls


def test_event_loops_of_several_threads_can_share_a_server(tools: dict[str, Tool]) -> None:
    sums: dict[int, str] = {}

    def work(number: int) -> None:
        sums[number] = ask(tools["add"], a=number, b=1)

    run_together(*(partial(work, number) for number in range(4)))
    assert sums == {0: "1", 1: "2", 2: "3", 3: "4"}


def test_a_cancelled_call_is_cancelled_at_the_server(tools: dict[str, Tool]) -> None:
    """While it waits, the server answers other calls."""
    before = ask(tools["waits"])

    async def impatient() -> None:
        waiting = asyncio.ensure_future(tools["slow"].function(seconds=10 * LONG))
        while (await tools["waits"].function())["begun"] == before["begun"]:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(impatient())
    assert soon(lambda: ask(tools["waits"])["cancelled"] > before["cancelled"])
    assert ask(tools["waits"]) == {"begun": before["begun"] + 1, "cancelled": before["cancelled"] + 1}


def test_two_servers_can_be_used_at_once(tools: dict[str, Tool], tmp_path: Path) -> None:
    with by_hand(cwd=tmp_path) as server:
        second = by_name(server)
        assert second["place"].category == "by hand"
        place = json.loads(ask(second["place"]))
        assert place["folder"] == str(tmp_path)
        assert place["process"] != ask(tools["place"])["process"]
        renamed = [dataclasses.replace(tool, name=f"second.{tool.name}") for tool in second.values()]
        catalogue = ToolCatalogue([*tools.values(), *renamed])
        assert json.loads(ask(catalogue["second.place"])) == place
        assert ask(catalogue["add"], a=1, b=2) == "3"


# --- executed, and learned from


def catalogue_of(tools: dict[str, Tool], *names: str) -> ToolCatalogue:
    return ToolCatalogue([tools[name] for name in names])


def test_a_hanging_call_ends_at_its_timeout_and_every_call_is_logged(tools: dict[str, Tool], tmp_path: Path) -> None:
    before = ask(tools["waits"])
    calls = [
        ToolCall(tool="add", arguments={"a": 1, "b": 2}),
        ToolCall(tool="fail", arguments={"reason": "no paper"}),
        ToolCall(tool="slow", arguments={"seconds": 10 * LONG}),
    ]
    hurried = tools | {"slow": dataclasses.replace(tools["slow"], timeout=1.5)}
    with ToolExecutor(
        catalogue_of(hurried, "add", "fail", "slow"), options=ExecutorOptions(timeout=LONG, log_path=tmp_path / "log")
    ) as executor:
        well, failed, late = executor.run(calls)
        assert well.output == "3"
        assert isinstance(failed.error, ToolRaisedError)
        assert isinstance(late.error, ToolTimeoutError)
        assert 1.5 <= late.seconds < LONG
        assert soon(lambda: ask(tools["waits"])["cancelled"] > before["cancelled"])
        assert ask(tools["waits"]) == {"begun": before["begun"] + 1, "cancelled": before["cancelled"] + 1}
        assert executor.run([ToolCall(tool="add", arguments={"a": 2, "b": 2})])[0].output == "4"
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    by_tool = {line["tool"]: line for line in lines[:3]}
    assert {call.tool: dict(call.arguments) for call in calls} == {
        name: line["arguments"] for name, line in by_tool.items()
    }
    assert {name: (line["ok"], line["error"]) for name, line in by_tool.items()} == {
        "add": (True, None),
        "fail": (False, "ToolRaisedError"),
        "slow": (False, "ToolTimeoutError"),
    }
    assert by_tool["add"]["output_bytes"] == len('"3"')
    assert by_tool["add"]["seconds"] > 0
    assert by_tool["slow"]["seconds"] >= 1.5


REFUSED = [
    ("add", {"a": "1", "b": 2}, InvalidArgumentsError, r"add: at \$\.a: '1' is not of type 'number'"),
    ("add", {"a": 1}, InvalidArgumentsError, "'b' is a required property"),
    ("paint", {"colour": "green", "shade": "dark"}, InvalidArgumentsError, "'green' is not one of"),
    ("slow", {"seconds": 60.0, "more": 1}, InvalidArgumentsError, "'more' was unexpected"),
    ("slow", {"seconds": float("nan")}, InvalidArgumentsError, "finite"),
    ("die", {"code": 3}, ToolNotAllowedError, "must be one of the allowed tools"),
    ("refuse", {}, ToolRaisedError, "refuse: not today"),
]


def test_refused_arguments_never_reach_the_server(tools: dict[str, Tool], subtests: pytest.Subtests) -> None:
    before = ask(tools["waits"])
    with ToolExecutor(
        ToolCatalogue(tools.values()), allow=set(tools) - {"die"}, options=ExecutorOptions(timeout=LONG)
    ) as executor:
        results = executor.run([ToolCall(tool=name, arguments=arguments) for name, arguments, *_ in REFUSED])
    for (name, _, kind, message), result in zip(REFUSED, results, strict=True):
        with subtests.test(name, message=message):
            assert type(result.error) is kind
            assert re.search(message, str(result.error))
    assert ask(tools["waits"]) == before


def test_an_output_that_is_too_large_is_an_error(tools: dict[str, Tool]) -> None:
    calls = [ToolCall(tool="weather", arguments={"city": city}) for city in ("Oslo", "x" * 500)]
    with ToolExecutor(catalogue_of(tools, "weather"), options=ExecutorOptions(max_output_bytes=100)) as executor:
        short, long = executor.run(calls)
    assert short.output == {"city": "Oslo", "degrees": 20.0}
    assert isinstance(long.error, OutputTooLargeError)


@pytest.mark.slow
def test_a_policy_learns_which_tool_of_a_server_to_call(tools: dict[str, Tool]) -> None:
    """Five tools, one with two decisions: 1 in 5 is right by chance, and 1 in 10 for the colour."""
    catalogue = catalogue_of(tools, "add", "weather", "paint", "refuse", "picture")
    answers = {
        "their sum, please": "3",
        "how warm is it in Oslo": {"city": "Oslo", "degrees": 20.0},
        "a blue door": "dark blue, plain",
    }
    free = {"a": 1, "b": 2, "city": "Oslo"}

    def right(request: str, call: ToolCall, result: ToolResult) -> float:
        return float(result.output == answers[request])

    torch.manual_seed(0)
    policy = ToolSelectionPolicy(catalogue, fill=lambda request, tool: free)
    config = GRPOConfig(group_size=16, learning_rate=0.05, seed=0, objective=ObjectiveConfig(aggregation="row_sum"))
    with ToolExecutor(catalogue) as executor:
        rewards = ToolRewards(executor, {"right": right}, reuse_results=True)
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
        history = trainer.train(list(answers), num_iterations=25, progress=False)
        results = executor.run(policy.predict(list(answers)))
    assert history[0]["rewards/mean"] < 0.4
    assert history[-1]["rewards/mean"] > 0.8
    assert [result.output for result in results] == list(answers.values())
