"""Checkpoints: exact resume from everywhere, damage that is always found, failures that leave what was there."""

import builtins
import errno
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import (
    AdvantageConfig,
    CheckpointError,
    EntropyControl,
    GRPOConfig,
    GRPOTrainer,
    GRPOWarning,
    KLControl,
    ObjectiveConfig,
    WeightedRewards,
)
from grpo.checkpoint import CheckpointFolder, best_checkpoint, read_checkpoint, read_newest, write_checkpoint
from grpo.surrogates import ClipCov
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import DuckPolicy, ExactSampling, TablePolicy, VectorPolicy, digest, weights_of

ROOT = Path(__file__).resolve().parents[2]
FILES = ("manifest.json", "state.json", "tensors.safetensors")


@pytest.fixture(autouse=True)
def no_type_checks() -> Iterator[None]:
    """beartype draws the items it looks at from Python's global generator, which users' runs have to themselves."""
    with as_users_run_it():
        yield


# Exact resume


class ManyGenerators(VectorPolicy):
    """Samples by torch's generator, and now and then replaces an action by numpy's and Python's."""

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        groups = super().generate_actions(states, num_actions_per_state)
        for group in groups:
            group[0] = random.randrange(4)
            group[1] = int(np.random.randint(4))  # noqa: NPY002
        return groups


class NoisyReward:
    """A callable with noise of a generator of its own, and a memory: what repeats too often is worth less."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.times_seen = dict.fromkeys(range(4), 0)

    def __call__(self, states: Any, actions: Any) -> list[float]:
        rewards = []
        for action in actions:
            self.times_seen[action] += 1
            rewards.append(self.generator.normal() + action - 0.01 * self.times_seen[action])
        return rewards

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.bit_generator.state, "times_seen": dict(self.times_seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]
        self.times_seen = dict(state["times_seen"])


class NoisyModel(NoisyReward):
    """The same as a reward model."""

    compute_rewards = NoisyReward.__call__

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def to(self, device: Any) -> None: ...


class CountingNetwork(torch.nn.Module):
    """A reward network with a running count, of which every reward takes a part."""

    times_seen: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.worth = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.worth.weight)
        torch.nn.init.zeros_(self.worth.bias)
        self.register_buffer("times_seen", torch.full((4,), float(seed)))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def compute_rewards(self, states: Any, actions: Any) -> Tensor:
        chosen = torch.as_tensor(actions)
        self.times_seen += torch.bincount(chosen, minlength=4)
        self.scratch += 1
        worth: Tensor = self.worth(chosen.float().unsqueeze(1)).squeeze(1)
        return worth - 0.1 * self.times_seen[chosen] + 0.01 * self.scratch * chosen


class CallableNetwork(torch.nn.Module):
    """The same as a callable."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = CountingNetwork(seed)

    def forward(self, states: Any, actions: Any) -> Tensor:
        return self.inner.compute_rewards(states, actions)


class DrawsToScore(ManyGenerators):
    """Draws random numbers for every log-probability, as the README's first policy does."""

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return super().get_log_probabilities(states, actions) + 0.1 * torch.randn(len(actions))


