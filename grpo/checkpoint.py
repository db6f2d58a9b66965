"""Write and read checkpoints. A checkpoint is written completely or not at all, and contains no pickle.

A checkpoint is a folder with `tensors.safetensors`, `state.json` and `manifest.json`. The folder is written under a
temporary name, synced to disk, and then renamed. Every file is verified against the manifest before it is used.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load, save

from ._training.state_codec import decode, encode
from .errors import CheckpointError, ConfigError

SCHEMA = 1
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"


def write_checkpoint(path: str | Path, state: Mapping[str, Any], *, iteration: int, score: float | None = None) -> Path:
    """Write `state` to the folder `path`, completely or not at all. An existing checkpoint is replaced.

    Args:
        path: the checkpoint's folder. Missing parent folders are created.
        state: tensors, arrays, numbers, strings, None, and dicts, lists and tuples of these.
        iteration: the number of iterations that training has completed.
        score: decides which of several checkpoints is the best. Larger is better.

    Raises:
        CheckpointError: the disk is full or not writable, `state` holds a value of another type, or `path` exists and is not a
            checkpoint. Earlier checkpoints are intact, and no temporary file remains.
    """
    target = Path(path).absolute()
    if target.exists() and not _is_checkpoint(target):
        raise CheckpointError(f"{target} exists and is not a checkpoint, so it is not replaced. Choose another path.")
    encoded, tensors = encode(state)
    temporary = _temporary(target)
    try:
        temporary.mkdir(parents=True)
        contents = {STATE: json.dumps(encoded).encode(), TENSORS: save(tensors)}
        manifest = {
            "schema": SCHEMA,
            "iteration": iteration,
            "score": score,
            "files": {name: {"size": len(data), "sha256": _digest(data)} for name, data in contents.items()},
        }
        contents[MANIFEST] = json.dumps({**manifest, "sha256": _digest(json.dumps(manifest).encode())}).encode()
        for name, data in contents.items():
            (temporary / name).write_bytes(data)
            _sync(temporary / name)
        _sync(temporary)
        _move_into_place(temporary, target)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"Cannot write checkpoint {target}: {error}. Earlier checkpoints are intact.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the state in a checkpoint, after verifying every file against the manifest.

    Args:
        path: a checkpoint's folder, or a folder of checkpoints: the newest intact one is read.

    Raises:
        CheckpointError: a file is missing, truncated, altered, or written by another program or a newer version. The
            message names the file.
    """
    folder = Path(path).absolute()
    if not _is_checkpoint(folder) and _is_checkpoint(_previous(folder)):
        folder = _previous(folder)  # the writer was killed between its two renames
    if not _is_checkpoint(folder):
        return read_newest(folder)
    contents = _verified(folder)
    try:
        state = decode(contents[STATE], load(contents[TENSORS]))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} is intact, but not a checkpoint of this package: {error!r}. Use another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{folder / STATE} must hold a dict; got a {type(state).__name__}. Use another checkpoint."
        )
    return state


def read_newest(folder: str | Path) -> dict[str, Any]:
    """Return the state of the newest intact checkpoint in `folder`. Damaged checkpoints are skipped.

    Raises:
        CheckpointError: `folder` has no intact checkpoint. The message says what is wrong with each.
    """
    problems = []
    for candidate in sorted(_checkpoints(Path(folder)), key=_iteration, reverse=True):
        try:
            return read_checkpoint(candidate)
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError(f"No intact checkpoint in {folder}. " + " ".join(problems))


def best_checkpoint(folder: str | Path) -> Path:
    """Return the path of the checkpoint with the highest score in `folder`.

    Raises:
        CheckpointError: no checkpoint in `folder` has a score.
    """
    best = _best(_checkpoints(Path(folder)))
    if best is None:
        raise CheckpointError(
            f"No checkpoint with a score in {folder}. Train with eval_states=..., which gives scores."
        )
    return best


