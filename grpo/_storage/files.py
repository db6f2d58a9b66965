"""Files of checkpoints: written in a stream and hashed on the way, synced to disk, and read without following links."""

import errno
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from os import PathLike
from pathlib import Path
from typing import Any

from grpo._common.conversion import describe
from grpo.errors import CheckpointError, DamagedCheckpointError

CHUNK = 4 * 2**20
"""Bytes that are written, hashed or copied at a time."""
BLOCK = 4 * CHUNK
"""Bytes of a file that are hashed one after another. Two blocks are hashed at the same time."""
NUM_THREADS = 2
"""Threads that hash. One alone hashes more slowly than a fast disk writes."""
SMALL = 2**17
"""Chunks of fewer bytes are hashed before they are written."""
OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the file that was opened: every other file would fail, too."""


def as_path(path: Any) -> Path:
    """Return an absolute path. A CheckpointError if `path` is neither text nor a path."""
    if not isinstance(path, str | PathLike) or "\0" in str(path):
        raise CheckpointError(f"A checkpoint's path must be a str or a Path, without NUL; got {describe(path)}.")
    return Path(path).absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The size and the hash of one file."""

    size: int
    """Number of bytes."""
    sha256: str
    """SHA-256 of the bytes, or of the SHA-256 of the blocks if there are several: 64 lower-case hexadecimal digits."""


class HashingWriter:
    """Writes a file and hashes it. Large chunks are hashed in other threads, while the file is written and synced.

    Args:
        file: The new file.
        threads: Executors of one thread each. They take turns, so that the chunks of a block are hashed in order.
    """

    def __init__(self, file: BufferedWriter, threads: Sequence[ThreadPoolExecutor]) -> None:
        self._file, self._threads = file, threads
        self._blocks = [hashlib.sha256()]
        self._running: list[Future[None]] = []
        self._size = 0

    def write(self, chunk: memoryview | bytes, *, is_constant: bool = False) -> None:
        """Write one chunk.

        Args:
            chunk: The bytes.
            is_constant: The chunk's memory is in use anyway, and nobody changes it until the file is complete, so that this
                method need not wait for the hash.
        """
        begin = 0
        while begin < len(chunk):
            if self._size == BLOCK * len(self._blocks):
                self._blocks.append(hashlib.sha256())
            end = begin + BLOCK * len(self._blocks) - self._size
            self._write_part(memoryview(chunk)[begin:end])
            begin = end
        if not is_constant:
            self._wait()

    def _write_part(self, part: memoryview) -> None:
        """Write a part of the last block."""
        sha256 = self._blocks[-1]
        if len(part) < SMALL and not self._running:
            sha256.update(part)  # another thread would take longer
        else:
            self._running.append(self._threads[len(self._blocks) % NUM_THREADS].submit(sha256.update, part))
        self._file.write(part)
        self._size += len(part)

    def _wait(self) -> None:
        for task in self._running:
            task.result()
        self._running.clear()

    def record(self) -> FileRecord:
        """The size and the hash of what has been written."""
        self._wait()
        return FileRecord(size=self._size, sha256=_joined([sha256.digest() for sha256 in self._blocks]))


def _joined(blocks: Sequence[bytes]) -> str:
    """The hash of a file, from the hashes of its blocks."""
    return blocks[0].hex() if len(blocks) == 1 else hashlib.sha256(b"".join(blocks)).hexdigest()


@contextmanager
def new_file(path: Path) -> Iterator[HashingWriter]:
    """Create a file and yield its writer. On leaving, the contents are flushed to the disk."""
    threads = [ThreadPoolExecutor(max_workers=1) for _ in range(NUM_THREADS)]
    try:
        with path.open("xb") as file:
            yield HashingWriter(file, threads)
            file.flush()
            os.fsync(file.fileno())
    finally:
        for thread in threads:
            thread.shutdown(wait=True, cancel_futures=sys.exc_info()[0] is not None)


def write_file(path: Path, contents: bytes) -> FileRecord:
    """Create a file with these contents, and flush them to the disk."""
    with new_file(path) as file:
        file.write(contents)
    return file.record()


def sync_folder(path: Path) -> None:
    """Flush the list of names in a folder to the disk. Windows opens no folder, and keeps the names without it."""
    if os.name == "nt":
        return
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
    """Return the size of a regular file in a checkpoint. `name` may have one folder, as `rank-0/state.json` has."""
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
    with opened(folder, name) as file, ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
        begins = range(0, os.fstat(file.fileno()).st_size, BLOCK) or [0]  # an empty file is one block
        found = _joined(list(threads.map(lambda begin: _hash_of_block(folder, name, begin), begins)))
    if found != record.sha256:
        raise DamagedCheckpointError(
            f"{folder / name} is damaged: its hash does not match the manifest's sha256. Use another checkpoint."
        )


def _hash_of_block(folder: Path, name: str, begin: int) -> bytes:
    sha256, size = hashlib.sha256(), 0
    with opened(folder, name) as file:  # each thread has its own position; Windows has no pread
        file.seek(begin)
        while size < BLOCK and (chunk := file.read(min(CHUNK, BLOCK - size))):
            sha256.update(chunk)
            size += len(chunk)
    return sha256.digest()


def read_exactly(file: FileIO, buffer: memoryview, path: Path) -> None:
    """Fill `buffer` from the file's position."""
    filled = 0
    while filled < len(buffer):
        count = file.readinto(buffer[filled : filled + 16 * CHUNK])
        if not count:
            raise DamagedCheckpointError(f"{path} became shorter while it was read. Use another checkpoint.")
        filled += count
