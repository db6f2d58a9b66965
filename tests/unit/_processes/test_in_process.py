"""Calls in another process: what comes back, when it ends, and that nothing of it is left."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo import ConfigError, TrainingInterrupted
from grpo._processes.process import Process
from grpo._processes.worker import LENGTH
from grpo.errors import CallError, DeadlineError
from grpo.rewards import Call, call_in_process
from tests.support.clocks import CallsClock
from tests.support.objective_inputs import as_users_run_it
from tests.support.reward_faults import children, eventually, is_alive, write_process, written
from tests.support.threads import run_together

FAST, SLOW = 0.15, 60.0
"""A deadline that a hanging call reaches, and one that no call here reaches."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every call here leaves no process and no open file. Other tests may have left a process."""
    files = len([*Path("/proc/self/fd").iterdir()])
    before = children()
    yield
    assert (children(), len([*Path("/proc/self/fd").iterdir()])) == (before, files)


def call(function: Callable[..., Any], *arguments: Any, timeout: float = SLOW) -> Any:
    return call_in_process([Call(name="judge", function=function, arguments=arguments)], timeout=timeout)[0]


def hang() -> None:
    time.sleep(3600)


def test_answers_come_back_in_order() -> None:
    calls = [Call(name="f", function=pow, arguments=(2,), keywords={"exp": n}) for n in range(5)]
    assert call_in_process(calls, timeout=SLOW) == [1, 2, 4, 8, 16]


def test_an_answer_counts_even_if_the_end_of_the_process_is_noticed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is so slow that its first look at the status shows the start and the end together."""
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    looks = iter([True])

    def slow(ends: list[int], seconds: float) -> list[Any]:
        if not next(looks, False):
            return wait(ends, seconds)
        status, num_bytes = ends[1], bytearray(4)

        def has_ended() -> bool:
            fcntl.ioctl(status, termios.FIONREAD, num_bytes)
            return int.from_bytes(num_bytes, sys.byteorder) > LENGTH.size  # more than the id of the supervisor

        eventually(has_ended, "the process has ended")
        return [status]

    monkeypatch.setattr("grpo._processes.process.wait", slow)
    assert call(lambda: 3) == 3


def test_answers_of_any_kind_come_back_and_memory_stays_here():
    # And one thread of torch is used there.
    answer = call(lambda: (torch.arange(3.0), np.arange(300_000), "text", torch.get_num_threads()))
    assert (answer[0].tolist(), *answer[2:]) == ([0, 1, 2], "text", 1)
    assert (answer[1] == np.arange(300_000)).all()
    seen = [1, 2]
    assert (call(lambda: seen.append(3) or list(seen)), seen) == ([1, 2, 3], [1, 2])


def test_random_generators_go_on_as_if_the_call_was_made_here() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]  # noqa: NPY002

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)

    def draw_and_raise() -> None:
        raise ValueError(draw())

    seed()
    expected = [draw(), draw()]
    with as_users_run_it():  # type checks draw random numbers, too
        seed()
        assert [call(draw), draw()] == expected
        seed()
        with pytest.raises(ValueError, match=str(expected[0][0])):
            call(draw_and_raise)
        assert draw() == expected[1]
    seed()  # without an answer, a repeated call must not draw the same numbers again
    with pytest.raises(CallError):
        call(os._exit, 1)
    assert all(mine != first for mine, first in zip(draw(), expected[0], strict=True))


def test_what_is_printed_appears_once(capfd: pytest.CaptureFixture[str]) -> None:
    print("before ", end="")
    call(lambda: print("inside ", end=""))
    print("after", end="")
    sys.stdout.flush()
    assert capfd.readouterr().out == "before inside after"


class Picky(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def raise_chained() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error


def test_an_exception_comes_back_with_its_causes_and_its_traceback() -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        call(raise_chained)
    assert repr(caught.value.__cause__) == "KeyError('inner')"
    assert "in raise_chained" in caught.value.__notes__[0]


def test_calls_after_an_exception_are_left_out(tmp_path: Path) -> None:
    functions = {"first": int, "second": raise_chained, "third": (tmp_path / "made").touch}
    with pytest.raises(ValueError, match="outer"):
        call_in_process([Call(name=name, function=made) for name, made in functions.items()], timeout=SLOW)
    assert not (tmp_path / "made").exists()


def raise_this(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: raise_this(Picky("lost", "found")), "judge raised Picky: lost"),
        (lambda: sys.exit(3), "judge raised SystemExit: 3"),
        (lambda: threading.Lock(), "judge runs in another process, and must return what can be pickled; got lock"),
        (lambda: os._exit(3), "judge gave no answer: its process ended with exit code 3"),
        (lambda: os._exit(0), "judge gave no answer: its process ended with exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "judge gave no answer: its process ended by signal 15"),
        (lambda: os.killpg(0, signal.SIGKILL), "judge gave no answer: its process ended together with its supervisor"),
    ],
)
def test_what_cannot_be_sent_back_is_told_in_words(function, message):
    with pytest.raises(CallError, match=message):
        call(function)


FAR = torch.empty(1, device="meta")


@pytest.mark.parametrize(
    "given",
    [{"arguments": (FAR,)}, {"arguments": ([1, FAR],)}, {"arguments": ({"x": FAR},)}, {"keywords": {"x": (FAR,)}}],
)
def test_tensors_of_another_device_are_refused(given):
    with pytest.raises(ConfigError, match=r"judge gets tensors on meta.*GPU"):
        call_in_process([Call(name="judge", function=len, **given)], timeout=SLOW)


def test_an_error_of_torch_about_a_gpu_says_what_to_do() -> None:
    error = RuntimeError("Cannot re-initialize CUDA in forked subprocess. Use 'spawn'")
    with pytest.raises(ConfigError, match=r"judge uses a GPU: .*set reward\.timeout=None"):
        call(raise_this, error)


def ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang()


def catch_everything() -> None:
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            continue


def close_all_files() -> None:
    os.closerange(3, 200)
    hang()


HANGING: dict[str, Callable[[], None]] = {
    "sleeps": hang,
    "computes": lambda: sum(1 for _ in iter(int, 1)),
    "ignores signals": ignore_signals,
    "catches everything": catch_everything,
    "closes all files": close_all_files,
    "waits for a lock": lambda: [lock.acquire() for lock in [threading.Lock()] for _ in range(2)] and None,
    "stops itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stops its group": lambda: os.killpg(0, signal.SIGSTOP),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "function"), HANGING.items())
def test_a_call_that_hangs_ends_at_its_deadline(name, function):
    with pytest.raises(DeadlineError, match=r"^judge did not answer within 0\.15 s$"):
        call(function, timeout=FAST)


def test_an_answer_that_still_arrives_at_the_deadline_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is always more to read. All of it, 100 parts of 64 KiB, takes at least 5 seconds."""
    next_message = Process._next_message

    def slow(process: Process) -> bytes | None:
        time.sleep(0.05)
        return next_message(process)

    monkeypatch.setattr(Process, "_next_message", slow)
    monkeypatch.setattr("grpo._processes.process.wait", lambda ends, seconds: wait(ends, 30.0))  # until there is more
    with pytest.raises(DeadlineError, match=r"^judge did not answer within 0\.5 s$"):
        call(bytes, 100 << 16, timeout=0.5)


