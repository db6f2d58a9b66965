"""The executor: results in order, refusals before anything runs, and clean ends."""

import asyncio
import copy
import gc
import json
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.catalogue.calls import ToolResult
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import ToolNotAllowedError, UnknownToolError, WorkerDiedError
from adapters.tools.execution.batches import Batch
from adapters.tools.execution.commands import Command
from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.workers import WorkerLimits
from grpo.errors import ConfigError
from tests.support.threads import run_together
from tests.support.tool_executors import (
    CATALOGUE,
    LINUX,
    LONG,
    call,
    error_of,
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
    with ToolExecutor(CATALOGUE, num_workers=2, options=ExecutorOptions(timeout=LONG)) as made:
        yield made


# --- results


def test_results_come_in_the_order_of_the_calls(executor: ToolExecutor) -> None:
    calls = [call("add", a=i, b=10) if i % 3 else call("async_nap", seconds=0.02) for i in range(30)]
    results = executor.run(calls)
    assert [result.output for result in results] == [i + 10 if i % 3 else "rested" for i in range(30)]
    assert all(result.ok for result in results)
    assert executor.run([]) == []


def test_defaults_of_the_function_apply_and_not_those_of_the_schema(executor: ToolExecutor) -> None:
    assert output_of(executor, "add", a=1) == 2
    assert output_of(executor, "add_by_schema", a=1) == 2, "b = 1, not 100 as the schema says"


def test_values_keep_their_type_on_the_way_to_a_worker_and_back(
    executor: ToolExecutor, subtests: pytest.Subtests
) -> None:
    for value in (
        None, True, 0, -1.5, "", "é\u2028\ud800\n\x00", [1, [2, {}]], {"a": {"b": None}}, 2**200, {"": 1},
    ):  # fmt: skip
        with subtests.test(value=ascii(value)):
            output = output_of(executor, "echo", value=value)
            assert output == value
            assert type(output) is type(value)


def test_async_functions_and_objects_run_in_workers_too(executor: ToolExecutor) -> None:
    assert output_of(executor, "local_async_nap", seconds=0.01) == "rested"
    assert output_of(executor, "greet", name="you") == "hello you"


def test_run_async_gives_the_results_of_run(executor: ToolExecutor) -> None:
    async def both() -> list[list[ToolResult]]:
        return await asyncio.gather(
            *(executor.run_async([call("add", a=i), call("async_nap", seconds=0)]) for i in (1, 2))
        )

    first, second = asyncio.run(both())
    assert [result.output for result in first + second] == [2, "rested", 3, "rested"]


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
    for name, value in (
        ("max_output_bytes", 0), ("max_concurrency", 0), ("timeout", 0.0), ("timeout", math.inf),
        ("timeout", math.nan), ("confinement", "none"), ("readable", ["/data"]), ("limits", None),
    ):  # fmt: skip
        with subtests.test(name, value=value), pytest.raises(ConfigError, match=f"ExecutorOptions.{name} must be"):
            ExecutorOptions(**{name: value})
    for name, value in (
        ("root", "/no/such/folder"), ("root", __file__), ("log_path", "/no/such/folder/log"), ("log_path", "/"),
    ):  # fmt: skip
        with subtests.test(name, value=value), pytest.raises(ConfigError, match=f"ToolExecutor: {name} must be"):
            ToolExecutor(CATALOGUE, options=ExecutorOptions(**{name: value}))
    with pytest.raises(ConfigError, match="ToolExecutor: num_workers must be"):
        ToolExecutor(CATALOGUE, num_workers=0)
    assert threading.active_count() == threads


def test_invalid_limits_are_refused() -> None:
    for value in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match=r"WorkerLimits\.processes must be (>= 1|int or None)"):
            WorkerLimits(processes=value)  # type: ignore[arg-type]
    assert WorkerLimits(processes=1, memory_bytes=None).memory_bytes is None


