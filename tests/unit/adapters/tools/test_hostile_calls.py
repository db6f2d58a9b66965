"""Calls that mean harm: each is refused, or ends with the error that says why, and the next call works.

Paths, options, sizes and shapes come from whoever writes arguments, and so are hostile. Some cases have a tool misbehave
(`tool_functions.misbehave`), as one might whose code a hostile argument has turned against it.
"""

import asyncio
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.tools.calls import ToolCall, ToolResult
from adapters.tools.catalogue import Tool, ToolCatalogue
from adapters.tools.commands import Command
from adapters.tools.errors import (
    InvalidArgumentsError,
    InvalidOutputError,
    OutputTooLargeError,
    PathOutsideRootError,
    ToolError,
    ToolNotAllowedError,
    ToolRaisedError,
    ToolTimeoutError,
    UnknownToolError,
    WorkerDiedError,
)
from adapters.tools.executor import ToolExecutor
from adapters.tools.rewards import ToolRewards, call_cost, latency_cost, standard_rewards
from adapters.tools.tasks import ToolTask
from adapters.tools.workers import WorkerLimits
from grpo import GRPOConfig, GRPOTrainer
from tests.support import tool_functions

OWN_USERS = sys.platform == "linux" and os.geteuid() == 0
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
if not OWN_USERS:
    pytestmark.append(pytest.mark.filterwarnings("ignore::grpo.errors.GRPOWarning"))

PATH = {"type": "string", "format": "path"}
TEXT = {"type": "string"}
LIMITS = WorkerLimits(memory_bytes=2**27, file_bytes=5 * 2**20, open_files=64, processes=16)
MAX_OUTPUT = 100_000


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _tool(tool: str, function: Any, **properties: Any) -> Tool:
    return Tool(name=tool, description=tool, function=function, parameters=_object(**properties))


CATALOGUE = ToolCatalogue(
    [
        Tool.from_function(tool_functions.add),
        Tool.from_function(tool_functions.read),
        Tool.from_function(tool_functions.who),
        Tool.from_function(tool_functions.kill),
        Tool.from_function(tool_functions.misbehave, timeout=0.75),
        Tool.from_function(tool_functions.nap),
        _tool("where", tool_functions.where, path=PATH),
        _tool("wheres", tool_functions.wheres, paths={"type": "array", "items": {"anyOf": [PATH, _object(file=PATH)]}}),
        _tool("pattern", tool_functions.echo, value={"type": "string", "pattern": "^(a|aa)+$"}),
        _tool("print", Command(("printf", "%s|%s", "{text}", "--a={text}")), text=TEXT),
        _tool("cat", Command(("cat", "{name}")), name=TEXT),
        _tool("find", Command(("find", "{name}", "-maxdepth", "0")), name=TEXT),
        _tool("sort", Command(("sort", "--", "{name}")), name=TEXT),
        _tool("count", Command(("wc", "-c", "--", "{path}")), path=PATH),
        _tool("endless", Command(("yes", "{text}")), text=TEXT),
        _tool("follow", Command(("tail", "-f", "{path}")), path=PATH),
    ]
)


@dataclass(frozen=True)
class Case:
    """One call, and how it must end."""

    name: str
    tool: Any
    arguments: Any
    ends: type[Exception] | Callable[[Any], bool]
    """An error's type, or a test of the output."""
    own_user: bool = False
    """Harmless only where workers are not the program's user."""


def _misbehaving(ends: Any, *names: str, own_user: bool = False) -> list[Case]:
    return [Case(f"misbehave {name}", "misbehave", {"how": name}, ends, own_user) for name in names]


def _cases(group: str, tool: str, parameter: str, ends: Any, *values: Any) -> list[Case]:
    return [Case(f"{group} {ascii(value)[:30]}", tool, {parameter: value}, ends) for value in values]


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
    """Arguments of which there are always more."""

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


def gone(pid: Any) -> bool:
    """It was a process."""
    until = time.monotonic() + 1
    while (exists := Path(f"/proc/{pid}").exists()) and time.monotonic() < until:
        time.sleep(0.01)
    return isinstance(pid, int) and pid > 1 and not exists