def plain_reward(states: Any, actions: Any) -> list[float]:
    """Some groups have no differences."""
    return [float(action == 2) + float(action == 1) * random.random() for action in actions]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batch_size": 3},
    "epochs of batches": {"batch_size": 5, "num_epochs_per_update": 2},
    "Adam and a schedule": {"lr_schedule": "cosine", "warmup_ratio": 0.3, "learning_rate": 0.05},
    "reference": {"with_reference": True, "objective": ObjectiveConfig(kl_coef=0.1)},
    "running baseline": {"advantage": AdvantageConfig(baseline="global_mean")},
    "reward with a state": {"reward": NoisyModel},
    "callable reward with a state": {"reward": NoisyReward},
    "weighted rewards with a state": {
        "reward": lambda seed: WeightedRewards({"x": NoisyModel(seed), "y": plain_reward})
    },
    "reward network with a buffer": {"reward": CountingNetwork},
    "callable reward network with a buffer": {"reward": CallableNetwork},
    "weighted reward networks with buffers": {
        "reward": lambda seed: WeightedRewards({"x": CountingNetwork(seed), "y": plain_reward})
    },
    "random numbers in scoring": {"policy": DrawsToScore},
    "random numbers in scoring, several updates": {"policy": DrawsToScore, "batch_size": 5},
    "loss scaler": {"with_scaler": True},
    "dropout": {"dropout": 0.5},
    "dropout, several updates": {"dropout": 0.5, "num_epochs_per_update": 2},
    "scheduler of the caller": {"with_scheduler": True, "batch_size": 4},
    "duck-typed with a state": {"duck": True},
    "exact sampler": {"exact": True, "num_epochs_per_update": 2},
    "evaluated": {"evaluated": True, "batch_size": 5},
    "replay": {"replay_iterations": 2, "batch_size": 6},
    "replay of lists": {"exact": True, "replay_iterations": 2},
    "dynamic sampling": {"dynamic_sampling_rounds": 2},
    "reference that follows, adaptive KL": {
        "with_reference": True,
        "reference_sync_every": 2,
        "reference_mix": 0.5,
        "num_epochs_per_update": 2,
        "learning_rate": 0.05,
        "kl_control": KLControl(target=1e-3),
        "objective": ObjectiveConfig(kl_coef=0.01),
    },
    "adaptive entropy": {
        "entropy_control": EntropyControl(target=1.3),
        "objective": ObjectiveConfig(entropy_estimator="score_function"),
        "learning_rate": 0.1,
    },
    "running normalisation of rewards": {"advantage": AdvantageConfig(normalize_rewards=True)},
    "steps drawn at random": {
        "objective": ObjectiveConfig(surrogate=ClipCov(fraction=0.2, cov_low=-1.0)),
        "batch_size": 4,
    },
}


def built(case: str, seed: int) -> tuple[GRPOTrainer, Any, dict[str, Any]]:
    """A trainer of this kind whose weights and generators start from `seed`; its states; options of `train`."""
    options = dict(CASES[case])
    torch.manual_seed(seed)
    states: Any = torch.randn(7, 3, generator=torch.Generator().manual_seed(5))
    reward = options.pop("reward", None)
    reward_model: Any = plain_reward if reward is None else reward(seed)
    if options.pop("duck", False):
        policy: Any = DuckPolicy(num_actions=4, seed=seed)
        policy.tensors["logits"].data.normal_()
        states = [0, 1, 0]
    elif options.pop("exact", False):
        policy = ExactSampling()
        states = [0, 1, 2, 3]
        reward_model = lambda states, actions: [sum(action) + random.random() for action in actions]  # noqa: E731
    else:
        policy = options.pop("policy", ManyGenerators)(dropout=options.pop("dropout", 0.0))
    reference = None
    if options.pop("with_reference", False):
        reference = ManyGenerators()
    scheduler = optimizer = None
    with_scaler = options.pop("with_scaler", False)
    if options.pop("with_scheduler", False):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    extra = {"eval_states": states[:2], "eval_every": 3} if options.pop("evaluated", False) else {}
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=4, num_states_per_iteration=2, seed=seed, **options),
        policy=policy,
        reward_model=reward_model,
        reference_policy=reference,
        optimizer=optimizer,
        lr_scheduler=scheduler,
    )
    if with_scaler:
        trainer.optimizer_step.scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=3)
    return trainer, states, {"progress": False, **extra}


pytestmark = pytest.mark.filterwarnings("ignore:.*Dropout or batch:grpo.errors.GRPOWarning")


