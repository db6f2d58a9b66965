"""Checkpoints that are whole or not there: safetensors and JSON under a manifest of hashes, and no pickle.

A checkpoint is a folder of `tensors.safetensors`, `state.json` and `manifest.json`. It is written beside its place, synced
to disk, and renamed into it; it is verified, file by file, before anything in it is used.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load, save

from .errors import CheckpointError, ConfigError
from .state_codec import decode, encode

SCHEMA = 1
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"


def write_checkpoint(path: str | Path, state: Mapping[str, Any], *, iteration: int, score: float | None = None) -> Path:
    """Write `state` as the folder `path`, all or nothing; a checkpoint that is there already is replaced.

    Args:
        path: the checkpoint's folder; its parent is made.
        state: tensors, arrays, numbers, strings, None, and dicts, lists and tuples of these.
        iteration: how far training is.
        score: what tells the best of several checkpoints; larger is better.

    Raises:
        CheckpointError: it cannot be written (the disk is full, say), holds something that is none of the above, or would
            replace something that is no checkpoint. Earlier checkpoints are whole, and nothing temporary stays behind.
    """
    target = Path(path).absolute()
    if target.exists() and not _is_checkpoint(target):
        raise CheckpointError(f"{target} exists and is not a checkpoint, so it is not replaced. Choose another name.")
    encoded, tensors = encode(state)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
        temporary.mkdir()
        contents = {STATE: json.dumps(encoded).encode(), TENSORS: save(tensors)}
        manifest = {
            "schema": SCHEMA,
            "iteration": iteration,
            "score": score,
            "files": {name: {"size": len(data), "sha256": _digest(data)} for name, data in contents.items()},
        }
        contents[MANIFEST] = json.dumps({**manifest, "sha256": _digest(json.dumps(manifest).encode())}).encode()
        for name, data in contents.items():
            _write_synced(temporary / name, data)
        _sync_folder(temporary)
        _move_into_place(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"Cannot write checkpoint {target}: {error}. Earlier checkpoints are whole.") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The state that was written, after every file has been verified against the manifest.

    Args:
        path: a checkpoint's folder, or a folder of checkpoints, of which the newest whole one is read.

    Raises:
        CheckpointError: naming the file that is missing, cut, altered, foreign or newer than this version.
    """
    folder = Path(path).absolute()
    if not _is_checkpoint(folder) and _is_checkpoint(_previous(folder)):
        folder = _previous(folder)  # the writer was ended between its two renames
    if not _is_checkpoint(folder):
        return read_newest(folder)
    contents = _verified(folder)
    try:
        state = decode(json.loads(contents[STATE]), load(contents[TENSORS]))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder} is whole, but no checkpoint of this package: {error!r}.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder / STATE} holds a {type(state).__name__}, and no state of this package.")
    return state


def read_newest(folder: str | Path) -> dict[str, Any]:
    """The state of the newest whole checkpoint in `folder`; damaged ones are passed over.

    Raises:
        CheckpointError: there is none; says what is wrong with each.
    """
    problems = []
    for candidate in sorted(_checkpoints(Path(folder)), key=_iteration, reverse=True):
        try:
            return read_checkpoint(candidate)
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError(f"No whole checkpoint in {folder}. " + " ".join(problems))


def best_checkpoint(folder: str | Path) -> Path:
    """The checkpoint with the highest score in `folder`.

    Raises:
        CheckpointError: there is none with a score.
    """
    scored = [(score, path) for path in _checkpoints(Path(folder)) if (score := _manifest_score(path)) is not None]
    if not scored:
        raise CheckpointError(f"No checkpoint with a score in {folder}.")
    return max(scored)[1]