CASES = [
    # paths that lead outside
    *_cases(
        "path", "read", "path", PathOutsideRootError,
        "../secret", "../../../../../../../../etc/passwd", "/etc/passwd", "//etc/passwd", "/../etc/passwd",
        "a/../../secret",
        "./.././secret", "..", "../", "/", "/.", "a/b/c/../../../../secret", "/proc/self/environ", "/proc/self/mem",
        "/proc/1/environ", "/dev/zero", "/dev/tty", "inside/../../secret", "missing/../../../etc/passwd",
        "../" * 500 + "etc/passwd",
        "....//../..//etc/passwd", " /../../etc/passwd", "\t/../../etc/passwd", "\n/../../../etc/passwd",
        "a\\..\\/../../secret",
        "out_file", "out_folder/secret", "out_chain", "out_dangling", "proc", "proc/environ", "proc_root/etc/passwd",
        "inside/up/../../secret", "proc_cwd/../../etc/passwd", "proc_fd/0", "absolute/passwd",
    ),
    # paths that are none
    *_cases("no path", "read", "path", InvalidArgumentsError, "a\0b", "\0", "../\0", "loop", "loop/x", "a\ud800", 5,
    None, ["a"], {}),
    # paths that look as though they led outside, and are names of files that do not exist
    *_cases(
        "odd name", "read", "path", ToolRaisedError,
        "..\\..\\etc\\passwd", "%2e%2e%2fetc%2fpasswd", "..%2f..%2fetc", "\u2025/etc/passwd", "\uff0e\uff0e/secret",
        "..\u2215secret",
        "..\u200b/secret", "~/secret", "~root/x", "$HOME/x", "$(cat /etc/passwd)", "file:///etc/passwd", "C:\\Windows",
        "con", "...",
        ".. /secret", "a\nb", "x" * 5000, "missing", "{0}", "-rf", "*",
    ),
    # paths that stay inside
    Case("path inside by a link", "read", {"path": "in_file"}, "PosixPath:harmless".__eq__),
    Case("path inside by a chain", "read", {"path": "in_chain"}, "PosixPath:harmless".__eq__),
    Case("path inside by dots", "read", {"path": "inside/../harmless"}, "PosixPath:harmless".__eq__),
    Case("path inside by links and dots", "read", {"path": "inside/up/harmless"}, "PosixPath:harmless".__eq__),
    Case("path inside by /proc", "read", {"path": "proc_cwd/harmless"}, "PosixPath:harmless".__eq__),
    # paths within lists and objects
    Case("path in a list", "wheres", {"paths": ["harmless", "/etc/passwd"]}, PathOutsideRootError),
    Case("path in an object in a list", "wheres", {"paths": ["harmless", {"file": "../secret"}]}, PathOutsideRootError),
    Case("object that is no path", "wheres", {"paths": [{"file": "harmless", "other": 5, "more": {}}, 3]},
    InvalidArgumentsError),
    # shells
    *(
        Case(f"shell {ascii(text)[:30]}", "print", {"text": text}, f"{text}|--a={text}".__eq__)
        for text in (
            "; touch owned", "$(touch owned)", "`touch owned`", "| sh", "&& touch owned", "|| touch owned", "> owned",
            "\ntouch owned\n",
            "'; touch owned; '", '"; touch owned; "', "${IFS}touch${IFS}owned", "$HOME", "*", "a\\", "%s%n%s", "{text}",
            "é \u202e", "# x",
        )
    ),
    *_cases("option", "cat", "name", InvalidArgumentsError, "-n", "--help", "-", "--", "-\n", "--show-all=x"),
    *_cases("option", "find", "name", InvalidArgumentsError, "-delete", "-exec", "-fprintf"),
    *_cases("no option", "sort", "name", ToolRaisedError, "-oowned", "--output=owned", "--compress-program=sh", "-T/"),
    *_cases("no argument", "cat", "name", InvalidArgumentsError, "a\0b", ["a", "b"], {"a": 1}, 1, None),
    *_cases("command path", "count", "path", PathOutsideRootError, "/etc/passwd", "../secret", "out_file",
    "--files0-from=/../../etc/x"),
    Case("command endless", "endless", {"text": "y"}, OutputTooLargeError),
    Case("command follows", "follow", {"path": "harmless"}, ToolTimeoutError),
    # odd arguments
    *(
        Case(f"arguments {name}", "add", arguments, InvalidArgumentsError)
        for name, arguments in {
            "list": [1, 2], "none": None, "text": '{"a": 1}', "bytes": b"{}", "number": 3, "missing": {},
            "wrong name": {"A": 1},
            "text for a number": {"a": "1"}, "boolean": {"a": True}, "null": {"a": None}, "fraction": {"a": 1.5},
            "nan": {"a": math.nan},
            "infinity": {"a": -math.inf}, "list for a number": {"a": [1]}, "object for a number": {"a": {"$ref": "#"}},
            "additional": {"a": 1, "c": 2}, "self": {"a": 1, "self": 2}, "dunder": {"a": 1, "__class__": "x"},
            "bytes within": {"a": b"1"},
            "set": {"a": {1}}, "complex": {"a": 1j}, "object": {"a": object()}, "class": {"a": int},
            "number as key": {1: 1},
            "none as key": {None: 1}, "bytes as key": {b"a": 1}, "tuple as key": {(1, 2): 1},
            "boolean as key": {"a": {True: 1}},
            "huge integer": {"a": 10**5000}, "long text": {"a": "x" * 10**7}, "long key": {"x" * 10**7: 1},
            "wide": {"a": [0] * 10**6},
            "deep": {"a": NESTED}, "circle": CIRCLE, "laughs": {"a": LAUGHS},
            "many keys": {str(i): i for i in range(50_000)},
            "raising": Raises(KeyError("a")), "raising an exit": Raises(SystemExit()),
            "raising at depth": {"a": Raises(OSError())},
            "cancelling": Raises(asyncio.CancelledError()), "endless": Endless(), "endless at depth": {"a": Endless()},
            "surrogates": {"\ud800": 1}, "number as text": {"a": 1, "b": "1e400"},
        }.items()
    ),
    # tools that there are not, or not for everyone
    *(
        Case(f"unknown {ascii(name)[:30]}", name, {}, UnknownToolError)
        for name in (
            "no_such_tool", "", "ADD", "add ", " add", "add\n", "add\0", "../add", "__init__", "os.system", "eval",
            "аdd", "x" * 10**6,
            None, 5, b"add", ["add"], {"a": 1}, ("add",), "\x1b[2J", "tests.support.tool_functions.add", "misbehave.how",
        )
    ),
    *(
        Case(f"unknown {name}", tool, {}, UnknownToolError)
        for name, tool in {
            "huge integer": 10**5000, "laughs": LAUGHS, "circle": CIRCLE, "raising": Raises(KeyError("a")), "object": object(),
            "raising name": Name("nope"),
        }.items()
    ),
    Case("a known name of a class of its own", Name("add"), {"a": 1}, (2).__eq__),
    Case("not allowed", "nap", {"seconds": 60.0}, ToolNotAllowedError),
    Case("not allowed, with nonsense", "nap", {"seconds": b""}, ToolNotAllowedError),
    # what comes back
    *_misbehaving(OutputTooLargeError, "long_text", "many_items", "wide_text", "liar"),
    *_misbehaving(
        InvalidOutputError, "deep", "deep_beyond_limit", "circle", "nan", "infinity", "bytes", "set", "tuple_keys",
        "object",
        "function", "generator", "huge_integer",
    ),
    # ends
    *_misbehaving(
        WorkerDiedError, "os_exit", "os_exit_7", "segfault", "abort", "kill_self", "terminate_self", "kill_group",
        "replace_program",
    ),
    *_misbehaving(
        ToolRaisedError, "sys_exit", "recursion", "raise_without_message", "raise_long", "raise_base", "raise_interrupt",
        "raise_stop",
        "raise_generator_exit", "interrupt_self",
    ),
    # hangs
    Case("pattern", "pattern", {"value": "a" * 60 + "!"}, ToolTimeoutError),
    *_misbehaving(
        ToolTimeoutError, "sleep", "busy", "busy_in_c", "ignore_signals", "block_signals", "stop", "deadlock",
        "join_forever",
        "child_holds_socket", "child_of_sleeper", "escaped_child", "escaped_grandchild", "reader_of_requests", "drip",
    ),
    # bombs
    *_misbehaving(
        ToolRaisedError, "memory_bomb", "slow_memory_bomb", "list_bomb", "private_map_bomb", "file_bomb",
        "sparse_file_bomb",
        "descriptor_bomb", "socket_bomb",
    ),
    *_misbehaving(ToolRaisedError, "fork_bomb", "thread_bomb", "many_background_children", "core_dump", "raise_limits",
    own_user=True),
    # the executor's socket
    *_misbehaving(
        WorkerDiedError, "garbage", "zeros", "fake_frame", "huge_frame", "flood", "pickle_frame", "close_socket",
        "shut_socket",
        "pass_descriptors",
    ),
    # what does not belong to a worker
    *_misbehaving(
        ToolRaisedError, "kill_parent", "stop_parent", "kill_init", "become_root", "become_root_group", "read_shadow",
        "read_parent_memory", "read_parent_environment", "write_etc", "write_root", "remove_own_folder", "mount",
        "change_root",
        "trace_parent", "raise_priority", own_user=True,
    ),
    Case("kill the program", "kill", {"pid": os.getpid()}, ToolRaisedError, own_user=True),
    # what is left for the next call
    *_misbehaving((10).__eq__, "zombies"),
    *_misbehaving(gone, "daemon", "background_child"),
    *_misbehaving("left".__eq__, "thread_left", "late_writer"),
    *_misbehaving("changed".__eq__, "change_everything", "signal_handlers"),
    Case("print", "misbehave", {"how": "print"}, "printed".__eq__),
    Case("no output", "misbehave", {"how": "close_output"}, "closed".__eq__),
    Case("no input", "misbehave", {"how": "read_input"}, "".__eq__),
]  # fmt: skip


