"""Checkpoints of several ranks: one folder, complete or absent, and replaced without a moment in which neither loads."""

import hashlib
import json
import math
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
from grpo._storage.manifest import LARGEST_MANIFEST
from grpo.checkpoint import CheckpointFolder, open_checkpoint, read_checkpoint, write_checkpoint
from grpo.errors import ContractError, DamagedCheckpointError, GRPOWarning
from tests.support.checkpoint_runs import names_in, small
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.policies import digest

pytestmark = pytest.mark.usefixtures("without_type_checks")


def written(path: Path, n: int, num_ranks: int = 2, **options: Any) -> list[Any]:
    """Each rank saves a state of its own."""

    def write(engine: ImitatedRank) -> Any:
        return write_checkpoint(path, small(10 * n + engine.rank), iteration=n, engine=engine, **options)

    return on_ranks(num_ranks, write)


def loaded(path: Path, num_ranks: int = 2) -> list[Any]:
    def load(engine: ImitatedRank) -> Any:
        checkpoint = open_checkpoint(path, engine)
        return checkpoint.load(checkpoint.state)["n"]

    return on_ranks(num_ranks, load)


def test_all_ranks_write_one_folder_with_one_manifest(tmp_path: Path) -> None:
    path = tmp_path / "here"
    assert (written(path, 7, 3, score=0.5), names_in(tmp_path)) == ([path] * 3, ["here"])
    assert names_in(path) == ["manifest.json", "rank-0", "rank-1", "rank-2"]
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert set(manifest) == {"schema", "iteration", "update", "score", "num_ranks", "files", "sha256"}
    assert [manifest[name] for name in ("schema", "iteration", "update", "score", "num_ranks")] == [5, 7, None, 0.5, 3]
    files = {f"rank-{rank}/{name}" for rank in range(3) for name in ("state.json", "tensors.safetensors")}
    assert set(manifest["files"]) == files
    assert loaded(path, 3) == [70, 71, 72]


def test_any_number_of_ranks_reads_a_checkpoint(tmp_path: Path) -> None:
    """A rank beyond those that wrote begins with the state of one of them, in turn."""
    written(tmp_path / "two", 1, 2)
    write_checkpoint(tmp_path / "one", small(1), iteration=1)
    numbers = {("two", 1): [10], ("two", 2): [10, 11], ("two", 3): [10, 11, 10], ("one", 2): [1, 1]}
    for (path, loads), expected in numbers.items():
        assert loaded(tmp_path / path, loads) == expected, (path, loads)
    assert read_checkpoint(tmp_path / "two")["n"] == 10  # of rank 0


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("exists", [False, True])
def test_a_rank_that_cannot_write_leaves_the_earlier_checkpoint_on_all_ranks(tmp_path, monkeypatch, culprit, exists):
    path, real = tmp_path / "here", commit_module._write_rank
    if exists:
        written(path, 1)

    def failing(folder: Path, encode: Any) -> Any:
        records = real(folder, encode)
        if folder.name.startswith(f"rank-{culprit}"):
            raise OSError(28, os.strerror(28))
        return records

    monkeypatch.setattr(commit_module, "_write_rank", failing)
    errors = written(path, 2)
    monkeypatch.undo()
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert all(f"Rank {culprit}: Cannot write checkpoint {path}" in str(error) for error in errors)
    assert names_in(tmp_path) == (["here"] if exists else [])
    if exists:
        assert (loaded(path), names_in(path)) == ([10, 11], ["manifest.json", "rank-0", "rank-1"])


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
        assert re.search(r"ranks share; a rank wrote rank-1/state.json with \d+ bytes, and rank 0 sees no", str(error))

    def cut(folder: Path, encode: Any) -> Any:
        records = real(folder, encode)
        if folder.name == "rank-1":
            (folder / "state.json").write_bytes(b"x")
        return records

    monkeypatch.setattr(commit_module, "_write_rank", cut)
    for error in written(tmp_path / "here", 1):
        assert "and rank 0 sees 1 bytes" in str(error)
    assert names_in(tmp_path) == ["other disk"]


