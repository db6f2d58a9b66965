"""Files of checkpoints: written in a stream and hashed on the way, synced to disk, and read without following links."""

import errno
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path

from grpo.errors import CheckpointError, DamagedCheckpointError

CHUNK = 4 * 2**20
"""Bytes that are written, hashed or copied at a time."""
SMALL = 2**17
"""Chunks of fewer bytes are hashed before they are written."""
OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the file that was opened: every other file would fail, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The size and the hash of one file."""

    size: int
    """Number of bytes."""
    sha256: str
    """SHA-256 of all bytes, as 64 lower-case hexadecimal digits."""


class HashingWriter:
    """Writes a file and hashes each chunk. Large chunks are hashed in a second thread, while the file is written and synced."""

    def __init__(self, file: BufferedWriter, hashing: ThreadPoolExecutor) -> None:
        self._file, self._hashing = file, hashing
        self._sha256 = hashlib.sha256()
        self._last: Future[None] | None = None
        self._size = 0

    def write(self, chunk: memoryview | bytes, *, is_constant: bool = False) -> None:
        """Write one chunk.

        Args:
            chunk: the bytes.
            is_constant: the chunk's memory is in use anyway, and nobody changes it until the file is complete, so that this
                method need not wait for the hash.
        """
        if len(chunk) < SMALL and self._last is None:
            self._sha256.update(chunk)  # a second thread would take longer
        else:
            self._last = self._hashing.submit(self._sha256.update, chunk)
        self._file.write(chunk)
        self._size += len(chunk)
        if not is_constant:
            self._wait()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def record(self) -> FileRecord:
        """The size and the hash of what has been written."""
        self._wait()
        return FileRecord(size=self._size, sha256=self._sha256.hexdigest())


@contextmanager
def new_file(path: Path) -> Iterator[HashingWriter]:
    """Create a file and yield its writer. On leaving, the contents are flushed to the disk."""
    hashing = ThreadPoolExecutor(max_workers=1)
    try:
        with path.open("xb") as file:
            yield HashingWriter(file, hashing)
            file.flush()
            os.fsync(file.fileno())
    finally:
        hashing.shutdown(wait=True, cancel_futures=sys.exc_info()[0] is not None)


def write_file(path: Path, contents: bytes) -> FileRecord:
    """Create a file with these contents, and flush them to the disk."""
    with new_file(path) as file:
        file.write(contents)
    return file.record()


def sync_folder(path: Path) -> None:
    """Flush the list of names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. Their names are flushed to the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a file or a folder. What cannot be removed stays, and the next save to the same path removes it."""
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file or folder that cannot be read. Only damage to this file makes it a `DamagedCheckpointError`."""
    if error.errno in OF_THE_PROCESS:
        return CheckpointError(f"Cannot read {path}: {error}. Close files, or free memory, and load again.")
    return DamagedCheckpointError(f"Cannot read {path}: {error}. Use another checkpoint.")


def size_of(folder: Path, name: str) -> int:
    """Return the size of a regular file in a checkpoint. `name` may have one folder, as `rank-0/state.json` has.

    Raises:
        DamagedCheckpointError: the file is missing, or the file or its folder is a link or not a regular file.
    """
    path = folder / name
    try:
        above = [(folder / part).lstat() for part in Path(name).parents[:-1]]
        found = path.lstat()
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing. Use another checkpoint.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not all(stat.S_ISDIR(entry.st_mode) for entry in above) or not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpointError(
            f"{path} must be a regular file in a regular folder; it is a link or another kind of file. "
            "Use another checkpoint."
        )
    return found.st_size


@contextmanager
def opened(folder: Path, name: str) -> Iterator[FileIO]:
    """Open a regular file of a checkpoint for reading. An `OSError` in the block becomes a `CheckpointError` with the path."""
    size_of(folder, name)
    path = folder / name
    try:
        # without following a link, and without waiting for the writer of a pipe
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        with FileIO(os.open(path, flags), "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from error


def require_size(folder: Path, name: str, record: FileRecord) -> None:
    """Require that a file has the size that the manifest declares. Only the folder's entry is read."""
    found = size_of(folder, name)
    if found != record.size:
        raise DamagedCheckpointError(
            f"{folder / name} is damaged: it has {found} bytes, and the manifest's size says {record.size}. "
            "Use another checkpoint."
        )


def require_hash(folder: Path, name: str, record: FileRecord) -> None:
    """Require that a file's contents have the hash that the manifest declares. The file is read in small parts."""
    with opened(folder, name) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != record.sha256:
        raise DamagedCheckpointError(
            f"{folder / name} is damaged: its hash does not match the manifest's sha256. Use another checkpoint."
        )


def read_exactly(file: FileIO, buffer: memoryview, path: Path) -> None:
    """Fill `buffer` from the file's position.

    Raises:
        DamagedCheckpointError: the file ends too early.
    """
    filled = 0
    while filled < len(buffer):
        count = file.readinto(buffer[filled : filled + 16 * CHUNK])
        if not count:
            raise DamagedCheckpointError(f"{path} became shorter while it was read. Use another checkpoint.")
        filled += count