@pytest.fixture(scope="module")
def others() -> frozenset[int]:
    """Processes below this one that earlier tests have left: the resource tracker of multiprocessing, for one."""
    return frozenset(number for number, _ in descendants(os.getpid()))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all calls."""
    return tmp_path_factory.mktemp("log") / "calls.jsonl"


@pytest.fixture(scope="module")
def executor(others: frozenset[int], log: Path) -> Iterator[ToolExecutor]:
    """With a folder full of temptations, and a secret beside it."""
    allow = [name for name in CATALOGUE if name != "nap"]
    with ToolExecutor(
        CATALOGUE, allow=allow, num_workers=2, timeout=0.5, max_output_bytes=MAX_OUTPUT, limits=LIMITS, log_path=log
    ) as made:
        root = made.root
        (root / "harmless").write_text("harmless")
        (root / "inside").mkdir()
        links = {
            "in_file": "harmless", "in_chain": "in_file", "inside/up": "..", "out_file": "/etc/passwd", "out_folder": "..",
            "out_chain": "out_folder/../etc/passwd", "out_dangling": "/no/such/file", "loop": "loop", "proc": "/proc/self",
            "proc_root": "/proc/self/root", "proc_cwd": "/proc/self/cwd", "proc_fd": "/proc/self/fd", "absolute": "/etc",
        }  # fmt: skip
        for name, target in links.items():
            (root / name).symlink_to(target)
        yield made


def descendants(pid: int) -> list[tuple[int, str]]:
    """Number and state of each process below one, whoever's it is."""
    below: dict[int, list[tuple[int, str]]] = {}
    for number, parent, _, state in tool_functions.processes():
        below.setdefault(parent, []).append((number, state))
    found, ahead = [], [pid]
    while ahead:
        for number, state in below.get(ahead.pop(), []):
            found.append((number, state))
            ahead.append(number)
    return found


