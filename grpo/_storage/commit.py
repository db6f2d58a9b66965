"""Write a checkpoint of all ranks, completely or not at all.

An earlier checkpoint at the same path is replaced without a moment in which neither of the two can be loaded.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from grpo._sharding.tensors import local
from grpo.engine import Engine
from grpo.errors import CheckpointError, DamagedCheckpointError

from .files import FileRecord, make_folder, new_file, remove_tree, size_of, sync_folder, write_file
from .manifest import (
    MANIFEST,
    RANK_FOLDER,
    STATE,
    TENSORS,
    Manifest,
    OtherSchemaError,
    encoded,
    generation_of,
    rank_folder,
    read_manifest,
)
from .tensor_file import Stored, write_tensors

Encode = Callable[[Callable[[bytes], object]], Mapping[str, Stored]]
"""Passes the JSON text of a state to a function, and returns the tensors of the state by name."""

SHARED = "checkpoint_dir must lie on a file system that all ranks share"


def commit(target: Path, encode: Encode, manifest: Manifest, engine: Engine) -> None:
    """Write the checkpoint `target`. All ranks call this function, and it returns when the checkpoint is on the disk."""
    plan: tuple[Path, int] | None = None
    try:
        with engine.together(), typed_errors(target):
            if engine.rank == 0:
                plan = _prepare(target)
        temporary, generation = engine.gather_objects(plan)[0]
        with engine.together(), typed_errors(target):
            records = _write_rank(temporary / rank_folder(engine.rank, generation), encode)
        files = {name: record for part in engine.gather_objects(records) for name, record in part.items()}
        with engine.together(), typed_errors(target):
            if engine.rank == 0:
                _require_visible(temporary, files)
                _finish(temporary, target, replace(manifest, files=files))
        engine.gather_objects(None)  # no rank goes on before the checkpoint is complete
    finally:
        if plan is not None:
            remove_tree(plan[0])


@contextmanager
def typed_errors(target: Path) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` with the checkpoint's path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"Cannot write checkpoint {target}: {error}. Earlier checkpoints are intact.") from error


def require_finite(state: Mapping[str, Any]) -> None:
    """Require that the trainable tensors of `state["parameters"]` are finite, so that the newest checkpoint can be used."""
    parameters = state.get("parameters")
    if not isinstance(parameters, Mapping):
        return
    bad = [name for name, value in parameters.items() if isinstance(value, Tensor) and not _is_finite(value)]
    if bad:
        raise CheckpointError(
            f"A checkpoint must have finite weights; {', '.join(map(str, bad[:3]))} "
            f"{'has' if len(bad) == 1 else 'have'} NaN or infinity. Nothing is written. Load an earlier checkpoint, and lower "
            "the learning rate."
        )


def require_equal(state: Mapping[str, Any], engine: Engine) -> None:
    """Let the first exchange of a save refuse weights, and settings of the optimizer, that differ between the ranks."""
    if engine.num_ranks > 1:
        parts = state.get("parts")
        optimizer = parts.get("optimizer") if isinstance(parts, Mapping) else None
        groups = optimizer["param_groups"] if isinstance(optimizer, Mapping) else []
        found = {f"optimizer.param_groups[{number}]": group for number, group in enumerate(groups)}
        engine.require_same_soon({name: state[name] for name in ("parameters", "reference") if name in state} | found)


def _is_finite(value: Tensor) -> bool:
    if not value.requires_grad or not value.is_floating_point():
        return True
    value = local(value).detach()
    if not value.numel():
        return True
    low, high = torch.aminmax(value.float() if value.element_size() == 1 else value)  # NaN makes both NaN
    return bool(torch.isfinite(low) & torch.isfinite(high))


# Preparing


def _prepare(target: Path) -> tuple[Path, int]:
    """Remove what a killed save has left, and create the temporary folder. Return it, and the generation of the files."""
    make_folder(target.parent)
    remove_temporaries(target.parent, target.name)
    generation = 0
    if os.path.lexists(target):
        manifest = _replaceable(target)
        if manifest is not None:
            _remove_unnamed(target, manifest)
        generation = 1 + max((generation_of(entry.name) for entry in _rank_folders(target)), default=-1)
    temporary = target.with_name(temporary_name(target.name))
    temporary.mkdir()
    return temporary, generation


def _replaceable(target: Path) -> Manifest | None:
    """Return the manifest of the checkpoint `target`. None: the folder is empty, or holds only a damaged checkpoint."""
    refused = CheckpointError(f"{target} exists and is not a checkpoint, so it is not replaced. Choose another path.")
    if not target.is_dir():
        raise refused
    try:
        return read_manifest(target)
    except OtherSchemaError as error:
        raise CheckpointError(f"{target} is not replaced: {error} Or choose another path.") from error
    except DamagedCheckpointError as error:
        names = {entry.name for entry in target.iterdir()}
        ranks = {name for name in names if RANK_FOLDER.fullmatch(name)}
        if not names - ranks - {MANIFEST} and (ranks or not names):
            return None
        raise refused from error


def _rank_folders(target: Path) -> list[Path]:
    return [entry for entry in target.iterdir() if RANK_FOLDER.fullmatch(entry.name)]


def _remove_unnamed(target: Path, manifest: Manifest) -> None:
    """Remove the ranks' folders that the manifest does not name: of the predecessor, or of a save that was killed."""
    for entry in _rank_folders(target):
        if entry.name not in manifest.rank_folders:
            remove_tree(entry)


