"""Checkpoints: exact resume, and which checkpoints a folder keeps and gives back.

Every kind of run stopped in every phase: `_running/test_safe_points.py`.
"""

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo import CheckpointError, GRPOTrainer, load_weights
from grpo._storage import opening
from grpo.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    best_checkpoint,
    open_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from grpo.errors import DamagedCheckpointError
from tests.support.checkpoint_runs import built, names_in, small
from tests.support.imitated_ranks import on_ranks
from tests.support.policies import DuckPolicy, digest, weights_of
from tests.support.trainers import trainer_of

pytestmark = [
    pytest.mark.usefixtures("without_type_checks"),
    pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning"),
]


def test_a_run_continues_in_its_folder_from_the_newest_whole_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last two of ten checkpoints are damaged. The run continues after the eighth and writes them again."""
    kept: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "keep_last": 9}
    whole, states, options = built("epochs of batches", seed=1)
    whole.train(states, num_iterations=10, **kept, **options)
    (tmp_path / "iteration-00000009" / "rank-0" / "state.json").unlink()
    manifest = tmp_path / "iteration-00000010" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"sha256"', b'"sha257"', 1))
    resumed, *_ = built("epochs of batches", seed=2)
    resumed.load_checkpoint(tmp_path)
    assert resumed.iteration == 8
    assert f"{tmp_path / 'iteration-00000008'} was loaded, because newer checkpoints are damaged" in caplog.text
    assert all(str(tmp_path / f"iteration-{n:08d}") in caplog.text for n in (9, 10))
    assert len(resumed.train(states, num_iterations=10, **kept, **options)) == 2
    assert digest(weights_of(resumed.policy)) == digest(weights_of(whole.policy))
    written = [read_checkpoint(tmp_path / f"iteration-{n:08d}")["parts"]["counters"] for n in (9, 10)]
    assert [counters["iteration"] for counters in written] == [9, 10]


@pytest.mark.parametrize(
    "case", ["plain", "epochs of batches", "reward with a state", "dropout", "random numbers in scoring"]
)
def test_saving_between_steps_resumes_exactly_and_changes_nothing(case: str, tmp_path: Path) -> None:
    """The caller makes the steps. Saving changes nothing in the run that is saved."""
    unbroken, states, _ = built(case, seed=1)
    for _ in range(4):
        unbroken.step(states[:2])
    trainer, *_ = built(case, seed=1)
    for n in range(4):
        assert trainer.save_checkpoint(tmp_path / str(n)) == tmp_path / str(n)
        trainer.step(states[:2])
    expected = digest(weights_of(unbroken.policy))
    assert digest(weights_of(trainer.policy)) == expected
    for n in range(4):
        fresh, *_ = built(case, seed=50 + n)
        fresh.load_checkpoint(str(tmp_path / str(n)))
        assert fresh.iteration == n
        for _ in range(4 - n):
            fresh.step(states[:2])
        assert digest(weights_of(fresh.policy)) == expected, n


def test_a_policy_without_parameters_is_resumed_too(tmp_path: Path) -> None:
    """The README's first policy: nothing is optimized, and the rewards tell that random numbers are repeated."""

    def trainer() -> GRPOTrainer:
        policy = DuckPolicy(num_actions=4)
        policy.tensors = {}
        policy.generate_actions = lambda states, count, **_: [[0] * count for _ in states]  # type: ignore[method-assign]
        policy.get_log_probabilities = lambda states, actions: torch.randn(len(actions))  # type: ignore[method-assign]
        return trainer_of(policy, lambda states, actions: torch.rand(len(actions)))

    unbroken, fresh = trainer(), trainer()
    unbroken.step([0, 1])
    path = unbroken.save_checkpoint(tmp_path / "x")
    expected = unbroken.step([0, 1])["rewards/mean"]
    fresh.load_checkpoint(path)
    assert fresh.step([0, 1])["rewards/mean"] == expected


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
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


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with what is no checkpoint: a text, a folder, and the manifest of another program."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plots").mkdir()
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "manifest.json").write_text('{"name": "some other program", "iteration": 99}')
    return tmp_path


