"""Hostile calls: each is refused or ends with an error that says why, and calls at the same time and later work.

Paths, options, sizes and shapes come from whoever writes arguments, and so are hostile. In some cases a tool misbehaves
(`hostile_tools.misbehave`), as a tool does whose code a hostile argument has turned against it.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.tools import Command, Tool, ToolCall, ToolCatalogue, ToolExecutor, ToolResult, ToolTask
from adapters.tools.errors import (
    InvalidArgumentsError,
    InvalidOutputError,
    OutputTooLargeError,
    PathOutsideRootError,
    ToolNotAllowedError,
    ToolRaisedError,
    ToolTimeoutError,
    UnknownToolError,
    WorkerDiedError,
    WorkerLostError,
)
from adapters.tools.execution.workers import WorkerLimits
from adapters.tools.learning.rewards import ToolRewards, call_cost, latency_cost, standard_rewards
from tests.support import hostile_tools, tool_functions
from tests.support.tool_executors import (
    CONFINEMENTS,
    LINUX,
    OWN_USERS,
    PATH,
    executor_of,
    number_here,
    output_of,
    processes_of,
    soon,
    worker_processes,
)
from tests.support.tool_functions import descendants

pytestmark = LINUX
SLOW = pytest.mark.slow
TEXT = {"type": "string"}
LIMITS = WorkerLimits(memory_bytes=2**27, file_bytes=5 * 2**20, open_files=64, processes=16)
MAX_OUTPUT = 100_000
SHORT = 0.4
"""Timeout of the calls that must not end by themselves. The others have all the time that a busy machine may take."""


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _tool(tool: str, function: Any, timeout: float | None = None, /, **properties: Any) -> Tool:
    return Tool(name=tool, description=tool, function=function, parameters=_object(**properties), timeout=timeout)


CATALOGUE = ToolCatalogue([
    *(Tool.from_function(getattr(tool_functions, name)) for name in ("add", "read", "who", "kill", "nap")),
    Tool.from_function(hostile_tools.misbehave),
    Tool.from_function(hostile_tools.misbehave, name="hang", timeout=SHORT),
    _tool("where", tool_functions.where, path=PATH),
    _tool("wheres", tool_functions.wheres, paths={"type": "array", "items": {"anyOf": [PATH, _object(file=PATH)]}}),
    _tool("pattern", tool_functions.echo, SHORT, value={"type": "string", "pattern": "^(a|aa)+$"}),
    _tool("print", Command(("printf", "%s|%s", "{text}", "--a={text}")), text=TEXT),
    _tool("cat", Command(("cat", "{name}")), name=TEXT),
    _tool("find", Command(("find", "{name}", "-maxdepth", "0")), name=TEXT),
    _tool("sort", Command(("sort", "--", "{name}")), name=TEXT),
    _tool("count", Command(("wc", "-c", "--", "{path}")), path=PATH),
    _tool("endless", Command(("yes", "{text}")), text=TEXT),
    _tool("follow", Command(("tail", "-f", "{path}")), SHORT, path=PATH),
])  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call, and how it must end."""

    name: str
    tool: Any
    arguments: Any
    ends: type[Exception] | Callable[[Any], bool] | None
    """An error's type, or a test of the output. None: the output is the number of a process that has ended."""
    own_user: bool = False
    """Harmless only where workers are not the program's user."""


def _cases(group: str, tool: str, parameter: str, ends: Any, *values: Any, own_user: bool = False) -> list[Case]:
    return [Case(f"{group} {ascii(value)[:30]}", tool, {parameter: value}, ends, own_user) for value in values]


_misbehaving = functools.partial(_cases, "misbehave", "misbehave", "how")


# --- arguments that a hostile call may have
NESTED: Any = 0
for _ in range(100):
    NESTED = [NESTED]
CIRCLE: dict[str, Any] = {}
CIRCLE["a"] = CIRCLE
LAUGHS: Any = "ha"
for _ in range(20):
    LAUGHS = [LAUGHS] * 10


class Raises(Mapping[str, Any]):
    """Arguments that raise while they are read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, key: str) -> Any:
        raise self.error

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        raise self.error

    def __repr__(self) -> str:
        raise self.error


class Endless(Mapping[str, Any]):
    """Arguments that never end."""

    def __getitem__(self, key: str) -> Any:
        return 1

    def __iter__(self) -> Iterator[str]:
        return map(str, itertools.count())

    def __len__(self) -> int:
        return 1


class Name(str):
    """A name that raises when it is looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __str__ = __repr__ = __hash__  # type: ignore[assignment]


