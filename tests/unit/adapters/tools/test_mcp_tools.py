"""Tools of MCP servers: a real one of the official SDK, and one written by hand that does what servers should not."""

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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.tools.catalogue import Tool, ToolCatalogue
from adapters.tools.errors import ToolRaisedError, WorkerDiedError
from adapters.tools.mcp_support import plain_schema
from adapters.tools.mcp_tools import MCPServer
from grpo.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]
REAL = [sys.executable, str(ROOT / "tests" / "mcp_server.py")]

# A server without the SDK, that knows no newer handshake than `initialize`. TOOLS are listed one per page.
BY_HAND = """
import json, os, sys
TOOLS = json.loads(os.environ["TOOLS"])
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "initialize":
        info = {"name": "by hand", "version": "1"}
        version = asked["params"]["protocolVersion"]
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif asked["method"] == "tools/list":
        page = int(asked.get("params", {}).get("cursor", 0))
        answer["result"] = {"tools": TOOLS[page : page + 1]}
        if page + 1 < len(TOOLS):
            answer["result"]["nextCursor"] = str(page + 1)
    elif asked["method"] == "tools/call":
        answer["result"] = {"content": [{"type": "text", "text": json.dumps(asked["params"]["name"])}]}
    else:
        answer["error"] = {"code": -32601, "message": "what?"}
    print(json.dumps(answer), flush=True)
"""


def by_hand(*tools: dict[str, Any], **options: Any) -> MCPServer:
    return MCPServer([sys.executable, "-c", BY_HAND], env={"TOOLS": json.dumps(tools)}, **options)


def ask(tool: Tool, **arguments: Any) -> Any:
    return asyncio.run(tool.function(**arguments))


def process_of(tools: dict[str, Tool]) -> int:
    return ask(tools["place"])["process"]


