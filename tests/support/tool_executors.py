"""What the tests of `ToolExecutor` share: a catalogue, calls, and looks at processes."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapters.tools.catalogue.calls import ToolCall, ToolResult
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.execution.confinement.landlock import Landlock
from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.options import ExecutorOptions
from adapters.tools.execution.workers import WorkerLimits
from tests.support import hostile_tools, tool_functions

OWN_USERS = sys.platform == "linux" and os.geteuid() == 0
"""Whether workers have user ids of their own."""
LINUX = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    # Who is not root is told, and so is root if other users cannot read the interpreter.
    pytest.mark.filterwarnings("ignore:ToolExecutor's workers"),
]
"""Marks of the tests of executors."""

CONFINEMENTS = [
    "bubblewrap",
    pytest.param(
        "landlock",
        marks=pytest.mark.skipif(
            Landlock().unavailable() is not None, reason="this Linux has no Landlock of version 3"
        ),
    ),
    "user",
]
"""Kinds of confinement. A machine without bubblewrap fails the tests: apt has it."""
BUBBLEWRAP_DAILY = [
    "bubblewrap",
    *(
        pytest.param(each, marks=pytest.mark.slow)
        if isinstance(each, str)
        else pytest.param(*each.values, marks=[*each.marks, pytest.mark.slow])
        for each in CONFINEMENTS[1:]
    ),
]
"""The same kinds. All but the first are slow tests."""
USERS = [
    pytest.param(WorkerLimits(), id="own users"),
    pytest.param(WorkerLimits(first_uid=None), id="one user", marks=pytest.mark.slow),
]
"""Limits of workers with user ids of their own, and of workers with the user id of the program, as a slow test."""

LONG = 60.0
"""Seconds that a condition may take to hold on a busy machine, and that a call takes which must not end by itself."""

PATH = {"type": "string", "format": "path"}

CATALOGUE = ToolCatalogue(
    [
        Tool.from_function(tool_functions.add),
        Tool.from_function(tool_functions.add, name="add_by_schema", parameters={
            "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 100}}
        }),
        Tool.from_function(tool_functions.nap),
        Tool.from_function(tool_functions.nap, name="short_nap", timeout=0.1),
        Tool.from_function(tool_functions.meet),
        Tool.from_function(tool_functions.who),
        Tool.from_function(tool_functions.read),
        Tool.from_function(tool_functions.where, parameters={"type": "object", "properties": {"path": PATH}}),
        Tool.from_function(tool_functions.remember),
        Tool.from_function(tool_functions.spin),
        Tool.from_function(tool_functions.hold),
        Tool.from_function(hostile_tools.misbehave),
        Tool.from_function(hostile_tools.misbehave, name="hang", timeout=0.4),
        Tool.from_function(tool_functions.imports),
        Tool.from_function(tool_functions.async_nap, name="local_async_nap"),
        Tool.from_function(tool_functions.async_nap, remote=True),
        Tool.from_function(tool_functions.async_raise, remote=True),
        Tool.from_function(tool_functions.async_exit, remote=True),
        Tool(name="greet", description="Greet.", function=tool_functions.Greeter("hello"), parameters={
            "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]
        }),
        Tool(name="echo", description="Echo.", function=tool_functions.echo, parameters={
            "type": "object", "properties": {"value": {}}, "required": ["value"]
        }),
    ]
)  # fmt: skip


def on_linux(test: Callable[..., None]) -> Callable[..., None]:
    """Give one test the marks `LINUX`, in a file whose other tests need no workers."""
    for mark in LINUX:
        test = mark(test)
    return test


def executor_of(catalogue: ToolCatalogue, *, num_workers: int = 1, allow: Any = None, **options: Any) -> ToolExecutor:
    """An executor whose options stand among its arguments. A call may take `LONG` unless they say otherwise."""
    given = ExecutorOptions(**{"timeout": LONG} | options)
    return ToolExecutor(catalogue, num_workers=num_workers, allow=allow, options=given)


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool=tool, arguments=arguments)


def error_of(result: ToolResult) -> type | None:
    return None if result.error is None else type(result.error)


def output_of(executor: ToolExecutor, tool: str, **arguments: Any) -> Any:
    """The output of one call, which must have one."""
    [result] = executor.run([call(tool, **arguments)])
    assert result.ok, result
    return result.output


def alive(pid: int) -> bool:
    """Whether a process still runs. A process that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def soon(condition: Callable[[], Any]) -> bool:
    """Wait until a condition holds. False if it does not hold within `LONG` seconds."""
    until = time.monotonic() + LONG
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return bool(condition())


def as_nobody(command: list[str]) -> list[str]:
    """The command of a program that is not root. It can read this Python and this repository even if /root is closed."""
    if not OWN_USERS:
        return command
    folders = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2]))
    below = {f"/root/{Path(folder).parts[2]}" for folder in folders if folder.startswith("/root/")}
    mounts = [word for folder in sorted(below) for word in ("--ro-bind", folder, folder)]
    sandbox = ["bwrap", "--dev-bind", "/", "/", "--perms", "0755", "--tmpfs", "/root", *mounts]
    return [*sandbox, "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *command]


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that workers can read; pytest's folders are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def processes_of(executor: ToolExecutor) -> list[int]:
    """Numbers of the executor's processes on this machine: the fork server, or what it runs in, and all below."""
    server = executor._pool._server
    return [server._process.pid, *(number for number, _ in tool_functions.descendants(server._process.pid))]


def number_here(executor: ToolExecutor, pid: int) -> int | None:
    """This machine's number of the executor's process with the number `pid` in its namespace. None if it has ended."""
    for number in processes_of(executor):
        with contextlib.suppress(OSError):
            numbers = Path(f"/proc/{number}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()
            if int(numbers[-1]) == pid and (len(numbers) > 1 or executor.confinement != "bubblewrap"):
                return number
    return None


def worker_processes(executor: ToolExecutor) -> list[tuple[int, int]]:
    """User and number of each worker process of the executor."""
    server = number_here(executor, output_of(executor, "who")["parent"])
    assert server is not None
    return [(user, number) for number, parent, user, _ in tool_functions.processes() if parent == server]


def has_begun(executor: ToolExecutor) -> bool:
    """Whether a worker has begun to `nap`."""
    return any(executor.root.glob("begun-*"))
