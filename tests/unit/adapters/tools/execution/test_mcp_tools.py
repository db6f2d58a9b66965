"""Tools of a real MCP server made with the official SDK: its list of tools, and many calls."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError

from adapters.tools import InvalidArgumentsError, MCPServer, Tool, ToolCatalogue
from adapters.tools.errors import ServerLostError, ToolNotAllowedError, ToolRaisedError, ToolTimeoutError
from tests.support.mcp_servers import REAL, ask, by_hand, by_name
from tests.support.threads import run_together
from tests.support.tool_executors import LONG, call, executor_of, output_of, soon


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, Tool]]:
    with MCPServer(REAL) as server:
        yield by_name(server)


def test_each_tool_of_the_server_is_a_remote_tool(tools: dict[str, Tool]) -> None:
    names = ["add", "weather", "paint", "slow", "waits", "fail", "refuse", "picture", "variable", "place", "die"]
    assert list(tools) == list(ToolCatalogue(tools.values())) == names
    assert all(tool.remote and tool.category == "testing" for tool in tools.values())
    assert tools["add"].description == "Add two numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]
    assert {choice.name: choice.values for choice in tools["paint"].choices} == {
        "colour": ("red", "blue"), "shade": ("light", "dark"), "finish": ("matt", "gloss", None),
    }, "behind references and beside null"  # fmt: skip
    assert [choice.values for choice in tools["weather"].choices] == [("celsius", "fahrenheit")]


def test_a_call_returns_the_text_structure_or_image_summary_of_the_server(tools: dict[str, Tool]) -> None:
    assert ask(tools["add"], a=1.5, b=2) == "3.5"
    assert ask(tools["weather"], city="Oslo", unit="fahrenheit") == {"city": "Oslo", "degrees": 68.0}
    assert ask(tools["paint"], colour="red", shade="dark", finish=None) == "dark red, plain"
    assert ask(tools["picture"]) == "look:\n[image image/png, 5 bytes]"


def test_a_failing_tool_raises_and_the_session_goes_on(tools: dict[str, Tool], subtests: pytest.Subtests) -> None:
    """Half of a pair of code units cannot be sent, and trying to send it would end the session."""
    for name, arguments, kind, text in (
        ("refuse", {}, ToolRaisedError, r"^not today$"),
        ("fail", {"reason": "no paper"}, ToolRaisedError, r"^Error executing tool fail"),
        ("add", {"a": 1}, ToolRaisedError, r"(?s)^Error executing tool add: .*Field required"),
        ("fail", {"reason": "\ud800"}, InvalidArgumentsError, "texts for an MCP server must be valid Unicode"),
    ):
        with subtests.test(text):
            with pytest.raises(kind, match=text):
                ask(tools[name], **arguments)
            assert ask(tools["add"], a=1, b=1) == "2"


def test_an_error_of_the_server_is_not_taken_for_a_lost_server(tools: dict[str, Tool], monkeypatch) -> None:
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


def test_a_hanging_call_ends_at_its_timeout_and_the_server_goes_on(tools: dict[str, Tool]) -> None:
    before = ask(tools["waits"])
    calls = [call("add", a=1, b=2), call("fail", reason="no paper"), call("slow", seconds=10 * LONG)]
    catalogue = ToolCatalogue([tools["add"], tools["fail"], dataclasses.replace(tools["slow"], timeout=1.5)])
    with executor_of(catalogue) as executor:
        well, failed, late = executor.run(calls)
        assert (well.output, type(failed.error), type(late.error)) == ("3", ToolRaisedError, ToolTimeoutError)
        assert 1.5 <= late.seconds < LONG
        assert soon(lambda: ask(tools["waits"])["cancelled"] > before["cancelled"])
        assert ask(tools["waits"]) == {"begun": before["begun"] + 1, "cancelled": before["cancelled"] + 1}
        assert output_of(executor, "add", a=2, b=2) == "4"


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
    with executor_of(ToolCatalogue(tools.values()), allow=set(tools) - {"die"}) as executor:
        results = executor.run([call(name, **arguments) for name, arguments, *_ in REFUSED])
    for (name, _, kind, message), result in zip(REFUSED, results, strict=True):
        with subtests.test(name, message=message):
            assert type(result.error) is kind
            assert re.search(message, str(result.error))
    assert ask(tools["waits"]) == before
