"""MCP servers: the tools of a server of the official SDK; and sessions, also with servers that do what they should not."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError

from adapters.tools import InvalidArgumentsError, MCPServer, Tool, ToolCall, ToolCatalogue, ToolExecutor
from adapters.tools.errors import ServerLostError, ToolRaisedError, ToolTimeoutError
from grpo.errors import ConfigError, GRPOWarning
from tests.support.mcp_servers import REAL, ask, by_hand, by_name, is_gone, listing, process_of
from tests.support.threads import run_together
from tests.support.tool_executors import LONG, call, executor_of, output_of, soon


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, Tool]]:
    with MCPServer(REAL) as server:
        yield by_name(server)


def test_each_tool_of_the_server_is_a_remote_tool(tools: dict[str, Tool]) -> None:
    names = ["add", "weather", "paint", "slow", "waits", "fail", "refuse", "picture", "place"]
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


# --- sessions
ROOT = Path(__file__).resolve().parents[5]


def test_leaving_the_block_ends_the_server_and_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THIS_PROCESS", "1")
    before = set(threading.enumerate())
    server = by_hand(env={"ADDED": "2"})
    with pytest.raises(ConfigError, match="is not running"):
        server.tools()
    with server:
        tools = {tool.name: tool for tool in server.tools(category=lambda name: name[0])}
        assert [tools[name].category for name in ("slow", "place")] == ["s", "p"]
        for name, value in {"SECRET_OF_THIS_PROCESS": "not set", "ADDED": "2", "PATH": os.environ["PATH"]}.items():
            assert ask(tools["variable"], name=name) == f'"{value}"'
        process = process_of(tools)
        with pytest.raises(ConfigError, match="is already running"):
            server.__enter__()
    assert is_gone(process)
    with pytest.raises(ServerLostError, match="is closed"):
        ask(tools["waits"])
    with server:  # anew: another process, and the tools are its tools now
        assert process_of(tools) != process
    assert soon(lambda: set(threading.enumerate()) <= before)


def test_leaving_the_block_ends_a_running_call_with_an_error() -> None:
    async def leave() -> None:
        with by_hand() as server:
            tools = by_name(server)
            waiting = asyncio.create_task(tools["slow"].function())
            while await tools["waits"].function() == "0":
                await asyncio.sleep(0.01)
        await waiting

    with pytest.raises(ServerLostError, match=r"the connection to MCP server .* ended"):
        asyncio.run(leave())


def test_a_server_that_dies_is_reported_with_its_stderr_and_its_calls_fail() -> None:
    with by_hand() as server:
        tools = by_name(server)
        with ToolExecutor(ToolCatalogue(tools.values())) as executor:
            results = executor.run([ToolCall(tool="slow"), ToolCall(tool="die")])
            results += executor.run([ToolCall(tool="waits")])
        assert [type(result.error) for result in results] == [ServerLostError] * 3
        last_words = r"ended; on stderr it said last: the server gives up\. The server is not restarted: .* it again"
        with pytest.raises(ServerLostError, match=last_words):
            ask(tools["waits"])


def test_noise_on_stdout_costs_no_call_and_noise_on_stderr_little_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is not UTF-8 is read with replaced characters, is not JSON, and is passed over."""
    monkeypatch.setattr("adapters.tools.execution.mcp_tools._STDERR_FILE_BYTES", 100_000)
    with by_hand(listing("noise"), listing("place"), listing("complain")) as server:
        tools = by_name(server)
        assert json.loads(ask(tools["noise"])) == "noise"
        assert "process" in json.loads(ask(tools["place"]))
        for _ in range(20):
            ask(tools["complain"])
        assert 20_000 < os.fstat(server._stderr.fileno()).st_size < 200_000
        assert server._last_words().endswith("xxx / that is all")


def test_a_session_that_ends_by_itself_loses_its_calls_and_is_left_quietly() -> None:
    with by_hand() as server:
        tools = by_name(server)
        process = process_of(tools)
        server._portal.call(server._portal.stop, True)
        assert soon(lambda: is_gone(process))
        message = r"MCP server .* is lost\. The server is not restarted: leave its `with`"
        with pytest.raises(ServerLostError, match=message):
            ask(tools["waits"])
    with server:
        assert ask(tools["waits"]) == "0"


def test_a_server_that_cannot_start_is_refused_with_the_reason(tmp_path: Path, subtests: pytest.Subtests) -> None:
    note = tmp_path / "process"
    for make, text in (
        (lambda: MCPServer(["/no/such/program"]), "FileNotFoundError.*Run the command in a terminal"),
        (lambda: MCPServer(["/no/such\0program"]), "could not be started: ValueError: .*null byte"),
        (lambda: MCPServer([sys.executable, "-c", "import sys; sys.exit('no licence')"]),
         "could not be started: .*said last: no licence"),
        (lambda: MCPServer(hanging(note, "sleep 600"), start_timeout=1.0),
         "was not ready within 1 s; if it is only slow, raise start_timeout"),
        (lambda: by_hand(listing("good"), listing("bad", inputSchema={})),
         r"(?s)could not be started: .*tools\.0\.inputSchema\.type"),
        (lambda: MCPServer(), "not both"), (lambda: MCPServer(["a"], url="http://b"), "not both"),
        (lambda: MCPServer("uvx a-server"), r"must be a list of strings.*'uvx a-server'"),
        (lambda: MCPServer([]), r"must be a list of strings that begins with a program, .*; got \[\]"),
        (lambda: MCPServer(url="http://b", env={}), "env and cwd apply only to a server that `command` starts"),
        (lambda: MCPServer(["a"], start_timeout=0.0), "start_timeout must be > 0 seconds; got 0.0"),
        (lambda: MCPServer(["a"], env=7), "env must be a dict of texts, or None; got 7"),
        (lambda: MCPServer(["a"], cwd=7), "cwd must be a path, or None; got 7"),
        (lambda: MCPServer(url=7), "url must be a text, or None; got 7"),
    ):  # fmt: skip
        with subtests.test(text), pytest.raises(ConfigError, match=text), make():
            pass
    assert is_gone(int(note.read_text()))


