"""Files of checkpoints: what their hash is, that two threads compute it while the file is written, and what damage changes."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo._storage import files as module
from grpo._storage.files import FileRecord, new_file, require_hash, write_file
from grpo.errors import DamagedCheckpointError

BLOCK = 1000
"""A small block, with chunks that are smaller and larger."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(module, "CHUNK", 300)
    monkeypatch.setattr(module, "SMALL", 100)


def bytes_of(size: int) -> bytes:
    return bytes((7 * i + i // 251) % 256 for i in range(size))


def sha256(contents: bytes) -> bytes:
    return hashlib.sha256(contents).digest()


@pytest.mark.parametrize("size", [0, 1, 99, BLOCK])
def test_the_hash_of_a_short_file_is_its_sha256(tmp_path: Path, size: int) -> None:
    record = write_file(tmp_path / "file", bytes_of(size))
    assert record == FileRecord(size=size, sha256=sha256(bytes_of(size)).hex())
    require_hash(tmp_path, "file", record)


@pytest.mark.parametrize("size", [BLOCK + 1, 2 * BLOCK, 4 * BLOCK + 7])
@pytest.mark.parametrize("chunk", [1, 120, 300, 2 * BLOCK + 50])
@pytest.mark.parametrize("is_constant", [False, True])
def test_the_hash_of_a_long_file_is_the_sha256_of_those_of_its_blocks(
    tmp_path: Path, size: int, chunk: int, is_constant: bool
) -> None:
    """Whatever the sizes of the chunks are."""
    contents = bytes_of(size)
    with new_file(tmp_path / "file") as file:
        for begin in range(0, size, chunk):
            file.write(contents[begin : begin + chunk], is_constant=is_constant)
    blocks = [sha256(contents[begin : begin + BLOCK]) for begin in range(0, size, BLOCK)]
    assert file.record() == FileRecord(size=size, sha256=sha256(b"".join(blocks)).hex())
    assert (tmp_path / "file").read_bytes() == contents
    require_hash(tmp_path, "file", file.record())


def test_a_buffer_may_be_filled_again_after_each_chunk(tmp_path: Path) -> None:
    contents, buffer = bytes_of(3 * BLOCK), bytearray(200)
    with new_file(tmp_path / "file") as file:
        for begin in range(0, len(contents), 200):
            buffer[:] = contents[begin : begin + 200]
            file.write(memoryview(buffer))
    require_hash(tmp_path, "file", file.record())
    assert (tmp_path / "file").read_bytes() == contents


@pytest.mark.parametrize("position", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 500, 2 * BLOCK + 999])
def test_a_changed_byte_of_any_block_is_found(tmp_path: Path, position: int) -> None:
    record = write_file(tmp_path / "file", bytes_of(3 * BLOCK))
    damaged = bytearray(bytes_of(3 * BLOCK))
    damaged[position] ^= 1
    (tmp_path / "file").write_bytes(damaged)
    with pytest.raises(DamagedCheckpointError, match=r"file is damaged: its hash"):
        require_hash(tmp_path, "file", record)


@pytest.mark.parametrize("size", [0, BLOCK, 2 * BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 1, 3 * BLOCK])
def test_another_length_is_found(tmp_path: Path, size: int) -> None:
    record = write_file(tmp_path / "file", bytes(2 * BLOCK + 500))
    (tmp_path / "file").write_bytes(bytes(size))
    with pytest.raises(DamagedCheckpointError, match=r"file is damaged: its hash"):
        require_hash(tmp_path, "file", record)


def test_two_blocks_are_hashed_at_once_while_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving is fast because of it. The hashes wait for each other and for the end of writing, or else time out."""
    at_once, written, real = threading.Barrier(2, timeout=20), threading.Event(), hashlib.sha256

    class Waiting:
        def __init__(self, contents: bytes = b"") -> None:
            self._sha256 = real(contents)

        def update(self, chunk: Any) -> None:
            at_once.wait()
            assert written.wait(timeout=20)
            self._sha256.update(chunk)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sha256, name)

    monkeypatch.setattr(module.hashlib, "sha256", Waiting)
    contents = bytes_of(2 * BLOCK)
    with new_file(tmp_path / "file") as file:
        file.write(contents[:BLOCK], is_constant=True)
        file.write(contents[BLOCK:], is_constant=True)
        written.set()
    record = file.record()
    monkeypatch.undo()
    assert record.sha256 == sha256(sha256(contents[:BLOCK]) + sha256(contents[BLOCK:])).hex()
