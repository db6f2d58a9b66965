"""Files of checkpoints: what their hash is, that two threads compute it while the file is written, and what damage changes."""

import hashlib
import json
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo._storage import files as module
from grpo._storage.files import FileRecord, new_file, require_hash, write_file
from grpo.errors import DamagedCheckpointError
from tests.support.launches import printed_by

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
def test_the_hash_of_a_long_file_is_the_sha256_of_those_of_its_blocks(tmp_path, size, chunk, is_constant) -> None:
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


def test_two_blocks_are_hashed_at_once_while_the_file_is_written(tmp_path, monkeypatch) -> None:
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


# Peak memory of saving and loading, in a process of its own: a checkpoint is never in memory a second time


PRELUDE = """
    import gc, json, sys
    from pathlib import Path
    import torch

    folder, size = Path(sys.argv[1]), 96 * 2**20

    def peak_of(call):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
        before = status("VmRSS")
        call()
        return (status("VmHWM") - before) * 1024 / size

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))
"""
CHECKPOINT = """
    from grpo.checkpoint import load_weights, read_checkpoint, write_checkpoint

    class Policy:
        def __init__(self, weights):
            self.weights = weights
        def get_parameters(self):
            return self.weights

    def state():
        third = torch.randn(size // 12)
        weights = {"a": third.requires_grad_()}
        return {"parameters": weights, "moments": [torch.randn(2, size // 24).t(), torch.randn(size // 12)]}

    read_checkpoint(write_checkpoint(folder / "small", {"x": torch.ones(2_000_000)}, iteration=1))
    measured, kept = {}, state()
    measured["save"] = peak_of(lambda: write_checkpoint(folder / "large", kept, iteration=1))
    policy = Policy({"a": torch.zeros(size // 12)})
    measured["load_weights"] = peak_of(lambda: load_weights(folder / "large", policy))
    assert torch.equal(policy.weights["a"], kept["parameters"]["a"])
    del kept, policy
    measured["load"] = peak_of(lambda: read_checkpoint(folder / "large"))
    print(json.dumps(measured))
"""
TRAINER = """
    from grpo import GRPOConfig, GRPOTrainer
    from tests.support.policies import TablePolicy

    class Large(TablePolicy):
        def __init__(self):
            super().__init__(dtype=torch.float32)
            self.more = torch.nn.ParameterList(torch.randn(size // 48) for _ in range(4))
        def get_log_probabilities(self, states, actions):
            return super().get_log_probabilities(states, actions) + 1e-9 * sum(value.mean() for value in self.more)

    def trainer():
        return GRPOTrainer(config=GRPOConfig(), policy=Large(), reward_model=lambda states, actions: list(map(float, actions)))

    used, measured = trainer(), {}
    used.step(["a", "b"])
    measured["save"] = peak_of(lambda: used.save_checkpoint(folder / "large"))
    measured["size"] = (folder / "large" / "rank-0" / "tensors.safetensors").stat().st_size / size
    measured["load after training"] = peak_of(lambda: used.load_checkpoint(folder / "large"))
    del used
    fresh = trainer()
    measured["load"] = peak_of(lambda: fresh.load_checkpoint(folder / "large"))
    print(json.dumps(measured))
"""


def measured_by(script: str, folder: Path) -> dict[str, float]:
    """What a script prints, which measures in a process of its own."""
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
    # the allocator returns large blocks when they are freed, so that a later call cannot take memory of an earlier one
    return json.loads(printed_by("-c", code, folder, seconds=240, MALLOC_MMAP_THRESHOLD_=str(2**20)))


needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a part of a program"
)


@pytest.mark.slow
@needs_linux
def test_saving_adds_at_most_a_fifth_and_loading_at_most_one_and_a_fifth(tmp_path: Path) -> None:
    measured = measured_by(CHECKPOINT, tmp_path)
    assert measured["save"] <= 0.2, measured
    assert 0.7 <= measured["load"] <= 1.2, measured  # less would say that nothing was measured
    assert 0.3 <= measured["load_weights"] <= 0.5, measured  # the weights are a third


@pytest.mark.slow
@needs_linux
def test_a_trainer_with_adamw_needs_no_more(tmp_path: Path) -> None:
    measured = measured_by(TRAINER, tmp_path)
    assert 0.99 <= measured["size"] <= 1.01, measured  # the weights, which are also the policy's state, and two moments
    assert measured["save"] <= 0.2, measured
    assert 0.7 <= measured["load"] <= 1.2, measured
    assert 0.7 <= measured["load after training"] <= 1.2, measured
