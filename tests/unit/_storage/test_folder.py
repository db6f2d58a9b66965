"""What a folder of checkpoints keeps, prunes and answers, with failing disks, on several ranks, and in a second thread."""

import errno
import os
import re
import shutil
import threading
import warnings
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from grpo import CheckpointError, ConfigError, GRPOWarning, load_weights
from grpo._ranks.processes import SeveralProcesses
from grpo._storage import files as files_module
from grpo._storage import folder as folder_module
from grpo._storage import manifest as manifest_module
from grpo._storage import opening
from grpo._storage.files import unreadable
from grpo.checkpoint import CheckpointFolder, best_checkpoint, open_checkpoint, read_checkpoint
from tests.support.checkpoint_runs import names_in, small
from tests.support.imitated_ranks import ImitatedRank, on_ranks

pytestmark = pytest.mark.usefixtures("without_type_checks")


def name_of(n: int) -> str:
    return f"iteration-{n:08d}"


def fill(run: Path, scores: dict[int, float | None], keep_last: int = 99) -> None:
    for n, score in scores.items():
        CheckpointFolder(run, keep_last).save(small(n), iteration=n, score=score)


def test_unfinished_iterations_have_names_that_sort_in_between(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, 9) as folder:
        for iteration, update, name in [
            (10, None, "iteration-00000010"),
            (10, 3, "iteration-00000010-update-0003"),
            (10, 12, "iteration-00000010-update-0012"),
            (11, None, "iteration-00000011"),
        ]:
            assert folder.save(small(iteration), iteration=iteration, update=update, score=None) == tmp_path / name
            assert folder.newest() == tmp_path / name
            assert folder.has(iteration, update)
            assert open_checkpoint(tmp_path, None).path == tmp_path / name
        assert not folder.has(11, 0)
        assert not folder.has(10, 4)
        assert not folder.has(9)
    assert (names_in(tmp_path), len(names_in(tmp_path))) == (sorted(names_in(tmp_path)), 4)


def test_unfinished_iterations_count_among_the_newest(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, 2) as folder:
        for iteration, update in [(1, None), (1, 5), (2, None), (2, 1)]:
            folder.save(small(iteration), iteration=iteration, update=update, score=None)
    assert names_in(tmp_path) == ["iteration-00000002", "iteration-00000002-update-0001"]


def test_of_equal_scores_the_newest_is_the_best(tmp_path: Path) -> None:
    fill(tmp_path, {1: 0.5, 2: 0.5, 3: -1.0})
    assert best_checkpoint(tmp_path).name == name_of(2)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_a_manifest_that_cannot_be_read_for_a_moment_keeps_its_checkpoint(tmp_path, monkeypatch, number):
    """Iteration 2 is the best, and its manifest fails while iteration 5 is saved. The save after it prunes as usual."""
    run = tmp_path / errno.errorcode[number]
    fill(run, {1: 0.0, 2: 9.0, 3: 1.0, 4: 2.0})
    real = manifest_module.opened

    def failing(folder: Path, name: str) -> Any:
        if folder.name == name_of(2):
            raise error_of_disk(folder, number)
        return real(folder, name)

    monkeypatch.setattr(manifest_module, "opened", failing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GRPOWarning)
        fill(run, {5: 0.5}, keep_last=2)
    monkeypatch.undo()
    assert name_of(2) in names_in(run)
    assert best_checkpoint(run).name == name_of(2)
    fill(run, {6: 0.5}, keep_last=2)
    assert names_in(run) == [name_of(2), name_of(5), name_of(6)]


