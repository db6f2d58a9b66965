"""The executor: results in order, refusals before anything runs, and clean ends."""

import asyncio
import copy
import gc
import importlib
import json
import math
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import Command, ExecutorOptions, Tool, ToolCatalogue, ToolExecutor, WorkerLimits
from adapters.tools.errors import (
    InvalidArgumentsError,
    PathOutsideRootError,
    ToolNotAllowedError,
    UnknownToolError,
    WorkerDiedError,
)
from adapters.tools.execution.batches import Batch
from grpo.errors import ConfigError
from tests.support import annotated
from tests.support.threads import run_together
from tests.support.tool_executors import (
    CATALOGUE,
    LINUX,
    LONG,
    PATH,
    call,
    error_of,
    executor_of,
    exists,
    has_begun,
    number_here,
    output_of,
    processes_of,
    soon,
    worker_processes,
)

pytestmark = LINUX


@pytest.fixture(scope="module")
def executor() -> Iterator[ToolExecutor]:
    with executor_of(CATALOGUE, num_workers=2) as made:
        yield made


# --- results
def test_results_come_in_the_order_of_the_calls(executor: ToolExecutor) -> None:
    calls = [call("add", a=i, b=10) if i % 3 else call("async_nap", seconds=0.02) for i in range(30)]
    results = executor.run(calls)
    assert [result.output for result in results] == [i + 10 if i % 3 else "rested" for i in range(30)]
    assert all(result.ok for result in results)
    assert executor.run([]) == []


def test_functions_coroutines_and_objects_get_their_defaults_and_integers_for_integral_floats(
    executor: ToolExecutor,
) -> None:
    assert output_of(executor, "local_async_nap", seconds=0.01) == "rested"
    assert output_of(executor, "greet", name="you") == "hello you"
    assert output_of(executor, "add", a=1) == 2
    assert output_of(executor, "add_by_schema", a=1) == 2, "b = 1, not 100 as the schema says"
    assert repr(output_of(executor, "add", a=2.0, b=3)) == "5"


def test_values_keep_their_type_on_the_way_to_a_worker_and_back(executor: ToolExecutor) -> None:
    values = [None, True, 0, -1.5, "", "é\u2028\ud800\n\x00", [1, [2, {}]], {"a": {"b": None}}, 2**200, {"": 1}]
    outputs = [output_of(executor, "echo", value=value) for value in values]
    assert outputs == values
    assert [type(output) for output in outputs] == [type(value) for value in values]


def test_each_thread_gets_its_own_results(executor: ToolExecutor) -> None:
    found: dict[int, list[Any]] = {}

    def work(i: int) -> None:
        found[i] = [result.output for result in executor.run([call("add", a=1000 * i, b=j) for j in range(20)])]

    run_together(*(partial(work, i) for i in range(8)))
    assert found == {i: [1000 * i + j for j in range(20)] for i in range(8)}


# --- refusals
def test_tools_that_are_not_allowed_need_not_be_importable_and_reach_no_worker() -> None:
    catalogue = CATALOGUE.with_tools(Tool(name="lambda", description="None.", function=lambda: 1))
    message = r"Tool lambda: workers must be able to import .* top level of a module, or make"
    with pytest.raises(ConfigError, match=message):
        ToolExecutor(catalogue)
    with pytest.raises(ConfigError, match=r"allow must name tools of the catalogue; the catalogue has no nope"):
        ToolExecutor(catalogue, allow=["add", "nope"])
    with ToolExecutor(catalogue, allow=["add"], num_workers=1) as some:
        results = some.run([call("add", a=1), call("nap", seconds=60), call("no_such_tool"), call("ADD", a=1)])
        assert not has_begun(some)
    assert [error_of(result) for result in results] == [None, ToolNotAllowedError, UnknownToolError, UnknownToolError]
    assert str(results[1].error) == "nap must be one of the allowed tools."
    assert str(results[2].error) == (
        '"no_such_tool" must be a tool of the executor\'s catalogue. Tools that a policy adds later need another executor.'
    )


