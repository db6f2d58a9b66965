"""The log of calls: one line of ASCII per call, whatever the call holds, for its owner only, and without secrets."""

import json
import os
import re
import warnings
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from adapters.tools import ExecutorOptions, ToolCall, ToolCatalogue, ToolExecutor, ToolRaisedError
from adapters.tools.execution.call_log import SECRET_NAMES, CallLog
from grpo.errors import ConfigError
from tests.support.tool_executors import CATALOGUE, LONG, call, executor_of, on_linux


@on_linux
@pytest.mark.parametrize(("text", "shown"), [
    ("postgres://me:hunter2@db/x?sslmode=on", "postgres://[redacted]@db/x?sslmode=on"),
    ("https://ghp_abc@host/repo", "https://[redacted]@host/repo"),
    ("https://host/x?a=1&access_token=abc&b=2#c", "https://host/x?a=1&access_token=[redacted]&b=2#c"),
    ("https://host/x?X-Api-Key=abc", "https://host/x?X-Api-Key=[redacted]"),
    ("Server=db;User Id=me;Password=hunter2;Port=1", "Server=db;User Id=me;Password=[redacted];Port=1"),
    ("host=db pwd=hunter2 port=1", "host=db pwd=[redacted] port=1"),
    ("AccountName=me;AccountKey=abc==;Suffix=x", "AccountName=me;AccountKey=[redacted];Suffix=x"),
    ("Use Bearer eyJhbGci.x.y now", "Use Bearer [redacted] now"),
    ("postgres://me:p@ss@db/x@y", "postgres://[redacted]@db/x@y"),
    ("https://host/x?key=AIza-1&a=1&sig=abc%3D#c", "https://host/x?key=[redacted]&a=1&sig=[redacted]#c"),
    ("https://host/?code=abc&X-Amz-Signature=abc", "https://host/?code=[redacted]&X-Amz-Signature=[redacted]"),
    ("https://host/?pass=abc and https://host/?signature=abc",
     "https://host/?pass=[redacted] and https://host/?signature=[redacted]"),
    ("https://hooks.slack.com/services/T0/B0/abc now", "https://hooks.slack.com/[redacted] now"),
    ("https://discord.com/api/webhooks/1/abc", "https://discord.com/api/webhooks/[redacted]"),
    ("https://me.webhook.office.com/webhookb2/1@2/abc", "https://me.webhook.office.com/webhookb2/[redacted]"),
    ("Host: db\nAuthorization: Basic dXNlcjpwYXNz=\nAccept: *", "Host: db\nAuthorization: [redacted]\nAccept: *"),
    ("Set-Cookie: a=abc; b=abc\r\nAccept: *", "Set-Cookie: [redacted]\r\nAccept: *"),
    ("Basic dXNlcjpwYXNz", "Basic [redacted]"),
    ('{"password": "a \\"b; c", "user": "me"}', '{"password": "[redacted]", "user": "me"}'),
    (r'{"inner": "{\"password\": \"a b\", \"user\": 1}"}', r'{"inner": "{\"password\": \"[redacted]\", \"user\": 1}"}'),
    ('{"tokens": ["a b", "c d"], "user": 1}', '{"tokens": [redacted], "user": 1}'),
    ("{'api_key' : 'a b', 'user': 1}", "{'api_key' : '[redacted]', 'user': 1}"),
    ('Password="a b;c";Pwd="d ""e"" f";Port=1', 'Password="[redacted]";Pwd="[redacted]";Port=1'),
    ("Pwd={a;b c};Port=1", "Pwd=[redacted];Port=1"),
    ("password: hunter2, db.password:hunter2", "password: [redacted] db.password:[redacted]"),
    ("secret => hunter2, token == 'hunter2'", "secret => [redacted] token == '[redacted]'"),
    ("url=https://host?access_token=abc", "url=https://host?access_token=[redacted]"),
    ("password='a b", "password='[redacted]'"),
    *((text, text) for text in (
        "mail me@host or see https://host/@me?page=2", "the key is under the mat", "monkey=1", "?monkey=1&page=2",
        "a code: 12", "a code=12", "the passkey: ?", "a secret is a secret", "Basic training, basic JavaScript",
        "https://auth.example.com:8443/login", "oauth://host auth::login()", "author: me, authors=2", "sig: nature",
    )),
])  # fmt: skip
def test_secrets_in_the_text_of_an_argument_are_not_logged(tmp_path: Path, text: str, shown: str) -> None:
    (line,) = logged(tmp_path / "log", SECRET_NAMES, call("fetch", inner=[{"text": text}]))
    assert line["arguments"] == {"inner": [{"text": shown}]}