def is_gone(process: int) -> bool:
    """Ended, and collected by its parent, which is this process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return False
    return True


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, Tool]]:
    with MCPServer(REAL) as server:
        yield {tool.name: tool for tool in server.tools()}


# What a server offers


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


@pytest.mark.parametrize(
    ("name", "arguments", "output"),
    [
        ("add", {"a": 1.5, "b": 2}, "3.5"),
        ("weather", {"city": "Oslo", "unit": "fahrenheit"}, {"city": "Oslo", "degrees": 68.0}),
        ("paint", {"colour": "red", "shade": "dark", "finish": None}, "dark red, plain"),
        ("picture", {}, "look:\n[image image/png, 5 bytes]"),
    ],
)
def test_what_a_call_returns(tools: dict[str, Tool], name: str, arguments: dict[str, Any], output: Any) -> None:
    assert ask(tools[name], **arguments) == output


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("refuse", {}, r"^not today$"),
        ("fail", {"reason": "no paper"}, r"^Error executing tool fail"),
        ("add", {"a": 1}, r"(?s)^Error executing tool add: .*Field required"),
    ],
)
def test_a_tool_that_fails_raises_what_the_server_said(
    tools: dict[str, Tool], name: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ToolRaisedError, match=text):
        ask(tools[name], **arguments)
    assert ask(tools["add"], a=1, b=1) == "2"


# Many calls


def test_calls_overlap(tools: dict[str, Tool]) -> None:
    async def ten() -> list[str]:
        return await asyncio.gather(*(tools["slow"].function(seconds=0.2) for _ in range(10)))

    start = time.perf_counter()
    assert asyncio.run(ten()) == ["waited 0.2 s"] * 10
    assert time.perf_counter() - start < 1.6  # one after the other: 2 s


def test_event_loops_of_several_threads_share_a_server(tools: dict[str, Tool]) -> None:
    sums: dict[int, str] = {}

    def work(number: int) -> None:
        sums[number] = ask(tools["add"], a=number, b=1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {0: "1", 1: "2", 2: "3", 3: "4"}


def test_a_call_that_is_given_up_is_cancelled_at_the_server(tools: dict[str, Tool]) -> None:
    async def impatient() -> None:
        await asyncio.wait_for(tools["slow"].function(seconds=60.0), 0.3)

    before = ask(tools["waits"])
    start = time.perf_counter()
    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert time.perf_counter() - start < 10.0
    while (after := ask(tools["waits"]))["cancelled"] == before["cancelled"] and time.perf_counter() - start < 10.0:
        time.sleep(0.02)
    assert after == {"begun": before["begun"] + 1, "cancelled": before["cancelled"] + 1}


def test_two_servers_at_once(tools: dict[str, Tool], tmp_path: Path) -> None:
    with MCPServer([*REAL, "--name", "second"], cwd=tmp_path) as server:
        second = {tool.name: tool for tool in server.tools()}
        assert second["add"].category == "second"
        place = ask(second["place"])
        assert place["folder"] == str(tmp_path)
        assert place["process"] != process_of(tools)
        renamed = [dataclasses.replace(tool, name=f"second.{tool.name}") for tool in second.values()]
        catalogue = ToolCatalogue([*tools.values(), *renamed])
        assert ask(catalogue["second.place"]) == place
        assert ask(catalogue["add"], a=1, b=2) == ask(catalogue["second.add"], a=1, b=2) == "3"


# Beginning and end


def test_leaving_the_block_ends_the_server_and_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THIS_PROCESS", "1")
    before = set(threading.enumerate())
    server = MCPServer(REAL, env={"ADDED": "2"})
    with pytest.raises(ConfigError, match="is not running"):
        server.tools()
    with server:
        tools = {tool.name: tool for tool in server.tools(category=lambda name: name[0])}
        assert [tools[name].category for name in ("add", "weather")] == ["a", "w"]
        variables = [ask(tools["variable"], name=name) for name in ("SECRET_OF_THIS_PROCESS", "ADDED", "PATH")]
        assert variables == ["not set", "2", os.environ["PATH"]]
        process = process_of(tools)
        with pytest.raises(ConfigError, match="running already"):
            server.__enter__()
    assert is_gone(process)
    with pytest.raises(WorkerDiedError, match="was left"):
        ask(tools["add"], a=1, b=1)
    with server:  # anew: another process, and the tools are its tools now
        assert process_of(tools) != process
    deadline = time.perf_counter() + 5.0
    while set(threading.enumerate()) - before and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_a_call_in_flight_when_the_block_is_left() -> None:
    async def leave() -> None:
        with MCPServer(REAL) as server:
            slow = {tool.name: tool for tool in server.tools()}["slow"]
            waiting = asyncio.create_task(slow.function(seconds=60.0))
            await asyncio.sleep(0.2)
        await waiting

    with pytest.raises(WorkerDiedError, match=r"the connection to MCP server .* ended"):
        asyncio.run(leave())


def test_a_server_that_dies_is_told_with_its_last_words() -> None:
    with MCPServer(REAL) as server:
        tools = {tool.name: tool for tool in server.tools()}

        async def both() -> list[Any]:
            calls = (tools["slow"].function(seconds=60.0), tools["die"].function(code=3))
            return await asyncio.gather(*calls, return_exceptions=True)

        assert [type(error) for error in asyncio.run(both())] == [WorkerDiedError, WorkerDiedError]
        with pytest.raises(
            WorkerDiedError, match=r"ended; on stderr it said last: the server gives up\. Nothing replaces"
        ):
            ask(tools["add"], a=1, b=1)


def test_a_server_that_is_killed(tools: dict[str, Tool]) -> None:
    with MCPServer(REAL) as server:
        own = {tool.name: tool for tool in server.tools()}
        os.kill(process_of(own), signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="enter a new one"):
            ask(own["slow"], seconds=60.0)
    assert ask(tools["add"], a=1, b=1) == "2"  # the other one does not care


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["/no/such/program"], "FileNotFoundError.*Run the command in a terminal"),
        (["/no/such\0program"], "could not be started: ValueError: .*null byte"),
        ([sys.executable, "-c", "import sys; sys.exit('no licence')"], "could not be started: .*said last: no licence"),
    ],
)
def test_a_server_that_cannot_start(command: list[str], text: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=text), MCPServer(command):
        pass
    assert time.perf_counter() - start < 5.0


def test_a_server_that_hangs_at_its_start_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "process"
    hanging = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"
    start = time.perf_counter()
    server = MCPServer([sys.executable, "-c", hanging], start_timeout=1.0)
    with pytest.raises(ConfigError, match="was not ready within 1 s; if it is only slow, raise start_timeout"), server:
        pass
    assert time.perf_counter() - start < 15.0  # 1 s, and 2 s in which it could have ended by itself
    assert is_gone(int(note.read_text()))


def test_an_interrupt_during_a_slow_start_leaves_no_server_behind(tmp_path: Path) -> None:
    note = tmp_path / "process"
    hanging = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = f"""
import sys
from adapters.tools.mcp_tools import MCPServer
try:
    MCPServer([sys.executable, "-c", {hanging!r}], start_timeout=500.0).__enter__()
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.perf_counter() + 60.0
    while not (note.exists() and note.read_text()) and time.perf_counter() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "interrupted\n"
    assert is_gone(int(note.read_text()))


# Servers that are less polite