def test_invalid_settings_are_refused(subtests: pytest.Subtests) -> None:
    threads = threading.active_count()

    def started(**options: Any) -> ToolExecutor:
        return ToolExecutor(CATALOGUE, options=ExecutorOptions(**options))

    options = "ExecutorOptions."
    for owner, make, name, values in (
        (options, ExecutorOptions, "max_output_bytes", (0,)), (options, ExecutorOptions, "max_concurrency", (0,)),
        (options, ExecutorOptions, "timeout", (0.0, math.inf, math.nan)), (options, ExecutorOptions, "limits", (None,)),
        (options, ExecutorOptions, "confinement", ("none",)), (options, ExecutorOptions, "readable", (["/data"],)),
        ("ToolExecutor: ", started, "root", ("/no/such/folder", __file__)),
        ("ToolExecutor: ", started, "log_path", ("/no/such/folder/log", "/")),
        (options, ExecutorOptions, "root", (7,)), (options, ExecutorOptions, "log_path", (7,)),
        ("ToolExecutor: ", partial(ToolExecutor, CATALOGUE), "num_workers", (0,)),
        ("ToolExecutor: ", partial(ToolExecutor, CATALOGUE), "options", ({},)),
        ("ToolExecutor: ", partial(ToolExecutor, CATALOGUE), "allow", (7, "add")),
        ("ToolExecutor: ", ToolExecutor, "catalogue", (list(CATALOGUE.values()),)),
        ("WorkerLimits.", WorkerLimits, "processes", (0, -1, True, 1.5)),
    ):  # fmt: skip
        for value in values:
            with subtests.test(name, value=value), pytest.raises(ConfigError, match=f"{owner}{name} must be"):
                make(**{name: value})
    assert threading.active_count() == threads
    assert WorkerLimits(processes=1, memory_bytes=None).memory_bytes is None


@pytest.mark.parametrize(("name", "line", "seconds", "message"), [
    ("slow_there", "time.sleep(60)", 0.2, r"not imported within 0\.2 s"),
    ("only_here", "raise RuntimeError('no')", LONG, "tool f cannot be imported: RuntimeError: no"),
])  # fmt: skip
def test_a_module_that_workers_cannot_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str, seconds: float, message: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("adapters.tools.execution.workers._START_SECONDS", seconds)
    in_worker = "import os, time\nif 'MODEL_AGNOSTIC_GRPO_TOOL_WORKER' in os.environ:\n {}\ndef f():\n 'Nothing.'\n"
    (tmp_path / f"{name}.py").write_text(in_worker.format(line))
    with pytest.raises(ConfigError, match=message):
        ToolExecutor(ToolCatalogue([Tool.from_function(importlib.import_module(name).f)]))


# --- calls that are given up
def log_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def given_up(tmp_path: Path, give_up: Callable[[ToolExecutor, list[Any], Callable[[], bool]], None]) -> ToolExecutor:
    """Give up calls of which three have begun. Each call has its line in the log, and the worker has ended."""
    lingering = []

    async def linger(seconds: float) -> None:
        """Wait."""
        lingering.append(seconds)
        await asyncio.sleep(seconds)

    catalogue = CATALOGUE.with_tools(Tool.from_function(linger, remote=True))
    log = tmp_path / "calls.jsonl"
    made = executor_of(catalogue, max_concurrency=2, timeout=10 * LONG, log_path=log)
    pid = number_here(made, output_of(made, "who")["pid"])
    assert pid is not None
    calls = [call("nap", seconds=500), call("add", a=1), call("linger", seconds=500), call("no_such")] * 3
    give_up(made, calls, lambda: has_begun(made) and len(lingering) == 2)
    assert soon(lambda: len(log.read_text().splitlines()) == 1 + len(calls))
    assert soon(lambda: not exists(pid))
    entries = log_of(log)[1:]
    assert sorted(entry["tool"] for entry in entries) == sorted(given.tool for given in calls)
    begun = [entry for entry in entries if entry["seconds"] > 0]
    assert sorted(entry["tool"] for entry in begun) == ["linger", "linger", "nap"]
    assert {(entry["ok"], entry["error"]) for entry in entries} == {(False, "CancelledError")}
    assert all("given up" in entry["message"] for entry in entries)
    assert begun[0]["arguments"] == {"seconds": 500}
    return made