def temporary_name(name: str) -> str:
    """A hidden name beside a checkpoint, for a folder that the next save removes if it is left behind."""
    return f".{name}.{uuid4().hex}.tmp"


def remove_temporaries(folder: Path, name: str) -> None:
    """Remove the temporary folders of saves to `folder / name` that were killed."""
    pattern = re.compile(re.escape(f".{name}.") + r"[0-9a-f]{32}\.tmp")
    for entry in folder.iterdir():
        if pattern.fullmatch(entry.name):
            remove_tree(entry)


# Writing


def _write_rank(folder: Path, encode: Encode) -> dict[str, FileRecord]:
    """Write the files of this rank, and return their records by their names in the checkpoint."""
    try:
        folder.mkdir()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{SHARED}; this rank cannot see {folder.parent}, which rank 0 has made. Choose a shared folder."
        ) from error
    # the hash of the text and the tensors it refers to are known when the text is written
    with new_file(folder / STATE) as file:
        tensors = encode(file.write)
    records = {f"{folder.name}/{STATE}": file.record()}
    with new_file(folder / TENSORS) as file:
        write_tensors(file, tensors)
    records[f"{folder.name}/{TENSORS}"] = file.record()
    sync_folder(folder)
    return records


def _require_visible(temporary: Path, files: Mapping[str, FileRecord]) -> None:
    """Require that rank 0 sees what all ranks have written."""
    for name, record in files.items():
        try:
            found: object = size_of(temporary, name)
        except DamagedCheckpointError:
            found = "no"
        if found != record.size:
            raise CheckpointError(
                f"{SHARED}; a rank wrote {name} with {record.size} bytes, and rank 0 sees {found} bytes in {temporary.parent}. "
                "Choose a shared folder."
            )


def _finish(temporary: Path, target: Path, manifest: Manifest) -> None:
    """Add the manifest, and move everything to its place."""
    write_file(temporary / MANIFEST, encoded(manifest))
    sync_folder(temporary)
    # no part of a new checkpoint is visible before this one step
    if not target.exists():
        temporary.rename(target)
        sync_folder(target.parent)
        return
    moved = []
    try:
        # two renames cannot exchange two folders at once, so new files get new names beside the old ones
        for name in sorted(manifest.rank_folders):
            (temporary / name).rename(target / name)
            moved.append(target / name)
        sync_folder(target)
        # this step commits: before it the old files count, after it the new ones
        (temporary / MANIFEST).replace(target / MANIFEST)
    except OSError:
        for path in moved:  # the old manifest is in place and does not name them
            remove_tree(path)
        raise
    sync_folder(target)
    _remove_unnamed(target, manifest)
