"""Workers: their confinement, the state between calls, and the replacement of a lost worker."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import (
    PathOutsideRootError,
    ToolRaisedError,
    ToolTimeoutError,
    WorkerDiedError,
    WorkerLostError,
)
from adapters.tools.execution import workers
from adapters.tools.execution.commands import Command
from adapters.tools.execution.confinement import process
from adapters.tools.execution.executor import ToolExecutor
from adapters.tools.execution.worker import limit_cpu, send
from adapters.tools.execution.workers import WorkerLimits
from grpo.errors import ConfigError, GRPOWarning
from tests.support.tool_executors import (
    BUBBLEWRAP_DAILY,
    CATALOGUE,
    LINUX,
    LONG,
    OWN_USERS,
    alive,
    call,
    error_of,
    exists,
    has_begun,
    number_here,
    open_folder,
    output_of,
    processes_of,
    soon,
    worker_processes,
)

pytestmark = LINUX


@pytest.fixture(scope="module")
def executor() -> Iterator[ToolExecutor]:
    """One worker, of a program with a secret in its environment and, as root, with groups."""
    groups = os.getgroups()
    if OWN_USERS:
        os.setgroups([4, 20])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SECRET", "x")
            made = ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=LONG))
    finally:
        if OWN_USERS:
            os.setgroups(groups)
    with made:
        yield made


def died(executor: ToolExecutor, how: str) -> str:
    """The error of a worker that dies of `how`."""
    [result] = executor.run([call("misbehave", how=how)])
    assert error_of(result) is WorkerDiedError
    return str(result.error)


# --- the tools' folder


def test_the_default_root_is_private_usable_and_removed() -> None:
    with ToolExecutor(CATALOGUE, num_workers=2, options=ExecutorOptions(timeout=LONG)) as made:
        root = made.root
        (root / "given").write_text("text")
        given, outside, where = made.run(
            [call("read", path="given"), call("read", path="../x"), call("where", path="given")]
        )
        assert given.output == "PosixPath:text"
        assert error_of(outside) is PathOutsideRootError
        assert where.output == str(root / "given")
        assert root.stat().st_mode & 0o007 == 0
    assert not root.exists()
    assert made.root == root


def test_a_given_root_is_kept_and_calls_fail_while_it_is_missing() -> None:
    with open_folder() as folder:
        root, elsewhere = folder / "root", folder / "elsewhere"
        root.mkdir(mode=0o755)
        (root / "f").write_text("x")
        with ToolExecutor(
            CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=LONG, root=root, confinement="user")
        ) as made:
            assert output_of(made, "read", path="f") == "PosixPath:x"
            assert output_of(made, "who")["cwd"] == str(root.resolve())
            root.rename(elsewhere)
            results = made.run([call("misbehave", how="os_exit_7"), call("add", a=1)])
            assert [error_of(result) for result in results] == [WorkerLostError] * 2
            assert all(f"No such file or directory: '{root.resolve()}'" in str(result.error) for result in results)
            elsewhere.rename(root)
            assert output_of(made, "add", a=1) == 2
        assert (root / "f").read_text() == "x"


def test_calls_go_on_after_a_tool_has_removed_the_executors_folder() -> None:
    limits = WorkerLimits(first_uid=None)  # a worker with its own user id may not remove it
    with ToolExecutor(
        CATALOGUE, num_workers=2, options=ExecutorOptions(timeout=LONG, limits=limits, confinement="user")
    ) as made:
        assert all(result.ok for result in made.run([call("meet", number=2)] * 2))
        assert output_of(made, "misbehave", how="remove_folder") == "removed"
        assert not made.root.exists()
        results = made.run([call("meet", number=2)] * 2)
        assert all(result.ok for result in results), "both workers are in the new folder"
        assert made.root.stat().st_mode & 0o777 == 0o700
        assert output_of(made, "misbehave", how="remove_folder") == "removed"
    assert not made.root.exists()


def test_a_root_that_workers_cannot_read_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700 if OWN_USERS else 0o100)
    with pytest.raises(ConfigError, match=r"must be readable by user \d+.*chmod o\+rx"):
        ToolExecutor(CATALOGUE, options=ExecutorOptions(root=root))
    root.chmod(0o700)


# --- confinement


def test_a_worker_is_confined(executor: ToolExecutor) -> None:
    executor.run([call("misbehave", how="os_exit_7")])  # a new worker, in which no call has left a file open
    seen = output_of(executor, "who")
    assert seen["cwd"] == str(executor.root)
    assert seen["group"] == seen["pid"]
    assert seen["server_group"] == 0, "the group of bwrap, outside; ctrl-c in a terminal reaches neither"
    assert set(seen["environment"]) <= {"PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "HOME", "OMP_NUM_THREADS", "LC_CTYPE", "PWD",
                                        "MODEL_AGNOSTIC_GRPO_TOOL_WORKER"}  # fmt: skip
    assert "SECRET" not in (seen["initial_environment"] or "")
    assert seen["descriptors"] == [0, 1, 2, 3]
    assert seen["core"] == [0, 0]
    assert seen["open_files"] == [256, 256]
    assert seen["file_size"] == [100 * 2**20] * 2
    assert 2**30 < seen["data"][0] == seen["data"][1] < 2**31  # the memory of the imported modules is added
    assert seen["cpu"][0] == resource.getrlimit(resource.RLIMIT_CPU)[0]
    assert seen["no_new_privs"] == 1
    assert seen["modules"] == []  # neither torch nor this package: the tools need none of them
    if OWN_USERS:
        assert len(set(seen["uid"])) == 1
        assert seen["uid"][0] >= 61_000
        assert seen["gid"][0] >= 61_000
        assert seen["groups"] == []
        assert seen["processes"] == [64, 64]


@pytest.mark.skipif(not OWN_USERS, reason="only root on Linux can give workers user ids of their own")
def test_workers_have_user_ids_of_their_own(executor: ToolExecutor) -> None:
    with ToolExecutor(CATALOGUE, num_workers=2, options=ExecutorOptions(timeout=LONG)) as other:
        assert all(result.ok for result in other.run([call("meet", number=2)] * 2))
        users = {user for made in (executor, other) for user, _ in worker_processes(made)}
    assert len(users) == 3
    assert 0 not in users


@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
def test_without_own_user_ids_there_is_a_warning_and_strays_are_still_killed(kind: Any) -> None:
    limits = WorkerLimits(first_uid=None)
    with pytest.warns(GRPOWarning, match=r"less confined than intended: they run as user"):
        made = ToolExecutor(
            CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=LONG, limits=limits, confinement=kind)
        )
    with made:
        seen = output_of(made, "who")
        assert seen["uid"] == [os.getuid()] * 3
        assert seen["processes"] == list(resource.getrlimit(resource.RLIMIT_NPROC))
        stray = output_of(made, "misbehave", how="daemon")
        assert soon(lambda: number_here(made, stray) is None)
        assert number_here(made, output_of(made, "misbehave", how="background_child")) is None
        server = number_here(made, output_of(made, "who")["parent"])
        [result] = made.run([call("hang", how="escaped_grandchild")])
        assert error_of(result) is ToolTimeoutError
        assert Path(f"/proc/{server}/task/{server}/children").read_text() == ""
        assert output_of(made, "add", a=1) == 2


CAPABILITIES = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
PR_CAPBSET_DROP = 24


@pytest.mark.slow
@pytest.mark.skipif(not OWN_USERS, reason="only root can lack capabilities of root")
def test_root_without_capabilities_gets_workers_like_any_other_user_and_is_told(subtests: pytest.Subtests) -> None:
    code = """
