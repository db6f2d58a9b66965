"""Failing disks and hostile files: earlier checkpoints stay, and nothing is unpickled.

Writers that are killed at every file call: `tests/faults/test_storage_faults.py`.
"""

import errno
import io
import os
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import CheckpointError
from grpo.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from tests.support.checkpoint_runs import built, names_in, small
from tests.support.launches import printed_by
from tests.support.policies import digest, weights_of

pytestmark = pytest.mark.usefixtures("without_type_checks")


class Disk:
    """Makes the k-th call (from 1) of one kind of file operation fail; counts them."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, k: int) -> None:
        self.kind, self.k, self.count = kind, k, 0
        if kind in ("open", "write"):
            real = Path.open
            patch.setattr(Path, "open", lambda path, mode="r", *a, **o: self.opened(real, path, mode, *a, **o))
        for name in {"rename": ("rename", "replace"), "fsync": ("fsync",), "mkdir": ("mkdir",)}.get(kind, ()):
            patch.setattr(os, name, self.failing(getattr(os, name)))

    def hit(self) -> None:
        self.count += 1
        if self.count == self.k:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.kind != "mkdir" or not Path(arguments[0]).exists():  # one that exists needs no room
                self.hit()
            return real(*arguments, **options)

        return call

    def opened(self, real: Callable[..., Any], path: Path, mode: str, *arguments: Any, **options: Any) -> Any:
        if "r" in mode:
            return real(path, mode, *arguments, **options)
        if self.kind == "write":
            return FullFile(path, mode, self)
        self.hit()
        return real(path, mode, *arguments, **options)


class FullFile(io.FileIO):
    """Holds half of what no longer fits on the disk."""

    def __init__(self, path: Path, mode: str, disk: Disk) -> None:
        super().__init__(path, mode.replace("b", ""))
        self.disk = disk

    def write(self, data: Any) -> int:
        if self.disk.count + 1 == self.disk.k:
            super().write(data[: len(data) // 2])
        self.disk.hit()
        return super().write(data)


def failing_disks(kind: str, save: Callable[[], Any], prepare: Callable[[], Any]) -> Iterator[CheckpointError]:
    """The error of every k at which an operation fails, until none does."""
    for k in range(1, 40):
        prepare()
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, kind, k)
            try:
                save()
            except CheckpointError as error:
                assert disk.count >= k
                raised = error
            else:
                assert disk.count < k, f"{kind} number {k} failed, and nothing was said"
                assert k > 1, f"no {kind} was ever called"
                return
        yield raised
    raise AssertionError("it never succeeds")


OPERATIONS = ["fsync", "rename", "mkdir", "open", "write"]


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_full_disk_keeps_the_previous_checkpoint(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def prepare() -> None:
        shutil.rmtree(run, ignore_errors=True)
        CheckpointFolder(run, 3).save(small(1), iteration=1, score=1.0)

    def save() -> None:
        CheckpointFolder(run, 3).save(small(2), iteration=2, score=2.0)

    for error in failing_disks(kind, save, prepare):
        assert str(run / "iteration-00000002") in str(error)
        assert os.strerror(errno.ENOSPC) in str(error)
        assert isinstance(error.__cause__, OSError)
        assert digest(read_checkpoint(run / "iteration-00000001")) == digest(small(1))
        assert digest(read_checkpoint(run)) in (digest(small(1)), digest(small(2)))
        assert set(names_in(run)) <= {"iteration-00000001", "iteration-00000002"}  # nothing temporary
    assert digest(read_checkpoint(run)) == digest(small(2))


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_full_disk_keeps_the_checkpoint_to_be_replaced(kind: str, tmp_path: Path) -> None:
    """The old or the new checkpoint loads, whole, and no other file is left in the folder."""
    path = tmp_path / "checkpoint"

    def prepare() -> None:
        shutil.rmtree(path, ignore_errors=True)
        write_checkpoint(path, small(1), iteration=1)

    for error in failing_disks(kind, lambda: write_checkpoint(path, small(2), iteration=2), prepare):
        assert str(path) in str(error)
        assert digest(read_checkpoint(path)) in (digest(small(1)), digest(small(2)))
        assert names_in(tmp_path) == ["checkpoint"]
    assert digest(read_checkpoint(path)) == digest(small(2))
    assert names_in(tmp_path) == ["checkpoint"]


def test_a_run_on_a_full_disk_stops_with_an_error_that_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, states, options = built("plain", seed=1)
    trainer.train(states, num_iterations=2, checkpoint_dir=tmp_path / "run", checkpoint_every=1, **options)
    before = weights_of(trainer.policy)
    Disk(monkeypatch, "fsync", 1)
    with pytest.raises(CheckpointError, match=r"iteration-00000003: .*No space left"):
        trainer.train(states, num_iterations=4, checkpoint_dir=tmp_path / "run", checkpoint_every=1, **options)
    assert not torch.equal(weights_of(trainer.policy), before)  # what was learned is still in memory
    assert read_checkpoint(tmp_path / "run")["parts"]["counters"]["iteration"] == 2


CANARY = """
    import pickle, sys
    from pathlib import Path
    import torch
    from grpo import CheckpointError, GRPOConfig, GRPOTrainer
    from grpo.checkpoint import read_checkpoint
    from tests.support.policies import VectorPolicy

    def built():
        policy = VectorPolicy()
        reward = lambda states, actions: [float(action) for action in actions]
        return GRPOTrainer(config=GRPOConfig(group_size=4), policy=policy, reward_model=reward)

    root = Path(sys.argv[1])
    trainer = built()
    trainer.step(torch.randn(2, 3))
    trainer.save_checkpoint(root / "run" / "iteration-00000001")
    fresh = built()
    hostile = pickle.dumps(Path("x"))

    events = []
    sys.addaudithook(lambda event, arguments: events.append(event) if event.startswith("pickle") else None)
    pickle.loads(hostile)
    assert events == ["pickle.find_class"] * len(events) and events, "the canary does not sing"
    events.clear()
    fresh.load_checkpoint(root / "run")
    fresh.step(torch.randn(2, 3))
    for name in ("manifest.json", "rank-0/state.json", "rank-0/tensors.safetensors"):
        file = root / "run" / "iteration-00000001" / name
        data = file.read_bytes()
        file.write_bytes(hostile)
        try:
            fresh.load_checkpoint(root / "run" / "iteration-00000001")
        except CheckpointError:
            pass
        else:
            raise AssertionError(name)
        file.write_bytes(data)
    assert not events, events
"""


@pytest.mark.slow
def test_loading_never_unpickles(tmp_path: Path) -> None:
    printed_by("-c", textwrap.dedent(CANARY), tmp_path, seconds=60)
