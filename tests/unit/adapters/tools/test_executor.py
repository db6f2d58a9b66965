"""The executor: results, confinement of paths and workers, deadlines, order, clean ends."""

import asyncio
import copy
import gc
import inspect
import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from adapters.tools.arguments import (
    MAX_BYTES,
    ArgumentChecker,
    RefusedArgumentsError,
    bounded_text,
    confine,
    encode_arguments,
)
from adapters.tools.calls import ToolCall, ToolResult
from adapters.tools.catalogue import Tool, ToolCatalogue
from adapters.tools.commands import Command, CommandFailedError
from adapters.tools.errors import (
    InvalidArgumentsError,
    OutputTooLargeError,
    PathOutsideRootError,
    ToolNotAllowedError,
    ToolRaisedError,
    ToolTimeoutError,
    UnknownToolError,
    WorkerDiedError,
)
from adapters.tools.executor import ToolExecutor
from adapters.tools.workers import WorkerLimits
from grpo.errors import ConfigError, GRPOWarning
from tests.support import tool_functions

ROOT = Path(__file__).resolve().parents[4]
OWN_USERS = sys.platform == "linux" and os.geteuid() == 0
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
if not OWN_USERS:
    pytestmark.append(pytest.mark.filterwarnings("ignore::grpo.errors.GRPOWarning"))
own_users = pytest.mark.skipif(not OWN_USERS, reason="only root on Linux can give workers user ids of their own")

CATALOGUE = ToolCatalogue(
    [
        Tool.from_function(tool_functions.add),
        Tool.from_function(tool_functions.nothing),
        Tool.from_function(tool_functions.nap),
        Tool.from_function(tool_functions.who),
        Tool.from_function(tool_functions.read),
        Tool.from_function(tool_functions.where, parameters={
            "type": "object", "properties": {"path": {"type": "string", "format": "path"}}
        }),
        Tool.from_function(tool_functions.remember),
        Tool.from_function(tool_functions.spin),
        Tool.from_function(tool_functions.misbehave),
        Tool.from_function(tool_functions.imports),
        Tool.from_function(tool_functions.async_nap, name="local_async_nap"),
        Tool.from_function(tool_functions.async_nap, remote=True),
        Tool.from_function(tool_functions.async_raise, remote=True),
        Tool.from_function(tool_functions.async_exit, remote=True),
        Tool.from_function(tool_functions.stubborn, remote=True, timeout=0.1),
        Tool(name="greet", description="Greet.", function=tool_functions.Greeter("hello"), parameters={
            "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]
        }),
        Tool(name="echo", description="Echo.", function=tool_functions.echo, parameters={
            "type": "object", "properties": {"value": {}}, "required": ["value"]
        }),
    ]
)  # fmt: skip


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool=tool, arguments=arguments)


def error_of(result: ToolResult) -> type | None:
    return None if result.error is None else type(result.error)


