"""Checkpoints of several ranks: one folder, complete or absent, and replaced without a moment in which neither loads."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import CheckpointError
from grpo._storage import commit as commit_module
from grpo._storage import files as files_module
from grpo.checkpoint import CheckpointFolder, open_checkpoint, read_checkpoint, write_checkpoint
from grpo.errors import ContractError
from tests.support.checkpoint_runs import names_in, small
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.policies import digest

pytestmark = pytest.mark.usefixtures("without_type_checks")


def written(path: Path, n: int, num_ranks: int = 2, **options: Any) -> list[Any]:
    """Each rank saves a state of its own."""
    return on_ranks(
        num_ranks,
        lambda engine: write_checkpoint(path, small(10 * n + engine.rank), iteration=n, engine=engine, **options),
    )


def loaded(path: Path, num_ranks: int = 2) -> list[Any]:
    def load(engine: ImitatedRank) -> Any:
        checkpoint = open_checkpoint(path, engine)
        return checkpoint.load(checkpoint.state)["n"]

    return on_ranks(num_ranks, load)


def test_all_ranks_write_one_folder_with_one_manifest(tmp_path: Path) -> None:
    path = tmp_path / "here"
    assert written(path, 7, 3, score=0.5) == [path] * 3
    assert names_in(tmp_path) == ["here"]
    assert names_in(path) == ["manifest.json", "rank-0", "rank-1", "rank-2"]
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert set(manifest) == {"schema", "iteration", "update", "score", "num_ranks", "files", "sha256"}
    assert [manifest[name] for name in ("schema", "iteration", "update", "score", "num_ranks")] == [5, 7, None, 0.5, 3]
    assert set(manifest["files"]) == {
        f"rank-{rank}/{name}" for rank in range(3) for name in ("state.json", "tensors.safetensors")
    }
    assert loaded(path, 3) == [70, 71, 72]


def test_a_single_process_writes_the_same_layout(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "here", small(1), iteration=0)
    assert names_in(tmp_path / "here") == ["manifest.json", "rank-0"]
    assert names_in(tmp_path / "here" / "rank-0") == ["state.json", "tensors.safetensors"]


def test_any_number_of_ranks_reads_a_checkpoint(tmp_path: Path) -> None:
    """A rank beyond those that wrote begins with the state of one of them, in turn."""
    written(tmp_path / "two", 1, 2)
    write_checkpoint(tmp_path / "one", small(1), iteration=1)
    numbers = {("two", 1): [10], ("two", 2): [10, 11], ("two", 3): [10, 11, 10], ("one", 2): [1, 1]}
    for (path, loads), expected in numbers.items():
        assert loaded(tmp_path / path, loads) == expected, (path, loads)
    assert read_checkpoint(tmp_path / "two")["n"] == 10  # of rank 0


def test_a_rank_that_cannot_write_leaves_the_earlier_checkpoint_on_all_ranks(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = commit_module._write_rank
    for culprit in (0, 1):
        for path, exists in [(tmp_path / f"new {culprit}", False), (tmp_path / f"old {culprit}", True)]:
            with subtests.test(culprit=culprit, exists=exists):
                if exists:
                    written(path, 1)

                def failing(folder: Path, encode: Any, culprit: int = culprit) -> Any:
                    records = real(folder, encode)
                    if folder.name.startswith(f"rank-{culprit}"):
                        raise OSError(28, os.strerror(28))
                    return records

                monkeypatch.setattr(commit_module, "_write_rank", failing)
                errors = written(path, 2)
                monkeypatch.undo()
                assert [type(error) for error in errors] == [CheckpointError] * 2
                assert all(f"Rank {culprit}: Cannot write checkpoint {path}" in str(error) for error in errors)
                assert [name for name in names_in(tmp_path) if name.startswith(".")] == []
                assert path.exists() == exists
                if exists:
                    assert loaded(path) == [10, 11]
                    assert names_in(path) == ["manifest.json", "rank-0", "rank-1"]


def test_ranks_that_do_not_share_a_file_system_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sees another disk: the temporary folder of rank 0 is not there, or its file is not what rank 0 sees."""
    real = commit_module._write_rank

    def elsewhere(folder: Path, encode: Any) -> Any:
        return real(tmp_path / "other disk" / folder.name if folder.name == "rank-1" else folder, encode)

    monkeypatch.setattr(commit_module, "_write_rank", elsewhere)
    for error in written(tmp_path / "here", 1):
        assert re.search(r"Rank 1: checkpoint_dir must lie on a file system that all ranks share", str(error)), error
    (tmp_path / "other disk").mkdir()
    for error in written(tmp_path / "here", 1):
        assert re.search(
            r"all ranks share; a rank wrote rank-1/state.json with \d+ bytes, and rank 0 sees no", str(error)
        )

    def cut(folder: Path, encode: Any) -> Any:
        records = real(folder, encode)
        if folder.name == "rank-1":
            (folder / "state.json").write_bytes(b"x")
        return records

    monkeypatch.setattr(commit_module, "_write_rank", cut)
    for error in written(tmp_path / "here", 1):
        assert "and rank 0 sees 1 bytes" in str(error)
    assert names_in(tmp_path) == ["other disk"]