def test_the_deadline_is_per_call_and_names_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of 40 seconds by an imitated clock, and one that does not answer within its 60 seconds."""
    clock = CallsClock(monkeypatch)
    functions = [*[partial(clock.move, 40.0)] * 3, clock.hang]
    calls = [Call(name=f"row {n}", function=function) for n, function in enumerate(functions)]
    with pytest.raises(DeadlineError, match=r"^row 3 did not answer within 60 s$"):
        call_in_process(calls, timeout=60.0)


def start_processes(folder: Path, then: Callable[[], Any]) -> Any:
    """Start a child, a child in a session of its own, and a grandchild that lost its parent. Each hangs."""
    sleeping = ["sleep", "3600"]
    write_process(folder / "child", subprocess.Popen(sleeping).pid)
    write_process(folder / "session", subprocess.Popen(sleeping, start_new_session=True).pid)
    if os.fork() == 0:
        write_process(folder / "orphan", subprocess.Popen(sleeping, start_new_session=True).pid)
        os._exit(0)
    os.wait()
    write_process(folder / "worker", os.getpid())
    write_process(folder / "supervisor", os.getppid())
    return then()


STARTED = ("child", "session", "orphan", "worker", "supervisor")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        (hang, pytest.raises(DeadlineError)),
        (raise_chained, pytest.raises(ValueError, match="outer")),
        (lambda: os._exit(1), pytest.raises(CallError)),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), pytest.raises(CallError)),
        (lambda: "done", nullcontext()),
    ],
)
def test_processes_that_a_call_started_end_with_it(tmp_path: Path, then, outcome):
    with outcome:
        assert call(start_processes, tmp_path, then, timeout=1.0 if then is hang else SLOW) == "done"
    assert [is_alive(process) for process in written(tmp_path / name for name in STARTED)] == [False] * 5


def test_a_call_that_kills_its_supervisor_is_killed_too(tmp_path: Path) -> None:
    def kill_supervisor() -> None:
        write_process(tmp_path / "worker", os.getpid())
        os.kill(os.getppid(), signal.SIGKILL)
        hang()

    with pytest.raises(CallError, match="ended together with its supervisor"):
        call(kill_supervisor)
    (worker,) = written([tmp_path / "worker"])
    eventually(lambda: not is_alive(worker) or "Z" in Path(f"/proc/{worker}/stat").read_text(), "the worker is dead")


@pytest.mark.slow
def test_a_call_ends_when_this_process_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from tests.unit._processes.test_in_process import call, hang, start_processes
call(start_processes, Path({str(tmp_path)!r}), hang)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).resolve().parents[3])
    try:
        started = written(tmp_path / name for name in STARTED)
        assert all(is_alive(number) for number in started)
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not any(is_alive(number) for number in started), "all have ended")


class Interrupted(BaseException):
    """What a handler raises in these tests."""


def interrupted_after(seconds: float, function: Callable[[], Any], error: BaseException) -> None:
    def interrupt(*_: Any) -> None:
        raise error

    def call_and_wait() -> None:
        timer.start()
        function()
        eventually(lambda: False, "the signal has come")  # the call was faster

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        with pytest.raises(type(error)):
            call_and_wait()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TrainingInterrupted(15), Interrupted()])
def test_an_interrupt_ends_the_call_and_is_raised_again(error):
    interrupted_after(0.2, lambda: call(hang), error)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_an_interrupt_at_any_moment_leaves_nothing(seed):
    interrupted_after(random.Random(seed).uniform(0.0, 0.03), lambda: call(time.sleep, 0.002), Interrupted())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def python_handler(handled: list[int]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: handled.append(os.getpid()))


def c_handler(handled: list[int]) -> Any:
    """A handler that Python's `getsignal` does not know, as SDL sets one with the first window."""
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: handled.append(os.getpid()))
    ctypes.CDLL(None).signal(ctypes.c_int(signal.SIGTERM), handler)
    return handler


