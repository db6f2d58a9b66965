"""Open one checkpoint, or the newest intact one of a folder. All ranks open the same checkpoint."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo._sharding.tensors import own_rows
from grpo.engine import Engine, OneProcess
from grpo.errors import CheckpointError, DamagedCheckpointError

from .decoding import SavedRows, decode, loaded
from .files import as_path, opened, read_exactly, require_hash, require_size, unreadable
from .manifest import MANIFEST, RANK_FOLDER, RUN_CHECKPOINT, STATE, TENSORS, Manifest, rank_folder, read_manifest
from .tensor_file import TensorFile

T = TypeVar("T")


class DividedTensors:
    """The rows of all ranks, joined in rank order, and divided anew if the engine divides weights.

    Args:
        files: The files of tensors of all ranks that wrote the checkpoint.
        engine: Joins the ranks that read. None: this process reads whole tensors.
    """

    def __init__(self, files: Sequence[TensorFile], engine: Engine | None) -> None:
        self._files, self._engine = files, engine

    def read(self, saved: SavedRows) -> Tensor:
        """Read the whole tensor, or the rows of this rank as a divided tensor."""
        if self._engine is None or not self._engine.divides_weights:
            return self._rows(saved, slice(0, saved.shape[0]))
        rows = own_rows(saved.shape[0], self._engine.rank, self._engine.num_ranks)
        return self._engine.divided(self._rows(saved, rows), saved.shape)

    def _rows(self, saved: SavedRows, wanted: slice) -> Tensor:
        parts, first = [], 0
        for file in self._files:
            place = file.places.get(saved.name)
            if place is None or place.shape[1:] != saved.shape[1:] or place.dtype != saved.dtype:
                raise DamagedCheckpointError(f"A rank has no rows of {saved.name!r}. Use another checkpoint.")
            begin, end = max(wanted.start, first), min(wanted.stop, first + place.shape[0])
            if begin < end:
                parts.append(file.read_rows(saved.name, begin - first, end - first))
            first += place.shape[0]
        if first != saved.shape[0]:
            raise DamagedCheckpointError(
                f"The ranks have {first} rows of {saved.name!r}, which has {saved.shape[0]}. Use another checkpoint."
            )
        return torch.cat(parts) if parts else torch.empty((0, *saved.shape[1:]), dtype=saved.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files are verified. Its tensors are still on the disk."""

    path: Path
    """The checkpoint's folder."""
    iteration: int
    """Number of completed iterations."""
    update: int | None
    """Number of finished updates of the iteration that is not finished. None: the last iteration is finished."""
    score: float | None
    """The score that decides which checkpoint is the best. None: no score."""
    state: dict[str, Any]
    """The state of this rank. `SavedTensor(name, shape, dtype)` and other placeholders stand for what is not read yet."""
    num_ranks: int
    """Number of processes that wrote the checkpoint."""
    skipped: tuple[str, ...] = ()
    """What is wrong with each newer checkpoint of the folder."""
    _tensors: TensorFile = field(repr=False)
    _divided: DividedTensors = field(repr=False)
    _objects: dict[int, Any] = field(default_factory=dict, repr=False)
    """Objects that were restored: one that occurs in several parts is the same object in all of them."""

    def load(self, part: Any) -> Any:
        """Return `part`, which is the state or a value in it, with tensors, arrays and objects read from the disk.

        Raises:
            CheckpointError: The file of tensors is missing or has changed, or an object's `from_state` raised.
        """
        try:
            return loaded(part, self._tensors.read, self._objects, self._divided.read)
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{self.path} is intact, but not a checkpoint of this package: {error!r}. Use another checkpoint."
            ) from error


Check = Callable[[Checkpoint], None]


def open_checkpoint(path: str | Path, engine: Engine | None, check: Check | None = None) -> Checkpoint:
    """Open one checkpoint, or the newest intact one of a folder of checkpoints. All ranks call this function.

    Args:
        path: A checkpoint's folder, or a folder of checkpoints, of which damaged ones are skipped.
        engine: Joins the ranks. Each rank gets its own state. None: this process reads the state of rank 0, however many ranks
            wrote the checkpoint.
        check: Called before the tensors are read. A `DamagedCheckpointError` that it raises skips the checkpoint, and any
            other error is raised.

    Raises:
        CheckpointError: A file is missing, truncated, altered, or written by another program or another version. The message
            names the file.
    """
    folder = as_path(path)
    ranks: Engine = engine or OneProcess()
    with ranks.together():
        # rank 0 lists for all: ranks that list by themselves could load different iterations
        own = _candidates(folder) if ranks.rank == 0 else ([], [])
    candidates, unread = ranks.gather_objects(own)[0]
    problems: list[str] = [*unread]
    for candidate in candidates:
        checkpoint, problem = None, None
        with ranks.together():
            try:
                checkpoint = _opened(candidate, engine, tuple(problems), check)
            except DamagedCheckpointError as error:
                problem = str(error)
        found = [problem for problem in ranks.gather_objects(problem) if problem is not None]
        if checkpoint is not None and not found:
            return checkpoint
        if candidates == [folder]:
            raise DamagedCheckpointError(found[0])
        problems.append(found[0])
    raise CheckpointError(" ".join([f"No intact checkpoint in {folder}.", *problems]))