# Replacing


def test_a_replaced_checkpoint_has_new_folders_and_no_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "here"
    for n, expected in [(1, ["rank-0", "rank-1"]), (2, ["rank-0.1", "rank-1.1"]), (3, ["rank-0.2", "rank-1.2"])]:
        written(path, n)
        assert names_in(path) == ["manifest.json", *expected]
        assert loaded(path) == [10 * n, 10 * n + 1]
    write_checkpoint(path, small(4), iteration=4)  # by another number of ranks
    assert names_in(path) == ["manifest.json", "rank-0.3"]
    assert names_in(tmp_path) == ["here"]


def test_the_old_checkpoint_loads_until_the_new_manifest_is_in_place_and_then_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before and after each rename, sync and removal of a replacing save."""
    path, seen = tmp_path / "here", []
    write_checkpoint(path, small(1), iteration=1)

    def watched(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(read_checkpoint(path)["n"])
            result = real(*arguments, **options)
            seen.append(read_checkpoint(path)["n"])
            return result

        return call

    for owner, name in [(os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")]:
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    write_checkpoint(path, small(2), iteration=2)
    monkeypatch.undo()
    assert seen == sorted(seen)
    assert {*seen} == {1, 2}
    assert len(seen) >= 12


def test_the_old_files_go_only_after_the_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, order = tmp_path / "here", []
    write_checkpoint(path, small(1), iteration=1)
    real_sync, real_replace, real_remove = commit_module.sync_folder, os.replace, commit_module.remove_tree
    monkeypatch.setattr(commit_module, "sync_folder", lambda p: (order.append(f"sync {p.name}"), real_sync(p)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(f"replace {Path(b).name}"), real_replace(a, b)))
    monkeypatch.setattr(commit_module, "remove_tree", lambda p: (order.append(f"remove {p.name}"), real_remove(p)))
    write_checkpoint(path, small(2), iteration=2)
    at = order.index("replace manifest.json")
    assert order[at - 1 : at + 3] == ["sync here", "replace manifest.json", "sync here", "remove rank-0"]


def test_every_file_and_folder_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor: int) -> None:
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_sync(descriptor)

    def rename(source: Any, target: Any) -> None:
        order.append("RENAMED")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    write_checkpoint(tmp_path / "new folder" / "here", small(1), iteration=1)
    hidden = [name for name in order if re.fullmatch(r"\.here\.[0-9a-f]{32}\.tmp", name)]
    assert order == [
        tmp_path.name,  # which has a new folder
        *("state.json", "tensors.safetensors", "rank-0", "manifest.json", *hidden, "RENAMED", "new folder"),
    ]
    assert len(hidden) == 1


def test_leftovers_of_killed_saves_are_removed_by_the_next_save(tmp_path: Path) -> None:
    path = tmp_path / "here"
    write_checkpoint(path, small(1), iteration=1)
    write_checkpoint(path, small(2), iteration=2)
    for name in ["rank-0", "rank-1.7", "rank-0.2"]:
        shutil.copytree(path / "rank-0.1", path / name)
    (tmp_path / f".here.{'a' * 32}.tmp" / "rank-0").mkdir(parents=True)
    kept = [f".here.{'a' * 31}.tmp", f".other.{'a' * 32}.tmp", ".here.mine"]
    for name in kept:
        (tmp_path / name).mkdir()
    (path / "notes.txt").write_text("mine")
    assert read_checkpoint(path)["n"] == 2
    write_checkpoint(path, small(3), iteration=3)
    assert read_checkpoint(path)["n"] == 3
    assert names_in(path) == ["manifest.json", "notes.txt", "rank-0.2"]
    assert names_in(tmp_path) == sorted([*kept, "here"])


def test_what_is_not_a_checkpoint_is_never_replaced(subtests: pytest.Subtests, tmp_path: Path) -> None:
    cases: dict[str, dict[str, str]] = {
        "a user's folder": {"thesis.txt": "years of work"},
        "another program's manifest": {"manifest.json": '{"name": "some other program"}'},
        "another program's manifest and files": {"manifest.json": "{}", "rank-0/state.json": "{}", "thesis.txt": "x"},
        "a folder of checkpoints": {"iteration-00000001/manifest.json": "{}"},
        "a folder of ranks and a user's file": {"rank-0/state.json": "{}", "thesis.txt": "x"},
        "a newer version": {"manifest.json": '{"schema": 6}', "rank-0/state.json": "{}"},
        "an older version": {"manifest.json": '{"schema": 4}', "rank-0/state.json": "{}"},
    }
    for case, contents in cases.items():
        with subtests.test(case=case):
            path = tmp_path / case
            for name, text in contents.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_text(text)
            with pytest.raises(CheckpointError, match="not replaced"):
                write_checkpoint(path, small(1), iteration=1)
            assert {name: (path / name).read_text() for name in contents} == contents
            assert [name for name in names_in(tmp_path) if name.startswith(".")] == []


def test_empty_folders_and_damaged_checkpoints_are_replaced(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for case in ["empty", "leftovers", "damaged manifest", "lost manifest"]:
        with subtests.test(case=case):
            path = tmp_path / case
            if case in ("empty", "leftovers"):
                path.mkdir()
            else:
                write_checkpoint(path, small(1), iteration=1)
                write_checkpoint(path, small(1), iteration=1)
            if case == "leftovers":
                (path / "rank-3.4").mkdir()
            if case == "damaged manifest":
                (path / "manifest.json").write_bytes(b"{")
            if case == "lost manifest":
                (path / "manifest.json").unlink()
            write_checkpoint(path, small(2), iteration=2)
            assert read_checkpoint(path)["n"] == 2
            assert len(names_in(path)) == 2


def test_a_link_to_a_checkpoint_is_written_through(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "disk" / "here", small(1), iteration=1)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "here")
    assert write_checkpoint(tmp_path / "link", small(2), iteration=2) == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert read_checkpoint(tmp_path / "disk" / "here")["n"] == 2 == read_checkpoint(tmp_path / "link")["n"]
    assert names_in(tmp_path / "disk") == ["here"]


# What is refused before anything is written


def test_weights_that_are_not_finite_are_never_committed(subtests: pytest.Subtests, tmp_path: Path) -> None:
    run = tmp_path / "run"
    CheckpointFolder(run, 1).save(small(1), iteration=1, score=1.0)
    before = digest(read_checkpoint(run))
    for value in (float("nan"), float("inf"), -float("inf")):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            with subtests.test(value=value, dtype=dtype):
                weights = torch.zeros(3, 4, dtype=dtype)
                weights[2, 3] = value
                state = {**small(2), "parameters": {"good": torch.ones(2, requires_grad=True), "bad": weights}}
                weights.requires_grad_()
                with pytest.raises(CheckpointError, match=r"must have finite weights; bad has NaN or infinity"):
                    CheckpointFolder(run, 1).save(state, iteration=2, score=2.0)
                with pytest.raises(CheckpointError, match=r"must have finite weights; bad has"):
                    write_checkpoint(run / "mine", state, iteration=2)
                assert names_in(run) == ["iteration-00000001"]
                weights.requires_grad_(False)  # frozen, or a table of -inf: nothing that training has spoilt
                write_checkpoint(tmp_path / "frozen", state, iteration=2)
    assert digest(read_checkpoint(run)) == before


def test_weights_that_are_not_finite_on_one_rank_stop_all_ranks(tmp_path: Path) -> None:
    def save(engine: ImitatedRank) -> Any:
        weights = torch.ones(2, requires_grad=True)
        if engine.rank == 1:
            weights.data[0] = float("nan")
        folder = CheckpointFolder(tmp_path / "run", 1, engine)
        with folder:
            return folder.save({"parameters": {"w": weights}}, iteration=1, score=None)

    errors = on_ranks(2, save)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert all("Rank 1: A checkpoint must have finite weights; w has" in str(error) for error in errors)
    assert names_in(tmp_path / "run") == []


def test_counts_that_no_checkpoint_can_have_are_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for iteration, update in [(-1, None), (True, None), (1.0, None), (2**53, None), (1, -1), (1, False), (1, 0.5)]:
        with subtests.test(iteration=iteration, update=update):
            with pytest.raises(ContractError, match=r"The (iteration|update) of a checkpoint must be"):
                write_checkpoint(tmp_path / "x", small(1), iteration=iteration, update=update)  # type: ignore[arg-type]
            assert names_in(tmp_path) == []
    write_checkpoint(tmp_path / "x", small(1), iteration=2**53 - 1, update=0)
    assert open_checkpoint(tmp_path / "x", None).update == 0


def test_a_score_that_is_not_finite_is_stored_as_none(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for score in (float("nan"), float("inf"), -float("inf"), None):
        with subtests.test(score=score):
            write_checkpoint(tmp_path / "x", small(1), iteration=1, score=score)
            assert b'"score": null' in (tmp_path / "x" / "manifest.json").read_bytes()
            assert open_checkpoint(tmp_path / "x", None).score is None
    write_checkpoint(tmp_path / "x", small(1), iteration=1, score=-0.25)
    assert open_checkpoint(tmp_path / "x", None).score == -0.25


def test_a_full_disk_while_hashing_in_the_second_thread_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device that is always full, in place of the second file."""
    real = files_module.Path.open

    def full(self: Path, mode: str = "r", **options: Any) -> Any:
        return real(Path("/dev/full"), "wb") if self.name == "tensors.safetensors" and "x" in mode else real(self, mode)

    monkeypatch.setattr(files_module.Path, "open", full)
    with pytest.raises(CheckpointError, match=r"here: .*No space left on device.*Earlier checkpoints are intact"):
        write_checkpoint(tmp_path / "here", {"large": torch.zeros(3_000_000)}, iteration=1)
    assert names_in(tmp_path) == []
