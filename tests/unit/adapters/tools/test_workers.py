"""Workers: their confinement, the state between calls, and the replacement of a lost worker."""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import worker_calls
from adapters.tools.errors import PathOutsideRootError, ToolRaisedError, ToolTimeoutError, WorkerDiedError
from adapters.tools.executor import ToolExecutor
from adapters.tools.workers import WorkerLimits
from grpo.errors import ConfigError, GRPOWarning
from tests.support.tool_executors import (
    CATALOGUE,
    LINUX,
    LONG,
    OWN_USERS,
    alive,
    call,
    error_of,
    exists,
    has_begun,
    open_folder,
    output_of,
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
            made = ToolExecutor(CATALOGUE, num_workers=1, timeout=LONG)
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
    with ToolExecutor(CATALOGUE, num_workers=2, timeout=LONG) as made:
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
        with ToolExecutor(CATALOGUE, num_workers=1, timeout=LONG, root=root) as made:
            assert output_of(made, "read", path="f") == "PosixPath:x"
            assert output_of(made, "who")["cwd"] == str(root.resolve())
            root.rename(elsewhere)
            results = made.run([call("misbehave", how="os_exit_7"), call("add", a=1)])
            assert [error_of(result) for result in results] == [WorkerDiedError] * 2
            assert "no worker could be started" in str(results[1].error)
            elsewhere.rename(root)
            assert output_of(made, "add", a=1) == 2
        assert (root / "f").read_text() == "x"


def test_a_root_that_workers_cannot_read_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700 if OWN_USERS else 0o100)
    with pytest.raises(ConfigError, match=r"must be readable by user \d+.*chmod o\+rx"):
        ToolExecutor(CATALOGUE, root=root)
    root.chmod(0o700)


# --- confinement


def test_a_worker_is_confined(executor: ToolExecutor) -> None:
    executor.run([call("misbehave", how="os_exit_7")])  # a new worker, in which no call has left a file open
    seen = output_of(executor, "who")
    assert seen["cwd"] == str(executor.root)
    assert seen["group"] == seen["pid"]
    assert seen["server_group"] == seen["parent"]  # ctrl-c in a terminal reaches neither
    assert set(seen["environment"]) <= {"PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "HOME", "OMP_NUM_THREADS", "LC_CTYPE",
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
    with ToolExecutor(CATALOGUE, num_workers=2, timeout=LONG) as other:
        assert all(result.ok for result in other.run([call("meet", number=2)] * 2))
        users = {user for made in (executor, other) for user, _ in worker_processes(made)}
    assert len(users) == 3
    assert 0 not in users


def test_without_own_user_ids_there_is_a_warning_and_strays_are_still_killed() -> None:
    with pytest.warns(GRPOWarning, match=r"less confined than intended: they run as user"):
        made = ToolExecutor(CATALOGUE, num_workers=1, timeout=LONG, limits=WorkerLimits(first_uid=None))
    with made:
        seen = output_of(made, "who")
        assert seen["uid"] == [os.getuid()] * 3
        assert seen["processes"] == list(resource.getrlimit(resource.RLIMIT_NPROC))
        stray = output_of(made, "misbehave", how="daemon")
        assert not alive(stray)
        assert soon(lambda: not exists(stray))
        assert not exists(output_of(made, "misbehave", how="background_child"))
        server = output_of(made, "who")["parent"]
        [result] = made.run([call("hang", how="escaped_grandchild")])
        assert error_of(result) is ToolTimeoutError
        assert Path(f"/proc/{server}/task/{server}/children").read_text() == ""
        assert output_of(made, "add", a=1) == 2


def test_a_module_imported_during_a_call_is_refused_with_advice(executor: ToolExecutor) -> None:
    [result] = executor.run([call("imports", name="no_such_module")])
    assert error_of(result) is ToolRaisedError
    assert "import it at the top of the tool's module" in str(result.error)


def test_processor_time_is_limited_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of each call is the time used before it, rounded down to a second, plus 1 second and the configured limit."""
    used, limits = iter([0.3, 4.7]), []
    monkeypatch.setattr("time.process_time", lambda: next(used))
    monkeypatch.setattr("resource.setrlimit", lambda kind, values: limits.append((kind, *values)))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    setup: dict[str, Any] = {"root": "/", "max_output_bytes": 1, "limits": {"cpu_seconds": 2, "open_files": None}}
    worker = worker_calls.Worker(None, setup, {}, alone=False)  # type: ignore[arg-type]  # it answers nobody here
    worker._limit_cpu()
    worker._limit_cpu()
    assert limits == [(resource.RLIMIT_CPU, 3, hard), (resource.RLIMIT_CPU, 7, hard)]


def test_a_worker_dies_of_too_much_processor_time() -> None:
    with ToolExecutor(CATALOGUE, num_workers=1, timeout=LONG, limits=WorkerLimits(cpu_seconds=1)) as made:
        [result] = made.run([call("spin", seconds=1000)])
        assert error_of(result) is WorkerDiedError
        assert "SIGXCPU" in str(result.error)
        assert output_of(made, "who")["cpu"][0] == 2


# --- between two calls


def test_processes_started_by_a_call_end_with_it(executor: ToolExecutor) -> None:
    for how in ("daemon", "background_child"):
        assert not exists(output_of(executor, "misbehave", how=how))


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
    with ToolExecutor(CATALOGUE, timeout=LONG) as made:
        assert len({output_of(made, "who")["pid"] for _ in range(5)}) == 1
        assert len(worker_processes(made)) == 1
        assert [output_of(made, "remember", text=text) for text in "ab"] == [["a"], ["a", "b"]]
        results = made.run([call("meet", number=4)] * 8)
        assert len({result.output for result in results}) == 4
        assert len(worker_processes(made)) == 4
        assert len({output_of(made, "who")["pid"] for _ in range(5)}) == 1


def test_a_call_has_ten_seconds_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("adapters.tools.executor.Engine", lambda *_, timeout, **__: asked.append(timeout))
    monkeypatch.setattr("adapters.tools.executor._finish", lambda *_: None)
    ToolExecutor(CATALOGUE, allow=["async_nap"])
    assert asked == [10.0]


def test_a_worker_that_dies_is_named_and_replaced(executor: ToolExecutor) -> None:
    assert "exit status 7" in died(executor, "os_exit_7")
    assert "SIGSEGV" in died(executor, "segfault")
    assert output_of(executor, "add", a=1) == 2


def test_a_worker_that_dies_between_calls_is_replaced_silently(executor: ToolExecutor) -> None:
    pid = output_of(executor, "who")["pid"]
    [worker] = executor._engine._pool._idle
    os.kill(pid, signal.SIGKILL)
    assert soon(lambda: not worker.fit), "the executor has read the end of the worker's socket"
    assert output_of(executor, "add", a=1) == 2
    assert not exists(pid)


def test_a_fork_server_that_dies_is_replaced() -> None:
    with ToolExecutor(CATALOGUE, num_workers=2, timeout=LONG) as made:
        seen = output_of(made, "who")
        killer = threading.Thread(
            target=lambda: soon(lambda: has_begun(made)) and os.kill(seen["parent"], signal.SIGKILL)
        )
        killer.start()
        assert error_of(made.run([call("nap", seconds=500)])[0]) is WorkerDiedError
        killer.join()
        assert soon(lambda: not alive(seen["pid"]))
        results = made.run([call("add", a=i) for i in range(10)])
        assert [result.output for result in results] == list(range(1, 11))
        assert output_of(made, "who")["parent"] != seen["parent"]