def alive(pid: int) -> bool:
    """A process that still runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def soon(condition: Any, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(condition())


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that workers can read; pytest's are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def executor() -> Iterator[ToolExecutor]:
    with ToolExecutor(CATALOGUE, num_workers=2) as made:
        yield made


# --- results


def test_results_come_in_the_order_of_the_calls(executor: ToolExecutor) -> None:
    calls = [call("add", a=i, b=10) if i % 3 else call("async_nap", seconds=0.02) for i in range(30)]
    results = executor.run(calls)
    assert [result.output for result in results] == [i + 10 if i % 3 else "rested" for i in range(30)]
    assert all(result.ok for result in results)


def test_no_calls_have_no_results(executor: ToolExecutor) -> None:
    assert executor.run([]) == []


def test_the_functions_own_defaults_apply(executor: ToolExecutor) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 100}}}
    with ToolExecutor(ToolCatalogue([Tool.from_function(tool_functions.add, parameters=schema)])) as other:
        assert other.run([call("add", a=1)])[0].output == 2  # b = 1, not 100
    assert executor.run([call("add", a=1)])[0].output == 2


@pytest.mark.parametrize(
    "value", [None, True, 0, -1.5, "", "é\u2028\ud800\n\x00", [1, [2, {}]], {"a": {"b": None}}, 2**200, {"": 1}]
)
def test_values_come_back_as_they_went(executor: ToolExecutor, value: Any) -> None:
    result = executor.run([call("echo", value=value)])[0]
    assert result.ok
    assert result.output == value
    assert type(result.output) is type(value)


def test_what_json_knows_no_other_way_comes_as_json_has_it() -> None:
    async def pair() -> Any:
        """Return a tuple and a dict."""
        return (1, {2: 3})

    with ToolExecutor(ToolCatalogue([Tool.from_function(pair, remote=True)])) as remote:
        assert remote.run([call("pair")])[0].output == [1, {"2": 3}]


def test_async_functions_run_in_workers_too(executor: ToolExecutor) -> None:
    assert executor.run([call("local_async_nap", seconds=0.01)])[0].output == "rested"


def test_objects_can_be_functions(executor: ToolExecutor) -> None:
    assert executor.run([call("greet", name="you")])[0].output == "hello you"


def test_seconds_count_the_call_and_not_its_turn_in_the_queue() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, max_concurrency=1) as one:
        for tool in ("nap", "async_nap"):
            results = one.run([call(tool, seconds=0.3)] * 3)
            assert all(0.29 < result.seconds < 0.59 for result in results)
        assert one.run([call("unknown")])[0].seconds == 0.0


def test_run_async_is_run(executor: ToolExecutor) -> None:
    async def both() -> list[list[ToolResult]]:
        return await asyncio.gather(
            *(executor.run_async([call("add", a=i), call("async_nap", seconds=0)]) for i in (1, 2))
        )

    first, second = asyncio.run(both())
    assert [result.output for result in first + second] == [2, "rested", 3, "rested"]


def test_eight_threads_get_their_own_results(executor: ToolExecutor) -> None:
    found: dict[int, list[Any]] = {}

    def work(i: int) -> None:
        found[i] = [result.output for result in executor.run([call("add", a=1000 * i, b=j) for j in range(50)])]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [1000 * i + j for j in range(50)] for i in range(8)}


# --- refusals


def test_unknown_and_disallowed_tools_reach_no_worker() -> None:
    with ToolExecutor(CATALOGUE, allow=["add"], num_workers=1) as some:
        results = some.run([call("add", a=1), call("nap", seconds=60), call("no_such_tool"), call("ADD", a=1)])
    assert [error_of(result) for result in results] == [None, ToolNotAllowedError, UnknownToolError, UnknownToolError]
    assert str(results[1].error) == "nap must be one of the allowed tools."


def test_allowed_tools_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"allow must name tools of the catalogue; it has no nope"):
        ToolExecutor(CATALOGUE, allow=["add", "nope"])


def test_functions_that_are_not_allowed_need_not_be_importable() -> None:
    catalogue = CATALOGUE.with_tools(Tool(name="lambda", description="None.", function=lambda: 1))
    with pytest.raises(
        ConfigError, match=r"Tool lambda: workers must be able to import .* top level of a module, or make"
    ):
        ToolExecutor(catalogue)
    with ToolExecutor(catalogue, allow=["add"]) as some:
        assert some.run([call("add", a=1)])[0].output == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 0},
        {"max_output_bytes": 0},
        {"max_concurrency": 0},
        {"timeout": 0.0},
        {"timeout": math.inf},
        {"timeout": math.nan},
        {"root": "/no/such/folder"},
        {"root": __file__},
        {"log_path": "/no/such/folder/log"},
        {"log_path": "/"},
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=rf"ToolExecutor\.{next(iter(settings))} must be"):
        ToolExecutor(CATALOGUE, **settings)
    assert threading.active_count() == threads


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_limits_without_meaning_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"WorkerLimits\.processes must be a positive integer"):
        WorkerLimits(processes=value)


def test_a_module_that_workers_cannot_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text(
        "import os\nif 'MODEL_AGNOSTIC_GRPO_TOOL_WORKER' in os.environ:\n    raise RuntimeError('not in a worker')\n"
        "def f():\n    'Nothing.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match=r"tool f cannot be imported: RuntimeError: not in a worker"):
        ToolExecutor(ToolCatalogue([Tool.from_function(only_here.f)]))


def test_a_module_that_is_not_imported_in_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_there.py").write_text(
        "import os, time\nif 'MODEL_AGNOSTIC_GRPO_TOOL_WORKER' in os.environ:\n    time.sleep(60)\n"
        "def f():\n    'Nothing.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("adapters.tools.workers._START_SECONDS", 0.5)
    import slow_there  # type: ignore[import-not-found]

    start = time.perf_counter()
    with pytest.raises(ConfigError, match=r"not imported within 0\.5 s"):
        ToolExecutor(ToolCatalogue([Tool.from_function(slow_there.f)]))
    assert time.perf_counter() - start < 5


def test_arguments_are_checked_before_a_remote_tool_is_awaited() -> None:
    awaited = []

    async def ask(number: int) -> int:
        """Ask."""
        awaited.append(number)
        return number

    with ToolExecutor(ToolCatalogue([Tool.from_function(ask, remote=True)])) as remote:
        results = remote.run(
            [call("ask", number="1"), call("ask"), call("ask", number=1, other=2), call("ask", number=3)]
        )
    assert [error_of(result) for result in results] == [InvalidArgumentsError] * 3 + [None]
    assert str(results[0].error) == "ask: at $.number: '1' is not of type 'integer'."
    assert awaited == [3]


# --- arguments


def checker(function: Any, **properties: Any) -> ArgumentChecker:
    return ArgumentChecker(function, {"type": "object", "properties": properties}, "/usr")


PATH = {"type": "string", "format": "path"}


def any_of(*parts: Any) -> dict[str, Any]:
    return {"anyOf": list(parts)}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (PATH, "lib", "/usr/lib"),
        (PATH, "lib/../share/./x", "/usr/share/x"),
        (PATH, "/usr/lib", "/usr/lib"),
        (PATH, "", "/usr"),
        (PATH, "~", "/usr/~"),
        ({"type": "array", "items": PATH}, ["a", "b"], ["/usr/a", "/usr/b"]),
        ({"prefixItems": [PATH, {"type": "string"}]}, ["a", "a"], ["/usr/a", "a"]),
        ({"type": "object", "properties": {"in": PATH, "as": {"type": "string"}}}, {"in": "a", "as": "a"},
        {"in": "/usr/a", "as": "a"}),
        ({"additionalProperties": PATH}, {"k": "a"}, {"k": "/usr/a"}),
        (any_of({"type": "null"}, PATH), "a", "/usr/a"),
        (any_of({"type": "null"}, PATH), None, None),
        ({"allOf": [{"type": "string"}, {"format": "path"}]}, "a", "/usr/a"),
        ({"if": {"type": "string"}, "then": {"format": "path"}}, "a", "/usr/a"),
        ({"$ref": "#/$defs/file", "$defs": {}}, "a", "/usr/a"),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", **PATH}, "a", "/usr/a"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "allOf": [PATH]}, "a", "/usr/a"),
        ({"type": "string", "format": "date"}, "no date", "no date"),
    ],
)  # fmt: skip
def test_paths_are_found_wherever_the_schema_puts_them(schema: Any, value: Any, expected: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema, "name": {"type": "string"}}, "$defs": {"file": PATH}}
    check = ArgumentChecker(tool_functions.echo, parameters, "/usr")
    found = check({"x": value, "name": "a"})
    assert found == {"x": expected, "name": "a"}
    assert type(found["x"]) is type(expected)
    assert type(found["name"]) in (str,) or schema.get("format") == "date"


def test_equal_texts_are_told_apart() -> None:
    check = checker(tool_functions.echo, a={"type": "string"}, b=PATH, c={"enum": ["x"]})
    assert check({"a": "x", "b": "x", "c": "x"}) == {"a": "x", "b": "/usr/x", "c": "x"}


def test_texts_are_told_apart_from_those_of_calls_before() -> None:
    """In whose place in memory they may come to lie."""
    many = {"type": "array", "items": PATH}
    check = checker(tool_functions.echo, paths=many, texts={"type": "array", "items": {"type": "string"}})
    for _ in range(20):
        assert check({"paths": ["x"] * 50}) == {"paths": ["/usr/x"] * 50}
        assert check({"texts": ["x"] * 50}) == {"texts": ["x"] * 50}


def test_a_parameter_annotated_path_gets_paths() -> None:
    def f(one: Path, many: list[Path], maybe: Path | None, text: str) -> None: ...

    check = checker(f, one=PATH, many={"type": "array", "items": PATH}, maybe=PATH, text=PATH)
    assert check({"one": "a", "many": ["b"], "maybe": "c", "text": "d"}) == {
        "one": Path("/usr/a"), "many": [Path("/usr/b")], "maybe": Path("/usr/c"), "text": "/usr/d",
    }  # fmt: skip


@pytest.mark.parametrize(
    "value", ["../etc", "/etc/passwd", "lib/../../x", "/", "//etc", "/usr/../etc", "/usrx", "../usrx/a"]
)
def test_paths_outside_are_refused(value: str) -> None:
    with pytest.raises(RefusedArgumentsError, match="must lead into the tools' folder") as caught:
        confine(value, "/usr")
    assert caught.value.error == "PathOutsideRootError"


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    root = str(tmp_path / "root")
    for name, target in {"in": "a", "out": "../b", "chain": "out", "dangling": "/no/such", "loop": "loop"}.items():
        (tmp_path / "root" / name).symlink_to(target)
    assert confine("in", root) == tmp_path / "root" / "a"
    for name in ("out", "chain", "dangling"):
        with pytest.raises(RefusedArgumentsError) as caught:
            confine(name, root)
        assert caught.value.error == "PathOutsideRootError"
    with pytest.raises(RefusedArgumentsError, match="cannot be followed") as caught:
        confine("loop", root)
    assert caught.value.error == "InvalidArgumentsError"


def test_a_root_that_is_a_link_is_followed_first(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    check = ArgumentChecker(
        tool_functions.read, {"type": "object", "properties": {"path": PATH}}, str(tmp_path / "link")
    )
    assert check({"path": "x"}) == {"path": tmp_path / "real" / "x"}


def test_keys_beyond_the_schema_are_refused_unless_it_says_so() -> None:
    closed = checker(tool_functions.add, a={"type": "integer"})
    with pytest.raises(RefusedArgumentsError, match="'c' was unexpected"):
        closed({"a": 1, "c": 2})
    for allowed in (True, {"type": "integer"}):
        opened = {"type": "object", "properties": {"a": {}}, "additionalProperties": allowed}
        assert ArgumentChecker(tool_functions.add, opened, "/usr")({"a": 1, "c": 2}) == {"a": 1, "c": 2}


def test_nothing_is_fetched_for_a_reference() -> None:
    check = checker(tool_functions.add, a={"$ref": "http://127.0.0.1:1/schema"})
    with pytest.raises(RefusedArgumentsError, match=r"the schema cannot be applied: .*Unresolvable"):
        check({"a": 1})


def test_messages_are_of_bounded_length() -> None:
    with pytest.raises(RefusedArgumentsError) as caught:
        checker(tool_functions.add, a={"type": "integer"})({"a": "x" * 50_000})
    assert len(str(caught.value)) < 1100


class Sneaky(str):
    """Claims to be short."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "must be an object"), (None, "must be an object"), ("{}", "must be an object"), (b"{}", "must be an object"),
        ({1: 2}, "keys of objects must be text; got int"), ({"a": {None: 1}}, "keys of objects must be text; got NoneType"),
        ({"a": math.nan}, "finite"), ({"a": [math.inf]}, "finite"), ({"a": b"x"}, "got bytes"), ({"a": {1}}, "got set"),
        ({"a": 1j}, "got complex"), ({"a": object()}, "got object"), ({"a": range(3)}, "got range"),
        ({"a": "x" * 10**7}, "at most 100000 bytes"), ({"x" * 10**7: 1}, "at most 100000 bytes"),
        ({"a": [0] * 10**6}, "at most 100000 bytes"), ({"a": "\u20ac" * 20_000}, "at most 100000 bytes"),
        ({"a": Sneaky("x" * 10**6)}, "at most 100000 bytes"), ({"a": 10**5000}, "digits"),
    ],
)  # fmt: skip
def test_what_is_no_object_of_json_values_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(RefusedArgumentsError, match=message):
        encode_arguments(arguments)