async def cancelled(made: ToolExecutor, calls: list[Any], begun: Callable[[], bool]) -> None:
    """Cancel the await of calls once they have begun."""
    waiting = asyncio.ensure_future(made.run_async(calls))
    assert await asyncio.to_thread(soon, begun)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_an_interrupt_ends_the_calls_and_the_executor_stays_usable(tmp_path: Path) -> None:
    def interrupt(made: ToolExecutor, calls: list[Any], begun: Callable[[], bool]) -> None:
        thread = threading.Thread(target=lambda: soon(begun) and os.kill(os.getpid(), signal.SIGINT))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            made.run(calls)
        thread.join()

    with given_up(tmp_path, interrupt) as made:
        assert output_of(made, "add", a=1) == 2


def test_calls_in_many_workers_can_be_given_up_together() -> None:
    with executor_of(CATALOGUE, num_workers=4, timeout=10 * LONG) as made:
        assert all(result.ok for result in made.run([call("meet", number=4)] * 4))
        calls = [call("nap", seconds=500)] * 4
        asyncio.run(cancelled(made, calls, lambda: len([*made.root.glob("begun-*")]) == 4))
        assert output_of(made, "add", a=1) == 2


@pytest.mark.parametrize(
    ("owner", "is_batch"),
    [pytest.param(threading.Thread, False, id="within the start"), pytest.param(Batch, True, id="right after it")],
)
def test_an_interrupt_at_the_start_of_calls_leaves_no_call_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, is_batch: bool
) -> None:
    """The thread runs, and each call is logged, before `run` raises."""
    log, begin = tmp_path / "calls.jsonl", owner.start

    def begin_and_be_interrupted(started: Any, *arguments: Any) -> None:
        begin(started, *arguments)
        if is_batch or started.name == "ToolExecutor":
            raise KeyboardInterrupt

    with executor_of(CATALOGUE, timeout=10 * LONG, log_path=log) as made:
        with monkeypatch.context() as patched:
            patched.setattr(owner, "start", begin_and_be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.run([call("nap", seconds=500)] * 2)
        assert [line["error"] for line in log_of(log)] == ["CancelledError"] * 2
        assert not made._batches
        assert output_of(made, "add", a=1) == 2, "the only worker is free"


def test_cancelling_an_await_ends_its_calls_and_the_executor_stays_usable(tmp_path: Path) -> None:
    with given_up(tmp_path, lambda *calls: asyncio.run(cancelled(*calls))) as made:
        assert output_of(made, "add", a=1) == 2


def test_closing_waits_for_cancelled_calls_to_be_logged(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    made = executor_of(CATALOGUE, timeout=10 * LONG, log_path=log)

    async def work() -> None:
        await cancelled(made, [call("nap", seconds=500), call("async_nap", seconds=500)], lambda: has_begun(made))
        made.close()

    asyncio.run(work())
    assert [line["error"] for line in log_of(log)] == ["CancelledError"] * 2


def test_close_ends_the_calls_of_other_threads_and_awaited_calls(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def close(made: ToolExecutor, calls: list[Any], begun: Callable[[], bool]) -> None:
        def wait(run: Callable[[], Any]) -> None:
            try:
                run()
            except ConfigError as error:
                raised.append(error)

        runs = (lambda: asyncio.run(made.run_async(calls[:4])), lambda: made.run(calls[4:]))
        threads = [threading.Thread(target=wait, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        assert soon(begun)
        made.close()
        for thread in threads:
            thread.join(LONG)

    made = given_up(tmp_path, close)
    assert [str(error) for error in raised] == ["ToolExecutor was closed while calls ran; their results are lost."] * 2
    with pytest.raises(ConfigError, match="ToolExecutor is closed"):
        made.run([])


# --- ends
def test_close_leaves_no_process_and_no_folder() -> None:
    before = set(threading.enumerate())
    made = ToolExecutor(CATALOGUE, num_workers=2)
    assert all(result.ok for result in made.run([call("meet", number=2)] * 2))
    running = processes_of(made)
    assert len(worker_processes(made)) == 2
    assert made.root.stat().st_mode & 0o007 == 0
    locked = made.root / "a" / "b"
    locked.mkdir(parents=True)
    locked.chmod(0)
    locked.parent.chmod(0)
    made.close()
    made.close()
    assert not any(exists(pid) for pid in running)
    assert set(threading.enumerate()) == before
    assert not made.root.exists(), "also folders without permissions are removed"


def test_a_garbage_collected_executor_ends_its_processes_whatever_keeps_its_results() -> None:
    made = ToolExecutor(CATALOGUE, num_workers=1)
    failing = [call("unknown"), call("add", a="x"), call("async_raise", message="m"), call("misbehave", how="os_exit")]
    results = made.run([*failing, call("add", a=1)])
    assert [result.ok for result in results] == [False] * 4 + [True]
    running, root = processes_of(made), made.root
    assert len(running) >= 2
    del made
    gc.collect()
    assert soon(lambda: not any(exists(pid) for pid in running) and not root.exists())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_executor_cannot_be_copied_and_refuses_calls_in_a_forked_process(executor: ToolExecutor) -> None:
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="owns processes"):
            attempt(executor)
    pid = os.fork()
    if pid == 0:
        try:
            executor.run([])
        except ConfigError:
            executor.close()  # ends nothing that belongs to its parent
            os._exit(17)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    assert executor.root.is_dir()
    assert output_of(executor, "add", a=1) == 2


@pytest.mark.slow
def test_folders_that_are_too_deep_for_python_are_removed() -> None:
    """A thousand folders in one another: Python's own function to remove them would raise."""
    schema = {"type": "object", "properties": {"path": PATH}}
    command = Command(("mkdir", "-p", "--", "{path}"))
    made = ToolCatalogue([Tool(name="mkdir", description="Make folders.", function=command, parameters=schema)])
    deep = call("mkdir", path="/".join("a" * 1200))
    with executor_of(made, fresh_folder=True) as executor:
        assert [result.ok for result in executor.run([deep, call("mkdir", path="b")])] == [True, True]
        assert list(executor.root.iterdir()) == []
    with executor_of(made) as executor:
        assert executor.run([deep])[0].ok
    assert not executor.root.exists()


def test_a_program_that_ignores_its_children_keeps_its_workers() -> None:
    """The fork server must read how workers ended, also where the program ignores SIGCHLD."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(confinement="user")) as executor:
            results = executor.run([call("misbehave", how="os_exit"), call("add", a=1), call("add", a=2)])
            assert [type(result.error) for result in results] == [WorkerDiedError, type(None), type(None)]
        with pytest.raises(ConfigError, match="bwrap never ends if the program ignores SIGCHLD"):
            ToolExecutor(CATALOGUE, options=ExecutorOptions(confinement="bubblewrap"))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_what_is_no_list_of_calls_is_refused(executor: ToolExecutor, subtests: pytest.Subtests) -> None:
    """`ToolSelectionPolicy.predict` returns None for no call."""
    message = r"run: calls \(without None, which means no call\) must be a list of ToolCall objects; got "
    for wrong in (call("add", a=1), [call("add", a=1), None], ["add"]):
        with subtests.test(str(wrong)), pytest.raises(ConfigError, match=message):
            executor.run(wrong)


# --- what functions receive: what their annotations say
RED = "<Colour.RED: 'red'>"
RIGHT: dict[str, Any] = {
    "colour": "red", "day": "2024-02-29", "room": {"colour": "blue", "plan": "plan.txt"}, "doors": ["red"], "coats": 3.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def typed() -> Iterator[ToolExecutor]:
    remote = Tool.from_function(annotated.paint_remotely, remote=True)
    with executor_of(ToolCatalogue([Tool.from_function(annotated.paint), remote])) as made:
        (made.root / "plan.txt").write_text("four walls")
        yield made


def test_functions_receive_members_dates_and_paths_or_are_not_called(typed: ToolExecutor) -> None:
    day, room = "datetime.date(2024, 2, 29)", "<Colour.BLUE: 'blue'>, 'four walls'"
    assert output_of(typed, "paint", **RIGHT) == f"({RED}, {day}, {room}, [{RED}], 3)"
    assert output_of(typed, "paint", **RIGHT | {"doors": 4, "coats": 1}) == f"({RED}, {day}, {room}, 4, 1)"
    assert output_of(typed, "paint_remotely", colour="red", day="2024-02-29") == f"({RED}, {day})"
    outside = {"colour": "blue", "plan": "../x"}
    wrong = [call("paint", **RIGHT | {"day": "2023-02-29"}), call("paint_remotely", colour="red", day="tomorrow")]
    results = typed.run([*wrong, call("paint", **RIGHT | {"room": outside})])
    assert [error_of(result) for result in results] == [InvalidArgumentsError] * 2 + [PathOutsideRootError]
    for result, name in zip(results, ("paint", "paint_remotely"), strict=False):
        assert f"{name}: at $.day: Input should be a valid date" in str(result.error)