@pytest.mark.parametrize("case", CASES)
def test_a_run_stopped_after_any_iteration_ends_where_the_unbroken_one_does(case: str, tmp_path: Path) -> None:
    trainer, states, options = built(case, seed=1)
    unbroken = trainer.train(
        states, num_iterations=10, checkpoint_dir=tmp_path, checkpoint_every=1, keep_last=100, **options
    )
    expected = digest(weights_of(trainer.policy))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"iteration-{n:08d}" for n in range(1, 11)]
    for stopped in range(1, 10):
        fresh, _, _ = built(case, seed=100 + stopped)
        assert digest(weights_of(fresh.policy)) != expected
        fresh.load_checkpoint(tmp_path / f"iteration-{stopped:08d}")
        rest = fresh.train(states, num_iterations=10, **options)
        assert digest(weights_of(fresh.policy)) == expected, f"stopped after iteration {stopped}"
        assert len(rest) == 10 - stopped
        for found, before in zip(rest, unbroken[stopped:], strict=True):
            assert found["rewards/mean"] == before["rewards/mean"]
            assert found["train/learning_rate"] == before["train/learning_rate"]
            assert found.get("eval/avg_reward") == before.get("eval/avg_reward")
        assert fresh.iteration == 10


def test_a_run_that_was_interrupted_goes_on_from_its_folder(tmp_path: Path) -> None:
    """Stopped by an exception in the sixth iteration; the newest whole checkpoint is that of the fifth."""

    class Stop(Exception):
        pass

    class Interrupt:
        def log(self, metrics: Any, iteration: int) -> None:
            if iteration == 6:
                raise Stop

        def close(self) -> None: ...

    whole, states, options = built("epochs of batches", seed=1)
    whole.train(states, num_iterations=10, **options)
    interrupted, *_ = built("epochs of batches", seed=1)
    with pytest.raises(Stop):
        interrupted.train(
            states, num_iterations=10, sinks=[Interrupt()], checkpoint_dir=tmp_path, checkpoint_every=1, **options
        )
    resumed, *_ = built("epochs of batches", seed=2)
    resumed.load_checkpoint(tmp_path)
    assert resumed.iteration == 5
    assert len(resumed.train(states, num_iterations=10, checkpoint_dir=tmp_path, checkpoint_every=1, **options)) == 5
    assert digest(weights_of(resumed.policy)) == digest(weights_of(whole.policy))
    assert read_newest(tmp_path)["counters"]["iteration"] == 10


def test_a_policy_without_parameters_repeats_its_random_numbers(tmp_path: Path) -> None:
    """The README's first policy: log-probabilities, like rewards, are random numbers, and the rewards tell."""

    def trainer() -> GRPOTrainer:
        policy = DuckPolicy(num_actions=4)
        policy.tensors = {}
        policy.generate_actions = lambda states, count, **_: [[0] * count for _ in states]  # type: ignore[method-assign]
        policy.get_log_probabilities = lambda states, actions: torch.randn(len(actions))  # type: ignore[method-assign]
        return GRPOTrainer(
            config=GRPOConfig(group_size=4), policy=policy, reward_model=lambda s, actions: torch.rand(len(actions))
        )

    unbroken = trainer().train(
        [0, 1], num_iterations=6, checkpoint_dir=tmp_path, checkpoint_every=1, keep_last=6, progress=False
    )
    for stopped in range(1, 6):
        fresh = trainer()
        fresh.load_checkpoint(tmp_path / f"iteration-{stopped:08d}")
        rest = fresh.train([0, 1], num_iterations=6, progress=False)
        assert [m["rewards/mean"] for m in rest] == [m["rewards/mean"] for m in unbroken[stopped:]]


def damage_tensors(checkpoint: Path) -> None:
    (checkpoint / "tensors.safetensors").write_bytes(b"cut")


def damage_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def damage_manifest(checkpoint: Path) -> None:
    data = (checkpoint / "manifest.json").read_bytes()
    (checkpoint / "manifest.json").write_bytes(data.replace(b'"sha256"', b'"sha257"', 1))


@pytest.mark.parametrize("damage", [damage_tensors, damage_state, damage_manifest])
def test_a_run_goes_on_in_its_folder_from_the_newest_whole_checkpoint(damage: Any, tmp_path: Path) -> None:
    """Of ten iterations the last two are damaged: it goes on after the eighth, and writes them anew."""
    kept: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "keep_last": 9}
    whole, states, options = built("epochs of batches", seed=1)
    whole.train(states, num_iterations=10, **kept, **options)
    for n in (9, 10):
        damage(tmp_path / f"iteration-{n:08d}")
    resumed, *_ = built("epochs of batches", seed=2)
    resumed.load_checkpoint(tmp_path)
    assert resumed.iteration == 8
    assert len(resumed.train(states, num_iterations=10, **kept, **options)) == 2
    assert digest(weights_of(resumed.policy)) == digest(weights_of(whole.policy))
    assert [read_checkpoint(tmp_path / f"iteration-{n:08d}")["counters"]["iteration"] for n in (9, 10)] == [9, 10]