import warnings
import tests.support.light_packages
from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.execution.executor import ToolExecutor
from tests.support.tool_functions import add

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with ToolExecutor(ToolCatalogue([Tool.from_function(add)]), num_workers=1) as executor:
        print(executor.run([ToolCall(tool="add", arguments={"a": 1})])[0].output, *(each.message for each in said))
"""
    for reason, names in (
        ("root lacks CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID", list(CAPABILITIES)), ("root lacks CAP_KILL", ["CAP_KILL"]),
        ("root lacks CAP_CHOWN", ["CAP_CHOWN"]),
    ):  # fmt: skip
        with subtests.test(names=names):
            lacking = [CAPABILITIES[name] for name in names]
            run = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                preexec_fn=lambda lacking=lacking: [process.prctl(PR_CAPBSET_DROP, each) for each in lacking],
                check=True,
            )
            assert run.stdout.startswith("2 ToolExecutor's workers are less confined than intended: they run as user 0")
            assert reason in run.stdout


@pytest.mark.slow
@pytest.mark.skipif(not OWN_USERS, reason="only root's workers have another user")
@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
def test_a_command_runs_the_program_that_the_executors_user_finds_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def program(path: Path) -> Path:
        path.write_text(f"#!/bin/sh\necho {path.parent.name}\n")
        path.chmod(0o755)
        return path

    closed = program(tmp_path / "a_program")
    tool = Tool(
        name="runs",
        description="Run it.",
        function=Command(("a_program",)),
        parameters={"type": "object", "properties": {}},
    )
    with open_folder() as folder:
        program(folder / "a_program")
        monkeypatch.setenv("PATH", f"{tmp_path}:{folder}:{os.environ['PATH']}")
        with ToolExecutor(
            ToolCatalogue([tool]), num_workers=1, options=ExecutorOptions(timeout=LONG, confinement=kind)
        ) as made:
            [result] = made.run([call("runs")])
        assert error_of(result) is ToolRaisedError
        assert f"PermissionError: [Errno 13] Permission denied: '{closed}'" in str(result.error)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with ToolExecutor(
            ToolCatalogue([tool]), num_workers=1, options=ExecutorOptions(timeout=LONG, confinement=kind)
        ) as made:
            assert output_of(made, "runs") == f"{folder.name}\n"


def test_a_module_imported_during_a_call_is_refused_with_advice(executor: ToolExecutor) -> None:
    [result] = executor.run([call("imports", name="no_such_module")])
    assert error_of(result) is ToolRaisedError
    assert "import it at the top of the tool's module" in str(result.error)


def test_processor_time_is_limited_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a call is the time used before it, rounded down to a second, plus 1 second and the configured limit."""
    limits = []
    monkeypatch.setattr("resource.setrlimit", lambda kind, values: limits.append((kind, *values)))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for seconds in (2, None, 9):
        before, limits[:] = int(time.process_time()), []
        limit_cpu(seconds)
        during = range(before, int(time.process_time()) + 1)
        expected = [(resource.RLIMIT_CPU, used + 1 + seconds, hard) for used in during] if seconds else []
        assert limits == [limit for limit in expected if limit in limits]
        assert len(limits) == (seconds is not None)


