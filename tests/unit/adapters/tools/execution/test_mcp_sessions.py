"""Sessions of MCP servers: their start, their end, and servers that do what servers should not."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import ToolCatalogue
from adapters.tools.errors import InvalidArgumentsError, PathOutsideRootError, ServerLostError
from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.mcp_tools import MCPServer
from grpo.errors import ConfigError, GRPOWarning
from tests.support.mcp_servers import REAL, ask, by_hand, by_name, is_gone, listing, process_of
from tests.support.tool_executors import LONG, soon

ROOT = Path(__file__).resolve().parents[5]


# --- start and end


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
        last_words = r"ended; on stderr it said last: the server gives up\. The server is not restarted: leave"
        with pytest.raises(ServerLostError, match=last_words):
            ask(tools["waits"])


def test_a_line_that_is_not_utf_8_costs_neither_its_call_nor_the_session() -> None:
    """The line is read with replaced characters, is not JSON, and is passed over."""
    with by_hand(listing("noise"), listing("place")) as server:
        tools = by_name(server)
        assert json.loads(ask(tools["noise"])) == "noise"
        assert "process" in json.loads(ask(tools["place"]))


def test_the_stderr_of_a_server_takes_little_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.tools.execution.mcp_tools._STDERR_FILE_BYTES", 100_000)
    with by_hand(listing("complain")) as server:
        [complain] = server.tools()
        for _ in range(20):
            ask(complain)
        assert 20_000 < os.fstat(server._stderr.fileno()).st_size < 200_000
        assert server._last_words().endswith("xxx / that is all")


def test_a_session_that_ends_by_itself_loses_its_calls_and_is_left_quietly() -> None:
    with by_hand() as server:
        tools = by_name(server)
        process = process_of(tools)
        server._portal.call(server._portal.stop, True)
        assert soon(lambda: is_gone(process))
        with pytest.raises(
            ServerLostError, match=r"MCP server .* is lost\. The server is not restarted: leave its `with`"
        ):
            ask(tools["waits"])
    with server:
        assert ask(tools["waits"]) == "0"


def test_killing_one_server_does_not_affect_the_others() -> None:
    with by_hand() as other, by_hand() as server:
        own = by_name(server)
        os.kill(process_of(own), signal.SIGKILL)
        with pytest.raises(ServerLostError, match="enter it again"):
            ask(own["slow"])
        assert ask(by_name(other)["waits"]) == "0"


def test_a_server_that_cannot_start_is_refused_with_the_reason(subtests: pytest.Subtests) -> None:
    for command, text in (
        (["/no/such/program"], "FileNotFoundError.*Run the command in a terminal"),
        (["/no/such\0program"], "could not be started: ValueError: .*null byte"),
        ([sys.executable, "-c", "import sys; sys.exit('no licence')"], "could not be started: .*said last: no licence"),
    ):
        with subtests.test(text), pytest.raises(ConfigError, match=text), MCPServer(command):
            pass


def hanging(note: Path, then: str) -> list[str]:
    """A command that writes its process number and then does not speak."""
    return ["sh", "-c", f"echo $$ > '{note}.new'; mv '{note}.new' '{note}'; exec {then}"]


def test_a_server_that_hangs_at_its_start_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "process"
    server = MCPServer(hanging(note, "sleep 600"), start_timeout=1.0)
    with pytest.raises(ConfigError, match="was not ready within 1 s; if it is only slow, raise start_timeout"), server:
        pass
    assert is_gone(int(note.read_text()))


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


# --- servers that are less polite


def test_all_pages_of_tools_are_read_and_the_older_handshake_works() -> None:
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


def test_invalid_tool_names_are_mapped_and_the_server_receives_its_own_names() -> None:
    schema = {"type": "object"}
    with by_hand(
        {"name": "files/read all", "inputSchema": schema, "title": "Read it"}, {"name": "a" * 70, "inputSchema": schema}
    ) as server:
        first, second = server.tools()
        assert (first.name, first.description) == ("files_read_all", "Read it")
        assert (second.name, second.description) == ("a" * 64, "a" * 70)
        assert ask(first) == '"files/read all"'
        assert ask(second) == f'"{"a" * 70}"'


def test_tool_names_that_become_equal_are_refused() -> None:
    schema = {"type": "object"}
    with (
        by_hand({"name": "a/b", "inputSchema": schema}, {"name": "a b", "inputSchema": schema}) as server,
        pytest.raises(ConfigError, match="'a/b' and 'a b' would both be called 'a_b'"),
    ):
        server.tools()


def test_a_list_that_breaks_the_protocol_is_refused() -> None:
    good, bad = {"name": "good", "inputSchema": {"type": "object"}}, {"name": "bad", "inputSchema": {}}
    with (
        pytest.raises(ConfigError, match=r"(?s)could not be started: .*tools\.0\.inputSchema\.type"),
        by_hand(good, bad),
    ):
        pass


GOOD = {"name": "good", "inputSchema": {"type": "object", "properties": {"unit": {"enum": ["m", "km"]}}}}


def test_an_unusable_tool_is_left_out_with_a_warning(subtests: pytest.Subtests) -> None:
    for name, schema, reason in (
        (
            "tuple",
            {"type": "array", "items": [{"type": "string"}]},
            r"Tool tuple: parameters must be a valid JSON Schema; at \$\.properties\.x\.items",
        ),
        (
            "letters",
            {"type": "string", "pattern": r"^\p{L}+$"},
            r"Tool letters: parameters must be a valid JSON Schema; at \$\.properties\.x\.pattern",
        ),
        ("odd", {"type": "nonsense"}, r"Tool odd: parameters must be a valid JSON Schema; at \$\.properties\.x\.type"),
        (
            "either",
            {"anyOf": [{"type": "string", "format": "path"}, {"type": "string"}]},
            r'Tool either: parameters: "format": "path" must be where it is certain',
        ),
        ("", {}, r"Tool: name must be 1 to 64"),
    ):
        with subtests.test(name, reason=reason):
            draft = {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"x": schema},
            }
            with by_hand({"name": name, "inputSchema": draft}, GOOD) as server:
                message = rf"MCP server by hand: its tool '{name}' is left out: {reason}.* skip="
                with pytest.warns(GRPOWarning, match=message) as said:
                    tools = server.tools()
                assert len(said) == 1
                assert Path(said[0].filename) == Path(__file__)
                assert [tool.name for tool in tools] == ["good"]
                assert ask(tools[0]) == '"good"'
                assert [tool.name for tool in server.tools(skip=[name])] == ["good"]


def test_tools_with_boolean_property_schemas_can_be_called() -> None:
    schema = {"type": "object", "properties": {"any": True, "never": False, "unit": {"enum": ["m", "km"]}}}
    with by_hand({"name": "free", "inputSchema": schema}) as server:
        (tool,) = server.tools()
        assert list(tool.properties) == ["any", "unit"]
        with ToolExecutor(ToolCatalogue([tool])) as executor:
            right, wrong = executor.run([ToolCall(tool="free", arguments={name: 1}) for name in ("any", "never")])
    assert right.output == '"free"'
    assert isinstance(wrong.error, InvalidArgumentsError)


def test_a_servers_schema_may_mark_paths_and_name_definitions_of_an_older_draft() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"file": {"$ref": "#/definitions/file"}, "unit": {"$ref": "#/definitions/unit"}},
        "definitions": {"file": {"type": "string", "format": "path"}, "unit": {"enum": ["m", "km"]}},
    }
    with by_hand({"name": "open", "inputSchema": schema}) as server:
        (tool,) = server.tools()
        assert [choice.name for choice in tool.choices] == ["unit"]
        with ToolExecutor(ToolCatalogue([tool])) as executor:
            calls = [ToolCall(tool="open", arguments={"file": file, "unit": "m"}) for file in ("a", "../a")]
            inside, outside = executor.run(calls)
    assert inside.output == '"open"'
    assert isinstance(outside.error, PathOutsideRootError)


def test_skipped_tools_are_left_out_and_unknown_ones_refused() -> None:
    with by_hand(listing("a/b"), listing("a b"), listing("add")) as server:
        first, second = server.tools(skip=("a/b",))
        assert (first.name, second.name) == ("a_b", "add")
        assert ask(first) == '"a b"'
        message = r"MCP server by hand: skip must name tools of the server; the server has no dye\. Its tools are a/b, "
        with pytest.raises(ConfigError, match=message):
            server.tools(skip={"dye"})


# --- settings


def test_contradictory_or_invalid_server_arguments_are_refused(subtests: pytest.Subtests) -> None:
    for make, text in (
        (lambda: MCPServer(), "not both"),
        (lambda: MCPServer(["a"], url="http://b"), "not both"),
        (lambda: MCPServer("uvx a-server"), r"must be a list of strings.*'uvx a-server'"),
        (lambda: MCPServer([]), r"must be a list of strings that begins with a program, .*; got \[\]"),
        (lambda: MCPServer(url="http://b", env={}), "env and cwd apply only to a server that `command` starts"),
        (lambda: MCPServer(["a"], start_timeout=0.0), "start_timeout must be > 0 seconds; got 0.0"),
    ):
        with subtests.test(text), pytest.raises(ConfigError, match=text):
            make()


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
