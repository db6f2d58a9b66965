"""Failing disks, killed writers and hostile files: earlier checkpoints stay, and nothing is unpickled."""

import builtins
import errno
import io
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import CheckpointError
from grpo.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from tests.support.checkpoint_runs import built, names_in, small
from tests.support.policies import digest, weights_of

pytestmark = pytest.mark.usefixtures("without_type_checks")

ROOT = Path(__file__).resolve().parents[2]


class Disk:
    """Makes the k-th call (from 1) of one kind of file operation fail; counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, kind: str, k: int) -> None:
        self.root, self.kind, self.k, self.count = str(root), kind, k, 0
        for name in ("fsync", "rename", "replace", "mkdir", "write"):
            if name == kind or (kind == "rename" and name == "replace"):
                monkeypatch.setattr(os, name, self.failing(getattr(os, name)))
        if kind in ("open", "write"):
            real = io.open
            for owner in (io, builtins):
                monkeypatch.setattr(owner, "open", lambda *a, real=real, **k: self.opened(real, *a, **k))

    def failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.kind != "mkdir" or not Path(arguments[0]).exists():  # one that exists needs no room
                self.hit()
            return real(*arguments, **options)

        return call

    def hit(self) -> None:
        self.count += 1
        if self.count == self.k:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(self, real: Callable[..., Any], file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not (isinstance(file, str | Path) and str(file).startswith(self.root) and set(mode) & set("wxa+")):
            return real(file, mode, *arguments, **options)
        if self.kind == "open":
            self.hit()
        handle = real(file, mode, *arguments, **options)
        if self.kind != "write":
            return handle
        disk = self

        class Handle:
            def write(self, data: Any) -> Any:
                if disk.count + 1 == disk.k:
                    handle.write(data[: len(data) // 2])  # what fitted on the disk
                disk.hit()
                return handle.write(data)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: Any) -> None:
                handle.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(handle, name)

        return Handle()


def failing_disks(
    kind: str, root: Path, save: Callable[[], Any], prepare: Callable[[], Any]
) -> Iterator[CheckpointError]:
    """The error of every k at which an operation fails, until none does."""
    for k in range(1, 40):
        prepare()
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, root, kind, k)
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


def test_a_full_disk_keeps_the_previous_checkpoint(subtests: pytest.Subtests, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def prepare() -> None:
        shutil.rmtree(run, ignore_errors=True)
        CheckpointFolder(run, 3).save(small(1), iteration=1, score=1.0)

    def save() -> None:
        CheckpointFolder(run, 3).save(small(2), iteration=2, score=2.0)

    for kind in OPERATIONS:
        with subtests.test(kind=kind):
            for error in failing_disks(kind, tmp_path, save, prepare):
                assert str(run / "iteration-00000002") in str(error)
                assert os.strerror(errno.ENOSPC) in str(error)
                assert isinstance(error.__cause__, OSError)
                assert digest(read_checkpoint(run / "iteration-00000001")) == digest(small(1))
                loaded = read_checkpoint(run)
                assert digest(loaded) in (digest(small(1)), digest(small(2)))
                assert set(names_in(run)) <= {"iteration-00000001", "iteration-00000002"}  # nothing temporary
            assert digest(read_checkpoint(run)) == digest(small(2))


def test_a_full_disk_keeps_the_checkpoint_to_be_replaced(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """The old or the new checkpoint loads, whole, and no other file is left in the folder."""
    path = tmp_path / "checkpoint"

    def prepare() -> None:
        shutil.rmtree(path, ignore_errors=True)
        write_checkpoint(path, small(1), iteration=1)

    def save() -> None:
        write_checkpoint(path, small(2), iteration=2)

    for kind in OPERATIONS:
        with subtests.test(kind=kind):
            for error in failing_disks(kind, tmp_path, save, prepare):
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
    Disk(monkeypatch, tmp_path, "fsync", 1)
    with pytest.raises(CheckpointError, match=r"iteration-00000003: .*No space left"):
        trainer.train(states, num_iterations=4, checkpoint_dir=tmp_path / "run", checkpoint_every=1, **options)
    assert not torch.equal(weights_of(trainer.policy), before)  # what was learned is still in memory
    assert read_checkpoint(tmp_path / "run")["parts"]["counters"]["iteration"] == 2


# Killed while saving

SAVE_FOR_EVER = """
    import os, random, shutil, signal, sys, time
    from pathlib import Path
    import torch
    from grpo import CheckpointError
    from grpo.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint

    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    generator = random.Random(7)

    def save_for_ever():
        for n in range(1, 100000):
            state = {"n": n, "again": {"n": n}, "tensors": [torch.full((50,), n), torch.full((3,), n)]}
            write_checkpoint(root / "same", state, iteration=n)
            CheckpointFolder(root / "run", keep_last=2).save(state, iteration=n, score=float(n % 5))

    def number_of(state):
        numbers = {state["n"], state["again"]["n"], *(int(x) for t in state["tensors"] for x in t)}
        assert len(numbers) == 1, numbers
        return numbers.pop()

    reached = []
    for attempt in range(8):
        child = os.fork()
        if child == 0:
            try:
                save_for_ever()
            finally:
                os._exit(1)
        deadline = time.monotonic() + 30
        wanted = 1 + attempt % 6  # not by the clock: the disk may be slow, and the machine busy
        while not any((root / "run" / f"iteration-{n:08d}" / "manifest.json").exists() for n in range(wanted, 40)):
            assert time.monotonic() < deadline, "the writer writes nothing"
            time.sleep(0.001)
        time.sleep(0.02 * generator.random())
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        reached.append((number_of(read_checkpoint(root / "same")), number_of(read_checkpoint(root / "run"))))
        for path in (root / "run").glob("iteration-*"):
            try:
                number_of(read_checkpoint(path))
            except CheckpointError:
                pass  # killed while it was being removed: said, not read
        for folder in (root / "run").glob("iteration-*"):  # a new run begins
            shutil.rmtree(folder)
    assert all(abs(same - run) <= 1 for same, run in reached), reached
    assert len(set(reached)) > 3, reached
    CheckpointFolder(root / "run", keep_last=2).save({"n": 0}, iteration=1, score=None)
    assert [path.name for path in (root / "run").iterdir()] == ["iteration-00000001"], "left behind by the killed"
"""


def in_a_process(script: str, *arguments: Any, timeout: float = 60) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
def test_a_writer_killed_at_any_time_leaves_a_whole_checkpoint_to_load(tmp_path: Path) -> None:
    in_a_process(SAVE_FOR_EVER, tmp_path, timeout=240)


# No pickle

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
    in_a_process(CANARY, tmp_path)
