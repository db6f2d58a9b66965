"""Tools of MCP servers: a real one of the official SDK, and one written by hand that does what servers should not."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
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
import torch

from adapters.tools.calls import ToolCall, ToolResult
from adapters.tools.catalogue import Tool, ToolCatalogue
from adapters.tools.errors import (
    InvalidArgumentsError,
    OutputTooLargeError,
    ToolNotAllowedError,
    ToolRaisedError,
    ToolTimeoutError,
    WorkerDiedError,
)
from adapters.tools.executor import ToolExecutor
from adapters.tools.mcp_support import plain_schema
from adapters.tools.mcp_tools import MCPServer
from adapters.tools.policies import ToolSelectionPolicy
from adapters.tools.rewards import ToolRewards
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.errors import ConfigError, GRPOWarning

ROOT = Path(__file__).resolve().parents[4]
REAL = [sys.executable, str(ROOT / "tests" / "support" / "mcp_server.py")]

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


GOOD = {"name": "good", "inputSchema": {"type": "object", "properties": {"unit": {"enum": ["m", "km"]}}}}


@pytest.mark.parametrize(
    ("name", "schema", "reason"),
    [
        (
            "tuple",
            {"type": "array", "items": [{"type": "string"}]},
            r"Tool tuple: parameters at \$\.properties\.x\.items",
        ),
        (
            "letters",
            {"type": "string", "pattern": r"^\p{L}+$"},
            r"Tool letters: parameters at \$\.properties\.x\.pattern",
        ),
        ("odd", {"type": "nonsense"}, r"Tool odd: parameters at \$\.properties\.x\.type"),
        ("", {}, r"Tool\.name must be 1 to 64"),
    ],
)
def test_a_tool_that_cannot_be_one_is_left_out_with_a_warning(name: str, schema: Any, reason: str) -> None:
    draft = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"x": schema}}
    with by_hand({"name": name, "inputSchema": draft}, GOOD) as server:
        message = rf"MCP server by hand: its tool '{name}' is left out: {reason}.* skip="
        with pytest.warns(GRPOWarning, match=message) as said:
            tools = server.tools()
        assert len(said) == 1
        assert Path(said[0].filename) == Path(__file__)
        assert [tool.name for tool in tools] == ["good"]
        assert ask(tools[0]) == '"good"'
        assert [tool.name for tool in server.tools(skip=[name])] == ["good"]


def test_the_other_tools_of_a_real_server_stay(tools: dict[str, Tool]) -> None:
    with MCPServer([*REAL, "--letters"]) as server:
        with pytest.warns(
            GRPOWarning, match=r"MCP server testing: its tool 'spell' is left out: .*\\p\{L\}.* is not a 'regex'"
        ):
            others = {tool.name: tool for tool in server.tools()}
        assert list(others) == list(tools)
        assert ask(others["add"], a=1, b=2) == "3"
        assert list(others) == [tool.name for tool in server.tools(skip=["spell"])]


def test_tools_of_schemas_that_are_true_or_false_are_tools_like_others() -> None:
    schema = {"type": "object", "properties": {"any": True, "never": False, "unit": {"enum": ["m", "km"]}}}
    with by_hand({"name": "free", "inputSchema": schema}) as server:
        (tool,) = server.tools()
        assert list(tool.properties) == ["any", "unit"]
        with ToolExecutor(ToolCatalogue([tool])) as executor:
            right, wrong = executor.run([ToolCall(tool="free", arguments={name: 1}) for name in ("any", "never")])
    assert right.output == '"free"'
    assert isinstance(wrong.error, InvalidArgumentsError)


def test_tools_that_are_skipped() -> None:
    with MCPServer(REAL) as server:
        assert {"die", "add"}.isdisjoint(tool.name for tool in server.tools(skip=("die", "add")))
        with pytest.raises(
            ConfigError,
            match="MCP server testing: skip must name tools of the server; it has no dye\\. Its tools are add, ",
        ):
            server.tools(skip={"dye"})
    same = {"name": "a b", "inputSchema": {"type": "object"}}
    with by_hand({"name": "a/b", "inputSchema": {"type": "object"}}, same) as server:
        (tool,) = server.tools(skip=["a/b"])
        assert ask(tool) == '"a b"'


# Executed, and learned from


def by_name(tools: dict[str, Tool], *names: str) -> ToolCatalogue:
    return ToolCatalogue([tools[name] for name in names])


def test_a_call_that_hangs_ends_at_its_timeout_and_is_cancelled_at_the_server(tools: dict[str, Tool]) -> None:
    before = ask(tools["waits"])
    start = time.perf_counter()
    with ToolExecutor(by_name(tools, "slow", "add"), timeout=2.0) as executor:
        late, well = executor.run(
            [
                ToolCall(tool="slow", arguments={"seconds": 60.0}),
                ToolCall(tool="add", arguments={"a": 1, "b": 2}),
            ]
        )
        assert isinstance(late.error, ToolTimeoutError)
        assert 1.9 < late.seconds < 10.0
        assert well.output == "3"
        while (after := ask(tools["waits"]))["cancelled"] == before["cancelled"] and time.perf_counter() - start < 20.0:
            time.sleep(0.02)
        assert after == {"begun": before["begun"] + 1, "cancelled": before["cancelled"] + 1}
        assert executor.run([ToolCall(tool="add", arguments={"a": 2, "b": 2})])[0].output == "4"


def test_a_tools_own_timeout_comes_before_the_executors(tools: dict[str, Tool]) -> None:
    catalogue = ToolCatalogue([dataclasses.replace(tools["slow"], timeout=0.3)])
    with ToolExecutor(catalogue, timeout=60.0) as executor:
        (result,) = executor.run([ToolCall(tool="slow", arguments={"seconds": 60.0})])
    assert isinstance(result.error, ToolTimeoutError)
    assert result.seconds < 10.0


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "message"),
    [
        ("add", {"a": "1", "b": 2}, InvalidArgumentsError, r"add: at \$\.a: '1' is not of type 'number'"),
        ("add", {"a": 1}, InvalidArgumentsError, "'b' is a required property"),
        ("paint", {"colour": "green", "shade": "dark"}, InvalidArgumentsError, "'green' is not one of"),
        ("slow", {"seconds": 60.0, "more": 1}, InvalidArgumentsError, "'more' was unexpected"),
        ("slow", {"seconds": float("nan")}, InvalidArgumentsError, "finite"),
        ("die", {"code": 3}, ToolNotAllowedError, "must be one of the allowed tools"),
        ("refuse", {}, ToolRaisedError, "refuse: not today"),
    ],
)
def test_what_is_refused_never_reaches_the_server(
    tools: dict[str, Tool], name: str, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    before = ask(tools["waits"])
    with ToolExecutor(ToolCatalogue(tools.values()), allow=set(tools) - {"die"}, timeout=5.0) as executor:
        (result,) = executor.run([ToolCall(tool=name, arguments=arguments)])
    assert type(result.error) is kind
    assert re.search(message, str(result.error))
    assert ask(tools["waits"]) == before


def test_an_output_that_is_too_large_is_not_let_through(tools: dict[str, Tool]) -> None:
    calls = [ToolCall(tool="weather", arguments={"city": city}) for city in ("Oslo", "x" * 500)]
    with ToolExecutor(by_name(tools, "weather"), max_output_bytes=100) as executor:
        short, long = executor.run(calls)
    assert short.output == {"city": "Oslo", "degrees": 20.0}
    assert isinstance(long.error, OutputTooLargeError)


def test_each_call_is_a_line_of_the_log(tools: dict[str, Tool], tmp_path: Path) -> None:
    calls = [
        ToolCall(tool="add", arguments={"a": 1, "b": 2}),
        ToolCall(tool="fail", arguments={"reason": "no paper"}),
        ToolCall(tool="slow", arguments={"seconds": 60.0}),
    ]
    hurried = tools | {"slow": dataclasses.replace(tools["slow"], timeout=0.5)}
    with ToolExecutor(by_name(hurried, "add", "fail", "slow"), timeout=30.0, log_path=tmp_path / "log") as executor:
        executor.run(calls)
    lines = {line["tool"]: line for line in map(json.loads, (tmp_path / "log").read_text().splitlines())}
    assert {call.tool: dict(call.arguments) for call in calls} == {
        name: line["arguments"] for name, line in lines.items()
    }
    assert {name: (line["ok"], line["error"]) for name, line in lines.items()} == {
        "add": (True, None),
        "fail": (False, "ToolRaisedError"),
        "slow": (False, "ToolTimeoutError"),
    }
    assert lines["add"]["output_bytes"] == len('"3"')
    assert lines["add"]["seconds"] > 0
    assert lines["slow"]["seconds"] >= 0.5


def test_calls_of_a_server_that_dies_have_results(tools: dict[str, Tool]) -> None:
    with MCPServer(REAL) as server:
        own = {tool.name: tool for tool in server.tools()}
        with ToolExecutor(by_name(own, "die", "slow", "add")) as executor:
            results = executor.run(
                [ToolCall(tool="slow", arguments={"seconds": 60.0}), ToolCall(tool="die", arguments={"code": 3})]
            )
            results += executor.run([ToolCall(tool="add", arguments={"a": 1, "b": 1})])
    assert [type(result.error) for result in results] == [WorkerDiedError] * 3


def test_a_policy_learns_which_tool_of_a_server_to_call(tools: dict[str, Tool]) -> None:
    """Five tools, one with two decisions: 1 in 5 is right by chance, and 1 in 10 for the colour."""
    catalogue = by_name(tools, "add", "weather", "paint", "refuse", "picture")
    answers = {
        "two numbers: 1, 2": "3",
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
