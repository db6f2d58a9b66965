"""Sinks: what each of them does, and what the readers of TensorBoard, trackio, W&B and Optuna find of what was logged."""

import base64
import html
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from adapters.bandits import SoftmaxPolicy
from adapters.tracking import MLflowSink, OptunaPruning, TensorBoardSink, TrackioSink, WandbSink
from adapters.tracking.tracker_sink import TrackerSink
from adapters.tracking.values import flat, histogram_of, markdown_table
from grpo import ConfigError, GRPOConfig, GRPOTrainer, GRPOWarning, MetricSink, Samples, with_settings
from tests.support.reward_faults import eventually
from tests.support.tracked_runs import (
    FIRST_ROW,
    STATES,
    Dot,
    WandbFiles,
    pictured_samples,
    resumed_run,
    rewards,
    samples,
    train,
    trainer,
)

SINKS = [MLflowSink, TensorBoardSink, TrackioSink, WandbSink]


class Recorder(TrackerSink):
    """Keeps what a tracker would be told."""

    package = "json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.told: list[Any] = []
        self.fails = False

    def _open(self, run: Any, iteration: int) -> None:
        self.id = run.get("id", len(self.told))
        self.told.append(("open", self.id))
        self._save_run(id=self.id, iteration=self._last)

    def _log_settings(self, settings: Any, iteration: int) -> None:
        self.told.append(("settings", settings, iteration))

    def _log_metrics(self, metrics: Any, iteration: int) -> None:
        if self.fails:
            raise OSError("full")
        self.told.append(("metrics", iteration))
        self._save_run(id=self.id, iteration=iteration)

    def _log_samples(self, samples: Any, iteration: int) -> None:
        self.told.append(("samples", iteration))

    def _close(self, *, failed: bool, broken: bool) -> None:
        self.told.append(("close", failed, broken))


@pytest.mark.parametrize("make", SINKS)
def test_a_sink_that_is_not_used_opens_nothing_and_log_every_is_a_count(make: Any, tmp_path: Path) -> None:
    sink = make(tmp_path / "run", log_every=10)
    assert isinstance(sink, MetricSink)
    assert (sink.log_every, sink.name) == (10, "run")
    sink.close()
    with pytest.raises(ConfigError, match="log_every"):
        make(tmp_path / "run", log_every=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_importing_the_package_and_making_sinks_imports_no_tracker() -> None:
    code = (
        "import sys; from adapters.tracking import *\n"
        "[make('run') for make in (MLflowSink, TensorBoardSink, TrackioSink, WandbSink)]; OptunaPruning(None)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv)))"
    )
    names = ["tensorboard", "wandb", "mlflow", "trackio", "optuna", "torch.utils.tensorboard"]
    root = str(Path(__file__).parents[4])
    run = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True, cwd=root)
    assert run.stdout.strip() == "[]"


MISSING = r'needs the package \w+, .*pip install "\.\[tracking\]" in the checkout'
OPTUNA = (OptunaPruning, r"OptunaPruning needs the package optuna, .*pip install optuna\.")


@pytest.mark.parametrize(("make", "words"), [*((sink, MISSING) for sink in SINKS), OPTUNA])
def test_a_package_that_is_missing_is_named_with_its_command(
    make: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=words):
        make("run")


def test_a_folder_with_the_name_of_a_package_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tracker_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Recorder, "package", "tracker_of_nobody")
    with pytest.raises(ConfigError, match="Recorder needs the package tracker_of_nobody"):
        Recorder(tmp_path)