@pytest.mark.parametrize("error", [KeyError("a"), ValueError(), SystemExit(), asyncio.CancelledError()])
def test_what_raises_while_it_is_read_is_refused(error: BaseException) -> None:
    class Raises(dict[str, Any]):
        def items(self) -> Any:
            raise error

    for arguments in (Raises(a=1), {"a": Raises(b=1)}):
        with pytest.raises(RefusedArgumentsError, match=f"cannot be read: reading them raises {type(error).__name__}"):
            encode_arguments(arguments)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, (2.5, None)], b"b": True}, "{'a': [1, [2.5, None]], b'b': True}"), ("é\n", r"'\xe9\n'"), ({}, "{}"),
        (10**5000, "<int>"), (object(), "<object>"), (Sneaky("a"), "<Sneaky>"), ({1: {2}}, "{1: <set>}"),
        ("x" * 10**8, "'" + "x" * 39 + "..."), ([[]] * 10**6, "[" + "[], " * 9 + "[],..."),
    ],
    ids=range(9),
)  # fmt: skip
def test_any_value_has_a_text(value: Any, text: str) -> None:
    assert bounded_text(value, 40) == text


def test_what_has_no_end_has_a_text() -> None:
    class Kind(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise RuntimeError

    circle: dict[Any, Any] = {}
    circle["a"] = circle
    laughs: Any = "ha"
    for _ in range(100):
        laughs = [laughs] * 10
    for value in (circle, laughs, {"a": laughs}, Kind("Odd", (), {})()):
        assert len(bounded_text(value, 2000)) <= 2003


def test_depth_and_size_of_what_repeats_itself_are_bounded() -> None:
    circle: dict[str, Any] = {}
    circle["a"] = circle
    with pytest.raises(RefusedArgumentsError, match="nested at most 32 lists or objects deep"):
        encode_arguments(circle)
    laughs: Any = "ha"
    for _ in range(20):  # 10**20 texts
        laughs = [laughs] * 10
    with pytest.raises(RefusedArgumentsError, match="at most 100000 bytes"):
        encode_arguments({"a": laughs})
    deepest: Any = 0
    for _ in range(31):
        deepest = [deepest]
    assert encode_arguments({"a": deepest}) == '{"a": ' + "[" * 31 + "0" + "]" * 31 + "}"
    with pytest.raises(RefusedArgumentsError):
        encode_arguments({"a": [deepest]})


def test_arguments_of_exactly_the_largest_size_pass() -> None:
    overhead = len('{"a": ""}')
    assert len(encode_arguments({"a": "x" * (MAX_BYTES - overhead)})) == MAX_BYTES
    with pytest.raises(RefusedArgumentsError):
        encode_arguments({"a": "x" * (MAX_BYTES - overhead + 1)})


# --- paths and files in workers


def test_the_default_root_is_private_usable_and_removed() -> None:
    with ToolExecutor(CATALOGUE, num_workers=2) as made:
        root = made.root
        assert root.is_dir()
        (root / "given").write_text("text")
        results = made.run([call("read", path="given"), call("read", path="../x"), call("where", path="given")])
        assert results[0].output == "PosixPath:text"
        assert error_of(results[1]) is PathOutsideRootError
        assert results[2].output == str(root / "given")
        assert root.stat().st_mode & 0o007 == 0
    assert not root.exists()
    assert made.root == root


def test_a_given_root_stays(executor: ToolExecutor) -> None:
    with open_folder() as folder:
        (folder / "f").write_text("x")
        with ToolExecutor(CATALOGUE, root=folder, num_workers=1) as made:
            assert made.run([call("read", path="f")])[0].output == "PosixPath:x"
            assert made.run([call("who")])[0].output["cwd"] == str(folder.resolve())
        assert (folder / "f").read_text() == "x"


@own_users
def test_a_root_that_workers_cannot_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match=r"must be readable by user 6\d{4}.*chmod o\+rx"):
        ToolExecutor(CATALOGUE, root=tmp_path)


