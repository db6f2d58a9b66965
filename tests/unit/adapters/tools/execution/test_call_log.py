"""The log of calls: one line of ASCII per call, whatever the call holds, for its owner only, and without secrets."""

import json
import os
import re
import warnings
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import ToolRaisedError
from adapters.tools.execution.call_log import SECRET_NAMES, CallLog
from adapters.tools.execution.executor import ToolExecutor
from grpo.errors import ConfigError
from tests.support.tool_executors import CATALOGUE, LONG, call, on_linux


@on_linux
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://me:hunter2@db/x?sslmode=on", "postgres://[redacted]@db/x?sslmode=on"),
        ("https://ghp_abc@host/repo", "https://[redacted]@host/repo"),
        ("https://host/x?a=1&access_token=abc&b=2#c", "https://host/x?a=1&access_token=[redacted]&b=2#c"),
        ("https://host/x?X-Api-Key=abc", "https://host/x?X-Api-Key=[redacted]"),
        ("Server=db;User Id=me;Password=hunter2;Port=1", "Server=db;User Id=me;Password=[redacted];Port=1"),
        ("host=db pwd=hunter2 port=1", "host=db pwd=[redacted] port=1"),
        ("AccountName=me;AccountKey=abc==;Suffix=x", "AccountName=me;AccountKey=[redacted];Suffix=x"),
        ("Use Bearer eyJhbGci.x.y now", "Use Bearer [redacted] now"),
        ("mail me@host or see https://host/@me?page=2", "mail me@host or see https://host/@me?page=2"),
    ],
)
def test_secrets_in_the_text_of_an_argument_are_not_logged(tmp_path: Path, text: str, shown: str) -> None:
    (line,) = logged(tmp_path / "log", SECRET_NAMES, call("fetch", inner=[{"text": text}]))
    assert line["arguments"] == {"inner": [{"text": shown}]}


def test_more_names_of_secrets_are_not_logged_and_authors_are(tmp_path: Path) -> None:
    names = [
        "private_key",
        "access-key",
        "pwd",
        "auth",
        "basicAuth",
        "bearer",
        "jwt",
        "dsn",
        "connectionString",
        "conn_str",
        "Authorization",
    ]
    given = dict.fromkeys([*names, "author", "authors"], "x")
    (line,) = logged(tmp_path / "log", SECRET_NAMES, call("fetch", **given))
    assert line["arguments"] == {**dict.fromkeys(names, "[redacted]"), "author": "x", "authors": "x"}


def test_each_call_is_one_line_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    log.write_text('{"before": true}\n')
    odd = "line\nbreak\x1b[31m\u2028"
    with ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=LONG, log_path=log)) as made:
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
             "message": '"no\\nsuch" must be a tool of the executor\'s catalogue. Tools that a policy adds later need another '
                        "executor.", "output_bytes": 0},
            {"tool": "echo", "arguments": "<dict>", "ok": False, "error": "InvalidArgumentsError",
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
        ToolExecutor(
            ToolCatalogue([Tool.from_function(hello, remote=True)]), options=ExecutorOptions(log_path="/dev/full")
        ) as made,
    ):
        warnings.simplefilter("always")
        assert [result.output for result in made.run([call("hello")] * 3)] == ["hello"] * 3
    assert len([warning for warning in caught if "cannot be written" in str(warning.message)]) == 1


def logged(path: Path, redact: Any, *calls: ToolCall, error: Exception | None = None) -> list[dict[str, Any]]:
    """The lines of a new log of these calls."""
    log = CallLog(path, redact)
    for each in calls:
        log.write(each, error, 0.0)
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- who can read it


def test_a_log_is_private_and_an_existing_one_is_made_private(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        CallLog(tmp_path / "new").close()
    finally:
        os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    (tmp_path / "old").write_text("{}\n")
    (tmp_path / "old").chmod(0o664)
    CallLog(tmp_path / "old").close()
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "old").read_text() == "{}\n"
    before = Path("/dev/null").stat().st_mode
    CallLog("/dev/null").close()
    assert Path("/dev/null").stat().st_mode == before, "no file, so nothing that others could read later"