class CheckpointFolder:
    """The newest `keep_last` checkpoints of a run, and the best one.

    Args:
        folder: where `iteration-00000010` and its kind stand; nothing else in it is ever touched.
        keep_last: how many of the newest stay; older ones go, but for the best.

    Raises:
        ConfigError: nothing would be kept.
    """

    def __init__(self, folder: str | Path, keep_last: int) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last must be >= 1; got {keep_last}.")
        self.folder = Path(folder)
        self.keep_last = keep_last

    def require_at_most(self, iteration: int) -> None:
        """A run at `iteration` may write here; damaged checkpoints do not count.

        Raises:
            CheckpointError: the folder holds a whole checkpoint that is further on.
        """
        for path in self._own():
            if _iteration(path) > iteration and _is_whole(path):
                raise CheckpointError(
                    f"{path} is of iteration {_iteration(path)}, and this trainer is at {iteration}. Go on from it through "
                    "trainer.load_checkpoint(...), remove it, or choose another checkpoint_dir."
                )

    def has(self, iteration: int) -> bool:
        """A checkpoint of that iteration is there."""
        return _is_checkpoint(self._path(iteration))

    def save(self, state: Mapping[str, Any], *, iteration: int, score: float | None) -> Path:
        """Write one checkpoint, then, and only then, remove those that are neither new nor best."""
        path = write_checkpoint(self._path(iteration), state, iteration=iteration, score=score)
        newest = sorted(self._own(), key=_iteration)[-self.keep_last :]
        scored = [(value, old) for old in self._own() if (value := _manifest_score(old)) is not None]
        kept = {path, *newest, *([max(scored)[1]] if scored else [])}
        for old in self._own():
            if old not in kept:
                old.rename(old.with_name(f".{old.name}.{uuid4().hex}.tmp"))  # gone at once, whatever happens next
        for abandoned in self.folder.glob(".iteration-*.tmp"):
            shutil.rmtree(abandoned, ignore_errors=True)
        return path

    def _path(self, iteration: int) -> Path:
        return self.folder.absolute() / f"iteration-{iteration:08d}"

    def _own(self) -> list[Path]:
        return [path for path in _checkpoints(self.folder.absolute()) if path.name.startswith("iteration-")]


def _is_whole(path: Path) -> bool:
    try:
        _verified(path)
    except CheckpointError:
        return False
    return True


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if not path.name.startswith(".") and _is_checkpoint(path)]


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _iteration(path: Path) -> int:
    try:
        return int(json.loads((path / MANIFEST).read_bytes())["iteration"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return -1  # damaged: the oldest of all; reading it says what is wrong


def _manifest_score(path: Path) -> float | None:
    try:
        score = _verified_manifest(path)["score"]
    except CheckpointError:
        return None
    return score if isinstance(score, int | float) and math.isfinite(score) else None


def _verified_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, which a checkpoint never holds. Use another checkpoint.")
    try:
        manifest = json.loads(path.read_bytes())
        claimed = manifest.pop("sha256")
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest ({type(error).__name__}): use another checkpoint.") from error
    if claimed != _digest(json.dumps(manifest).encode()):
        raise CheckpointError(f"{path} is damaged: its hash is not the one it holds. Use another checkpoint.")
    if schema != SCHEMA:
        raise CheckpointError(f"{path} has schema {schema}; this version reads {SCHEMA}. Update model-agnostic-grpo.")
    return manifest  # type: ignore[no-any-return]


def _verified(folder: Path) -> dict[str, bytes]:
    """Contents of the two files, and of no other: the manifest's names are compared, never followed."""
    manifest = _verified_manifest(folder)
    if set(manifest["files"]) != {STATE, TENSORS}:
        raise CheckpointError(
            f"{folder / MANIFEST} names {sorted(manifest['files'])}; a checkpoint has {STATE} and {TENSORS}."
        )
    contents = {}
    for name, expected in manifest["files"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is missing (or a link): the checkpoint is not whole. Use another.")
        data = path.read_bytes()
        if len(data) != expected["size"] or _digest(data) != expected["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: {len(data)} bytes, or their hash, are not the manifest's. Use another."
            )
        contents[name] = data
    return contents


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _move_into_place(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    previous = _previous(target)
    shutil.rmtree(previous, ignore_errors=True)
    target.rename(previous)
    try:
        temporary.rename(target)
    except OSError:
        previous.rename(target)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