def test_all_pages_of_the_list_are_read_and_the_older_handshake_is_spoken() -> None:
    schema = {"type": "object"}
    listed = [{"name": f"tool{place}", "inputSchema": schema, "description": f"No. {place}."} for place in range(3)]
    with by_hand(*listed) as server:
        tools = server.tools("mine")
        assert [(tool.name, tool.description, tool.category) for tool in tools] == [
            ("tool0", "No. 0.", "mine"),
            ("tool1", "No. 1.", "mine"),
            ("tool2", "No. 2.", "mine"),
        ]
        assert server.name == "by hand"
        assert ask(tools[1]) == '"tool1"'


def test_names_that_a_tool_may_not_have_are_mapped_and_the_server_hears_its_own() -> None:
    schema = {"type": "object"}
    with by_hand(
        {"name": "files/read all", "inputSchema": schema, "title": "Read it"}, {"name": "a" * 70, "inputSchema": schema}
    ) as server:
        first, second = server.tools()
        assert (first.name, first.description) == ("files_read_all", "Read it")
        assert (second.name, second.description) == ("a" * 64, "a" * 70)
        assert ask(first) == '"files/read all"'
        assert ask(second) == f'"{"a" * 70}"'


def test_names_that_become_the_same_are_refused() -> None:
    schema = {"type": "object"}
    with (
        by_hand({"name": "a/b", "inputSchema": schema}, {"name": "a b", "inputSchema": schema}) as server,
        pytest.raises(ConfigError, match="'a/b' and 'a b' would both be called 'a_b'"),
    ):
        server.tools()


def test_a_list_that_breaks_the_protocol_is_told_by_its_place() -> None:
    good, bad = {"name": "good", "inputSchema": {"type": "object"}}, {"name": "bad", "inputSchema": {}}
    text = r"(?s)page 1 of its list of tools \(after 'good'\) is not what MCP asks for: .*tools\.0\.inputSchema\.type"
    with pytest.raises(ConfigError, match=text), by_hand(good, bad):
        pass


def test_schemas_that_refer_to_themselves_or_narrow_what_they_refer_to_stay_as_they_are() -> None:
    tree = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}
    schema = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/tree"}, "few": {"$ref": "#/$defs/all", "enum": [1]}, "any": True},
        "$defs": {"tree": tree, "all": {"enum": [1, 2]}},
    }
    assert plain_schema(schema)["properties"] == {
        "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"const": None}]},
        "few": {"$ref": "#/$defs/all", "enum": [1]},
        "any": True,
    }
    odd = {"type": "object", "properties": 3, "$defs": []}
    assert plain_schema(odd) == odd


def test_a_schema_that_is_none_is_named() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "nonsense"}}}
    with (
        by_hand({"name": "odd", "inputSchema": schema}) as server,
        pytest.raises(ConfigError, match=r"Tool odd: parameters at \$\.properties\.x\.type"),
    ):
        server.tools()


# Over HTTP


@contextlib.contextmanager
def over_http() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*REAL, "--name", "web", "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.perf_counter() + 30.0
        while time.perf_counter() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


def test_a_server_over_http_and_its_end() -> None:
    with over_http() as (url, process):
        with MCPServer(url=url) as server:
            tools = {tool.name: tool for tool in server.tools()}
            assert server.name == "web"
            assert ask(tools["add"], a=1, b=2) == "3"
            process.kill()
            process.wait()
            with pytest.raises(WorkerDiedError, match="ended"):
                ask(tools["add"], a=1, b=2)
        with pytest.raises(ConfigError, match=r"could not be started.*the url"), MCPServer(url=url, start_timeout=10.0):
            pass


# Arguments


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MCPServer(), "not both"),
        (lambda: MCPServer(["a"], url="http://b"), "not both"),
        (lambda: MCPServer("uvx a-server"), r"must be a list of words.*'uvx a-server'"),
        (lambda: MCPServer([]), "must name a program"),
        (lambda: MCPServer(url="http://b", env={}), "env and cwd are for a server that is started"),
        (lambda: MCPServer(["a"], start_timeout=0.0), "start_timeout must be > 0 seconds; got 0.0"),
    ],
)
def test_arguments_that_contradict_one_another(make: Callable[[], MCPServer], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_without_the_sdk_the_module_imports_and_a_server_says_what_to_install() -> None:
    code = """
import sys
import adapters.tools.mcp_tools as module
assert "mcp" not in sys.modules and "mcp_types" not in sys.modules
sys.modules["mcp"] = None
try:
    module.MCPServer(["a"])
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == 'MCPServer needs mcp: pip install "model-agnostic-grpo[tools]"'