def test_a_run_does_not_go_on_beside_a_whole_checkpoint_that_is_further(tmp_path: Path) -> None:
    """The tenth is damaged, the ninth is not: who loaded the eighth would overwrite it."""
    kept: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "keep_last": 9}
    trainer, states, options = built("plain", seed=1)
    trainer.train(states, num_iterations=10, **kept, **options)
    damage_tensors(tmp_path / "iteration-00000010")
    resumed, *_ = built("plain", seed=2)
    resumed.load_checkpoint(tmp_path / "iteration-00000008")
    with pytest.raises(CheckpointError, match=r"iteration-00000009 is of iteration 9, and this trainer is at 8"):
        resumed.train(states, num_iterations=10, **kept, **options)
    assert resumed.iteration == 8


def test_a_finished_run_that_is_loaded_is_finished(tmp_path: Path) -> None:
    trainer, states, options = built("plain", seed=1)
    trainer.train(states, num_iterations=3, checkpoint_dir=tmp_path, **options)
    resumed, *_ = built("plain", seed=2)
    resumed.load_checkpoint(tmp_path)
    before = digest(weights_of(resumed.policy))
    assert before == digest(weights_of(trainer.policy))
    with pytest.warns(GRPOWarning, match=r"at iteration 3, and num_iterations=3 .*nothing left to do"):
        assert resumed.train(states, num_iterations=3, checkpoint_dir=tmp_path, **options) == []
    assert (resumed.iteration, digest(weights_of(resumed.policy))) == (3, before)


@pytest.mark.parametrize("case", ["plain", "epochs of batches", "reward with a state", "dropout"])
def test_saving_by_hand_between_steps(case: str, tmp_path: Path) -> None:
    """Steps of the caller's own; saving changes nothing in the run that is saved."""
    unbroken, states, _ = built(case, seed=1)
    for _ in range(6):
        unbroken.step(states[:2])
    trainer, *_ = built(case, seed=1)
    for n in range(6):
        assert trainer.save_checkpoint(tmp_path / str(n)) == tmp_path / str(n)
        trainer.step(states[:2])
    expected = digest(weights_of(unbroken.policy))
    assert digest(weights_of(trainer.policy)) == expected
    for n in range(6):
        fresh, *_ = built(case, seed=50 + n)
        fresh.load_checkpoint(str(tmp_path / str(n)))
        assert fresh.iteration == n
        for _ in range(6 - n):
            fresh.step(states[:2])
        assert digest(weights_of(fresh.policy)) == expected, n


def test_parameters_stay_the_very_tensors_when_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    trainer, states, _ = built("plain", seed=1)
    trainer.save_checkpoint(tmp_path / "here")
    before = {name: id(tensor) for name, tensor in trainer.policy.get_parameters().items()}
    trainer.load_checkpoint(tmp_path / "here")
    assert {name: id(tensor) for name, tensor in trainer.policy.get_parameters().items()} == before
    trainer.step(states[:2])


# What is kept

SMALL = {"n": 1, "tensor": torch.arange(6.0), "nested": {"list": [1, 2.5, None, "x"], "array": np.arange(3)}}


def small(n: int) -> dict[str, Any]:
    return {**SMALL, "n": n, "tensor": torch.full((6,), float(n))}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_few_and_the_best_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run", keep_last=2)
    kept = {}
    for n, score in enumerate([0.1, 0.9, 0.5, None, float("nan"), 0.9, 0.3, 0.2], start=1):
        path = folder.save(small(n), iteration=n, score=score)
        assert read_checkpoint(path)["n"] == n
        kept[n] = [int(name.removeprefix("iteration-")) for name in names_in(tmp_path / "run")]
    assert kept[1] == [1]
    assert kept[4] == [2, 3, 4]
    assert kept[5] == [2, 4, 5]
    assert kept[8][-2:] == [7, 8]
    assert kept[8][0] in (2, 6)  # both are best
    assert len(kept[8]) == 3
    assert best_checkpoint(tmp_path / "run").name == f"iteration-{kept[8][0]:08d}"


