"""Checkpoints: exact resume, and which checkpoints a folder keeps and gives back.

Every kind of run stopped in every phase: `_running/test_safe_points.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import CheckpointError, GRPOTrainer
from grpo.checkpoint import CheckpointFolder, best_checkpoint, read_checkpoint, write_checkpoint
from tests.support.checkpoint_runs import built, names_in, small
from tests.support.policies import DuckPolicy, digest, weights_of
from tests.support.trainers import trainer_of

pytestmark = [
    pytest.mark.usefixtures("without_type_checks"),
    pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning"),
]


def test_a_policy_without_parameters_repeats_its_random_numbers(tmp_path: Path) -> None:
    """The README's first policy: log-probabilities, like rewards, are random numbers, and the rewards tell."""

    def trainer() -> GRPOTrainer:
        policy = DuckPolicy(num_actions=4)
        policy.tensors = {}
        policy.generate_actions = lambda states, count, **_: [[0] * count for _ in states]  # type: ignore[method-assign]
        policy.get_log_probabilities = lambda states, actions: torch.randn(len(actions))  # type: ignore[method-assign]
        return trainer_of(policy, lambda states, actions: torch.rand(len(actions)))

    kept: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "keep_last": 6}
    unbroken = trainer().train([0, 1], num_iterations=6, progress=False, **kept)
    for stopped in range(1, 6):
        fresh = trainer()
        fresh.load_checkpoint(tmp_path / f"iteration-{stopped:08d}")
        rest = fresh.train([0, 1], num_iterations=6, progress=False)
        assert [m["rewards/mean"] for m in rest] == [m["rewards/mean"] for m in unbroken[stopped:]]


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


@pytest.mark.parametrize("case", ["plain", "epochs of batches", "reward with a state", "dropout"])
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