def test_iteration_1_is_a_new_run_and_a_later_one_continues(tmp_path: Path) -> None:
    sink = Recorder(tmp_path)
    sink.start({"a": 1}, 1)
    sink.log({}, 1)
    sink.log({}, 2)
    sink.start({"a": 2}, 2)  # the trainer went back: iteration 2 is there already
    sink.log({}, 2)
    sink.log_samples(samples(), 2)
    sink.log({}, 3)
    sink.log_samples(samples(), 3)
    sink.start({}, 1)
    assert sink.told == [
        ("open", 0), ("settings", {"a": 1}, 1), ("metrics", 1), ("metrics", 2),
        ("settings", {"a": 2}, 2), ("metrics", 3), ("samples", 3), ("close", False, False),
        ("open", 8), ("settings", {}, 1),
    ]  # fmt: skip
    other = Recorder(tmp_path)
    other.log({}, 2)
    assert other.told == [("open", 8), ("metrics", 2)]
    assert json.loads((tmp_path / "json.json").read_text()) == {"id": 8, "iteration": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["json.json"]


def test_a_sink_that_raised_is_closed_without_writing_and_opens_its_run_again_when_the_next_training_starts(
    tmp_path: Path,
) -> None:
    sink = Recorder(tmp_path)
    sink.log({}, 1)
    sink.fails = True
    with pytest.raises(OSError, match="full"):
        sink.log({}, 2)
    sink.fails = False
    sink.start({}, 2)
    sink.log({}, 2)
    sink.close()
    sink.close()
    opened = [("open", 0), ("settings", {}, 2), ("metrics", 2), ("close", False, False)]
    assert sink.told == [("open", 0), ("metrics", 1), ("close", False, True), *opened]


def test_an_error_in_the_block_is_passed_on_as_a_failed_run(tmp_path: Path) -> None:
    sink = Recorder(tmp_path)
    sink.log({}, 1)
    with pytest.raises(ZeroDivisionError), sink:
        raise ZeroDivisionError
    assert sink.told[-1] == ("close", True, False)


def test_settings_get_their_full_names() -> None:
    settings = {"config": {"lr": 0.1, "reward": {"timeout": None}, "on": True}, "parts": [1, "a"], "n": 3}
    assert flat(settings) == {
        "config.lr": 0.1, "config.reward.timeout": "None", "config.on": True, "parts": '[1, "a"]', "n": 3,
    }  # fmt: skip


def test_a_histogram_counts_the_finite_values_in_bins_of_equal_width() -> None:
    histogram = histogram_of(torch.tensor([0.0, 0.0, 32.0, float("inf"), float("nan")], dtype=torch.bfloat16))
    assert histogram.counts.tolist() == [2, *[0] * 30, 1]
    assert histogram.edges.tolist() == list(range(33))
    assert histogram_of(torch.tensor([float("nan")])) is None


# --- Optuna's own study records pruned trials, and a pruned run leaves the trainer as it was


class Threshold(optuna.pruners.BasePruner):
    """Prunes a trial whose latest value is below a bound."""

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.intermediate_values[trial.last_step] < 0.6)


def test_a_study_over_the_learning_rate_prunes_the_trials_that_do_not_learn() -> None:
    def objective(trial: Any) -> float:
        rate = trial.suggest_categorical("learning_rate", [1e-6, 0.3])
        torch.manual_seed(0)
        config = with_settings(GRPOConfig(group_size=8, seed=0), {"learning_rate": rate})
        trained = GRPOTrainer(config=config, policy=SoftmaxPolicy(3, num_states=2), reward_model=rewards)
        evaluated = {"eval_states": np.tile(STATES, 20), "eval_every": 10}
        trained.train(STATES, num_iterations=20, callbacks=[OptunaPruning(trial)], **evaluated)
        return trained.evaluate(STATES)["eval/avg_reward"]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.GridSampler({"learning_rate": [1e-6, 0.3]}, seed=0)
    study = optuna.create_study(direction="maximize", pruner=Threshold(), sampler=sampler)
    study.optimize(objective, n_trials=2)
    by_rate = {trial.params["learning_rate"]: trial for trial in study.trials}
    assert by_rate[1e-6].state.name == "PRUNED"
    assert list(by_rate[1e-6].intermediate_values) == [10]
    assert by_rate[0.3].state.name == "COMPLETE"
    assert list(by_rate[0.3].intermediate_values) == [10, 20]


def test_the_error_leaves_train_as_it_is_and_the_trainer_unharmed() -> None:
    pruned, trial = trainer(), optuna.create_study(direction="maximize", pruner=Threshold()).ask()
    unmeasured = OptunaPruning(trial, "eval/avg_reward")
    with pytest.raises(optuna.TrialPruned, match=r"rewards/mean = 0\.\d+ at iteration 1"):
        pruned.train(STATES, num_iterations=5, callbacks=[unmeasured, OptunaPruning(trial, "rewards/mean")])
    assert list(trial.study.trials[0].intermediate_values) == [1]
    whole = trainer()
    whole.train(STATES, num_iterations=1)
    assert pruned.iteration == 1
    for name, weights in whole.policy.get_parameters().items():
        assert torch.equal(pruned.policy.get_parameters()[name], weights)
    pruned.train(STATES, num_iterations=4, callbacks=[unmeasured])
    assert pruned.iteration == 4


# --- trackio's own interface finds in its database what was logged


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


def test_trackio_has_a_run_and_its_resume_as_one_run_with_every_iteration_once(tmp_path: Path) -> None:
    started, resumed = resumed_run(lambda: TrackioSink(tmp_path / "run", project="resumed", **QUIET), tmp_path)

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