# --- workers


def test_workers_are_started_when_needed_and_stay_warm() -> None:
    with ToolExecutor(CATALOGUE, num_workers=3) as made:
        one_by_one = {made.run([call("who")])[0].output["pid"] for _ in range(5)}
        assert len(one_by_one) == 1
        assert [made.run([call("remember", text=text)])[0].output for text in "ab"] == [["a"], ["a", "b"]]
        start = time.perf_counter()
        made.run([call("nap", seconds=0.5)] * 3)
        assert time.perf_counter() - start < 1.3
        at_once = {made.run([call("who")])[0].output["pid"] for _ in range(5)}
        assert len(at_once) == 1


def test_a_worker_is_confined(executor: ToolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    with ToolExecutor(CATALOGUE, num_workers=1) as made:
        seen = made.run([call("who")])[0].output
    assert seen["cwd"] == str(made.root)
    assert seen["group"] == seen["pid"]
    assert seen["server_group"] == seen["parent"]  # ctrl-c in a terminal reaches neither
    assert set(seen["environment"]) <= {"PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "HOME", "OMP_NUM_THREADS", "LC_CTYPE",
                                        "MODEL_AGNOSTIC_GRPO_TOOL_WORKER"}  # fmt: skip
    assert "SECRET" not in (seen["initial_environment"] or "")
    assert seen["descriptors"] == [0, 1, 2, 3]
    assert seen["core"] == [0, 0]
    assert seen["open_files"] == [256, 256]
    assert seen["file_size"] == [100 * 2**20] * 2
    assert 2**30 < seen["data"][0] == seen["data"][1] < 2**31  # what the imported modules take is added
    assert seen["cpu"][0] == resource.getrlimit(resource.RLIMIT_CPU)[0]
    assert seen["no_new_privs"] == 1
    assert seen["modules"] == []  # neither torch nor this package: the tools need none of it
    if OWN_USERS:
        assert len(set(seen["uid"])) == 1
        assert seen["uid"][0] >= 61_000
        assert seen["gid"][0] >= 61_000
        assert seen["groups"] == []
        assert seen["processes"] == [64, 64]


@own_users
def test_workers_are_in_no_group_of_the_programs() -> None:
    groups = os.getgroups()
    os.setgroups([4, 20])
    try:
        with ToolExecutor(CATALOGUE, num_workers=1) as made:
            assert made.run([call("who")])[0].output["groups"] == []
    finally:
        os.setgroups(groups)


@own_users
def test_workers_have_user_ids_of_their_own() -> None:
    with ToolExecutor(CATALOGUE, num_workers=2) as first, ToolExecutor(CATALOGUE, num_workers=1) as second:
        both = first.run([call("nap", seconds=0.1), call("nap", seconds=0.1)])
        assert all(result.ok for result in both)
        users = set()
        for made in (first, second):
            users |= {user for user, _ in worker_processes(made)}
        assert len(users) == 3
        assert 0 not in users


def worker_processes(executor: ToolExecutor) -> list[tuple[int, int]]:
    """User and number of each process that the executor's fork server has."""
    server = executor.run([call("who")])[0].output["parent"]
    return [(user, number) for number, parent, user, _ in tool_functions.processes() if parent == server]


def test_without_user_ids_of_their_own_it_is_said_and_strays_are_killed_all_the_same() -> None:
    with pytest.warns(GRPOWarning, match=r"less confined than intended: they run as user"):
        made = ToolExecutor(CATALOGUE, num_workers=1, timeout=1.0, limits=WorkerLimits(first_uid=None))
    with made:
        assert made.run([call("who")])[0].output["uid"] == [os.getuid()] * 3
        stray = made.run([call("misbehave", how="daemon")])[0].output
        assert not alive(stray)
        assert soon(lambda: not exists(stray))
        child = made.run([call("misbehave", how="background_child")])[0].output
        assert not exists(child)
        server = made.run([call("who")])[0].output["parent"]
        result = made.run([call("misbehave", how="escaped_grandchild")])[0]
        assert error_of(result) is ToolTimeoutError
        assert Path(f"/proc/{server}/task/{server}/children").read_text() == ""
        assert made.run([call("add", a=1)])[0].ok


def test_what_one_call_starts_ends_with_it(executor: ToolExecutor) -> None:
    for how in ("daemon", "background_child"):
        pid = executor.run([call("misbehave", how=how)])[0].output
        assert not exists(pid)


def test_what_one_call_changes_is_as_before_in_the_next() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1) as made:
        before = made.run([call("who")])[0].output
        for how in ("change_everything", "signal_handlers"):
            assert made.run([call("misbehave", how=how)])[0].ok
        time.sleep(0.1)  # the timer would have ended the worker
        assert made.run([call("who")])[0].output == before
        assert made.run([call("misbehave", how="thread_left")])[0].ok
        after = made.run([call("who")])[0].output
        assert (after["threads"], after["pid"] == before["pid"]) == (1, False)


def test_a_worker_without_descriptors_is_replaced() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, limits=WorkerLimits(open_files=32)) as made:
        before = made.run([call("who")])[0].output
        assert error_of(made.run([call("misbehave", how="descriptor_bomb")])[0]) is ToolRaisedError
        after = made.run([call("who")])[0].output
        assert after["descriptors"] == before["descriptors"]
        assert after["pid"] != before["pid"]


