"""Checkpoints: exact resume from everywhere, and which checkpoints a folder keeps and gives back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import CheckpointError, ConfigError, GRPOConfig, GRPOTrainer, GRPOWarning
from grpo.checkpoint import CheckpointFolder, best_checkpoint, read_checkpoint, write_checkpoint
from tests.support.checkpoint_runs import CASES, built, names_in, small
from tests.support.policies import DuckPolicy, digest, weights_of

pytestmark = [
    pytest.mark.usefixtures("without_type_checks"),
    pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning"),
]


PARTS_OF_OTHERS = {
    *("plain", "reference", "running baseline", "reward with a state", "scheduler of the caller"),
    "reward network with a buffer",
}
"""Kinds of run with nothing that another kind does not have as well."""


@pytest.mark.slow
def test_a_run_resumed_after_any_iteration_ends_like_the_unbroken_one(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    for case in sorted(CASES.keys() - PARTS_OF_OTHERS):
        folder = tmp_path / case
        with subtests.test(case=case):
            trainer, states, options = built(case, seed=1)
            unbroken = trainer.train(
                states, num_iterations=6, checkpoint_dir=folder, checkpoint_every=1, keep_last=100, **options
            )
            expected = digest(weights_of(trainer.policy))
            assert sorted(path.name for path in folder.iterdir()) == [f"iteration-{n:08d}" for n in range(1, 7)]
            for stopped in range(1, 6):
                fresh, _, _ = built(case, seed=100 + stopped)
                assert digest(weights_of(fresh.policy)) != expected
                fresh.load_checkpoint(folder / f"iteration-{stopped:08d}")
                rest = fresh.train(states, num_iterations=6, **options)
                assert digest(weights_of(fresh.policy)) == expected, f"stopped after iteration {stopped}"
                assert len(rest) == 6 - stopped
                for found, before in zip(rest, unbroken[stopped:], strict=True):
                    assert found["rewards/mean"] == before["rewards/mean"]
                    assert found["train/learning_rate"] == before["train/learning_rate"]
                    assert found.get("eval/avg_reward") == before.get("eval/avg_reward")
                assert fresh.iteration == 6


def test_an_interrupted_run_continues_from_its_folder(tmp_path: Path) -> None:
    """Stopped by an exception of a callback in the sixth iteration, whose updates are done and which is not recorded yet."""

    class Stop(Exception):
        pass

    class Interrupt:
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            if trainer.iteration == 6:
                raise Stop

    whole, states, options = built("epochs of batches", seed=1)
    whole.train(states, num_iterations=10, **options)
    interrupted, *_ = built("epochs of batches", seed=1)
    with pytest.raises(Stop):
        interrupted.train(
            states, num_iterations=10, callbacks=[Interrupt()], checkpoint_dir=tmp_path, checkpoint_every=1, **options
        )
    resumed, *_ = built("epochs of batches", seed=2)
    resumed.load_checkpoint(tmp_path)
    assert resumed.iteration == 6
    assert resumed.progress.unrecorded is not None
    assert len(resumed.train(states, num_iterations=10, checkpoint_dir=tmp_path, checkpoint_every=1, **options)) == 5
    assert digest(weights_of(resumed.policy)) == digest(weights_of(whole.policy))
    assert read_checkpoint(tmp_path)["parts"]["counters"]["iteration"] == 10


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
    (checkpoint / "rank-0" / "tensors.safetensors").write_bytes(b"cut")


def damage_state(checkpoint: Path) -> None:
    (checkpoint / "rank-0" / "state.json").unlink()


def damage_manifest(checkpoint: Path) -> None:
    data = (checkpoint / "manifest.json").read_bytes()
    (checkpoint / "manifest.json").write_bytes(data.replace(b'"sha256"', b'"sha257"', 1))


def test_a_run_continues_in_its_folder_from_the_newest_whole_checkpoint(
    subtests: pytest.Subtests, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last two of ten checkpoints are damaged. The run continues after the eighth and writes them again."""
    for damage in [damage_tensors, damage_state, damage_manifest]:
        folder = tmp_path / damage.__name__
        with subtests.test(damage=damage.__name__):
            kept: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every": 1, "keep_last": 9}
            whole, states, options = built("epochs of batches", seed=1)
            whole.train(states, num_iterations=10, **kept, **options)
            for n in (9, 10):
                damage(folder / f"iteration-{n:08d}")
            resumed, *_ = built("epochs of batches", seed=2)
            caplog.clear()
            resumed.load_checkpoint(folder)
            assert resumed.iteration == 8
            assert f"{folder / 'iteration-00000008'} was loaded, because newer checkpoints are damaged" in caplog.text
            assert all(str(folder / f"iteration-{n:08d}") in caplog.text for n in (9, 10))
            assert len(resumed.train(states, num_iterations=10, **kept, **options)) == 2
            assert digest(weights_of(resumed.policy)) == digest(weights_of(whole.policy))
            written = [read_checkpoint(folder / f"iteration-{n:08d}")["parts"]["counters"] for n in (9, 10)]
            assert [counters["iteration"] for counters in written] == [9, 10]


def test_a_run_refuses_to_continue_beside_a_later_whole_checkpoint(tmp_path: Path) -> None:
    """The tenth checkpoint is damaged and the ninth is not. A run that loaded the eighth would overwrite the ninth."""
    kept: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "keep_last": 9}
    trainer, states, options = built("plain", seed=1)
    trainer.train(states, num_iterations=10, **kept, **options)
    damage_tensors(tmp_path / "iteration-00000010")
    resumed, *_ = built("plain", seed=2)
    resumed.load_checkpoint(tmp_path / "iteration-00000008")
    with pytest.raises(CheckpointError, match=r"iteration-00000009 is of iteration 9, and this trainer is at 8"):
        resumed.train(states, num_iterations=10, **kept, **options)
    assert resumed.iteration == 8