def test_tables_have_every_column_and_pictures_of_the_rows_are_images(tmp_path: Path) -> None:
    with TrackioSink(tmp_path, project="tables", **QUIET) as sink:
        sink.log({"nan": float("nan"), "infinity": float("inf")}, 1)
        sink.log_samples(samples(), 1)
        sink.log_samples(pictured_samples(), 2)
    (run,) = runs("tables")
    found = rows("tables", run)
    assert values(found, "train/samples")[1]["_value"][0] == FIRST_ROW
    assert values(found, "train/pictures/1")[2]["_type"] == "trackio.image"
    assert not values(found, "train/pictures/2")  # the states have the same one


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
                logged = lambda: any("train/samples" in row for row in rows("broken", sink._run))  # noqa: E731
                eventually(logged, "trackio has written the iteration")
                (trackio_folder / "broken.db").unlink()
                (trackio_folder / "broken.db").mkdir()

    sink = TrackioSink(tmp_path, project="broken", **QUIET)
    with pytest.warns(UserWarning, match="trackio"), sink:
        trained = train([sink], 3, callbacks=[Breaking()])
    assert len(trained.history) == 3


def test_runs_with_the_same_name_stay_apart_when_one_is_resumed(tmp_path: Path) -> None:
    for folder, iteration in (("a", 1), ("b", 1), ("a", 2)):
        with TrackioSink(tmp_path / folder / "run", project="names", **QUIET) as sink:
            sink.start({}, iteration)
            sink.log({"x": float(iteration)}, iteration)
    found = {run.name: values(rows("names", run), "x") for run in runs("names")}
    assert found == {"run": {1: 1.0, 2: 2.0}, "run-2": {1: 1.0}}


# --- the files that Weights & Biases writes offline hold what was logged


def wandb_tables(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    """Tables by their step."""
    files = folder.glob(f"wandb/offline-run-*/files/media/table/{name}_*.table.json")
    return {int(file.name.split("_")[1]): json.loads(file.read_text()) for file in files}


@pytest.mark.slow
def test_wandb_has_a_run_and_its_resume_as_one_run_with_every_iteration_once(tmp_path: Path) -> None:
    folder, tags = tmp_path / "run", iter((["small"], ()))
    started, resumed = resumed_run(
        lambda: WandbSink(folder, project="bandits", name="first try", tags=next(tags)), tmp_path
    )

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
        expected = {name: value for name, value in metrics[row["_step"]].items() if not name.startswith("time/")}
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        assert row["train/rewards/_type"] == row["train/advantages/_type"] == "histogram"
        assert sum(row["train/rewards/values"]) == 8
    assert set(wandb_tables(folder, "train/samples")) == {1, 6}, "the next tables would come after 30 seconds"
    assert set(wandb_tables(folder, "eval/samples")) == {2, 6}


@pytest.mark.slow
def test_tables_have_every_column_and_pictures_and_may_come_with_each_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    with WandbSink(tmp_path, mode="offline", tables_every=0) as sink:
        for iteration, found in ((1, samples()), (2, pictured_samples())):
            sink.log({"nan": float("nan"), "infinity": float("inf")}, iteration)
            sink.log_samples(found, iteration)
    assert [row["_step"] for row in WandbFiles(tmp_path).history()[0]] == [1, 2]
    tables = wandb_tables(tmp_path, "train/samples")
    assert set(tables) == {1, 2}
    assert dict(zip(tables[1]["columns"], tables[1]["data"][0], strict=True)) == FIRST_ROW
    [file] = tmp_path.glob("wandb/offline-run-*/files/media/images/train/pictures/*.png")
    assert file.name.startswith("1_2_")  # the number of the picture, and the iteration


def test_a_folder_that_vanishes_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    class Vanishing:
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            if trainer.iteration == 2:
                shutil.rmtree(tmp_path / "run")

    with pytest.warns(GRPOWarning, match="WandbSink.log raised FileNotFoundError"), WandbSink(tmp_path / "run") as sink:
        trained = train([sink], 5, callbacks=[Vanishing()])
    assert len(trained.history) == 5
    wandb.teardown()  # its service would be a child process of the tests that follow


# --- TensorBoard's own reader finds in the event files what was logged


def events_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0}).Reload()


def scalars(events: EventAccumulator, name: str) -> dict[int, float]:
    found = events.Scalars(name)
    assert len({one.step for one in found}) == len(found), f"{name} has a step twice"
    return {one.step: one.value for one in found}


