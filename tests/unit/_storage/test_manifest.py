"""What is no manifest, is damaged or has absurd fields, is refused before anything large is read."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo import CheckpointError
from grpo._storage import files as files_module
from grpo._storage.manifest import LARGEST_MANIFEST, read_manifest
from grpo.checkpoint import best_checkpoint, open_checkpoint, read_checkpoint, write_checkpoint
from grpo.errors import DamagedCheckpointError, GRPOWarning
from tests.support.checkpoint_runs import small

pytestmark = pytest.mark.usefixtures("without_type_checks")

FIRST = "rank-0/state.json"
SECOND = "rank-0/tensors.safetensors"


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
        for name in ("../secret.json", "rank-1/state.json", "rank-0.1/state.json")
    ),
    ("extra", 1),
]


def test_rightly_hashed_fields_of_no_manifest_are_refused_and_the_older_checkpoint_is_read(
    subtests: pytest.Subtests, path: Path
) -> None:
    write_checkpoint(path.parent / "older", small(4), iteration=4)
    fields = fields_of(path)
    for name, value in ABSURD:
        with subtests.test(name=name, value=str(value)[:90]):
            rewrite(path, {**fields, name: value})
            with pytest.raises(DamagedCheckpointError, match=r"manifest\.json must hold .*; got "):
                read_checkpoint(path)
    with pytest.warns(GRPOWarning, match=r"newer checkpoints are damaged: .*manifest\.json must hold"):
        assert read_checkpoint(path.parent)["n"] == 4
    for name in fields:
        with subtests.test(missing=name):
            rewrite(path, {key: value for key, value in fields.items() if key != name})
            with pytest.raises(DamagedCheckpointError, match=r"manifest\.json (must hold|is not a manifest)"):
                read_checkpoint(path)
    for schema in (None, "4", 4.5, []):
        with subtests.test(schema=schema):
            rewrite(path, {**fields, "schema": schema})
            with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is not a manifest"):
                read_checkpoint(path)
    for size in (HUGE, 0):
        with subtests.test(size=size):
            rewrite(path, {**fields, "files": {**fields["files"], SECOND: {**RECORD, "size": size}}})
            with pytest.raises(DamagedCheckpointError, match=rf"tensors\.safetensors is damaged.* size says {size}\."):
                read_checkpoint(path)
    rewrite(path, fields)
    assert read_checkpoint(path.parent)["n"] == 5


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
