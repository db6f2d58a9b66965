"""Checkpoints that are damaged, lack something, or belong to another trainer: always found, and nothing is changed."""

import copy
import errno
import functools
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import CheckpointError, EarlyStopping, GRPOConfig, GRPOTrainer
from grpo.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from tests.support.checkpoint_runs import FILES, built, full_state_of, names_in, small
from tests.support.launches import printed_by
from tests.support.policies import TablePolicy, VectorPolicy, digest, weights_of
from tests.support.trainers import trainer_of

pytestmark = pytest.mark.usefixtures("without_type_checks")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a trainer, which the tests below copy and damage."""
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    trainer = trainer_of(TablePolicy(), group_size=2)
    trainer.step(["a"])
    return trainer.save_checkpoint(path)


def copied(whole: Path, folder: Path) -> Path:
    """A new copy of the checkpoint in `folder`, in place of an earlier copy."""
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return Path(shutil.copytree(whole, folder / "checkpoint"))


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    return copied(whole, tmp_path)


def flipped(data: bytes, generator: random.Random) -> bytes:
    place = generator.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << generator.randrange(8))]) + data[place + 1 :]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_truncation_and_addition_is_detected(name: str, damaged: Path) -> None:
    file, generator = damaged / name, random.Random(name)
    data = file.read_bytes()
    cuts = {0, 1, len(data) - 1, *(generator.randrange(len(data)) for _ in range(40))}
    flips = (flipped(data, generator) for _ in range(60))
    for changed in (*flips, *(data[:cut] for cut in cuts), data + b"\0", data + b"x", data * 2, data[1:]):
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(damaged)
    file.write_bytes(data)
    read_checkpoint(damaged)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_and_a_link_or_a_folder_in_its_place_are_refused(
    name: str, damaged: Path, tmp_path: Path
) -> None:
    """Nothing outside the folder is read, though the contents were right."""
    (damaged / name).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=str(damaged)):
        read_checkpoint(damaged)
    (damaged / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(damaged)
    (damaged / name).unlink()
    (damaged / name).mkdir()
    with pytest.raises(CheckpointError):
        read_checkpoint(damaged)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any], **contents: bytes) -> None:
    """A manifest that was changed by someone who knows how it is hashed."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest.pop("sha256")
    for name, data in contents.items():
        file = next(full for full in FILES if name in full)
        (folder / file).write_bytes(data)
        manifest["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_newer_schema_version_is_refused(damaged: Path) -> None:
    before = read_checkpoint(damaged)
    rewritten(damaged, lambda manifest: None)
    assert read_checkpoint(damaged).keys() == before.keys()  # it is the change, and not the rewriting, that is refused
    rewritten(damaged, lambda manifest: manifest.update(schema=manifest["schema"] + 1))
    with pytest.raises(CheckpointError, match=r"manifest\.json has schema 6; this version reads 5\. Update"):
        read_checkpoint(damaged)


@pytest.mark.parametrize(("contents", "message"), [
    ({"tensors": b"not safetensors"}, "its header does not describe the file"),
    ({"state": b"not JSON"}, "is intact, but not a checkpoint of this package"),
    ({"state": b'{"x": {"$tensor": "999"}}'}, "is intact, but not a checkpoint of this package"),
    ({"state": b"[1, 2]"}, r"state\.json must hold a dict; got a list"),
])  # fmt: skip
def test_correctly_hashed_files_that_are_no_checkpoint_are_refused(
    contents: Any, message: Any, whole: Path, tmp_path: Path
) -> None:
    damaged = copied(whole, tmp_path)
    rewritten(damaged, lambda manifest: None, **contents)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(damaged)


FORGED: list[tuple[str, Any, str]] = [
    ("config", {}, "config must be a dict of settings"),
    ("config", 5, "config must be a dict of settings"),
    ("kinds", 5, "'kinds' must be a dict; got int"),
    ("kinds.policy", 5, "policy is a 5; this trainer's is a TablePolicy"),
    ("kinds.extra", 5, r"'kinds' must match .* unexpected: \['extra'\]"),
    ("extra", 5, r"The checkpoint must match .* unexpected: \['extra'\]"),
    ("parts", 5, "'parts' must be a dict; got int"),
    ("parameters", 5, "must be a dict"),
    ("parts.counters.iteration", 10**40, "counters.iteration="),
    ("parts.counters.iteration", True, "counters.iteration=True"),
    ("parts.counters.data_seed", 10**40, "counters.data_seed="),
    ("parts.optimizer_step.num_applied", 1.5, "num_applied=1.5"),
    ("parts.progress.best_score", "x", "progress.best_score=str 'x'"),
    ("parts.progress.best_score", 10**40, "progress.best_score=int"),
    ("parts.progress.callbacks", 5, "progress.callbacks=int 5"),
    ("parts.progress.callbacks.EarlyStopping", 5, "The callback EarlyStopping must accept its saved state, int 5"),
    ("parts.progress.callbacks.EarlyStopping.best", "x", "EarlyStopping must accept .*best, best_iteration and"),
    ("parts.progress.callbacks.EarlyStopping.num_since_best", None, "EarlyStopping must accept .*best, best_iteration and"),
    ("parts.coefficients.kl", [], "coefficients.kl=a list of 0 in place of float"),
    ("parts.coefficients.entropy", {"$tuple": [1.0]}, "coefficients.entropy=a tuple of 1"),
    ("parts.advantages.baseline.mean", "0.5", "advantages.baseline.mean=str"),
    ("parts.optimizer", None, "optimizer"),
    ("parts.optimizer.param_groups", 5, "optimizer.param_groups=int 5 in place of a list"),
    ("parts.optimizer.param_groups.0", "x", "optimizer.param_groups.0.=str 'x' in place of dict"),
    ("parts.optimizer.param_groups.0.lr", "x", "lr=str 'x' in place of float"),
    ("parts.optimizer.param_groups.0.lr", None, "lr=NoneType None in place of float"),
    ("parts.optimizer.param_groups.0.lr", -1, "lr=-1"),
    ("parts.optimizer.param_groups.0.lr", 10**400, "lr="),
    ("parts.optimizer.param_groups.0.lr", 2**64, "lr=18446744073709551616"),
    ("parts.optimizer.param_groups.0.eps", None, "eps=NoneType None in place of float"),
    ("parts.optimizer.param_groups.0.weight_decay", {}, "weight_decay=dict"),
    ("random", 5, "'random' must be a dict"),
    ("random.torch", 5, "does not fit this trainer"),
]  # fmt: skip
"""What somebody who can compute hashes has written: where, the value, and the error."""


def test_forged_values_of_a_wrong_type_are_refused_and_change_nothing(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    def made() -> GRPOTrainer:
        return trainer_of(TablePolicy(), lambda states, actions: [0.0, 1.0], group_size=2, seed=1)

    def train(trainer: GRPOTrainer, num_iterations: int, folder: Path) -> None:
        options: Any = {"callbacks": [EarlyStopping("rewards/mean")], "resume": "auto", "progress": False}
        trainer.train(["a"], num_iterations=num_iterations, checkpoint_dir=folder, checkpoint_every=1, **options)

    train(made(), 2, tmp_path / "run")
    whole = tmp_path / "run" / "iteration-00000002"
    state = json.loads((whole / "rank-0" / "state.json").read_text())
    for number, (where, value, message) in enumerate(FORGED):
        with subtests.test(where=where, value=value):
            *path, last = (int(key) if key.isdigit() else key for key in where.split("."))
            forged = copy.deepcopy(state)
            functools.reduce(lambda inner, key: inner[key], path, forged)[last] = value
            folder = tmp_path / str(number)
            shutil.copytree(whole, folder / whole.name)
            rewritten(folder / whole.name, lambda manifest: None, state=json.dumps(forged).encode())
            trainer = made()
            before = digest(trainer.policy.get_parameters())
            with pytest.raises(CheckpointError, match=message):
                train(trainer, 3, folder)
            is_of_callback = "EarlyStopping" in where  # the callbacks come with the run, after the trainer's state
            assert is_of_callback or digest(trainer.policy.get_parameters()) == before


def paths_in(value: Any, depth: int) -> Iterator[tuple[str, ...]]:
    if isinstance(value, Mapping) and depth:
        for key in value:
            yield (key,)
            yield from ((key, *rest) for rest in paths_in(value[key], depth - 1))


def without(value: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    copied = dict(value)
    if len(path) == 1:
        del copied[path[0]]
    else:
        copied[path[0]] = without(copied[path[0]], path[1:])
    return copied


def saved_and_fresh(case: str, folder: Path) -> tuple[dict[str, Any], GRPOTrainer]:
    """The state of a trainer after two steps; and another trainer, after one."""
    trainer, states, _ = built(case, seed=1)
    trainer.step(states[:2])
    trainer.step(states[:2])
    state = read_checkpoint(trainer.save_checkpoint(folder / "original"))
    fresh, *_ = built(case, seed=2)
    fresh.step(states[:2])
    return state, fresh


def test_a_missing_item_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    """Each item, each item's items, and those of what has a state of its own, taken away one at a time."""
    case = "reference, running baseline, reward with a state and scheduler of the caller"
    state, fresh = saved_and_fresh(case, tmp_path)
    before = full_state_of(fresh)
    missing = [path for path in paths_in(state, 3) if path[0] != "config"]
    assert {("parts", "optimizer"), ("parts", "counters", "iteration"), ("random", "torch")} <= {*missing}
    assert ("parts", "updates", "row_order") in missing
    for path in missing:
        broken = write_checkpoint(tmp_path / "broken", without(state, path), iteration=2)
        try:
            fresh.load_checkpoint(broken)
        except CheckpointError:
            assert full_state_of(fresh) == before, path
        else:
            assert path[:2] == ("parts", "lr_scheduler"), path  # torch's schedulers take whatever they are given
            fresh = saved_and_fresh(case, tmp_path / "again")[1]
            before = full_state_of(fresh)


def refused(path: Path, other: GRPOTrainer, message: str) -> None:
    before = full_state_of(other)
    with pytest.raises(CheckpointError, match=message):
        other.load_checkpoint(path)
    assert full_state_of(other) == before


@pytest.mark.parametrize(("saved", "loaded"), [
    *itertools.product(["plain"], ["reference", "reward with a state", "scheduler of the caller"]),
    *itertools.product(["reference", "reward with a state", "scheduler of the caller", "duck-typed with a state"], ["plain"]),
])  # fmt: skip
def test_a_checkpoint_of_a_differently_built_trainer_is_refused(saved: str, loaded: str, tmp_path: Path) -> None:
    trainer, *_ = built(saved, seed=1)
    refused(trainer.save_checkpoint(tmp_path / saved), built(loaded, seed=2)[0], ".")


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    lambda parameters: torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1),
]


@pytest.mark.parametrize(("kept", "other"), [*itertools.permutations(OPTIMIZERS, 2)])
def test_a_checkpoint_of_another_optimizer_is_refused(kept: Any, other: Any, tmp_path: Path) -> None:
    """SGD's state under Adam would resume without its moments; two parameter groups do not fit into one."""

    def trainer_with(optimizer: Any) -> GRPOTrainer:
        policy = VectorPolicy()
        reward = lambda states, actions: [float(action) for action in actions]  # noqa: E731
        config, made = GRPOConfig(group_size=4), optimizer(list(policy.parameters()))
        return GRPOTrainer(config=config, policy=policy, reward_model=reward, optimizer=made)

    trainer = trainer_with(kept)
    trainer.step(torch.randn(2, 3))
    refused(trainer.save_checkpoint(tmp_path / "kept"), trainer_with(other), "optimizer")


# Failing disks and hostile files: earlier checkpoints stay, and nothing is unpickled


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


def beside(run: Path) -> Path:
    return CheckpointFolder(run, 3).save(small(2), iteration=2, score=2.0)


def in_its_place(run: Path) -> Path:
    return write_checkpoint(run / "iteration-00000001", small(2), iteration=2)


@pytest.mark.parametrize(("save", "name"), [(beside, "iteration-00000002"), (in_its_place, "iteration-00000001")])
@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_full_disk_keeps_the_previous_checkpoint(kind: str, save: Any, name: str, tmp_path: Path) -> None:
    """The old or the new checkpoint loads, whole, and nothing temporary is left in the folder."""
    run = tmp_path / "run"
    names = {"iteration-00000001", name}

    def prepare() -> None:
        shutil.rmtree(run, ignore_errors=True)
        CheckpointFolder(run, 3).save(small(1), iteration=1, score=1.0)

    for error in failing_disks(kind, lambda: save(run), prepare):
        assert str(run / name) in str(error)
        assert os.strerror(errno.ENOSPC) in str(error)
        assert isinstance(error.__cause__, OSError)
        assert digest(read_checkpoint(run)) in (digest(small(1)), digest(small(2)))
        assert save is in_its_place or digest(read_checkpoint(run / "iteration-00000001")) == digest(small(1))
        assert set(names_in(run)) <= names
    assert digest(read_checkpoint(run)) == digest(small(2))
    assert set(names_in(run)) == names


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