def count_descriptors() -> int:
    """Of this process; 0 where that cannot be seen."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def run(executor: ToolExecutor, case: Case) -> ToolResult:
    return executor.run([ToolCall(tool=case.tool, arguments=case.arguments)])[0]


def count_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n")


def test_there_are_at_least_two_hundred_of_them() -> None:
    """Those that are harmless by construction, and end well, are not counted."""
    assert sum(isinstance(case.ends, type) and issubclass(case.ends, ToolError) for case in CASES) >= 200
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_ends_as_it_must_and_the_next_call_works(
    executor: ToolExecutor, others: frozenset[int], log: Path, case: Case
) -> None:
    if case.own_user and not OWN_USERS:
        pytest.skip("needs workers with user ids of their own: root on Linux")
    lines = count_lines(log)
    start = time.perf_counter()
    result = run(executor, case)
    seconds = time.perf_counter() - start
    if isinstance(case.ends, type):
        assert type(result.error) is case.ends, result
        assert result.output is None
        assert len(str(result.error)) < 4000
    else:
        assert result.ok, result
        assert case.ends(result.output), result
    assert seconds < 5
    following = executor.run([ToolCall(tool="add", arguments={"a": 20, "b": i}) for i in range(4)])
    assert [after.output for after in following] == [20, 21, 22, 23]
    entries = [json.loads(line) for line in log.read_bytes().splitlines()[lines:]]
    assert len(entries) == 5
    assert entries[0]["error"] == (None if result.ok else type(result.error).__name__)
    assert len(json.dumps(entries[0])) < 20_000
    below = {number: state for number, state in descendants(os.getpid()) if number not in others}
    assert len(below) <= 3, below  # the fork server and two workers
    assert "Z" not in below.values()


def test_they_do_no_harm_to_calls_beside_them(executor: ToolExecutor, log: Path) -> None:
    lines = count_lines(log)
    hostile = [case for case in CASES if (OWN_USERS or not case.own_user) and case.ends is not ToolTimeoutError]
    calls = []
    for i, case in enumerate(hostile):
        calls += [ToolCall(tool=case.tool, arguments=case.arguments), ToolCall(tool="add", arguments={"a": i})]
    results = executor.run(calls)
    assert count_lines(log) == lines + len(calls)
    assert [result.output for result in results[1::2]] == list(range(1, len(hostile) + 1))
    wrong = [
        (case.name, result)
        for case, result in zip(hostile, results[::2], strict=True)
        if not (type(result.error) is case.ends if isinstance(case.ends, type) else case.ends(result.output))
    ]
    assert wrong == []


def test_they_leave_nothing_behind(executor: ToolExecutor, others: frozenset[int]) -> None:
    """The last test of this file: no process, no file, no descriptor, and the program as it was."""
    cwd, environment, umask = Path.cwd(), dict(os.environ), os.umask(0)
    os.umask(umask)
    descriptors = count_descriptors()
    for how in ("garbage", "segfault", "daemon", "change_everything", "sleep"):
        executor.run([ToolCall(tool="misbehave", arguments={"how": how})])
    seen = executor.run([ToolCall(tool="who")])[0].output
    workers = {number for number, _ in descendants(seen["parent"])}
    assert seen["pid"] in workers
    assert len(workers) <= 2
    assert all(state != "Z" for number, state in descendants(os.getpid()) if number not in others)
    for outside in ("/owned", "/etc/owned", "/tmp/owned", str(executor.root.parent / "owned"), str(cwd / "owned")):
        assert not Path(outside).exists()
    assert not (executor.root / "owned").exists()
    assert (executor.root / "harmless").read_text() == "harmless"
    assert (Path.cwd(), dict(os.environ)) == (cwd, environment)
    assert os.umask(umask) == umask
    assert count_descriptors() <= descriptors + 2  # a second worker at most
    if OWN_USERS:
        mine = {number for number, _, user, _ in tool_functions.processes() if user == seen["uid"][0]}
        assert mine == {seen["pid"]}


class Script(torch.nn.Module):
    """A policy that makes a hostile call or a good one: log pi(hostile | case) = log sigmoid(w_case)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(len(CASES)))

    def generate_actions(self, states: list[ToolTask], num_actions_per_state: int, **_: Any) -> list[list[ToolCall]]:
        return [([HOSTILE[int(task.text)], GOOD] * num_actions_per_state)[:num_actions_per_state] for task in states]

    def get_log_probabilities(self, states: list[ToolTask], actions: list[ToolCall]) -> torch.Tensor:
        sign = torch.tensor([-1.0 if action is GOOD else 1.0 for action in actions])
        return torch.nn.functional.logsigmoid(sign * self.weight[[int(task.text) for task in states]])

    def get_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())