def test_a_run_keeps_the_best_by_its_evaluations(tmp_path: Path) -> None:
    scores = {1: 0.0, 2: 5.0, 3: 1.0, 4: 2.0, 5: 3.0, 6: 4.0}
    trainer, states, options = built("plain", seed=1)
    trainer.evaluate = lambda states: {"eval/avg_reward": scores[trainer.iteration]}  # type: ignore[method-assign]
    trainer.train(
        states,
        num_iterations=6,
        eval_states=states,
        eval_every=1,
        checkpoint_dir=tmp_path,
        checkpoint_every=1,
        keep_last=2,
        **options,
    )
    assert names_in(tmp_path) == [f"iteration-{n:08d}" for n in (2, 5, 6)]
    assert best_checkpoint(tmp_path).name == "iteration-00000002"


def test_without_a_score_there_is_no_best(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No checkpoint with a score in"):
        best_checkpoint(tmp_path)


def test_pruning_takes_only_what_the_run_has_written(tmp_path: Path) -> None:
    """A checkpoint saved by hand beside them, under a name of the user's, stays."""
    write_checkpoint(tmp_path / "before-phase-2", small(0), iteration=0)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "manifest.json").write_text('{"name": "some other program"}')
    folder = CheckpointFolder(tmp_path, keep_last=1)
    for n in (1, 2, 3):
        folder.save(small(n), iteration=n, score=float(n))
    assert names_in(tmp_path) == ["before-phase-2", "extension", "iteration-00000003", "notes.txt"]


def test_what_was_just_written_is_never_pruned(tmp_path: Path) -> None:
    """A new run in the folder of an older and longer one."""
    old = CheckpointFolder(tmp_path, keep_last=2)
    for n in (10, 11, 12):
        old.save(small(n), iteration=n, score=float(n))
    path = CheckpointFolder(tmp_path, keep_last=2).save(small(1), iteration=1, score=0.0)
    assert read_checkpoint(path)["n"] == 1


