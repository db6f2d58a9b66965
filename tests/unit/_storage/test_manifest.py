"""Every field of a manifest, missing, mistyped or absurd, is refused by its name before anything large is read."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo import CheckpointError
from grpo._storage import files as files_module
from grpo._storage.manifest import LARGEST_MANIFEST, read_manifest
from grpo.checkpoint import best_checkpoint, open_checkpoint, read_checkpoint, write_checkpoint
from grpo.errors import DamagedCheckpointError, GRPOWarning
from tests.support.checkpoint_runs import small
from tests.support.objective_inputs import as_users_run_it

FIRST = "rank-0/state.json"
SECOND = "rank-0/tensors.safetensors"


@pytest.fixture(autouse=True)
def no_type_checks() -> Iterator[None]:
    """Values of wrong types are what these tests read."""
    with as_users_run_it():
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "run" / "newest", small(5), iteration=5, score=0.5)


def fields_of(path: Path) -> dict[str, Any]:
    return {
        name: value for name, value in json.loads((path / "manifest.json").read_bytes()).items() if name != "sha256"
    }


def rewrite(path: Path, fields: Any, digest: str | None = None) -> None:
    """Write a manifest as someone does who knows how it is hashed."""
    text = json.dumps(fields)
    digest = hashlib.sha256(text.encode()).hexdigest() if digest is None else digest
    (path / "manifest.json").write_text(text[:-1] + f', "sha256": "{digest}"}}')


HUGE = 20 * 2**30
ABSURD: list[tuple[str, Any]] = [
    *(("iteration", value) for value in (-1, True, 1.0, "5", None, [5], {}, 2**53, 10**400)),
    *(("update", value) for value in (-1, False, 0.5, "1", [], {}, 2**60)),
    *(("score", value) for value in (float("nan"), float("inf"), -float("inf"), True, "0.5", [], {}, 10**400)),
    *(("num_ranks", value) for value in (0, -1, True, 1.0, "1", None, [])),
    *(("files", value) for value in (None, [], "x", 3)),
    *(("schema", value) for value in (None, "2", 2.0, True, [])),
]


def test_absurd_fields_are_refused_by_name_and_the_older_checkpoint_is_read(
    subtests: pytest.Subtests, path: Path
) -> None:
    write_checkpoint(path.parent / "older", small(4), iteration=4)
    fields = fields_of(path)
    for name, value in ABSURD:
        with subtests.test(name=name, value=str(value)[:30]):
            rewrite(path, {**fields, name: value})
            with pytest.raises(DamagedCheckpointError, match=rf"manifest\.json: {name} must be .*; got "):
                read_checkpoint(path)
            with pytest.warns(GRPOWarning, match=f"newer checkpoints are damaged: .*{name} must be"):
                assert read_checkpoint(path.parent)["n"] == 4
    rewrite(path, fields)
    assert read_checkpoint(path.parent)["n"] == 5


def test_numbers_that_json_writes_otherwise_are_refused_by_name(subtests: pytest.Subtests, path: Path) -> None:
    text = json.dumps(fields_of(path))
    for name, old, new in [
        ("score", '"score": 0.5', '"score": 1e400'),
        ("score", '"score": 0.5', '"score": -1E+999'),
        ("score", '"score": 0.5', '"score": NaN'),
        ("iteration", '"iteration": 5', '"iteration": 5.0'),
        ("iteration", '"iteration": 5', '"iteration": 1e2'),
    ]:
        with subtests.test(new=new):
            changed = text.replace(old, new)
            assert changed != text
            digest = hashlib.sha256(changed.encode()).hexdigest()
            (path / "manifest.json").write_text(changed[:-1] + f', "sha256": "{digest}"}}')
            with pytest.raises(DamagedCheckpointError, match=rf"manifest\.json: {name} must be "):
                read_checkpoint(path)


def test_missing_and_unknown_fields_are_named(subtests: pytest.Subtests, path: Path) -> None:
    fields = fields_of(path)
    for name in fields:
        with subtests.test(name=name):
            rewrite(path, {key: value for key, value in fields.items() if key != name})
            with pytest.raises(DamagedCheckpointError, match=rf"manifest\.json lacks the field {name}"):
                read_checkpoint(path)
    (path / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(DamagedCheckpointError, match="lacks the field sha256"):
        read_checkpoint(path)
    rewrite(path, {**fields, "extra": 1})
    with pytest.raises(DamagedCheckpointError, match="has the unknown field 'extra'"):
        read_checkpoint(path)


def test_the_hash_of_the_manifest_must_be_right_to_the_letter(subtests: pytest.Subtests, path: Path) -> None:
    text = (path / "manifest.json").read_text()
    fields, right = fields_of(path), json.loads(text)["sha256"]
    for digest in [right.upper(), right[:-1], right + "0", "0" * 64, ""]:
        with subtests.test(digest=digest):
            rewrite(path, fields, digest)
            with pytest.raises(DamagedCheckpointError, match="sha256"):
                read_checkpoint(path)
    for changed in [text + "\n", " " + text, text.replace(": ", ":"), text.replace('"score": 0.5', '"score": 0.50')]:
        with subtests.test(changed=changed[:20]):
            (path / "manifest.json").write_text(changed)
            with pytest.raises(DamagedCheckpointError, match="do not match its field sha256"):
                read_checkpoint(path)


def test_absurd_files_are_refused(subtests: pytest.Subtests, path: Path) -> None:
    fields = fields_of(path)
    record = fields["files"][SECOND]
    for size in (-1, True, 1.0, "8", None, 2**53):
        with subtests.test(size=size):
            rewrite(path, {**fields, "files": {**fields["files"], SECOND: {**record, "size": size}}})
            with pytest.raises(
                DamagedCheckpointError, match=r"size of files\['rank-0/tensors\.safetensors'\] must be a whole"
            ):
                read_checkpoint(path)
    for size in (record["size"] + 1, record["size"] - 1, HUGE, 0):
        with subtests.test(size=size):
            rewrite(path, {**fields, "files": {**fields["files"], SECOND: {**record, "size": size}}})
            with pytest.raises(DamagedCheckpointError, match=rf"tensors\.safetensors is damaged.* size says {size}\."):
                read_checkpoint(path)
    for sha256 in (None, 3, "", "x" * 64, "0" * 63, "A" * 64):
        with subtests.test(sha256=sha256):
            rewrite(path, {**fields, "files": {**fields["files"], SECOND: {**record, "sha256": sha256}}})
            with pytest.raises(
                DamagedCheckpointError, match=r"sha256 of files\['rank-0/tensors\.safetensors'\] must be"
            ):
                read_checkpoint(path)
    for broken in (None, [], {"size": 1}, {**record, "more": 1}):
        with subtests.test(broken=str(broken)):
            rewrite(path, {**fields, "files": {**fields["files"], SECOND: broken}})
            with pytest.raises(DamagedCheckpointError, match=r"files\['rank-0/tensors\.safetensors'\] must have"):
                read_checkpoint(path)


def test_other_file_names_are_refused_and_never_opened(subtests: pytest.Subtests, path: Path) -> None:
    fields = fields_of(path)
    record = fields["files"][FIRST]
    outside = path.parent / "secret.json"
    outside.write_text("{}")
    cases: list[dict[str, Any]] = [
        {},
        {FIRST: record},
        {**fields["files"], "rank-0/extra.bin": record},
        {**fields["files"], "../secret.json": record},
        {"../secret.json": record, SECOND: record},
        {"/etc/hostname": record, SECOND: record},
        {"rank-0/../rank-0/state.json": record, SECOND: record},
        {"rank-00/state.json": record, "rank-00/tensors.safetensors": record},
        {"rank-1/state.json": record, "rank-1/tensors.safetensors": record},
        {"rank-0.0/state.json": record, "rank-0.0/tensors.safetensors": record},
        {"rank-0.1/state.json": record, SECOND: record},
        {"state.json": record, "tensors.safetensors": record},
    ]
    for files in cases:
        with subtests.test(files=list(files)):
            rewrite(path, {**fields, "files": files})
            with pytest.raises(DamagedCheckpointError, match=r"manifest\.json names .* as files; for 1 ranks"):
                read_checkpoint(path)
    rewrite(path, {**fields, "num_ranks": 2**40})
    with pytest.raises(DamagedCheckpointError, match=r"as files; for 1099511627776 ranks"):
        read_checkpoint(path)


def test_contents_that_are_no_manifest_are_refused(subtests: pytest.Subtests, path: Path) -> None:
    older = write_checkpoint(path.parent / "older", small(4), iteration=4)
    for contents in [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'"x"',
        b"[" * 100_000,
        b'{"files": ' * 900 + b"1" + b"}" * 900,
    ]:
        with subtests.test(contents=contents[:20]):
            (path / "manifest.json").write_bytes(contents)
            with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
                read_checkpoint(path)
            assert open_checkpoint(path.parent, None).path == older
    nested: Any = []
    for _ in range(800):
        nested = [nested]
    for name in ("score", "files", "extra"):
        with subtests.test(nested=name):
            rewrite(path, {**fields_of(older), name: nested})
            with pytest.raises(DamagedCheckpointError, match=name):
                read_checkpoint(path)


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


def test_every_flip_of_one_bit_of_a_manifest_is_detected(path: Path) -> None:
    write_checkpoint(path, small(5), iteration=5, score=1e-05)
    data = (path / "manifest.json").read_bytes()
    generator = random.Random(3)
    for place in generator.sample(range(len(data)), 150):
        changed = bytearray(data)
        changed[place] ^= 1 << generator.randrange(8)
        (path / "manifest.json").write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(path)


def test_a_damaged_manifest_is_never_the_best(path: Path) -> None:
    write_checkpoint(path.parent / "other", small(4), iteration=4, score=0.25)
    damage: list[Callable[[], Any]] = [
        lambda: rewrite(path, {**fields_of(path), "score": 10**400}),
        lambda: (path / "manifest.json").write_bytes(b"{"),
    ]
    assert best_checkpoint(path.parent) == path
    for change in damage:
        change()
        with pytest.warns(GRPOWarning, match=r"other has the highest score .* left out: .*manifest\.json"):
            assert best_checkpoint(path.parent) == path.parent / "other"


def test_an_unfinished_iteration_is_newer_than_the_finished_one_before_it(tmp_path: Path) -> None:
    for iteration, update in [(10, None), (10, 0), (10, 3), (9, 7), (11, None)]:
        path = write_checkpoint(tmp_path / f"{iteration} {update}", small(1), iteration=iteration, update=update)
        positions = {(9, 7): 0, (10, None): 1, (10, 0): 2, (10, 3): 3, (11, None): 4}
        newest = max((p for p in positions if (tmp_path / f"{p[0]} {p[1]}").exists()), key=lambda p: positions[p])
        found = open_checkpoint(tmp_path, None)
        assert (found.iteration, found.update) == newest
        assert open_checkpoint(path, None).update == update