def test_a_worker_that_dies_is_named_and_replaced() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1) as made:
        results = made.run([call("misbehave", how="os_exit_7"), call("misbehave", how="segfault"), call("add", a=1)])
        assert [error_of(result) for result in results] == [WorkerDiedError, WorkerDiedError, None]
        assert "exit status 7" in str(results[0].error)
        assert "SIGSEGV" in str(results[1].error)


def test_a_worker_that_dies_between_calls_is_replaced_unseen() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1) as made:
        pid = made.run([call("who")])[0].output["pid"]
        os.kill(pid, signal.SIGKILL)
        assert soon(lambda: not alive(pid))
        time.sleep(0.05)  # the loop hears of it
        assert made.run([call("add", a=1)])[0].ok
        assert not exists(pid)


def test_a_worker_that_cannot_be_replaced_is_an_error_of_the_call() -> None:
    with open_folder() as folder:
        root = folder / "root"
        root.mkdir(mode=0o755)
        with ToolExecutor(CATALOGUE, num_workers=1, root=root) as made:
            assert made.run([call("add", a=1)])[0].ok
            root.rmdir()
            results = made.run([call("misbehave", how="os_exit"), call("add", a=1)])
            assert [error_of(result) for result in results] == [WorkerDiedError] * 2
            assert "no worker could be started" in str(results[1].error)
            root.mkdir(mode=0o755)
            assert made.run([call("add", a=1)])[0].ok


def test_a_fork_server_that_dies_is_replaced() -> None:
    with ToolExecutor(CATALOGUE, num_workers=2, timeout=5.0) as made:
        seen = made.run([call("who")])[0].output
        threading.Timer(0.2, os.kill, (seen["parent"], signal.SIGKILL)).start()
        assert error_of(made.run([call("nap", seconds=4)])[0]) is WorkerDiedError
        assert soon(lambda: not alive(seen["pid"]))
        results = made.run([call("add", a=i) for i in range(10)])
        assert [result.output for result in results] == list(range(1, 11))
        assert made.run([call("who")])[0].output["parent"] != seen["parent"]


def test_processor_time_is_limited_per_call() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, limits=WorkerLimits(cpu_seconds=1)) as made:
        assert all(result.ok for result in made.run([call("spin", seconds=0.6)] * 3))  # 1.8 s of one process
        result = made.run([call("spin", seconds=8)])[0]
        assert error_of(result) is WorkerDiedError
        assert "SIGXCPU" in str(result.error)
        assert result.seconds < 6


def test_a_module_imported_too_late_says_so(executor: ToolExecutor) -> None:
    result = executor.run([call("imports", name="no_such_module")])[0]
    assert error_of(result) is ToolRaisedError
    assert "import it at the top of the tool's module" in str(result.error)


# --- deadlines


def test_a_late_call_is_killed_and_its_neighbours_are_not() -> None:
    with ToolExecutor(CATALOGUE, num_workers=2, timeout=0.3) as made:
        start = time.perf_counter()
        results = made.run([call("nap", seconds=60), *(call("add", a=i) for i in range(20))])
        assert time.perf_counter() - start < 1.3
    assert error_of(results[0]) is ToolTimeoutError
    assert 0.3 <= results[0].seconds < 0.8
    assert [result.output for result in results[1:]] == list(range(1, 21))


def test_a_tools_own_timeout_comes_first() -> None:
    tools = [Tool.from_function(tool_functions.nap, name=f"nap{t}", timeout=t) for t in (0.2, 2.0)]
    with ToolExecutor(ToolCatalogue(tools), timeout=0.5) as made:
        results = made.run([call("nap0.2", seconds=0.35), call("nap2.0", seconds=0.7)])
    assert [error_of(result) for result in results] == [ToolTimeoutError, None]


def test_a_schema_whose_pattern_backtracks_is_ended_too() -> None:
    schema = {"type": "object", "properties": {"value": {"type": "string", "pattern": "^(a+)+$"}}}
    with ToolExecutor(ToolCatalogue([Tool.from_function(tool_functions.echo, parameters=schema)]), timeout=0.3) as made:
        results = made.run([call("echo", value="a" * 40 + "!"), call("echo", value="aaa")])
    assert [error_of(result) for result in results] == [ToolTimeoutError, None]


def test_unless_told_otherwise_there_are_four_workers_and_ten_seconds() -> None:
    with ToolExecutor(CATALOGUE) as made:
        made.run([call("nap", seconds=0.3)] * 8)
        assert len(worker_processes(made)) == 4
    assert inspect.signature(ToolExecutor).parameters["timeout"].default == 10.0


def test_turns_wait_but_are_not_late() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, max_concurrency=1, timeout=0.8) as made:
        assert all(result.ok for result in made.run([call("nap", seconds=0.3)] * 4))
        assert all(result.ok for result in made.run([call("async_nap", seconds=0.3)] * 4))


# --- remote tools