@pytest.mark.parametrize("set_handler", [python_handler, c_handler])
def test_a_signal_has_its_default_effect_there(set_handler: Callable[[list[int]], Any]) -> None:
    handled: list[int] = []
    before, handler = signal.getsignal(signal.SIGTERM), set_handler(handled)
    try:
        with pytest.raises(CallError, match="ended by signal 15"):
            call(lambda: (os.kill(os.getpid(), signal.SIGTERM), hang()))
    finally:
        signal.signal(signal.SIGTERM, before)
    del handler  # until here C could call it
    assert handled == []


def test_an_ignored_signal_stays_ignored_there() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert call(lambda: os.kill(os.getpid(), signal.SIGHUP)) is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_of_this_process_is_cleaned_up_or_printed_again_there() -> None:
    """A script whose call exits: its `finally` and its exit handler run once each, in the script's own process. It prints into
    a pipe, which is written in blocks: each line appears once and in order."""
    script = f"""
import atexit, os, sys
from grpo.rewards import Call, call_in_process
from grpo.errors import CallError
atexit.register(lambda: print("exit", os.getpid()))

def speak_and_exit():
    print("inside")
    sys.exit()

print("before")
try:
    call_in_process([Call(name="judge", function=speak_and_exit)], timeout={SLOW})
except CallError:
    pass
finally:
    print("finally", os.getpid())
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options: dict[str, Any] = {"cwd": Path(__file__).resolve().parents[3], "env": buffered}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, **options)
    expected = ["before", "inside", f"finally {process.pid}", f"exit {process.pid}"]
    assert process.communicate(timeout=SLOW)[0].splitlines() == expected


def test_a_thread_can_make_calls_while_another_does() -> None:
    answers: dict[int, int] = {}

    def ask(number: int) -> None:
        for _ in range(2):
            answers[number] = call(lambda: number)

    run_together(*(partial(ask, number) for number in range(4)))
    assert answers == {number: number for number in range(4)}