def test_a_folder_of_the_users_is_never_replaced(tmp_path: Path) -> None:
    """Only a checkpoint may be replaced by one: `save_checkpoint("results")` must not delete results."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="results"):
        write_checkpoint(results, small(1), iteration=1)
    assert (results / "thesis.txt").read_text() == "years of work"
    assert names_in(tmp_path) == ["results"]


def test_a_folder_of_checkpoints_is_never_replaced_by_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run", keep_last=3)
    folder.save(small(1), iteration=1, score=None)
    with pytest.raises(CheckpointError, match="run"):
        write_checkpoint(tmp_path / "run", small(2), iteration=2)
    assert read_newest(tmp_path / "run")["n"] == 1


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="file"):
            write_checkpoint(path, small(1), iteration=1)
    assert (tmp_path / "file").read_text() == "mine"
    assert names_in(tmp_path) == ["file"]


def test_a_folder_gives_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    for n in (9, 10, 11):
        write_checkpoint(tmp_path / f"iteration-{n:08d}", small(n), iteration=n)
    assert read_checkpoint(tmp_path)["n"] == 11
    (tmp_path / "iteration-00000011" / "tensors.safetensors").write_bytes(b"cut")
    assert read_checkpoint(tmp_path)["n"] == 10
    (tmp_path / "iteration-00000010" / "state.json").unlink()
    assert read_checkpoint(tmp_path)["n"] == 9
    (tmp_path / "iteration-00000009" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="No intact checkpoint in") as caught:
        read_checkpoint(tmp_path)
    for part in ("tensors.safetensors", "state.json", "manifest.json"):
        assert part in str(caught.value)


def test_what_is_foreign_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "iteration-00000001", small(1), iteration=1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plots").mkdir()
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "manifest.json").write_text('{"name": "some other program", "iteration": 99}')
    assert read_checkpoint(tmp_path)["n"] == 1


def test_the_folder_where_one_stands_may_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "iteration-00000001", small(1), iteration=1)
    monkeypatch.chdir(tmp_path)
    assert read_checkpoint(".")["n"] == 1
    monkeypatch.chdir(tmp_path / "iteration-00000001")
    assert read_checkpoint(".")["n"] == 1


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "no such", tmp_path):
        with pytest.raises(CheckpointError, match=f"No intact checkpoint in {path}"):
            read_checkpoint(path)


# Damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a trainer, which the tests below copy and damage."""
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=TablePolicy(), reward_model=lambda s, a: [0.0, 1.0])
    trainer.step(["a"])
    return trainer.save_checkpoint(path)


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoint"))


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(damaged: Path, name: str) -> None:
    file = damaged / name
    data = file.read_bytes()
    generator = random.Random(name)
    for _ in range(400):
        place, bit = generator.randrange(len(data)), generator.randrange(8)
        file.write_bytes(data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(damaged)
    file.write_bytes(data)
    read_checkpoint(damaged)


@pytest.mark.parametrize("name", FILES)
def test_every_cut_and_every_addition_is_found(damaged: Path, name: str) -> None:
    file = damaged / name
    data = file.read_bytes()
    generator = random.Random(name)
    cuts = {0, 1, len(data) - 1, *(generator.randrange(len(data)) for _ in range(200))}
    for changed in (*(data[:cut] for cut in cuts), data + b"\0", data + b"x", data * 2, data[1:]):
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(damaged)


def test_blocks_that_were_never_written_are_found(damaged: Path) -> None:
    """As after a power cut: the size is right, the contents are zeros."""
    for name in FILES:
        data = (damaged / name).read_bytes()
        (damaged / name).write_bytes(bytes(len(data)))
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(damaged)
        (damaged / name).write_bytes(data)


def test_files_of_two_checkpoints_are_never_mixed(damaged: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", read_checkpoint(damaged) | {"extra": torch.ones(2)}, iteration=2)
    for name in FILES:
        data = (damaged / name).read_bytes()
        shutil.copy(other / name, damaged / name)
        with pytest.raises(CheckpointError):
            read_checkpoint(damaged)
        (damaged / name).write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_an_error(damaged: Path, name: str) -> None:
    (damaged / name).unlink()
    with pytest.raises(CheckpointError, match=str(damaged)):
        read_checkpoint(damaged)


@pytest.mark.parametrize("name", FILES)
def test_a_link_or_a_folder_in_place_of_a_file_is_refused(damaged: Path, name: str, tmp_path: Path) -> None:
    """Nothing outside the folder is read, though the contents were right."""
    shutil.copy(damaged / name, tmp_path / "elsewhere")
    (damaged / name).unlink()
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
        file = next(full for full in FILES if full.startswith(name))
        (folder / file).write_bytes(data)
        manifest["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_manifest_that_was_rewritten_alike_is_read(damaged: Path) -> None:
    """So that the tests below fail for the reason they name."""
    rewritten(damaged, lambda manifest: None)
    read_checkpoint(damaged)


def test_a_newer_schema_is_refused_by_name(damaged: Path) -> None:
    rewritten(damaged, lambda manifest: manifest.update(schema=manifest["schema"] + 1))
    with pytest.raises(CheckpointError, match=r"manifest\.json has schema 2; this version reads 1\. Update"):
        read_checkpoint(damaged)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "extra.bin", "state.json/../../secret"])
def test_names_in_a_manifest_are_never_followed(damaged: Path, name: str) -> None:
    (damaged.parent / "secret").write_text("secret")
    rewritten(damaged, lambda manifest: manifest["files"].update({name: {"size": 6, "sha256": "0"}}))
    with pytest.raises(CheckpointError, match=r"manifest\.json names"):
        read_checkpoint(damaged)


@pytest.mark.parametrize(
    "contents", [{"tensors": b"not safetensors"}, {"state": b"not JSON"}, {"state": b'{"x": {"$tensor": "999"}}'}]
)
def test_contents_that_are_hashed_rightly_and_are_no_checkpoint(damaged: Path, contents: dict[str, bytes]) -> None:
    rewritten(damaged, lambda manifest: None, **contents)
    with pytest.raises(CheckpointError):
        read_checkpoint(damaged)


@pytest.mark.parametrize("depth", [300, 2_000, 200_000])
@pytest.mark.parametrize("name", ["state", "manifest"])
def test_nesting_beyond_all_measure_is_no_checkpoint(damaged: Path, name: str, depth: int) -> None:
    """Rightly hashed, and too deep to be read; beside it stands an older one that is whole."""
    older = write_checkpoint(damaged.parent / "older", small(0), iteration=0)
    data = b'{"$tuple": [' * depth + b"]}" * depth
    if name == "state":
        rewritten(damaged, lambda manifest: None, state=data)
    else:
        (damaged / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError):
        read_checkpoint(damaged)
    assert digest(read_newest(damaged.parent)) == digest(read_checkpoint(older))


# Something is missing, or does not fit


def full_state_of(trainer: GRPOTrainer) -> str:
    """SHA-256 over all that loading may change."""
    optimizer = trainer.optimizer_step.optimizer
    assert optimizer is not None
    return digest(
        weights_of(trainer.policy),
        None if trainer.reference_policy is None else weights_of(trainer.reference_policy),
        optimizer.state_dict(),
        trainer.iteration,
        trainer.data_seed,
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002
    )


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


@pytest.mark.parametrize("case", ["reference", "running baseline", "reward with a state", "scheduler of the caller"])
def test_a_missing_item_is_an_error_and_changes_nothing(case: str, tmp_path: Path) -> None:
    """Each item, each item's items, and those of what has a state of its own, taken away one at a time."""
    state, fresh = saved_and_fresh(case, tmp_path)
    before = full_state_of(fresh)
    missing = [path for path in paths_in(state, 3) if path[0] != "config"]
    assert {("stateful", "optimizer"), ("counters", "iteration"), ("random", "torch"), ("row_order",)} <= set(missing)
    silent: list[Any] = []
    untyped: list[Any] = []
    changed: list[Any] = []
    for path in missing:
        broken = write_checkpoint(tmp_path / "broken", without(state, path), iteration=2)
        try:
            fresh.load_checkpoint(broken)
            if not (path[0] == "stateful" and len(path) == 3):  # a part's own items are for it to miss, or not
                silent.append(path)
                continue
            fresh = saved_and_fresh(case, tmp_path / "again")[1]
            before = full_state_of(fresh)
        except CheckpointError:
            pass
        except Exception as error:
            untyped.append((*path, type(error).__name__))
        if full_state_of(fresh) != before:
            changed.append(path)
            fresh = saved_and_fresh(case, tmp_path / "again")[1]
            before = full_state_of(fresh)
    assert (silent, untyped, changed) == ([], [], [])


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("plain", "reference"),
        ("reference", "plain"),
        ("plain", "reward with a state"),
        ("reward with a state", "plain"),
        ("plain", "scheduler of the caller"),
        ("scheduler of the caller", "plain"),
        ("duck-typed with a state", "plain"),
    ],
)
def test_a_trainer_of_another_kind_is_refused(saved: str, loaded: str, tmp_path: Path) -> None:
    trainer, *_ = built(saved, seed=1)
    path = trainer.save_checkpoint(tmp_path / "saved")
    other, *_ = built(loaded, seed=2)
    before = full_state_of(other)
    with pytest.raises(CheckpointError):
        other.load_checkpoint(path)
    assert full_state_of(other) == before