def text(events: EventAccumulator, name: str) -> dict[int, str]:
    return {one.step: one.tensor_proto.string_val[0].decode() for one in events.Tensors(name)}


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """Writing beyond this size raises an OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_metric_of_a_run_is_a_scalar_and_the_settings_are_a_text_and_hyperparameters(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path / "run") as sink:
        trained = train([sink], 4, eval_states=STATES, eval_every=2)
    events = events_of(tmp_path / "run")
    for name in {name for metrics in trained.history for name in metrics}:
        expected = {number: row[name] for number, row in enumerate(trained.history, 1) if row.get(name) is not None}
        assert scalars(events, name) == pytest.approx(expected, rel=1e-6), name
    settings = json.loads(text(events, "settings")[1].removeprefix("```json\n").removesuffix("\n```"))
    assert settings["config"] == trained.config.to_dict()
    assert settings["policy"] == "SoftmaxPolicy"
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["config.learning_rate"].number_value == 0.1
    assert values["config.objective.surrogate.kind"].string_value == "clip"
    assert values["config.compile_objective"].WhichOneof("kind") == "bool_value"


def test_samples_are_tables_pictures_and_histograms_of_the_finite_values_and_odd_numbers_no_error(
    tmp_path: Path,
) -> None:
    none = torch.empty(0)
    with TensorBoardSink(tmp_path) as sink:
        sink.log_samples(samples("train"), 1)
        sink.log({"nan": float("nan"), "infinity": float("inf"), "large": 1e300}, 1)  # float32 has no 1e300
        sink.log_samples(samples("eval", offset=1.0), 1)
        sink.log_samples(Samples(kind="eval", states=[], actions=[], group_ids=none.long(), rewards=none), 2)
        sink.log_samples(pictured_samples(), 3)
    events = events_of(tmp_path)
    assert scalars(events, "nan")[1] != scalars(events, "nan")[1]
    assert scalars(events, "infinity") == scalars(events, "large") == {1: float("inf")}
    assert text(events, "train/samples")[1].splitlines() == [
        "| state | action | reward | reward/style | advantage | steps |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 1 + 1 = ? | 2 | 1 | 0.5 | 0.5 | 1 |",
        "| 1 + 1 = ? | three | 0 | 0.25 | -0.5 | 5 |",
        r"| a \| b<br>c | \_x\_? |  | 0.125 | 0 | 3 |",
        r"| a \| b<br>c | &lt;y\> | 0.5 | 0 | 0.25 | 3 |",
    ]
    assert text(events, "eval/samples")[2] == ""
    assert set(events.Tags()["histograms"]) == {"train/rewards", "train/advantages", "eval/rewards"}
    [histogram] = [one.histogram_value for one in events.Histograms("eval/rewards")]
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (1.0, 2.0, 3, 4.5)
    assert histogram.sum_squares == 1.0 + 4.0 + 2.25
    assert sum(histogram.bucket) == 3
    assert histogram.bucket_limit[-1] == 2.0
    assert events.Tags()["images"] == ["train/pictures/1"]  # the states have the same one
    [image] = events.Images("train/pictures/1")
    assert (image.step, image.width, image.height) == (3, 1, 1)
    assert "data:image/png;base64," + base64.b64encode(image.encoded_image_string).decode() == Dot.link


def test_a_resumed_run_shows_repeated_iterations_once_with_their_new_values(tmp_path: Path) -> None:
    _, resumed = resumed_run(lambda: TensorBoardSink(tmp_path / "run"), tmp_path)
    assert len(resumed.history) == 5, "the run must repeat iterations 4 and 5"
    events = events_of(tmp_path / "run")
    found = scalars(events, "rewards/mean")
    assert list(found) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [found[number] for number in range(4, 9)] == pytest.approx([row["rewards/mean"] for row in resumed.history])
    assert list(text(events, "settings")) == [1, 4]


def test_a_new_run_replaces_the_old_one_and_a_later_start_its_own_iterations(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with TensorBoardSink(tmp_path, name="run") as sink:
            sink.start({}, 1)
            for number in (1, 2, 3):
                sink.log({"x": value, f"y{number}": value}, number)
            sink.start({}, 2)
            sink.log({"x": 20.0}, 2)
    assert scalars(events_of(tmp_path / "run"), "x") == {1: 2.0, 2: 20.0}
    assert events_of(tmp_path / "run").Scalars("y2") == []


def test_a_disk_that_is_full_is_reported_once_and_the_run_goes_on(tmp_path: Path) -> None:
    message = r"TensorBoardSink\.log\w* raised OSError in iteration \d+: .* switched off"
    sink = TensorBoardSink(tmp_path / "run")
    with pytest.warns(GRPOWarning, match=message) as warned, sink, files_at_most(20_000):
        trained = train([sink], 30)
    assert len(trained.history) == 30
    assert len(warned) == 1
    assert 1 <= len(scalars(events_of(tmp_path / "run"), "rewards/mean")) < 30, "what fitted can be read"


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated")  # in TensorBoard
def test_tensorboard_shows_a_text_of_a_table_as_it_is() -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    text = r"\ ` * _ { } [ ] ( ) > # + - . ! | ~ & < <b>x</b> &lt; **bold** [a](b)"
    page = markdown_to_safe_html(markdown_table([{"state": text}]))
    (cell,) = re.findall(r"<td>(.*?)</td>", page)
    assert html.unescape(cell) == text