def test_long_texts_of_a_policy_hold_up_no_call(tmp_path: Path) -> None:
    """Matching anew from each letter would take minutes to days, and the time limit of all tests would end it."""
    parts = (
        "token", "token.", "author", "a.", " ", "a=", "password ", "password=", "token='", 'auth"', "token[", "\\", "a://",
        "x://y@", "?a.", "&signature", "?a.signature", "bearer ", " basic aaa=", "cookie ", "cookie:\n", "hooks.",
    )  # fmt: skip
    texts = [*(part * (40_000 // len(part)) for part in parts), "token=" + "\\" * 20_000 + '"' + "\\" * 20_000]
    lines = logged(tmp_path / "log", SECRET_NAMES, *(call("fetch", text=text) for text in texts))
    assert "<dict>" not in [line["arguments"] for line in lines], "each text has been searched"


def entry(tool: str, arguments: Any, output_bytes: int, error: str | None = None, message: str | None = None) -> Any:
    return {"tool": tool, "arguments": arguments, "ok": error is None, "error": error, "message": message,
            "output_bytes": output_bytes}  # fmt: skip


def test_each_call_is_one_line_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    log.write_text('{"before": true}\n')
    odd, invalid = "line\nbreak\x1b[31m\u2028", "InvalidArgumentsError"
    with executor_of(CATALOGUE, log_path=log) as made:
        made.run([call("echo", value=odd), call("add", a="x"), call("no\nsuch"), call("echo", value=b"x")])
        made.run([call("echo", value="y" * 5000)])
        lines = log.read_bytes().decode("ascii").splitlines()  # written at once, not at the end
    assert lines[0] == '{"before": true}'
    assert all("\x1b" not in line for line in lines)
    entries = [json.loads(line) for line in lines[1:]]
    times = [datetime.fromisoformat(each.pop("time")) for each in entries]
    assert all(0 <= (datetime.now(UTC) - time).total_seconds() < 10 * LONG for time in times)
    seconds = [each.pop("seconds") for each in entries]
    unknown = "must be a tool of the executor's catalogue. Tools that a policy adds later need another executor."
    expected = [
        entry("echo", {"value": odd}, len(json.dumps(odd))),
        entry("no\nsuch", {}, 0, "UnknownToolError", rf'"no\nsuch" {unknown}'),
        entry("add", {"a": "x"}, 0, invalid, "add: at $.a: 'x' is not of type 'integer'."),
        entry("echo", "<dict>", 0, invalid, "echo: arguments must be values that JSON can represent; got bytes."),
        entry("echo", '{"value": "' + "y" * 1989, 5002),
    ]  # fmt: skip
    assert sorted(entries, key=str) == sorted(expected, key=str)
    assert 0 < seconds[-1] < LONG


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_calls_return_results_even_if_the_log_cannot_be_written() -> None:
    catalogue, options = ToolCatalogue([CATALOGUE["async_nap"]]), ExecutorOptions(log_path="/dev/full")
    with warnings.catch_warnings(record=True) as caught, ToolExecutor(catalogue, options=options) as made:
        warnings.simplefilter("always")
        results = made.run([call("async_nap", seconds=0)] * 3)
    assert [result.output for result in results] == ["rested"] * 3
    assert len([warning for warning in caught if "cannot be written" in str(warning.message)]) == 1


def logged(path: Path, redact: Any, *calls: ToolCall, error: Exception | None = None) -> list[dict[str, Any]]:
    """The lines of a new log of these calls."""
    log = CallLog(path, redact)
    for each in calls:
        log.write(each, error, 0.0)
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_is_private_or_made_private_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(os, "fchmod", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    message = r"log_path must be a file that can be written and made private; .*not permitted"
    with pytest.raises(ConfigError, match=message):  # as with the file of another user
        CallLog(tmp_path / "log")


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


def test_values_with_secret_names_are_left_out_at_any_depth(tmp_path: Path) -> None:
    others = (
        "Password", "API-Key", "apiKey", "X-Auth-Token", "client_secret", "Authorization", "db_passwd", "private_key",
        "access-key", "pwd", "auth", "basicAuth", "bearer", "jwt", "dsn", "connectionString", "conn_str",
    )  # fmt: skip
    harmless = dict.fromkeys(("a", "user", "key", "author", "authors", "words"), "kept")
    names = (*SECRET_NAMES, *others)
    calls = [
        call("login", **harmless, **{name: "hunter2", "inner": [{name: ["hunter2"], "b": {"c": "kept"}}]}) for name in names
    ]  # fmt: skip
    for name, line in zip(names, logged(tmp_path / "log", SECRET_NAMES, *calls), strict=True):
        inner = [{name: "[redacted]", "b": {"c": "kept"}}]
        assert line["arguments"] == harmless | {name: "[redacted]", "inner": inner}


def test_the_page_lists_every_secret_name() -> None:
    page = (Path(__file__).parents[5] / "docs" / "tools.md").read_text(encoding="utf-8")
    paragraph = page.partition("**Log.**")[2].partition("\n\n")[0]
    assert [name for name in SECRET_NAMES if f"`{name}`" not in paragraph] == []


def test_the_message_of_a_call_with_a_secret_is_left_out_and_the_secret_of_a_long_line(tmp_path: Path) -> None:
    """Of arguments that are no JSON, only the type is logged. A secret is left out before a long line is cut."""
    long, odd = call("login", password="hunter2", text="x" * 5000), call("login", API_KEY=b"hunter2")
    calls = [call("login", password="hunter2"), call("login", user="me"), odd, long]
    lines = logged(tmp_path / "log", SECRET_NAMES, *calls, error=ToolRaisedError("login: 'hunter2' is wrong"))
    told = "login: 'hunter2' is wrong"
    assert [line["message"] for line in lines] == ["[redacted]", told, told, "[redacted]"]
    assert {(line["error"], line["ok"]) for line in lines} == {("ToolRaisedError", False)}
    assert lines[2]["arguments"] == "<dict>"
    assert lines[3]["arguments"].startswith('{"password": "[redacted]", "text": "xxx')
    assert len(lines[3]["arguments"]) == 2000


def test_other_names_or_a_function_may_decide_what_is_left_out(tmp_path: Path) -> None:
    given = call("pay", card="4111", password="hunter2", amount=5)
    [line] = logged(tmp_path / "names", ["card"], given)
    assert line["arguments"] == {"card": "[redacted]", "password": "hunter2", "amount": 5}
    named = call("cite", text="author=Ann, year=3", author="Ann", word="kept")
    [line] = logged(tmp_path / "authors", ["author"], named)
    assert line["arguments"] == {"text": "author=[redacted] year=3", "author": "[redacted]", "word": "kept"}
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
        with executor_of(catalogue, log_path=log, **settings) as made:
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
