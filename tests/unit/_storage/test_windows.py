"""Checkpoints on Windows, imitated: it opens no folder, removes and renames no open file, and has no `pread`, fork or locks."""

import os
import pathlib
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo import GRPOTrainer, GRPOWarning, load_weights
from grpo._storage import lock
from grpo.checkpoint import best_checkpoint, read_checkpoint
from tests.support.policies import TablePolicy
from tests.support.trainers import state_of, trainer_of


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
    monkeypatch.setattr(lock, "fcntl", None)
    monkeypatch.setattr(pathlib, "WindowsPath", pathlib.PosixPath)
    monkeypatch.setattr(shutil, "_use_fd_functions", False)
    monkeypatch.setattr(os, "name", "nt")


def run_of(folder: Path, num_iterations: int) -> GRPOTrainer:
    trainer = trainer_of(TablePolicy(["a", "b"]), seed=0)
    trainer.train(
        ["a", "b"],
        num_iterations=num_iterations,
        eval_states=["a"],
        eval_every=1,
        checkpoint_dir=folder,
        checkpoint_every=1,
        resume="auto",
        progress=False,
    )
    return trainer


@pytest.mark.usefixtures("windows")
@pytest.mark.filterwarnings("ignore:.*this system has no locks:grpo.GRPOWarning")
def test_a_run_saves_resumes_and_replaces_its_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_of(folder, 4)
    resumed = run_of(folder, 5)
    assert sorted(entry.name for entry in folder.iterdir())[-1] == "iteration-00000005"
    assert not list(folder.glob(".*"))
    other = TablePolicy(["a", "b"])
    load_weights(folder, other)
    assert read_checkpoint(best_checkpoint(folder))
    assert state_of(resumed) == state_of(run_of(tmp_path / "whole", 5))
    for _ in range(2):  # the second save replaces the first
        resumed.save_checkpoint(tmp_path / "one")


@pytest.mark.usefixtures("windows")
def test_a_folder_that_cannot_be_locked_is_told(tmp_path: Path) -> None:
    with pytest.warns(GRPOWarning, match="cannot be locked: this system has no locks for files"):
        run_of(tmp_path / "run", 1)