@pytest.mark.slow
def test_a_call_with_too_much_processor_time_is_late() -> None:
    """The limit belongs to the call, so the call is not lost: a policy learns from it as from any other timeout."""
    with ToolExecutor(
        CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=LONG, limits=WorkerLimits(cpu_seconds=1))
    ) as made:
        [result] = made.run([call("spin", seconds=1000)])
        assert error_of(result) is ToolTimeoutError
        assert "more processor time than WorkerLimits.cpu_seconds" in str(result.error)
        assert output_of(made, "who")["cpu"][0] == 2


# --- between two calls


def test_processes_started_by_a_call_end_with_it(executor: ToolExecutor) -> None:
    for how in ("daemon", "background_child"):
        assert number_here(executor, output_of(executor, "misbehave", how=how)) is None


def test_a_child_that_holds_the_socket_of_a_dead_worker_ends_at_the_timeout(executor: ToolExecutor) -> None:
    assert error_of(executor.run([call("hang", how="child_holds_socket")])[0]) is ToolTimeoutError
    assert output_of(executor, "add", a=1) == 2


def test_changes_made_by_a_call_are_undone_before_the_next(executor: ToolExecutor) -> None:
    before = output_of(executor, "who")
    for how in ("change_everything", "signal_handlers"):
        assert output_of(executor, "misbehave", how=how) == "changed"
    time.sleep(0.1)  # the timer, if it still ran, would end the worker
    assert output_of(executor, "who") == before
    assert output_of(executor, "misbehave", how="thread_left") == "left"
    after = output_of(executor, "who")
    assert (after["threads"], after["pid"] == before["pid"]) == (1, False)


def test_a_worker_with_more_than_half_of_its_descriptors_open_is_replaced(executor: ToolExecutor) -> None:
    executor.run([call("misbehave", how="os_exit_7")])  # a new worker, in which no call has left a file open
    before = output_of(executor, "who")
    output_of(executor, "hold", number=124)  # 0 to 3 are its own: 128 is the lowest free one of 256
    assert output_of(executor, "who")["pid"] == before["pid"]
    output_of(executor, "hold", number=1)
    before = output_of(executor, "who")
    assert before["descriptors"] == [0, 1, 2, 3]
    assert error_of(executor.run([call("misbehave", how="descriptor_bomb")])[0]) is ToolRaisedError
    after = output_of(executor, "who")
    assert after["descriptors"] == before["descriptors"]
    assert after["pid"] != before["pid"]


# --- start, end and replacement


def test_four_workers_at_most_are_started_when_needed_and_stay_warm() -> None:
    with ToolExecutor(CATALOGUE, options=ExecutorOptions(timeout=LONG)) as made:
        assert len({output_of(made, "who")["pid"] for _ in range(5)}) == 1
        assert len(worker_processes(made)) == 1
        assert [output_of(made, "remember", text=text) for text in "ab"] == [["a"], ["a", "b"]]
        results = made.run([call("meet", number=4)] * 8)
        assert len({result.output for result in results}) == 4
        assert len(worker_processes(made)) == 4
        assert len({output_of(made, "who")["pid"] for _ in range(5)}) == 1


def test_a_call_has_ten_seconds_unless_told_otherwise() -> None:
    assert ExecutorOptions().timeout == 10.0


