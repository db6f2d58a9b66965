"""The manifest of a checkpoint: what it holds, how large every file is and which hash it has. It is written last.

Every field is checked before any other file is opened, and the manifest's own hash covers all its bytes.
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

SCHEMA = 4
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
LARGEST_MANIFEST = 16 * 2**20
"""Bytes. A manifest has about 300 bytes for each rank."""
LARGEST_COUNT = 2**53
"""No count, and no size in bytes, is as large."""
RANK_FOLDER = re.compile(r"rank-(0|[1-9][0-9]{0,8})(?:\.([1-9][0-9]{0,8}))?")
"""The folder of a rank's files. The number after the dot tells how often the checkpoint was replaced."""
HASH = re.compile(r"[0-9a-f]{64}")
FIELDS = ("schema", "iteration", "update", "score", "num_ranks", "files", "sha256")


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
    """A manifest of a checkpoint that is about to be written. A score that is not finite becomes None: it is never the best.

    Raises:
        ContractError: `iteration` or `update` is not a count.
    """
    for name, value in {"iteration": iteration, "update": update}.items():
        required = _problem_with(name, value)
        if required:
            raise ContractError(
                f"The {name} of a checkpoint must be {required.replace('null', 'None')}; got {value!r}. "
                "Pass a number of finished iterations or updates."
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
    """Read and check the manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: The manifest is missing, damaged, or of another program. The message names the field.
    """
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
        fields = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path} is not a manifest ({type(error).__name__}). Use another checkpoint."
        ) from error
    _require_fields(path, fields)
    body, ending = bytes(data[: -len(_ending("0" * 64))]), bytes(data[-len(_ending("0" * 64)) :])
    if ending != _ending(fields["sha256"]) or hashlib.sha256(body + b"}").hexdigest() != fields["sha256"]:
        raise DamagedCheckpointError(
            f"{path} is damaged: its contents do not match its field sha256. Use another checkpoint."
        )
    files = {name: FileRecord(**record) for name, record in fields["files"].items()}
    return Manifest(**{name: fields[name] for name in ("iteration", "update", "score", "num_ranks")}, files=files)


def _require_fields(path: Path, fields: Any) -> None:
    """Require exactly the fields of this version, each with an allowed value."""
    if not isinstance(fields, dict):
        raise DamagedCheckpointError(
            f"{path} must hold a JSON object; got a {type(fields).__name__}. Use another checkpoint."
        )
    schema = fields.get("schema")
    if type(schema) is int and schema != SCHEMA:
        advice = "Update model-agnostic-grpo" if schema > SCHEMA else "Load it with the version that wrote it"
        raise OtherSchemaError(f"{path} has schema {schema}; this version reads {SCHEMA}. {advice}.")
    for name in FIELDS:
        if name not in fields:
            raise DamagedCheckpointError(f"{path} lacks the field {name}. Use another checkpoint.")
        required = _problem_with(name, fields[name])
        if required:
            raise DamagedCheckpointError(
                f"{path}: {name} must be {required}; got {reprlib.repr(fields[name])}. Use another checkpoint."
            )
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise DamagedCheckpointError(f"{path} has the unknown field {unknown[0][:200]!r}. Use another checkpoint.")
    _require_files(path, fields["files"], fields["num_ranks"])


def _problem_with(name: str, value: Any) -> str:
    """Return what a field must be if `value` is not allowed, else an empty string."""
    match name:
        case "schema":
            return "" if type(value) is int else "a whole number"
        case "iteration" | "size":
            return "" if _is_count(value) else "a whole number, at least 0"
        case "update":
            return "" if value is None or _is_count(value) else "null or a whole number, at least 0"
        case "score":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return "" if value is None or (is_number and _is_finite(value)) else "null or a finite number"
        case "num_ranks":
            return "" if _is_count(value) and value > 0 else "a whole number, at least 1"
        case "files":
            return "" if isinstance(value, dict) else "an object"
        case _:
            return "" if isinstance(value, str) and HASH.fullmatch(value) else "64 lower-case hexadecimal digits"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_COUNT


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _require_files(path: Path, files: Mapping[str, Any], num_ranks: int) -> None:
    """Require two files for each rank, all of one generation, each with a size and a hash."""
    generation = generation_of(next(iter(files), "").split("/")[0])
    # counted first: the declared number of ranks may be absurd
    if len(files) != 2 * num_ranks or set(files) != _names(num_ranks, generation):
        raise DamagedCheckpointError(
            f"{path} names {str(sorted(files)[:4])[:300]} as files; for {num_ranks} ranks, a checkpoint has "
            f"rank-0/{STATE}, rank-0/{TENSORS} and so on. Use another checkpoint."
        )
    for name, record in files.items():
        if not isinstance(record, dict) or set(record) != {"size", "sha256"}:
            raise DamagedCheckpointError(
                f"{path}: files[{name!r}] must have a size and a sha256; got {reprlib.repr(record)}. Use another checkpoint."
            )
        for key, value in record.items():
            required = _problem_with(key, value)
            if required:
                raise DamagedCheckpointError(
                    f"{path}: {key} of files[{name!r}] must be {required}; got {reprlib.repr(value)}. Use another checkpoint."
                )


def _names(num_ranks: int, generation: int) -> set[str]:
    return {f"{rank_folder(rank, generation)}/{name}" for rank in range(num_ranks) for name in (STATE, TENSORS)}