@pytest.mark.parametrize("file", ["manifest.json", "rank-0/state.json", "rank-0/tensors.safetensors"])
def test_the_best_checkpoint_is_verified_and_others_are_named(tmp_path, file):
    """One flipped bit in any file of the best, and in a manifest whose score nobody can know then."""
    run = tmp_path / file.replace("/", "-")
    fill(run, {1: 3.0, 2: 9.0, 3: 5.0})
    damaged = run / name_of(2) / file
    data = bytearray(damaged.read_bytes())
    data[-8] ^= 1
    damaged.write_bytes(data)
    with pytest.warns(GRPOWarning, match=rf"{name_of(3)} has the highest score of the intact .*{name_of(2)}/{file}"):
        assert best_checkpoint(run).name == name_of(3)
    (damaged.parent / damaged.name).write_bytes(b"")
    for other in (1, 3):
        (run / name_of(other) / "rank-0" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=rf"^No checkpoint with a score in .*{name_of(2)}/{file}"):
        best_checkpoint(run)


@pytest.mark.parametrize(
    ("ask", "answer", "kinds"),
    [
        (lambda run: best_checkpoint(run).name, name_of(2), {"read", "iterdir", "is_symlink"}),
        (lambda run: CheckpointFolder(run, 9).newest().name, name_of(3), {"read", "iterdir", "is_symlink"}),
        (lambda run: CheckpointFolder(run, 9).has(3), True, {"read", "is_symlink"}),
        (lambda run: CheckpointFolder(run, 9).require_at_most(3), None, {"read", "iterdir"}),
    ],
    ids=["best", "newest", "has", "require at most"],
)
def test_a_disk_that_fails_for_a_moment_changes_no_answer(ask, answer, kinds, tmp_path, monkeypatch) -> None:
    """Each read of a file, of the list of files of a checkpoint, and of what a checkpoint is, fails once."""
    fill(tmp_path, {1: 3.0, 2: 9.0, 3: 5.0})
    calls, failing = list[str](), 0

    def calling(what: str) -> None:
        calls.append(what)
        if len(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    class Failing(FileIO):
        def readinto(self, buffer: Any) -> Any:
            calling("read")
            return super().readinto(buffer)

        def read(self, size: int | None = -1) -> Any:
            data = bytearray(size or 0)
            return bytes(data[: self.readinto(data)])

    monkeypatch.setattr(files_module, "FileIO", Failing)
    for name in ("iterdir", "is_symlink"):
        real = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda path, name=name, real=real: (calling(name), real(path))[1])
    assert ask(tmp_path) == answer
    without = [*calls]
    assert {*without} == kinds
    for failing in range(1, len(without) + 1):  # `calling` reads it
        calls.clear()
        assert ask(tmp_path) == answer
        assert (len(calls) > len(without)) == (without[failing - 1] != "iterdir"), "a read is repeated"


