"""Tools that do what a hostile call might have them do, for the tests of the executor."""

import _thread
import array
import ctypes
import mmap
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SOCKET = 3  # where a worker has the executor
LINKS = {
    "in_file": "harmless", "in_chain": "in_file", "inside/up": "..", "out_file": "/etc/passwd", "out_folder": "..",
    "out_chain": "out_folder/../etc/passwd", "out_dangling": "/no/such/file", "loop": "loop", "proc": "/proc/self",
    "proc_root": "/proc/self/root", "proc_cwd": "/proc/self/cwd", "proc_fd": "/proc/self/fd", "absolute": "/etc",
}  # fmt: skip
"""Links that hostile paths go through."""


def lay_files(folder: Path) -> None:
    """Make the files and links that hostile paths attack. They may be there: a call that another has disturbed runs twice."""
    (folder / "harmless").write_text("harmless")
    (folder / "inside").mkdir(exist_ok=True)
    for name, target in LINKS.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(target)


def lay_files_here() -> str:
    """Make the files and links that hostile paths attack, in the folder of the call."""
    lay_files(Path.cwd())
    return "laid"


def misbehave(how: str) -> Any:
    """Do what a hostile call might make a tool do."""
    return (HOW.get(how) or globals()[f"_{how}"])()


def _remove_folder() -> str:
    shutil.rmtree(Path.cwd())
    return "removed"


def _closed_folders() -> str:
    outer = Path(f"closed-{os.urandom(8).hex()}")
    inner = outer / "inner"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    inner.chmod(0)
    outer.chmod(0)
    return "closed"


def _link_to_given() -> str:
    Path("link").symlink_to(Path("..").resolve() / "given")
    Path("folder").symlink_to(Path("..").resolve())
    return "linked"


# --- outputs


def _deep() -> Any:
    value: Any = 0
    for _ in range(100_000):
        value = [value]
    return value


def _deep_beyond_limit() -> Any:
    sys.setrecursionlimit(10**6)
    value: Any = 0
    for _ in range(20_000):
        value = [value]
    return value


def _circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


class _Liar(str):
    def __len__(self) -> int:
        return 1


# --- ends


def _terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def _interrupt_self() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def _recursion() -> int:
    return _recursion() + 1


def _raise_without_message() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise Silent


class _Unsliceable(str):
    def __getitem__(self, key: object) -> str:
        raise RuntimeError


class OddlySaidError(Exception):
    def __str__(self) -> str:
        return _Unsliceable("odd")


def _raise_odd_message() -> None:
    raise OddlySaidError


def _raise_long() -> None:
    raise ValueError("x" * 10_000_000)


def _raise_base() -> None:
    raise BaseException("base")


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


def _raise_stop() -> None:
    raise StopIteration


# --- hangs


def _busy() -> None:
    while True:
        pass


def _ignore_signals() -> None:
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue
    time.sleep(60)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(60)


def _stop_everybody() -> None:
    """Stop every process of this user again and again, the one that comes to kill them included."""
    assert os.getuid() >= 1000, "this would stop the tests"
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            while True:
                os.kill(-1, signal.SIGSTOP)
    time.sleep(60)


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _join_forever() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()


def _child_holds_socket() -> None:
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os._exit(0)


def _child_of_sleeper() -> None:
    subprocess.Popen(["sleep", "60"])
    time.sleep(60)


def _escaped_child() -> None:
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    time.sleep(60)


def _escaped_grandchild() -> None:
    _daemon()
    time.sleep(60)


def _reader_of_requests() -> None:
    while True:
        os.read(SOCKET, 1)


# --- what is left behind