def test_a_replaced_checkpoint_has_new_folders_and_no_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "here"
    for n, expected in [(1, ["rank-0", "rank-1"]), (2, ["rank-0.1", "rank-1.1"]), (3, ["rank-0.2", "rank-1.2"])]:
        written(path, n)
        assert (names_in(path), loaded(path)) == (["manifest.json", *expected], [10 * n, 10 * n + 1])
    write_checkpoint(path, small(4), iteration=4)  # by another number of ranks
    assert (names_in(path), names_in(tmp_path)) == (["manifest.json", "rank-0.3"], ["here"])


def test_the_old_checkpoint_loads_until_the_new_manifest_is_in_place_and_then_the_new_one(tmp_path, monkeypatch):
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
    assert (seen, {*seen}) == (sorted(seen), {1, 2})
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
    assert (read_checkpoint(path)["n"], names_in(path)) == (3, ["manifest.json", "notes.txt", "rank-0.2"])
    assert names_in(tmp_path) == sorted([*kept, "here"])


@pytest.mark.parametrize(
    "contents",
    [
        {"thesis.txt": "years of work"},
        {"manifest.json": '{"name": "some other program"}'},
        {"manifest.json": "{}", "rank-0/state.json": "{}", "thesis.txt": "x"},
        {"iteration-00000001/manifest.json": "{}"},  # a folder of checkpoints
        {"rank-0/state.json": "{}", "thesis.txt": "x"},
        {"manifest.json": '{"schema": 6}', "rank-0/state.json": "{}"},  # a newer version
        {"manifest.json": '{"schema": 4}', "rank-0/state.json": "{}"},
    ],
)
def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path, contents):
    path = tmp_path / "here"
    for name, text in contents.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    with pytest.raises(CheckpointError, match="not replaced"):
        write_checkpoint(path, small(1), iteration=1)
    assert {name: (path / name).read_text() for name in contents} == contents
    assert names_in(tmp_path) == ["here"]


@pytest.mark.parametrize("case", ["empty", "leftovers", "damaged manifest", "lost manifest"])
def test_empty_folders_and_damaged_checkpoints_are_replaced(tmp_path, case):
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
    assert (read_checkpoint(path)["n"], len(names_in(path))) == (2, 2)