def test_a_loaded_finished_run_makes_no_further_iteration(tmp_path: Path) -> None:
    trainer, states, options = built("plain", seed=1)
    trainer.train(states, num_iterations=3, checkpoint_dir=tmp_path, **options)
    resumed, *_ = built("plain", seed=2)
    resumed.load_checkpoint(tmp_path)
    before = digest(weights_of(resumed.policy))
    assert before == digest(weights_of(trainer.policy))
    with pytest.raises(ConfigError, match=r"num_iterations=3 is the total, and the trainer is at iteration 3\. Pass"):
        resumed.train(states, num_iterations=3, checkpoint_dir=tmp_path, **options)
    with pytest.warns(GRPOWarning, match=r"num_iterations=3 is the total, .* at iteration 3, so there is nothing left"):
        assert resumed.train(states, num_iterations=3, checkpoint_dir=tmp_path, resume="auto", **options) == []
    assert (resumed.iteration, digest(weights_of(resumed.policy))) == (3, before)


def test_saving_between_steps_resumes_exactly_and_changes_nothing(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """The caller makes the steps. Saving changes nothing in the run that is saved."""
    for case in ["plain", "epochs of batches", "reward with a state", "dropout"]:
        folder = tmp_path / case
        with subtests.test(case=case):
            unbroken, states, _ = built(case, seed=1)
            for _ in range(4):
                unbroken.step(states[:2])
            trainer, *_ = built(case, seed=1)
            for n in range(4):
                assert trainer.save_checkpoint(folder / str(n)) == folder / str(n)
                trainer.step(states[:2])
            expected = digest(weights_of(unbroken.policy))
            assert digest(weights_of(trainer.policy)) == expected
            for n in range(4):
                fresh, *_ = built(case, seed=50 + n)
                fresh.load_checkpoint(str(folder / str(n)))
                assert fresh.iteration == n
                for _ in range(4 - n):
                    fresh.step(states[:2])
                assert digest(weights_of(fresh.policy)) == expected, n


def test_loading_a_checkpoint_keeps_the_identity_of_parameter_tensors(tmp_path: Path) -> None:
    trainer, states, _ = built("plain", seed=1)
    trainer.save_checkpoint(tmp_path / "here")
    before = {name: id(tensor) for name, tensor in trainer.policy.get_parameters().items()}
    trainer.load_checkpoint(tmp_path / "here")
    assert {name: id(tensor) for name, tensor in trainer.policy.get_parameters().items()} == before
    trainer.step(states[:2])


# What is kept


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


def test_a_run_keeps_the_checkpoint_with_the_best_evaluation(tmp_path: Path) -> None:
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


def test_a_folder_lists_the_iterations_of_its_checkpoints(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2)
    assert folder.save(small(3), iteration=3, score=None) == tmp_path / "iteration-00000003"
    assert [folder.has(iteration) for iteration in (2, 3)] == [False, True]


def test_without_a_score_there_is_no_best(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No checkpoint with a score in"):
        best_checkpoint(tmp_path)


def test_pruning_removes_only_checkpoints_the_run_has_written(tmp_path: Path) -> None:
    """A checkpoint that the user saved in the same folder under another name stays."""
    write_checkpoint(tmp_path / "before-phase-2", small(0), iteration=0)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "manifest.json").write_text('{"name": "some other program"}')
    folder = CheckpointFolder(tmp_path, keep_last=1)
    for n in (1, 2, 3):
        folder.save(small(n), iteration=n, score=float(n))
    assert names_in(tmp_path) == ["before-phase-2", "extension", "iteration-00000003", "notes.txt"]


def test_the_checkpoint_just_written_is_never_pruned(tmp_path: Path) -> None:
    """A new run in the folder of an older and longer one."""
    old = CheckpointFolder(tmp_path, keep_last=2)
    for n in (10, 11, 12):
        old.save(small(n), iteration=n, score=float(n))
    path = CheckpointFolder(tmp_path, keep_last=2).save(small(1), iteration=1, score=0.0)
    assert read_checkpoint(path)["n"] == 1


def test_a_user_folder_is_never_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    """Only a checkpoint may be replaced by one: `save_checkpoint("results")` must not delete results."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="results"):
        write_checkpoint(results, small(1), iteration=1)
    assert (results / "thesis.txt").read_text() == "years of work"
    assert names_in(tmp_path) == ["results"]


def test_a_folder_of_checkpoints_is_never_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run", keep_last=3)
    folder.save(small(1), iteration=1, score=None)
    with pytest.raises(CheckpointError, match="run"):
        write_checkpoint(tmp_path / "run", small(2), iteration=2)
    assert read_checkpoint(tmp_path / "run")["n"] == 1


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


@pytest.mark.filterwarnings("ignore:.*was loaded, because newer checkpoints are damaged:grpo.GRPOWarning")
def test_foreign_files_and_folders_are_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "iteration-00000001", small(1), iteration=1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plots").mkdir()
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "manifest.json").write_text('{"name": "some other program", "iteration": 99}')
    assert read_checkpoint(tmp_path)["n"] == 1


def test_the_current_working_folder_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "iteration-00000001", small(1), iteration=1)
    monkeypatch.chdir(tmp_path)
    assert read_checkpoint(".")["n"] == 1
    monkeypatch.chdir(tmp_path / "iteration-00000001")
    assert read_checkpoint(".")["n"] == 1


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "no such", tmp_path):
        with pytest.raises(CheckpointError, match=f"No intact checkpoint in {path}"):
            read_checkpoint(path)