class CheckpointFolder:
    """Keeps the newest `keep_last` checkpoints of a run, and the checkpoint with the best score, in `folder`.

    A checkpoint's name is its iteration, such as `iteration-00000010`. Other files in `folder` are not changed.
    """

    def __init__(self, folder: str | Path, keep_last: int) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last must be >= 1; got {keep_last}.")
        self.folder = Path(folder).absolute()
        self.keep_last = keep_last

    def require_at_most(self, iteration: int) -> None:
        """Require that no intact checkpoint in the folder is ahead of `iteration`."""
        for path in _checkpoints(self.folder, "iteration-*"):
            if _iteration(path) > iteration and _is_intact(path):
                raise CheckpointError(
                    f"{path} is of iteration {_iteration(path)}, and this trainer is at {iteration}. Continue from it with "
                    "trainer.load_checkpoint(...), delete it, or choose another checkpoint_dir."
                )

    def has(self, iteration: int) -> bool:
        """Whether the folder has a checkpoint of that iteration."""
        return _is_checkpoint(self._path(iteration))

    def save(self, state: Mapping[str, Any], *, iteration: int, score: float | None) -> Path:
        """Write one checkpoint. Once it is written, delete the checkpoints that are neither among the newest nor the best."""
        path = write_checkpoint(self._path(iteration), state, iteration=iteration, score=score)
        own = sorted(_checkpoints(self.folder, "iteration-*"), key=_iteration)
        for old in {*own[: -self.keep_last]} - {path, _best(own)}:
            old.rename(_temporary(old))  # one step, which cannot be left half done
        for abandoned in self.folder.glob(".iteration-*.tmp"):
            shutil.rmtree(abandoned, ignore_errors=True)
        return path

    def _path(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:08d}"


def _is_intact(path: Path) -> bool:
    try:
        return bool(_verified(path))
    except CheckpointError:
        return False


def _checkpoints(folder: Path, pattern: str = "[!.]*") -> list[Path]:
    return [path for path in folder.glob(pattern) if _is_checkpoint(path)]


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _iteration(path: Path) -> int:
    try:
        return int(json.loads((path / MANIFEST).read_bytes())["iteration"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return -1  # damaged: sorts last, and reading it says what is wrong


def _best(paths: list[Path]) -> Path | None:
    """Return the path of the checkpoint with the highest score. None: no checkpoint has a score."""
    scored = []
    for path in paths:
        with suppress(CheckpointError):
            score = _verified_manifest(path)["score"]
            if isinstance(score, int | float) and math.isfinite(score):
                scored.append((score, path))
    return max(scored)[1] if scored else None


def _verified_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(_contents(path))
        claimed = manifest.pop("sha256")
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest ({type(error).__name__}). Use another checkpoint.") from error
    if claimed != _digest(json.dumps(manifest).encode()):
        raise CheckpointError(f"{path} is damaged: its contents do not match its hash. Use another checkpoint.")
    if schema != SCHEMA:
        raise CheckpointError(f"{path} has schema {schema}; this version reads {SCHEMA}. Update model-agnostic-grpo.")
    return manifest  # type: ignore[no-any-return]


def _verified(folder: Path) -> dict[str, bytes]:
    """Return the contents of the two files after checking them against the manifest. The manifest may name only these files."""
    manifest = _verified_manifest(folder)
    if set(manifest["files"]) != {STATE, TENSORS}:
        raise CheckpointError(
            f"{folder / MANIFEST} names {sorted(manifest['files'])}; a checkpoint has {STATE} and {TENSORS}. Use another."
        )
    contents = {}
    for name, expected in manifest["files"].items():
        data = contents[name] = _contents(folder / name)
        if len(data) != expected["size"] or _digest(data) != expected["sha256"]:
            raise CheckpointError(
                f"{folder / name} is damaged: its size ({len(data)} bytes) or its hash does not match the manifest. Use "
                "another checkpoint."
            )
    return contents


def _contents(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(
            f"{path} must be a regular file; it is missing or a symbolic link. Use another checkpoint."
        )
    return path.read_bytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid4().hex}.tmp")


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


def _sync(path: Path) -> None:
    """Flush the contents of a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