def test_a_link_to_a_checkpoint_is_written_through(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "disk" / "here", small(1), iteration=1)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "here")
    assert write_checkpoint(tmp_path / "link", small(2), iteration=2) == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert read_checkpoint(tmp_path / "disk" / "here")["n"] == 2 == read_checkpoint(tmp_path / "link")["n"]
    assert names_in(tmp_path / "disk") == ["here"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_never_committed(tmp_path, value, dtype):
    run = tmp_path / "run"
    CheckpointFolder(run, 1).save(small(1), iteration=1, score=1.0)
    before = digest(read_checkpoint(run))
    weights = torch.zeros(3, 4, dtype=dtype)
    weights[2, 3] = value
    state = {**small(2), "parameters": {"good": torch.ones(2, requires_grad=True), "bad": weights}}
    weights.requires_grad_()
    with pytest.raises(CheckpointError, match=r"must have finite weights; bad has NaN or infinity"):
        CheckpointFolder(run, 1).save(state, iteration=2, score=2.0)
    with pytest.raises(CheckpointError, match=r"must have finite weights; bad has"):
        write_checkpoint(run / "mine", state, iteration=2)
    assert (names_in(run), digest(read_checkpoint(run))) == (["iteration-00000001"], before)
    weights.requires_grad_(False)  # frozen, or a table of -inf: nothing that training has spoilt
    write_checkpoint(tmp_path / "frozen", state, iteration=2)


def test_weights_that_are_not_finite_on_one_rank_stop_all_ranks(tmp_path: Path) -> None:
    def save(engine: ImitatedRank) -> Any:
        weights = torch.ones(2, requires_grad=True)
        if engine.rank == 1:
            weights.data[0] = float("nan")
        with CheckpointFolder(tmp_path / "run", 1, engine) as folder:
            return folder.save({"parameters": {"w": weights}}, iteration=1, score=None)

    errors = on_ranks(2, save)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert all("Rank 1: A checkpoint must have finite weights; w has" in str(error) for error in errors)
    assert names_in(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("iteration", "update"), [(-1, None), (True, None), (1.0, None), (2**53, None), (1, -1), (1, False), (1, 0.5)]
)
def test_counts_that_no_checkpoint_can_have_are_refused(tmp_path, iteration, update):
    with pytest.raises(ContractError, match=r"The (iteration|update) of a checkpoint must be"):
        write_checkpoint(tmp_path / "x", small(1), iteration=iteration, update=update)
    assert names_in(tmp_path) == []
    write_checkpoint(tmp_path / "x", small(1), iteration=2**53 - 1, update=0)
    assert open_checkpoint(tmp_path / "x", None).update == 0


@pytest.mark.parametrize(
    ("score", "stored"), [(math.nan, None), (math.inf, None), (-math.inf, None), (None, None), (-0.25, -0.25)]
)
def test_a_score_that_is_not_finite_is_stored_as_none(tmp_path, score, stored):
    write_checkpoint(tmp_path / "x", small(1), iteration=1, score=score)
    assert f'"score": {json.dumps(stored)}' in (tmp_path / "x" / "manifest.json").read_text()
    assert open_checkpoint(tmp_path / "x", None).score == stored


def test_a_full_disk_while_hashing_in_the_second_thread_is_told(tmp_path, monkeypatch) -> None:
    """The device that is always full, in place of the second file."""
    real = files_module.Path.open

    def full(self: Path, mode: str = "r", **options: Any) -> Any:
        return real(Path("/dev/full"), "wb") if self.name == "tensors.safetensors" and "x" in mode else real(self, mode)

    monkeypatch.setattr(files_module.Path, "open", full)
    with pytest.raises(CheckpointError, match=r"here: .*No space left on device.*Earlier checkpoints are intact"):
        write_checkpoint(tmp_path / "here", {"large": torch.zeros(3_000_000)}, iteration=1)
    assert names_in(tmp_path) == []


# What is no manifest, is damaged or has absurd fields, is refused before anything large is read


FIRST = "rank-0/state.json"
SECOND = "rank-0/tensors.safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "run" / "newest", small(5), iteration=5, score=0.5)


def fields_of(path: Path) -> dict[str, Any]:
    fields = json.loads((path / "manifest.json").read_bytes())
    return {name: value for name, value in fields.items() if name != "sha256"}


def rewrite(path: Path, fields: Any, digest: str | None = None) -> None:
    """Write a manifest as someone does who knows how it is hashed."""
    text = json.dumps(fields)
    digest = hashlib.sha256(text.encode()).hexdigest() if digest is None else digest
    (path / "manifest.json").write_text(text[:-1] + f', "sha256": "{digest}"}}')


HUGE = 20 * 2**30
RECORD = {"size": 8, "sha256": "0" * 64}
ABSURD: list[tuple[str, Any]] = [
    *(("iteration", value) for value in (-1, True, 1.0, "5", None, [5], {}, 2**53, 10**400)),
    *(("update", value) for value in (-1, False, 0.5, "1", [], {}, 2**60)),
    *(("score", value) for value in (float("nan"), float("inf"), -float("inf"), True, "0.5", [], {}, 10**400)),
    *(("num_ranks", value) for value in (0, -1, True, 1.0, "1", None, [], 2, 2**40)),
    *(("files", value) for value in (None, [], "x", 3, {}, {FIRST: RECORD})),
    *(("files", {FIRST: RECORD, SECOND: value}) for value in (None, [], {"size": 1}, {**RECORD, "more": 1})),
    *(("files", {FIRST: RECORD, SECOND: {**RECORD, "size": size}}) for size in (-1, True, 1.0, "8", None, 2**53)),
    *(
        ("files", {FIRST: RECORD, name: RECORD})
        for name in ("../secret.json", "/etc/hostname", "extra.bin", "rank-1/state.json", "rank-0.1/state.json")
    ),
    ("extra", 1),
]


@pytest.mark.parametrize(("name", "value"), ABSURD)
def test_rightly_hashed_fields_of_no_manifest_are_refused_and_the_older_checkpoint_is_read(path, name, value):
    write_checkpoint(path.parent / "older", small(4), iteration=4)
    rewrite(path, {**fields_of(path), name: value})
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json must hold .*; got "):
        read_checkpoint(path)
    with pytest.warns(GRPOWarning, match=r"newer checkpoints are damaged: .*manifest\.json must hold"):
        assert read_checkpoint(path.parent)["n"] == 4


FIELDS = ("schema", "iteration", "update", "score", "num_ranks", "files")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (lambda fields, name=name: fields.pop(name), r"manifest\.json (must hold|is not a manifest)")
            for name in FIELDS
        ),
        *(
            (lambda fields, schema=schema: fields.update(schema=schema), r"manifest\.json is not a manifest")
            for schema in (None, "4", 4.5, [])
        ),
        *(
            (
                lambda fields, size=size: fields["files"].update({SECOND: {**RECORD, "size": size}}),
                rf"tensors\.safetensors is damaged.* size says {size}\.",
            )
            for size in (HUGE, 0)
        ),
    ],
)
def test_a_manifest_without_a_field_or_of_another_kind_or_with_another_size_is_refused(path, change, message):
    fields = fields_of(path)
    assert tuple(fields) == FIELDS
    rewrite(path, fields)
    assert read_checkpoint(path)["n"] == 5
    change(fields)
    rewrite(path, fields)
    with pytest.raises(DamagedCheckpointError, match=message):
        read_checkpoint(path)