def hanging(note: Path, then: str) -> list[str]:
    """A command that writes its process number and then does not speak."""
    return ["sh", "-c", f"echo $$ > '{note}.new'; mv '{note}.new' '{note}'; exec {then}"]


@pytest.mark.slow
def test_an_interrupt_during_a_slow_start_leaves_no_server_behind(tmp_path: Path) -> None:
    note = tmp_path / "process"
    code = f"""
import tests.support.light_packages
from adapters.tools.execution.mcp_tools import MCPServer
try:
    MCPServer({hanging(note, "cat > /dev/null")!r}, start_timeout=500.0).__enter__()
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert soon(note.exists)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=LONG)[0] == "interrupted\n"
    assert soon(lambda: is_gone(int(note.read_text())))


@contextlib.contextmanager
def over_http() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    process = subprocess.Popen([*REAL, "--name", "web", "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        assert soon(answers)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_server_over_http_answers_calls_and_its_end_is_an_error() -> None:
    with over_http() as (url, process):
        with MCPServer(url=url) as server:
            tools = by_name(server)
            assert server.name == "web"
            assert ask(tools["add"], a=1, b=2) == "3"
            process.kill()
            process.wait()
            with pytest.raises(ServerLostError, match="ended"):
                ask(tools["add"], a=1, b=2)
        with pytest.raises(ConfigError, match=r"could not be started.*the url"), MCPServer(url=url, start_timeout=LONG):
            pass


def test_all_pages_of_tools_are_read_and_the_older_handshake_works() -> None:
    with by_hand(*(listing(f"tool{place}", description=f"No. {place}.") for place in range(3))) as server:
        tools = server.tools("mine")
        listed = [(f"tool{place}", f"No. {place}.", "mine") for place in range(3)]
        assert [(tool.name, tool.description, tool.category) for tool in tools] == listed
        assert server.name == "by hand"
        assert ask(tools[1]) == '"tool1"'


def test_invalid_tool_names_are_mapped_and_the_server_receives_its_own_names() -> None:
    with by_hand(listing("files/read all", title="Read it"), listing("a" * 70)) as server:
        first, second = server.tools()
        assert (first.name, first.description) == ("files_read_all", "Read it")
        assert (second.name, second.description) == ("a" * 64, "a" * 70)
        assert [ask(first), ask(second)] == ['"files/read all"', f'"{"a" * 70}"']


def test_tool_names_that_become_equal_are_refused_unless_one_is_skipped() -> None:
    with by_hand(listing("a/b"), listing("a b"), listing("add")) as server:
        with pytest.raises(ConfigError, match="'a/b' and 'a b' would both be called 'a_b'"):
            server.tools()
        first, second = server.tools(skip=("a/b",))
        assert (first.name, second.name) == ("a_b", "add")
        assert ask(first) == '"a b"'
        message = r"MCP server by hand: skip must name tools of the server; the server has no dye\. Its tools are a/b, "
        with pytest.raises(ConfigError, match=message):
            server.tools(skip={"dye"})


def test_an_unusable_tool_is_left_out_with_a_warning(subtests: pytest.Subtests) -> None:
    invalid = r"parameters must be a valid JSON Schema; at \$\.properties\.x\."
    path = {"anyOf": [{"type": "string", "format": "path"}, {"type": "string"}]}
    for name, schema, reason in (
        ("tuple", {"type": "array", "items": [{"type": "string"}]}, rf"Tool tuple: {invalid}items"),
        ("letters", {"type": "string", "pattern": r"^\p{L}+$"}, rf"Tool letters: {invalid}pattern"),
        ("odd", {"type": "nonsense"}, rf"Tool odd: {invalid}type"), ("", {}, r"Tool: name must be 1 to 64"),
        ("either", path, 'Tool either: parameters: "format": "path" must be where it is certain'),
    ):  # fmt: skip
        draft = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"x": schema}}
        with subtests.test(name, reason=reason), by_hand(listing(name, inputSchema=draft), listing("good")) as server:
            message = rf"MCP server by hand: its tool '{name}' is left out: {reason}.* skip="
            with pytest.warns(GRPOWarning, match=message) as said:
                tools = server.tools()
            assert len(said) == 1
            assert Path(said[0].filename) == Path(__file__)
            assert [tool.name for tool in tools] == ["good"]
            assert ask(tools[0]) == '"good"'
            assert [tool.name for tool in server.tools(skip=[name])] == ["good"]


@pytest.mark.slow
def test_without_the_sdk_the_module_imports_and_a_server_names_the_extra() -> None:
    code = """
import sys
import tests.support.light_packages
import adapters.tools.execution.mcp_tools as module
assert "mcp" not in sys.modules and "mcp_types" not in sys.modules
sys.modules["mcp"] = None
try:
    module.MCPServer(["a"])
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == 'MCPServer needs mcp: pip install ".[tools]" in the checkout'