def test_pruning_removes_only_checkpoints_the_run_has_written(foreign: Path) -> None:
    """A checkpoint that the user saved in the same folder under another name stays."""
    write_checkpoint(foreign / "before-phase-2", small(0), iteration=0)
    folder = CheckpointFolder(foreign, keep_last=1)
    for n in (1, 2, 3):
        folder.save(small(n), iteration=n, score=float(n))
    assert names_in(foreign) == ["before-phase-2", "extension", "iteration-00000003", "notes.txt", "plots"]


@pytest.mark.filterwarnings("ignore:.*was loaded, because newer checkpoints are damaged:grpo.GRPOWarning")
def test_foreign_files_and_folders_are_not_read(foreign: Path) -> None:
    write_checkpoint(foreign / "iteration-00000001", small(1), iteration=1)
    assert read_checkpoint(foreign)["n"] == 1


def test_the_checkpoint_just_written_is_never_pruned(tmp_path: Path) -> None:
    """A new run in the folder of an older and longer one."""
    old = CheckpointFolder(tmp_path, keep_last=2)
    for n in (10, 11, 12):
        old.save(small(n), iteration=n, score=float(n))
    path = CheckpointFolder(tmp_path, keep_last=2).save(small(1), iteration=1, score=0.0)
    assert read_checkpoint(path)["n"] == 1


def test_a_file_at_the_checkpoints_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="file"):
            write_checkpoint(path, small(1), iteration=1)
    assert (tmp_path / "file").read_text() == "mine"
    assert names_in(tmp_path) == ["file"]


@pytest.mark.filterwarnings("ignore:.*was loaded, because newer checkpoints are damaged:grpo.GRPOWarning")
def test_reading_a_folder_gives_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    for n in (9, 10, 11):
        write_checkpoint(tmp_path / f"iteration-{n:08d}", small(n), iteration=n)
    assert read_checkpoint(tmp_path)["n"] == 11
    (tmp_path / "iteration-00000011" / "rank-0" / "tensors.safetensors").write_bytes(b"cut")
    assert read_checkpoint(tmp_path)["n"] == 10
    (tmp_path / "iteration-00000010" / "rank-0" / "state.json").unlink()
    assert read_checkpoint(tmp_path)["n"] == 9
    (tmp_path / "iteration-00000009" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="No intact checkpoint in") as caught:
        read_checkpoint(tmp_path)
    for part in ("tensors.safetensors", "state.json", "manifest.json"):
        assert part in str(caught.value)


def test_the_current_working_folder_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "iteration-00000001", small(1), iteration=1)
    for folder in (tmp_path, tmp_path / "iteration-00000001"):
        monkeypatch.chdir(folder)
        assert read_checkpoint(".")["n"] == 1


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "no such", tmp_path):
        with pytest.raises(CheckpointError, match=f"No intact checkpoint in {path}"):
            read_checkpoint(path)


# Using a checkpoint without a trainer, and opening one with a check of one's own


def holder(**parameters: torch.Tensor) -> Any:
    """A policy that holds weights and has no state."""
    return SimpleNamespace(parameters=parameters, get_parameters=lambda: parameters)


class Stateful:
    """A policy that holds weights, and has a state, which it may refuse to load."""

    def __init__(self, counter: list[int], fails: bool = False, **parameters: torch.Tensor) -> None:
        self.counter, self.fails, self.parameters = counter, fails, parameters

    def get_parameters(self) -> dict[str, torch.Tensor]:
        return self.parameters

    def state_dict(self) -> dict[str, Any]:
        return {"counter": self.counter}

    def load_state_dict(self, state: Any) -> None:
        self.counter = list(state["counter"])
        if self.fails and self.counter == [5]:
            raise ValueError("not mine")


def saved(path: Path, weights: dict[str, Any], own: Any = None, **others: Any) -> Path:
    parts = {} if own is None else {"policy": own}
    return write_checkpoint(path, {"parameters": weights, "parts": parts, **others}, iteration=1)


@pytest.mark.parametrize("case", ["plain", "duck-typed with a state", "dropout"])
def test_a_policy_gets_the_weights_and_the_state_of_a_run(case: Any, tmp_path: Path) -> None:
    trainer, states, options = built(case, seed=1)
    trainer.train(states, num_iterations=2, checkpoint_dir=tmp_path / case, **options)
    fresh = built(case, seed=2)[0].policy
    identities = {name: id(value) for name, value in fresh.get_parameters().items()}
    before = random.getstate(), torch.get_rng_state()
    load_weights(tmp_path / case, fresh)
    assert digest(weights_of(fresh)) == digest(weights_of(trainer.policy))
    assert identities == {name: id(value) for name, value in fresh.get_parameters().items()}
    assert digest(random.getstate(), torch.get_rng_state()) == digest(*before)
    if isinstance(fresh, DuckPolicy):
        assert digest(fresh.state_dict()) == digest(trainer.policy.state_dict())