KINDS: dict[str, list[Case]] = {
    "paths": [
        *_cases("path", "read", "path", PathOutsideRootError, "../secret", "../../../../../../../../etc/passwd",
            "/etc/passwd", "//etc/passwd", "/../etc/passwd", "a/../../secret", "./.././secret", "..", "../", "/", "/.",
            "a/b/c/../../../../secret", "/proc/self/environ", "/proc/self/mem", "/proc/1/environ", "/dev/zero",
            "/dev/tty", "inside/../../secret", "missing/../../../etc/passwd", "../" * 500 + "etc/passwd",
            "....//../..//etc/passwd", " /../../etc/passwd", "\t/../../etc/passwd", "\n/../../../etc/passwd",
            "a\\..\\/../../secret", "out_file", "out_folder/secret", "out_chain", "out_dangling", "proc", "proc/environ",
            "proc_root/etc/passwd", "inside/up/../../secret", "proc_cwd/../../etc/passwd", "proc_fd/0", "absolute/passwd"),
        *_cases("climb", "read", "path", PathOutsideRootError,
            *("../" * levels + target for levels in (1, 2, 3, 8, 64) for target in (
                "etc/passwd", "root/.ssh/id_rsa", "proc/self/environ", "dev/mem", "var/run/docker.sock", "tmp"))),
        # paths that are none
        *_cases("no path", "read", "path", InvalidArgumentsError, "a\0b", "\0", "../\0", "loop", "loop/x", "a\ud800", 5, None,
            ["a"], {}),
        # paths that look as though they led outside, and are names of files that do not exist
        *_cases("odd name", "read", "path", ToolRaisedError, "..\\..\\etc\\passwd", "%2e%2e%2fetc%2fpasswd", "..%2f..%2fetc",
            "\u2025/etc/passwd", "\uff0e\uff0e/secret", "..\u2215secret", "..\u200b/secret", "~/secret", "~root/x",
            "$HOME/x", "$(cat /etc/passwd)", "file:///etc/passwd", "C:\\Windows", "con", "...", ".. /secret", "a\nb",
            "x" * 5000, "missing", "{0}", "-rf", "*"),
        # paths that stay inside: by a link, a chain, dots, links and dots, and /proc
        *_cases("path inside", "read", "path", "PosixPath:harmless".__eq__, "in_file", "in_chain", "inside/../harmless",
            "inside/up/harmless", "proc_cwd/harmless"),
        # paths within lists and objects
        *_cases("path within", "wheres", "paths", PathOutsideRootError, ["harmless", "/etc/passwd"],
            ["harmless", {"file": "../secret"}]),
        *_cases("no path", "wheres", "paths", InvalidArgumentsError, [{"file": "harmless", "other": 5, "more": {}}, 3]),
    ],
    "commands": [
        *(Case(f"shell {ascii(text)[:30]}", "print", {"text": text}, f"{text}|--a={text}".__eq__) for text in (
            "; touch owned", "$(touch owned)", "`touch owned`", "| sh", "&& touch owned", "|| touch owned", "> owned",
            "\ntouch owned\n", "'; touch owned; '", '"; touch owned; "', "${IFS}touch${IFS}owned", "$HOME", "*", "a\\",
            "%s%n%s", "{text}", "é \u202e", "# x", "\x1b]0;owned\x07", "\x9b31m", "\r\n", "{{}}", "%00", "!!", "$((1/0))",
            "a;b", "<(id)", ">&2", "2>&1", "&", "\t", "${0}", "=cmd|' /C calc'!A0", "\u2028")),
        *_cases("option", "cat", "name", InvalidArgumentsError, "-n", "--help", "-", "--", "-\n", "--show-all=x"),
        *_cases("option", "find", "name", InvalidArgumentsError, "-delete", "-exec", "-fprintf"),
        *_cases("no option", "sort", "name", ToolRaisedError, "-oowned", "--output=owned", "--compress-program=sh", "-T/"),
        *_cases("no argument", "cat", "name", InvalidArgumentsError, "a\0b", ["a", "b"], {"a": 1}, 1, None),
        *_cases("command path", "count", "path", PathOutsideRootError, "/etc/passwd", "../secret", "out_file",
            "--files0-from=/../../etc/x"),
        Case("command endless", "endless", {"text": "y"}, OutputTooLargeError),
        Case("command follows", "follow", {"path": "harmless"}, ToolTimeoutError),
    ],
    "arguments": [
        *(Case(f"arguments {name}", "add", arguments, InvalidArgumentsError) for name, arguments in {
            "list": [1, 2], "none": None, "text": '{"a": 1}', "bytes": b"{}", "number": 3, "missing": {},
            "wrong name": {"A": 1}, "text for a number": {"a": "1"}, "boolean": {"a": True}, "null": {"a": None},
            "fraction": {"a": 1.5}, "nan": {"a": math.nan}, "infinity": {"a": -math.inf}, "list for a number": {"a": [1]},
            "object for a number": {"a": {"$ref": "#"}}, "additional": {"a": 1, "c": 2}, "self": {"a": 1, "self": 2},
            "dunder": {"a": 1, "__class__": "x"}, "bytes within": {"a": b"1"}, "set": {"a": {1}}, "complex": {"a": 1j},
            "object": {"a": object()}, "class": {"a": int}, "number as key": {1: 1}, "none as key": {None: 1},
            "bytes as key": {b"a": 1}, "tuple as key": {(1, 2): 1}, "boolean as key": {"a": {True: 1}},
            "huge integer": {"a": 10**5000}, "long text": {"a": "x" * 10**7}, "long key": {"x" * 10**7: 1},
            "text that a model can say": {"a": "x" * 100_001},
            "wide": {"a": [0] * 10**6}, "deep": {"a": NESTED}, "circle": CIRCLE, "laughs": {"a": LAUGHS},
            "many keys": {str(i): i for i in range(50_000)}, "raising": Raises(KeyError("a")),
            "raising an exit": Raises(SystemExit()), "raising at depth": {"a": Raises(OSError())},
            "cancelling": Raises(asyncio.CancelledError()), "endless": Endless(), "endless at depth": {"a": Endless()},
            "surrogates": {"\ud800": 1}, "number as text": {"a": 1, "b": "1e400"}}.items()),
    ],
    "tools that there are not, or not for everyone": [
        *(Case(f"unknown {ascii(name)[:30]}", name, {}, UnknownToolError) for name in (
            "no_such_tool", "", "ADD", "add ", " add", "add\n", "add\0", "../add", "__init__", "os.system", "eval", "аdd",
            "x" * 10**6, None, 5, b"add", ["add"], {"a": 1}, ("add",), "\x1b[2J", "tests.support.tool_functions.add",
            "misbehave.how")),
        *(Case(f"unknown {type(tool).__name__}", tool, {}, UnknownToolError)
          for tool in (10**5000, LAUGHS, CIRCLE, Raises(KeyError("a")), object(), Name("nope"))),
        Case("a known name of a class of its own", Name("add"), {"a": 1}, (2).__eq__),
        *_cases("not allowed", "nap", "seconds", ToolNotAllowedError, 60.0, b""),
    ],
    "outputs": [
        *_misbehaving(OutputTooLargeError, "long_text", "many_items", "wide_text", "liar"),
        *_misbehaving(InvalidOutputError, "deep", "deep_beyond_limit", "circle", "infinity", "bytes", "tuple_keys", "generator",
            "huge_integer"),
    ],
    "ends": [
        *_misbehaving(WorkerDiedError, "os_exit", "os_exit_7", "segfault", "replace_program"),
        *_misbehaving(WorkerLostError, "kill_self", "terminate_self", "kill_group"),  # as if killed from outside
        *_misbehaving(ToolRaisedError, "sys_exit", "recursion", "raise_without_message", "raise_odd_message", "raise_long",
            "raise_base", "raise_interrupt", "raise_stop", "interrupt_self"),
    ],
    "hangs": [
        Case("pattern", "pattern", {"value": "a" * 60 + "!"}, ToolTimeoutError),
        *_cases("hang", "hang", "how", ToolTimeoutError, "sleep", "busy", "busy_in_c", "ignore_signals", "block_signals",
            "stop", "deadlock", "join_forever", "child_of_sleeper", "escaped_child", "escaped_grandchild",
            "reader_of_requests", "drip"),
        Case("hang stop_everybody", "hang", {"how": "stop_everybody"}, ToolTimeoutError, own_user=True),
    ],
    "bombs": [
        *_misbehaving(ToolRaisedError, "memory_bomb", "slow_memory_bomb", "private_map_bomb", "file_bomb", "sparse_file_bomb",
            "descriptor_bomb"),
        *_misbehaving(ToolRaisedError, "fork_bomb", "thread_bomb", "many_background_children", "raise_limits", own_user=True),
    ],
    "the executor's socket": [
        *_misbehaving(WorkerDiedError, "garbage", "zeros", "fake_frame", "huge_frame", "flood", "close_socket", "shut_socket",
            "pass_descriptors"),
    ],
    "what does not belong to a worker": [
        *_misbehaving(ToolRaisedError, "kill_parent", "stop_parent", "become_root", "read_shadow", "read_parent_memory",
            "read_parent_environment", "write_etc", "remove_own_folder", "mount", "change_root", "trace_parent",
            "raise_priority", own_user=True),
        Case("kill the program", "kill", {"pid": os.getpid()}, ToolRaisedError, own_user=True),
    ],
    "what is left for the next call": [
        *_misbehaving((10).__eq__, "zombies"),
        *_misbehaving(None, "daemon", "background_child"), *_misbehaving(None, "stranger", own_user=True),
        *_misbehaving("parent".__eq__, "forked_worker", "forked_worker_that_raises"),
        *_misbehaving("left".__eq__, "thread_left", "raw_thread_left", "late_writer", "late_raw_thread", "late_process",
            "late_hook", "late_garbage", "late_error"),
        *_misbehaving((2).__eq__, "joined_threads"), *_misbehaving("closed".__eq__, "closed_folders"),
        *_misbehaving("changed".__eq__, "change_everything", "signal_handlers", "timers"),
        *_misbehaving("printed".__eq__, "print"), *_misbehaving("closed".__eq__, "close_output"),
        *_misbehaving("".__eq__, "read_input"),
    ],
}  # fmt: skip
DAILY = ("what does not belong to a worker", "what is left for the next call")
"""What depends on the kind of confinement the most. All but these calls, in the first kind, are slow tests."""
RUNS = [
    pytest.param(name, kind, id=f"{name}, {kind}", marks=[*marks, *([] if name == "bubblewrap" and kind in DAILY else [SLOW])])
    for name, marks in ((each, ()) if isinstance(each, str) else (each.values[0], each.marks) for each in CONFINEMENTS)
    for kind in KINDS
]  # fmt: skip


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of all calls."""
    return tmp_path_factory.mktemp("log") / "calls.jsonl"


@pytest.fixture(scope="module")
def executors(log: Path) -> Iterator[Callable[[Any], ToolExecutor]]:
    """Gives one executor for each kind of confinement, whose folder holds files to attack."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def confined_by(confinement: Any) -> ToolExecutor:
            made = stack.enter_context(
                executor_of(
                    CATALOGUE, num_workers=4, allow=[name for name in CATALOGUE if name != "nap"], max_output_bytes=MAX_OUTPUT,
                    limits=LIMITS, log_path=log, confinement=confinement,
                )
            )  # fmt: skip
            hostile_tools.lay_files(made.root)
            return made

        yield confined_by