def test_parameters_of_another_shape_are_refused(tmp_path: Path) -> None:
    def trainer_of(num_actions: int) -> GRPOTrainer:
        policy = TablePolicy(num_actions=num_actions)
        return GRPOTrainer(config=GRPOConfig(), policy=policy, reward_model=lambda s, a: [])

    path = trainer_of(2).save_checkpoint(tmp_path / "two")
    other = trainer_of(3)
    before = full_state_of(other)
    with pytest.raises(
        CheckpointError, match=r"TablePolicy: logits has shape \[2, 3\], and \[2, 2\] in the checkpoint"
    ):
        other.load_checkpoint(path)
    assert full_state_of(other) == before


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """SGD's state under Adam would resume without its moments; two parameter groups do not fit into one."""

    def trainer_of(make: Callable[[Any], torch.optim.Optimizer]) -> GRPOTrainer:
        policy = VectorPolicy()
        return GRPOTrainer(
            config=GRPOConfig(group_size=4),
            policy=policy,
            reward_model=lambda s, actions: [float(action) for action in actions],
            optimizer=make(list(policy.parameters())),
        )

    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1),
    ]
    for kept, make in enumerate(makers):
        trainer = trainer_of(make)
        trainer.step(torch.randn(2, 3))
        path = trainer.save_checkpoint(tmp_path / str(kept))
        for other, make_other in enumerate(makers):
            if other != kept:
                fresh = trainer_of(make_other)
                before = full_state_of(fresh)
                with pytest.raises(CheckpointError, match="optimizer"):
                    fresh.load_checkpoint(path)
                assert full_state_of(fresh) == before