def test_only_the_tensors_of_the_policy_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "x", {"w": torch.ones(2)}, own={"counter": [5]}, optimizer=torch.ones(9))
    read: list[str] = []
    real = opening.TensorFile.read
    monkeypatch.setattr(opening.TensorFile, "read", lambda self, name: (read.append(name), real(self, name))[1])
    policy = Stateful([1], w=torch.zeros(2, requires_grad=True))
    load_weights(path, policy)
    assert read == ["parameters.w"]
    assert (policy.parameters["w"].tolist(), policy.counter) == ([1.0, 1.0], [5])
    assert policy.parameters["w"].requires_grad


def test_the_number_of_ranks_does_not_matter(tmp_path: Path) -> None:
    def write(engine: Any) -> None:
        state = {"parameters": {"w": torch.full((2,), 1.0 + engine.rank)}}
        write_checkpoint(tmp_path / "x", state, iteration=1, engine=engine)

    on_ranks(3, write)
    policy = holder(w=torch.zeros(2))
    load_weights(tmp_path, policy)
    assert policy.parameters["w"].tolist() == [1.0, 1.0]


TWO, THREE = torch.ones(2), torch.ones(3)


@pytest.mark.parametrize(("weights", "own", "make", "message"), [
    ({"v": TWO}, None, lambda w, v: holder(w=w), r"missing: \['w'\], unexpected: \['v'\]"),
    ({"w": TWO}, None, lambda w, v: holder(w=w, v=v), r"missing: \['v'\], unexpected: nothing"),
    ({"w": TWO, "v": TWO}, None, lambda w, v: holder(w=w), r"missing: nothing, unexpected: \['v'\]"),
    ({"w": TWO, "v": THREE}, None, lambda w, v: holder(w=w, v=v), r"v has shape \[2\], but \[3\]"),
    ({"w": torch.ones(2, 1)}, None, lambda w, v: holder(w=w), r"w has shape \[2\], but \[2, 1\]"),
    ({"w": 3.0}, None, lambda w, v: holder(w=w), r"w has shape \[2\], but None"),
    ({"w": TWO}, None, lambda w, v: Stateful([1], w=w), "Stateful has a state .* the checkpoint has none"),
    ({"w": TWO}, {"counter": [5]}, lambda w, v: holder(w=w), "the checkpoint has a state .* SimpleNamespace has none"),
])  # fmt: skip
def test_weights_that_do_not_fit_change_nothing(
    weights: Any, own: Any, make: Any, message: str, tmp_path: Path
) -> None:
    policy = make(torch.zeros(2), torch.zeros(2))
    with pytest.raises(CheckpointError, match=message):
        load_weights(saved(tmp_path / "x", weights, own), policy)
    assert all(value.sum() == 0 for value in policy.get_parameters().values())


def test_a_checkpoint_that_no_trainer_has_written_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "by hand", small(1), iteration=1)
    with pytest.raises(CheckpointError, match="must have been written by a trainer"):
        load_weights(path, holder(w=TWO))


def test_a_policy_that_refuses_its_state_is_unchanged(tmp_path: Path) -> None:
    path = saved(tmp_path / "x", {"w": torch.ones(2)}, {"counter": [5]})
    policy = Stateful([1], fails=True, w=torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"Stateful\.load_state_dict must accept .*not mine.*unchanged"):
        load_weights(path, policy)
    assert (policy.counter, policy.parameters["w"].tolist()) == ([1], [0.0, 0.0])


def test_a_damaged_checkpoint_changes_no_weight(tmp_path: Path) -> None:
    damaged = saved(tmp_path / "x", {"w": torch.full((2, 2), 7.0)}, {"counter": [5]})
    file = damaged / "rank-0" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    policy = Stateful([1], w=torch.full((2, 2), 3.0))
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors is damaged"):
        load_weights(damaged, policy)
    assert bool((policy.parameters["w"] == 3.0).all())


