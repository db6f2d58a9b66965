"""The files that Weights & Biases writes offline hold what was logged, each iteration once."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from adapters.tracking import WandbSink
from grpo import GRPOWarning
from tests.support.tracked_runs import FIRST_ROW, STATES, WandbFiles, crash_after, samples, train


def tables(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    """Tables by their step."""
    files = folder.glob(f"wandb/offline-run-*/files/media/table/{name}_*.table.json")
    return {int(file.name.split("_")[1]): json.loads(file.read_text()) for file in files}


@pytest.mark.slow
def test_a_run_and_its_resume_are_one_run_with_every_iteration_once(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    options: dict[str, Any] = {"eval_states": STATES, "eval_every": 2}
    with WandbSink(folder, project="bandits", name="first try", tags=["small"]) as sink:
        started = train([sink], 5, checkpoints, **options)
    crash_after(5, checkpoints)
    with WandbSink(folder, project="bandits", name="first try") as sink:
        resumed = train([sink], 8, checkpoints, **options)

    files = WandbFiles(folder)
    runs = files.runs()
    assert len(runs) == 2
    assert len({run.run_id for run in runs}) == 1
    assert [(run.project, run.display_name) for run in runs] == [("bandits", "first try")] * 2
    assert list(runs[0].tags) == ["small"]
    config = files.config()
    assert (config["num_iterations"], config["config"]["learning_rate"]) == (8, 0.1)

    first, second = files.history()
    assert [row["_step"] for row in first] == [1, 2, 3, 4, 5]
    assert [row["_step"] for row in second] == [6, 7, 8], "iterations 4 and 5 were there already"
    metrics = {**dict(enumerate(started.history, 1)), **dict(enumerate(resumed.history, 4))}
    for row in [*first, *second]:
        expected = metrics[row["_step"]]
        assert {name: row[name] for name in expected if not name.startswith("time/")} == pytest.approx(
            {name: value for name, value in expected.items() if not name.startswith("time/")}
        )
        assert row["train/rewards/_type"] == row["train/advantages/_type"] == "histogram"
        assert sum(row["train/rewards/values"]) == 8
    assert set(tables(folder, "train/samples")) == {1, 6}, "the next tables would come after 30 seconds"
    assert set(tables(folder, "eval/samples")) == {2, 6}


@pytest.mark.slow
def test_tables_have_every_column_and_may_come_with_each_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    with WandbSink(tmp_path, mode="offline", tables_every=0) as sink:
        for iteration in (1, 2):
            sink.log({"nan": float("nan"), "infinity": float("inf")}, iteration)
            sink.log_samples(samples(), iteration)
    assert [row["_step"] for row in WandbFiles(tmp_path).history()[0]] == [1, 2]
    found = tables(tmp_path, "train/samples")
    assert set(found) == {1, 2}
    assert dict(zip(found[1]["columns"], found[1]["data"][0], strict=True)) == FIRST_ROW


def test_a_folder_that_vanishes_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    class Vanishing:
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            if trainer.iteration == 2:
                shutil.rmtree(tmp_path / "run")

    with pytest.warns(GRPOWarning, match="WandbSink.log raised FileNotFoundError"), WandbSink(tmp_path / "run") as sink:
        trained = train([sink], 5, callbacks=[Vanishing()])
    assert len(trained.history) == 5