def _candidates(folder: Path) -> tuple[list[Path], list[str]]:
    """The checkpoint itself, or the checkpoints in the folder, newest first, and what is wrong with manifests.

    A checkpoint whose manifest cannot be read may be the newest.
    """
    if is_checkpoint(folder):
        return [folder], []
    manifests, problems = manifests_of(checkpoints_in(folder))
    return sorted(manifests, key=lambda path: (manifests[path].position, path), reverse=True), problems


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a manifest, intact or not."""
    try:
        return os.path.lexists(path / MANIFEST)
    except OSError:
        return False


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, intact or not, so that whoever takes another one can say why.

    A folder without a manifest is a damaged checkpoint if it holds a state. A link counts if its name is that of a run's
    checkpoint, and `listed_manifest` refuses it. Hidden folders are left out.
    """
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.name[0] != "."
                and (
                    re.fullmatch(RUN_CHECKPOINT, entry.name)
                    if entry.is_symlink()
                    else entry.is_dir(follow_symlinks=False)
                )
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(str(unreadable(folder, error))) from error
    return [folder / name for name in sorted(names) if _may_be_checkpoint(folder / name)]


def _may_be_checkpoint(path: Path) -> bool:
    try:
        names = {entry.name for entry in path.iterdir()}
        ranks = [path / name for name in names if RANK_FOLDER.fullmatch(name)]
        return MANIFEST in names or any(entry.name == STATE for rank in ranks for entry in rank.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False  # deleted meanwhile
    except PermissionError:
        return re.fullmatch(RUN_CHECKPOINT, path.name) is not None  # or a folder of others, such as lost+found
    except OSError:
        return True  # the disk fails, and the manifest's reader learns why


def manifests_of(paths: Iterable[Path]) -> tuple[dict[Path, Manifest], list[str]]:
    """The manifests of these checkpoints, and what is wrong with each one that cannot be read."""
    manifests, problems = {}, []
    for path in paths:
        try:
            manifests[path] = read_again(partial(listed_manifest, path))
        except DamagedCheckpointError as error:
            problems.append(str(error))
    return manifests, problems


def listed_manifest(path: Path) -> Manifest:
    """Read the manifest of one of `checkpoints_in`."""
    try:
        is_link = path.is_symlink()
    except OSError as error:
        raise unreadable(path, error) from error
    if is_link:
        raise DamagedCheckpointError(
            f"{path} is a link, and links inside a folder of checkpoints are not followed. Load {os.path.realpath(path)}, or "
            "move it here."
        )
    return read_manifest(path)


def read_again(read: Callable[[], T]) -> T:
    """Read once more if the disk failed, because another checkpoint is a wrong answer to a failure that passes."""
    try:
        return read()
    except DamagedCheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        return read()


def require_intact(folder: Path, manifest: Manifest) -> None:
    """Require that all files of all ranks are as they were written."""
    for name, record in manifest.files.items():
        require_size(folder, name, record)
    for name, record in manifest.files.items():
        require_hash(folder, name, record)


def _opened(folder: Path, engine: Engine | None, skipped: tuple[str, ...], check: Check | None) -> Checkpoint:
    """Open the checkpoint for this rank. Sizes come first, then what is small, then `check`, and then the tensors' hash."""
    manifest = read_manifest(folder)
    # a rank beyond those that wrote the checkpoint begins with the state of one of them
    own = (engine.rank if engine is not None else 0) % manifest.num_ranks
    folders = [rank_folder(rank, manifest.generation) for rank in range(manifest.num_ranks)]
    state_name, tensors_name = f"{folders[own]}/{STATE}", f"{folders[own]}/{TENSORS}"
    if engine is None or engine.num_ranks == manifest.num_ranks:
        require_size(folder, tensors_name, manifest.files[tensors_name])
    require_size(folder, state_name, manifest.files[state_name])
    require_hash(folder, state_name, manifest.files[state_name])
    tensors = TensorFile(folder, tensors_name)
    try:
        state = _state(folder, state_name, manifest.files[state_name].size, tensors)
    except DamagedCheckpointError:
        require_hash(folder, tensors_name, manifest.files[tensors_name])  # names in its header may be wrong
        raise
    is_divided = _is_divided(state)
    read = [f"{name}/{TENSORS}" for name in folders] if is_divided else [tensors_name]
    for name in read:
        require_size(folder, name, manifest.files[name])
    files = [tensors if name == tensors_name else TensorFile(folder, name) for name in read]
    checkpoint = Checkpoint(
        path=folder,
        iteration=manifest.iteration,
        update=manifest.update,
        score=manifest.score,
        state=state,
        num_ranks=manifest.num_ranks,
        skipped=skipped,
        _tensors=tensors,
        _divided=DividedTensors(files, engine),
    )
    if check is not None:
        check(checkpoint)
    for name in read:
        require_hash(folder, name, manifest.files[name])
    return checkpoint


def _is_divided(state: dict[str, Any]) -> bool:
    """Whether each rank has written some rows of the weights."""
    parameters = state.get("parameters")
    return isinstance(parameters, dict) and any(isinstance(value, SavedRows) for value in parameters.values())


def _state(folder: Path, name: str, size: int, tensors: TensorFile) -> dict[str, Any]:
    text = bytearray(size)
    with opened(folder, name) as file:
        read_exactly(file, memoryview(text), folder / name)
    try:
        state = decode(bytes(text), tensors.places)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{folder} is intact, but not a checkpoint of this package: {error!r} in {name}. Use another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise DamagedCheckpointError(
            f"{folder / name} must hold a dict; got a {type(state).__name__}. Use another checkpoint."
        )
    return state