def test_a_module_that_workers_cannot_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("adapters.tools.execution.workers._START_SECONDS", 0.2)
    in_worker = (
        "import os, time\nif 'MODEL_AGNOSTIC_GRPO_TOOL_WORKER' in os.environ:\n    {}\ndef f():\n    'Nothing.'\n"
    )
    (tmp_path / "slow_there.py").write_text(in_worker.format("time.sleep(60)"))
    import slow_there  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match=r"not imported within 0\.2 s"):
        ToolExecutor(ToolCatalogue([Tool.from_function(slow_there.f)]))
    monkeypatch.setattr("adapters.tools.execution.workers._START_SECONDS", LONG)
    (tmp_path / "only_here.py").write_text(in_worker.format("raise RuntimeError('not in a worker')"))
    import only_here  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match=r"tool f cannot be imported: RuntimeError: not in a worker"):
        ToolExecutor(ToolCatalogue([Tool.from_function(only_here.f)]))


# --- calls that are given up


def given_up(tmp_path: Path, give_up: Callable[[ToolExecutor, list[Any], Callable[[], bool]], None]) -> ToolExecutor:
    """Give up calls of which three have begun. Each call has its line in the log, and the worker has ended."""
    lingering = []

    async def linger(seconds: float) -> None:
        """Wait."""
        lingering.append(seconds)
        await asyncio.sleep(seconds)

    catalogue = CATALOGUE.with_tools(Tool.from_function(linger, remote=True))
    log = tmp_path / "calls.jsonl"
    made = ToolExecutor(
        catalogue, num_workers=1, options=ExecutorOptions(max_concurrency=2, timeout=10 * LONG, log_path=log)
    )
    pid = number_here(made, output_of(made, "who")["pid"])
    assert pid is not None
    calls = [call("nap", seconds=500), call("add", a=1), call("linger", seconds=500), call("no_such")] * 3
    give_up(made, calls, lambda: has_begun(made) and len(lingering) == 2)
    assert soon(lambda: len(log.read_text().splitlines()) == 1 + len(calls))
    assert soon(lambda: not exists(pid))
    entries = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert sorted(entry["tool"] for entry in entries) == sorted(given.tool for given in calls)
    begun = [entry for entry in entries if entry["seconds"] > 0]
    assert sorted(entry["tool"] for entry in begun) == ["linger", "linger", "nap"]
    assert {(entry["ok"], entry["error"]) for entry in entries} == {(False, "CancelledError")}
    assert all("given up" in entry["message"] for entry in entries)
    assert begun[0]["arguments"] == {"seconds": 500}
    return made


def test_an_interrupt_ends_the_calls_and_the_executor_stays_usable(tmp_path: Path) -> None:
    def interrupt(made: ToolExecutor, calls: list[Any], begun: Callable[[], bool]) -> None:
        thread = threading.Thread(target=lambda: soon(begun) and os.kill(os.getpid(), signal.SIGINT))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            made.run(calls)
        thread.join()

    with given_up(tmp_path, interrupt) as made:
        assert output_of(made, "add", a=1) == 2


def test_calls_in_many_workers_are_given_up_at_once() -> None:
    with ToolExecutor(CATALOGUE, num_workers=4, options=ExecutorOptions(timeout=10 * LONG)) as made:
        assert all(result.ok for result in made.run([call("meet", number=4)] * 4))

        async def cancel() -> float:
            waiting = asyncio.ensure_future(made.run_async([call("nap", seconds=500)] * 4))
            assert await asyncio.to_thread(soon, lambda: len([*made.root.glob("begun-*")]) == 4)
            waiting.cancel()
            return time.perf_counter()

        start = asyncio.run(cancel())
        assert output_of(made, "add", a=1) == 2
        made.close()
        assert time.perf_counter() - start < 1.0, "no worker gets time to end by itself"