# Failing disks


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


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_full_disk_leaves_the_checkpoint_before(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def prepare() -> None:
        shutil.rmtree(run, ignore_errors=True)
        CheckpointFolder(run, 3).save(small(1), iteration=1, score=1.0)

    def save() -> None:
        CheckpointFolder(run, 3).save(small(2), iteration=2, score=2.0)

    for error in failing_disks(kind, tmp_path, save, prepare):
        assert str(run / "iteration-00000002") in str(error)
        assert os.strerror(errno.ENOSPC) in str(error)
        assert isinstance(error.__cause__, OSError)
        assert digest(read_checkpoint(run / "iteration-00000001")) == digest(small(1))
        loaded = read_checkpoint(run)
        assert digest(loaded) in (digest(small(1)), digest(small(2)))
        assert set(names_in(run)) <= {"iteration-00000001", "iteration-00000002"}  # nothing temporary
    assert digest(read_checkpoint(run)) == digest(small(2))


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_full_disk_leaves_the_checkpoint_that_was_to_be_replaced(kind: str, tmp_path: Path) -> None:
    """What the error says of it is true: if it says "untouched", what loads is what was there."""
    path = tmp_path / "checkpoint"

    def prepare() -> None:
        shutil.rmtree(path, ignore_errors=True)
        write_checkpoint(path, small(1), iteration=1)

    for error in failing_disks(kind, tmp_path, lambda: write_checkpoint(path, small(2), iteration=2), prepare):
        assert str(path) in str(error)
        loaded = digest(read_checkpoint(path))
        assert loaded in (digest(small(1)), digest(small(2)))
        if "untouched" in str(error):
            assert loaded == digest(small(1))
        assert names_in(tmp_path) == ["checkpoint"]
    assert digest(read_checkpoint(path)) == digest(small(2))
    assert names_in(tmp_path) == ["checkpoint"]


def test_a_run_stops_with_the_path_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, states, options = built("plain", seed=1)
    trainer.train(states, num_iterations=2, checkpoint_dir=tmp_path / "run", checkpoint_every=1, **options)
    before = weights_of(trainer.policy)
    Disk(monkeypatch, tmp_path, "fsync", 1)
    with pytest.raises(CheckpointError, match=r"iteration-00000003: .*No space left"):
        trainer.train(states, num_iterations=2, checkpoint_dir=tmp_path / "run", checkpoint_every=1, **options)
    assert not torch.equal(weights_of(trainer.policy), before)  # what was learned is still in memory
    assert read_checkpoint(tmp_path / "run")["counters"]["iteration"] == 2


# Killed while saving

SAVE_FOR_EVER = """
    import os, random, signal, sys, time
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
    for attempt in range(12):
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
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
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


def test_killed_at_any_time_what_loads_is_whole(tmp_path: Path) -> None:
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
    for name in ("manifest.json", "state.json", "tensors.safetensors"):
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


def test_loading_never_unpickles(tmp_path: Path) -> None:
    in_a_process(CANARY, tmp_path)