def test_a_log_that_cannot_be_made_private_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the file of another user."""

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(
        ConfigError, match=r"log_path must be a file that can be written and made private; .*not permitted"
    ):
        CallLog(tmp_path / "log")


# --- what terminals would obey


CONTROLS = "".join(map(chr, [*range(32), *range(127, 160)])) + "\u2028\u2029\u202e\ud800x\udfff\U000e0001"
BYTES = CONTROLS.encode("utf-8", "surrogatepass")


def test_a_line_holds_printable_ascii_only_wherever_the_controls_are(tmp_path: Path) -> None:
    calls = [
        call(f"tool{CONTROLS}", a=1), call("tool", **{CONTROLS: CONTROLS}), call("tool", a=[{"b": CONTROLS}]),
        call("tool", a=BYTES), ToolCall(tool=BYTES, arguments={}),  # type: ignore[arg-type]
        ToolCall(tool=[CONTROLS], arguments=CONTROLS),  # type: ignore[arg-type]
    ]  # fmt: skip
    lines = logged(tmp_path / "log", (), *calls, error=ToolRaisedError(CONTROLS))
    assert re.fullmatch(rb"(?:[ -~]+\n){6}", (tmp_path / "log").read_bytes())
    assert lines[0]["tool"] == f"tool{CONTROLS}", "nothing is lost"
    assert lines[1]["arguments"] == {CONTROLS: CONTROLS}
    assert {line["message"] for line in lines} == {CONTROLS}


# --- what it leaves out


def test_values_with_secret_names_are_left_out_at_any_depth(tmp_path: Path) -> None:
    for i, name in enumerate(
        (*SECRET_NAMES, "Password", "API-Key", "apiKey", "X-Auth-Token", "client_secret", "Authorization", "db_passwd")
    ):
        given = {"a": 1, name: "hunter2", "inner": [{name: ["hunter2"], "b": {"c": "kept"}}]}
        [line] = logged(tmp_path / str(i), SECRET_NAMES, call("login", **given))
        assert line["arguments"] == {"a": 1, name: "[redacted]", "inner": [{name: "[redacted]", "b": {"c": "kept"}}]}
    for harmless in ("a", "user", "key", "author", "words"):
        [line] = logged(tmp_path / harmless, SECRET_NAMES, call("login", **{harmless: "kept"}))
        assert line["arguments"] == {harmless: "kept"}


def test_the_message_of_a_call_with_a_secret_is_left_out(tmp_path: Path) -> None:
    error = ToolRaisedError("login: 'hunter2' is wrong")
    secret, plain = logged(
        tmp_path / "log", SECRET_NAMES, call("login", password="hunter2"), call("login", user="me"), error=error
    )
    assert (secret["message"], secret["error"], secret["ok"]) == ("[redacted]", "ToolRaisedError", False)
    assert plain["message"] == "login: 'hunter2' is wrong"


def test_of_arguments_that_are_no_json_only_the_type_is_logged(tmp_path: Path) -> None:
    [line] = logged(tmp_path / "log", SECRET_NAMES, call("login", API_KEY=b"hunter2"), error=ToolRaisedError("no JSON"))
    assert (line["arguments"], line["message"]) == ("<dict>", "no JSON")


def test_a_secret_is_left_out_before_a_long_line_is_cut(tmp_path: Path) -> None:
    [line] = logged(tmp_path / "log", SECRET_NAMES, call("login", password="hunter2", text="x" * 5000))
    assert line["arguments"].startswith('{"password": "[redacted]", "text": "xxx')
    assert len(line["arguments"]) == 2000


def test_other_names_or_a_function_may_decide_what_is_left_out(tmp_path: Path) -> None:
    given = call("pay", card="4111", password="hunter2", amount=5)
    [line] = logged(tmp_path / "names", ["card"], given)
    assert line["arguments"] == {"card": "[redacted]", "password": "hunter2", "amount": 5}
    [line] = logged(tmp_path / "none", [], given)
    assert line["arguments"] == given.arguments

    def amount_only(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"amount": arguments.pop("amount"), "tool": tool}

    [line] = logged(tmp_path / "function", amount_only, given, error=ToolRaisedError("4111"))
    assert (line["arguments"], line["message"]) == ({"amount": 5, "tool": "pay"}, "[redacted]")
    [line] = logged(tmp_path / "same", lambda tool, arguments: arguments, given, error=ToolRaisedError("4111"))
    assert (line["arguments"], line["message"]) == (given.arguments, "4111")
    [line] = logged(tmp_path / "no_json", amount_only, call("pay", card=b"4111"))
    assert line["arguments"] == "<dict>"


def test_a_function_that_fails_leaves_out_everything_and_fails_no_call(tmp_path: Path) -> None:
    def fails(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        raise KeyError(arguments["card"])

    [line] = logged(tmp_path / "raises", fails, call("pay", card="4111"))
    assert line["arguments"] == {"[redacted]": "redact raised KeyError"}
    [line] = logged(tmp_path / "no_json", lambda tool, arguments: {"x": object()}, call("pay", card="4111"))
    assert line["arguments"] is None


@on_linux
def test_the_executor_redacts_by_default_and_as_told(tmp_path: Path) -> None:
    catalogue = ToolCatalogue([CATALOGUE["echo"]])
    for name, settings, expected in (("default", {}, "[redacted]"), ("none", {"redact": ()}, "hunter2")):
        log = tmp_path / name
        with ToolExecutor(
            catalogue, num_workers=1, options=ExecutorOptions(timeout=LONG, log_path=log, **settings)
        ) as made:
            assert made.run([call("echo", value={"password": "hunter2"})])[0].output == {"password": "hunter2"}
        assert json.loads(log.read_text())["arguments"] == {"value": {"password": expected}}
        assert log.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"ExecutorOptions.redact must be a tuple of str or Callable; got 'password'"):
        ExecutorOptions(redact="password")  # type: ignore[arg-type]


def test_a_line_that_a_full_disk_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    """The file takes 20 bytes of the first line, and then everything."""
    log = CallLog(tmp_path / "log")

    class Full(FileIO):
        def write(self, content: Any) -> int:
            return super().write(content[:20] if self.tell() == 0 else content)

    log._file.close()
    log._file = Full(tmp_path / "log", "a")
    for number in range(3):
        log.write(ToolCall(tool="add", arguments={"a": number}), None, 0.0)
    log.close()
    cut, *whole = (tmp_path / "log").read_text().splitlines()
    assert len(cut) == 20
    assert [json.loads(line)["arguments"] for line in whole] == [{"a": 1}, {"a": 2}]
