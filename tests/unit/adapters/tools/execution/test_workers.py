"""Workers: their confinement, the state between calls, the replacement of a lost worker, and the frames on their sockets."""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapters.tools import Command, ExecutorOptions, Tool, ToolCatalogue, ToolExecutor, ToolRaisedError, WorkerLimits
from adapters.tools.errors import ToolTimeoutError, WorkerDiedError, WorkerLostError
from adapters.tools.execution import workers
from adapters.tools.execution.worker import LENGTH, PartOfFrameError, limit_cpu, receive, send
from grpo.errors import ConfigError, GRPOWarning
from tests.support.tool_executors import (
    BUBBLEWRAP_DAILY,
    CATALOGUE,
    LINUX,
    LONG,
    OWN_USERS,
    USERS,
    alive,
    call,
    error_of,
    executor_of,
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
            made = executor_of(CATALOGUE)
    finally:
        if OWN_USERS:
            os.setgroups(groups)
    with made:
        yield made


# --- the tools' folder
def test_a_given_root_is_kept_and_calls_fail_while_it_is_missing() -> None:
    with open_folder() as folder:
        root, elsewhere = folder / "root", folder / "elsewhere"
        root.mkdir(mode=0o755)
        (root / "f").write_text("x")
        with executor_of(CATALOGUE, root=root, confinement="user") as made:
            assert output_of(made, "read", path="f") == "PosixPath:x"
            assert output_of(made, "where", path="f") == str(root.resolve() / "f")
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
    with executor_of(CATALOGUE, num_workers=2, limits=limits, confinement="user") as made:
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
    assert set(seen["environment"]) <= {"PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "HOME", "OMP_NUM_THREADS", "LC_CTYPE", "PWD",
                                        "MODEL_AGNOSTIC_GRPO_TOOL_WORKER"}  # fmt: skip
    assert "SECRET" not in (seen["initial_environment"] or "")
    expected = {
        "cwd": str(executor.root), "group": seen["pid"],
        "server_group": 0,  # the group of bwrap, outside; ctrl-c in a terminal reaches neither
        "descriptors": [0, 1, 2, 3], "core": [0, 0], "open_files": [256, 256], "file_size": [100 * 2**20] * 2,
        "no_new_privs": 1,
        "modules": [],  # neither torch nor this package: the tools need none of them
    }  # fmt: skip
    if OWN_USERS:
        expected |= {"groups": [], "processes": [64, 64], "uid": seen["uid"][:1] * 3}
        assert seen["uid"][0] >= 61_000
        assert seen["gid"][0] >= 61_000
        with executor_of(CATALOGUE, num_workers=2) as other:
            assert all(result.ok for result in other.run([call("meet", number=2)] * 2))
            users = {user for made in (executor, other) for user, _ in worker_processes(made)}
        assert (len(users), 0 in users) == (3, False), "each worker has a user id of its own"
    assert {name: seen[name] for name in expected} == expected
    assert 2**30 < seen["data"][0] == seen["data"][1] < 2**31  # the memory of the imported modules is added
    assert seen["cpu"][0] == resource.getrlimit(resource.RLIMIT_CPU)[0]


@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
def test_without_own_user_ids_there_is_a_warning_and_strays_are_still_killed(kind: Any) -> None:
    limits = WorkerLimits(first_uid=None)
    with pytest.warns(GRPOWarning, match=r"less confined than intended: they run as user"):
        made = executor_of(CATALOGUE, limits=limits, confinement=kind)
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


@pytest.mark.slow
@pytest.mark.skipif(not OWN_USERS, reason="only root's workers have another user")
@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
def test_a_command_runs_the_program_that_the_executors_user_finds_or_none(tmp_path, monkeypatch, kind: Any) -> None:
    def program(path: Path) -> Path:
        path.write_text(f"#!/bin/sh\necho {path.parent.name}\n")
        path.chmod(0o755)
        return path

    closed = program(tmp_path / "a_program")
    catalogue = ToolCatalogue([Tool(name="runs", description="Run it.", function=Command(("a_program",)))])
    with open_folder() as folder:
        program(folder / "a_program")
        monkeypatch.setenv("PATH", f"{tmp_path}:{folder}:{os.environ['PATH']}")
        with executor_of(catalogue, confinement=kind) as made:
            [result] = made.run([call("runs")])
        assert error_of(result) is ToolRaisedError
        assert f"PermissionError: [Errno 13] Permission denied: '{closed}'" in str(result.error)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with executor_of(catalogue, confinement=kind) as made:
            assert output_of(made, "runs") == f"{folder.name}\n"


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
    with executor_of(CATALOGUE, limits=WorkerLimits(cpu_seconds=1)) as made:
        [result] = made.run([call("spin", seconds=1000)])
        assert error_of(result) is ToolTimeoutError
        assert "more processor time than WorkerLimits.cpu_seconds" in str(result.error)
        assert output_of(made, "who")["cpu"][0] == 2


# --- between two calls
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


def test_a_call_has_ten_seconds_unless_told_otherwise_and_a_timeout_may_be_as_good_as_none() -> None:
    assert ExecutorOptions().timeout == 10.0
    with executor_of(CATALOGUE, timeout=1e300) as made:
        results = made.run([call("add", a=1), call("async_nap", seconds=0)])
    assert all(result.ok for result in results), results


def test_a_call_that_fails_says_why_and_the_next_one_runs(executor: ToolExecutor, subtests: pytest.Subtests) -> None:
    for tool, arguments, kind, said in (
        ("misbehave", {"how": "os_exit_7"}, WorkerDiedError, "exit status 7"),
        ("misbehave", {"how": "segfault"}, WorkerDiedError, "SIGSEGV"),
        ("imports", {"name": "no_such_module"}, ToolRaisedError, "import it at the top of the tool's module"),
        ("hang", {"how": "child_holds_socket"}, ToolTimeoutError, "the worker was killed"),  # of a worker that is dead
    ):
        with subtests.test(said):
            [result] = executor.run([call(tool, **arguments)])
            assert error_of(result) is kind
            assert said in str(result.error)
            assert output_of(executor, "add", a=1) == 2


def test_a_worker_that_dies_between_calls_is_replaced_silently(executor: ToolExecutor) -> None:
    pid = number_here(executor, output_of(executor, "who")["pid"])
    [idle] = executor._pool._idle
    assert idle.is_quiet
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


def lost(made: ToolExecutor, pid: int) -> str:
    """The error of a call during which this process is killed."""
    killer = threading.Thread(target=lambda: soon(lambda: has_begun(made)) and os.kill(pid, signal.SIGKILL))
    killer.start()
    [result] = made.run([call("nap", seconds=500)])
    killer.join()
    assert error_of(result) is WorkerLostError
    return str(result.error)


def test_a_worker_that_is_killed_during_a_call_is_lost_and_replaced() -> None:
    with executor_of(CATALOGUE) as made:
        pid = number_here(made, output_of(made, "who")["pid"])
        assert pid is not None
        assert "ended during the call: it ended (killed)" in lost(made, pid)
        assert output_of(made, "add", a=1) == 2


@pytest.mark.parametrize("kind", BUBBLEWRAP_DAILY)
def test_a_fork_server_that_dies_is_replaced(kind: Any) -> None:
    with executor_of(CATALOGUE, num_workers=2, confinement=kind) as made:
        seen = output_of(made, "who")
        worker_number, server = number_here(made, seen["pid"]), number_here(made, seen["parent"])
        assert worker_number is not None
        assert server is not None
        lost(made, server)
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
    with executor_of(CATALOGUE, num_workers=4) as made:
        server, *_ = processes_of(made)
        calls = [call("misbehave", how=how) for how in ("os_exit", "garbage", "raw_thread_left", "kill_self")]
        ended = [WorkerDiedError, WorkerDiedError, None, WorkerLostError]
        assert [error_of(result) for result in made.run(calls * 10)] == ended * 10
        assert processes_of(made)[0] == server


# --- what a call leaves in its worker harms no later call
@pytest.fixture(scope="module", params=USERS)
def used(request: pytest.FixtureRequest) -> Iterator[ToolExecutor]:
    with executor_of(CATALOGUE, limits=request.param) as made:
        yield made


@pytest.mark.parametrize(
    "how", ["late_raw_thread", "late_process", "late_hook", "late_garbage", "late_error", "late_writer"]
)
def test_the_call_after_a_forged_answer_runs_on_another_worker(used: ToolExecutor, how: str) -> None:
    for _ in range(2):
        before = output_of(used, "who")["pid"]
        assert output_of(used, "misbehave", how=how) == "left"
        results = used.run([call("add", a=1), call("who")])
        assert all(result.ok for result in results), results
        assert results[0].output == 2
        assert how == "late_process" or results[1].output["pid"] != before


def test_the_call_after_a_part_of_a_forged_answer_runs_on_another_worker_at_its_timeout(used: ToolExecutor) -> None:
    assert output_of(used, "misbehave", how="late_part_of_a_frame") == "left"
    [result] = used.run([call("short_nap", seconds=0.0)])
    assert result.output == "rested"
    assert output_of(used, "add", a=1) == 2


@pytest.mark.parametrize("how", ["garbage", "fake_frame", "huge_frame", "flood", "close_socket"])
def test_a_call_that_sends_invalid_data_itself_fails_on_any_worker(used: ToolExecutor, how: str) -> None:
    assert output_of(used, "add", a=1) == 2
    for _ in range(2):  # on a worker with earlier calls, and on a new worker
        assert error_of(used.run([call("misbehave", how=how)])[0]) is WorkerDiedError
    assert error_of(used.run([call("hang", how="drip")])[0]) is ToolTimeoutError


def test_a_worker_is_replaced_if_a_thread_of_its_call_goes_on_and_kept_if_all_have_ended(used: ToolExecutor) -> None:
    before = output_of(used, "who")["pid"]
    for _ in range(20):
        assert output_of(used, "misbehave", how="joined_threads") == 2
    assert output_of(used, "who")["pid"] == before
    assert output_of(used, "misbehave", how="raw_thread_left") == "left", "a thread that `threading` does not know"
    assert output_of(used, "who")["pid"] != before


# --- frames on the sockets between the program and its workers
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The two ends of a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def frame(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def test_what_is_sent_is_received_until_the_end(pair: Pair) -> None:
    ours, theirs = pair
    for content in (b"", b"a", b"x" * 96):
        send(theirs, content)
        assert receive(ours, 100, time.monotonic() + LONG) == content
    thread = threading.Thread(target=lambda: [theirs.sendall(bytes([byte])) for byte in frame(b"slow")])
    thread.start()
    assert receive(ours) == b"slow"
    thread.join()
    send(theirs, b"last")
    theirs.close()
    assert receive(ours) == b"last"
    with pytest.raises(EOFError, match="it ended"):
        receive(ours)


@pytest.mark.parametrize(("sent", "said"), [
    (frame(b"a") + frame(b"b"), "it wrote without having been asked"),
    (frame(b"a") + b"\0", "it wrote without having been asked"),
    (frame(b"x" * 97), "it wrote a frame of 101 bytes; at most 100 are read"),
    (LENGTH.pack(2**32 - 1), "it wrote a frame of 4294967299 bytes; at most 100 are read"),
])  # fmt: skip
def test_other_data_than_one_frame_is_refused(pair: Pair, sent: bytes, said: str) -> None:
    pair[1].sendall(sent)
    with pytest.raises(ValueError, match=said):
        receive(pair[0], 100)


def test_a_part_of_a_frame_is_told_from_no_frame_at_the_deadline(pair: Pair) -> None:
    ours, theirs = pair
    for sent, expected in ((b"", TimeoutError), (frame(b"abc")[:-1], PartOfFrameError)):
        theirs.sendall(sent)
        for seconds in (0.05, 0.0, -1.0):
            with pytest.raises(TimeoutError) as raised:
                receive(ours, 100, time.monotonic() + seconds)
            assert type(raised.value) is expected
            theirs.sendall(sent)


def test_a_frame_that_comes_byte_by_byte_does_not_extend_the_deadline(pair: Pair) -> None:
    ours, theirs = pair
    stop = threading.Event()

    def drip() -> None:
        theirs.sendall(LENGTH.pack(50_000))
        while not stop.wait(0.01):
            theirs.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(PartOfFrameError):  # 50,000 bytes take 500 seconds, longer than a test may take
        receive(ours, 60_000, time.monotonic() + 0.2)
    stop.set()
    thread.join()
