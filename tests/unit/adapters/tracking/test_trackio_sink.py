"""trackio's own interface finds in its database what was logged, each iteration once."""

import time
from pathlib import Path
from typing import Any

import pytest

from adapters.tracking import TrackioSink
from grpo import GRPOWarning
from tests.support.tracked_runs import FIRST_ROW, STATES, crash_after, samples, train

QUIET = {"auto_log_cpu": False, "auto_log_gpu": False}


def rows(project: str, run: Any) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs(project, run.name, run_id=run.id)


def runs(project: str) -> list[Any]:
    import trackio

    return list(trackio.Api().runs(project))


def values(found: list[dict[str, Any]], name: str) -> dict[int, Any]:
    named = [(row["step"], row[name]) for row in found if name in row]
    assert len(dict(named)) == len(named), f"{name} has a step twice"
    return dict(named)


def test_a_run_and_its_resume_are_one_run_with_every_iteration_once(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    options: dict[str, Any] = {"eval_states": STATES, "eval_every": 2}
    with TrackioSink(folder, project="resumed", **QUIET) as sink:
        started = train([sink], 5, checkpoints, **options)
    crash_after(5, checkpoints)
    with TrackioSink(folder, project="resumed", **QUIET) as sink:
        resumed = train([sink], 8, checkpoints, **options)

    (run,) = runs("resumed")
    assert run.name == "run"
    assert run.config["config"]["learning_rate"] == 0.1
    found = rows("resumed", run)
    metrics = {**dict(enumerate(resumed.history, 4)), **dict(enumerate(started.history, 1))}
    for name in metrics[1]:
        assert values(found, name) == pytest.approx({step: metrics[step][name] for step in range(1, 9)}), name
    assert list(values(found, "eval/avg_reward")) == [2, 4, 5, 6, 8], "the first call of train ended with 5"
    assert list(values(found, "train/samples")) == list(range(1, 9))
    assert [sum(chart["values"]) for chart in values(found, "train/advantages").values()] == [8] * 8


def test_tables_have_every_column(tmp_path: Path) -> None:
    with TrackioSink(tmp_path, project="tables", **QUIET) as sink:
        sink.log({"nan": float("nan"), "infinity": float("inf")}, 1)
        sink.log_samples(samples(), 1)
    (run,) = runs("tables")
    table = values(rows("tables", run), "train/samples")[1]
    assert table["_value"][0] == FIRST_ROW


def test_a_database_that_cannot_be_opened_is_reported_and_the_run_goes_on(tmp_path: Path, trackio_folder: Path) -> None:
    (trackio_folder / "closed.db").mkdir()
    sink = TrackioSink(tmp_path, project="closed", **QUIET)
    with pytest.warns(GRPOWarning, match="TrackioSink.start raised OperationalError"), sink:
        trained = train([sink], 2)
    assert len(trained.history) == 2


def test_trackio_warns_if_it_cannot_write_and_the_run_goes_on(tmp_path: Path, trackio_folder: Path) -> None:
    class Breaking:
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            if trainer.iteration == 1:
                time.sleep(0.7)  # trackio has written
                (trackio_folder / "broken.db").unlink()
                (trackio_folder / "broken.db").mkdir()

    sink = TrackioSink(tmp_path, project="broken", **QUIET)
    with pytest.warns(UserWarning, match="trackio"), sink:
        trained = train([sink], 3, callbacks=[Breaking()])
    assert len(trained.history) == 3


def test_runs_with_the_same_name_stay_apart_when_one_is_resumed(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        with TrackioSink(tmp_path / folder / "run", project="names", **QUIET) as sink:
            sink.start({}, 1)
            sink.log({"x": 1.0}, 1)
    with TrackioSink(tmp_path / "a" / "run", project="names", **QUIET) as sink:
        sink.start({}, 2)
        sink.log({"x": 2.0}, 2)
    found = {run.name: values(rows("names", run), "x") for run in runs("names")}
    assert found == {"run": {1: 1.0, 2: 2.0}, "run-2": {1: 1.0}}