@pytest.mark.parametrize(("settings", "limit"), [({}, 32), ({"max_concurrency": 4}, 4)])
def test_remote_calls_are_awaited_together_but_not_too_many(settings: dict[str, int], limit: int) -> None:
    now, most = 0, 0

    async def count() -> None:
        """Count those at work."""
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1

    with ToolExecutor(ToolCatalogue([Tool.from_function(count, remote=True)]), **settings) as made:
        threads = [threading.Thread(target=made.run, args=([call("count")] * 20,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == limit


def test_what_a_remote_tool_leaves_running_ends_no_one_elses_calls() -> None:
    tasks = []

    async def leave() -> None:
        """Start something that leaves the program."""
        tasks.append(asyncio.create_task(tool_functions.async_exit()))

    catalogue = ToolCatalogue([Tool.from_function(leave, remote=True), CATALOGUE["async_nap"]])
    with ToolExecutor(catalogue) as made:
        results = made.run([call("leave"), call("async_nap", seconds=0.1), call("async_nap", seconds=0.1)])
        assert all(result.ok for result in results)
        assert isinstance(tasks[0].exception(), SystemExit)


def test_a_remote_tool_that_takes_other_parameters_is_an_error_of_the_call() -> None:
    async def takes_none() -> None:
        """Take nothing."""

    schema = {"type": "object", "additionalProperties": True}
    with ToolExecutor(ToolCatalogue([Tool.from_function(takes_none, remote=True, parameters=schema)])) as made:
        result = made.run([call("takes_none", x=1)])[0]
    assert error_of(result) is ToolRaisedError
    assert "TypeError" in str(result.error)


def test_what_remote_tools_raise_is_a_result(executor: ToolExecutor) -> None:
    results = executor.run([call("async_raise", message="m"), call("async_exit"), call("async_nap", seconds=0)])
    assert [error_of(result) for result in results] == [ToolRaisedError, ToolRaisedError, None]
    assert str(results[0].error) == "async_raise: KeyError: 'm'"
    assert str(results[1].error) == "async_exit: SystemExit: 3"


def test_integers_come_as_integers_to_all_tools() -> None:
    async def ask(a: int, more: list[int], counts: dict[str, int]) -> str:
        """Ask."""
        return repr((a, more, counts))

    catalogue = ToolCatalogue([Tool.from_function(ask, remote=True), CATALOGUE["add"]])
    with ToolExecutor(catalogue, num_workers=1) as made:
        remote, local = made.run([call("ask", a=2.0, more=[1.0, 2], counts={"b": 4.0}), call("add", a=2.0, b=3)])
    assert remote.output == "(2, [1, 2], {'b': 4})"
    assert repr(local.output) == "5"


class Interrupted(dict[str, Any]):
    """While it is read, somebody presses ctrl-c."""

    def items(self) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_while_arguments_are_read_is_the_users() -> None:
    with pytest.raises(KeyboardInterrupt):
        encode_arguments({"a": Interrupted()})
    with ThreadPoolExecutor(1) as threads, pytest.raises(RefusedArgumentsError, match="raises KeyboardInterrupt"):
        threads.submit(encode_arguments, {"a": Interrupted()}).result()


def test_a_remote_tool_may_say_which_error_it_is() -> None:
    """As the tools of an MCP server do, when the server is gone: no fault of the call."""

    async def gone() -> None:
        """Ask a server that has ended."""
        raise WorkerDiedError("the server ended")

    with ToolExecutor(ToolCatalogue([Tool.from_function(gone, remote=True)])) as made:
        [result] = made.run([call("gone")])
    assert error_of(result) is WorkerDiedError
    assert str(result.error) == "gone: the server ended"


def test_a_remote_tool_is_cancelled_and_one_that_goes_on_is_left(executor: ToolExecutor) -> None:
    ended = []

    async def polite() -> None:
        """Wait."""
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    with ToolExecutor(ToolCatalogue([Tool.from_function(polite, remote=True)]), timeout=0.1) as made:
        assert error_of(made.run([call("polite")])[0]) is ToolTimeoutError
    assert ended == ["cancelled"]
    start = time.perf_counter()
    result = executor.run([call("stubborn", seconds=30)])[0]
    assert error_of(result) is ToolTimeoutError
    assert time.perf_counter() - start < 2.5
    assert executor.run([call("async_nap", seconds=0)])[0].ok


def test_remote_outputs_have_the_same_bounds() -> None:
    async def long() -> str:
        """Return much."""
        return "x" * 99

    async def nan() -> float:
        """Return what is no number."""
        return math.nan

    tools = ToolCatalogue([Tool.from_function(function, remote=True) for function in (long, nan)])
    with ToolExecutor(tools, max_output_bytes=100) as small, ToolExecutor(tools, max_output_bytes=101) as enough:
        assert error_of(small.run([call("long")])[0]) is OutputTooLargeError  # 99 + 2 quotes
        assert enough.run([call("long")])[0].output == "x" * 99
        assert type(enough.run([call("nan")])[0].error).__name__ == "InvalidOutputError"


def test_run_within_a_remote_tool_is_refused_instead_of_waiting_for_itself() -> None:
    async def inner() -> str:
        """Call the executor that calls this."""
        made.run([])
        return "unreached"

    with ToolExecutor(ToolCatalogue([Tool.from_function(inner, remote=True)]), timeout=5.0) as made:
        result = made.run([call("inner")])[0]
    assert "await run_async" in str(result.error)


# --- the log


def test_each_call_is_one_line_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    log.write_text('{"before": true}\n')
    with ToolExecutor(CATALOGUE, num_workers=1, log_path=log) as made:
        made.run(
            [
                call("echo", value="line\nbreak\x1b[31m\u2028"),
                call("add", a="x"),
                call("no\nsuch"),
                call("echo", value=b"x"),
            ]
        )
        made.run([call("echo", value="y" * 5000)])
        lines = log.read_bytes().decode("ascii").splitlines()  # written at once, not at the end
    entries = [json.loads(line) for line in lines[1:]]
    assert lines[0] == '{"before": true}'
    assert len(entries) == 5
    good = next(entry for entry in entries if entry["ok"])
    assert good["arguments"] == {"value": "line\nbreak\x1b[31m\u2028"}
    assert (good["error"], good["message"]) == (None, None)
    assert good["output_bytes"] == len(json.dumps("line\nbreak\x1b[31m\u2028"))
    assert 0 < good["seconds"] < 5
    when = datetime.fromisoformat(good["time"])
    assert when.utcoffset() is not None
    assert abs((datetime.now(UTC) - when).total_seconds()) < 60
    bad = next(entry for entry in entries if entry["tool"] == "add")
    assert (bad["ok"], bad["error"], bad["output_bytes"]) == (False, "InvalidArgumentsError", 0)
    assert bad["message"] == "add: at $.a: 'x' is not of type 'integer'."
    assert next(entry for entry in entries if entry["tool"] == "no\nsuch")["error"] == "UnknownToolError"
    assert {"tool": "echo", "arguments": "{'value': b'x'}"}.items() <= next(
        entry for entry in entries if not entry["ok"] and entry["tool"] == "echo"
    ).items()
    assert entries[4]["arguments"] == '{"value": "' + "y" * 1989
    assert all(b"\x1b" not in line and b"\n" not in line for line in map(str.encode, lines))


def log_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_calls_that_are_given_up_have_their_lines_too(tmp_path: Path) -> None:
    calls = [call("nap", seconds=50), call("add", a=1), call("async_nap", seconds=50), call("no_such")] * 3

    def interrupt(made: ToolExecutor) -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            made.run(calls)

    def close(made: ToolExecutor) -> None:
        threading.Timer(0.5, made.close).start()
        with pytest.raises(ConfigError, match="closed while calls ran"):
            made.run(calls)

    def cancel(made: ToolExecutor) -> None:
        async def work() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(made.run_async(calls), 0.5)

        asyncio.run(work())
        assert soon(lambda: len(log_of(log)) == len(calls))

    for i, give_up in enumerate((interrupt, close, cancel)):
        log = tmp_path / f"{i}.jsonl"
        with ToolExecutor(CATALOGUE, num_workers=1, max_concurrency=2, timeout=60.0, log_path=log) as made:
            give_up(made)
        entries = log_of(log)
        assert sorted(entry["tool"] for entry in entries) == sorted(given.tool for given in calls)
        begun = [entry for entry in entries if entry["seconds"] > 0.2]
        assert sorted(entry["tool"] for entry in begun) == ["async_nap", "async_nap", "nap"]
        assert {(entry["ok"], entry["error"]) for entry in entries} == {(False, "CancelledError")}
        assert all("given up" in entry["message"] for entry in entries)
        assert begun[0]["arguments"] == {"seconds": 50}


def test_results_come_even_if_the_log_is_full() -> None:
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


# --- ends


def test_after_close_nothing_is_left_and_nothing_runs() -> None:
    before = set(threading.enumerate())
    made = ToolExecutor(CATALOGUE, num_workers=2)
    made.run([call("nap", seconds=0.1)] * 2)
    server = made.run([call("who")])[0].output["parent"]
    workers = [number for _, number in worker_processes(made)]
    assert len(workers) == 2
    made.close()
    made.close()
    assert not any(exists(pid) for pid in [server, *workers])
    assert set(threading.enumerate()) == before
    with pytest.raises(ConfigError, match="closed"):
        made.run([])


def test_close_ends_what_another_thread_waits_for() -> None:
    made = ToolExecutor(CATALOGUE, num_workers=1, timeout=60.0)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            made.run([call("nap", seconds=50), call("async_nap", seconds=50)])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    start = time.perf_counter()
    made.close()
    thread.join(5)
    assert time.perf_counter() - start < 3
    assert [type(error) for error in raised] == [ConfigError]


def test_close_ends_what_is_awaited() -> None:
    async def work() -> None:
        made = ToolExecutor(CATALOGUE, num_workers=1, timeout=60.0)
        waiting = asyncio.ensure_future(made.run_async([call("nap", seconds=50)]))
        await asyncio.sleep(0.3)
        made.close()
        with pytest.raises(ConfigError, match="closed while calls ran"):
            await waiting

    asyncio.run(work())


def test_giving_up_an_await_ends_its_calls() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, timeout=60.0) as made:
        pid = made.run([call("who")])[0].output["pid"]

        async def work() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(made.run_async([call("nap", seconds=50)]), 0.3)

        asyncio.run(work())
        assert soon(lambda: not exists(pid))
        assert made.run([call("add", a=1)])[0].ok


def test_an_interrupt_ends_the_calls_and_goes_on_up() -> None:
    with ToolExecutor(CATALOGUE, num_workers=2, timeout=60.0) as made:
        pid = made.run([call("who")])[0].output["pid"]
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            made.run([call("nap", seconds=50)] * 2)
        assert time.perf_counter() - start < 3
        assert not exists(pid)
        assert made.run([call("add", a=1)])[0].ok


def test_an_executor_that_is_forgotten_ends() -> None:
    made = ToolExecutor(CATALOGUE, num_workers=1)
    seen = made.run([call("who")])[0].output
    root = made.root
    del made
    gc.collect()
    assert soon(lambda: not exists(seen["parent"]) and not exists(seen["pid"]) and not root.exists())


def test_it_cannot_be_pickled_or_copied(executor: ToolExecutor) -> None:
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="owns processes"):
            attempt(executor)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_it_is_refused_after_a_fork(executor: ToolExecutor) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            executor.run([])
        except ConfigError:
            executor.close()  # ends nothing of its parent's
            os._exit(17)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    assert executor.root.is_dir()
    assert executor.run([call("add", a=1)])[0].ok


def test_what_tools_have_locked_is_removed_too() -> None:
    with ToolExecutor(CATALOGUE, allow=["async_nap"]) as made:
        locked = made.root / "a" / "b"
        locked.mkdir(parents=True)
        locked.chmod(0)
        locked.parent.chmod(0)
        root = made.root
    assert not root.exists()


# --- programs


SCRIPT = """
import os, sys, time
from adapters.tools.calls import ToolCall
from adapters.tools.catalogue import Tool, ToolCatalogue
from adapters.tools.executor import ToolExecutor

def pids(a: int) -> list:
    "Return the numbers of processes."
    return [os.getpid(), os.getppid(), a]

print("imported", __name__, flush=True)
"""


def script(tmp_path: Path, ending: str, *, module: bool = False) -> "subprocess.Popen[str]":
    file = tmp_path / "script_with_tools.py"
    file.write_text(SCRIPT + ending)
    command = ["-m", "script_with_tools"] if module else [str(file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )


MAIN = """
if __name__ == "__main__":
    executor = ToolExecutor(ToolCatalogue([Tool.from_function(pids)]))
    print(*executor.run([ToolCall(tool="pids", arguments={"a": 5})])[0].output, flush=True)
"""


@pytest.mark.parametrize("module", [False, True])
def test_tools_may_stand_in_the_program_itself_and_its_end_ends_them(tmp_path: Path, module: bool) -> None:
    process = script(tmp_path, MAIN, module=module)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert not OWN_USERS or errors == ""
    imported, numbers = out.splitlines()
    assert imported == "imported __main__"
    worker, server, five = map(int, numbers.split())
    assert five == 5
    assert soon(lambda: not exists(worker) and not exists(server))


def test_a_program_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    process = script(tmp_path, MAIN.replace('if __name__ == "__main__":', "if True:"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Create it under `if __name__ == '__main__':`" in errors.splitlines()[-1]


def test_a_program_without_a_guard_whose_tools_stand_elsewhere_runs(tmp_path: Path) -> None:
    process = script(tmp_path, """
from tests.support.tool_functions import add
executor = ToolExecutor(ToolCatalogue([Tool.from_function(add)]))
print(executor.run([ToolCall(tool="add", arguments={"a": 5})])[0].output)
""")  # fmt: skip
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.splitlines()) == (0, ["imported __main__", "6"])


def test_a_program_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    process = script(tmp_path, """
from tests.support.tool_functions import who
executor = ToolExecutor(ToolCatalogue([Tool.from_function(who)]))
seen = executor.run([ToolCall(tool="who")])[0].output
print(seen["pid"], seen["parent"], executor.root, flush=True)
time.sleep(60)
""")  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    numbers = process.stdout.readline().split()
    worker, server, root = int(numbers[0]), int(numbers[1]), Path(numbers[2])
    assert exists(worker)
    assert exists(server)
    assert root.is_dir()
    process.kill()
    process.communicate()
    assert soon(lambda: not exists(worker) and not exists(server) and not root.exists())


def test_a_program_that_is_no_file_is_told_to_be_one(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT + MAIN],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert process.returncode == 1
    assert "Write them into a module and import that" in process.stderr.splitlines()[-1]


# --- commands


def command_tool(argv: tuple[str, ...], **properties: Any) -> Tool:
    return Tool(
        name="run", description="Run.", function=Command(argv), parameters={"type": "object", "properties": properties}
    )


def test_a_command_runs_in_a_worker() -> None:
    tool = command_tool(("wc", "-c", "--", "{path}"), path=PATH)
    with ToolExecutor(ToolCatalogue([tool])) as made:
        (made.root / "f").write_text("12345")
        results = made.run([call("run", path="f"), call("run", path="../f"), call("run", path="absent")])
    assert results[0].output == f"5 {made.root / 'f'}\n"
    assert [error_of(result) for result in results[1:]] == [PathOutsideRootError, ToolRaisedError]
    assert "CommandFailedError: wc ended with status 1: wc: " in str(results[2].error)


def test_elements_are_arguments_whatever_their_text_is() -> None:
    command = Command(("printf", "[%s]", "{a}", "--x={b}", "{{}}", "{c}{d}"))
    assert command.names == {"a", "b", "c", "d"}
    assert command.resolve({"a": "x y; $(z)", "b": "-1", "c": 1.5, "d": True}) == [
        "printf", "[%s]", "x y; $(z)", "--x=-1", "{}", "1.5true",
    ]  # fmt: skip
    assert command(a="$HOME `id`", b="| cat", c=1, d="\n") == "[$HOME `id`][--x=| cat][{}][1\n]"


def test_what_is_left_out_takes_its_element_with_it() -> None:
    command = Command(("ls", "--sort={by}", "{path}"))
    assert command.resolve({"path": "/x"}) == ["ls", "/x"]
    assert command.resolve({"by": "size", "path": None}) == ["ls", "--sort=size"]


def test_values_do_not_become_options() -> None:
    bare, after, within = Command(("cat", "{x}")), Command(("cat", "--", "{x}")), Command(("cat", "-{x}", "--n={x}"))
    for value in ("-rf", "--", "-", -5):
        with pytest.raises(InvalidArgumentsError, match="x must not begin with '-'"):
            bare.resolve({"x": value})
        assert after.resolve({"x": value}) == ["cat", "--", str(value)]
        assert within.resolve({"x": value}) == ["cat", f"-{value}", f"--n={value}"]
    with pytest.raises(InvalidArgumentsError, match="x must not"):  # a `--` that comes later
        Command(("cat", "{x}", "--", "{y}")).resolve({"x": "-rf", "y": "-rf"})
    two = Command(("cat", "{x}", "{y}"))
    with pytest.raises(InvalidArgumentsError):  # a value is no `--` for the next one
        two.resolve({"x": "--", "y": "-rf"})
    with pytest.raises(InvalidArgumentsError):
        Command(("cat", "{x}{y}")).resolve({"x": "", "y": "-rf"})


@pytest.mark.parametrize(
    ("value", "message"), [("a\0b", "null character"), (["a"], "got list"), ({"a": 1}, "got dict")]
)
def test_what_cannot_be_an_argument_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=message):
        Command(("echo", "{x}")).resolve({"x": value})


@pytest.mark.parametrize(
    "argv",
    [(), "ls -l", ("",), ("{x}", "a"), ("ls", 1), ("ls\0",), ("sh", "-c", "echo {x}"), ("/bin/bash", "-ec", "{x}"),
    ("ls", "{x!r}"),
     ("ls", "{x.y}"), ("ls", "{0}"), ("ls", "{}"), ("ls", "{x"), ("ls", "{x:>9}"), ("ls", "{x[0]}")],
)  # fmt: skip
def test_command_lines_without_meaning_are_refused(argv: Any) -> None:
    with pytest.raises(ConfigError, match=r"Command\.argv"):
        Command(argv)


def test_a_command_must_fit_its_tool() -> None:
    for tool in (command_tool(("cat", "{x}")), command_tool(("cat",), x=PATH), command_tool(("cat", "{y}"), x=PATH)):
        with pytest.raises(ConfigError, match=r"Tool run: Command\.argv must name each parameter"):
            ToolExecutor(ToolCatalogue([tool]))


def test_a_command_is_read_no_further_than_its_bound() -> None:
    start = time.perf_counter()
    with pytest.raises(OutputTooLargeError):
        Command(("yes",), max_output_bytes=1000)()
    assert Command(("printf", "12345"), max_output_bytes=5)() == "12345"
    with pytest.raises(OutputTooLargeError):
        Command(("printf", "123456"), max_output_bytes=5)()
    assert time.perf_counter() - start < 3


def test_the_end_of_what_a_command_complains_of_is_kept() -> None:
    program = "import sys; sys.stderr.write('x' * 500_000 + 'the end'); sys.stdout.write('y' * 70_000); sys.exit(3)"
    with pytest.raises(CommandFailedError, match=r"status 3: x+the end$") as caught:
        Command((sys.executable, "-c", program))()
    assert len(str(caught.value)) < 2200


def test_a_command_reads_nothing_and_writes_any_bytes() -> None:
    assert Command(("cat",))() == ""
    assert Command(("printf", r"\377a"))() == "\ufffda"


def test_a_command_that_is_not_installed_is_an_error_of_the_call() -> None:
    with ToolExecutor(ToolCatalogue([command_tool(("no-such-program-here",))])) as made:
        result = made.run([call("run")])[0]
    assert error_of(result) is ToolRaisedError
    assert "no-such-program-here" in str(result.error)


# --- speed


def test_waiting_calls_wait_together() -> None:
    with ToolExecutor(CATALOGUE, num_workers=32, max_concurrency=32) as made:
        made.run([call("nap", seconds=0.2)] * 32)  # starts the workers
        for tool in ("nap", "async_nap"):
            best = math.inf
            for _ in range(3):
                start = time.perf_counter()
                results = made.run([call(tool, seconds=0.05)] * 64)
                best = min(best, time.perf_counter() - start)
                assert all(result.ok for result in results)
            assert best < 0.3, tool  # 2 rounds of 50 ms
