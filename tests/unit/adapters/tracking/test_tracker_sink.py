"""What every sink does: it opens nothing before it is used, opens new runs and continues old ones, and checks its arguments."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.tracking import MLflowSink, OptunaPruning, TensorBoardSink, TrackioSink, WandbSink
from adapters.tracking.tracker_sink import TrackerSink
from adapters.tracking.values import flat, histogram_of
from grpo import ConfigError, MetricSink
from tests.support.tracked_runs import samples

SINKS = [MLflowSink, TensorBoardSink, TrackioSink, WandbSink]


class Recorder(TrackerSink):
    """Keeps what a tracker would be told."""

    package = "json"

    def __init__(self, folder: Path, *, fails: bool = False) -> None:
        super().__init__(folder)
        self.told: list[Any] = []
        self.fails = fails

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
def test_a_sink_that_is_not_used_opens_nothing(make: Any, tmp_path: Path) -> None:
    sink = make(tmp_path / "run", log_every=10)
    assert isinstance(sink, MetricSink)
    assert (sink.log_every, sink.name) == (10, "run")
    sink.close()
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


@pytest.mark.parametrize("make", SINKS)
def test_a_package_that_is_missing_is_named_with_the_extra(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs the package \w+, .*pip install "\.\[tracking\]" in the checkout'):
        make(tmp_path)


def test_optuna_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"OptunaPruning needs the package optuna, .*pip install optuna\."):
        OptunaPruning(None)


def test_a_folder_with_the_name_of_a_package_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tracker_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Recorder, "package", "tracker_of_nobody")
    with pytest.raises(ConfigError, match="Recorder needs the package tracker_of_nobody"):
        Recorder(tmp_path)


@pytest.mark.parametrize("make", SINKS)
def test_log_every_is_a_count(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log_every"):
        make(tmp_path, log_every=0)


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
        ("open", 0),
        ("settings", {"a": 1}, 1),
        *[("metrics", 1), ("metrics", 2)],
        ("settings", {"a": 2}, 2),
        *[("metrics", 3), ("samples", 3)],
        ("close", False, False),
        ("open", 8),
        ("settings", {}, 1),
    ]
    other = Recorder(tmp_path)
    other.log({}, 2)
    assert other.told == [("open", 8), ("metrics", 2)]


def test_an_id_file_is_replaced_completely(tmp_path: Path) -> None:
    sink = Recorder(tmp_path)
    sink.log({}, 7)
    assert json.loads((tmp_path / "json.json").read_text()) == {"id": 0, "iteration": 7}
    assert [path.name for path in tmp_path.iterdir()] == ["json.json"]


def test_a_sink_that_raised_writes_nothing_more_when_it_is_closed(tmp_path: Path) -> None:
    sink = Recorder(tmp_path, fails=True)
    with pytest.raises(OSError, match="full"):
        sink.log({}, 1)
    sink.close()
    sink.close()
    assert sink.told == [("open", 0), ("close", False, True)]


def test_a_sink_that_raised_opens_its_run_again_when_the_next_training_starts(tmp_path: Path) -> None:
    sink = Recorder(tmp_path)
    sink.log({}, 1)
    sink.fails = True
    with pytest.raises(OSError, match="full"):
        sink.log({}, 2)
    sink.fails = False
    sink.start({}, 2)
    sink.log({}, 2)
    sink.close()
    opened = [("open", 0), ("settings", {}, 2), ("metrics", 2), ("close", False, False)]
    assert sink.told == [("open", 0), ("metrics", 1), ("close", False, True), *opened]


def test_an_error_in_the_block_is_passed_on_as_a_failed_run(tmp_path: Path) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    sink = Recorder(tmp_path)
    sink.log({}, 1)
    with pytest.raises(ZeroDivisionError), sink:
        fails()
    assert sink.told[-1] == ("close", True, False)


def test_settings_get_their_full_names() -> None:
    settings = {"config": {"lr": 0.1, "reward": {"timeout": None}, "on": True}, "parts": [1, "a"], "n": 3}
    assert flat(settings) == {
        "config.lr": 0.1,
        "config.reward.timeout": "None",
        "config.on": True,
        "parts": '[1, "a"]',
        "n": 3,
    }


def test_a_histogram_counts_the_finite_values_in_bins_of_equal_width() -> None:
    histogram = histogram_of(torch.tensor([0.0, 0.0, 32.0, float("inf"), float("nan")], dtype=torch.bfloat16))
    assert histogram is not None
    assert histogram.counts.tolist() == [2, *[0] * 30, 1]
    assert histogram.edges.tolist() == list(range(33))
    assert histogram_of(torch.tensor([float("nan")])) is None
