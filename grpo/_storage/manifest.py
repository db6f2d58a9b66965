"""The manifest of a checkpoint: what it holds, how large every file is and which hash it has. It is written last.

Its own hash covers all its bytes, and is checked before any other file is opened.
"""

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo.errors import ContractError, DamagedCheckpointError

from .files import FileRecord, opened, read_exactly, size_of

SCHEMA = 5
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
LARGEST_MANIFEST = 16 * 2**20
"""Bytes. A manifest has about 300 bytes for each rank."""
LARGEST_COUNT = 2**53
"""No count, and no size in bytes, is as large."""
RANK_FOLDER = re.compile(r"rank-(0|[1-9][0-9]{0,8})(?:\.([1-9][0-9]{0,8}))?")
"""The folder of a rank's files. The number after the dot tells how often the checkpoint was replaced."""
RUN_CHECKPOINT = r"iteration-[0-9]{8,}(-update-[0-9]{4,})?"
"""The names of the checkpoints that a run writes."""

FIELDS = {"iteration", "update", "score", "num_ranks", "files"}


class OtherSchemaError(DamagedCheckpointError):
    """Another version of this package wrote the checkpoint, so that this version can neither read nor replace it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a manifest, all checked."""

    iteration: int
    """Number of completed iterations of training."""
    update: int | None
    """Number of finished updates of the iteration that is not finished. None: the last iteration is finished."""
    score: float | None
    """The score that decides which checkpoint is the best. None: no score."""
    num_ranks: int
    """Number of processes that wrote the checkpoint."""
    files: Mapping[str, FileRecord]
    """The size and hash of every file, by its name relative to the checkpoint's folder."""

    @property
    def position(self) -> tuple[int, int]:
        """Sorts checkpoints by age: an unfinished iteration comes after the last finished one."""
        return self.iteration, -1 if self.update is None else self.update

    @property
    def generation(self) -> int:
        """How often the checkpoint was replaced."""
        return generation_of(next(iter(self.files)).split("/")[0])

    @property
    def rank_folders(self) -> set[str]:
        """The names of the folders that hold the files."""
        return {name.split("/")[0] for name in self.files}


def rank_folder(rank: int, generation: int) -> str:
    """The name of a rank's folder in a checkpoint that was replaced `generation` times."""
    return f"rank-{rank}.{generation}" if generation else f"rank-{rank}"


def generation_of(rank_folder: str) -> int:
    """How often the checkpoint was replaced when a rank's folder was written."""
    match = RANK_FOLDER.fullmatch(rank_folder)
    return int(match[2] or 0) if match else 0


def without_files(*, iteration: int, update: int | None, score: float | None, num_ranks: int) -> Manifest:
    """A manifest of a checkpoint that is about to be written. A score that is not finite becomes None: it is never the best."""
    for name, value in {"iteration": iteration, "update": update}.items():
        if not _is_count(value) and (value is not None or name == "iteration"):
            raise ContractError(
                f"The {name} of a checkpoint must be a whole number, at least 0{', or None' if name == 'update' else ''}; got "
                f"{value!r}. Pass a number of finished iterations or updates."
            )
    score = None if score is None or not math.isfinite(score) else float(score)
    return Manifest(iteration=iteration, update=update, score=score, num_ranks=num_ranks, files={})


def encoded(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`. The last field is the hash of what the bytes would be without it."""
    text = json.dumps({"schema": SCHEMA, **asdict(manifest)}).encode()
    return text[:-1] + _ending(hashlib.sha256(text).hexdigest())


def _ending(sha256: str) -> bytes:
    return f', "sha256": "{sha256}"}}'.encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint."""
    path = folder / MANIFEST
    size = size_of(folder, MANIFEST)
    if size > LARGEST_MANIFEST:
        raise DamagedCheckpointError(
            f"{path} must have at most {LARGEST_MANIFEST} bytes; it has {size}. Use another checkpoint."
        )
    data = bytearray(size)
    with opened(folder, MANIFEST) as file:
        read_exactly(file, memoryview(data), path)
    try:
        found = json.loads(bytes(data))
    except (ValueError, RecursionError):
        found = None
    match found:
        case {"schema": int(schema)} if schema != SCHEMA:
            advice = "Update model-agnostic-grpo" if schema > SCHEMA else "Load it with the version that wrote it"
            raise OtherSchemaError(f"{path} has schema {schema}; this version reads {SCHEMA}. {advice}.")
        case {"schema": int(), "sha256": str(sha256), **fields}:
            ending = _ending(sha256)
        case _:
            raise DamagedCheckpointError(f"{path} is not a manifest. Use another checkpoint.")
    if not data.endswith(ending) or hashlib.sha256(data.removesuffix(ending) + b"}").hexdigest() != sha256:
        raise DamagedCheckpointError(
            f"{path} is damaged: its contents do not match its field sha256. Use another checkpoint."
        )
    manifest = _checked(fields)
    if manifest is None:  # who wrote it knows the hash, and no manifest
        raise DamagedCheckpointError(
            f"{path} must hold an iteration, an update, a score, a number of ranks, and the size and sha256 of each rank's "
            f"{STATE} and {TENSORS}; got {reprlib.repr(fields)}. Use another checkpoint."
        )
    return manifest


def _checked(fields: Mapping[Any, Any]) -> Manifest | None:
    """The manifest with these fields, or None if they are not the fields of a manifest, with values of the right types."""
    if set(fields) != FIELDS or not isinstance(fields["files"], dict):
        return None
    files, num_ranks, score = fields["files"], fields["num_ranks"], fields["score"]
    counts = [fields["iteration"], num_ranks, 0 if fields["update"] is None else fields["update"]]
    if not all(map(_is_count, counts)) or not (score is None or (type(score) is float and math.isfinite(score))):
        return None
    generation = generation_of(next(iter(files), "").split("/")[0])
    # counted first: the declared number of ranks may be absurd
    if not 0 < 2 * num_ranks == len(files) or set(files) != {
        f"{rank_folder(rank, generation)}/{name}" for rank in range(num_ranks) for name in (STATE, TENSORS)
    }:
        return None
    for record in files.values():
        if not (isinstance(record, dict) and set(record) == {"size", "sha256"} and _is_count(record["size"])):
            return None
    return Manifest(**{**fields, "files": {name: FileRecord(**record) for name, record in files.items()}})


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_COUNT
