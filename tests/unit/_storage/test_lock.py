"""The lock on a folder: a second writer is told who holds it, and a dead holder's lock is taken over."""

import errno
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from grpo import CheckpointError, GRPOTrainer, GRPOWarning, load_weights
from grpo._storage import lock as lock_module
from grpo._storage.lock import FolderLock
from grpo.checkpoint import CheckpointFolder, best_checkpoint, read_checkpoint, write_checkpoint
from tests.support.checkpoint_runs import names_in, small
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.policies import TablePolicy
from tests.support.trainers import state_of, trainer_of

ROOT = Path(__file__).resolve().parents[3]
HOLD = """
    import sys
    from pathlib import Path
    sys.modules["torch"] = None  # the lock alone is imported, which is quick
    import importlib.util
    def module(name, path):
        spec = importlib.util.spec_from_file_location(name, path)
        loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded
    sys.modules["grpo"] = type(sys)("grpo")
    module("grpo.errors", "grpo/errors.py")
    FolderLock = module("grpo._storage.lock", "grpo/_storage/lock.py").FolderLock
    with FolderLock(Path(sys.argv[1]) / ".lock", Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
"""


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_who_writes_and_the_folder_is_free_when_that_one_is_killed(tmp_path: Path) -> None:
    with held_by_another_process(tmp_path) as process:
        where = rf"{process.pid} on {socket.gethostname()}"
        message = rf"{tmp_path} is in use by process {where}, which started to write at 2"
        with pytest.raises(CheckpointError, match=message), CheckpointFolder(tmp_path, 3):
            raise AssertionError("the folder is locked")
        with pytest.raises(CheckpointError, match="Wait until it has ended, stop it, or choose another path"):
            CheckpointFolder(tmp_path, 3).save(small(1), iteration=1, score=None)
        assert names_in(tmp_path) == [".lock"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert names_in(tmp_path) == [".lock"]
    with CheckpointFolder(tmp_path, 3) as folder:
        folder.save(small(1), iteration=1, score=None)
        assert names_in(tmp_path) == [".lock", "iteration-00000001"]
    assert names_in(tmp_path) == ["iteration-00000001"]


def test_a_lock_without_a_name_is_respected(tmp_path: Path) -> None:
    with held_by_another_process(tmp_path) as process:
        for contents in [b"", b"{", b"[]", b'{"pid": "x"}']:
            (tmp_path / ".lock").write_bytes(contents)
            with pytest.raises(CheckpointError, match="in use by another process, which has not written its name yet"):
                FolderLock(tmp_path / ".lock", tmp_path).__enter__()
        assert process.poll() is None


def test_the_lock_file_names_its_holder_and_only_the_owner_may_open_it(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("a longer text than the holder's name " * 9)
    with FolderLock(tmp_path / ".lock", tmp_path):
        command = [sys.executable, "-c", "import sys; print(open(sys.argv[1]).read())", tmp_path / ".lock"]
        holder = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert set(holder) == {"host", "pid", "started"}
    assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())
    with FolderLock(tmp_path / ".lock", tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600


def test_two_writers_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "same").symlink_to(tmp_path / "run")
    with CheckpointFolder(tmp_path / "run", 3) as folder:
        for path in (tmp_path / "run", tmp_path / "same", tmp_path / "run" / ".." / "run"):
            with pytest.raises(CheckpointError, match="in use by another writer of this process"):
                CheckpointFolder(path, 3).save(small(1), iteration=1, score=None)
        folder.save(small(2), iteration=2, score=None)
    CheckpointFolder(tmp_path / "same", 3).save(small(3), iteration=3, score=None)
    assert names_in(tmp_path / "run") == ["iteration-00000002", "iteration-00000003"]


def test_a_forked_child_neither_holds_nor_releases_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / ".lock", tmp_path)
    with lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                FolderLock(tmp_path / ".lock", tmp_path).__enter__()
            except CheckpointError as error:
                code = 0 if f"process {os.getppid()} " in str(error) else 2
            finally:
                lock.__exit__(None, None, None)
                os._exit(code)
        assert (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), names_in(tmp_path)) == (0, [".lock"])
        with pytest.raises(CheckpointError, match="another writer of this process"):
            FolderLock(tmp_path / ".lock", tmp_path).__enter__()
    assert names_in(tmp_path) == []


def test_an_error_in_the_block_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), CheckpointFolder(tmp_path, 3):
        raise ZeroDivisionError
    assert names_in(tmp_path) == []
    with CheckpointFolder(tmp_path, 3):
        pass


def test_threads_take_turns_at_one_path(tmp_path: Path) -> None:
    """Each of four threads saves until it succeeds; the file is removed and made again all the time."""
    refused = []

    def save(n: int) -> None:
        for _ in range(10_000):
            try:
                write_checkpoint(tmp_path / "same", small(n), iteration=n)
                return
            except CheckpointError as error:
                refused.append(str(error))
        raise AssertionError("never free")

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all("in use by" in message for message in refused)
    assert read_checkpoint(tmp_path / "same")["n"] in range(4)
    assert names_in(tmp_path) == ["same"]


