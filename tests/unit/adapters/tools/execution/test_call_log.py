"""The log of calls: one line of ASCII per call, whatever the call holds."""

import json
import warnings
from datetime import UTC, datetime
from pathlib import Path

import pytest

from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.execution.executor import ToolExecutor
from tests.support.tool_executors import CATALOGUE, LONG, call, on_linux


@on_linux
def test_each_call_is_one_line_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    log.write_text('{"before": true}\n')
    odd = "line\nbreak\x1b[31m\u2028"
    with ToolExecutor(CATALOGUE, num_workers=1, timeout=LONG, log_path=log) as made:
        made.run([call("echo", value=odd), call("add", a="x"), call("no\nsuch"), call("echo", value=b"x")])
        made.run([call("echo", value="y" * 5000)])
        lines = log.read_bytes().decode("ascii").splitlines()  # written at once, not at the end
    assert lines[0] == '{"before": true}'
    assert all("\x1b" not in line for line in lines)
    entries = [json.loads(line) for line in lines[1:]]
    times = [datetime.fromisoformat(entry.pop("time")) for entry in entries]
    assert all(0 <= (datetime.now(UTC) - time).total_seconds() < 10 * LONG for time in times)
    seconds = [entry.pop("seconds") for entry in entries]
    assert sorted(entries, key=str) == sorted(
        [
            {"tool": "echo", "arguments": {"value": odd}, "ok": True, "error": None, "message": None,
             "output_bytes": len(json.dumps(odd))},
            {"tool": "add", "arguments": {"a": "x"}, "ok": False, "error": "InvalidArgumentsError",
             "message": "add: at $.a: 'x' is not of type 'integer'.", "output_bytes": 0},
            {"tool": "no\nsuch", "arguments": {}, "ok": False, "error": "UnknownToolError",
             "message": r"'no\nsuch' must be a tool of the catalogue.", "output_bytes": 0},
            {"tool": "echo", "arguments": "{'value': b'x'}", "ok": False, "error": "InvalidArgumentsError",
             "message": "echo: arguments must be values that JSON can represent; got bytes.", "output_bytes": 0},
            {"tool": "echo", "arguments": '{"value": "' + "y" * 1989, "ok": True, "error": None, "message": None,
             "output_bytes": 5002},
        ],
        key=str,
    )  # fmt: skip
    assert 0 < seconds[-1] < LONG


def test_calls_return_results_even_if_the_log_cannot_be_written() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")

    async def hello() -> str:
        """Greet."""
        return "hello"

    with (
        warnings.catch_warnings(record=True) as caught,
        ToolExecutor(ToolCatalogue([Tool.from_function(hello, remote=True)]), log_path="/dev/full") as made,
    ):
        warnings.simplefilter("always")
        assert [result.output for result in made.run([call("hello")] * 3)] == ["hello"] * 3
    assert len([warning for warning in caught if "cannot be written" in str(warning.message)]) == 1