def test_an_interrupt_within_the_start_leaves_no_call_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread runs, and its call is logged, before `run` raises."""
    log = tmp_path / "calls.jsonl"
    begin = threading.Thread.start

    def begin_and_be_interrupted(thread: threading.Thread) -> None:
        begin(thread)
        if thread.name == "ToolExecutor":
            raise KeyboardInterrupt

    with ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=10 * LONG, log_path=log)) as made:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", begin_and_be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.run([call("nap", seconds=500)] * 2)
        assert [json.loads(line)["error"] for line in log.read_text().splitlines()] == ["CancelledError"] * 2
        assert not made._batches


def test_an_interrupt_at_the_moment_of_the_start_ends_the_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=10 * LONG)) as made:
        start = Batch.start

        def start_and_be_interrupted(*arguments: Any) -> None:
            start(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Batch, "start", start_and_be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.run([call("nap", seconds=500)] * 2)
        assert output_of(made, "add", a=1) == 2, "the only worker is free"


def test_cancelling_an_await_ends_its_calls_and_the_executor_stays_usable(tmp_path: Path) -> None:
    def cancel(made: ToolExecutor, calls: list[Any], begun: Callable[[], bool]) -> None:
        async def work() -> None:
            waiting = asyncio.ensure_future(made.run_async(calls))
            assert await asyncio.to_thread(soon, begun)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(work())

    with given_up(tmp_path, cancel) as made:
        assert output_of(made, "add", a=1) == 2


def test_closing_waits_for_cancelled_calls_to_be_logged(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    made = ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=10 * LONG, log_path=log))

    async def work() -> None:
        waiting = asyncio.ensure_future(made.run_async([call("nap", seconds=500), call("async_nap", seconds=500)]))
        assert await asyncio.to_thread(soon, lambda: has_begun(made))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        made.close()

    asyncio.run(work())
    assert [json.loads(line)["error"] for line in log.read_text().splitlines()] == ["CancelledError"] * 2


def test_close_ends_the_calls_of_other_threads_and_awaited_calls(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def close(made: ToolExecutor, calls: list[Any], begun: Callable[[], bool]) -> None:
        async def work() -> None:
            try:
                await made.run_async(calls[:4])
            except ConfigError as error:
                raised.append(error)

        def wait() -> None:
            try:
                made.run(calls[4:])
            except ConfigError as error:
                raised.append(error)

        threads = [threading.Thread(target=asyncio.run, args=(work(),)), threading.Thread(target=wait)]
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
    made.close()
    made.close()
    assert not any(exists(pid) for pid in running)
    assert set(threading.enumerate()) == before
    assert not made.root.exists()


def test_a_garbage_collected_executor_ends_its_processes() -> None:
    made = ToolExecutor(CATALOGUE, num_workers=1)
    output_of(made, "add", a=1)
    running = processes_of(made)
    assert len(running) >= 2
    root = made.root
    del made
    gc.collect()
    assert soon(lambda: not any(exists(pid) for pid in running) and not root.exists())


def test_the_errors_of_its_calls_do_not_keep_an_executor() -> None:
    made = ToolExecutor(CATALOGUE, num_workers=1)
    results = made.run(
        [call("unknown"), call("add", a="x"), call("async_raise", message="m"), call("misbehave", how="os_exit")]
    )
    assert not any(result.ok for result in results)
    root = made.root
    del made
    gc.collect()
    assert soon(lambda: not root.exists())


def test_an_executor_cannot_be_pickled_or_copied(executor: ToolExecutor) -> None:
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="owns processes"):
            attempt(executor)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_executor_refuses_calls_in_a_forked_process(executor: ToolExecutor) -> None:
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
    made = Tool(
        name="mkdir",
        description="Make folders.",
        function=Command(("mkdir", "-p", "--", "{path}")),
        parameters={"type": "object", "properties": {"path": {"type": "string", "format": "path"}}},
    )
    deep = call("mkdir", path="/".join("a" * 1200))
    with ToolExecutor(ToolCatalogue([made]), num_workers=1, options=ExecutorOptions(fresh_folder=True)) as executor:
        assert [result.ok for result in executor.run([deep, call("mkdir", path="b")])] == [True, True]
        assert list(executor.root.iterdir()) == []
    with ToolExecutor(ToolCatalogue([made]), num_workers=1) as executor:
        root = executor.root
        assert executor.run([deep])[0].ok
    assert not root.exists()


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


def test_what_is_no_list_of_calls_is_refused(subtests: pytest.Subtests) -> None:
    """`ToolSelectionPolicy.predict` returns None for no call."""
    message = r"run: calls \(without None, which means no call\) must be a list of ToolCall objects; got "
    with ToolExecutor(CATALOGUE, num_workers=1) as executor:
        for wrong in (call("add", a=1), [call("add", a=1), None], ["add"]):
            with subtests.test(str(wrong)), pytest.raises(ConfigError, match=message):
                executor.run(wrong)


def test_folders_without_permissions_are_removed_on_close() -> None:
    with ToolExecutor(CATALOGUE, allow=["async_nap"]) as made:
        locked = made.root / "a" / "b"
        locked.mkdir(parents=True)
        locked.chmod(0)
        locked.parent.chmod(0)
        root = made.root
    assert not root.exists()
