"""Saves and loads in child processes whose k-th file call is killed or fails, by the injection of strace.

    python -m tests.support.storage_faults FOLDER SCENARIO FAULT

imports everything once, forks one child per call, and prints one JSON line per fault: the scenario, k, the call, and what went
wrong. An empty list says that everything held. `FAULT` is `SIGKILL` or the name of an error, such as `ENOSPC`.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo import CheckpointError
from grpo.checkpoint import CheckpointFolder, best_checkpoint, read_checkpoint, write_checkpoint
from tests.support.policies import digest

CALLS = [
    "openat", "close", "write", "pwrite64", "writev", "read", "pread64", "fsync", "fdatasync", "ftruncate", "lseek",
    "fcntl", "rename", "renameat", "renameat2", "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "link", "linkat",
    "symlink", "newfstatat", "statx", "fstat", "lstat", "stat", "access", "faccessat2", "getdents64", "readlink", "chmod",
    "fchmod",
]  # fmt: skip
"""File calls that a save or a load may make. Those that it does not make cost one run each."""
ALLOW_ANY_TRACER = (0x59616D61, -1)
"""`prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)`: where tracing is restricted, a process may allow it."""
SECONDS = 30


def state_of(n: int) -> dict[str, Any]:
    """A state whose every part names the same number, so that a mixture of two states is found."""
    return {"n": n, "parameters": {"w": torch.full((50,), float(n))}, "more": [torch.full((60_000,), n), {"n": n}]}


def number_of(state: dict[str, Any]) -> int:
    """The number of a whole state. A mixture raises."""
    numbers = {state["n"], state["more"][1]["n"], *state["parameters"]["w"].tolist(), *state["more"][0].tolist()}
    assert len(numbers) == 1, f"a mixture of {numbers}"
    assert digest(state) == digest(state_of(int(state["n"])))
    return int(numbers.pop())


# Scenarios: what is there, what the child does, and which numbers may be read after it


def prepare_run(root: Path) -> None:
    for n in (1, 2):
        CheckpointFolder(root / "run", 2).save(state_of(n), iteration=n, score=-float(n))


def save_in_run(root: Path) -> None:
    with CheckpointFolder(root / "run", 1) as folder:
        folder.save(state_of(3), iteration=3, score=0.0)


def prepare_same(root: Path) -> None:
    write_checkpoint(root / "run", state_of(2), iteration=2)


def save_same(root: Path) -> None:
    write_checkpoint(root / "run", state_of(3), iteration=3)


def load(root: Path) -> None:
    """The newest checkpoint has the lower score. If another is taken, a warning names the one that is left out."""
    run = root / "run"
    for right, choose in ((2, lambda: run), (1, lambda: best_checkpoint(run))):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = number_of(read_checkpoint(choose()))
        is_named = any(f"iteration-{right:08d}" in str(warning.message) for warning in told)
        assert found == right or (found in (1, 2) and is_named), f"{found} was taken in place of {right} without a word"


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "save and prune": (prepare_run, save_in_run),
    "replace": (prepare_same, save_same),
    "load": (prepare_run, load),
}


def problems_after(root: Path, scenario: str, code: int) -> list[str]:
    """What is wrong after the child: the newest commit must load, and the next save must leave nothing else."""
    problems = []
    if code not in (0, 3, -9):
        problems.append(f"the child ended with {code}")
    try:
        found = number_of(read_checkpoint(root / "run"))
        if found not in ((3,) if code == 0 and scenario != "load" else (2, 3)):
            problems.append(f"{found} was loaded after the child ended with {code}")
        again = 4
        if scenario == "replace":
            write_checkpoint(root / "run", state_of(again), iteration=again)
            expected = ["run", "run/manifest.json"]
        else:
            CheckpointFolder(root / "run", 1).save(state_of(again), iteration=again, score=1.0)
            expected = ["run", f"run/iteration-{again:08d}", f"run/iteration-{again:08d}/manifest.json"]
        left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if "rank-" not in path.name)
        left = [name for name in left if "/rank-" not in name]
        ranks = list(root.rglob("rank-*"))
        if left != expected or len(ranks) != 1:
            problems.append(f"left behind: {left}, {[path.name for path in ranks]}")
        if number_of(read_checkpoint(root / "run")) != again:
            problems.append("the next save is not what is loaded")
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    return problems


def run_child(action: Callable[[Path], None], root: Path, name: str, fault: str, k: int, log: Path) -> tuple[int, str]:
    """Run `action` in a child whose k-th call of one name meets the fault.

    Returns:
        The child's exit code, and the call as strace shows it. Empty: there is no k-th call.
    """
    ready = os.pipe()
    child = os.fork()
    if child == 0:
        code = 4
        try:
            ctypes.CDLL(None).prctl(*ALLOW_ANY_TRACER, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            os.write(ready[1], b"x")
            signal.sigwait([signal.SIGUSR1])  # no file call
            action(root)
            code = 0
        except CheckpointError:
            code = 3
        except BaseException as error:
            traceback.print_exception(error)
        finally:
            os._exit(code)
    os.read(ready[0], 1)
    what = "signal=SIGKILL" if fault == "SIGKILL" else f"error={fault}"
    options = "-o", log, "-e", f"trace={name}", "-e", f"inject={name}:{what}:when={k}", "-p", str(child)
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + SECONDS
    while "TracerPid:\t0" in Path(f"/proc/{child}/status").read_text():
        assert tracer.poll() is None, f"strace failed: {tracer.stderr.read() if tracer.stderr else ''}"
        assert time.monotonic() < deadline, "strace does not attach"
        time.sleep(0.001)
    os.kill(child, signal.SIGUSR1)
    _, status = os.waitpid(child, 0)
    tracer.wait(SECONDS)
    for descriptor in ready:
        os.close(descriptor)
    if tracer.stderr is not None:
        tracer.stderr.close()
    lines = log.read_text().splitlines()
    if fault == "SIGKILL":
        was_hit = os.WIFSIGNALED(status)
        return (-9 if was_hit else os.WEXITSTATUS(status)), (lines[-2:][0] if was_hit else "")
    return os.waitstatus_to_exitcode(status), next((line for line in lines if "(INJECTED)" in line), "")


def main(folder: Path, scenario: str, fault: str) -> None:
    warnings.simplefilter("ignore")  # a failure to prune, or to lock, is told by a warning
    prepare, action = SCENARIOS[scenario]
    root = folder / "disk"
    prepared(root, prepare)
    action(root)  # imports what is imported late
    for name in CALLS:
        for k in range(1, 1000):
            prepared(root, prepare)
            code, call = run_child(action, root, name, fault, k, folder / "log")
            if not call:
                assert code == 0, f"without a fault, the child ended with {code}"
                break
            print(json.dumps([scenario, k, call[:150], problems_after(root, scenario, code)]), flush=True)


def prepared(root: Path, prepare: Callable[[Path], None]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    prepare(root)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
