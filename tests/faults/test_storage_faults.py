"""Checkpoints on failing disks: a kill or an error at every file call, and thousands of damaged files."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo import CheckpointError
from grpo.checkpoint import CheckpointFolder, open_checkpoint, read_checkpoint, write_checkpoint
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.launches import printed_by
from tests.support.storage_faults import SCENARIOS

pytestmark = [pytest.mark.usefixtures("without_type_checks"), pytest.mark.faults, pytest.mark.timeout(1200)]
FAULTS = ["SIGKILL", "ENOSPC", "EIO", "EACCES", "EMFILE"]
FEWEST_CALLS = {"save and prune": 100, "replace": 100, "load": 50}
"""Fewer calls would say that strace has missed some."""


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_file_call_loses_no_earlier_checkpoint(
    scenario: str, fault: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    assert shutil.which("strace"), "These tests need strace: apt-get install strace"
    printed = printed_by("-m", "tests.support.storage_faults", tmp_path, scenario, fault, seconds=900)
    points = [json.loads(line) for line in printed.splitlines()]
    wrong = [point for point in points if point[-1]]
    assert not wrong, f"{len(wrong)} of {len(points)}: {wrong[:5]}"
    record_property(f"{scenario}, {fault}", f"{len(points)} calls")
    assert len(points) >= FEWEST_CALLS[scenario]


NUM_RANKS = 2
FILES = [
    "manifest.json",
    *(f"rank-{rank}/{name}" for rank in range(2) for name in ("state.json", "tensors.safetensors")),
]


def state_of_rank(rank: int) -> dict[str, object]:
    return {"rank": rank, "parameters": {"w": torch.randn(40, 5)}, "history": [{"x": i / 7} for i in range(50)]}


def loads(path: Path) -> list[object]:
    """What each rank finds: its iteration, or its error."""

    def load(engine: ImitatedRank) -> int:
        checkpoint = open_checkpoint(path, engine)
        checkpoint.load(checkpoint.state)
        return checkpoint.iteration

    return on_ranks(NUM_RANKS, load)


def changed(data: bytes, generator: random.Random, kind: str) -> bytes:
    place = generator.randrange(len(data))
    if kind == "cut":
        return data[:place]
    return data[:place] + bytes([data[place] ^ (1 << generator.randrange(8))]) + data[place + 1 :]


@pytest.mark.parametrize(("kind", "count"), [("flip", 5000), ("cut", 500)])
def test_every_flip_and_cut_is_detected_on_all_ranks_and_the_file_is_named(
    kind: str, count: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for n in (1, 2):
        on_ranks(
            NUM_RANKS,
            lambda engine, n=n: write_checkpoint(
                tmp_path / str(n), state_of_rank(engine.rank), iteration=n, score=1e-5, engine=engine
            ),
        )
    assert loads(tmp_path) == [2, 2]
    generator = random.Random(kind)
    for i in range(count):
        name = FILES[i % len(FILES)]
        file = tmp_path / "2" / name
        data = file.read_bytes()
        file.write_bytes(changed(data, generator, kind))
        for error in loads(tmp_path / "2"):
            assert isinstance(error, CheckpointError), f"{kind} {i} of {name} was not detected: {error}"
            assert name in str(error)
        if i % 50 == 0:
            assert loads(tmp_path) == [1, 1]
        file.write_bytes(data)
    assert loads(tmp_path) == [2, 2]
    record_property(kind, f"{count} detected")


def test_a_disk_that_is_really_full_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    """A file system of 1 MB. Only root may mount one: the test needs root, or sudo without a password, as on hosted runners.

    A user namespace needs neither, but the runners' Ubuntu forbids it to ordinary users.
    """
    as_root = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run([*as_root, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        with CheckpointFolder(disk / "run", 5) as folder:
            folder.save({"n": 1, "x": torch.zeros(50_000)}, iteration=1, score=None)
            for n in range(2, 5):  # 200 KB each
                folder.save({"n": n, "x": torch.zeros(50_000)}, iteration=n, score=None)
            with pytest.raises(CheckpointError, match=r"iteration-00000005.*No space left on device"):
                folder.save({"n": 5, "x": torch.zeros(80_000)}, iteration=5, score=None)
            assert read_checkpoint(disk / "run")["n"] == 4
            assert not [path for path in (disk / "run").iterdir() if path.name.endswith(".tmp")]
    finally:
        subprocess.run([*as_root, "umount", disk], check=True)