def test_the_hash_of_the_manifest_must_be_right_to_the_letter(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    right = json.loads(text)["sha256"]
    changes = [text + "\n", " " + text, text.replace(": ", ":"), text.replace('"score": 0.5', '"score": 0.50')]
    digests = [right.upper(), right[:-1], right + "0", "0" * 64, ""]
    for changed in [*changes, *(text.replace(right, wrong) for wrong in digests)]:
        (path / "manifest.json").write_text(changed)
        with pytest.raises(DamagedCheckpointError, match="sha256"):
            read_checkpoint(path)


@pytest.mark.parametrize(
    "contents",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b"[" * 100_000, b'{"files": ' * 900 + b"1" + b"}" * 900],
)
def test_contents_that_are_no_manifest_are_refused(path, contents):
    older = write_checkpoint(path.parent / "older", small(4), iteration=4)
    (path / "manifest.json").write_bytes(contents)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        read_checkpoint(path)
    assert open_checkpoint(path.parent, None).path == older


def test_a_manifest_above_the_limit_is_refused_unread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (path / "manifest.json").read_bytes()
    for size, message in [
        (LARGEST_MANIFEST, "is not a manifest"),
        (LARGEST_MANIFEST + 1, f"must have at most {16 * 2**20}"),
    ]:
        with (path / "manifest.json").open("wb") as file:
            file.write(text)
            file.truncate(size)  # the rest is zeros, which take no room
        with pytest.raises(DamagedCheckpointError, match=message):
            read_checkpoint(path)


def test_sizes_are_compared_before_any_file_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 GB that are declared, and 20 GB that are there but not declared: only the folder's entry is looked at."""
    opened: list[str] = []
    real = files_module.FileIO

    def noting(descriptor: int, mode: str) -> Any:
        opened.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        return real(descriptor, mode)

    monkeypatch.setattr(files_module, "FileIO", noting)
    with (path / SECOND).open("r+b") as file:
        file.truncate(HUGE)
    with pytest.raises(DamagedCheckpointError, match=rf"tensors\.safetensors is damaged: it has {HUGE} bytes"):
        read_checkpoint(path)
    fields = fields_of(path)
    fields["files"][SECOND]["size"] = HUGE - 1
    rewrite(path, fields)
    with pytest.raises(DamagedCheckpointError, match=rf"the manifest's size says {HUGE - 1}"):
        read_checkpoint(path)
    assert opened == ["manifest.json", "manifest.json"]


def test_an_unfinished_iteration_is_newer_than_the_finished_one_before_it(tmp_path: Path) -> None:
    written = [(10, None), (10, 0), (10, 3), (9, 7), (11, None)]
    for (iteration, update), newest in zip(written, [*written[:3], (10, 3), (11, None)], strict=True):
        path = write_checkpoint(tmp_path / f"{iteration} {update}", small(1), iteration=iteration, update=update)
        found = open_checkpoint(tmp_path, None)
        assert ((found.iteration, found.update), open_checkpoint(path, None).update) == (newest, update)