@pytest.mark.parametrize(("confinement", "kind"), RUNS)
def test_each_hostile_call_ends_as_required_and_harms_no_other_call(
    executors: Callable[[Any], ToolExecutor], log: Path, confinement: str, kind: str, subtests: pytest.Subtests
) -> None:
    executor = executors(confinement)
    cases = [case for case in KINDS[kind] if OWN_USERS or not case.own_user]
    if not cases:
        pytest.skip("harmless only where workers have user ids of their own: as root on Linux")
    lines = log.read_bytes().count(b"\n")
    calls = []
    for i, case in enumerate(cases):
        calls += [ToolCall(tool=case.tool, arguments=case.arguments), ToolCall(tool="add", arguments={"a": i})]
    results = executor.run(calls)
    for case, result in zip(cases, results[::2], strict=True):
        with subtests.test(case.name):
            if isinstance(case.ends, type):
                assert type(result.error) is case.ends, result
                assert result.output is None
                assert len(str(result.error)) < 4000
            else:
                assert result.ok, result
                if case.ends is None:
                    assert result.output > 1
                    assert soon(lambda pid=result.output: number_here(executor, pid) is None), result
                else:
                    assert case.ends(result.output), result
    assert [result.output for result in results[1::2]] == list(range(1, len(cases) + 1))
    logged = log.read_bytes().splitlines()[lines:]
    assert max(map(len, logged)) < 20_000
    errors = sorted(str(result.error and type(result.error).__name__) for result in results)
    assert sorted(str(json.loads(line)["error"]) for line in logged) == errors

    def at_rest() -> bool:
        """Only the fork server and its workers are left, and no process waits for its parent."""
        server, *below = processes_of(executor)
        states = [state for _, state in descendants(server)]
        return len(below) <= 4 + (confinement == "bubblewrap") and "Z" not in states

    assert soon(at_rest)