def test_a_file_that_was_removed_while_it_was_opened_is_opened_again(tmp_path, monkeypatch) -> None:
    """Its holder releases the lock between this process's opening and locking of the file."""
    real, removed = lock_module.fcntl.lockf, []

    def lockf(descriptor: int, flags: int) -> None:
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
        real(descriptor, flags)

    monkeypatch.setattr(lock_module.fcntl, "lockf", lockf)
    with FolderLock(tmp_path / ".lock", tmp_path):
        assert (len(removed), names_in(tmp_path)) == (1, [".lock"])
    assert names_in(tmp_path) == []


def test_the_lock_file_of_another_holder_is_not_removed(tmp_path: Path) -> None:
    with FolderLock(tmp_path / ".lock", tmp_path):
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").write_text("of another")
    assert (tmp_path / ".lock").read_text() == "of another"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, None])
def test_file_systems_without_locks_give_a_warning_and_are_used(tmp_path, monkeypatch, number):
    with monkeypatch.context() as patch:
        if number is None:
            patch.setattr(lock_module, "fcntl", None)
        else:
            patch.setattr(lock_module.fcntl, "lockf", Mock(side_effect=OSError(number, os.strerror(number))))
        message = rf"{tmp_path} cannot be locked: .*no locks"
        with pytest.warns(GRPOWarning, match=message), CheckpointFolder(tmp_path, 3) as folder:
            folder.save(small(1), iteration=1, score=None)
        assert names_in(tmp_path) == ["iteration-00000001"]


def test_a_lock_that_cannot_be_taken_is_an_error_that_names_the_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lock_module.fcntl, "lockf", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(CheckpointError, match=rf"Cannot lock {tmp_path} with .*Input/output error"):
        CheckpointFolder(tmp_path, 3).__enter__()
    monkeypatch.undo()
    (tmp_path / ".lock").unlink(missing_ok=True)
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="Cannot lock"):
        CheckpointFolder(tmp_path, 3).__enter__()
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_rank_0_alone_holds_the_lock_and_all_ranks_are_told(tmp_path: Path) -> None:
    def enter(engine: ImitatedRank) -> Any:
        with CheckpointFolder(tmp_path, 3, engine) as folder:
            return folder.save(small(1), iteration=1, score=None)

    with held_by_another_process(tmp_path) as process:
        for error in on_ranks(2, enter):
            assert f"Rank 0: {tmp_path} is in use by process {process.pid}" in str(error)
    assert on_ranks(2, enter) == [tmp_path / "iteration-00000001"] * 2
    assert names_in(tmp_path) == ["iteration-00000001"]


def test_a_save_by_hand_locks_its_path_and_removes_the_lock(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    lock = FolderLock(tmp_path / ".here.lock", tmp_path / "here")
    with lock, pytest.raises(CheckpointError, match=rf"{tmp_path / 'here'} is in use by another writer"):
        write_checkpoint(tmp_path / "here", small(1), iteration=1)
    write_checkpoint(tmp_path / "here", small(1), iteration=1)
    assert names_in(tmp_path) == ["folder", "here"]


# Windows, imitated: it opens no folder, removes and renames no open file, and has no `pread`, fork or locks


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse what Windows refuses."""
    sysconfig.get_config_vars()  # it reads what only a true Windows has, unless it has been called before
    real_open = os.open

    def open_file(path: Any, *flags: Any, **more: Any) -> int:
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *flags, **more)

    def unless_open(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *others: Any, **more: Any) -> Any:
            files = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
            if more.get("dir_fd") is None and any(f"{file}/".startswith(f"{path}/") for file in files):
                raise PermissionError(32, "The file is in use by another process", str(path))
            return change(path, *others, **more)

        return changed

    monkeypatch.setattr(os, "open", open_file)
    for name in ("unlink", "rename", "replace"):
        monkeypatch.setattr(os, name, unless_open(getattr(os, name)))
    monkeypatch.delattr(os, "pread")
    monkeypatch.delattr(os, "fork")
    monkeypatch.setattr(lock_module, "fcntl", None)
    monkeypatch.setattr(pathlib, "WindowsPath", pathlib.PosixPath)
    monkeypatch.setattr(shutil, "_use_fd_functions", False)
    monkeypatch.setattr(os, "name", "nt")


def run_of(folder: Path, num_iterations: int) -> GRPOTrainer:
    trainer = trainer_of(TablePolicy(["a", "b"]), seed=0)
    options = {"checkpoint_dir": folder, "checkpoint_every": 1, "resume": "auto", "progress": False}
    trainer.train(["a", "b"], num_iterations=num_iterations, eval_states=["a"], eval_every=1, **options)
    return trainer


@pytest.mark.usefixtures("windows")
@pytest.mark.filterwarnings("ignore:.*this system has no locks:grpo.GRPOWarning")
def test_a_run_saves_resumes_and_replaces_its_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_of(folder, 4)
    resumed = run_of(folder, 5)
    assert sorted(entry.name for entry in folder.iterdir())[-1] == "iteration-00000005"
    assert not list(folder.glob(".*"))
    load_weights(folder, TablePolicy(["a", "b"]))
    assert read_checkpoint(best_checkpoint(folder))
    assert state_of(resumed) == state_of(run_of(tmp_path / "whole", 5))
    for _ in range(2):  # the second save replaces the first
        resumed.save_checkpoint(tmp_path / "one")
