"""MLflow's own client finds in a database what was logged, each iteration once."""

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest

from adapters.tracking import MLflowSink
from adapters.tracking.mlflow_sink import accepted_name
from grpo import GRPOWarning
from tests.support.tracked_runs import FIRST_ROW, pictured_samples, resumed_run, samples, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
]  # MLflow takes seconds, most of them for a new database


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def client(store: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(store)


def only_run(store: str, experiment: str) -> Any:
    (run,) = client(store).search_runs([client(store).get_experiment_by_name(experiment).experiment_id])
    return run


def values(store: str, run: Any, name: str) -> dict[int, float]:
    found = client(store).get_metric_history(run.info.run_id, name)
    assert len({one.step for one in found}) == len(found), f"{name} has a step twice"
    return {one.step: one.value for one in found}


def table(store: str, run: Any, file: str) -> list[dict[str, Any]]:
    found = json.loads(Path(client(store).download_artifacts(run.info.run_id, file)).read_text())
    return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]


def test_a_run_and_its_resume_are_one_run_with_every_iteration_once(tmp_path: Path, store: str) -> None:
    started, resumed = resumed_run(
        lambda: MLflowSink(tmp_path / "run", experiment="resumed", tracking_uri=store), tmp_path
    )

    run = only_run(store, "resumed")
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["config.learning_rate"] == "0.1"
    assert run.data.params["num_iterations"] == "5", "params are those of the start"
    later = client(store).download_artifacts(run.info.run_id, "settings-00000004.json")
    assert json.loads(Path(later).read_text())["num_iterations"] == 8
    metrics = {**dict(enumerate(resumed.history, 4)), **dict(enumerate(started.history, 1))}
    for name in metrics[1]:
        assert values(store, run, name) == pytest.approx({step: metrics[step][name] for step in range(1, 9)}), name
    assert list(values(store, run, "eval/avg_reward")) == [2, 4, 5, 6, 8], "the first call of train ended with 5"
    assert [row["iteration"] for row in table(store, run, "train_samples.json")] == sorted([*range(1, 9)] * 4)
    assert [row["iteration"] for row in table(store, run, "eval_samples.json")] == sorted([2, 4, 5, 6, 8] * 4)
    logged = {one["path"] for one in json.loads(run.data.tags["mlflow.loggedArtifacts"])}
    assert logged == {"train_samples.json", "eval_samples.json"}


def test_a_run_that_failed_has_all_names_mlflows_own_tables_and_pictures_of_the_newest_rows(
    tmp_path: Path, store: str
) -> None:
    import mlflow

    names = ["reward/f(x)", "a//b", "../up", "/top", "", "é", "x" * 300, *(f"a{one}b" for one in string.punctuation)]
    sink = MLflowSink(tmp_path / "run", experiment="failed", tracking_uri=store, write_every=1_000.0)
    for iteration, name in enumerate(names, 1):
        sink.log({name: 1.0, "nan": float("nan"), "infinity": float("inf")}, iteration)
        if iteration <= 3:
            sink.log_samples(samples() if iteration == 1 else pictured_samples(), iteration)
    with pytest.raises(ZeroDivisionError), sink:
        raise ZeroDivisionError

    run = only_run(store, "failed")
    assert run.info.status == "FAILED"
    assert {accepted_name(name) for name in names} <= set(run.data.metrics)
    assert accepted_name("rewards/mean of q-values_1.5") == "rewards/mean of q-values_1.5"
    assert accepted_name("reward/f(x)") == "reward/f_x_"
    mlflow.set_tracking_uri(store)
    loaded = client(store).load_table(run.info.experiment_id, "train_samples.json", [run.info.run_id])
    assert dict(loaded.iloc[0]) == {"iteration": 1, **FIRST_ROW}
    files = client(store).list_artifacts(run.info.run_id, "images")
    pictures = [file.path.removeprefix("images/") for file in files if file.path.endswith(".png")]
    assert len(pictures) == 1
    assert re.match(r"train.pictures.1.step.3\b", pictures[0])  # versions of MLflow separate the parts by other signs


def test_a_table_keeps_its_newest_rows(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.tracking.mlflow_sink.MAX_ROWS", 6)
    for start in (1, 3):  # the second is a resume
        with MLflowSink(tmp_path / "run", experiment="newest", tracking_uri=store) as sink:
            for iteration in range(start, start + 2):
                sink.log({}, iteration)
                sink.log_samples(samples(), iteration)
    rows = table(store, only_run(store, "newest"), "train_samples.json")
    assert [row["iteration"] for row in rows] == [3, 3, 4, 4, 4, 4]


def test_metrics_wait_and_are_written_together_but_the_first_at_once(tmp_path: Path, store: str) -> None:
    with MLflowSink(tmp_path / "run", experiment="waiting", tracking_uri=store) as sink:
        for iteration in (1, 2, 3):
            sink.log({"x": float(iteration)}, iteration)
        run = only_run(store, "waiting")
        assert values(store, run, "x") == {1: 1.0}
        sink.log({f"y/{number}": 0.0 for number in range(1_000)}, 4)
        assert values(store, run, "x") == {1: 1.0, 2: 2.0, 3: 3.0}
        sink.log({"x": 5.0}, 5)
    assert values(store, run, "x") == {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}


def test_a_store_that_fails_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sink = MLflowSink(tmp_path / "run", tracking_uri=f"sqlite:///{tmp_path}/file/mlflow.db")
    with pytest.warns(GRPOWarning, match="MLflowSink.start raised"), sink:
        trained = train([sink], 2)
    assert len(trained.history) == 2