@pytest.mark.skipif(not OWN_USERS, reason="processes are limited only for workers with user ids of their own")
def test_processes_that_leave_their_worker_do_not_use_up_its_processes() -> None:
    """LIMITS allows 16. Each of these calls leaves a process behind, which is no child of its worker."""
    with executor_of(ToolCatalogue([CATALOGUE["misbehave"]]), limits=LIMITS, confinement="user") as executor:
        results = executor.run([ToolCall(tool="misbehave", arguments={"how": "stranger"})] * 20)
    assert [result.error for result in results] == [None] * 20


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two processors")
def test_a_worker_that_narrowed_its_limits_is_replaced(subtests: pytest.Subtests) -> None:
    catalogue = ToolCatalogue([CATALOGUE["misbehave"], CATALOGUE["who"]])
    with executor_of(catalogue, limits=LIMITS, confinement="user") as executor:
        before, worker = output_of(executor, "misbehave", how="limits"), output_of(executor, "who")["pid"]
        assert output_of(executor, "who")["pid"] == worker  # nothing has changed, so the worker stays
        for how in ("lower_priority", "lower_limit", "leave_processor"):
            with subtests.test(how):
                output_of(executor, "misbehave", how=how)
                assert output_of(executor, "misbehave", how="limits") == before


@pytest.mark.parametrize("confinement", CONFINEMENTS)
def test_hostile_calls_leave_no_process_file_or_descriptor_behind(executors: Any, confinement: str) -> None:
    executor = executors(confinement)

    def program() -> tuple[Any, ...]:
        umask = os.umask(0)
        os.umask(umask)
        return Path.cwd(), dict(os.environ), umask, len(list(Path("/proc/self/fd").iterdir()))

    executor.run([ToolCall(tool="add", arguments={"a": i}) for i in range(50)])  # starts all four workers
    before = program()
    for how in ("garbage", "segfault", "daemon", "change_everything"):
        executor.run([ToolCall(tool="misbehave", arguments={"how": how})])
    executor.run([ToolCall(tool="hang", arguments={"how": "sleep"})])
    seen = output_of(executor, "who")
    assert len(worker_processes(executor)) <= 4
    for outside in ("/owned", "/etc/owned", "/tmp/owned", executor.root.parent / "owned", Path.cwd() / "owned"):
        assert not Path(outside).exists()
    assert not (executor.root / "owned").exists()
    assert (executor.root / "harmless").read_text() == "harmless"
    *unchanged, descriptors = program()
    assert unchanged == list(before[:-1])
    assert descriptors <= before[-1] + 4  # one for each worker
    if OWN_USERS:
        mine = [number for number, _, user, _ in tool_functions.processes() if user == seen["uid"][0]]
        assert mine == [number_here(executor, seen["pid"])]


@pytest.mark.slow
@pytest.mark.parametrize("reuse_results", [False, True])
def test_every_hostile_call_is_rewarded_less_than_the_right_one(reuse_results: bool) -> None:
    """Rewards read the same hostile tools and arguments. They neither raise nor hang."""
    right = ToolCall(tool="add", arguments={"a": 1, "b": 2})
    task = ToolTask(text="", tool=right.tool, arguments=right.arguments)
    parts = standard_rewards(CATALOGUE) | {"cost": call_cost(CATALOGUE), "latency": latency_cost(0.01)}
    failed, worked = (
        ToolRewards(SimpleNamespace(run=lambda calls, end=result: [end] * len(calls)), parts, reuse_results=reuse_results)
        for result in (ToolResult(error=ToolRaisedError("no")), ToolResult(output=3))
    )  # fmt: skip
    hostile = [ToolCall(tool=case.tool, arguments=case.arguments) for cases in KINDS.values() for case in cases]
    rewards = failed.compute_rewards([task] * len(hostile), hostile)
    assert rewards.isfinite().all()
    assert worked.compute_rewards([task], [right]).item() == pytest.approx(1.0)
    assert rewards.max() <= 0.65  # 0.5 for the tool, 0.15 for one of two arguments