GOOD = ToolCall(tool="add", arguments={"a": 1, "b": 2})
HOSTILE = [ToolCall(tool=case.tool, arguments=case.arguments) for case in CASES]


@pytest.mark.parametrize("reuse_results", [False, True])
def test_a_training_run_meets_all_of_them_and_learns_to_leave_them_alone(
    executor: ToolExecutor, log: Path, reuse_results: bool
) -> None:
    """One group of two calls for each: the good one, which is always worth more, and the hostile one."""
    met = [i for i, case in enumerate(CASES) if OWN_USERS or not case.own_user]
    tasks = [
        ToolTask(
            text=str(i),
            tool="add",
            arguments=GOOD.arguments,
            category="",
            difficulty="easy",
            slots={},
            shares_words=False,
        )
        for i in met
    ]
    rewards = ToolRewards(
        executor,
        standard_rewards(CATALOGUE) | {"cost": call_cost(CATALOGUE), "latency": latency_cost(0.01)},
        reuse_results=reuse_results,
    )
    policy = Script()
    config = GRPOConfig(group_size=2, num_states_per_iteration=64, learning_rate=0.1)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
    lines = count_lines(log)
    for first in range(0, len(tasks), 64):
        metrics = trainer.step(tasks[first : first + 64])
        assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert bool((policy.weight[met] < -0.05).all()), "each was made less likely"
    if not reuse_results:
        assert count_lines(log) == lines + 2 * len(met)
    assert run(executor, Case("good", "add", {"a": 1, "b": 2}, "3".__eq__)).output == 3