def test_a_changed_name_in_the_header_of_the_tensors_names_their_file(tmp_path: Path) -> None:
    """The state's text, which is intact, then names a tensor that is not there."""
    path = write_checkpoint(tmp_path / "x", small(1), iteration=1)
    file = path / "rank-0" / "tensors.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"tensor"', b'"tensos"'))
    with pytest.raises(DamagedCheckpointError, match=r"tensors\.safetensors is damaged: its hash"):
        open_checkpoint(path, None)


def test_a_check_sees_the_state_before_the_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = opening.require_hash
    monkeypatch.setattr(opening, "require_hash", lambda f, name, r: (hashed.append(name), real(f, name, r))[1])
    path = write_checkpoint(tmp_path / "x", small(3), iteration=3, update=2, score=0.5)

    def check(checkpoint: Checkpoint) -> None:
        hashed.append("check")
        assert checkpoint.state["n"] == 3
        assert (checkpoint.path, checkpoint.iteration, checkpoint.update, checkpoint.score) == (path, 3, 2, 0.5)

    open_checkpoint(path, None, check)
    assert [Path(name).name for name in hashed] == ["state.json", "check", "tensors.safetensors"]


def test_a_check_skips_a_checkpoint_by_damage_and_stops_by_any_other_error(tmp_path: Path) -> None:
    for n in (1, 2, 3):
        write_checkpoint(tmp_path / str(n), small(n), iteration=n)

    def refuse(error: type[CheckpointError]) -> Any:
        def check(checkpoint: Checkpoint) -> None:
            if checkpoint.iteration > 1:
                raise error(f"no {checkpoint.iteration}")

        return check

    found = open_checkpoint(tmp_path, None, refuse(DamagedCheckpointError))
    assert (found.iteration, found.skipped) == (1, ("no 3", "no 2"))
    with pytest.raises(CheckpointError, match="no 3"):
        open_checkpoint(tmp_path, None, refuse(CheckpointError))
    with pytest.raises(CheckpointError, match="no 3"):
        open_checkpoint(tmp_path / "3", None, refuse(DamagedCheckpointError))


def test_links_inside_a_folder_of_checkpoints_are_not_followed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "outside" / "newer", small(9), iteration=9)
    write_checkpoint(tmp_path / "run" / "older", small(1), iteration=1)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "outside" / "newer")
    opened = open_checkpoint(tmp_path / "run", None)
    assert (opened.iteration, opened.skipped) == (1, ()), "a link of another name, such as `latest`, is no checkpoint"
    (tmp_path / "run" / "link").rename(tmp_path / "run" / "iteration-00000009")
    opened = open_checkpoint(tmp_path / "run", None)
    assert opened.iteration == 1
    assert "iteration-00000009 is a link" in opened.skipped[0]
    assert f"Load {tmp_path}/outside/newer" in opened.skipped[0]
    assert open_checkpoint(tmp_path / "run" / "iteration-00000009", None).iteration == 9
    write_checkpoint(tmp_path / "run" / "mixed", small(2), iteration=2)
    (tmp_path / "run" / "mixed" / "rank-0").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "mixed" / "rank-0").symlink_to(tmp_path / "elsewhere")
    assert open_checkpoint(tmp_path / "run", None).iteration == 1
    with pytest.raises(CheckpointError, match="it is a link or another kind of file"):
        open_checkpoint(tmp_path / "run" / "mixed", None)
    (tmp_path / "run" / "mixed" / "rank-0").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "mixed" / "rank-0")
    (tmp_path / "run" / "mixed" / "rank-0" / "state.json").unlink()
    os.mkfifo(tmp_path / "run" / "mixed" / "rank-0" / "state.json")  # a reader of a pipe would wait for ever
    with pytest.raises(CheckpointError, match="it is a link or another kind of file"):
        open_checkpoint(tmp_path / "run" / "mixed", None)


def test_without_a_file_descriptor_no_older_checkpoint_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the process says nothing about the newest checkpoint."""
    for n in (1, 2):
        write_checkpoint(tmp_path / str(n), small(n), iteration=n)
    real = os.open

    def limited(path: Any, flags: int, *arguments: Any) -> int:
        if str(path).endswith("2/rank-0/tensors.safetensors"):
            raise OSError(24, os.strerror(24))
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", limited)
    with pytest.raises(CheckpointError, match=r"Cannot read .*Too many open files") as caught:
        open_checkpoint(tmp_path, None)
    assert type(caught.value) is CheckpointError