def test_a_timeout_may_be_as_good_as_none() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=1e300)) as made:
        results = made.run([call("add", a=1), call("async_nap", seconds=0)])
    assert all(result.ok for result in results), results


def test_a_worker_that_dies_is_named_and_replaced(executor: ToolExecutor) -> None:
    assert "exit status 7" in died(executor, "os_exit_7")
    assert "SIGSEGV" in died(executor, "segfault")
    assert output_of(executor, "add", a=1) == 2


def test_a_worker_that_dies_between_calls_is_replaced_silently(executor: ToolExecutor) -> None:
    pid = number_here(executor, output_of(executor, "who")["pid"])
    assert pid is not None
    [idle] = executor._pool._idle
    os.kill(pid, signal.SIGKILL)
    assert soon(lambda: not idle.is_quiet), "the executor has read the end of the worker's socket"
    assert output_of(executor, "add", a=1) == 2
    assert not exists(pid)


@pytest.mark.parametrize("is_sent_before", [False, True])
def test_a_worker_that_ends_before_it_reads_a_call_does_not_cost_it(
    is_sent_before: bool, executor: ToolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier call may have left something that ends its worker just after the executor has looked at it."""
    pid = number_here(executor, output_of(executor, "who")["pid"])
    assert pid is not None
    [idle] = executor._pool._idle
    os.kill(pid, signal.SIGSTOP)  # it cannot read

    def interrupted_send(connection: socket.socket, content: bytes) -> None:
        monkeypatch.setattr(workers, "send", send)
        if is_sent_before:
            send(connection, content)
        os.kill(pid, signal.SIGKILL)
        if not is_sent_before:
            assert soon(lambda: not idle.is_quiet)
            send(connection, content)

    monkeypatch.setattr(workers, "send", interrupted_send)
    assert output_of(executor, "add", a=1) == 2
    assert not exists(pid)


def test_a_worker_that_is_killed_during_a_call_is_lost_and_replaced() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=LONG)) as made:
        pid = number_here(made, output_of(made, "who")["pid"])
        assert pid is not None
        killer = threading.Thread(target=lambda: soon(lambda: has_begun(made)) and os.kill(pid, signal.SIGKILL))
        killer.start()
        [result] = made.run([call("nap", seconds=500)])
        killer.join()
        assert error_of(result) is WorkerLostError
        assert "ended during the call: it ended (killed)" in str(result.error)
        assert output_of(made, "add", a=1) == 2


@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
def test_a_fork_server_that_dies_is_replaced(kind: Any) -> None:
    with ToolExecutor(CATALOGUE, num_workers=2, options=ExecutorOptions(timeout=LONG, confinement=kind)) as made:
        seen = output_of(made, "who")
        worker_number, server = number_here(made, seen["pid"]), number_here(made, seen["parent"])
        assert worker_number is not None
        assert server is not None
        killer = threading.Thread(target=lambda: soon(lambda: has_begun(made)) and os.kill(server, signal.SIGKILL))
        killer.start()
        assert error_of(made.run([call("nap", seconds=500)])[0]) is WorkerLostError
        killer.join()
        assert soon(lambda: not alive(worker_number))
        results = made.run([call("add", a=i) for i in range(10)])
        assert [result.output for result in results] == list(range(1, 11))
        assert number_here(made, output_of(made, "who")["parent"]) not in (None, server)


def test_a_fork_server_that_starts_while_the_pool_closes_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, may_go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class SlowServer:
        def __init__(self, setup: dict[str, Any]) -> None:
            starts.set()
            assert may_go_on.wait(10)

        def close(self) -> None:
            closed.set()

    def spawn() -> None:
        with pytest.raises(EOFError, match="the executor was closed"):
            pool._spawn()

    monkeypatch.setattr(workers, "ForkServerProcess", SlowServer)
    pool = workers.WorkerPool({}, num_workers=1)
    with ThreadPoolExecutor(1) as thread:
        spawned = thread.submit(spawn)
        assert starts.wait(10)
        pool.close()
        assert not closed.is_set()
        may_go_on.set()
        spawned.result(10)
    assert closed.is_set()


@pytest.mark.slow
def test_many_workers_that_end_at_once_leave_the_fork_server_in_place() -> None:
    with ToolExecutor(CATALOGUE, num_workers=4, options=ExecutorOptions(timeout=LONG)) as made:
        server, *_ = processes_of(made)
        calls = [call("misbehave", how=how) for how in ("os_exit", "garbage", "raw_thread_left", "kill_self")]
        ended = [WorkerDiedError, WorkerDiedError, None, WorkerLostError]
        assert [error_of(result) for result in made.run(calls * 10)] == ended * 10
        assert processes_of(made)[0] == server