def test_a_checkpoint_that_has_lost_its_manifest_is_damaged_and_other_folders_are_none(tmp_path, monkeypatch) -> None:
    fill(tmp_path, {1: 1.0, 2: 2.0})
    (tmp_path / name_of(2) / "manifest.json").unlink()
    for folder in ("logs/rank-0", "lost+found"):
        (tmp_path / folder).mkdir(parents=True)
    real = Path.iterdir

    def of_others(path: Path) -> Any:
        if path.name == "lost+found":
            raise PermissionError
        return real(path)

    monkeypatch.setattr(Path, "iterdir", of_others)
    for name in (name_of(2), "copy"):
        for read in (read_checkpoint, best_checkpoint):
            with pytest.warns(GRPOWarning, match=f"{name}/manifest.json") as told:
                read(tmp_path)
            assert not re.search("logs|lost", str(told[0].message))
        (tmp_path / name).rename(tmp_path / "copy")
    assert open_checkpoint(tmp_path, None).iteration == 1
    (tmp_path / name_of(1) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* has an intact manifest"):
        CheckpointFolder(tmp_path, 1).newest()


def error_of_disk(folder: Path, number: int) -> Exception:
    """What `opened` raises for a failing disk."""
    return unreadable(folder / "manifest.json", OSError(number, os.strerror(number)))


def test_a_damaged_manifest_is_kept_and_gives_no_permission_to_delete(tmp_path: Path) -> None:
    fill(tmp_path, {1: 0.0, 2: 9.0, 3: 1.0})
    (tmp_path / name_of(2) / "manifest.json").write_bytes(b"{")
    fill(tmp_path, {4: 0.5, 5: 0.25}, keep_last=1)
    assert names_in(tmp_path) == [name_of(n) for n in (2, 3, 5)]  # unreadable, the best of the others, the newest


@pytest.mark.parametrize("what", ["rename", "listdir", "scandir"])
def test_a_failure_to_prune_warns_once_and_does_not_end_the_run(what, tmp_path: Path, monkeypatch) -> None:
    prune = CheckpointFolder._prune

    def prune_on_a_bad_disk(self: Any, written: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, what, Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
            prune(self, written)

    fill(tmp_path, {1: 0.0, 2: 0.0})
    with CheckpointFolder(tmp_path, 1) as folder, monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "_prune", prune_on_a_bad_disk)
        with pytest.warns(GRPOWarning, match=rf"Old checkpoints in {tmp_path} could not be deleted: .*Input/output"):
            folder.save(small(3), iteration=3, score=0.0)
        folder.save(small(4), iteration=4, score=0.0)  # a second warning would be an error
        assert read_checkpoint(tmp_path)["n"] == 4
        patch.undo()
        folder.save(small(5), iteration=5, score=0.0)
    assert names_in(tmp_path) == [name_of(5)]


def test_old_checkpoints_that_can_be_renamed_and_not_removed_are_told_once(tmp_path, monkeypatch) -> None:
    with CheckpointFolder(tmp_path, 1) as folder, monkeypatch.context() as patch:
        folder.save(small(1), iteration=1, score=None)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.warns(GRPOWarning, match=r"Old checkpoints .* could not be deleted: .*\.tmp could be renamed"):
            folder.save(small(2), iteration=2, score=None)
        folder.save(small(3), iteration=3, score=None)  # a second warning would be an error
        patch.undo()
        folder.save(small(4), iteration=4, score=None)
    assert names_in(tmp_path) == [name_of(4)]


def test_an_older_checkpoint_is_read_with_a_warning_that_names_the_newer_one_and_the_damage(tmp_path: Path) -> None:
    for n in (1.0, 2.0):
        CheckpointFolder(tmp_path, 9).save({"parameters": {"w": torch.tensor(n)}}, iteration=int(n), score=None)
    (tmp_path / name_of(2) / "rank-0" / "state.json").write_bytes(b"{")
    message = rf"{name_of(1)} was loaded, because newer .*{name_of(2)}/rank-0/state\.json is damaged: it has 1 bytes"
    with pytest.warns(GRPOWarning, match=message):
        assert read_checkpoint(tmp_path)["parameters"] == {"w": 1}
    weights = {"w": torch.tensor(0.0)}
    with pytest.warns(GRPOWarning, match=message):
        load_weights(tmp_path, SimpleNamespace(get_parameters=lambda: weights))
    assert weights == {"w": 1}


def test_what_a_killed_pruning_left_is_removed(tmp_path: Path) -> None:
    fill(tmp_path, {1: None})
    for name in [f".{name_of(7)}.{'0' * 32}.tmp", f".{name_of(7)}-update-0001.{'0' * 32}.tmp"]:
        shutil.copytree(tmp_path / name_of(1), tmp_path / name)
    (tmp_path / ".iteration-mine.tmp").mkdir()
    fill(tmp_path, {2: None})
    assert names_in(tmp_path) == [".iteration-mine.tmp", name_of(1), name_of(2)]


def test_newest_is_none_only_without_any_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run", 3)
    assert folder.newest() is None
    fill(tmp_path / "run", {1: None, 2: None})
    (tmp_path / "run" / name_of(2) / "manifest.json").write_bytes(b"{")
    assert folder.newest() == tmp_path / "run" / name_of(1)
    assert not folder.has(2)
    (tmp_path / "run" / name_of(1) / "manifest.json").write_bytes(b"{")
    with pytest.raises(
        CheckpointError, match=rf"No checkpoint in {tmp_path / 'run'} has .*{name_of(1)}/manifest\.json"
    ):
        folder.newest()


def test_a_checkpoint_ahead_is_refused_to_the_exact_iteration(tmp_path: Path) -> None:
    fill(tmp_path, {3: None})
    folder = CheckpointFolder(tmp_path, 3)
    folder.require_at_most(3)
    folder.require_at_most(4)
    with pytest.raises(CheckpointError, match="is of iteration 3, and this trainer is at 2"):
        folder.require_at_most(2)
    (tmp_path / name_of(3) / "rank-0" / "state.json").write_bytes(b"x")
    folder.require_at_most(2)  # damaged: a run may write it again


def test_the_newest_intact_checkpoint_ahead_is_named_and_no_other_is_read(tmp_path, monkeypatch) -> None:
    fill(tmp_path, dict.fromkeys(range(1, 6)), keep_last=9)
    CheckpointFolder(tmp_path, 9).save(small(6), iteration=5, update=2, score=None)
    read: list[str] = []
    real = opening.require_hash
    monkeypatch.setattr(opening, "require_hash", lambda f, name, r: (read.append(f.name), real(f, name, r))[1])
    folder = CheckpointFolder(tmp_path, 9)
    for newest in (f"{name_of(5)}-update-0002", name_of(5), name_of(4)):
        read.clear()
        place = f"{newest} is of iteration {int(newest[10:18])}"
        message = rf'{place}(?: and 2 updates)?, and .* with train\(\.\.\., resume="auto"\), delete it'
        with pytest.raises(CheckpointError, match=message):
            folder.require_at_most(2)
        assert set(read) == {newest}
        (tmp_path / newest / "rank-0" / "state.json").write_bytes(b"x")  # its size tells that it is damaged
    read.clear()
    folder.require_at_most(3)
    assert read == []


def test_a_checkpoint_ahead_that_the_disk_does_not_give_is_not_taken_for_damaged(tmp_path, monkeypatch) -> None:
    fill(tmp_path, {3: None})

    def failing(folder: Path, name: str) -> Any:
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        raise error_of_disk(folder, errno.EIO) from error

    monkeypatch.setattr(manifest_module, "opened", failing)
    with pytest.raises(CheckpointError, match=r"Cannot read .*To replace it, delete it first") as caught:
        CheckpointFolder(tmp_path, 3).require_at_most(2)
    assert type(caught.value) is CheckpointError


def test_ranks_save_prune_and_answer_together(tmp_path: Path) -> None:
    def run(engine: ImitatedRank) -> Any:
        answers: list[Any] = []
        with CheckpointFolder(tmp_path, 2, engine) as folder:
            for n, score in [(1, 5.0), (2, float("nan")), (3, 1.0), (4, 0.0)]:
                answers.append(folder.save(small(10 * n + engine.rank), iteration=n, score=score))
            answers += [folder.newest(), folder.has(4), folder.has(2), folder.has(1)]
            folder.require_at_most(4)
        return answers

    first, second = on_ranks(2, run)
    assert (first, first[-4:]) == (second, [tmp_path / name_of(4), True, False, True])
    assert names_in(tmp_path) == [name_of(n) for n in (1, 3, 4)]


def test_all_ranks_take_the_older_checkpoint_if_one_rank_has_a_damaged_file(tmp_path: Path) -> None:
    def save(engine: ImitatedRank) -> None:
        for n in (1, 2, 3):
            CheckpointFolder(tmp_path, 9, engine).save(small(10 * n + engine.rank), iteration=n, score=None)

    on_ranks(2, save)
    (tmp_path / name_of(3) / "rank-1" / "tensors.safetensors").write_bytes(b"cut")
    (tmp_path / name_of(2) / "rank-0" / "state.json").unlink()

    def load(engine: ImitatedRank) -> Any:
        checkpoint = open_checkpoint(tmp_path, engine)
        return checkpoint.iteration, checkpoint.load(checkpoint.state)["n"], checkpoint.skipped

    (first, n0, skipped), (second, n1, also) = on_ranks(2, load)
    assert (first, n0, second, n1, skipped) == (1, 10, 1, 11, also)
    assert [("rank-1/tensors" in skipped[0]), ("rank-0/state" in skipped[1]), len(skipped)] == [True, True, 2]
    for error in on_ranks(2, lambda engine: open_checkpoint(tmp_path / name_of(3), engine)):
        assert "rank-1/tensors.safetensors is damaged" in str(error)


def test_an_asynchronous_save_needs_a_single_process(tmp_path: Path) -> None:
    class Two(SeveralProcesses):
        num_ranks = 2

    with pytest.raises(ConfigError, match="needs a single process; there are 2 ranks"):
        CheckpointFolder(tmp_path, 3, Two(), asynchronous=True)


def test_an_asynchronous_save_holds_the_state_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waits until everything in the state has been changed."""
    changed, real = threading.Event(), folder_module.commit

    def slow(*arguments: Any) -> None:
        assert changed.wait(60)
        real(*arguments)

    monkeypatch.setattr(folder_module, "commit", slow)
    shared = torch.zeros(1000)
    state: dict[str, Any] = {"n": [1, {"deep": 2}], "t": shared, "view": shared.view(10, 100), "a": np.zeros(3)}
    with CheckpointFolder(tmp_path, 3, asynchronous=True) as folder:
        path = folder.save(state, iteration=1, score=None)
        assert not path.exists()
        shared.fill_(7)
        state["a"][:] = 7
        state["n"][1]["deep"] = 7
        changed.set()
        assert folder.has(1)  # waits
        found = read_checkpoint(path)
        assert (found["n"], found["t"].sum(), found["a"].sum()) == ([1, {"deep": 2}], 0, 0)
        assert found["view"].shape == (10, 100)
        assert (path / "rank-0" / "tensors.safetensors").stat().st_size < 2 * 4000 + 1000
        assert folder.newest() == path


FULL = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: folder.save(small(2), iteration=2, score=None),
        lambda folder: folder.has(1),
        lambda folder: folder.newest(),
        lambda folder: folder.require_at_most(1),
        lambda folder: folder.__exit__(None, None, None),
    ],
)
def test_the_error_of_an_asynchronous_save_is_raised_by_the_next_call(call, tmp_path: Path, monkeypatch) -> None:
    folder = CheckpointFolder(tmp_path, 3, asynchronous=True).__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", FULL)
        folder.save(small(1), iteration=1, score=None)
        folder._pending.exception(60)  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"iteration-00000001: .*No space left"):
        call(folder)
    folder.__exit__(None, None, None)  # the error was raised once
    assert names_in(tmp_path) == []


def test_an_error_of_the_block_carries_the_error_of_the_asynchronous_save(tmp_path: Path, monkeypatch) -> None:
    def interrupted() -> None:
        with CheckpointFolder(tmp_path, 3, asynchronous=True) as folder:
            monkeypatch.setattr(os, "fsync", FULL)
            folder.save(small(1), iteration=1, score=None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()
    assert "No space left" in caught.value.__notes__[0]
    assert names_in(tmp_path) == []


def test_bad_weights_stop_an_asynchronous_save_at_once(tmp_path: Path) -> None:
    weights = torch.tensor([float("nan")], requires_grad=True)
    with CheckpointFolder(tmp_path, 3, asynchronous=True) as folder:
        with pytest.raises(CheckpointError, match="finite weights"):
            folder.save({"parameters": {"w": weights}}, iteration=1, score=None)
        with pytest.raises(CheckpointError, match="which a checkpoint cannot hold"):
            folder.save({"x": object()}, iteration=1, score=None)
        assert folder.newest() is None