def _daemon() -> int:
    """A process that has left group, session and parents behind."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            time.sleep(60)
        else:  # the daemon might be killed before it can write
            os.write(writer, struct.pack("i", daemon))
        os._exit(0)
    os.wait()
    return int(struct.unpack("i", os.read(reader, 4))[0])


def _stranger() -> int:
    """A process that becomes the child of another process than the worker."""
    ctypes.CDLL(None).prctl(36, 0)  # PR_SET_CHILD_SUBREAPER
    return _daemon()


def _forked_worker() -> str:
    """The child of a fork returns, too."""
    child = os.fork()
    if child == 0:
        return "child"
    os.waitpid(child, 0)
    return "parent"


def _forked_worker_that_raises() -> str:
    child = os.fork()
    if child == 0:
        raise RuntimeError("child")
    os.waitpid(child, 0)
    return "parent"


def _many_background_children() -> int:
    for _ in range(20):
        subprocess.Popen(["sleep", "60"])
    return 20


def _zombies() -> int:
    for _ in range(10):
        if os.fork() == 0:
            os._exit(0)
    return 10


def _thread_left() -> str:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return "left"


def _joined_threads() -> int:
    with ThreadPoolExecutor(4) as threads:
        return sum(threads.map(len, ["a", "b"]))


def _change_everything() -> str:
    os.chdir("/")
    os.umask(0)
    os.environ["PATH"] = "/nowhere"
    os.environ["NEW"] = "1"
    sys.setrecursionlimit(50_000)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return "changed"


def _limits() -> list[object]:
    return [
        os.getpriority(os.PRIO_PROCESS, 0),
        sorted(os.sched_getaffinity(0)),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    ]


def _leave_processor() -> str:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return "changed"


def _timers() -> str:
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
    signal.setitimer(signal.ITIMER_PROF, 0.001)
    for number in (signal.SIGUSR1, signal.SIGVTALRM, signal.SIGPROF):
        signal.signal(number, lambda *_: os._exit(3))
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    return "changed"


def _signal_handlers() -> str:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return "changed"


def _print() -> str:
    print("x" * 100_000)
    print("y", file=sys.stderr)
    os.write(1, b"z" * 100_000)
    return "printed"


def _close_output() -> str:
    sys.stdout.close()
    os.close(1)
    return "closed"


# --- bombs


def _fork_bomb() -> int:
    """At most 40 forks."""
    count = 0
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
    return count


def _thread_bomb() -> int:
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return 200


def _slow_memory_bomb() -> int:
    held = []
    while True:
        held.append(bytearray(2**24))


def _file_bomb() -> int:
    with Path("bomb").open("wb") as file:
        for _ in range(100):
            file.write(bytes(2**20))
            file.flush()
    return 100


def _sparse_file_bomb() -> None:
    with Path("sparse").open("wb") as file:
        file.truncate(2**40)


def _descriptor_bomb() -> int:
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(10_000)]
    return len(held)


# --- other processes, and what belongs to the program


def _mount() -> None:
    if ctypes.CDLL(None, use_errno=True).mount(b"none", b".", b"tmpfs", 0, None):
        raise PermissionError(ctypes.get_errno(), "mount")


def _trace_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, os.getppid(), None, None):
        raise PermissionError(ctypes.get_errno(), "ptrace")


# --- what is written to the executor


def _forge() -> None:
    content = b"\0" * 8 + b"\x01" + b'"forged"'
    os.write(SOCKET, struct.pack(">I", len(content)) + content)


def _huge_frame() -> str:
    os.write(SOCKET, struct.pack(">I", 2**32 - 1))
    time.sleep(60)
    return "written"


def _flood() -> str:
    os.write(SOCKET, struct.pack(">I", 50_000))
    while True:
        os.write(SOCKET, b"x" * 65536)


def _drip() -> str:
    os.write(SOCKET, struct.pack(">I", 50_000))
    while True:
        os.write(SOCKET, b"x")
        time.sleep(0.01)


def _shut_socket() -> str:
    socket.socket(fileno=os.dup(SOCKET)).shutdown(socket.SHUT_WR)
    return "closed"


def _pass_descriptors() -> str:
    with socket.socket(fileno=os.dup(SOCKET)) as connection:
        rights = array.array("i", [0, 1, 2])
        connection.sendmsg([b"\0\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    return "passed"


# --- what is written to the executor after the call


def _late_writer() -> str:
    def write() -> None:
        time.sleep(0.05)
        os.write(SOCKET, b"garbage")

    threading.Thread(target=write, daemon=True).start()
    return "left"


def _late_raw_thread() -> str:
    _thread.start_new_thread(lambda: (time.sleep(0.2), _forge()), ())
    return "left"


def _late_process() -> str:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.02)
            _forge()
        os._exit(0)
    return "left"


def _in_the_next_call(write: Any) -> str:
    """Every call begins with `os.chdir`. An audit hook cannot be removed."""
    sys.addaudithook(lambda event, _: write() if event == "os.chdir" else None)
    return "left"


def _late_error() -> str:
    content = bytes(8) + b"\0" + b'["WorkerLostError", "forged"]'
    return _in_the_next_call(lambda: os.write(SOCKET, struct.pack(">I", len(content)) + content))


def _then(said: str, act: Callable[..., Any], *arguments: Any) -> Callable[[], str]:
    """Do this, and say so if the call is still alive."""
    return lambda: (act(*arguments), said)[1]


HOW: dict[str, Callable[[], Any]] = {
    # outputs
    "long_text": lambda: "x" * 10_000_000,
    "many_items": lambda: list(range(200_000)),
    "wide_text": lambda: "\u20ac" * 50_000,  # 6 bytes each as JSON
    "infinity": lambda: {"x": -float("inf")},
    "bytes": lambda: b"x",
    "tuple_keys": lambda: {(1, 2): 3},
    "generator": lambda: (i for i in range(3)),
    "huge_integer": lambda: 10**10_000,
    "liar": lambda: _Liar("x" * 1_000_000),
    # ends
    "sys_exit": lambda: sys.exit(0),
    "os_exit": lambda: os._exit(0),
    "os_exit_7": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "kill_self": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_group": lambda: os.killpg(0, signal.SIGKILL),
    "replace_program": lambda: os.execv("/bin/true", ["true"]),
    # hangs
    "sleep": lambda: time.sleep(60),
    "busy_in_c": lambda: sum(range(10**12)),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "read_input": lambda: sys.stdin.read(),
    # what is left behind
    "background_child": lambda: subprocess.Popen(["sleep", "60"], start_new_session=True).pid,
    # bombs
    "memory_bomb": lambda: len(bytearray(2**33)),
    "private_map_bomb": lambda: len(mmap.mmap(-1, 2**33, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)),
    # other processes, and what belongs to the program
    "kill_parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "stop_parent": lambda: os.kill(os.getppid(), signal.SIGSTOP),
    "become_root": lambda: os.setuid(0),
    "read_shadow": lambda: Path("/etc/shadow").read_text(),
    "read_parent_memory": lambda: Path(f"/proc/{os.getppid()}/mem").read_text(),
    "read_parent_environment": lambda: Path(f"/proc/{os.getppid()}/environ").read_text(),
    "write_etc": lambda: Path("/etc/owned").write_text("x"),
    "remove_own_folder": lambda: Path.cwd().rmdir(),
    "change_root": lambda: os.chroot("."),
    "raise_priority": lambda: os.nice(-5),
    # what is written to the executor after the call
    "late_hook": lambda: _in_the_next_call(_forge),
    "late_garbage": lambda: _in_the_next_call(lambda: os.write(SOCKET, b"\xff" * 100)),
    "late_part_of_a_frame": lambda: _in_the_next_call(lambda: os.write(SOCKET, struct.pack(">I", 50_000))),
    # and goes on
    "lower_priority": _then("changed", os.nice, 1),
    "lower_limit": _then("changed", resource.setrlimit, resource.RLIMIT_NOFILE, (40, 40)),
    "raise_limits": _then("raised", resource.setrlimit, resource.RLIMIT_NPROC, (10**6, 10**6)),
    # `threading` does not know this thread
    "raw_thread_left": _then("left", _thread.start_new_thread, time.sleep, (60,)),
    # other bytes could begin like a frame that never ends
    "garbage": _then("written", os.write, SOCKET, random.Random(1).randbytes(1000)),
    "zeros": _then("written", os.write, SOCKET, bytes(10_000)),
    "close_socket": _then("closed", os.close, SOCKET),
    "fake_frame": _then("written", _forge),
}
"""What needs a single expression. What needs more is a function above, with its name behind `_`."""
